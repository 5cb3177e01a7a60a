cd "$(mktemp -d)"
cat > sum.c <<'EOF'
#include <mpi.h>
#include <mpi-ext.h>
#include <stdio.h>
int main(int argc, char **argv) {
  int rank, size, sum = 0;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  int mine = rank + 1;
  MPI_Allreduce(&mine, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  if (rank == 0) printf("sum %d over %d ranks\n", sum, size);
  MPI_Finalize();
  return !(MPIX_CUDA_AWARE_SUPPORT && size == 2 && sum == 3);
}
EOF
mpicc sum.c -o sum
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
# Open MPI does not use UCX without InfiniBand, unless all transports are allowed.
ucx=(--mca pml ucx --mca opal_common_ucx_tls any --mca opal_common_ucx_devices any)
ucc=(--mca coll_ucc_enable 1 --mca coll_ucc_priority 100 --mca coll_ucc_verbose 3)
mpirun -n 2 --oversubscribe "${ucx[@]}" ./sum
mpirun -n 2 --oversubscribe "${ucx[@]}" "${ucc[@]}" ./sum 2>&1 | tee ucc
grep 'running ucc allreduce' ucc
# Without UCX, Open MPI 4 has no shared memory transport that works in a container.
tcp=()
case $(ompi_info --version) in *' v4.'*) tcp=(--mca btl "tcp,self") ;; esac
mpirun -n 2 --oversubscribe --mca pml ob1 "${tcp[@]}" ./sum
