# Without a GPU the program must get as far as asking the runtime for devices.
cd "$(mktemp -d)"
cat > hello.cu <<'EOF'
#include <cstdio>
__global__ void add(int *x) { *x += 1; }
int main() {
  int devices = 0, version = 0;
  cudaRuntimeGetVersion(&version);
  cudaError_t status = cudaGetDeviceCount(&devices);
  std::printf("runtime %d: %s\n", version, status == cudaSuccess ? "devices found" : cudaGetErrorName(status));
  return !(status == cudaSuccess || status == cudaErrorInsufficientDriver || status == cudaErrorNoDevice);
}
EOF
nvcc -o static hello.cu
nvcc -cudart shared -o shared hello.cu
./static
./shared
