# The parts of HPC-X that are compiled or come from the distribution. tests/upstream/hpcx.py generates the text files.
FROM debian:13-standin AS tools
RUN apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
      autoconf automake build-essential bzip2 flex libibverbs-dev libtool patchelf perl pkgconf xz-utils && \
      rm -rf /var/lib/apt/lists/*

FROM tools AS ucx
RUN --mount=type=bind,source=ucx.sh,target=/ucx.sh bash /ucx.sh /out/ucx

FROM tools AS ucc
RUN --mount=type=bind,source=ucc.sh,target=/ucc.sh bash /ucc.sh /out/ucc

FROM tools AS stubs
RUN --mount=type=bind,source=stubs.sh,target=/stubs.sh --mount=type=bind,from=table,target=/table \
    bash /stubs.sh /table/libraries /out

# This stage takes the longest. It is built only if Open MPI will be compiled.
FROM tools AS openmpi
RUN --mount=type=bind,source=openmpi.sh,target=/openmpi.sh bash /openmpi.sh /out/sources

FROM scratch AS sources
COPY --from=openmpi /out/sources /

FROM scratch AS content
COPY --from=stubs /out /
COPY --from=ucx /out/ucx /all/ucx
COPY --from=ucc /out/ucc /all/ucc
