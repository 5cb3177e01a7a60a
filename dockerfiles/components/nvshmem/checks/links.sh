cd "$(mktemp -d)"
cat > ring.cu << 'CU'
#include <nvshmem.h>
__global__ void send(int *to) { nvshmem_int_p(to, nvshmem_my_pe(), (nvshmem_my_pe() + 1) % nvshmem_n_pes()); }
int main() {
  nvshmem_init();
  int *to = static_cast<int *>(nvshmem_malloc(sizeof(int)));
  send<<<1, 1>>>(to);
  nvshmem_finalize();
}
CU
nvcc -rdc=true -arch=sm_90 -I/opt/nvshmem/include ring.cu -o ring -L/opt/nvshmem/lib -lnvshmem_host -lnvshmem_device
ldd ring | grep -F '/opt/nvshmem/lib/libnvshmem_host.so.3'
./ring > /tmp/said 2>&1 || grep -F 'driver' /tmp/said
