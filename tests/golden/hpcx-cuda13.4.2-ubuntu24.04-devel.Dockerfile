# hpcx-cuda13.4.2-ubuntu24.04-devel
# HPC-X, NCCL with its network plug-ins and the benchmarks of GPU networking, on NVIDIA's CUDA images
#
#   cuda-image         13.4.2
#   doca-ofed          3.5.0
#   gdrcopy            2.6
#   nvbandwidth        0.8
#   pmix               5.0.1
#   sshd               1:9.6p1
#   cudnn              9.26.0.51
#   dcgm               4.6.1
#   nccl               2.32.3
#   hpcx               2.51
#   perftest           26.04.17
#   openmpi-hpcx       4
#   nccl-tests         2.19.6
#
# Written by imagebuild 0.1.0, lock 009a822c89c0:  imagebuild render hpcx-cuda13.4.2-ubuntu24.04-devel
# Needs no build context:  docker buildx build -t hpcx - < Dockerfile

# ---- compiler-native -------------------------------------------------------------------------------
# Compilers: gcc, CMake and the autotools, which run on the image's architecture. GPL-3.0-or-later
# WITH GCC-exception-3.1, https://gcc.gnu.org
FROM ubuntu:22.04@sha256:bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb AS compiler-native
# For all stages that start from this one: a step ends at the first command that fails, also in a pipe.
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
ARG TARGETARCH
RUN --mount=type=cache,id=apt-ubuntu22.04,sharing=locked,target=/var/cache/apt \
    --mount=type=cache,id=apt-lists-ubuntu22.04,sharing=locked,target=/var/lib/apt/lists \
    --mount=type=tmpfs,target=/var/log \
    --mount=type=secret,id=apt-get,target=/usr/local/sbin/apt-get,mode=0755 <<'EOF'
set -eu
rm -f /etc/apt/apt.conf.d/docker-clean
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
  autoconf \
  automake \
  bzip2 \
  ca-certificates \
  cmake \
  flex \
  g++ \
  gnupg \
  libtool \
  make \
  patch \
  perl \
  pkg-config

cpu=$(uname -m)
cat > /etc/target.env <<ENV
export CPU=$cpu TRIPLET=$cpu-linux-gnu
export CC=gcc CXX=g++ AR=gcc-ar STRIP=strip NVCC_CCBIN=g++ CROSS=
export MAKEFLAGS=-j$(nproc)
ENV
EOF

COPY --chmod=755 <<'EOF' /usr/local/bin/split-runtime
#!/bin/sh
# split-runtime [--keep-symbols]: make /out/runtime from /out/devel. Programs and libraries lose their symbol tables in
# both; the runtime tree also loses what only a compiler, a linker or a reader of manuals asks for.
# Unversioned *.so links stay: plug-ins are opened by that name.
set -eu
if [ "${1:-}" != --keep-symbols ]; then
  . /etc/target.env
  find /out/devel -type f \( -perm -u+x -o -name '*.so*' \) | while read -r file; do
    case $(head -c 4 "$file" | tr -d '\0') in *ELF) $STRIP --strip-unneeded "$file" ;; esac
  done
fi
cp -a /out/devel /out/runtime
cd /out/runtime
find . \( -name '*.a' -o -name '*.la' -o -type d \( -name include -o -name man -o -name doc -o -name pkgconfig \
  -o -name cmake -o -name examples \) \) -prune -exec rm -rf {} +
find . -type d -empty -delete
EOF

# ---- doca-ofed -------------------------------------------------------------------------------------
# DOCA-OFED userspace: libibverbs with the ConnectX provider, librdmacm and their tools, against
# which HPC-X is built. GPL-2.0-only OR Linux-OpenIB, https://docs.nvidia.com/networking/dpu-
# doca/index.html
FROM scratch AS doca-ofed-key
ADD https://linux.mellanox.com/public/repo/doca/3.5.0/ubuntu22.04/x86_64/doca_keyring.gpg /

