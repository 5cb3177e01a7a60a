# ucc.sh FOLDER: UCC of Debian's development branch, moved to one folder. Debian 13 has none, and its glibc will do.
set -euo pipefail
out=$1
triplet=/debian/usr/lib/x86_64-linux-gnu
mkdir -p "$out/bin" "$out/lib/pkgconfig" /packages
find /etc/apt -name '*.list' -exec sed -i '/-security\|-updates/d; s/trixie/sid/' {} +
# A mirror that is not refreshed daily is good enough here: packages are verified all the same.
apt-get update -qq -o Acquire::Check-Valid-Until=false
cd /packages
apt-get download -qq libucc1 libucc-dev ucc-utils
for file in *.deb; do dpkg-deb -x "$file" /debian; done
cp -a /debian/usr/include "$out"
cp -a /debian/usr/bin/ucc_info "$out/bin"
cp -a "$triplet"/libucc.so* "$triplet/ucc" "$out/lib"
rm -f "$out"/lib/ucc/*.a
# The relative search paths are those of the vendor's tree, where ucx lies beside.
find "$out/lib" -maxdepth 1 -name '*.so.*' -type f -exec patchelf --set-rpath '$ORIGIN:$ORIGIN/../../ucx/lib' {} \;
find "$out/lib/ucc" -name '*.so.*' -type f -exec patchelf --set-rpath '$ORIGIN:$ORIGIN/..:$ORIGIN/../../../ucx/lib' {} \;
patchelf --set-rpath '$ORIGIN/../lib:$ORIGIN/../../ucx/lib' "$out/bin/ucc_info"
sed "s,^prefix=.*,prefix=@PREFIX@/ucc,; s,^exec_prefix=.*,exec_prefix=@PREFIX@/ucc,; s,^libdir=.*,libdir=@PREFIX@/ucc/lib,
  s,^includedir=.*,includedir=@PREFIX@/ucc/include," "$triplet/pkgconfig/ucc.pc" > "$out/lib/pkgconfig/ucc.pc"
printf "# libucc.la\ndlname='libucc.so.1'\nlibrary_names='libucc.so.1.0.0 libucc.so.1 libucc.so'\nlibdir='@PREFIX@/ucc/lib'\n" \
  > "$out/lib/libucc.la"
