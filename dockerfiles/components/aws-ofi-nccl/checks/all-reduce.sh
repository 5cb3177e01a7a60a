if ! command -v all_reduce_perf; then
  echo 'no nccl-tests in this image'
  exit 77
fi
# NCCL may take no other network, and no shorter way between GPUs.
export NCCL_NET_PLUGIN=ofi NCCL_NET=Libfabric NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1
export NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET
if ! grep -l -x 0x1d0f /sys/class/infiniband/*/device/vendor; then
  # The same plug-in, but not the protocol that it has for EFA. Between two GPUs of one process, libfabric's `tcp` alone
  # stopped in the middle.
  export FI_PROVIDER='tcp;ofi_rxm' OFI_NCCL_PROTOCOL=SENDRECV
fi
all_reduce_perf -b 8 -e 16M -f 2 -g "$(find /dev -maxdepth 1 -name 'nvidia[0-9]*' | wc -l)" -c 1
