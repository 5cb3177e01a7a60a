if ! grep -l -x 0x1d0f /sys/class/infiniband/*/device/vendor; then
  echo 'no RDMA device here is an EFA'
  exit 77
fi
fi_info -p efa -t FI_EP_RDM -c FI_HMEM
