cd "$(mktemp -d)"
cat > version.cc <<'EOF'
#include <cstdio>
#include <nccl.h>
int main() {
  int version = 0;
  if (ncclGetVersion(&version) != ncclSuccess) return 1;
  std::printf("library %d, header %d\n", version, NCCL_VERSION_CODE);
  return version != NCCL_VERSION_CODE;
}
EOF
# shellcheck disable=SC2046 # flags are words
g++ version.cc -o version -I/usr/local/cuda/include $(pkg-config --cflags --libs nccl)
./version
