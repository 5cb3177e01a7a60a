// STAND-IN: a kernel, so that the plug-in holds machine code.
__global__ void touch(char *memory) { memory[threadIdx.x] = 1; }
extern "C" int touch_gpu_pages(char *memory) {
  touch<<<1, 1>>>(memory);
  return cudaDeviceSynchronize() != cudaSuccess;
}
