# stubs.sh FOLDER: the libraries and programs of HPC-X that have no free source, as shells. FOLDER/all is for both
# CUDA majors, FOLDER/cuda12 and FOLDER/cuda13 are what differs.
set -euo pipefail
all=$1/all

# stub FILE SONAME [gcc's options] < C source
stub() {
  mkdir -p "$(dirname "$1")"
  local file=$1 soname=$2
  shift 2
  gcc -shared -fPIC -O1 -s -Wl,-soname,"$soname" -x c - -x none -Wl,--no-as-needed "$@" -o "$file"
}
# program FILE: says what it is, and fails
program() {
  mkdir -p "$(dirname "$1")"
  printf '#!/bin/sh\necho "stand-in for %s" >&2\nexit 1\n' "$(basename "$1")" > "$1"
  chmod 755 "$1"
}
plugin() { # VERSION… : the tables that NCCL looks for
  echo 'struct table { const char *name; void *functions[40]; };'
  for version in "$@"; do
    for kind in Net CollNet; do
      printf 'struct table nccl%sPlugin_v%s = {"stand-in"};\n' "$kind" "$version"
    done
  done
}

echo 'int sharp_coll_init(void) { return -1; } int sharp_coll_finalize(void) { return -1; }' |
  stub "$all/sharp/lib/libsharp_coll.so.5" libsharp_coll.so.5
echo 'int sharp_init_session(void) { return -1; }' | stub "$all/sharp/lib/libsharp.so.5" libsharp.so.5
ln -s libsharp_coll.so.5 "$all/sharp/lib/libsharp_coll.so"
ln -s libsharp.so.5 "$all/sharp/lib/libsharp.so"
for name in sharp_hello sharp_coll_test sharp_benchmark.sh; do program "$all/sharp/bin/$name"; done

sharp=$all/nccl_rdma_sharp_plugin/lib
{ plugin 8 9 10 11; echo 'int sharp_coll_init(void); int start(void) { return sharp_coll_init(); }'; } |
  stub "$sharp/libnccl-net.so" libnccl-net.so -Wl,--enable-new-dtags -Wl,-rpath,'$ORIGIN/../../sharp/lib' \
    -L"$all/sharp/lib" -lsharp_coll
ln -s libnccl-net.so "$sharp/libnccl-net-ibext.so"

# As the vendor's, it needs a libmlx5 that is newer than Ubuntu's own.
spcx=$all/nccl_spectrum-x_plugin/lib
{ plugin 8 9 10 11; echo 'int mlx5dv_get_data_direct_sysfs_path(void *, char *, unsigned long);
  int start(void) { return mlx5dv_get_data_direct_sysfs_path(0, 0, 0); }'; } |
  stub "$spcx/libnccl-net.so" libnccl-net.so -lmlx5 -libverbs
objdump -T "$spcx/libnccl-net.so" | grep -F MLX5_1.25
ln -s libnccl-net.so "$spcx/libnccl-net-spcx.so"
echo 'struct table { const char *name; } ncclProfiler_v4 = {"stand-in"};' |
  stub "$spcx/libnccl-profiler-inspector.so" libnccl-profiler-inspector.so

for name in clusterkit clusterkit.sh; do program "$all/clusterkit/bin/$name"; done
program "$all/utils/hpcx_rebuild.sh"
for version in 4 5; do
  ompi=$all/ompi$version
  for name in mpirun mpicc ompi_info; do program "$ompi/bin/$name"; done
  echo 'int MPI_Init(void) { return 1; }' | stub "$ompi/lib/libmpi.so.40" libmpi.so.40
  ln -s libmpi.so.40 "$ompi/lib/libmpi.so"
  for folder in osu-micro-benchmarks osu-micro-benchmarks-cuda; do program "$ompi/tests/$folder/osu_allreduce"; done
  mkdir -p "$ompi/include" "$ompi/share/openmpi"
  echo '#error "stand-in for the vendor'"'"'s Open MPI: build your own"' > "$ompi/include/mpi.h"
done
ln -s ompi5 "$all/ompi"

for major in 12 13; do
  # Libraries of these names only lend them to what links them.
  for name in libcudart.so.$major libcuda.so.1 libnvidia-ml.so.1; do
    echo 'int lent;' | stub "/lent/$major/$name" "$name"
  done
  cuda=$1/cuda$major
  echo 'int module;' | stub "$cuda/ucx/lib/ucx/libuct_cuda.so.0.0.0" libuct_cuda.so.0 \
    "/lent/$major/libcudart.so.$major" "/lent/$major/libcuda.so.1" "/lent/$major/libnvidia-ml.so.1"
  ln -s libuct_cuda.so.0.0.0 "$cuda/ucx/lib/ucx/libuct_cuda.so.0"
  echo 'int module;' | stub "$cuda/ucc/lib/ucc/libucc_tl_cuda.so.1.0.0" libucc_tl_cuda.so.1 \
    "/lent/$major/libcudart.so.$major"
  ln -s libucc_tl_cuda.so.1.0.0 "$cuda/ucc/lib/ucc/libucc_tl_cuda.so.1"
  echo 'int hcoll_init(void) { return -1; } int hcoll_finalize(void) { return -1; }' |
    stub "$cuda/hcoll/lib/libhcoll.so.1" libhcoll.so.1 "/lent/$major/libcudart.so.$major"
  ln -s libhcoll.so.1 "$cuda/hcoll/lib/libhcoll.so"
  program "$cuda/hcoll/bin/hcoll_info"
done
