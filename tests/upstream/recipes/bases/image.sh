# image.sh VARIANT OS NCCL: what the vendor's images have besides the toolkit.
set -euo pipefail
variant=$1 os=$2 nccl=$3
repository=https://developer.download.nvidia.com/compute/cuda/repos/${os/./}/x86_64/
install -D -m 644 /keys/cuda.gpg /usr/share/keyrings/cuda-archive-keyring.gpg
echo "deb [signed-by=/usr/share/keyrings/cuda-archive-keyring.gpg] $repository /" \
  > "/etc/apt/sources.list.d/cuda-${os/./}-x86_64.list"
echo /usr/local/cuda/targets/x86_64-linux/lib > /etc/ld.so.conf.d/000_cuda.conf
printf '/usr/local/nvidia/lib\n/usr/local/nvidia/lib64\n' > /etc/ld.so.conf.d/nvidia.conf
dpkg -i "/packages/libnccl2_${nccl}_amd64.deb"
[ "$variant" = runtime ] || dpkg -i "/packages/libnccl-dev_${nccl}_amd64.deb"
apt-mark hold libnccl2
echo "This image is a stand-in made for tests. The vendor's images have the text of a licence here." \
  > /NGC-DL-CONTAINER-LICENSE
mkdir -p /opt/nvidia
cat > /opt/nvidia/nvidia_entrypoint.sh <<'EOF'
#!/bin/bash
# As the vendor's: a banner, then the command.
printf '\n==========\n== CUDA ==\n==========\n\nSTAND-IN for CUDA Version %s\n\n' "$CUDA_VERSION"
if [ $# -eq 0 ]; then exec /bin/bash; fi
exec "$@"
EOF
chmod 755 /opt/nvidia/nvidia_entrypoint.sh
ldconfig
