# cuda.sh FOLDER: stand-ins for the packages of NVIDIA's CUDA repository. /nccl/nccl.h is the real header.
. /recipe/common.sh
pool=$1
lib=usr/lib/x86_64-linux-gnu

nccl() { # VERSION CUDA
  local code major minor patch full=$1-1+cuda$2
  IFS=. read -r major minor patch <<< "$1"
  code=$((major * 10000 + minor * 100 + patch))
  local names
  names=$(grep -oE '\bp?nccl[A-Z][A-Za-z0-9]*\(' /nccl/nccl.h | tr -d '(' | sort -u |
    grep -vxE 'p?nccl(GetVersion|GetErrorString|GetLastError)')
  {
    echo "const char stand_in_version[] = \"NCCL version $1+cuda$2\";"
    for p in '' p; do
      echo "int ${p}ncclGetVersion(int *version) { *version = $code; return 0; }"
      echo "const char *${p}ncclGetErrorString(int code) { return code ? \"stand-in: not implemented\" : \"no error\"; }"
      echo "const char *${p}ncclGetLastError(void *comm) { return \"stand-in: not implemented\"; }"
    done
    for name in $names; do echo "int $name(void) { return 3; }"; done # 3 is ncclInternalError
  } | library "/tree/libnccl2/$lib/libnccl.so.$1" libnccl.so.2
  ln -s "libnccl.so.$1" "/tree/libnccl2/$lib/libnccl.so.2"
  deb libnccl2 "$full" "NCCL whose functions fail" <<< 'Depends: libc6
Section: libs
Multi-Arch: same'
  mkdir -p "/tree/libnccl-dev/$lib" /tree/libnccl-dev/usr/include
  ln -s libnccl.so.2 "/tree/libnccl-dev/$lib/libnccl.so"
  sed -E "s/^(#define NCCL_MAJOR) .*/\1 $major/; s/^(#define NCCL_MINOR) .*/\1 $minor/
    s/^(#define NCCL_PATCH) .*/\1 $patch/; s/^(#define NCCL_VERSION_CODE) .*/\1 $code/" /nccl/nccl.h \
    > /tree/libnccl-dev/usr/include/nccl.h
  deb libnccl-dev "$full" "header of NCCL" <<< "Depends: libnccl2 (= $full)
Section: libdevel"
}

cudnn() { # VERSION CUDA-MAJOR
  local major minor patch full=$1-1
  IFS=. read -r major minor patch _ <<< "$1"
  echo "unsigned long cudnnGetVersion(void) { return $((major * 10000 + minor * 100 + patch)); }
    unsigned long cudnnGetCudartVersion(void) { return ${2}000; }" |
    library "/tree/libcudnn9-cuda-$2/$lib/libcudnn.so.$major.$minor.$patch" libcudnn.so.9
  ln -s "libcudnn.so.$major.$minor.$patch" "/tree/libcudnn9-cuda-$2/$lib/libcudnn.so.9"
  deb "libcudnn9-cuda-$2" "$full" "cuDNN that knows its version only" <<< "Depends: libc6
Conflicts: libcudnn9-cuda-$((25 - $2))
Section: libs"
  local include=/tree/libcudnn9-headers-cuda-$2/usr/include
  mkdir -p "$include/x86_64-linux-gnu"
  printf '#pragma once\n#define CUDNN_MAJOR %s\n#define CUDNN_MINOR %s\n#define CUDNN_PATCHLEVEL %s\n%s\n' \
    "$major" "$minor" "$patch" '#define CUDNN_VERSION (CUDNN_MAJOR * 10000 + CUDNN_MINOR * 100 + CUDNN_PATCHLEVEL)' \
    > "$include/x86_64-linux-gnu/cudnn_version_v9.h"
  printf '#pragma once\n#include "cudnn_version.h"\n#include <stddef.h>\nsize_t cudnnGetVersion(void);\n' \
    > "$include/x86_64-linux-gnu/cudnn_v9.h"
  ln -s x86_64-linux-gnu/cudnn_v9.h "$include/cudnn.h"
  ln -s x86_64-linux-gnu/cudnn_version_v9.h "$include/cudnn_version.h"
  deb "libcudnn9-headers-cuda-$2" "$full" "headers of cuDNN" <<< "Conflicts: libcudnn9-headers-cuda-$((25 - $2))
Section: libdevel"
  mkdir -p "/tree/libcudnn9-dev-cuda-$2/$lib"
  ln -s libcudnn.so.9 "/tree/libcudnn9-dev-cuda-$2/$lib/libcudnn.so"
  deb "libcudnn9-dev-cuda-$2" "$full" "link to cuDNN" \
    <<< "Depends: libcudnn9-cuda-$2 (= $full), libcudnn9-headers-cuda-$2 (>= $full)
Section: libdevel"
}

dcgm() { # VERSION
  local name=datacenter-gpu-manager-4 full=1:$1-1 plugins=usr/libexec/datacenter-gpu-manager-4/plugins cuda
  mkdir -p "/tree/$name-core/usr/bin"
  for program in dcgmi nv-hostengine; do
    gcc -O1 -s -x c - -o "/tree/$name-core/usr/bin/$program" << C
#include <stdio.h>
#include <string.h>
int main(int argc, char **argv) {
  if (argc > 1 && (!strcmp(argv[1], "--version") || !strcmp(argv[1], "-v"))) return !puts("$program  version: $1");
  fputs("stand-in for $program: it knows its version only\n", stderr);
  return 1;
}
C
  done
  echo "const char version[] = \"$1\";" | library "/tree/$name-core/$lib/libdcgm.so.$1" libdcgm.so.4
  ln -s "libdcgm.so.$1" "/tree/$name-core/$lib/libdcgm.so.4"
  deb "$name-core" "$full" "DCGM's programs, which know their version only" <<< 'Depends: libc6
Conflicts: datacenter-gpu-manager (<< 1:4)'
  for cuda in 12 13; do
    echo "int plugin;" | library "/tree/$name-cuda$cuda/$plugins/cuda$cuda/libDiagnostic.so" libDiagnostic.so
    deb "$name-cuda$cuda" "$full" "DCGM's diagnostics" <<< "Depends: $name-core (>= $full)
Recommends: $name-proprietary-cuda$cuda"
    echo "int plugin;" | library "/tree/$name-proprietary-cuda$cuda/$plugins/cuda$cuda/libProprietary.so" libProprietary.so
    deb "$name-proprietary-cuda$cuda" "$full" "DCGM's closed diagnostics" <<< "Depends: $name-proprietary (>= $full)"
  done
  echo "int module;" |
    library "/tree/$name-proprietary/$lib/libdcgmmoduleprofiling.so.$1" libdcgmmoduleprofiling.so.4
  deb "$name-proprietary" "$full" "DCGM's closed modules" <<< "Depends: $name-core (>= $full)"
  mkdir -p "/tree/$name-devel/usr/include" "/tree/$name-devel/$lib"
  echo "#pragma once" > "/tree/$name-devel/usr/include/dcgm_agent.h"
  ln -s libdcgm.so.4 "/tree/$name-devel/$lib/libdcgm.so"
  deb "$name-devel" "$full" "headers of DCGM" <<< "Depends: $name-core (= $full)"
}

nccl 2.29.7 12.9
nccl 2.30.7 13.3
nccl 2.32.3 12.9
nccl 2.32.3 13.4
for cuda in 12 13; do
  cudnn 9.20.0.48 $cuda
  cudnn 9.26.0.51 $cuda
done
dcgm 4.5.2
dcgm 4.6.1
# As the vendor's, it brings the keys of all repositories.
mkdir -p /tree/cuda-keyring/usr/share/keyrings
cat /keys/cuda.gpg /keys/cuda-new.gpg > /tree/cuda-keyring/usr/share/keyrings/cuda-archive-keyring.gpg
deb cuda-keyring 1.1-1 "keys of the stand-in's repositories" all <<< 'Section: misc'
index "$1" "NVIDIA stand-in"