FROM compiler-native AS doca-ofed
RUN --mount=type=bind,from=doca-ofed-key,target=/run/key/1 <<'EOF'
set -eu
mkdir -p /out/keyrings
export GNUPGHOME=/tmp/gnupg
mkdir -m 700 $GNUPGHOME
gpg --quiet --import /run/key/*/*
# The files may contain more keys. Only the keys in imagebuild.lock are trusted.
set -- FFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFF
for key in "$@"; do
  if ! gpg --list-keys "$key" > /dev/null 2>&1; then
    echo "expected the key $key of imagebuild.lock in https://linux.mellanox.com/public/repo/doca/3.5.0/ubuntu22.04/x86_64/doca_keyring.gpg, found:" >&2
    gpg --with-colons --fingerprint | sed -n 's/^fpr:*\([0-9A-F]*\):/  \1/p' >&2
    echo "if the owner announced a new key, run: imagebuild lock --update doca-ofed" >&2
    exit 1
  fi
done
gpg --export "$@" > /out/keyrings/doca.gpg
chmod 644 /out/keyrings/doca.gpg
EOF

# Install the packages here for other components that compile against them. The image installs its own.
RUN --mount=type=cache,id=apt-ubuntu22.04,sharing=locked,target=/var/cache/apt \
    --mount=type=cache,id=apt-lists-ubuntu22.04,sharing=locked,target=/var/lib/apt/lists \
    --mount=type=tmpfs,target=/var/log \
    --mount=type=secret,id=apt-get,target=/usr/local/sbin/apt-get,mode=0755 <<'EOF'
set -eu
mkdir -p /run/keyrings
ln -s /out/keyrings /run/keyrings/doca
install -m 644 /run/keyrings/doca/doca.gpg /usr/share/keyrings/doca.gpg
sed -n "s/^$(dpkg --print-architecture) //p" > /etc/apt/sources.list.d/doca.list <<'LIST'
amd64 deb [signed-by=/usr/share/keyrings/doca.gpg] https://linux.mellanox.com/public/repo/doca/3.5.0/ubuntu22.04/x86_64/ ./
arm64 deb [signed-by=/usr/share/keyrings/doca.gpg] https://linux.mellanox.com/public/repo/doca/3.5.0/ubuntu22.04/arm64-sbsa/ ./
LIST
cat > /etc/apt/preferences.d/doca <<'PREFERENCES'
Package: *
Pin: origin linux.mellanox.com
Pin-Priority: 100
PREFERENCES
rm -f /etc/apt/apt.conf.d/docker-clean
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
  ibverbs-providers=1.0 \
  ibverbs-utils=1.0 \
  libibmad5=1.0 \
  libibumad3=1.0 \
  libibverbs1=1.0 \
  librdmacm1=1.0 \
  rdmacm-utils=1.0 \
  infiniband-diags=1.0 \
  libibnetdisc5=1.0 \
  libibumad-dev=1.0 \
  libibverbs-dev=1.0 \
  librdmacm-dev=1.0

EOF

# ---- nvcc-image ------------------------------------------------------------------------------------
# CUDA compiler: The toolkit in NVIDIA's devel image, in one version for all images with the same
# CUDA major version. LicenseRef-NVIDIA-CUDA-EULA, https://hub.docker.com/r/nvidia/cuda
FROM nvidia/cuda:13.0.3-devel-ubuntu22.04@sha256:bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb AS nvcc-image
# The only list of compute capabilities. The program `capabilities` prints it in the format of nvcc or CMake.
COPY <<'EOF' /usr/local/cuda/capabilities
amd64 80 89 90 100 103 120
arm64 90 100 103 120
EOF

COPY --chmod=755 <<'EOF' /usr/local/cuda/bin/capabilities
#!/bin/sh
# capabilities nvcc|cmake ARCH: print the compute capabilities to compile for, as options of nvcc or a list for CMake.
# They select machine code for all capabilities and, if there are several, PTX for the last one, for later GPUs.
set -eu
list=$(sed -n "s/^$2 //p" /usr/local/cuda/capabilities)
last=${list##* }
if [ "$list" = "$last" ]; then last=; fi
case $1 in
  nvcc)
    for number in $list; do printf -- '-gencode=arch=compute_%s,code=sm_%s ' "$number" "$number"; done
    printf -- "${last:+-gencode=arch=compute_$last,code=compute_$last}\n"
    ;;
  cmake)
    for number in $list; do printf '%s-real;' "$number"; done
    printf "${last:+$last-virtual}\n"
    ;;
esac
EOF

# ---- gdrcopy ---------------------------------------------------------------------------------------
# GDRCopy: Fast small copies between CPU and GPU memory, which is mapped into the CPU's address
# space. MIT, https://github.com/NVIDIA/gdrcopy, tag v2.6
FROM scratch AS gdrcopy-source
ADD https://github.com/NVIDIA/gdrcopy.git#cccccccccccccccccccccccccccccccccccccccc /

FROM compiler-native AS gdrcopy
RUN --mount=type=bind,from=gdrcopy-source,target=/src \
    --mount=type=bind,from=nvcc-image,source=/usr/local/cuda,target=/usr/local/cuda <<'EOF'
. /etc/target.env
cp -a /src /build
cd /build
# Set the architecture, as the makefile would ask the gcc of the build machine for it.
arch=$(sed -n "s/^$TARGETARCH //p" <<'NAMES'
amd64 X86
arm64 ARM64
NAMES
)
# Debian 12's compiler supports this Arm extension, but crashes when it compiles the file that uses the extension.
ls64=yes
"$CC" -O2 -march=armv9-a+ls64 -Iinclude -DGDRAPI_ARCH=ARM64 -DCOMPILED_LS64=1 -c src/memcpy_ls64.c -o /dev/null 2> /dev/null || ls64=no
make CC="$CC" CXX="$CXX" CUDA=/usr/local/cuda GDRAPI_ARCH="$arch" HAS_LS64="$ls64" \
  NVCCFLAGS="$(/usr/local/cuda/bin/capabilities nvcc "$TARGETARCH") -std=c++17" \
  prefix=/opt/gdrcopy DESTDIR=/out/devel lib_install exes_install
install -D -m 644 LICENSE /out/devel/opt/gdrcopy/LICENSE
chmod 644 /out/devel/opt/gdrcopy/include/*
find /out/devel/opt/gdrcopy/bin -type l -delete # additional names such as "sanity", which are too general for PATH
split-runtime
rm -rf /build
EOF

# ---- nvbandwidth -----------------------------------------------------------------------------------
# nvbandwidth: Measures copy bandwidth and latency between host and GPUs, and between GPUs.
# Apache-2.0, https://github.com/NVIDIA/nvbandwidth, tag v0.8
FROM scratch AS nvbandwidth-source
ADD https://github.com/NVIDIA/nvbandwidth.git#cccccccccccccccccccccccccccccccccccccccc /

FROM compiler-native AS nvbandwidth
RUN --mount=type=cache,id=apt-ubuntu22.04,sharing=locked,target=/var/cache/apt \
    --mount=type=cache,id=apt-lists-ubuntu22.04,sharing=locked,target=/var/lib/apt/lists \
    --mount=type=tmpfs,target=/var/log \
    --mount=type=secret,id=apt-get,target=/usr/local/sbin/apt-get,mode=0755 <<'EOF'
set -eu
rm -f /etc/apt/apt.conf.d/docker-clean
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
  libboost-program-options-dev:$TARGETARCH

EOF

RUN --mount=type=bind,from=nvbandwidth-source,target=/src \
    --mount=type=bind,from=nvcc-image,source=/usr/local/cuda,target=/usr/local/cuda <<'EOF'
. /etc/target.env
cmake -S /src -B /build -D CMAKE_BUILD_TYPE=Release \
  -D CMAKE_SYSTEM_NAME=Linux -D CMAKE_SYSTEM_PROCESSOR="$CPU" -D CMAKE_CXX_COMPILER="$CXX" \
  -D CMAKE_CUDA_COMPILER=/usr/local/cuda/bin/nvcc -D CMAKE_CUDA_HOST_COMPILER="$CXX" \
  -D CMAKE_CUDA_ARCHITECTURES="$(/usr/local/cuda/bin/capabilities cmake "$TARGETARCH")" \
  -D CMAKE_EXE_LINKER_FLAGS=-L/usr/local/cuda/lib64/stubs
cmake --build /build --verbose
install -D /build/nvbandwidth /out/devel/usr/local/bin/nvbandwidth
install -D -m 644 /src/LICENSE /out/devel/usr/share/licenses/nvbandwidth/LICENSE
split-runtime
rm -rf /build
EOF

# ---- unpack ----------------------------------------------------------------------------------------
# Unpacker: Unpacks archives for any architecture; runs on the build machine's architecture.
# GPL-3.0-or-later, https://www.gnu.org/software/tar
FROM --platform=$BUILDPLATFORM ubuntu:22.04@sha256:bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb AS unpack
# For all stages that start from this one: a step ends at the first command that fails, also in a pipe.
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
RUN --mount=type=cache,id=apt-ubuntu22.04,sharing=locked,target=/var/cache/apt \
    --mount=type=cache,id=apt-lists-ubuntu22.04,sharing=locked,target=/var/lib/apt/lists \
    --mount=type=tmpfs,target=/var/log \
    --mount=type=secret,id=apt-get,target=/usr/local/sbin/apt-get,mode=0755 <<'EOF'
set -eu
rm -f /etc/apt/apt.conf.d/docker-clean
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
  bzip2 \
  xz-utils \
  zstd

EOF

COPY --chmod=755 <<'EOF' /usr/local/bin/split-runtime
#!/bin/sh
# split-runtime [--keep-symbols]: make /out/runtime from /out/devel. Programs and libraries lose their symbol tables in
# both; the runtime tree also loses what only a compiler, a linker or a reader of manuals asks for.
# Unversioned *.so links stay: plug-ins are opened by that name.
set -eu
if [ "${1:-}" != --keep-symbols ]; then
  . /etc/target.env
  find /out/devel -type f \( -perm -u+x -o -name '*.so*' \) | while read -r file; do
    case $(head -c 4 "$file" | tr -d '\0') in *ELF) $STRIP --strip-unneeded "$file" ;; esac
  done
fi
cp -a /out/devel /out/runtime
cd /out/runtime
find . \( -name '*.a' -o -name '*.la' -o -type d \( -name include -o -name man -o -name doc -o -name pkgconfig \
  -o -name cmake -o -name examples \) \) -prune -exec rm -rf {} +
find . -type d -empty -delete
EOF

# ---- hpcx ------------------------------------------------------------------------------------------
# HPC-X: UCX, UCC, HCOLL, SHARP, ClusterKit and network plug-ins for NCCL, in versions that NVIDIA
# tests together. LicenseRef-NVIDIA-HPC-X-EULA, https://developer.nvidia.com/networking/hpc-x
FROM scratch AS hpcx-source-amd64
ADD --checksum=sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa https://content.mellanox.com/hpc/hpc-x/v2.51_cuda13/hpcx-v2.51-gcc-doca_ofed-ubuntu24.04-cuda13-x86_64.tbz /

FROM scratch AS hpcx-source-arm64
ADD --checksum=sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa https://content.mellanox.com/hpc/hpc-x/v2.51_cuda13/hpcx-v2.51-gcc-doca_ofed-ubuntu24.04-cuda13-aarch64.tbz /

FROM hpcx-source-$TARGETARCH AS hpcx-source

FROM unpack AS hpcx
COPY <<'EOF' /usr/local/bin/relocate
#!/usr/bin/perl
# relocate FOLDER: make an unpacked HPC-X work in FOLDER, with one Open MPI in FOLDER/ompi.
# - Texts and links that name the folder where HPC-X was built name FOLDER.
# - The folders of Open MPI, which contain bin/mpirun, are removed. Texts that name them, in any spelling, name FOLDER/ompi.
# - Scripts that compile the removed sources are removed.
use strict;
use warnings;

my $home = shift;
my $built = qr{/[\w./+-]*hpcx-(?:v\d|gcc)[\w.+-]*};
my $address = qr{\w+://\S*};
my @mpi = grep { $_ ne 'ompi' } map { m{^\Q$home\E/(.+)/bin/mpirun$} } glob("$home/*/bin/mpirun $home/*/*/bin/mpirun");
# A variable such as ${mpi_version}, or digits, may follow the name.
my $spelled = join '|', (map { quotemeta } sort { length $b <=> length $a } @mpi), 'ompi(?:\d+(?:\.\d+)*|\$\{\w+\}|\$\w+)';
my $mpi = qr{(?<![\w.-])(?:$spelled)(?![\w.-])};
my (@texts, @links);
for (split /\0/, `find $home -print0`) { # perl-base has no File::Find
    if (-l) { push @links, $_ }
    elsif (-f && -s _ <= 1 << 20 && -T) { push @texts, $_ }
}
for my $link (@links) {
    my $target = readlink $link;
    next unless $target =~ s{^$built}{$home};
    unlink $link or die "$link: $!";
    symlink $target, $link or die "$link: $!";
}
system(join ' ', "rm -rf $home/ompi $home/ompi[0-9]* $home/sources", map { "'$home/$_'" } @mpi) == 0 or die "$home: cannot remove Open MPI and the sources\n";
for my $path (@texts) {
    next unless -e $path;
    open(my $in, '<', $path) or die "$path: $!";
    my $old = do { local $/; <$in> };
    (my $new = $old) =~ s{($address)|$built}{$1 // $home}ge;
    $new =~ s{($address)|$mpi}{$1 // 'ompi'}ge;
    if ($path =~ m{\.sh$} && $new =~ m{/sources\b}) { unlink $path; print "removed $path, which needs the sources\n"; next }
    next if $new eq $old;
    open(my $out, '>', $path) or die "$path: $!";
    print $out $new;
    close $out or die "$path: $!";
}
EOF

RUN --mount=type=bind,from=hpcx-source,target=/src <<'EOF'
stop() { echo "HPC-X: $1" >&2; exit 1; }
# The init script uses the path where it is, so the path must be the same as in the image.
hpcx=/opt/hpcx
mkdir -p /unpacked /out/devel/opt
tar -xf /src/* -C /unpacked --no-same-owner # tar finds the compression in the content
top=$(find /unpacked -mindepth 2 -maxdepth 2 -path '*/ucx')
mv "${top%/ucx}" $hpcx
# Keep the sources of Open MPI: it is compiled again, with the distribution's PMIx, which works with Slurm's plug-in.
mkdir /out/sources
mv $hpcx/sources/openmpi*.t[abgx]* /out/sources ||
  stop "expected sources/openmpi*.tar.* in the archive, found $(find $hpcx/sources -type f -printf '%f '); choose another version (--set hpcx=)"
perl /usr/local/bin/relocate $hpcx
mv $hpcx /out/devel/opt
split-runtime --keep-symbols
# Remove the variants of UCX for debugging, and the scripts that name them, unless the image's environment needs them.
cd /out/runtime/opt/hpcx
for variant in debug prof; do
  if ! grep -qE "ucx/$variant\b" hpcx-init.sh; then
    rm -rf "ucx/$variant"
    { grep -rIlE "ucx/$variant\b" -- *.sh modulefiles || true; } | xargs -r rm
  fi
done
mkdir -p /out/{devel,runtime}/opt/hpcx/ompi # init scripts name the folder, also in images without Open MPI
EOF

# ---- perftest --------------------------------------------------------------------------------------
# perftest: Measures bandwidth and latency of RDMA devices, also with GPU memory. (GPL-2.0-only OR
# BSD-2-Clause) AND GPL-2.0-or-later, https://github.com/linux-rdma/perftest, tag 26.04.17
FROM scratch AS perftest-source
ADD https://github.com/linux-rdma/perftest.git#cccccccccccccccccccccccccccccccccccccccc /

FROM doca-ofed AS perftest
RUN --mount=type=cache,id=apt-ubuntu22.04,sharing=locked,target=/var/cache/apt \
    --mount=type=cache,id=apt-lists-ubuntu22.04,sharing=locked,target=/var/lib/apt/lists \
    --mount=type=tmpfs,target=/var/log \
    --mount=type=secret,id=apt-get,target=/usr/local/sbin/apt-get,mode=0755 <<'EOF'
set -eu
rm -f /etc/apt/apt.conf.d/docker-clean
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
  libnuma-dev:$TARGETARCH \
  libpci-dev:$TARGETARCH

EOF

RUN --mount=type=bind,from=perftest-source,target=/src \
    --mount=type=bind,from=nvcc-image,source=/usr/local/cuda,target=/usr/local/cuda <<'EOF'
. /etc/target.env
cp -a /src /build
cd /build
./autogen.sh
# configure finds CUDA in /usr/local/cuda, and supports dma-buf only if it can link the driver's stub.
# The programs load CUDA only if it is used, so they also run on machines without CUDA.
# perftest compares data with vector instructions of the build machine's CPU. Use AVX2 instead, which all servers with
# these GPUs have. (Without vector instructions, this release does not compile on amd64.) On arm64 there is no choice.
if [ "$TARGETARCH" = amd64 ]; then export CPPFLAGS=-DHAVE_AVX2=1 SIMD_CFLAGS=-mavx2; fi
NVCCFLAGS=$(/usr/local/cuda/bin/capabilities nvcc "$TARGETARCH") \
  LDFLAGS="-L/usr/local/cuda/lib64/stubs -Wl,-rpath,/usr/local/lib/perftest" ./configure $CROSS --prefix=/usr/local || {
  logs=$(find . -name config.log -exec grep -L '^configure: exit 0' {} + || true)
  for log in ${logs:-$(find . -name config.log)}; do
    echo "the end of $log:"
    sed '/^## Cache variables/,$d' "$log" | tail -n 100
  done >&2
  echo "configure failed; the reason is in config.log above" >&2
  exit 1
}
for feature in HAVE_CUDA HAVE_CUDART HAVE_CUDA_DMABUF HAVE_DATA_DIRECT HAVE_MLX5DV; do
  grep "^#define $feature 1" config.h || {
  logs=$(find . -name config.log -exec grep -L '^configure: exit 0' {} + || true)
  for log in ${logs:-$(find . -name config.log)}; do
    echo "the end of $log:"
    sed '/^## Cache variables/,$d' "$log" | tail -n 100
  done >&2
  echo "perftest: configure did not find $feature; choose another version of perftest (--set perftest=), DOCA (--set doca-ofed=) or CUDA; the reason is in config.log above" >&2
  exit 1
}
done
grep "^#define HAVE_SRD 1" config.h || echo "libibverbs does not support EFA: perftest is compiled without EFA"
make
make install DESTDIR=/out/devel
install -D -m 644 COPYING /out/devel/usr/share/licenses/perftest/COPYING
# libpci has symbol versions, and the image's libpci may be too old. So perftest uses its own copy.
install -D -t /out/devel/usr/local/lib/perftest "/usr/lib/$TRIPLET/libpci.so.3"
install -m 644 /usr/share/doc/libpci-dev/copyright /out/devel/usr/share/licenses/perftest/libpci
split-runtime
rm -rf /build
EOF

# ---- openmpi-hpcx ----------------------------------------------------------------------------------
# Open MPI of HPC-X: Open MPI from the sources in HPC-X, compiled with the distribution's PMIx, UCX,
# UCC, HCOLL, CUDA and Slurm. BSD-3-Clause-Open-MPI, https://www.open-mpi.org
FROM ubuntu:24.04@sha256:bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb AS openmpi-hpcx
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
RUN --mount=type=cache,id=apt-ubuntu24.04,sharing=locked,target=/var/cache/apt \
    --mount=type=cache,id=apt-lists-ubuntu24.04,sharing=locked,target=/var/lib/apt/lists \
    --mount=type=tmpfs,target=/var/log \
    --mount=type=secret,id=apt-get,target=/usr/local/sbin/apt-get,mode=0755 <<'EOF'
set -eu
rm -f /etc/apt/apt.conf.d/docker-clean
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
  autoconf \
  automake \
  bzip2 \
  flex \
  g++ \
  libevent-dev \
  libhwloc-dev \
  libnuma-dev \
  libpmix-dev \
  libtool \
  make \
  perl \
  pkg-config \
  zlib1g-dev

EOF

RUN --mount=type=bind,from=hpcx,source=/out/devel/opt/hpcx,target=/opt/hpcx,rw \
    --mount=type=bind,from=hpcx,source=/out/sources,target=/src \
    --mount=type=bind,from=nvcc-image,source=/usr/local/cuda/include,target=/usr/local/cuda/include \
    --mount=type=bind,from=nvcc-image,source=/usr/local/cuda/lib64,target=/usr/local/cuda/lib64 <<'EOF'
mkdir /build
# The archive contains the sources of one or two series of Open MPI. The file VERSION in each names the series.
source= found=
for file in /src/openmpi*; do
  series=$(tar -xOf "$file" --wildcards --no-wildcards-match-slash '*/VERSION' | sed -n 's/^major=//p') || true
  found="$found $(basename "$file") of Open MPI ${series:-unknown}"
  if [ "$series" = 4 ]; then source=$file; fi
done
if [ -z "$source" ]; then
  echo "expected sources of Open MPI 4 in HPC-X's archive, found$found; choose one of them (--set openmpi-series=)" >&2
  exit 1
fi
tar -xf "$source" -C /build --strip-components 1 --no-same-owner
hcoll=--with-hcoll=/opt/hpcx/hcoll
if [ ! -d /opt/hpcx/hcoll ]; then
  echo "this HPC-X has no HCOLL: Open MPI is compiled without HCOLL"
  hcoll=--without-hcoll
fi
cd /build
[ -e configure ] || ./autogen.pl
triplet=$(gcc -print-multiarch)
# For reproducible builds: ompi_info contains the user, host and time of the build.
export SOURCE_DATE_EPOCH=0 USER=imagebuild HOSTNAME=imagebuild
# Find UCX by --with-ucx, not by its pkg-config file, which names variants of UCX that the archive lacks.
export ucx_USE_PKG_CONFIG=0
# Libraries that HPC-X's libraries need are only in the image, not in this stage; the linker may ignore them.
./configure --prefix=/opt/hpcx/ompi --disable-static --with-slurm --without-xpmem \
  --with-ucx=/opt/hpcx/ucx --with-ucc=/opt/hpcx/ucc "$hcoll" \
  --with-platform=contrib/platform/mellanox/optimized --with-pmix="/usr/lib/$triplet/pmix2" --with-hwloc --with-libevent --with-cuda=/usr/local/cuda \
  LDFLAGS="-Wl,--allow-shlib-undefined -Wl,-rpath=/opt/hpcx/ucx/lib:/opt/hpcx/ucc/lib:/opt/hpcx/hcoll/lib:/opt/hpcx/sharp/lib" || {
  logs=$(find . -name config.log -exec grep -L '^configure: exit 0' {} + || true)
  for log in ${logs:-$(find . -name config.log)}; do
    echo "the end of $log:"
    sed '/^## Cache variables/,$d' "$log" | tail -n 100
  done >&2
  echo "configure failed; the reason is in config.log above" >&2
  exit 1
}
make -j"$(nproc)"
make install
find /opt/hpcx/ompi -name '*.la' -delete
install -m 644 LICENSE /opt/hpcx/ompi/LICENSE
# Do not warn about components that cannot load without a driver: a node that only starts ranks has no driver.
echo 'mca_base_component_show_load_errors = 0' >> /opt/hpcx/ompi/etc/openmpi-mca-params.conf
mkdir -p /out/devel/opt/hpcx /out/runtime/opt/hpcx
cp -a /opt/hpcx/ompi /out/devel/opt/hpcx
cp -a /opt/hpcx/ompi /out/runtime/opt/hpcx
cd /out/runtime/opt/hpcx/ompi
# Remove wrapper compilers and headers, as runtime images contain no compiler.
rm -rf include lib/pkgconfig share/man
find . \( -name '*.a' -o -name 'mpi[cC]*' -o -name 'osh[cC]*' -o -name 'shmem[cC]*' -o -name opal_wrapper \
  -o -name '*-wrapper-data.txt' \) -delete
rm -rf /build
EOF

# ---- nccl ------------------------------------------------------------------------------------------
# NCCL: GPU collectives, from NVIDIA's packages for the image's CUDA major version. Apache-2.0 AND
# BSD-3-Clause, https://github.com/NVIDIA/nccl
FROM nvcc-image AS nccl
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# Unpack the packages here for stages that compile with NCCL. The image installs the packages.
RUN --mount=type=cache,id=apt-ubuntu22.04,sharing=locked,target=/var/cache/apt \
    --mount=type=cache,id=apt-lists-ubuntu22.04,sharing=locked,target=/var/lib/apt/lists \
    --mount=type=tmpfs,target=/var/log \
    --mount=type=secret,id=apt-get,target=/usr/local/sbin/apt-get,mode=0755 <<'EOF'
apt-get update -qq
cd "$(mktemp -d)"
apt-get download -qq libnccl2=2.32.3-1+cuda13.4 libnccl-dev=2.32.3-1+cuda13.4
for package in *.deb; do dpkg-deb -x "$package" tree; done
mkdir -p /out/devel/opt/nccl/lib
cp -a tree/usr/include /out/devel/opt/nccl
cp -a tree/usr/lib/*/. /out/devel/opt/nccl/lib
EOF

# ---- mpi-abi ---------------------------------------------------------------------------------------
# MPI interface: The distribution's Open MPI, for compiling; programs compiled with it run with
# every Open MPI 4 and 5. BSD-3-Clause-Open-MPI, https://www.open-mpi.org
FROM compiler-native AS mpi-abi
RUN --mount=type=cache,id=apt-ubuntu22.04,sharing=locked,target=/var/cache/apt \
    --mount=type=cache,id=apt-lists-ubuntu22.04,sharing=locked,target=/var/lib/apt/lists \
    --mount=type=tmpfs,target=/var/log \
    --mount=type=secret,id=apt-get,target=/usr/local/sbin/apt-get,mode=0755 <<'EOF'
set -eu
rm -f /etc/apt/apt.conf.d/docker-clean
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
  libopenmpi-dev

mpi=/out/devel/opt/ompi
mkdir -p $mpi
cp -aL "/usr/lib/$(gcc -print-multiarch)/openmpi/." $mpi
EOF

# ---- nccl-tests ------------------------------------------------------------------------------------
# NCCL tests: Measures bandwidth of NCCL's collectives and checks their data, on one node, or on
# several with mpirun or srun. BSD-3-Clause, https://github.com/NVIDIA/nccl-tests, tag v2.19.6
FROM scratch AS nccl-tests-source
ADD https://github.com/NVIDIA/nccl-tests.git#cccccccccccccccccccccccccccccccccccccccc /

FROM compiler-native AS nccl-tests
RUN --mount=type=bind,from=nccl-tests-source,target=/src \
    --mount=type=bind,from=nvcc-image,source=/usr/local/cuda,target=/usr/local/cuda \
    --mount=type=bind,from=nccl,source=/out/devel/opt/nccl,target=/opt/nccl \
    --mount=type=bind,from=mpi-abi,source=/out/devel/opt/ompi,target=/opt/ompi <<'EOF'
. /etc/target.env
cp -a /src /build
cd /build
# MPI=1: programs with MPI also run without mpirun. Without MPI, each rank under mpirun would silently test on its own.
# DSO=1: the verification kernels are in one library instead of in each program.
# Compiling one of the files takes as long as all others together, so nvcc compiles for several GPUs in parallel.
# Libraries that libmpi needs are not in this stage; the linker may ignore them.
threads=$(nproc)
export NVCC_APPEND_FLAGS="--threads $threads -Xlinker --allow-shlib-undefined"
make -C src MPI=1 DSO=1 CUDA_HOME=/usr/local/cuda NCCL_HOME=/opt/nccl MPI_HOME=/opt/ompi CC="$CC" CXX="$CXX" \
  NVCC_GENCODE="$(/usr/local/cuda/bin/capabilities nvcc "$TARGETARCH")" BUILDDIR=/build/out
tests=/out/devel/opt/nccl-tests
mkdir -p "$tests/build/verifiable"
cp -a out/*_perf "$tests/build"
cp -a out/verifiable/libverifiable.so* "$tests/build/verifiable"
# People use both names for programs with MPI.
for program in "$tests"/build/*_perf; do ln -s "$(basename "$program")" "${program}_mpi"; done
ln -s nccl-tests /out/devel/opt/nccl_tests
sed -n "s/^$TARGETARCH //p" /usr/local/cuda/capabilities > "$tests/capabilities"
cp LICENSE.txt "$tests"
split-runtime
rm -rf /build
EOF

# ---- image -----------------------------------------------------------------------------------------
# Contains the files that the stages above wrote to /out/devel
FROM nvidia/cuda:13.4.2-devel-ubuntu24.04@sha256:bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb AS image
# The base may have another user, and may hold packages.
USER root
# This is one step, so that an update of a component executes only one step. It installs packages, updates the cache of
# the loader, adds a normal user, and sets the same environment in containers, login shells and ssh sessions.
RUN --mount=type=cache,id=apt-ubuntu24.04,sharing=locked,target=/var/cache/apt \
    --mount=type=cache,id=apt-lists-ubuntu24.04,sharing=locked,target=/var/lib/apt/lists \
    --mount=type=tmpfs,target=/var/log \
    --mount=type=secret,id=apt-get,target=/usr/local/sbin/apt-get,mode=0755 \
    --mount=type=bind,from=doca-ofed,source=/out/keyrings,target=/run/keyrings/doca \
    --mount=type=bind,from=gdrcopy,source=/out/devel/opt/gdrcopy/lib,target=/opt/gdrcopy/lib \
    --mount=type=bind,from=hpcx,source=/out/devel/opt/hpcx/nccl_spectrum-x_plugin/lib,target=/opt/hpcx/nccl_spectrum-x_plugin/lib \
    --mount=type=bind,from=hpcx,source=/out/devel/opt/hpcx/nccl_rdma_sharp_plugin/lib,target=/opt/hpcx/nccl_rdma_sharp_plugin/lib \
    --mount=type=bind,from=hpcx,source=/out/devel/opt/hpcx/ucc/lib/ucc,target=/opt/hpcx/ucc/lib/ucc \
    --mount=type=bind,from=hpcx,source=/out/devel/opt/hpcx/ucc/lib,target=/opt/hpcx/ucc/lib \
    --mount=type=bind,from=hpcx,source=/out/devel/opt/hpcx/ucx/lib/ucx,target=/opt/hpcx/ucx/lib/ucx \
    --mount=type=bind,from=hpcx,source=/out/devel/opt/hpcx/ucx/lib,target=/opt/hpcx/ucx/lib \
    --mount=type=bind,from=hpcx,source=/out/devel/opt/hpcx/sharp/lib,target=/opt/hpcx/sharp/lib \
    --mount=type=bind,from=hpcx,source=/out/devel/opt/hpcx/hcoll/lib,target=/opt/hpcx/hcoll/lib \
    --mount=type=bind,from=openmpi-hpcx,source=/out/devel/opt/hpcx/ompi/lib,target=/opt/hpcx/ompi/lib \
    bash -eu <<'EOF'
# Programs write this time to files instead of the current time, so that builds are reproducible.
SOURCE_DATE_EPOCH=$(stat --dereference --format=%Y /etc/os-release)
export SOURCE_DATE_EPOCH
# DCGM 3 and 4 cannot be installed together.
dpkg -l datacenter-gpu-manager 2> /dev/null | awk '/^.i/ {print $2}' | xargs -r apt-get purge -qq -y
# The base image contains another version, which is held.
dpkg -l 'libnccl*' 2> /dev/null | awk '/^.i/ {print $2}' | xargs -r apt-get purge -qq -y --allow-change-held-packages
install -m 644 /run/keyrings/doca/doca.gpg /usr/share/keyrings/doca.gpg
sed -n "s/^$(dpkg --print-architecture) //p" > /etc/apt/sources.list.d/doca.list <<'LIST'
amd64 deb [signed-by=/usr/share/keyrings/doca.gpg] https://linux.mellanox.com/public/repo/doca/3.5.0/ubuntu24.04/x86_64/ ./
arm64 deb [signed-by=/usr/share/keyrings/doca.gpg] https://linux.mellanox.com/public/repo/doca/3.5.0/ubuntu24.04/arm64-sbsa/ ./
LIST
cat > /etc/apt/preferences.d/doca <<'PREFERENCES'
Package: *
Pin: origin linux.mellanox.com
Pin-Priority: 100
PREFERENCES
rm -f /etc/apt/apt.conf.d/docker-clean
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends --allow-change-held-packages \
  datacenter-gpu-manager-4-core=1:4.6.1-1 \
  datacenter-gpu-manager-4-cuda13=1:4.6.1-1 \
  datacenter-gpu-manager-4-proprietary-cuda13=1:4.6.1-1 \
  datacenter-gpu-manager-4-proprietary=1:4.6.1-1 \
  ibverbs-providers=1.0 \
  ibverbs-utils=1.0 \
  infiniband-diags=1.0 \
  libcudnn9-cuda-13=9.26.0.51-1 \
  libcudnn9-dev-cuda-13=9.26.0.51-1 \
  libcudnn9-headers-cuda-13=9.26.0.51-1 \
  libevent-core-2.1-7 \
  libevent-pthreads-2.1-7 \
  libgomp1 \
  libhwloc15 \
  libibmad5=1.0 \
  libibnetdisc5=1.0 \
  libibumad-dev=1.0 \
  libibumad3=1.0 \
  libibverbs-dev=1.0 \
  libibverbs1=1.0 \
  libnccl-dev=2.32.3-1+cuda13.4 \
  libnccl2=2.32.3-1+cuda13.4 \
  libnss-wrapper \
  libnuma1 \
  'libpmix-dev=5.0.1*' \
  'libpmix2t64=5.0.1*' \
  librdmacm-dev=1.0 \
  librdmacm1=1.0 \
  libudev1 \
  'openssh-client=1:9.6p1*' \
  'openssh-server=1:9.6p1*' \
  pkg-config \
  rdmacm-utils=1.0 \
  zlib1g

# The packages of signed repositories, in the versions of imagebuild.lock. The check doca-ofed/origin compares them.
mkdir -p /usr/share/imagebuild
cat > /usr/share/imagebuild/packages <<'PACKAGES'
datacenter-gpu-manager-4-core=1:4.6.1-1
datacenter-gpu-manager-4-cuda13=1:4.6.1-1
datacenter-gpu-manager-4-proprietary-cuda13=1:4.6.1-1
datacenter-gpu-manager-4-proprietary=1:4.6.1-1
ibverbs-providers=1.0
ibverbs-utils=1.0
infiniband-diags=1.0
libcudnn9-cuda-13=9.26.0.51-1
libcudnn9-dev-cuda-13=9.26.0.51-1
libcudnn9-headers-cuda-13=9.26.0.51-1
libibmad5=1.0
libibnetdisc5=1.0
libibumad-dev=1.0
libibumad3=1.0
libibverbs-dev=1.0
libibverbs1=1.0
libnccl-dev=2.32.3-1+cuda13.4
libnccl2=2.32.3-1+cuda13.4
librdmacm-dev=1.0
librdmacm1=1.0
rdmacm-utils=1.0
PACKAGES
# The base image's variables name folders that only the container runtime makes, for the driver. Make them here.
tr : '\n' <<< "$PATH:${LD_LIBRARY_PATH:-}:${LIBRARY_PATH:-}" | xargs mkdir -p
# perftest opens the runtime library by its unversioned name, which runtime images lack.
library=$(find /usr/local/cuda/lib64/ -name 'libcudart.so.*' | sort | tail -n 1)
if [ -z "$library" ]; then
  echo "the base image has no /usr/local/cuda/lib64/libcudart.so.*; choose another CUDA version or base image" >&2
  exit 1
fi
ln -sf "$library" "/usr/lib/$(uname -m)-linux-gnu/libcudart.so"
dpkg-query -W -f '${Package}\n' ibverbs-providers libibverbs1 librdmacm1 | xargs apt-mark hold
# The package makes host keys. In the image, they would be public.
rm -f /etc/ssh/ssh_host_*
# The image's own /usr/sbin/sshd makes host keys, and then starts the distribution's sshd.
dpkg-divert --quiet --local --rename --divert /usr/sbin/sshd.distrib --add /usr/sbin/sshd
dpkg -l 'libcudnn9*' | awk '/^.i/ {print $2}' | xargs apt-mark hold
dpkg -l 'libnccl*' | awk '/^.i/ {print $2}' | xargs apt-mark hold
cat > /etc/ld.so.conf.d/imagebuild.conf <<'FOLDERS'
# gdrcopy
/opt/gdrcopy/lib
# hpcx
/opt/hpcx/nccl_spectrum-x_plugin/lib
# hpcx
/opt/hpcx/nccl_rdma_sharp_plugin/lib
# hpcx
/opt/hpcx/ucc/lib/ucc
# hpcx
/opt/hpcx/ucc/lib
# hpcx
/opt/hpcx/ucx/lib/ucx
# hpcx
/opt/hpcx/ucx/lib
# hpcx
/opt/hpcx/sharp/lib
# hpcx
/opt/hpcx/hcoll/lib
# openmpi-hpcx
/opt/hpcx/ompi/lib
FOLDERS
ldconfig
# Some distributions already have a user with this id.
if getent passwd 1000 > /dev/null; then userdel --remove "$(getent passwd 1000 | cut -d: -f1)"; fi
useradd --create-home --uid 1000 --shell /bin/bash --password '*' mpiuser
cat > /etc/profile.d/imagebuild.sh <<'PROFILE'
export PATH="/opt/nccl-tests/build:/opt/hpcx/sharp/bin:/opt/hpcx/clusterkit/bin:/opt/hpcx/hcoll/bin:/opt/hpcx/ucc/bin:/opt/hpcx/ucx/bin:/opt/hpcx/ompi/bin:/opt/gdrcopy/bin:/usr/local/nvidia/bin:/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
export LD_LIBRARY_PATH="/opt/hpcx/nccl_spectrum-x_plugin/lib:/opt/hpcx/nccl_rdma_sharp_plugin/lib:/opt/hpcx/ucc/lib/ucc:/opt/hpcx/ucc/lib:/opt/hpcx/ucx/lib/ucx:/opt/hpcx/ucx/lib:/opt/hpcx/sharp/lib:/opt/hpcx/hcoll/lib:/opt/hpcx/ompi/lib:/usr/local/nvidia/lib:/usr/local/nvidia/lib64:/usr/local/cuda/lib64"
export LIBRARY_PATH="/opt/hpcx/nccl_spectrum-x_plugin/lib:/opt/hpcx/nccl_rdma_sharp_plugin/lib:/opt/hpcx/sharp/lib:/opt/hpcx/ucc/lib:/opt/hpcx/ucx/lib:/opt/hpcx/hcoll/lib:/opt/hpcx/ompi/lib:/usr/local/cuda/lib64/stubs"
export NVIDIA_VISIBLE_DEVICES="all"
export NVIDIA_DRIVER_CAPABILITIES="compute,utility"
export NCCL_VERSION="2.32.3-1"
export NV_LIBNCCL_PACKAGE="libnccl2=2.32.3-1+cuda13.4"
export NV_LIBNCCL_PACKAGE_VERSION="2.32.3-1"
export NV_LIBNCCL_DEV_PACKAGE="libnccl-dev=2.32.3-1+cuda13.4"
export NV_LIBNCCL_DEV_PACKAGE_VERSION="2.32.3-1"
export CPATH="/opt/hpcx/ompi/include:/opt/hpcx/ucc/include:/opt/hpcx/ucx/include:/opt/hpcx/sharp/include:/opt/hpcx/hcoll/include"
export HPCX_CLUSTERKIT_DIR="/opt/hpcx/clusterkit"
export HPCX_HCOLL_DIR="/opt/hpcx/hcoll"
export HPCX_NCCLNET_PLUGIN_DIR="/opt/hpcx/nccl_spectrum-x_plugin"
export HPCX_NCCL_RDMA_SHARP_PLUGIN_DIR="/opt/hpcx/nccl_rdma_sharp_plugin"
export HPCX_OSHMEM_DIR="/opt/hpcx/ompi"
export HPCX_SHARP_DIR="/opt/hpcx/sharp"
export HPCX_UCC_DIR="/opt/hpcx/ucc"
export OSHMEM_HOME="/opt/hpcx/ompi"
export PKG_CONFIG_PATH="/opt/hpcx/hcoll/lib/pkgconfig:/opt/hpcx/sharp/lib/pkgconfig:/opt/hpcx/ucx/lib/pkgconfig:/opt/hpcx/ompi/lib/pkgconfig"
export SHMEM_HOME="/opt/hpcx/ompi"
export HPCX_DIR="/opt/hpcx"
export HPCX_UCX_DIR="/opt/hpcx/ucx"
export HPCX_MPI_DIR="/opt/hpcx/ompi"
export MPI_HOME="/opt/hpcx/ompi"
export OMPI_HOME="/opt/hpcx/ompi"
export OMPI_MCA_coll_hcoll_enable="0"
export OPAL_PREFIX="/opt/hpcx/ompi"
export UCX_VFS_ENABLE="no"
PROFILE
cat > /etc/ssh/sshd_config.d/20-environment.conf <<'CONFIG'
SetEnv PATH="/opt/nccl-tests/build:/opt/hpcx/sharp/bin:/opt/hpcx/clusterkit/bin:/opt/hpcx/hcoll/bin:/opt/hpcx/ucc/bin:/opt/hpcx/ucx/bin:/opt/hpcx/ompi/bin:/opt/gdrcopy/bin:/usr/local/nvidia/bin:/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" LD_LIBRARY_PATH="/opt/hpcx/nccl_spectrum-x_plugin/lib:/opt/hpcx/nccl_rdma_sharp_plugin/lib:/opt/hpcx/ucc/lib/ucc:/opt/hpcx/ucc/lib:/opt/hpcx/ucx/lib/ucx:/opt/hpcx/ucx/lib:/opt/hpcx/sharp/lib:/opt/hpcx/hcoll/lib:/opt/hpcx/ompi/lib:/usr/local/nvidia/lib:/usr/local/nvidia/lib64:/usr/local/cuda/lib64" LIBRARY_PATH="/opt/hpcx/nccl_spectrum-x_plugin/lib:/opt/hpcx/nccl_rdma_sharp_plugin/lib:/opt/hpcx/sharp/lib:/opt/hpcx/ucc/lib:/opt/hpcx/ucx/lib:/opt/hpcx/hcoll/lib:/opt/hpcx/ompi/lib:/usr/local/cuda/lib64/stubs" NVIDIA_VISIBLE_DEVICES="all" NVIDIA_DRIVER_CAPABILITIES="compute,utility" NCCL_VERSION="2.32.3-1" NV_LIBNCCL_PACKAGE="libnccl2=2.32.3-1+cuda13.4" NV_LIBNCCL_PACKAGE_VERSION="2.32.3-1" NV_LIBNCCL_DEV_PACKAGE="libnccl-dev=2.32.3-1+cuda13.4" NV_LIBNCCL_DEV_PACKAGE_VERSION="2.32.3-1" CPATH="/opt/hpcx/ompi/include:/opt/hpcx/ucc/include:/opt/hpcx/ucx/include:/opt/hpcx/sharp/include:/opt/hpcx/hcoll/include" HPCX_CLUSTERKIT_DIR="/opt/hpcx/clusterkit" HPCX_HCOLL_DIR="/opt/hpcx/hcoll" HPCX_NCCLNET_PLUGIN_DIR="/opt/hpcx/nccl_spectrum-x_plugin" HPCX_NCCL_RDMA_SHARP_PLUGIN_DIR="/opt/hpcx/nccl_rdma_sharp_plugin" HPCX_OSHMEM_DIR="/opt/hpcx/ompi" HPCX_SHARP_DIR="/opt/hpcx/sharp" HPCX_UCC_DIR="/opt/hpcx/ucc" OSHMEM_HOME="/opt/hpcx/ompi" PKG_CONFIG_PATH="/opt/hpcx/hcoll/lib/pkgconfig:/opt/hpcx/sharp/lib/pkgconfig:/opt/hpcx/ucx/lib/pkgconfig:/opt/hpcx/ompi/lib/pkgconfig" SHMEM_HOME="/opt/hpcx/ompi" HPCX_DIR="/opt/hpcx" HPCX_UCX_DIR="/opt/hpcx/ucx" HPCX_MPI_DIR="/opt/hpcx/ompi" MPI_HOME="/opt/hpcx/ompi" OMPI_HOME="/opt/hpcx/ompi" OMPI_MCA_coll_hcoll_enable="0" OPAL_PREFIX="/opt/hpcx/ompi" UCX_VFS_ENABLE="no"
CONFIG
# The id is for one machine only, and the auxiliary cache of ldconfig contains inode numbers of the build machine.
if [ -s /etc/machine-id ]; then : > /etc/machine-id; fi
rm -f /var/cache/ldconfig/aux-cache
EOF

COPY --link --from=gdrcopy /out/devel/ /
COPY --link --from=nvbandwidth /out/devel/ /
COPY --link --from=hpcx /out/devel/ /
COPY --link --from=perftest /out/devel/ /
COPY --link --from=openmpi-hpcx /out/devel/ /
COPY --link --from=nccl-tests /out/devel/ /

COPY --link --chmod=755 <<'EOF' /usr/sbin/sshd
#!/bin/sh
# Start sshd with the given options. The image contains no host keys, so they are made at the first start. The program
# itself is /usr/sbin/sshd.distrib. If you are not root, only you can log in to the server, and it needs a port above
# 1023 (-p). If the home folder is not writable, the host key is in $XDG_RUNTIME_DIR or /tmp.
set -eu
# The MPI operator mounts keys from a secret, with an owner and a mode that sshd would refuse.
if [ -n "${K_MPI_JOB_ROLE:-}" ]; then set -- "$@" -o StrictModes=no; fi
uid=$(id -u)
if [ "$uid" = 0 ] && [ -w /etc/ssh ]; then
  install -d -m 0755 /run/sshd
  # No RSA key: it would take a second of CPU at each start, and OpenSSH 5.7 and later do not need it.
  for type in ecdsa ed25519; do
    key=/etc/ssh/ssh_host_${type}_key
    # Another sshd may make the key at the same time.
    [ -e "$key" ] || ssh-keygen -q -t "$type" -N '' -f "$key" < /dev/null > /dev/null || [ -e "$key" ]
  done
  exec /usr/sbin/sshd.distrib "$@"
fi
if [ "$uid" != 0 ]; then
  if [ -z "${NSS_WRAPPER_PASSWD+set}" ]; then NSS_WRAPPER_PASSWD='' exec /usr/local/bin/with-user "$0" "$@"; fi
  if [ -n "$NSS_WRAPPER_PASSWD" ]; then
    # Login sessions need these variables, too. Repeat the image's own, as sshd uses only the first SetEnv.
    names="LD_PRELOAD=$LD_PRELOAD NSS_WRAPPER_PASSWD=$NSS_WRAPPER_PASSWD NSS_WRAPPER_GROUP=$NSS_WRAPPER_GROUP"
    set -- "$@" -o "SetEnv=$names $(sed -n 's/^SetEnv //p' /etc/ssh/sshd_config.d/20-environment.conf)"
  fi
  set -- "$@" -o UsePAM=no
fi
keys=${XDG_STATE_HOME:-$HOME/.local/state}/sshd
if ! install -d -m 0700 "$keys" 2> /dev/null || [ ! -w "$keys" ]; then
  keys=${XDG_RUNTIME_DIR:-/tmp}/user-$uid
  install -d -m 0700 "$keys"
fi
if [ ! -e "$keys/ssh_host_ed25519_key" ]; then
  ssh-keygen -q -t ed25519 -N '' -f "$keys/ssh_host_ed25519_key"
fi
exec /usr/sbin/sshd.distrib "$@" -h "$keys/ssh_host_ed25519_key" -o PidFile=none
EOF

COPY --link --chmod=755 <<'EOF' /usr/local/bin/with-user
#!/bin/sh
# with-user COMMAND…: run a command with an account for the current user id. ssh, sshd and mpirun need an account. If
# /etc/passwd has none for this id (docker run --user 12345), or one without a shell (OpenShift), the command and its
# child processes see an account named mpi with the home $HOME. Writes only to $XDG_RUNTIME_DIR or /tmp.
set -eu
uid=$(id -u)
case $(getent passwd "$uid" | cut -d: -f7) in '' | */nologin | */false)
  folder=${XDG_RUNTIME_DIR:-/tmp}/user-$uid
  install -d -m 0700 "$folder"
  if [ "${HOME:-/}" = / ] || [ ! -d "$HOME" ]; then HOME=$folder; fi
  new=$(mktemp "$folder/passwd.XXXXXX")
  { echo "mpi:x:$uid:$(id -g):mpi:$HOME:/bin/bash"; cat /etc/passwd; } > "$new"
  mv "$new" "$folder/passwd"
  export HOME USER=mpi LOGNAME=mpi NSS_WRAPPER_PASSWD="$folder/passwd" NSS_WRAPPER_GROUP=/etc/group
  export LD_PRELOAD="libnss_wrapper.so${LD_PRELOAD:+:$LD_PRELOAD}"
  ;;
esac
exec "$@"
EOF

COPY --link <<'EOF' /etc/ssh/sshd_config.d/10-imagebuild.conf
# sshd uses the first value of each setting, and reads this folder before sshd_config.
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
PermitUserEnvironment no
AllowTcpForwarding no
X11Forwarding no
PrintMotd no
EOF

COPY --link <<'EOF' /etc/ssh/ssh_config.d/10-imagebuild.conf
# Each container has new host keys: accept and remember an unknown key, but refuse a changed key.
Host *
    StrictHostKeyChecking accept-new
EOF

ENV PATH="/opt/nccl-tests/build:/opt/hpcx/sharp/bin:/opt/hpcx/clusterkit/bin:/opt/hpcx/hcoll/bin:/opt/hpcx/ucc/bin:/opt/hpcx/ucx/bin:/opt/hpcx/ompi/bin:/opt/gdrcopy/bin:/usr/local/nvidia/bin:/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" \
    LD_LIBRARY_PATH="/opt/hpcx/nccl_spectrum-x_plugin/lib:/opt/hpcx/nccl_rdma_sharp_plugin/lib:/opt/hpcx/ucc/lib/ucc:/opt/hpcx/ucc/lib:/opt/hpcx/ucx/lib/ucx:/opt/hpcx/ucx/lib:/opt/hpcx/sharp/lib:/opt/hpcx/hcoll/lib:/opt/hpcx/ompi/lib:/usr/local/nvidia/lib:/usr/local/nvidia/lib64:/usr/local/cuda/lib64" \
    LIBRARY_PATH="/opt/hpcx/nccl_spectrum-x_plugin/lib:/opt/hpcx/nccl_rdma_sharp_plugin/lib:/opt/hpcx/sharp/lib:/opt/hpcx/ucc/lib:/opt/hpcx/ucx/lib:/opt/hpcx/hcoll/lib:/opt/hpcx/ompi/lib:/usr/local/cuda/lib64/stubs" \
    NVIDIA_VISIBLE_DEVICES="all" \
    NVIDIA_DRIVER_CAPABILITIES="compute,utility" \
    NCCL_VERSION="2.32.3-1" \
    NV_LIBNCCL_PACKAGE="libnccl2=2.32.3-1+cuda13.4" \
    NV_LIBNCCL_PACKAGE_VERSION="2.32.3-1" \
    NV_LIBNCCL_DEV_PACKAGE="libnccl-dev=2.32.3-1+cuda13.4" \
    NV_LIBNCCL_DEV_PACKAGE_VERSION="2.32.3-1" \
    CPATH="/opt/hpcx/ompi/include:/opt/hpcx/ucc/include:/opt/hpcx/ucx/include:/opt/hpcx/sharp/include:/opt/hpcx/hcoll/include" \
    HPCX_CLUSTERKIT_DIR="/opt/hpcx/clusterkit" \
    HPCX_HCOLL_DIR="/opt/hpcx/hcoll" \
    HPCX_NCCLNET_PLUGIN_DIR="/opt/hpcx/nccl_spectrum-x_plugin" \
    HPCX_NCCL_RDMA_SHARP_PLUGIN_DIR="/opt/hpcx/nccl_rdma_sharp_plugin" \
    HPCX_OSHMEM_DIR="/opt/hpcx/ompi" \
    HPCX_SHARP_DIR="/opt/hpcx/sharp" \
    HPCX_UCC_DIR="/opt/hpcx/ucc" \
    OSHMEM_HOME="/opt/hpcx/ompi" \
    PKG_CONFIG_PATH="/opt/hpcx/hcoll/lib/pkgconfig:/opt/hpcx/sharp/lib/pkgconfig:/opt/hpcx/ucx/lib/pkgconfig:/opt/hpcx/ompi/lib/pkgconfig" \
    SHMEM_HOME="/opt/hpcx/ompi" \
    HPCX_DIR="/opt/hpcx" \
    HPCX_UCX_DIR="/opt/hpcx/ucx" \
    HPCX_MPI_DIR="/opt/hpcx/ompi" \
    MPI_HOME="/opt/hpcx/ompi" \
    OMPI_HOME="/opt/hpcx/ompi" \
    OMPI_MCA_coll_hcoll_enable="0" \
    OPAL_PREFIX="/opt/hpcx/ompi" \
    UCX_VFS_ENABLE="no"

LABEL org.opencontainers.image.title="hpcx" \
      org.opencontainers.image.description="HPC-X, NCCL with its network plug-ins and the benchmarks of GPU networking, on NVIDIA's CUDA images" \
      org.opencontainers.image.version="cuda13.4.2-ubuntu24.04-devel" \
      org.opencontainers.image.base.name="nvidia/cuda:13.4.2-devel-ubuntu24.04" \
      org.opencontainers.image.base.digest="sha256:bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb" \
      org.opencontainers.image.licenses="((GPL-2.0-only OR BSD-2-Clause) AND GPL-2.0-or-later) AND (Apache-2.0 AND BSD-3-Clause) AND (Apache-2.0 AND LicenseRef-NVIDIA-DCGM-EULA) AND (Apache-2.0) AND (BSD-2-Clause AND BSD-3-Clause AND MIT) AND (BSD-3-Clause) AND (BSD-3-Clause-Open-MPI) AND (GPL-2.0-only OR Linux-OpenIB) AND (LicenseRef-NVIDIA-CUDA-EULA) AND (LicenseRef-NVIDIA-HPC-X-EULA) AND (LicenseRef-NVIDIA-cuDNN-EULA) AND (MIT)" \
      imagebuild.target="hpcx-cuda13.4.2-ubuntu24.04-devel" \
      imagebuild.lock="009a822c89c0" \
      imagebuild.axis.cuda="13.4.2" \
      imagebuild.axis.os="ubuntu24.04" \
      imagebuild.axis.variant="devel" \
      imagebuild.component.cuda-image="13.4.2" \
      imagebuild.component.doca-ofed="3.5.0" \
      imagebuild.component.gdrcopy="2.6" \
      imagebuild.component.nvbandwidth="0.8" \
      imagebuild.component.pmix="5.0.1" \
      imagebuild.component.sshd="1:9.6p1" \
      imagebuild.component.cudnn="9.26.0.51" \
      imagebuild.component.dcgm="4.6.1" \
      imagebuild.component.nccl="2.32.3" \
      imagebuild.component.hpcx="2.51" \
      imagebuild.component.perftest="26.04.17" \
      imagebuild.component.openmpi-hpcx="4" \
      imagebuild.component.nccl-tests="2.19.6" \
      imagebuild.nccl-net="spcx"
CMD ["bash"]
