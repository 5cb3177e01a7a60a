#!/bin/bash
# pull.sh LAYOUT…: measure a cold pull of OCI layouts, which `imagebuild build --output` writes, until the image's NCCL
# answers ncclGetVersion. Prints a row of a table for each layout. Needs root, docker-registry, containerd, runc, gcc and tc.
#
# The registry is in a network namespace behind a veth pair whose registry side sends at most 1 Gb/s (a token bucket).
# Each pull is done by a containerd of its own with an empty folder. All runs before other processes.
set -euo pipefail
rate=${RATE:-1gbit} runs=${RUNS:-3} python=$(dirname "$0")/../.venv/bin/python
work=$(mktemp -d) name=pull-$$ registry=10.213.77.2:5000 upload=127.0.0.1:5093
pids=()
cleanup() {
  kill "${pids[@]}" 2> /dev/null || true
  wait 2> /dev/null || true
  ip netns delete "$name" 2> /dev/null || true
  rm -rf "$work"
}
trap cleanup EXIT

cat > "$work/version.c" <<'C'
#include <dlfcn.h>
#include <stdio.h>
int main(void) {
  int version = 0;
  void *nccl = dlopen("libnccl.so.2", RTLD_NOW);
  int (*get)(int *) = nccl ? (int (*)(int *))dlsym(nccl, "ncclGetVersion") : 0;
  if (!get || get(&version)) return fprintf(stderr, "%s\n", dlerror()), 1;
  return printf("%d\n", version) < 0;
}
C
mkdir "$work/bin"
gcc -o "$work/bin/version" "$work/version.c"

ip netns add "$name"
ip link add "p$$" type veth peer name eth0 netns "$name"
ip address add 10.213.77.1/30 dev "p$$"
ip link set "p$$" up
ip -n "$name" address add 10.213.77.2/30 dev eth0
ip -n "$name" link set eth0 up
ip netns exec "$name" tc qdisc add dev eth0 root tbf rate "$rate" burst 1mb latency 50ms
# One registry for uploads and one for pulls have the same folder.
serve() {
  local config=$work/${1//[:.]/-}.yaml
  cat > "$config" <<CONFIG
version: 0.1
log: {level: error, accesslog: {disabled: true}}
storage: {filesystem: {rootdirectory: $work/registry}}
http: {addr: "$1"}
CONFIG
  "${@:2}" docker-registry serve "$config" >> "$work/registry.log" 2>&1 &
  pids+=($!)
  until curl -sf "http://$1/v2/" > /dev/null; do sleep 0.2; done
}
serve "$upload"
serve "$registry" ip netns exec "$name" nice -n -19

# pull REFERENCE: print the seconds until the pull ended, and until NCCL answered.
pull() {
  local root=$work/containerd began pulled answered pid
  printf 'version = 2\ndisabled_plugins = ["io.containerd.grpc.v1.cri"]\n' > "$work/containerd.toml"
  nice -n -19 containerd --config "$work/containerd.toml" --root "$root" --state "$work/state" \
    --address "$work/socket" > "$work/containerd.log" 2>&1 &
  pid=$!
  pids+=("$pid")
  until ctr --address "$work/socket" version > /dev/null 2>&1; do sleep 0.2; done
  sync
  began=$EPOCHREALTIME
  nice -n -19 ctr --address "$work/socket" images pull --plain-http "$1" > /dev/null
  pulled=$EPOCHREALTIME
  nice -n -19 ctr --address "$work/socket" run --rm --mount "type=bind,src=$work/bin,dst=/probe,options=rbind:ro" \
    "$1" probe /probe/version > "$work/version"
  answered=$EPOCHREALTIME
  kill "$pid"
  wait "$pid" || true
  rm -rf "$root" "$work/state"
  awk -v a="$began" -v b="$pulled" -v c="$answered" 'BEGIN {printf "%.2f %.2f\n", b - a, c - a}'
}

echo "| layout | compressed, MB | pulled after, s | NCCL answers after, s (median of $runs) | NCCL |"
echo "|---|---|---|---|---|"
for layout in "$@"; do
  image=bench/$(basename "$(dirname "$layout")")
  size=$("$python" - "$layout" "$upload" "$image" <<'PY'
import json, sys
from pathlib import Path
from imagebuild.oci.layout import Layout
from imagebuild.oci.registry import connect_registry, push_image
layout, host, image = sys.argv[1:]
(entry,) = json.loads(Path(layout, "index.json").read_text())["manifests"]
push_image(Layout(Path(layout)), entry["digest"], connect_registry(host).at(image), "latest")
print(sum(path.stat().st_size for path in Path(layout, "blobs/sha256").iterdir()) / 1e6)
PY
  )
  for _ in $(seq "$runs"); do pull "$registry/$image:latest"; done > "$work/times"
  median() { cut -d' ' -f"$1" "$work/times" | sort -n | sed -n "$(((runs + 1) / 2))p"; }
  printf '| %s | %.1f | %s | %s | %s |\n' "$layout" "$size" "$(median 1)" "$(median 2)" "$(cat "$work/version")"
done
