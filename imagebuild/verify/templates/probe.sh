# shellcheck shell=sh
# Print facts about the host and the image, each as a line `imagebuild-probe:NAME=VALUE`. The last fact is `end`.
PATH="$PATH:/usr/sbin:/sbin"
fact() { echo "imagebuild-probe:$1=$2"; }
fact uid "$(id -u 2>/dev/null)"
fact user "$(id -un 2>/dev/null)"
for tool in bash nvidia-smi setpriv ssh ssh-keygen sshd timeout; do
  command -v "$tool" > /dev/null 2>&1 && fact tool "$tool"
done
fact gpus "$(timeout 40 nvidia-smi -L 2>/dev/null | grep -c '^GPU ')"
for state in /sys/class/infiniband/*/ports/*/state; do
  [ -r "$state" ] && fact port "$state $(cat "$state")"
done
for device in /dev/infiniband/uverbs*; do
  [ -e "$device" ] && fact verbs "$device"
done
# shellcheck disable=SC3045
fact memlock "$(ulimit -l 2>/dev/null)"
fact job "$SLURM_JOB_ID"
fact hostlist "$(scontrol show hostnames "$SLURM_JOB_NODELIST" 2>/dev/null | tr '\n' ' ')"
fact host "$(uname -n 2>/dev/null)"
fact kernel "$(uname -r 2>/dev/null)"
fact machine "$(uname -m 2>/dev/null)"
fact cpus "$(nproc 2>/dev/null)"
fact memory "$(sed -n 's/^MemTotal: *//p' /proc/meminfo 2>/dev/null)"
fact driver "$(sed -n 's/^NVRM version: *//p' /proc/driver/nvidia/version 2>/dev/null)"
fact ofed "$(cat /sys/module/mlx5_core/version 2>/dev/null)"
fact os "$(sed -n 's/^PRETTY_NAME=//p' /etc/os-release 2>/dev/null)"
fact end .
