# open-cuda13.5-debian13-runtime
# UCX, UCC, Open MPI and the benchmarks from upstream source, with CUDA, verbs and GDRCopy
#
#   cuda               13.5
#   gdrcopy            2.6
#   rdma-core-git      63.1
#   nvbandwidth        0.8
#   pmix-git           5.0.10
#   sshd               1:10.0p1-7
#   nccl-wheel         2.32.3
#   perftest           26.04.17
#   ucx                1.22.0
#   aws-ofi-nccl       1.21.1
#   ucc                1.8.0
#   openmpi-git        5.0.10
#   nccl-tests         2.19.6
#
# Written by imagebuild 0.1.0, lock 0e0fd7bdac80:  imagebuild render open-cuda13.5-debian13-runtime --set cuda=13.5 --with aws-ofi-nccl
# Needs no build context:  docker buildx build -t open - < Dockerfile

# ---- fetch -----------------------------------------------------------------------------------------
# Downloader: pip, which downloads wheels for any architecture and verifies their hashes. MIT,
# https://pip.pypa.io
FROM --platform=$BUILDPLATFORM debian:12.15-slim@sha256:3783cc01769c7b2b1b83a5c5ad96c815348e28ed7da68e2e3687004faa906251 AS fetch
# For all stages that start from this one: a step ends at the first command that fails, also in a pipe.
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
RUN --mount=type=cache,id=apt-debian12,sharing=locked,target=/var/cache/apt \
    --mount=type=cache,id=apt-lists-debian12,sharing=locked,target=/var/lib/apt/lists \
    --mount=type=tmpfs,target=/var/log \
    --mount=type=secret,id=apt-get,target=/usr/local/sbin/apt-get,mode=0755 <<'EOF'
set -eu
rm -f /etc/apt/apt.conf.d/docker-clean
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
  python3-pip

EOF

