# ---- nvshmem ---------------------------------------------------------------------------------------
# NVSHMEM: Memory that many GPUs share, so that kernels themselves can read and write the memory of
# other GPUs. LicenseRef-NVIDIA-CUDA-EULA, https://developer.nvidia.com/nvshmem
FROM compiler AS nvshmem
COPY <<'EOF' /tmp/nvshmem-perf.cu
// nvshmem-perf put|get|alltoall: measure kernels that call NVSHMEM, and compare every byte.
// nvshmem-perf bootstrap PLUGIN: test whether the ranks find each other through this plug-in. This needs no GPU.
//
// put and get: rank 0 writes to or reads from rank 1 with 64 blocks, while all other ranks wait. alltoall: the time of
// one call by one block, on all ranks. The tables have the format of NVSHMEM's own tests. 1 GB is 10^9 bytes.
#include <dlfcn.h>
#include <non_abi/nvshmem_version.h>
#include <nvshmem.h>
#include <nvshmemx.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define CHECK(call)                                                                        \
  do {                                                                                     \
    cudaError_t status = (call);                                                           \
    if (status != cudaSuccess) {                                                           \
      std::fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(status));                 \
      std::exit(1);                                                                        \
    }                                                                                      \
  } while (0)

constexpr int BLOCKS = 64, THREADS = 1024, ROUNDS = 20, WARMUP = 5;

// The word at index `i` of the data that rank `pe` sends.
__host__ __device__ uint32_t word(size_t i, int pe) { return uint32_t(i * 2654435761u) ^ (uint32_t(pe + 1) << 20); }

__global__ void fill(uint32_t *data, size_t words, int pe) {
  for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < words; i += gridDim.x * blockDim.x) data[i] = word(i, pe);
}

// Count wrong words. The data have `parts` equal parts. Part p must be equal to part `from` of the data that rank p sent,
// or rank `pe` if it is not negative.
__global__ void compare(const uint32_t *data, size_t words, int parts, int from, int pe, unsigned long long *wrong) {
  size_t part = words / parts;
  for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < words; i += gridDim.x * blockDim.x)
    if (data[i] != word(from * part + i % part, pe < 0 ? int(i / part) : pe)) atomicAdd(wrong, 1ull);
}

__global__ void move(bool put, char *to, const char *from, size_t bytes, int peer, int rounds) {
  size_t part = bytes / gridDim.x, begin = blockIdx.x * part;
  for (int round = 0; round < rounds; round++) {
    if (put)
      nvshmemx_putmem_nbi_block(to + begin, from + begin, part, peer);
    else
      nvshmemx_getmem_nbi_block(to + begin, from + begin, part, peer);
    __syncthreads();
    if (threadIdx.x == 0) nvshmem_quiet();
    __syncthreads();
  }
}

__global__ void __launch_bounds__(THREADS) exchange(char *to, const char *from, size_t bytes, int rounds) {
  for (int round = 0; round < rounds; round++) nvshmemx_alltoallmem_block(NVSHMEM_TEAM_WORLD, to, from, bytes);
}

// The structure that bootstrap plug-ins with version 3 of the interface fill in.
struct Bootstrap {
  int version, rank, ranks, rank_of_node, ranks_of_node;
  int (*allgather)(const void *, void *, int, Bootstrap *);
  int (*alltoall)(const void *, void *, int, Bootstrap *);
  int (*barrier)(Bootstrap *);
  void (*exit)(int);
  int (*finalize)(Bootstrap *);
  void *others[8];
};

int bootstrap(const char *file) {
  constexpr int version = NVSHMEM_BOOTSTRAP_PLUGIN_MAJOR_VERSION * 10000 + NVSHMEM_BOOTSTRAP_PLUGIN_MINOR_VERSION * 100;
  static_assert(version / 10000 == 3, "the interface may have changed");
  void *plugin = dlopen(file, RTLD_NOW);
  auto init = plugin ? reinterpret_cast<int (*)(void *, Bootstrap *, int)>(dlsym(plugin, "nvshmemi_bootstrap_plugin_init")) : nullptr;
  if (!init) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  Bootstrap world = {};
  if (init(nullptr, &world, version)) return 1;
  std::vector<uint32_t> gathered(world.ranks);
  uint32_t own = word(world.rank, world.rank);
  if (world.allgather(&own, gathered.data(), sizeof own, &world)) return 1;
  for (int i = 0; i < world.ranks; i++)
    if (gathered[i] != word(i, i)) return 1;
  if (world.barrier(&world)) return 1;
  std::printf("rank %d of %d: every rank's word arrived through %s\n", world.rank, world.ranks, file);
  return world.finalize(&world) != 0;
}

