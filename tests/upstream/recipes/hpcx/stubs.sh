# stubs.sh TABLE FOLDER: the libraries and programs of HPC-X that have no free source, as shells. TABLE has lines `PATH
# SONAME LIBRARY…` and `PATH`. FOLDER/stubs is for both CUDA majors, FOLDER/stubs-cuda12 and -cuda13 are what differs.
set -euo pipefail

exports() { # SONAME: a library's C
  case $1 in
    libnccl-net*) # the tables that NCCL looks for
      echo 'struct table { const char *name; void *functions[40]; };'
      printf 'struct table nccl%sPlugin_v%s = {"stand-in"};\n' Net 8 CollNet 8 Net 9 CollNet 9 Net 10 CollNet 10 \
        Net 11 CollNet 11 ;;
    libnccl-profiler*) echo 'struct table { const char *name; } ncclProfiler_v4 = {"stand-in"};' ;;
    libsharp_coll.*) echo 'int sharp_coll_init(void) { return -1; } int sharp_coll_finalize(void) { return -1; }' ;;
    libhcoll.*) echo 'int hcoll_init(void) { return -1; } int hcoll_finalize(void) { return -1; }' ;;
    libmpi.*) echo 'int MPI_Init(void) { return 1; }' ;;
    *) echo 'int stand_in;' ;;
  esac
}
library() { # FILE SONAME LIBRARY… < C
  mkdir -p "$(dirname "$1")"
  gcc -shared -fPIC -O1 -s -Wl,-soname,"$2" -x c - -x none -Wl,--no-as-needed "${@:3}" -o "$1"
}
stub() { # FILE SONAME NEEDED…
  local file=$1 soname=$2 name options=() uses=
  for name in "${@:3}"; do
    case $name in
      libibverbs.so.1) options+=(-libverbs) ;;
      # As the vendor's, it needs a libmlx5 that is newer than Ubuntu's own.
      libmlx5.so.1) options+=(-lmlx5) uses='int mlx5dv_get_data_direct_sysfs_path(void *, char *, unsigned long);
        int start(void) { return mlx5dv_get_data_direct_sysfs_path(0, 0, 0); }' ;;
      *) # One of this name is lent to what links it.
        [ -e "/lent/$name" ] || exports "$name" | library "/lent/$name" "$name"
        options+=("/lent/$name") ;;
    esac
  done
  { exports "$soname"; echo "$uses"; } | library "$file" "$soname" "${options[@]}"
}

while read -r path soname needs; do
  if [ -z "$soname" ]; then
    mkdir -p "$(dirname "$2/stubs/$path")"
    printf '#!/bin/sh\necho "stand-in for %s" >&2\nexit 1\n' "$(basename "$path")" > "$2/stubs/$path"
    chmod 755 "$2/stubs/$path"
  elif [ "$needs" = "${needs/\{cuda\}/}" ]; then
    stub "$2/stubs/$path" "$soname" $needs
  else
    for major in 12 13; do stub "$2/stubs-cuda$major/$path" "$soname" ${needs/\{cuda\}/$major}; done
  fi
done < "$1"
objdump -T "$2/stubs/nccl_spectrum-x_plugin/lib/libnccl-net.so" | grep -F MLX5_1.25
mkdir -p "$2/all/sharp/include/sharp/api"
git_free='STAND-IN made for tests: what a plug-in needs to compile'
printf '/* %s */\nint sharp_coll_init(void);\nint sharp_coll_finalize(void);\n' "$git_free" \
  > "$2/all/sharp/include/sharp/api/sharp_coll.h"
