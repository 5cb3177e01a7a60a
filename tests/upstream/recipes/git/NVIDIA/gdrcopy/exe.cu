// STAND-IN for GDRCopy's programs.
#include <cstdio>
#include <cuda.h>
#include <cuda_runtime.h>
#include "gdrapi.h"

__global__ void fill(int *values) { values[threadIdx.x] = 1; }

int main() {
  int devices = 0;
  if (cuInit(0) != CUDA_SUCCESS || cudaGetDeviceCount(&devices) != cudaSuccess || !gdr_open()) {
    std::fprintf(stderr, NAME ": stand-in: no device\n");
    return 1;
  }
  fill<<<1, 1>>>(nullptr);
  return 0;
}