COPY --chmod=755 <<'EOF' /usr/local/bin/fetch-wheels
#!/bin/sh
# fetch-wheels ARCH FOLDER < requirements: unpack the wheels for amd64 or arm64 into FOLDER.
# Every requirement needs a hash. A CA bundle is used if the build has the secret `ca`.
set -eu
cpu=$(awk -v arch="$1" '$1 == arch {print $2}' /usr/share/dpkg/cputable)
if [ -e /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi
if [ -e /run/secrets/pip.conf ]; then export PIP_CONFIG_FILE=/run/secrets/pip.conf; fi
cat > /tmp/requirements
# Wheels name the oldest glibc they run with; the images' is 2.35 or newer. The two names are those of 2.12 and 2.17.
platforms="manylinux2010_$cpu manylinux2014_$cpu $(seq -f "manylinux_2_%.0f_$cpu" 12 35)"
# shellcheck disable=SC2046 # options are words
pip install --quiet --no-cache-dir --no-compile --root-user-action ignore --disable-pip-version-check \
  --no-deps --require-hashes --only-binary :all: --target "$2" --requirement /tmp/requirements \
  $(printf -- '--platform %s ' $platforms)
EOF

# ---- cuda ------------------------------------------------------------------------------------------
# CUDA toolkit: Compiler, runtime and headers from NVIDIA's wheels on the Python package index.
# LicenseRef-NVIDIA-CUDA-EULA, https://developer.nvidia.com/cuda-toolkit
FROM fetch AS cuda
ARG TARGETARCH
RUN --mount=type=secret,id=ca --mount=type=secret,id=pip.conf <<'EOF'
fetch-wheels "$TARGETARCH" /wheels <<'WHEELS'
nvidia-cuda-cccl==13.3.5.0.6 \
  --hash=sha256:d5230098fa2df5021e1a00c0c4eee41797671a91119d31e892463e5ccf3ee326 \
  --hash=sha256:6f30b8076b3e69951c459c94ae190bde51924b320076ebaec376d36848b4c76e
nvidia-cuda-crt==13.5.37 \
  --hash=sha256:e898b7f73d3035fa89915a3f7bf3b54a73e90249746111aed295822c4729bb29 \
  --hash=sha256:9ed2c565fdf3244fa6719769a80a466b85bfd4b1467ea339353bc91c971d09e0
nvidia-cuda-nvcc==13.5.37 \
  --hash=sha256:f5c4f7ead5d964fb4af42bbf1e6d3ec3c1e6e9d83b53749f691d387e7fcaa3a7 \
  --hash=sha256:588eda18eb5076ae859fe272844b526459228af22df0b117f54eec3aa82bc9c8
nvidia-cuda-runtime==13.5.37 \
  --hash=sha256:df2b79a8852f10d1fef8c848489c49eebb5754051bf870202a862831412b179d \
  --hash=sha256:de2dc5a7367974228b0a69588a9acc9340d3768bef1bf38bf0801eb08497cd2d
nvidia-nvml-dev==13.5.37 \
  --hash=sha256:7394fcbefa9ba537e8238cbb1caa4cd2db6bbfbff208d217a8a884947113ae6d \
  --hash=sha256:1331ad1707ca2c46e41b98eb8413efc23b5c151438e70733b91ba5bf53e05ed3
nvidia-nvvm==13.5.37 \
  --hash=sha256:c41bfa362e407405163f103c2229f0765f8cc2ed7d148b754dc77f228bf7e070 \
  --hash=sha256:b659bd3115b7ac7ec8931e67d0e2c0dd09cd35b08a6a7372df6f8f22c67da80a
WHEELS
toolkit=/out/devel/usr/local/cuda
mkdir -p "$toolkit"
cp -a /wheels/nvidia/cu13/. "$toolkit"
# The wheels have neither the link for `-lcudart` nor lib64, where many configure scripts look.
ln -s "$(basename "$toolkit"/lib/libcudart.so.*)" "$toolkit/lib/libcudart.so"
ln -s lib "$toolkit/lib64"
for info in /wheels/*.dist-info; do
  sed -n 's/^Name: //p; s/^Version: //p' "$info/METADATA" | paste -sd ' '
done | sort > "$toolkit/version.txt"
cp -a /wheels/nvidia_cuda_runtime-*.dist-info/licenses/License.txt "$toolkit/EULA.txt"
echo /usr/local/cuda/lib >/cuda.conf
mkdir -p /out/devel/usr/lib
ln -s ../local/cuda/lib/libcudart.so /out/devel/usr/lib/libcudart.so
# A runtime image holds the runtime library only: that is what may be redistributed.
mkdir -p /out/runtime/usr/local/cuda/lib
cp -a /out/devel/usr/lib /out/runtime/usr
cp -a "$toolkit"/lib/libcudart.so* /out/runtime/usr/local/cuda/lib
cp -a "$toolkit"/version.txt "$toolkit"/EULA.txt "$toolkit"/lib64 /out/runtime/usr/local/cuda
EOF

# ---- compiler --------------------------------------------------------------------------------------
# Compilers: gcc and the autotools, which run on the build machine's architecture and compile for
# the image's architecture. GPL-3.0-or-later WITH GCC-exception-3.1, https://gcc.gnu.org
FROM fetch AS compiler
ARG TARGETARCH
# Compilers are called by the name with their target's architecture, also if that is the build machine's architecture.
RUN --mount=type=cache,id=apt-debian12,sharing=locked,target=/var/cache/apt \
    --mount=type=cache,id=apt-lists-debian12,sharing=locked,target=/var/lib/apt/lists \
    --mount=type=tmpfs,target=/var/log \
    --mount=type=secret,id=apt-get,target=/usr/local/sbin/apt-get,mode=0755 <<'EOF'
set -eu
cpu=$(awk -v arch="$TARGETARCH" '$1 == arch {print $2}' /usr/share/dpkg/cputable)
dpkg --add-architecture "$TARGETARCH"
rm -f /etc/apt/apt.conf.d/docker-clean
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
  autoconf \
  automake \
  bzip2 \
  cmake \
  flex \
  g++ \
  libtool \
  make \
  patch \
  perl \
  pkgconf \
  "g++-$(echo "$cpu" | tr _ -)-linux-gnu"

cat > /etc/target.env <<ENV
export CPU=$cpu TRIPLET=$cpu-linux-gnu
export CC=$cpu-linux-gnu-gcc CXX=$cpu-linux-gnu-g++ AR=$cpu-linux-gnu-gcc-ar STRIP=$cpu-linux-gnu-strip
export NVCC_CCBIN=$cpu-linux-gnu-g++
export PKG_CONFIG_LIBDIR=/usr/lib/$cpu-linux-gnu/pkgconfig:/usr/share/pkgconfig
export MAKEFLAGS=-j$(nproc)
# For configure, and always a cross build: a script that may not run its tests cannot take the CPU of the
# machine that builds for that of the machines the image will run on.
export CROSS="--build=$(uname -m)-build-linux-gnu --host=$cpu-linux-gnu"
ENV
EOF

COPY --chmod=755 <<'EOF' /usr/local/bin/driver-stubs
#!/bin/sh
# driver-stubs INCLUDE FOLDER: make libcuda.so and libnvidia-ml.so with an empty function for every name
# in cuda.h and nvml.h. Enough to link; the driver brings the libraries at run time.
set -eu
. /etc/target.env
mkdir -p "$2"
for stub in cuda:cu:libcuda nvml:nvml:libnvidia-ml; do
  header=${stub%%:*} library=${stub##*:} prefix=${stub#*:}
  grep -ohE "\b${prefix%:*}[A-Z][A-Za-z0-9_]*" "$1/$header.h" | sort -u | sed 's/.*/void &(void) {}/' |
    $CC -shared -fPIC -Wl,-soname,"$library.so.1" -o "$2/$library.so" -x c -
done
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

# ---- nvcc ------------------------------------------------------------------------------------------
# CUDA compiler: nvcc, which runs on the build machine's architecture, with libraries for the
# image's architecture. LicenseRef-NVIDIA-CUDA-EULA, https://developer.nvidia.com/cuda-toolkit
FROM compiler AS nvcc
ARG BUILDARCH
RUN --mount=type=secret,id=ca --mount=type=secret,id=pip.conf <<'EOF'
fetch-wheels "$BUILDARCH" /wheels/tools <<'WHEELS'
nvidia-cuda-crt==13.0.88 \
  --hash=sha256:2c8043c7c9e02492716426e9919fc78d2c5b3b2a7a768a88e952676b08aa55a4 \
  --hash=sha256:ee2ea2a97073e02ee62bb27841f437332be2c248e3eac013df07997ada39c003
nvidia-cuda-nvcc==13.0.88 \
  --hash=sha256:56fe502eb77625a12f25172caa3cdddb4e4c8ba2c8c17dba44b164761b380f03 \
  --hash=sha256:c7ff28f86a24effdc6c034fa15230c549a273e4771b10a7fec14996f8cf3307f
nvidia-nvvm==13.0.88 \
  --hash=sha256:c5f41ffeb6466944a026dfa5317d7d85355c119bbec279205d22f1869d1054e0 \
  --hash=sha256:c4376a291d72d22a315d9d2f69bdae8f8cd83a627f75bad395cee49a0fe65dc1
WHEELS
fetch-wheels "$TARGETARCH" /wheels/libraries <<'WHEELS'
nvidia-cuda-cccl==13.0.85 \
  --hash=sha256:e0da7ad981f3a8aff08241b5bfc1af868742a63e2762f53a5171c492ef242649 \
  --hash=sha256:6f0203e29fed809ee2b7fe9b1344df66ecab990c37d6a2e0e189b26d6c97ed7c
nvidia-cuda-runtime==13.0.96 \
  --hash=sha256:7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548 \
  --hash=sha256:ef9bcbe90493a2b9d810e43d249adb3d02e98dd30200d86607d8d02687c43f55
nvidia-nvml-dev==13.0.87 \
  --hash=sha256:082871368275cf6620fc900f55d8eaf2563b263a38a00a5168e9650bce963ba1 \
  --hash=sha256:f7aaa33d888da151c5902b39efdca16bc8a5535652075c2a02cd948a7a7100be
WHEELS
cuda=/usr/local/cuda
mkdir -p $cuda
cp -a /wheels/tools/nvidia/cu13/. /wheels/libraries/nvidia/cu13/. $cuda
ln -s "$(basename $cuda/lib/libcudart.so.*)" $cuda/lib/libcudart.so
ln -s lib $cuda/lib64
driver-stubs $cuda/include $cuda/lib/stubs
rm -rf /wheels
EOF

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
ADD https://github.com/NVIDIA/gdrcopy.git#93c606bbcaa10457cbbab93163aa446d902b983d /

FROM compiler AS gdrcopy
RUN --mount=type=bind,from=gdrcopy-source,target=/src \
    --mount=type=bind,from=nvcc,source=/usr/local/cuda,target=/usr/local/cuda <<'EOF'
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

# ---- rdma-core-git ---------------------------------------------------------------------------------
# RDMA userspace from source: libibverbs with its providers, and librdmacm, in one version for all
# distributions. GPL-2.0-only OR Linux-OpenIB, https://github.com/linux-rdma/rdma-core, tag v63.1
FROM scratch AS rdma-core-git-source
ADD https://github.com/linux-rdma/rdma-core.git#1803b1b0b94e0513dccba37bf2d66c1e35331ea0 /

FROM compiler AS rdma-core-git
RUN --mount=type=cache,id=apt-debian12,sharing=locked,target=/var/cache/apt \
    --mount=type=cache,id=apt-lists-debian12,sharing=locked,target=/var/lib/apt/lists \
    --mount=type=tmpfs,target=/var/log \
    --mount=type=secret,id=apt-get,target=/usr/local/sbin/apt-get,mode=0755 <<'EOF'
set -eu
rm -f /etc/apt/apt.conf.d/docker-clean
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
  libnl-3-dev:$TARGETARCH \
  libnl-route-3-dev:$TARGETARCH

EOF

RUN --mount=type=bind,from=rdma-core-git-source,target=/src <<'EOF'
. /etc/target.env
# The prefix must be the path in the image: libibverbs searches for its providers there.
rdma=/opt/rdma-core
cmake -S /src -B /build -D CMAKE_BUILD_TYPE=Release -D CMAKE_INSTALL_PREFIX=$rdma -D CMAKE_INSTALL_LIBDIR=lib \
  -D CMAKE_INSTALL_SYSCONFDIR=$rdma/etc -D CMAKE_INSTALL_RUNDIR=/run -D CMAKE_SYSTEM_NAME=Linux -D CMAKE_SYSTEM_PROCESSOR="$CPU" -D CMAKE_C_COMPILER="$CC" \
  -D CMAKE_LIBRARY_ARCHITECTURE="$TRIPLET" -D NO_PYVERBS=1 -D NO_MAN_PAGES=1 -D ENABLE_RESOLVE_NEIGH=1
cmake --build /build
DESTDIR=/out/devel cmake --install /build
cd /out/devel
# Remove services for hosts, and scripts that need Perl.
rm -rf etc lib run usr .$rdma/etc/{init.d,rdma,srp_daemon.conf,iwpmd.conf,modprobe.d,udev} .$rdma/{lib/systemd,lib/udev,lib/ibacm,libexec,share}
rm -f .$rdma/sbin/{ibacm,iwpmd,rdma-ndd,srp_daemon,run_srp_daemon,ibsrpdm} .$rdma/bin/{ib_acme,rxe_cfg}
find .$rdma/bin .$rdma/sbin -type f -exec grep -qI '^#!' {} ';' -delete
mv .$rdma/sbin/* .$rdma/bin
rmdir .$rdma/sbin
install -m 644 /src/COPYING.* .$rdma
split-runtime
# Of infiniband-diags, runtime images keep only ibstat, which shows the state of ports.
cd /out/runtime$rdma/bin
find . -type f ! -name 'ibv_*' ! -name 'r*ping' ! -name 'rdma_*' ! -name 'ucmatose' ! -name 'ibstat' -delete
rm -rf /build
EOF

RUN <<'EOF'
# In devel images, compilers and pkg-config search only the folders of the distribution. Add links there.
cd /out/devel
mkdir -p usr/include/rdma usr/lib/pkgconfig
# Link the files in `rdma` one by one, as a link to the folder would hide the kernel's headers in /usr/include/rdma.
for name in opt/rdma-core/include/rdma/*; do ln -s "/$name" usr/include/rdma; done
for name in opt/rdma-core/include/*; do [ "${name##*/}" = rdma ] || ln -s "/$name" usr/include; done
for name in opt/rdma-core/lib/*.so; do ln -s "/$name" usr/lib; done
for name in opt/rdma-core/lib/pkgconfig/*; do ln -s "/$name" usr/lib/pkgconfig; done
EOF

# ---- nvbandwidth -----------------------------------------------------------------------------------
# nvbandwidth: Measures copy bandwidth and latency between host and GPUs, and between GPUs.
# Apache-2.0, https://github.com/NVIDIA/nvbandwidth, tag v0.8
FROM scratch AS nvbandwidth-source
ADD https://github.com/NVIDIA/nvbandwidth.git#66746a3bef61c8c2e12ab34955310da70b9e38cb /

FROM compiler AS nvbandwidth
RUN --mount=type=cache,id=apt-debian12,sharing=locked,target=/var/cache/apt \
    --mount=type=cache,id=apt-lists-debian12,sharing=locked,target=/var/lib/apt/lists \
    --mount=type=tmpfs,target=/var/log \
    --mount=type=secret,id=apt-get,target=/usr/local/sbin/apt-get,mode=0755 <<'EOF'
set -eu
rm -f /etc/apt/apt.conf.d/docker-clean
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
  libboost-program-options-dev:$TARGETARCH

EOF

RUN --mount=type=bind,from=nvbandwidth-source,target=/src \
    --mount=type=bind,from=nvcc,source=/usr/local/cuda,target=/usr/local/cuda <<'EOF'
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

# ---- pmix-git --------------------------------------------------------------------------------------
# PMIx from source: Library through which Slurm or mpirun connects the ranks of a job, in one
# version for all distributions. BSD-3-Clause-Open-MPI, https://openpmix.github.io, tag v5.0.10
FROM scratch AS pmix-git-source
ADD https://github.com/openpmix/openpmix.git#52275072f255ce0b94bd714e0e83f6a34d471c51 /

FROM compiler AS pmix-git
RUN --mount=type=cache,id=apt-debian12,sharing=locked,target=/var/cache/apt \
    --mount=type=cache,id=apt-lists-debian12,sharing=locked,target=/var/lib/apt/lists \
    --mount=type=tmpfs,target=/var/log \
    --mount=type=secret,id=apt-get,target=/usr/local/sbin/apt-get,mode=0755 <<'EOF'
set -eu
rm -f /etc/apt/apt.conf.d/docker-clean
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
  libevent-dev:$TARGETARCH \
  libhwloc-dev:$TARGETARCH \
  zlib1g-dev:$TARGETARCH

EOF

RUN --mount=type=bind,from=pmix-git-source,target=/src <<'EOF'
. /etc/target.env
cp -a /src /build
cd /build
# In git, the version of a release still ends with rc and a number. Remove this suffix.
sed -i 's/^greek=.*/greek=/' VERSION
# With this file, autogen.pl would ask git about submodules. The source is complete, but has no git repository.
rm -f .gitmodules
# For reproducible builds: pmix_info contains the user, host and time of the build.
export SOURCE_DATE_EPOCH=0 USER=imagebuild HOSTNAME=imagebuild
./autogen.pl
# PRRTE, a part of Open MPI, needs PMIx's internal headers.
./configure $CROSS --prefix=/opt/pmix --disable-static --disable-sphinx --with-devel-headers --without-munge \
  --with-hwloc --with-libevent --with-zlib --disable-python-bindings || {
  logs=$(find . -name config.log -exec grep -L '^configure: exit 0' {} + || true)
  for log in ${logs:-$(find . -name config.log)}; do
    echo "the end of $log:"
    sed '/^## Cache variables/,$d' "$log" | tail -n 100
  done >&2
  echo "configure failed; the reason is in config.log above" >&2
  exit 1
}
make
make install DESTDIR=/out/devel
find /out/devel -name '*.la' -delete
install -m 644 LICENSE /out/devel/opt/pmix/LICENSE
split-runtime
rm -rf /build
# Remove the wrapper compiler, as runtime images contain no compiler.
rm -f /out/runtime/opt/pmix/bin/pmixcc /out/runtime/opt/pmix/share/pmix/*-wrapper-data.txt
EOF

RUN <<'EOF'
# In devel images, pkg-config must find PMIx, and the wrapper compiler must call the image's gcc.
cd /out/devel
mkdir -p usr/lib/pkgconfig
ln -s /opt/pmix/lib/pkgconfig/pmix.pc usr/lib/pkgconfig
sed -i 's/^compiler=.*/compiler=gcc/' opt/pmix/share/pmix/*-wrapper-data.txt
EOF

