# quickstart-cuda13.5-debian13-devel
# Software from the distribution's archive and the Python package index; built in minutes
#
#   cuda               13.5
#   pmix               5.0.7-1
#   rdma-core          56.1-1
#   sshd               1:10.0p1-7
#   cuda-stubs         13.5
#   nccl-wheel         2.32.3
#   perftest-distro    25.01.0+0.80-1
#   ucx-distro         1.18.1+ds-2
#   openmpi-distro     5.0.7-1
#
# Written by imagebuild 0.1.0, lock affff1551b1d:  imagebuild render quickstart-cuda13.5-debian13-devel
# Needs no build context:  docker buildx build -t quickstart - < Dockerfile

# ---- fetch -----------------------------------------------------------------------------------------
# Downloader: pip, which downloads wheels for any architecture and verifies their hashes. MIT,
# https://pip.pypa.io
FROM --platform=$BUILDPLATFORM debian:13.7-slim@sha256:a99cfc517144bc59b1978475ec53b46ecabec7e43635402ee5b77cc54cd1b20a AS fetch
# For all stages that start from this one: a step ends at the first command that fails, also in a pipe.
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
RUN --mount=type=cache,id=apt-debian13,sharing=locked,target=/var/cache/apt \
    --mount=type=cache,id=apt-lists-debian13,sharing=locked,target=/var/lib/apt/lists \
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

# ---- cuda-stubs ------------------------------------------------------------------------------------
# Driver stubs: Empty libcuda and libnvidia-ml for linking; at run time, the driver provides the
# real libraries. Apache-2.0, https://docs.nvidia.com/cuda/cuda-driver-api
FROM compiler AS cuda-stubs
RUN --mount=type=bind,from=cuda,source=/out/devel/usr/local/cuda/include,target=/include \
    driver-stubs /include /out/devel/usr/local/cuda/lib/stubs

# ---- nccl-wheel ------------------------------------------------------------------------------------
# NCCL: GPU collectives, from NVIDIA's wheel on the Python package index. Apache-2.0 AND
# BSD-3-Clause, https://github.com/NVIDIA/nccl
FROM fetch AS nccl-wheel
# A strip that knows both architectures.
RUN --mount=type=cache,id=apt-debian13,sharing=locked,target=/var/cache/apt \
    --mount=type=cache,id=apt-lists-debian13,sharing=locked,target=/var/lib/apt/lists \
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

# ---- image -----------------------------------------------------------------------------------------
# Contains the files that the stages above wrote to /out/devel
FROM debian:13.7-slim@sha256:a99cfc517144bc59b1978475ec53b46ecabec7e43635402ee5b77cc54cd1b20a AS image
# This is one step, so that an update of a component executes only one step. It installs packages, updates the cache of
# the loader, adds a normal user, and sets the same environment in containers, login shells and ssh sessions.
RUN --mount=type=cache,id=apt-debian13,sharing=locked,target=/var/cache/apt \
    --mount=type=cache,id=apt-lists-debian13,sharing=locked,target=/var/lib/apt/lists \
    --mount=type=tmpfs,target=/var/log \
    --mount=type=secret,id=apt-get,target=/usr/local/sbin/apt-get,mode=0755 \
    --mount=type=bind,from=cuda,source=/out/devel/usr/local/cuda/lib,target=/usr/local/cuda/lib \
    --mount=type=bind,from=nccl-wheel,source=/out/devel/opt/nccl/lib,target=/opt/nccl/lib \
    bash -eu <<'EOF'
