#!/bin/bash
# Build the libraries in this folder with a real linker. libx.so needs the symbol versions V_1 and V_2 of libv.so.1.
# libv2.so defines both versions, libv1.so only the first. FATBIN is a file with the content of .nv_fatbin: code and PTX
# for compute capability 9.0, written by `fatbin` in tests/unit/image_files.py, because GNU's tools cannot write it.
set -euo pipefail
cd "$(dirname "$0")"
library() {
  gcc -x c - -o "$1" "${@:2}" -shared -fPIC -Os -nostdlib -fno-asynchronous-unwind-tables -fcf-protection=none \
    -Wl,--build-id=none,--hash-style=sysv,-z,noseparate-code,-z,norelro,-z,max-page-size=4096,-s
}
V='int one(void) { return 1; } int two(void) { return 2; }'
library libv1.so -Wl,-soname,libv.so.1,--version-script=<(echo 'V_1 { one; two; };') <<< "$V"
library libv2.so -Wl,-soname,libv.so.1,--version-script=<(echo 'V_1 { one; }; V_2 { two; } V_1;') <<< "$V"
library libx.so -x none "$PWD/libv2.so" -Wl,-soname,libx.so.1,--enable-new-dtags,-rpath,'$ORIGIN/..' \
  -Wl,--version-script=<(echo 'X_1 { global: three; local: *; };') << 'END'
const char interp[] __attribute__((section(".interp"))) = "/lib64/ld-linux-x86-64.so.2";
int one(void), two(void);
int three(void) { return one() + two(); }
END
objcopy --add-section .nv_fatbin="$FATBIN" libx.so
