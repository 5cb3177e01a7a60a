# doca.sh FOLDER: rdma-core of Debian under the names and with versions as in the DOCA repository, and decoys.
. /recipe/common.sh
version=2607.0.9-1 # like 2510.0.11-1 of 3.2.1 and 2604.0.7-1 of 3.4.0
pool=$1/pool
mkdir -p "$pool" /debian
apt-get update -qq
cd /debian
for name in ibverbs-providers ibverbs-utils infiniband-diags libibmad-dev libibmad5 libibnetdisc5t64 libibnetdisc-dev \
  libibumad-dev libibumad3 libibverbs-dev libibverbs1 librdmacm-dev librdmacm1t64 rdma-core rdmacm-utils; do
  apt-get download -qq "$name"
done
packages=$(for file in *.deb; do dpkg-deb -f "$file" Package; done | paste -sd '|')
for file in *.deb; do
  old=$(dpkg-deb -f "$file" Version)
  rm -rf /tree/repack
  mkdir -p /tree
  dpkg-deb -R "$file" /tree/repack
  # Dependencies among these packages follow to the new version, and t64 is Debian's addition to names.
  awk -v names="^($packages)\$" -v old="$old" -v new="$version" '
    /^Package:/ { full = $2; plain = full; sub(/t64$/, "", plain); print "Package: " plain; next }
    /^Version:/ { print "Version: " new; next }
    /^(Provides|Replaces|Breaks|Conflicts|Maintainer|Homepage|Original-Maintainer):/ { next }
    /^(Depends|Pre-Depends|Recommends|Suggests|Enhances):/ {
      field = $1; rest = substr($0, length(field) + 2); count = split(rest, parts, /, */); line = ""
      for (i = 1; i <= count; i++) {
        name = parts[i]; sub(/ .*/, "", name)
        if (name ~ names) {
          sub(/t64$/, "", name)
          exact = index(parts[i], "(=")
          parts[i] = name (exact ? " (= " new ")" : parts[i] ~ /\(>=/ ? " (>= " new ")" : "")
        }
        line = line (i > 1 ? ", " : "") parts[i]
      }
      print field " " line; next
    }
    /^Description:/ {
      print "Maintainer: nobody <nobody@localhost>"
      print "Homepage: https://github.com/linux-rdma/rdma-core"
      if (full != plain) {
        print "Provides: " full " (= " new ")\nConflicts: " full "\nReplaces: " full
      }
      sub(/^Description:/, "Description: STAND-IN:"); print
      print " This is rdma-core of Debian with another version, made for the tests of imagebuild."; next
    }
    { print }' /tree/repack/DEBIAN/control > /tmp/control
  cp /tmp/control /tree/repack/DEBIAN/control
  dpkg-deb --root-owner-group -Zgzip -b /tree/repack "$pool" > /dev/null
done
lib=/tree/libxpmem0/usr/lib/x86_64-linux-gnu
echo 'int xpmem_version(void) { return 0; }' | library "$lib/libxpmem.so.0" libxpmem.so.0
deb libxpmem0 "2.7-0.$version" "xpmem that knows its version only" <<< 'Depends: libc6
Section: libs'
# Nothing may pull these, however high their versions are.
for name in openmpi ucx; do
  mkdir -p "/tree/$name/usr/bin"
  deb "$name" "99.9-1.$version" "decoy that no image may hold" <<< "Section: misc"
done
index "$1" "Mellanox stand-in"
