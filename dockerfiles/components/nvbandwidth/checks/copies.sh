# Copy in each direction with the copy engines. With only one GPU, the tests between GPUs are waived.
nvbandwidth ${FORMAT:-} -t host_to_device_memcpy_ce device_to_host_memcpy_ce host_to_device_bidirectional_memcpy_ce \
  device_to_device_memcpy_read_ce device_to_device_memcpy_write_ce device_to_device_bidirectional_memcpy_write_ce
