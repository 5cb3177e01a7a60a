# shellcheck shell=sh
# Print the hardware and the settings of a place, as comments in the log of a bisection.
{
  echo "host $(uname -n), $(uname -srm), $(nproc) CPUs"
  sed -n 's/^PRETTY_NAME=//p' /etc/os-release
  sed -n 's/^NVRM version: */driver /p' /proc/driver/nvidia/version
  timeout 30 nvidia-smi -L | sed 's/ (UUID.*//' | sort | uniq -c | head -n 32
  timeout 30 nvidia-smi topo -m | sed 's/\x1b\[[0-9;]*m//g' | head -n 40
  for device in /sys/class/infiniband/*; do
    [ -e "$device" ] && echo "${device##*/} $(cat "$device/fw_ver" "$device/ports/1/rate" "$device/ports/1/link_layer" | tr '\n' ' ')"
  done
  env | grep -E '^(NCCL|UCX|OMPI_MCA|CUDA_VISIBLE|SLURM_JOB_(ID|NODELIST|NUM_NODES))' | sort
} 2> /dev/null | sed 's/^/# place: /'
