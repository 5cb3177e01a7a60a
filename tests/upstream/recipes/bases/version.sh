# version.sh TOOLKIT CUDA: /out/runtime and /out/devel with what says which CUDA this is, above all the runtime library.
# TOOLKIT (13.0) is what it is, CUDA (12.9.1) is what it says: CUDA 12's library is CUDA 13's under another name.
set -euo pipefail
tree=/out/runtime/usr/local/cuda-$1
lib=$tree/targets/x86_64-linux/lib
mkdir -p "$lib"
ln -s targets/x86_64-linux/lib "$tree/lib64"
ln -s "cuda-$1" /out/runtime/usr/local/cuda
[ "${2%.*}" = "$1" ] || ln -s "cuda-$1" "/out/runtime/usr/local/cuda-${2%.*}"
printf '{"cuda": {"name": "CUDA SDK (stand-in)", "version": "%s"}}\n' "$2" > "$tree/version.json"
soname=libcudart.so.${2%%.*}
cp -L /wheels/cuda/lib/libcudart.so.?? "$lib/libcudart.so.$2"
patchelf --set-soname "$soname" "$lib/libcudart.so.$2"
ln -s "libcudart.so.$2" "$lib/$soname"
cp -a /out/runtime /out/devel
ln -s "$soname" "/out/devel/usr/local/cuda-$1/targets/x86_64-linux/lib/libcudart.so"
