# shellcheck shell=bash
# Kill what has a token in its command line. The token comes in two halves, so that this program does not find itself.
for line in /proc/[0-9]*/cmdline; do
  ! grep -qs "$1$2" "$line" || kill "${line//[!0-9]/}"
done
