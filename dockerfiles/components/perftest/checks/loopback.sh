# Write to GPU memory through peer memory if the kernel supports it, otherwise through dma-buf.
cuda=(--use_cuda=0)
if [ ! -e /sys/module/nvidia_peermem ]; then cuda+=(--use_cuda_dmabuf); fi
ib_write_bw --all --report_gbits "${cuda[@]}" > /tmp/server 2>&1 &
trap 'kill $! 2> /dev/null || true; cat /tmp/server' EXIT
sleep 3
ib_write_bw --all --report_gbits "${cuda[@]}" localhost
