// STAND-IN for NCCL: it knows its version, and all else fails.
#include "nccl.h"
extern "C" const char stand_in_version[] = "NCCL version " SUFFIX;
__global__ void kernel(int *values) { values[threadIdx.x] += 1; }
ncclResult_t ncclGetVersion(int *version) { *version = NCCL_VERSION_CODE; return ncclSuccess; }
ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
  if (!id) kernel<<<1, 1>>>(nullptr);
  return ncclInternalError;
}
