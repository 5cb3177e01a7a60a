# mpirun starts two ranks on each node by ssh, and each prints its user, node and rank. With PORT, the sshd servers are
# started by the user, as in pods without root.
read -r -a nodes <<< "$IMAGEBUILD_NODES"
servers=()
finish() {
  for node in "${!servers[@]}"; do ssh "${nodes[node]}" kill "${servers[node]}"; done
}
trap finish EXIT
if [ -n "${PORT:-}" ]; then
  for node in "${nodes[@]}"; do
    servers+=("$(ssh "$node" "/usr/sbin/sshd -D -e -p $PORT > /dev/null 2>&1 < /dev/null & echo \$!")")
    for _ in $(seq 100); do
      if (: < "/dev/tcp/$node/$PORT") 2> /dev/null; then break; fi
      sleep 0.1
    done
    [ "$(ssh -p "$PORT" -o BatchMode=yes "$node" id -un)" = "$(id -un)" ]
    if ssh -p "$PORT" -o BatchMode=yes "root@$node" true; then
      echo "the server of $(id -un) lets root in"
      exit 1
    fi
  done
  # Open MPI 4 and 5 have different names for this setting.
  export PRTE_MCA_plm_ssh_args="-p $PORT" OMPI_MCA_plm_rsh_args="-p $PORT"
fi
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
# The host name of a node may differ from the name for ssh.
called=("$(hostname)")
for node in "${nodes[@]:1}"; do called+=("$(ssh -o BatchMode=yes "$node" hostname)"); done
same=$(printf '%s\n' "${called[@]}" | sort | uniq -d)
[ -z "$same" ] || { echo "several nodes have the host name $same"; exit 1; }
said=$(mktemp)
hosts=$(printf ',%s:2' "${nodes[@]}")
ranks=$((2 * ${#nodes[@]}))
# shellcheck disable=SC2016 # expanded by each rank
say='echo "$(id -un) on $(hostname): rank $OMPI_COMM_WORLD_RANK of $OMPI_COMM_WORLD_SIZE${PORT:+, port ${SSH_CONNECTION##* }}"'
start=(env SSH_CONNECTION="- - - ${PORT:-}" mpirun --host "${hosts#,}" -n "$ranks")
if [ -n "${PORT:-}" ]; then start+=(-x PORT); fi
"${start[@]}" bash -c "$say" | sort | tee "$said"
for rank in $(seq 0 $((ranks - 1))); do
  echo "$(id -un) on ${called[rank / 2]}: rank $rank of $ranks${PORT:+, port $PORT}"
done | sort | diff - "$said"
