# Send data between two nodes by UCX, over RDMA if available, otherwise over TCP.
read -r -a nodes <<< "$IMAGEBUILD_NODES"
port=13337
log=$(mktemp)
options=(-p "$port")
# Without -P 0, a ucx_perftest with MPI would wait for a second rank.
if ucx_perftest -h | grep -F 'MPI mode' > /dev/null; then options+=(-P 0); fi
ssh "${nodes[1]}" timeout 100 ucx_perftest "${options[@]}" > "$log" 2>&1 &
trap 'kill $! 2> /dev/null || true; echo "on ${nodes[1]}:"; cat "$log"' EXIT
listens="grep -q ':$(printf %04X "$port") 0*:0000 0A' /proc/net/tcp /proc/net/tcp6"
for _ in $(seq 100); do
  # shellcheck disable=SC2029 # made here
  if ssh "${nodes[1]}" "$listens"; then break; fi
  sleep 0.1
done
memory=()
if [ "${MEMORY:-host}" = gpu ]; then memory=(-m cuda); fi
# Fewer iterations suffice for TCP, which is slower.
iterations=1000
if [ ! -e /sys/class/infiniband ]; then iterations=100; fi
ucx_perftest "${nodes[1]}" "${options[@]}" -t tag_bw -s 1048576 -n "$iterations" -w 50 "${memory[@]}"
