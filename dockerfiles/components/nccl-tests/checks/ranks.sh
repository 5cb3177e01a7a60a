# Without a driver, both ranks fail at their first CUDA call. mpirun would kill the slower rank when the first one ends, so
# each waits for the other. Only rank 0 prints the headline. Two headlines mean two singletons, which is what happens if
# ranks are not started by the mpirun of their own MPI.
test='/opt/nccl-tests/build/all_reduce_perf -b 8 -e 8 -g 1'
driver=$(perl -e 'require DynaLoader; print "yes" if DynaLoader::dl_load_file("libcuda.so.1", 0)')
start=(mpirun -n 2 --oversubscribe)
if [ "$SPREAD" = nodes ]; then
  read -r -a nodes <<< "$IMAGEBUILD_NODES"
  start+=(--host "${nodes[0]},${nodes[1]}")
fi
if [ -n "$driver" ]; then
  if [ "$SPREAD" = here ]; then start=(mpirun -n 1); fi
  "${start[@]}" $test
  exit
fi
said=$(mktemp)
"${start[@]}" sh -c "$test; sleep 3" 2>&1 | tee "$said" || true
[ "$(grep -c 'Collective test starting' "$said")" = 1 ]
[ "$(grep -c 'CUDA driver version is insufficient' "$said")" = 2 ]