int main(int count, char **words) {
  const char *test = count > 1 ? words[1] : "";
  if (!std::strcmp(test, "bootstrap") && count > 2) return bootstrap(words[2]);
  bool put = !std::strcmp(test, "put"), get = !std::strcmp(test, "get");
  if (!put && !get && std::strcmp(test, "alltoall")) {
    std::printf("usage: mpirun -n RANKS nvshmem-perf put|get|alltoall|bootstrap PLUGIN; NVSHMEM_BOOTSTRAP=MPI, or PMI with "
                "NVSHMEM_BOOTSTRAP_PMI=PMIX\n");
    return count > 1 && !std::strcmp(test, "-h") ? 0 : 2;
  }
  nvshmem_init();
  int me = nvshmem_my_pe(), ranks = nvshmem_n_pes();
  CHECK(cudaSetDevice(nvshmem_team_my_pe(NVSHMEMX_TEAM_NODE)));
  if (ranks < 2) {
    std::fprintf(stderr, "%d rank: start two ranks or more\n", ranks);
    return 1;
  }
  bool moves = put || get;
  size_t least = moves ? 64 << 10 : 16, most = moves ? size_t(1) << 30 : 1 << 20, all = moves ? most : most * ranks;
  char *from = static_cast<char *>(nvshmem_malloc(all)), *to = static_cast<char *>(nvshmem_malloc(all));
  unsigned long long *wrong = static_cast<unsigned long long *>(nvshmem_malloc(16));
  if (!from || !to || !wrong) {
    std::fprintf(stderr, "rank %d: not enough symmetric memory; set NVSHMEM_SYMMETRIC_SIZE to a larger size\n", me);
    return 1;
  }
  CHECK(cudaMemset(wrong, 0, 16));
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  if (me == 0) {
    cudaDeviceProp device;
    CHECK(cudaGetDeviceProperties(&device, 0));
    std::printf("# NVSHMEM, %d ranks on %s\n", ranks, device.name);
    // Rank 1 is on the same node as rank 0 if that node has several ranks.
    const char *where = nvshmem_team_n_pes(NVSHMEMX_TEAM_NODE) > 1 ? "within_node" : "between_nodes";
    if (moves) std::printf("#%s_bw_%s\n%-10s  %-8s  %-16s\n", test, where, "size(B)", "scope", "BW (GB/sec)");
    else std::printf("#alltoall_latency\n%-10s  %-8s  %-8s  %-8s  %-16s\n", "size(B)", "count", "type", "scope", "latency(us)");
  }
  for (size_t bytes = least; bytes <= most; bytes *= 2) {
    size_t total = moves ? bytes : bytes * ranks;
    fill<<<BLOCKS, THREADS>>>(reinterpret_cast<uint32_t *>(from), total / 4, me);
    CHECK(cudaMemset(to, 0, total));
    CHECK(cudaDeviceSynchronize());
    nvshmem_barrier_all();
    float time = 0;
    for (int rounds : {WARMUP, ROUNDS}) {
      CHECK(cudaEventRecord(begin));
      if (!moves) {
        void *arguments[] = {&to, &from, &bytes, &rounds};
        if (nvshmemx_collective_launch(reinterpret_cast<const void *>(exchange), 1, THREADS, arguments, 0, 0)) return 1;
      } else if (me == 0) {
        move<<<BLOCKS, THREADS>>>(put, to, from, bytes, 1, rounds);
      }
      CHECK(cudaEventRecord(end));
      CHECK(cudaDeviceSynchronize());
      CHECK(cudaEventElapsedTime(&time, begin, end));
    }
    nvshmem_barrier_all();
    const uint32_t *arrived = reinterpret_cast<const uint32_t *>(to);
    if (!moves) compare<<<BLOCKS, THREADS>>>(arrived, total / 4, ranks, me, -1, wrong);
    else if (me == (put ? 1 : 0)) compare<<<BLOCKS, THREADS>>>(arrived, total / 4, 1, 0, put ? 0 : 1, wrong);
    CHECK(cudaDeviceSynchronize());
    nvshmem_barrier_all();
    if (me) continue;
    double us = time * 1e3 / ROUNDS;
    if (moves) std::printf("%-10zu  %-8s  %-16.6f\n", bytes, "block", bytes / us / 1e3);
    else std::printf("%-10zu  %-8zu  %-8s  %-8s  %-16.6f\n", total, total, "mem", "block", us);
    std::fflush(stdout);
  }
  // Add up the counts of all ranks.
  nvshmem_ulonglong_sum_reduce(NVSHMEM_TEAM_WORLD, wrong + 1, wrong, 1);
  unsigned long long sum;
  CHECK(cudaMemcpy(&sum, wrong + 1, 8, cudaMemcpyDefault));
  if (me == 0) std::printf("# %llu words of 4 bytes were wrong\n", sum);
  nvshmem_free(wrong);
  nvshmem_free(to);
  nvshmem_free(from);
  nvshmem_finalize();
  return sum != 0;
}
EOF

RUN --mount=type=secret,id=ca --mount=type=secret,id=pip.conf \
    --mount=type=bind,from=nvcc,source=/usr/local/cuda,target=/usr/local/cuda <<'EOF'
. /etc/target.env
fetch-wheels "$TARGETARCH" /wheels <<'WHEELS'
WHEELS
nvshmem=/out/devel/opt/nvshmem
mkdir -p "$nvshmem/bin" "$nvshmem/lib"
cp -a /wheels/nvidia/nvshmem/include "$nvshmem"
cp -a /wheels/nvidia/nvshmem/lib/*.so.* /wheels/nvidia/nvshmem/lib/*.a "$nvshmem/lib"
# Remove the plug-ins for OpenSHMEM and libfabric, which are not in the images.
rm "$nvshmem"/lib/nvshmem_bootstrap_shmem.so.* "$nvshmem"/lib/nvshmem_transport_libfabric.so.*
ln -s "$(basename "$nvshmem"/lib/libnvshmem_host.so.*)" "$nvshmem/lib/libnvshmem_host.so"
cp -a /wheels/nvidia_nvshmem_cu*.dist-info/licenses/License.txt "$nvshmem/LICENSE"
# shellcheck disable=SC2046 # options are words
/usr/local/cuda/bin/nvcc -std=c++17 -O2 -rdc=true --compress-mode=size $(/usr/local/cuda/bin/capabilities nvcc "$TARGETARCH") \
  -I"$nvshmem/include" -L"$nvshmem/lib" /tmp/nvshmem-perf.cu -o "$nvshmem/bin/nvshmem-perf" -lnvshmem_host -lnvshmem_device -ldl \
  -Xlinker --allow-shlib-undefined
$STRIP "$nvshmem/bin/nvshmem-perf"
# Do not strip NVIDIA's files.
split-runtime --keep-symbols
rm -rf /wheels
EOF

