# The server is on the second node.
read -r -a nodes <<< "$IMAGEBUILD_NODES"
options=(--all --report_gbits)
if [ "${MEMORY:-host}" = gpu ]; then
  options+=(--use_cuda=0)
  if [ ! -e /sys/module/nvidia_peermem ]; then options+=(--use_cuda_dmabuf); fi
fi
ssh "${nodes[1]}" timeout 90 ib_write_bw "${options[@]}" > /tmp/server 2>&1 &
trap 'kill $! 2> /dev/null || true; echo "on ${nodes[1]}:"; cat /tmp/server' EXIT
sleep 3
ib_write_bw "${options[@]}" "${nodes[1]}"
