# Two ranks in one world, each stopped by the missing driver, prove that MPI and NCCL are linked.
# On a machine with a driver there is nothing to stop them.
if ldconfig -p | grep -q 'libcuda\.so\.1'; then
  mpirun -n 2 --oversubscribe /opt/nccl-tests/build/all_reduce_perf -b 8 -e 8 -g 1
  exit
fi
mpirun -n 2 --oversubscribe --tag-output /opt/nccl-tests/build/all_reduce_perf -b 8 -e 8 -g 1 > /tmp/ranks 2>&1 &&
  status=0 || status=$?
cat /tmp/ranks
[ "$status" != 0 ]