# Programs write this time to files instead of the current time, so that builds are reproducible.
SOURCE_DATE_EPOCH=$(stat --dereference --format=%Y /etc/os-release)
export SOURCE_DATE_EPOCH
rm -f /etc/apt/apt.conf.d/docker-clean
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
  g++ \
  'ibverbs-providers=56.1-1*' \
  'ibverbs-utils=56.1-1*' \
  'infiniband-diags=56.1-1*' \
  'libibumad-dev=56.1-1*' \
  'libibumad3=56.1-1*' \
  'libibverbs-dev=56.1-1*' \
  'libibverbs1=56.1-1*' \
  libnss-wrapper \
  'libopenmpi-dev=5.0.7-1*' \
  'libopenmpi40=5.0.7-1*' \
  'libpmix-dev=5.0.7-1*' \
  'libpmix2t64=5.0.7-1*' \
  'librdmacm-dev=56.1-1*' \
  'librdmacm1t64=56.1-1*' \
  'libucx-dev=1.18.1+ds-2*' \
  'libucx0=1.18.1+ds-2*' \
  make \
  'openmpi-bin=5.0.7-1*' \
  'openssh-client=1:10.0p1-7*' \
  'openssh-server=1:10.0p1-7*' \
  'perftest=25.01.0+0.80-1*' \
  pkg-config \
  pkgconf \
  'rdmacm-utils=56.1-1*' \
  'ucx-utils=1.18.1+ds-2*'

# The package makes host keys. In the image, they would be public.
rm -f /etc/ssh/ssh_host_*
# The image's own /usr/sbin/sshd makes host keys, and then starts the distribution's sshd.
dpkg-divert --quiet --local --rename --divert /usr/sbin/sshd.distrib --add /usr/sbin/sshd
cat > /etc/ld.so.conf.d/imagebuild.conf <<'FOLDERS'
# cuda
/usr/local/cuda/lib
# nccl-wheel
/opt/nccl/lib
FOLDERS
ldconfig
# Some distributions already have a user with this id.
if getent passwd 1000 > /dev/null; then userdel --remove "$(getent passwd 1000 | cut -d: -f1)"; fi
useradd --create-home --uid 1000 --shell /bin/bash --password '*' mpiuser
cat > /etc/profile.d/imagebuild.sh <<'PROFILE'
export PATH="/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
export NVIDIA_VISIBLE_DEVICES="all"
export NVIDIA_DRIVER_CAPABILITIES="compute,utility"
PROFILE
cat > /etc/ssh/sshd_config.d/20-environment.conf <<'CONFIG'
SetEnv PATH="/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" NVIDIA_VISIBLE_DEVICES="all" NVIDIA_DRIVER_CAPABILITIES="compute,utility"
CONFIG
# The id is for one machine only, and the auxiliary cache of ldconfig contains inode numbers of the build machine.
if [ -s /etc/machine-id ]; then : > /etc/machine-id; fi
rm -f /var/cache/ldconfig/aux-cache
EOF

COPY --link --from=cuda /out/devel/ /
COPY --link --from=cuda-stubs /out/devel/ /
COPY --link --from=nccl-wheel /out/devel/ /

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

ENV PATH="/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" \
    NVIDIA_VISIBLE_DEVICES="all" \
    NVIDIA_DRIVER_CAPABILITIES="compute,utility"

LABEL org.opencontainers.image.title="quickstart" \
      org.opencontainers.image.description="Software from the distribution's archive and the Python package index; built in minutes" \
      org.opencontainers.image.version="cuda13.5-debian13-devel" \
      org.opencontainers.image.base.name="debian:13.7-slim" \
      org.opencontainers.image.licenses="(Apache-2.0 AND BSD-3-Clause) AND (Apache-2.0) AND (BSD-2-Clause AND BSD-3-Clause AND MIT) AND (BSD-3-Clause) AND (BSD-3-Clause-Open-MPI) AND (GPL-2.0-only OR BSD-2-Clause) AND (GPL-2.0-only OR Linux-OpenIB) AND (LicenseRef-NVIDIA-CUDA-EULA)" \
      imagebuild.target="quickstart-cuda13.5-debian13-devel" \
      imagebuild.lock="affff1551b1d" \
      imagebuild.axis.cuda="13.5" \
      imagebuild.axis.os="debian13" \
      imagebuild.axis.variant="devel" \
      imagebuild.component.cuda="13.5" \
      imagebuild.component.pmix="5.0.7-1" \
      imagebuild.component.rdma-core="56.1-1" \
      imagebuild.component.sshd="1:10.0p1-7" \
      imagebuild.component.cuda-stubs="13.5" \
      imagebuild.component.nccl-wheel="2.32.3" \
      imagebuild.component.perftest-distro="25.01.0+0.80-1" \
      imagebuild.component.ucx-distro="1.18.1+ds-2" \
      imagebuild.component.openmpi-distro="5.0.7-1"
CMD ["bash"]
