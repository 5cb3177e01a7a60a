# For cuda.sh and doca.sh: make packages of folders, and an apt repository of packages.
set -euo pipefail
export SOURCE_DATE_EPOCH=1754697600
arch=${2:-amd64}

# deb NAME VERSION "DESCRIPTION" [ARCHITECTURE] < more control fields: pack the folder /tree/NAME, and empty it.
deb() {
  local tree=/tree/$1
  mkdir -p "$tree/DEBIAN" "$tree/usr/share/doc/$1" "$pool"
  {
    printf 'Package: %s\nVersion: %s\nArchitecture: %s\nMaintainer: nobody <nobody@localhost>\n' "$1" "$2" "${4:-$arch}"
    cat
    printf 'Description: STAND-IN: %s\n Made for the tests of imagebuild. It holds nothing of the vendor.\n' "$3"
  } > "$tree/DEBIAN/control"
  echo "This package is a stand-in made for tests. It holds nothing of the software whose name it bears." \
    > "$tree/usr/share/doc/$1/copyright"
  dpkg-deb --root-owner-group -Zgzip -b "$tree" "$pool" > /dev/null
  rm -rf "$tree"
}

# library FILE SONAME [gcc's options] < C source
library() {
  mkdir -p "$(dirname "$1")"
  local file=$1 soname=$2
  shift 2
  gcc -shared -fPIC -O1 -s -Wl,-soname,"$soname" -x c - -x none "$@" -o "$file"
}

# index FOLDER ORIGIN: a flat repository
index() {
  cd "$1"
  apt-ftparchive packages . > Packages
  gzip -9nk Packages
  apt-ftparchive -o APT::FTPArchive::Release::Origin="$2" -o APT::FTPArchive::Release::Label="$2" \
    -o APT::FTPArchive::Release::Architectures="$arch" \
    -o APT::FTPArchive::Release::Description="STAND-IN made for tests" release . > /tmp/Release
  mv /tmp/Release Release
}
