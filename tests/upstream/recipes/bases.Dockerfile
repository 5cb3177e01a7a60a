# Stand-ins for the base images: Debian 13 under other names, with Debian's /etc/os-release, or a root file system that is
# bootstrapped from Ubuntu's archive.
ARG BASE=debian:13-standin
FROM debian:13-standin AS bootstrapped
RUN apt-get update -qq && \
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends mmdebstrap ubuntu-keyring
ARG SUITE
RUN for suite in "$SUITE" "$SUITE-updates"; do \
      echo "deb [signed-by=/usr/share/keyrings/ubuntu-archive-keyring.gpg] http://archive.ubuntu.com/ubuntu $suite main universe"; \
    done | mmdebstrap --mode=root --variant=minbase --skip=output/dev,check/qemu "$SUITE" /rootfs -

FROM scratch AS ubuntu-archive
COPY --from=bootstrapped /rootfs /

FROM $BASE AS ubuntu
LABEL imagebuild.standin="true" \
      org.opencontainers.image.title="ubuntu" \
      org.opencontainers.image.description="STAND-IN made for tests: this is Debian 13, or a minimal Ubuntu"

FROM ubuntu AS runtime-packages
RUN apt-get update -qq && \
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends ca-certificates gnupg && \
    rm -rf /var/lib/apt/lists/*

FROM runtime-packages AS devel-packages
RUN apt-get update -qq && \
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends build-essential && \
    rm -rf /var/lib/apt/lists/*

# The files that all CUDA versions share.
FROM devel-packages AS tree
ARG TOOLKIT
RUN --mount=type=bind,source=toolkit.sh,target=/toolkit.sh --mount=type=bind,from=toolkit,target=/wheels \
    bash /toolkit.sh "$TOOLKIT"

FROM devel-packages AS version
RUN apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends patchelf
ARG TOOLKIT
ARG CUDA
RUN --mount=type=bind,source=version.sh,target=/version.sh --mount=type=bind,from=toolkit,target=/wheels \
    bash /version.sh "$TOOLKIT" "$CUDA"

FROM runtime-packages AS runtime-files
ARG CUDA
ARG OS
ARG NCCL
ARG HELD
COPY --link --from=version /out/runtime /
RUN --mount=type=bind,source=image.sh,target=/image.sh --mount=type=bind,from=packages,target=/packages \
    --mount=type=bind,from=keys,target=/keys bash /image.sh runtime "$OS" "$NCCL" $HELD

FROM devel-packages AS devel-files
COPY --link --from=tree /out /
ARG CUDA
ARG OS
ARG NCCL
ARG HELD
ARG FOREIGN
ARG UNMET
COPY --link --from=version /out/devel /
RUN --mount=type=bind,source=image.sh,target=/image.sh --mount=type=bind,from=packages,target=/packages \
    --mount=type=bind,from=keys,target=/keys bash /image.sh devel "$OS" "$NCCL" $HELD
