# toolkit.sh TOOLKIT: /out with the toolkit of /wheels, laid out as in the vendor's images, but for its runtime library.
set -euo pipefail
tree=/out/usr/local/cuda-$1
target=$tree/targets/x86_64-linux
mkdir -p "$target"
cp -a /wheels/cuda/. "$tree"
mv "$tree/include" "$tree/lib" "$target"
rm -f "$target"/lib/libcudart.so*
ln -s targets/x86_64-linux/include "$tree/include"
# Newer profiles name a folder that the vendor's tree does not have.
sed -i -E 's,\$\(TOP\)/lib([^a-z0-9]|$),$(TOP)/lib64\1,g' "$tree/bin/nvcc.profile"
cd "$target/lib"
mkdir stubs
for stub in cuda:cu:libcuda nvml:nvml:libnvidia-ml; do
  header=${stub%%:*} library=${stub##*:} prefix=${stub#*:}
  grep -ohE "\b${prefix%:*}[A-Z][A-Za-z0-9_]*" "../include/$header.h" | sort -u | sed 's/.*/void &(void) {}/' |
    gcc -shared -fPIC -Wl,-soname,"$library.so.1" -o "stubs/$library.so" -x c -
done
