#!/bin/sh
# The first program of a node with its own kernel, and with a clock that is $1 seconds ahead. The node has the address
# $2.2, and its disk is in memory, at $3. The other words are the command of buildkitd.
set -eu
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
seconds=$1 network=$2 root=$3
shift 3
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t cgroup2 cgroup2 /sys/fs/cgroup
for folder in /run "$root"; do mount -t tmpfs -o size=90%,mode=755 tmpfs "$folder"; done
date -s "@$(($(date +%s) + seconds))"
ip link set lo up
ip link set eth0 up
ip address add "$network.2/30" dev eth0
ip route add default via "$network.1"
export TMPDIR="$root/tmp"
mkdir "$TMPDIR"
exec "$@"
