# Compile a program that adds up a value over all ranks. SPREAD: `nodes` starts ranks on all nodes by ssh; with `slurm`,
# srun has started this script for each rank.
cd "$(mktemp -d)"
cat > sum.c <<'C'
#include <mpi.h>
#include <stdio.h>
int main(int argc, char **argv) {
  char host[MPI_MAX_PROCESSOR_NAME];
  int rank, size, length, sum = 0;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  MPI_Get_processor_name(host, &length);
  int mine = rank + 1;
  MPI_Allreduce(&mine, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  printf("%s: rank %d of %d, sum %d\n", host, rank, size, sum);
  MPI_Finalize();
  return sum != size * (size + 1) / 2;
}
C
mpicc sum.c -o sum
if [ "$SPREAD" = slurm ]; then
  ./sum
  exit
fi
read -r -a nodes <<< "$IMAGEBUILD_NODES"
program=/tmp/sum-$(id -un)
for node in "${nodes[@]}"; do
  # shellcheck disable=SC2029 # the name is the same everywhere
  ssh "$node" "cat > $program && chmod +x $program" < sum
done
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
ranks=4
hosts=$(printf ",%s:$((ranks / ${#nodes[@]}))" "${nodes[@]}")
# Open MPI does not use UCX without InfiniBand, unless all transports are allowed. Without UCX, Open MPI 4 has no shared
# memory transport that works in a container.
any=(--mca opal_common_ucx_tls any --mca opal_common_ucx_devices any)
tcp=()
case $(ompi_info --version) in *' v4.'*) tcp=(--mca btl "tcp,self") ;; esac
for layer in ucx ob1; do
  options=("${any[@]}")
  if [ "$layer" = ob1 ]; then options=("${tcp[@]}"); fi
  mpirun --host "${hosts#,}" -n "$ranks" --mca pml "$layer" "${options[@]}" "$program" | tee "$layer"
  [ "$(grep -c ", sum $((ranks * (ranks + 1) / 2))\$" "$layer")" = "$ranks" ]
  [ "$(sed 's/: .*//' "$layer" | sort -u | wc -l)" = "${#nodes[@]}" ]
done
