// STAND-IN: a kernel, so that the program holds machine code.
__global__ void copy(const int *from, int *to) { to[threadIdx.x] = from[threadIdx.x]; }
void launch(const int *from, int *to) { copy<<<1, 1>>>(from, to); }
