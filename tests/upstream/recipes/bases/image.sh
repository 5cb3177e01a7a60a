# image.sh VARIANT OS NCCL HELD…: what the vendor's images have besides the toolkit. FOREIGN and UNMET are lines `FILE
# LIBRARY…` of files for another machine, and of files that need what is nowhere.
set -euo pipefail
variant=$1 os=$2 nccl=$3
shift 3
repository=https://developer.download.nvidia.com/compute/cuda/repos/${os/./}/x86_64/
dpkg -i /packages/cuda-keyring_1.1-1_all.deb
echo "deb [signed-by=/usr/share/keyrings/cuda-archive-keyring.gpg] $repository /" \
  > "/etc/apt/sources.list.d/cuda-${os/./}-x86_64.list"
echo /usr/local/cuda/targets/x86_64-linux/lib > /etc/ld.so.conf.d/000_cuda.conf
printf '/usr/local/nvidia/lib\n/usr/local/nvidia/lib64\n' > /etc/ld.so.conf.d/nvidia.conf
dpkg -i "/packages/libnccl2_${nccl}_amd64.deb"
[ "$variant" = runtime ] || dpkg -i "/packages/libnccl-dev_${nccl}_amd64.deb"
for name in "$@"; do
  if ! dpkg -s "$name" > /dev/null 2>&1; then # of the vendor's libraries only the names are here
    mkdir -p /tmp/deb/DEBIAN
    printf 'Package: %s\nVersion: 1\nArchitecture: amd64\nMaintainer: nobody <nobody@localhost>\nDescription: STAND-IN\n' \
      "$name" > /tmp/deb/DEBIAN/control
    dpkg-deb -b /tmp/deb /tmp/name.deb > /dev/null
    dpkg -i /tmp/name.deb
    rm -rf /tmp/deb /tmp/name.deb
  fi
done
apt-mark hold "$@"
if [ "$variant" = devel ]; then
  while read -r file needs; do # the machine is in two bytes of the header
    [ -z "$file" ] && continue
    mkdir -p "$(dirname "$file")"
    echo 'int stand_in;' | gcc -shared -fPIC -s -x c - -o "$file"
    printf '\267\000' | dd of="$file" bs=1 seek=18 conv=notrunc status=none
  done <<< "$FOREIGN"
  while read -r file needs; do
    [ -z "$file" ] && continue
    mkdir -p "$(dirname "$file")"
    echo 'int stand_in;' | gcc -shared -fPIC -s -Wl,-soname,"$needs" -x c - -o "/tmp/$needs"
    echo 'int main(void) { return 1; }' | gcc -s -Wl,--no-as-needed -x c - -x none "/tmp/$needs" -o "$file"
    rm "/tmp/$needs"
  done <<< "$UNMET"
fi
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
