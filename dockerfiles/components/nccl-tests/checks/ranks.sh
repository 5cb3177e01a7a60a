# Without a driver both ranks stop at their first call of CUDA, and mpirun ends the slower one when the first has
# gone: so each waits for the other. Only the first rank of a world prints the headline: two headlines would be two
# worlds of one rank, which is what an MPI looks like that was not started by its own mpirun.
test='/opt/nccl-tests/build/all_reduce_perf -b 8 -e 8 -g 1'
driver=$(ldconfig -p | grep -F libcuda.so.1 || true)
if [ "$SPREAD" = slurm ]; then # srun has started one for each rank
  if [ -n "$driver" ]; then exec $test; fi
  said=$($test 2>&1 || true)
  echo "$said"
  sleep 3
  grep -F 'CUDA driver version is insufficient' <<< "$said"
  exit
fi
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
