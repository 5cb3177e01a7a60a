if ! command -v all_reduce_perf; then
  echo 'no nccl-tests in this image'
  exit 77
fi
# NCCL must use this network, also between GPUs of one node.
export NCCL_NET_PLUGIN=ofi NCCL_NET=Libfabric NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1
export NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET
if ! grep -l -x 0x1d0f /sys/class/infiniband/*/device/vendor; then
  # Without EFA, use another protocol of the plug-in, over TCP. In tests with two GPUs in one process, libfabric's `tcp`
  # provider alone did not finish.
  export FI_PROVIDER='tcp;ofi_rxm' OFI_NCCL_PROTOCOL=SENDRECV
fi
all_reduce_perf -b 8 -e 16M -f 2 -g "$(find /dev -maxdepth 1 -name 'nvidia[0-9]*' | wc -l)" -c 1
