# Run a collective on all GPUs and compare every element. SPREAD: `process` is one process for all GPUs, `ranks` is one
# MPI rank for each GPU, `nodes` is ranks on all nodes.
program=${OPERATION}_perf
visible=${CUDA_VISIBLE_DEVICES:-}
memory=$(nvidia-smi ${visible:+--id="$visible"} --query-gpu=memory.free --format=csv,noheader,nounits)
gpus=$(wc -l <<< "$memory")
free=$(sort -n <<< "$memory" | head -n 1) # MiB
# GPUs that share the CPU's memory do not report their free memory.
case $free in *[!0-9]*) free=8192 ;; esac

# Each GPU needs three buffers of this size: sent, received and expected data. The rest is for CUDA and NCCL.
limit=${IMAGEBUILD_LARGEST:-$((8 << 30))}
# Use a small size without RDMA: large sizes over sockets take minutes, and their speed is not judged.
if [ "$SPREAD" = nodes ] && ! ls /sys/class/infiniband/* > /dev/null 2>&1; then limit=$((64 << 20)); fi
largest=$((1 << 20))
while ((largest * 2 <= limit && largest * 6 <= (free - 4096) << 20)); do largest=$((largest * 2)); done

# The program writes all environment variables to its JSON.
for name in $(compgen -e); do
  case ${name^^} in *TOKEN* | *SECRET* | *PASSW* | *CREDENTIAL* | *KEY*) unset "$name" ;; esac
done
export NCCL_DEBUG=${NCCL_DEBUG:-INFO} NCCL_DEBUG_SUBSYS=${NCCL_DEBUG_SUBSYS:-INIT,ENV,NET,GRAPH}
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
mpirun=(mpirun --oversubscribe --bind-to none)
case $SPREAD in
  process) start=() each=$gpus ;;
  ranks) start=("${mpirun[@]}" -n "$gpus") each=1 ;;
  nodes)
    read -r -a nodes <<< "$IMAGEBUILD_NODES"
    hosts=$(printf ",%s:$gpus" "${nodes[@]}")
    start=("${mpirun[@]}" --host "${hosts#,}" -n $((gpus * ${#nodes[@]}))) each=1
    # mpirun passes only the named variables to other nodes.
    for name in $(compgen -e); do
      case $name in NCCL_* | UCX_* | CUDA_*) start+=(-x "$name") ;; esac
    done
    ;;
esac
json=()
result=$(mktemp -d)/result.json
if "$program" -h | grep -e -J > /dev/null; then json=(-J "$result"); fi
words=("$program" -b 8 -e "$largest" -f 2 -g "$each" -w 5 -n 20 -c 1 "${json[@]}") command=("${start[@]}" "${words[@]}")
# The variables tell a reader of the log which algorithms NCCL could use.
echo "$(env | grep '^NCCL_[A-Z0-9_]*=' | sort | tr '\n' ' ')${command[*]}"
# NCCL's messages say what carried the data. `verify` defines these functions.
messages=$(mktemp -d)
rank="$(declare -f keep_messages end_messages print_messages); keep_messages $messages || true; "'"$@"'
measure() {
  local status=0
  trap : TERM # first print the messages
  "${start[@]}" bash -c "$rank" rank "${words[@]}" || status=$?
  print_messages "$messages"/* || true
  return "$status"
}
trap : TERM
status=0
measure 2>&1 | merged || status=$?
rm -rf "$messages"
if [ -s "$result" ]; then cat "$result"; fi
exit "$status"
