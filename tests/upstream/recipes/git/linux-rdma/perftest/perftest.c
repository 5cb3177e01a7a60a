// STAND-IN for perftest: it lists devices and options, and measures nothing.
#include "config.h"
#include <infiniband/verbs.h>
#include <stdio.h>
#include <string.h>

static void usage(void) {
  puts("Usage: " NAME " [options] <host> (stand-in)\n  -d, --ib-dev=<dev>  Use IB device <dev>\n  -V, --version");
#ifdef HAVE_CUDA
  puts("  --use_cuda=<cuda device id>  Use CUDA specific device for GPUDirect RDMA testing");
#endif
#ifdef HAVE_CUDA_DMABUF
  puts("  --use_cuda_dmabuf  Use CUDA DMA-BUF for GPUDirect RDMA testing");
  puts("  --use_cuda_pcie_mapping  Use PCIe mapping for DMA-BUF");
#endif
#ifdef HAVE_DATA_DIRECT
  puts("  --use_data_direct  Use mlx5 data direct");
#endif
}

int main(int argc, char **argv) {
  int devices = 0;
  for (int i = 1; i < argc; i++) {
    if (!strcmp(argv[i], "--version") || !strcmp(argv[i], "-V")) {
      puts("Version: " PACKAGE_VERSION);
      return 1;
    }
    if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h")) {
      usage();
      return 1;
    }
  }
  struct ibv_device **list = ibv_get_device_list(&devices);
  if (list) ibv_free_device_list(list);
  fprintf(stderr, devices ? "stand-in: it measures nothing\n" : "Unable to find the Infiniband/RoCE device\n");
  return 1;
}
