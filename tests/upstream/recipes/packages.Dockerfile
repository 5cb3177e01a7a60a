# Two unsigned apt repositories with Packages and Release. tests/upstream/packages.py signs them.
FROM debian:13-standin AS tools
RUN apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
      apt-utils build-essential && rm -rf /var/lib/apt/lists/*

FROM tools AS cuda
RUN --mount=type=bind,target=/recipe --mount=type=bind,from=nccl,target=/nccl --mount=type=bind,from=keys,target=/keys \
    bash /recipe/cuda.sh /out

FROM tools AS doca
RUN --mount=type=bind,target=/recipe bash /recipe/doca.sh /out

FROM scratch
COPY --from=cuda /out /cuda
COPY --from=doca /out /doca
