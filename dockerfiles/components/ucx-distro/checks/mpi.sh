# The distribution's ucx_perftest is an MPI program, which runs only if MPI_Init connects two ranks.
test='ucx_perftest -t tag_lat -s 8 -n 100 -w 10'
if [ "$SPREAD" = slurm ]; then
  $test # srun has started one for each rank
  exit
fi
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
# shellcheck disable=SC2086 # words
mpirun --host "${IMAGEBUILD_NODES// /,}" -n 2 $test
