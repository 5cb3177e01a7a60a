# shellcheck shell=bash
# Kill all processes with a token in their command line. The token is passed in two halves, so that this script does not
# kill itself.
for line in /proc/[0-9]*/cmdline; do
  ! grep -qs "$1$2" "$line" || kill "${line//[!0-9]/}"
done