# ---- nccl-wheel ------------------------------------------------------------------------------------
# NCCL: GPU collectives, from NVIDIA's wheel on the Python package index. Apache-2.0 AND
# BSD-3-Clause, https://github.com/NVIDIA/nccl
FROM fetch AS nccl-wheel
# A strip that knows both architectures.
RUN --mount=type=cache,id=apt-debian12,sharing=locked,target=/var/cache/apt \
    --mount=type=cache,id=apt-lists-debian12,sharing=locked,target=/var/lib/apt/lists \
    --mount=type=tmpfs,target=/var/log \
    --mount=type=secret,id=apt-get,target=/usr/local/sbin/apt-get,mode=0755 <<'EOF'
set -eu
rm -f /etc/apt/apt.conf.d/docker-clean
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
  binutils-multiarch

EOF

ARG TARGETARCH
RUN --mount=type=secret,id=ca --mount=type=secret,id=pip.conf <<'EOF'
fetch-wheels "$TARGETARCH" /wheels <<'WHEELS'
nvidia-nccl-cu13==2.32.3 \
  --hash=sha256:1459723080ac889d73a26edfa3e04383a7928ab31ac8f0ec43b3ea9548b04ff3 \
  --hash=sha256:a5bee92b2f4af218c109f8d221c3c9adcc752b94ae0ffcb0ed5abf9341a7724c
