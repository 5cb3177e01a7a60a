#!/bin/bash
# deepspeed.sh: run the launcher's script of examples/deepspeed.yaml with the real DeepSpeed, without GPUs, in a launcher and
# two workers, with a hostfile, names and keys as the MPI operator makes them. Fails unless four ranks on two nodes add up
# their numbers. Needs an engine, the package index and Debian's archive. VERSION is DeepSpeed's.
set -euo pipefail
cd "$(dirname "$0")/.."
version=${VERSION:-0.19.8} bin=$PWD/.venv/bin name=deepspeed-$$ image=imagebuild-test/deepspeed:proof
work=$(mktemp -d)
export DOCKER_HOST=${DOCKER_HOST:-$("$bin/python" -c 'from imagebuild.oci.engine import find_engine; print(find_engine().host)')}
cleanup() {
  docker rm -f "$name-launcher" "$name-worker-0" "$name-worker-1" > /dev/null 2>&1 || true
  docker network rm "$name" > /dev/null 2>&1 || true
  rm -rf "$work"
}
trap cleanup EXIT

if ! docker image inspect "$image" > /dev/null 2>&1; then
  "$bin/imagebuild" build deepspeed --project tests/data/deepspeed --folder "$work/build" --json "$work/result.json"
  docker tag "$("$bin/python" -c 'import json, sys; print(json.load(open(sys.argv[1]))[0]["tags"][0])' "$work/result.json")" "$image"
fi
"$bin/pip" download --quiet --no-deps --no-binary :all: --dest "$work" "deepspeed==$version"
mkdir "$work/source" "$work/ssh" "$work/home"
tar -x -f "$work/deepspeed-$version.tar.gz" -C "$work/source" --strip-components 1
ssh-keygen -q -t ed25519 -N '' -f "$work/ssh/id_ed25519"
cp "$work/ssh/id_ed25519.pub" "$work/ssh/authorized_keys"
cat > "$work/home/train.py" <<'PY'
# Not deepspeed.init_distributed: without GPUs, it compiles a module. Debian's PyTorch is compiled without libuv.
import os
import socket
import torch

os.environ["USE_LIBUV"] = "0"
torch.distributed.init_process_group("gloo")
rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
total = torch.tensor(float(rank))
torch.distributed.all_reduce(total)
print(f"rank {rank} of {size} on {socket.gethostname()}: sum {total.item():.0f}", flush=True)
PY
echo '{"train_batch_size": 4}' > "$work/home/ds.json"
for n in 0 1; do echo "$name-worker-$n.$name.default.svc slots=2"; done > "$work/hostfile"
"$bin/python" - > "$work/launcher.sh" <<'PY'
import yaml
job = yaml.safe_load(open("examples/deepspeed.yaml"))
print(job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]["args"][0])
PY

docker network create "$name" > /dev/null
start() {
  docker run --detach --network "$name" --name "$name-$1" --hostname "$name-$1" --network-alias "$name-$1.$name.default.svc" \
    --env "K_MPI_JOB_ROLE=${1%-[0-9]}" --env PYTHONPATH=/opt/deepspeed --volume "$work/source:/opt/deepspeed:ro" \
    --volume "$work/source/bin/deepspeed:/usr/local/bin/deepspeed:ro" --volume "$work/home:/root" \
    --volume "$work/ssh:/root/.ssh" --volume "$work/hostfile:/etc/mpi/hostfile:ro" --volume "$work/launcher.sh:/launcher.sh:ro" \
    "$image" "${@:2}" > /dev/null
}
for n in 0 1; do start "worker-$n" /usr/sbin/sshd -De; done
start launcher bash /launcher.sh
status=$(timeout 300 docker wait "$name-launcher" || echo "no end within 300 s")
docker logs "$name-launcher" > "$work/log" 2>&1
cat "$work/log"
[ "$status" = 0 ] || { echo "the launcher ended with $status" >&2; exit 1; }
for rank in 0 1 2 3; do
  grep -q "rank $rank of 4 on $name-worker-$((rank / 2)): sum 6" "$work/log" || { echo "rank $rank is missing" >&2; exit 1; }
done
echo "DeepSpeed $version started four ranks on two nodes"
