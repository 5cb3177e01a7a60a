# Load the plug-in without NVSHMEM itself, which would need a driver before it loads a plug-in.
start=(mpirun -n 2 --oversubscribe)
if [ "$SPREAD" = nodes ]; then
  read -r -a nodes <<< "$IMAGEBUILD_NODES"
  start+=(--host "${nodes[0]},${nodes[1]}")
fi
"${start[@]}" nvshmem-perf bootstrap "/opt/nvshmem/lib/nvshmem_bootstrap_$PLUGIN.so.3"
