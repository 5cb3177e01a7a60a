// STAND-IN for nccl-tests: it starts ranks, counts devices, and measures nothing.
#include <cstdio>
#include <cstring>
#include <cuda_runtime.h>
#include <nccl.h>
#ifdef MPI_SUPPORT
#include <mpi.h>
#endif

#define NCCL_TESTS_VERSION "2.19.6"

int verify(int devices);

__global__ void twice(int *values) { values[threadIdx.x] *= 2; }

static int measure(const char *name, int rank, int ranks) {
  int nccl = 0, devices = 0;
  ncclGetVersion(&nccl);
  if (rank == 0) {
    std::printf("# nccl-tests version %s (stand-in) nccl-headers=%d nccl-library=%d\n", NCCL_TESTS_VERSION,
                NCCL_VERSION_CODE, nccl);
    std::printf("# Collective test starting: %s\n# ranks %d\n", name, ranks);
    std::fflush(stdout);
  }
  cudaError_t status = cudaGetDeviceCount(&devices);
  if (status != cudaSuccess) {
    std::printf("rank %d: Test CUDA failure common.cu:%d '%s'\n", rank, __LINE__, cudaGetErrorString(status));
    return 2;
  }
  int *values = nullptr;
  if (cudaMalloc(&values, 128 * sizeof(int)) != cudaSuccess) return 2;
  twice<<<1, 128>>>(values);
  ncclUniqueId id;
  if (ncclGetUniqueId(&id) != ncclSuccess) std::printf("NCCL failure: this library is a stand-in\n");
  return verify(devices);
}

int main(int argc, char **argv) {
  for (int i = 1; i < argc; i++)
    if (!std::strcmp(argv[i], "-h") || !std::strcmp(argv[i], "--help")) {
      std::printf("USAGE: %s (stand-in)\n\t[-t,--nthreads <num threads>]\n\t[-g,--ngpus <gpus per thread>]\n"
                  "\t[-b,--minbytes <min size in bytes>]\n\t[-e,--maxbytes <max size in bytes>]\n", argv[0]);
      return 0;
    }
  int rank = 0, ranks = 1;
#ifdef MPI_SUPPORT
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
#endif
  int status = measure(argv[0], rank, ranks);
#ifdef MPI_SUPPORT
  if (status == 0) MPI_Finalize();
#endif
  return status;
}
