# shellcheck shell=bash
library() { # FOLDER INSTALL: print the folder of the library, with its whole path, as programs may change the folder
  local place
  for place in nvidia/nccl/lib lib .; do
    if [ -e "$1/$place/libnccl.so.2" ]; then
      (CDPATH='' cd -- "$1/$place" && pwd)
      return
    fi
  done
  echo "$1: has no libnccl.so.2, neither there nor in lib or nvidia/nccl/lib; run \`$2\`" >&2
  return 1
}
