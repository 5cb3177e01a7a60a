# Without a driver both ranks stop at their first call of CUDA; mpirun is told to let the slower one get there.
# Only the first rank of a world prints the headline: two headlines would be two worlds of one rank, which is
# what an MPI looks like that was not started by its own mpirun.
test=(/opt/nccl-tests/build/all_reduce_perf -b 8 -e 8 -g 1)
if ldconfig -p | grep -q 'libcuda\.so\.1'; then
  mpirun -n 1 "${test[@]}"
  exit
fi
mpirun -n 2 --oversubscribe --rto error-nonzero-status=false "${test[@]}" 2>&1 | tee /tmp/ranks
[ "$(grep -c 'Collective test starting' /tmp/ranks)" = 1 ]
[ "$(grep -c 'CUDA driver version is insufficient' /tmp/ranks)" = 2 ]
