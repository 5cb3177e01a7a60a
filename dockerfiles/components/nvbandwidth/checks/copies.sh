# Each copy engine's direction. Between GPUs there is nothing to measure where there is one.
nvbandwidth ${FORMAT:-} -t host_to_device_memcpy_ce device_to_host_memcpy_ce host_to_device_bidirectional_memcpy_ce \
  device_to_device_memcpy_read_ce device_to_device_memcpy_write_ce device_to_device_bidirectional_memcpy_write_ce
