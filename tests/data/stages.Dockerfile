# ---- native ----
FROM --platform=$BUILDPLATFORM debian:13 AS Native
SHELL ["/bin/bash", "-c"]
RUN one

FROM native AS cross
ARG TARGETARCH
RUN two

FROM scratch AS source-amd64
ADD https://example.org/repository.git#aaaaaaaa /
FROM scratch AS source-arm64
ADD --checksum=sha256:1 https://example.org/a.tar /
FROM source-$TARGETARCH AS source

FROM cross AS unused
RUN unused

FROM debian:13 AS image
ENV A=1
WORKDIR /work
RUN --mount=type=bind,from=cross,source=/out,target=/in \
  three
COPY --link --from=source / /source
COPY --from=native /a /b
RUN <<EOF
# four
FROM four
EOF
LABEL a=b
