# ucx.sh FOLDER: UCX of Debian, moved to one folder, without the modules for ROCm and fuse.
set -euo pipefail
out=$1
triplet=/debian/usr/lib/x86_64-linux-gnu
mkdir -p "$out/lib/pkgconfig" "$out/lib/cmake" /packages
apt-get update -qq
cd /packages
apt-get download -qq libucx0 libucx-dev ucx-utils
for file in *.deb; do dpkg-deb -x "$file" /debian; done
cp -a /debian/usr/include "$out"
cp -a "$triplet"/libuc*.so* "$out/lib"
cp -a "$triplet/ucx" "$out/lib"
cp -a "$triplet/cmake/ucx" "$out/lib/cmake"
cp -a "$triplet"/pkgconfig/ucx*.pc "$out/lib/pkgconfig"
rm -f "$out"/lib/ucx/*rocm* "$out"/lib/ucx/*fuse* "$out"/lib/ucx/*.a "$out"/lib/pkgconfig/ucx-fuse.pc
mkdir -p "$out/bin"
# The others link libraries that are not here.
cp -a /debian/usr/bin/{ucx_info,ucx_read_profile,ucx_perftest_daemon} "$out/bin"
find "$out/lib" "$out/bin" -type f \( -name '*.so.*' -o -path '*/bin/*' \) -exec sh -c '
  strip --strip-unneeded "$1" && patchelf --set-rpath "\$ORIGIN:\$ORIGIN/..:\$ORIGIN/../lib" "$1"' - {} \;
# The vendor builds elsewhere and moves the result: the text files keep the name of that place.
sed -i "s,^prefix=.*,prefix=@PREFIX@/ucx,; s,^exec_prefix=.*,exec_prefix=@PREFIX@/ucx,
  s,^libdir=.*,libdir=@PREFIX@/ucx/lib,; s,^includedir=.*,includedir=@PREFIX@/ucx/include," "$out"/lib/pkgconfig/*.pc
sed -i 's,/usr/lib/x86_64-linux-gnu,@PREFIX@/ucx/lib,g; s,"/usr",@PREFIX@/ucx,g; s,/usr/,@PREFIX@/ucx/,g' "$out"/lib/cmake/ucx/*
for name in ucp uct ucs ucm; do
  printf "# lib%s.la\ndlname='lib%s.so.0'\nlibrary_names='lib%s.so.0.0.0 lib%s.so.0 lib%s.so'\nlibdir='@PREFIX@/ucx/lib'\n" \
    "$name" "$name" "$name" "$name" "$name" > "$out/lib/lib$name.la"
done
for variant in mt debug; do
  mkdir -p "$out/$variant/lib/pkgconfig"
  cp -a "$out"/lib/libuc[pstm].so* "$out/$variant/lib"
  sed "s,@PREFIX@/ucx,@PREFIX@/ucx/$variant,g" "$out/lib/pkgconfig/ucx.pc" > "$out/$variant/lib/pkgconfig/ucx.pc"
done
"$out/bin/ucx_info" -v