WHEELS
nccl=/out/devel/opt/nccl
mkdir -p "$nccl/lib/pkgconfig" /out/devel/usr/lib/pkgconfig
cp -a /wheels/nvidia/nccl/include "$nccl"
cp -a /wheels/nvidia/nccl/lib/libnccl.so.2 "$nccl/lib"
ln -s libnccl.so.2 "$nccl/lib/libnccl.so"
cp -a /wheels/nvidia_nccl_cu*.dist-info/licenses/License.txt "$nccl/LICENSE"
echo /opt/nccl/lib >/nccl.conf
cat > "$nccl/lib/pkgconfig/nccl.pc" <<'PC'
prefix=/opt/nccl
Name: nccl
Description: Collective communication between GPUs
Version: 2.32.3
Libs: -L${prefix}/lib -lnccl
Cflags: -I${prefix}/include
PC
ln -s ../../../opt/nccl/lib/pkgconfig/nccl.pc /out/devel/usr/lib/pkgconfig/nccl.pc
mkdir -p /out/runtime/opt/nccl/lib
# A fifth of the library is debug information.
strip --strip-unneeded -o /out/runtime/opt/nccl/lib/libnccl.so.2 "$nccl/lib/libnccl.so.2"
cp -a "$nccl/LICENSE" /out/runtime/opt/nccl
EOF

# ---- verbs-git -------------------------------------------------------------------------------------
# RDMA userspace for compiling: The files of rdma-core-git, in the folders that compilers search.
# GPL-2.0-only OR Linux-OpenIB, https://github.com/linux-rdma/rdma-core
FROM compiler AS verbs-git
RUN --mount=type=cache,id=apt-debian12,sharing=locked,target=/var/cache/apt \
    --mount=type=cache,id=apt-lists-debian12,sharing=locked,target=/var/lib/apt/lists \
    --mount=type=tmpfs,target=/var/log \
    --mount=type=secret,id=apt-get,target=/usr/local/sbin/apt-get,mode=0755 <<'EOF'
set -eu
rm -f /etc/apt/apt.conf.d/docker-clean
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
  libnl-3-200:$TARGETARCH \
  libnl-route-3-200:$TARGETARCH

EOF

COPY --from=rdma-core-git /out/devel/opt/rdma-core /opt/rdma-core
# Add links in the distribution's folders, which compilers search for headers and libraries.
RUN <<'EOF'
. /etc/target.env
cp -as /opt/rdma-core/include/. /usr/include
cp -as /opt/rdma-core/lib/. "/usr/lib/$TRIPLET"
EOF

# ---- perftest --------------------------------------------------------------------------------------
# perftest: Measures bandwidth and latency of RDMA devices, also with GPU memory. (GPL-2.0-only OR
# BSD-2-Clause) AND GPL-2.0-or-later, https://github.com/linux-rdma/perftest, tag 26.04.17
FROM scratch AS perftest-source
ADD https://github.com/linux-rdma/perftest.git#720b61082454e189b1f21835ec175536a944afc3 /

