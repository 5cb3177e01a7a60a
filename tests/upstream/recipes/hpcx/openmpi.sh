# openmpi.sh FOLDER: Open MPI's sources of Debian 12 and 13, packed as the vendor packs its own.
# The component for HCOLL is left out: its headers exist nowhere but in the vendor's archive.
set -euo pipefail
mkdir -p "$1" /sources
cd /sources
# Sources of this release and the one before, from where this system's packages come.
sed -n 's/^deb /deb-src /p' /etc/apt/sources.list > /etc/apt/sources.list.d/sources.list
sed -n 's/^deb /deb-src /; s/trixie/bookworm/p' /etc/apt/sources.list >> /etc/apt/sources.list.d/sources.list
apt-get update -qq
apt-get source -qq --download-only openmpi/bookworm openmpi/trixie
for version in 4.1.4 5.0.7; do
  mkdir openmpi-gitclone
  tar -C openmpi-gitclone --strip-components 1 --no-same-owner -xf "openmpi_$version.orig.tar.xz"
  # To keep the archive small, manuals and the copies of what the distribution has go too.
  rm -rf openmpi-gitclone/ompi/mca/coll/hcoll openmpi-gitclone/docs/html openmpi-gitclone/docs/man
  bundled=()
  if [ "$version" = 5.0.7 ]; then bundled=(--no-3rdparty hwloc,libevent,openpmix); fi
  (cd openmpi-gitclone && ./autogen.pl --force "${bundled[@]}" > /tmp/autogen.log 2>&1) ||
    { tail -n 40 /tmp/autogen.log; exit 1; }
  for name in openpmix hwloc-* libevent-*; do rm -rf openmpi-gitclone/3rd-party/$name; done
  find openmpi-gitclone \( -name autom4te.cache -o -name 'configure~' \) -prune -exec rm -rf {} +
  tar --sort=name --mtime=@1754697600 --owner=12345 --group=12345 -cf - openmpi-gitclone | gzip -9n \
    > "$1/openmpi${version%%.*}-gitclone.tar.gz"
  rm -rf openmpi-gitclone
done
ls -l "$1"
