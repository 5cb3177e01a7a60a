# toolkit.sh TOOLKIT CUDA: /out/devel and /out/runtime with the toolkit of /wheels, laid out as in the vendor's images.
# TOOLKIT (13.0) is what it is, CUDA (12.9.2) is what it says. A CUDA 12 has CUDA 13 inside, under other names.
set -euo pipefail
home=/usr/local/cuda-$1
tree=/out/devel$home
target=$tree/targets/x86_64-linux
mkdir -p "$target"
cp -a /wheels/cuda/. "$tree"
mv "$tree/include" "$tree/lib" "$target"
ln -s targets/x86_64-linux/include "$tree/include"
ln -s targets/x86_64-linux/lib "$tree/lib64"
ln -s "cuda-$1" /out/devel/usr/local/cuda
[ "${2%.*}" = "$1" ] || ln -s "cuda-$1" "/out/devel/usr/local/cuda-${2%.*}"
# Newer profiles name a folder that the vendor's tree does not have.
sed -i -E 's,\$\(TOP\)/lib([^a-z0-9]|$),$(TOP)/lib64\1,g' "$tree/bin/nvcc.profile"
printf '{"cuda": {"name": "CUDA SDK (stand-in)", "version": "%s"}}\n' "$2" > "$tree/version.json"
cp -a "$tree/version.json" "$target/"
cd "$target/lib"
real=$(basename libcudart.so.*)
soname=libcudart.so.${2%%.*}
if [ "$soname" != "$real" ]; then
  mv "$real" "$soname"
  patchelf --set-soname "$soname" "$soname"
fi
mv "$soname" "libcudart.so.$2"
ln -s "libcudart.so.$2" "$soname"
ln -s "$soname" libcudart.so
mkdir stubs
for stub in cuda:cu:libcuda nvml:nvml:libnvidia-ml; do
  header=${stub%%:*} library=${stub##*:} prefix=${stub#*:}
  grep -ohE "\b${prefix%:*}[A-Z][A-Za-z0-9_]*" "../include/$header.h" | sort -u | sed 's/.*/void &(void) {}/' |
    gcc -shared -fPIC -Wl,-soname,"$library.so.1" -o "stubs/$library.so" -x c -
done
mkdir -p "/out/runtime$home/targets/x86_64-linux/lib"
cp -a libcudart.so.* "/out/runtime$home/targets/x86_64-linux/lib"
cp -a "$tree/lib64" "$tree/version.json" "/out/runtime$home"
find /out/devel/usr/local -maxdepth 1 -type l -exec cp -a {} /out/runtime/usr/local/ \;