FROM verbs-git AS perftest
RUN --mount=type=cache,id=apt-debian12,sharing=locked,target=/var/cache/apt \
    --mount=type=cache,id=apt-lists-debian12,sharing=locked,target=/var/lib/apt/lists \
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
    --mount=type=bind,from=nvcc,source=/usr/local/cuda,target=/usr/local/cuda <<'EOF'
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

# ---- ucx -------------------------------------------------------------------------------------------
# UCX: Transport library with CUDA, verbs, rdmacm, mlx5 and GDRCopy. BSD-3-Clause,
# https://openucx.org, tag v1.22.0
FROM scratch AS ucx-source
ADD https://github.com/openucx/ucx.git#8a6b06fb880accbb933a79cda893883872c68d9d /

FROM verbs-git AS ucx
RUN --mount=type=bind,from=ucx-source,target=/src \
    --mount=type=bind,from=nvcc,source=/usr/local/cuda,target=/usr/local/cuda \
    --mount=type=bind,from=gdrcopy,source=/out/devel/opt/gdrcopy,target=/opt/gdrcopy <<'EOF'
. /etc/target.env
cp -a /src /build
cd /build
./autogen.sh
./contrib/configure-release $CROSS --prefix=/opt/ucx --disable-static --enable-mt \
  --with-cuda=/usr/local/cuda --with-nvcc-gencode="$(/usr/local/cuda/bin/capabilities nvcc "$TARGETARCH")" \
  --with-gdrcopy=/opt/gdrcopy --with-verbs --with-rdmacm --with-mlx5 \
  --without-rocm --without-ze --without-gaudi --without-fuse3 --without-xpmem --without-knem --without-go --without-java || {
  logs=$(find . -name config.log -exec grep -L '^configure: exit 0' {} + || true)
  for log in ${logs:-$(find . -name config.log)}; do
    echo "the end of $log:"
    sed '/^## Cache variables/,$d' "$log" | tail -n 100
  done >&2
  echo "configure failed; the reason is in config.log above" >&2
  exit 1
}
# In a cross build, configure cannot test arm64's hardware timer. Enable it, as Linux lets all programs read the timer.
sed -i 's/^#define HAVE_HW_TIMER 0/#define HAVE_HW_TIMER 1/' config.h
make
make install DESTDIR=/out/devel
find /out/devel -name '*.la' -delete
install -m 644 LICENSE /out/devel/opt/ucx/LICENSE
split-runtime
rm -rf /build
EOF

# ---- compiler-os -----------------------------------------------------------------------------------
# Compilers on the image's distribution: The same as `compiler`, for programs that are compiled
# against libraries of the image's own distribution. GPL-3.0-or-later WITH GCC-exception-3.1,
# https://gcc.gnu.org
FROM --platform=$BUILDPLATFORM debian:13.7-slim@sha256:a99cfc517144bc59b1978475ec53b46ecabec7e43635402ee5b77cc54cd1b20a AS compiler-os
# For all stages that start from this one: a step ends at the first command that fails, also in a pipe.
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
ARG TARGETARCH
# Compilers are called by the name with their target's architecture, also if that is the build machine's architecture.
RUN --mount=type=cache,id=apt-debian13,sharing=locked,target=/var/cache/apt \
    --mount=type=cache,id=apt-lists-debian13,sharing=locked,target=/var/lib/apt/lists \
    --mount=type=tmpfs,target=/var/log \
    --mount=type=secret,id=apt-get,target=/usr/local/sbin/apt-get,mode=0755 <<'EOF'
set -eu
cpu=$(awk -v arch="$TARGETARCH" '$1 == arch {print $2}' /usr/share/dpkg/cputable)
dpkg --add-architecture "$TARGETARCH"
rm -f /etc/apt/apt.conf.d/docker-clean
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
  autoconf \
  automake \
  bzip2 \
  cmake \
  flex \
  g++ \
  libtool \
  make \
  patch \
  perl \
  pkgconf \
  "g++-$(echo "$cpu" | tr _ -)-linux-gnu"

cat > /etc/target.env <<ENV
export CPU=$cpu TRIPLET=$cpu-linux-gnu
export CC=$cpu-linux-gnu-gcc CXX=$cpu-linux-gnu-g++ AR=$cpu-linux-gnu-gcc-ar STRIP=$cpu-linux-gnu-strip
export NVCC_CCBIN=$cpu-linux-gnu-g++
export PKG_CONFIG_LIBDIR=/usr/lib/$cpu-linux-gnu/pkgconfig:/usr/share/pkgconfig
export MAKEFLAGS=-j$(nproc)
# For configure, and always a cross build: a script that may not run its tests cannot take the CPU of the
# machine that builds for that of the machines the image will run on.
export CROSS="--build=$(uname -m)-build-linux-gnu --host=$cpu-linux-gnu"
ENV
EOF

