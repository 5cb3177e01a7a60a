# mpirun starts the ranks, as it starts those of nccl-tests.
program=$(cat <<'EOF'
import os

import torch
import torch.distributed as dist

rank, ranks = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
device = "cpu"
if os.environ["BACKEND"] == "nccl":
    device = "cuda"
    torch.cuda.set_device(int(os.environ["OMPI_COMM_WORLD_LOCAL_RANK"]))
dist.init_process_group(os.environ["BACKEND"], rank=rank, world_size=ranks)
numbers = torch.arange(1 << 20, dtype=torch.float32, device=device)
added = numbers + rank
dist.all_reduce(added)
assert torch.equal(added, ranks * numbers + ranks * (ranks - 1) // 2)
print(f"rank {rank} of {ranks} on {os.uname().nodename}: the sum of {ranks} tensors is correct", flush=True)
dist.destroy_process_group()
EOF
)
export MASTER_ADDR=127.0.0.1 MASTER_PORT=29500
start=(mpirun -n 2 --oversubscribe -x BACKEND -x MASTER_ADDR -x MASTER_PORT)
if [ "$SPREAD" = nodes ]; then
  read -r -a nodes <<< "$IMAGEBUILD_NODES"
  MASTER_ADDR=${nodes[0]}
  start+=(--host "${nodes[0]},${nodes[1]}")
fi
"${start[@]}" python3 -c "$program"
