# Send data from GPU memory to GPU memory, between two processes on this node.
options=(-p 13338)
if ucx_perftest -h | grep -F 'MPI mode' > /dev/null; then options+=(-P 0); fi
log=$(mktemp)
timeout 100 ucx_perftest "${options[@]}" > "$log" 2>&1 &
trap 'kill $! 2> /dev/null || true; cat "$log"' EXIT
sleep 3
ucx_perftest localhost "${options[@]}" -t tag_bw -s 16777216 -n 200 -w 20 -m cuda
