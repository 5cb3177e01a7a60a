# Without a driver both ranks stop at their first call of CUDA, and mpirun ends the slower one when the first has
# gone: so each waits for the other. Only the first rank of a world prints the headline: two headlines would be two
# worlds of one rank, which is what an MPI looks like that was not started by its own mpirun.
test='/opt/nccl-tests/build/all_reduce_perf -b 8 -e 8 -g 1'
if ldconfig -p | grep -q 'libcuda\.so\.1'; then
  mpirun -n 1 $test
  exit
fi
mpirun -n 2 --oversubscribe sh -c "$test; sleep 3" 2>&1 | tee /tmp/ranks || true
[ "$(grep -c 'Collective test starting' /tmp/ranks)" = 1 ]
[ "$(grep -c 'CUDA driver version is insufficient' /tmp/ranks)" = 2 ]