COPY --chmod=755 <<'EOF' /usr/local/bin/driver-stubs
#!/bin/sh
# driver-stubs INCLUDE FOLDER: make libcuda.so and libnvidia-ml.so with an empty function for every name
# in cuda.h and nvml.h. Enough to link; the driver brings the libraries at run time.
set -eu
. /etc/target.env
mkdir -p "$2"
for stub in cuda:cu:libcuda nvml:nvml:libnvidia-ml; do
  header=${stub%%:*} library=${stub##*:} prefix=${stub#*:}
  grep -ohE "\b${prefix%:*}[A-Z][A-Za-z0-9_]*" "$1/$header.h" | sort -u | sed 's/.*/void &(void) {}/' |
    $CC -shared -fPIC -Wl,-soname,"$library.so.1" -o "$2/$library.so" -x c -
done
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

# ---- aws-ofi-nccl ----------------------------------------------------------------------------------
# NCCL plug-in for libfabric: Connects NCCL to AWS's EFA through the distribution's libfabric; used
# only with NCCL_NET_PLUGIN=ofi. Apache-2.0, https://github.com/aws/aws-ofi-nccl
FROM scratch AS aws-ofi-nccl-source
ADD https://github.com/aws/aws-ofi-nccl.git#2475c4c736907e68ebeadb3848f31231ee4a44d0 /

FROM compiler-os AS aws-ofi-nccl
RUN --mount=type=cache,id=apt-debian13,sharing=locked,target=/var/cache/apt \
    --mount=type=cache,id=apt-lists-debian13,sharing=locked,target=/var/lib/apt/lists \
    --mount=type=tmpfs,target=/var/log \
    --mount=type=secret,id=apt-get,target=/usr/local/sbin/apt-get,mode=0755 <<'EOF'
set -eu
rm -f /etc/apt/apt.conf.d/docker-clean
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
  libfabric-dev:$TARGETARCH \
  libhwloc-dev:$TARGETARCH

EOF

RUN --mount=type=bind,from=aws-ofi-nccl-source,target=/src \
    --mount=type=bind,from=nvcc,source=/usr/local/cuda,target=/usr/local/cuda \
    --mount=type=bind,from=gdrcopy,source=/out/devel/opt/gdrcopy/include,target=/opt/gdrcopy/include <<'EOF'
. /etc/target.env
cp -a /src /build
cd /build
# Without this file, the build would get the version from git.
echo 1.21.1 > .release_version
./autogen.sh
# --enable-platform-aws requires libfabric 1.22 and includes the tuner, also on build machines that are not AWS's.
./configure $CROSS --prefix=/opt/aws-ofi-nccl --enable-platform-aws --with-cuda=/usr/local/cuda --with-gdrcopy=/opt/gdrcopy \
  --disable-nccl-net-library --disable-tests --disable-werror --with-mpi=no || {
  logs=$(find . -name config.log -exec grep -L '^configure: exit 0' {} + || true)
  for log in ${logs:-$(find . -name config.log)}; do
    echo "the end of $log:"
    sed '/^## Cache variables/,$d' "$log" | tail -n 100
  done >&2
  echo "configure failed; the reason is in config.log above" >&2
  exit 1
}
make
make install DESTDIR=/out/devel
plugin=/out/devel/opt/aws-ofi-nccl
find $plugin -name '*.la' -delete
# The plug-in contains the tuner. The links are the names of the tuner for NCCL_TUNER_PLUGIN.
ln -sf libnccl-net-ofi.so $plugin/lib/libnccl-tuner-ofi.so
ln -sf libnccl-net-ofi.so $plugin/lib/libnccl-ofi-tuner.so
install -m 644 LICENSE NOTICE $plugin
split-runtime
rm -rf /build
EOF

# ---- nccl-abi --------------------------------------------------------------------------------------
# NCCL interface: An old NCCL, for compiling; what is compiled with it runs with this NCCL and with
# later ones, and does not change with them. Apache-2.0 AND BSD-3-Clause,
# https://github.com/NVIDIA/nccl
FROM fetch AS nccl-abi
ARG TARGETARCH
RUN --mount=type=secret,id=ca --mount=type=secret,id=pip.conf <<'EOF'
fetch-wheels "$TARGETARCH" /wheels <<'WHEELS'
nvidia-nccl-cu13==2.27.7 \
  --hash=sha256:b28a524abd8389b76a4a3f133c76a7aaa7005e47fcaa9d9603b90103927a3f93 \
  --hash=sha256:5e3cc863e52bf9dd1e3ab1941bddb414098f489ae7342f6b3a274602303da123
WHEELS
mkdir -p /out/devel/opt/nccl
cp -a /wheels/nvidia/nccl/include /wheels/nvidia/nccl/lib /out/devel/opt/nccl
ln -s libnccl.so.2 /out/devel/opt/nccl/lib/libnccl.so
EOF

# ---- ucc -------------------------------------------------------------------------------------------
# UCC: Collectives over UCX and NCCL, which Open MPI uses. BSD-3-Clause,
# https://github.com/openucx/ucc, tag v1.8.0
FROM scratch AS ucc-source
ADD https://github.com/openucx/ucc.git#211e2f60436cba7c044195acb43752aa70eab38f /

FROM verbs-git AS ucc
RUN --mount=type=bind,from=ucc-source,target=/src \
    --mount=type=bind,from=nvcc,source=/usr/local/cuda,target=/usr/local/cuda \
    --mount=type=bind,from=nccl-abi,source=/out/devel/opt/nccl,target=/opt/nccl \
    --mount=type=bind,from=ucx,source=/out/devel/opt/ucx,target=/opt/ucx <<'EOF'
. /etc/target.env
cp -a /src /build
cd /build
./autogen.sh
./configure $CROSS --prefix=/opt/ucc --disable-static --with-ucx=/opt/ucx --with-nccl=/opt/nccl \
  --with-cuda=/usr/local/cuda --with-nvcc-gencode="$(/usr/local/cuda/bin/capabilities nvcc "$TARGETARCH")" \
  --without-rocm LDFLAGS=-Wl,-rpath=/opt/ucx/lib || {
  logs=$(find . -name config.log -exec grep -L '^configure: exit 0' {} + || true)
  for log in ${logs:-$(find . -name config.log)}; do
    echo "the end of $log:"
    sed '/^## Cache variables/,$d' "$log" | tail -n 100
  done >&2
  echo "configure failed; the reason is in config.log above" >&2
  exit 1
}
make
make install DESTDIR=/out/devel
find /out/devel -name '*.la' -delete
install -m 644 LICENSE /out/devel/opt/ucc/LICENSE
split-runtime
rm -rf /build
EOF

# ---- openmpi-git -----------------------------------------------------------------------------------
# Open MPI: mpirun and libmpi with UCX, UCC, CUDA, Slurm, and PMIx from source. BSD-3-Clause-Open-
# MPI, https://www.open-mpi.org, tag v5.0.10
FROM scratch AS openmpi-git-source
ADD https://github.com/open-mpi/ompi.git#0d48030d410ae8f56790933135b28be1b3920ba1 /

FROM compiler AS openmpi-git
RUN --mount=type=cache,id=apt-debian12,sharing=locked,target=/var/cache/apt \
    --mount=type=cache,id=apt-lists-debian12,sharing=locked,target=/var/lib/apt/lists \
    --mount=type=tmpfs,target=/var/log \
    --mount=type=secret,id=apt-get,target=/usr/local/sbin/apt-get,mode=0755 <<'EOF'
set -eu
rm -f /etc/apt/apt.conf.d/docker-clean
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
  libevent-dev:$TARGETARCH \
  libhwloc-dev:$TARGETARCH

EOF

RUN --mount=type=bind,from=openmpi-git-source,target=/src \
    --mount=type=bind,from=nvcc,source=/usr/local/cuda/include,target=/usr/local/cuda/include \
    --mount=type=bind,from=nvcc,source=/usr/local/cuda/lib64,target=/usr/local/cuda/lib64 \
    --mount=type=bind,from=pmix-git,source=/out/devel/opt/pmix,target=/opt/pmix \
    --mount=type=bind,from=ucx,source=/out/devel/opt/ucx,target=/opt/ucx \
    --mount=type=bind,from=ucc,source=/out/devel/opt/ucc,target=/opt/ucc <<'EOF'
. /etc/target.env
cp -a /src /build
cd /build
# In git, the version of a release still ends with rc and a number. Remove this suffix.
sed -i 's/^greek=.*/greek=/' VERSION
# With this file, autogen.pl would ask git about submodules. The source is complete, but has no git repository.
find . -name .gitmodules -delete
# configure runs a program to test whether 128-bit atomics are lock-free. A cross build cannot run it and would
# wrongly assume that they are, and so need libatomic. Test with the compiler instead.
sed -i '/__atomic_always_lock_free/ { s/AC_RUN_IFELSE/AC_COMPILE_IFELSE/; s/if (!\(.*0)\)) { return 1; }/_Static_assert(\1, "");/ }' \
  config/opal_config_asm.m4
if ! grep -qF '_Static_assert(__atomic_always_lock_free(16, 0), "");' config/opal_config_asm.m4; then
  echo "Open MPI: expected config/opal_config_asm.m4 to run a test of __atomic_always_lock_free(16, 0), found:" >&2
  grep -n always_lock_free config/opal_config_asm.m4 >&2 || echo "  none" >&2
  echo "choose another version (--set openmpi=), or adapt build.j2 of openmpi-git to this version" >&2
  exit 1
fi
# For reproducible builds: ompi_info contains the user, host and time of the build.
export SOURCE_DATE_EPOCH=0 USER=imagebuild HOSTNAME=imagebuild
./autogen.pl --no-3rdparty hwloc,libevent,openpmix
export PKG_CONFIG_LIBDIR=/opt/pmix/lib/pkgconfig:$PKG_CONFIG_LIBDIR
./configure $CROSS --prefix=/opt/ompi --disable-static --disable-mpi-fortran --disable-oshmem --disable-sphinx \
  --disable-io-romio --enable-mca-no-build=btl-uct --without-ofi \
  --with-pmix=/opt/pmix --with-hwloc=external --with-libevent=external --with-slurm \
  --with-ucx=/opt/ucx --with-ucc=/opt/ucc \
  --with-cuda=/usr/local/cuda --with-cuda-libdir=/usr/local/cuda/lib64/stubs \
  --with-wrapper-cc=gcc ompi_cv_c_word_size_align=no LDFLAGS=-Wl,-rpath=/opt/pmix/lib:/opt/ucx/lib:/opt/ucc/lib || {
  logs=$(find . -name config.log -exec grep -L '^configure: exit 0' {} + || true)
  for log in ${logs:-$(find . -name config.log)}; do
    echo "the end of $log:"
    sed '/^## Cache variables/,$d' "$log" | tail -n 100
  done >&2
  echo "configure failed; the reason is in config.log above" >&2
  exit 1
}
make
make install DESTDIR=/out/devel
find /out/devel -name '*.la' -delete
sed -i 's/^compiler=.*-g++$/compiler=g++/' /out/devel/opt/ompi/share/openmpi/*-wrapper-data.txt
install -m 644 LICENSE /out/devel/opt/ompi/LICENSE
# Do not warn about components that cannot load without a driver: a node that only starts ranks has no driver.
echo 'mca_base_component_show_load_errors = ^accelerator/cuda,rcache/gpusm,rcache/rgpusm' \
  >> /out/devel/opt/ompi/etc/openmpi-mca-params.conf
split-runtime
# Remove wrapper compilers, as runtime images contain no compiler.
find /out/runtime/opt/ompi \( -name 'mpi[cC]*' -o -name opal_wrapper -o -name '*-wrapper-data.txt' \) -delete
rm -rf /build
EOF

# ---- nccl-tests ------------------------------------------------------------------------------------
# NCCL tests: Measures bandwidth of NCCL's collectives and checks their data, on one node, or on
# several with mpirun or srun. BSD-3-Clause, https://github.com/NVIDIA/nccl-tests, tag v2.19.6
FROM scratch AS nccl-tests-source
ADD https://github.com/NVIDIA/nccl-tests.git#a0b82b2260cf5152b9f8c061bbf7eaf0ba096432 /

FROM compiler AS nccl-tests
RUN --mount=type=bind,from=nccl-tests-source,target=/src \
    --mount=type=bind,from=nvcc,source=/usr/local/cuda,target=/usr/local/cuda \
    --mount=type=bind,from=nccl-wheel,source=/out/devel/opt/nccl,target=/opt/nccl \
    --mount=type=bind,from=openmpi-git,source=/out/devel/opt/ompi,target=/opt/ompi <<'EOF'
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
# Contains the files that the stages above wrote to /out/runtime
FROM debian:13.7-slim@sha256:a99cfc517144bc59b1978475ec53b46ecabec7e43635402ee5b77cc54cd1b20a AS image
# This is one step, so that an update of a component executes only one step. It installs packages, updates the cache of
# the loader, adds a normal user, and sets the same environment in containers, login shells and ssh sessions.
RUN --mount=type=cache,id=apt-debian13,sharing=locked,target=/var/cache/apt \
    --mount=type=cache,id=apt-lists-debian13,sharing=locked,target=/var/lib/apt/lists \
    --mount=type=tmpfs,target=/var/log \
    --mount=type=secret,id=apt-get,target=/usr/local/sbin/apt-get,mode=0755 \
    --mount=type=bind,from=cuda,source=/out/runtime/usr/local/cuda/lib,target=/usr/local/cuda/lib \
    --mount=type=bind,from=gdrcopy,source=/out/runtime/opt/gdrcopy/lib,target=/opt/gdrcopy/lib \
    --mount=type=bind,from=rdma-core-git,source=/out/runtime/opt/rdma-core/lib,target=/opt/rdma-core/lib \
    --mount=type=bind,from=pmix-git,source=/out/runtime/opt/pmix/lib,target=/opt/pmix/lib \
    --mount=type=bind,from=nccl-wheel,source=/out/runtime/opt/nccl/lib,target=/opt/nccl/lib \
    --mount=type=bind,from=ucx,source=/out/runtime/opt/ucx/lib,target=/opt/ucx/lib \
    --mount=type=bind,from=aws-ofi-nccl,source=/out/runtime/opt/aws-ofi-nccl/lib,target=/opt/aws-ofi-nccl/lib \
    --mount=type=bind,from=ucc,source=/out/runtime/opt/ucc/lib,target=/opt/ucc/lib \
    --mount=type=bind,from=openmpi-git,source=/out/runtime/opt/ompi/lib,target=/opt/ompi/lib \
    bash -eu <<'EOF'
# Programs write this time to files instead of the current time, so that builds are reproducible.
SOURCE_DATE_EPOCH=$(stat --dereference --format=%Y /etc/os-release)
export SOURCE_DATE_EPOCH
rm -f /etc/apt/apt.conf.d/docker-clean
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
  libevent-core-2.1-7t64 \
  libevent-pthreads-2.1-7t64 \
  libfabric-bin \
  libfabric1 \
  libgomp1 \
  libhwloc15 \
  libnl-3-200 \
  libnl-route-3-200 \
  libnss-wrapper \
  libnuma1 \
  libudev1 \
  'openssh-client=1:10.0p1-7*' \
  'openssh-server=1:10.0p1-7*' \
  zlib1g

# The package makes host keys. In the image, they would be public.
rm -f /etc/ssh/ssh_host_*
# The image's own /usr/sbin/sshd makes host keys, and then starts the distribution's sshd.
dpkg-divert --quiet --local --rename --divert /usr/sbin/sshd.distrib --add /usr/sbin/sshd
cat > /etc/ld.so.conf.d/imagebuild.conf <<'FOLDERS'
# cuda
/usr/local/cuda/lib
# gdrcopy
/opt/gdrcopy/lib
# rdma-core-git
/opt/rdma-core/lib
# pmix-git
/opt/pmix/lib
# nccl-wheel
/opt/nccl/lib
# ucx
/opt/ucx/lib
# aws-ofi-nccl
/opt/aws-ofi-nccl/lib
# ucc
/opt/ucc/lib
# openmpi-git
/opt/ompi/lib
FOLDERS
ldconfig
# Some distributions already have a user with this id.
if getent passwd 1000 > /dev/null; then userdel --remove "$(getent passwd 1000 | cut -d: -f1)"; fi
useradd --create-home --uid 1000 --shell /bin/bash --password '*' mpiuser
cat > /etc/profile.d/imagebuild.sh <<'PROFILE'
export PATH="/opt/nccl-tests/build:/opt/ompi/bin:/opt/ucc/bin:/opt/ucx/bin:/opt/pmix/bin:/opt/rdma-core/bin:/opt/gdrcopy/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
export NVIDIA_VISIBLE_DEVICES="all"
export NVIDIA_DRIVER_CAPABILITIES="compute,utility"
PROFILE
cat > /etc/ssh/sshd_config.d/20-environment.conf <<'CONFIG'
SetEnv PATH="/opt/nccl-tests/build:/opt/ompi/bin:/opt/ucc/bin:/opt/ucx/bin:/opt/pmix/bin:/opt/rdma-core/bin:/opt/gdrcopy/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" NVIDIA_VISIBLE_DEVICES="all" NVIDIA_DRIVER_CAPABILITIES="compute,utility"
CONFIG
# The id is for one machine only, and the auxiliary cache of ldconfig contains inode numbers of the build machine.
if [ -s /etc/machine-id ]; then : > /etc/machine-id; fi
rm -f /var/cache/ldconfig/aux-cache
EOF

COPY --link --from=cuda /out/runtime/ /
COPY --link --from=gdrcopy /out/runtime/ /
COPY --link --from=nvbandwidth /out/runtime/ /
COPY --link --from=pmix-git /out/runtime/ /
COPY --link --from=rdma-core-git /out/runtime/ /
COPY --link --from=perftest /out/runtime/ /
COPY --link --from=ucx /out/runtime/ /
COPY --link --from=ucc /out/runtime/ /
COPY --link --from=openmpi-git /out/runtime/ /
COPY --link --from=aws-ofi-nccl /out/runtime/ /
COPY --link --from=nccl-wheel /out/runtime/ /
COPY --link --from=nccl-tests /out/runtime/ /

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

ENV PATH="/opt/nccl-tests/build:/opt/ompi/bin:/opt/ucc/bin:/opt/ucx/bin:/opt/pmix/bin:/opt/rdma-core/bin:/opt/gdrcopy/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" \
    NVIDIA_VISIBLE_DEVICES="all" \
    NVIDIA_DRIVER_CAPABILITIES="compute,utility"

LABEL org.opencontainers.image.title="open" \
      org.opencontainers.image.description="UCX, UCC, Open MPI and the benchmarks from upstream source, with CUDA, verbs and GDRCopy" \
      org.opencontainers.image.version="cuda13.5-debian13-runtime" \
      org.opencontainers.image.base.name="debian:13.7-slim" \
      org.opencontainers.image.licenses="((GPL-2.0-only OR BSD-2-Clause) AND GPL-2.0-or-later) AND (Apache-2.0 AND BSD-3-Clause) AND (Apache-2.0) AND (BSD-2-Clause AND BSD-3-Clause AND MIT) AND (BSD-3-Clause) AND (BSD-3-Clause-Open-MPI) AND (GPL-2.0-only OR Linux-OpenIB) AND (LicenseRef-NVIDIA-CUDA-EULA) AND (MIT)" \
      imagebuild.target="open-cuda13.5-debian13-runtime" \
      imagebuild.lock="0e0fd7bdac80" \
      imagebuild.axis.cuda="13.5" \
      imagebuild.axis.os="debian13" \
      imagebuild.axis.variant="runtime" \
      imagebuild.component.cuda="13.5" \
      imagebuild.component.gdrcopy="2.6" \
      imagebuild.component.rdma-core-git="63.1" \
      imagebuild.component.nvbandwidth="0.8" \
      imagebuild.component.pmix-git="5.0.10" \
      imagebuild.component.sshd="1:10.0p1-7" \
      imagebuild.component.nccl-wheel="2.32.3" \
      imagebuild.component.perftest="26.04.17" \
      imagebuild.component.ucx="1.22.0" \
      imagebuild.component.aws-ofi-nccl="1.21.1" \
      imagebuild.component.ucc="1.8.0" \
      imagebuild.component.openmpi-git="5.0.10" \
      imagebuild.component.nccl-tests="2.19.6"
CMD ["bash"]
