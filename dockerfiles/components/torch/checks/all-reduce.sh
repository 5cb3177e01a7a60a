# mpirun starts the ranks on one node or on two; with SPREAD=slurm, srun has started this script for each rank.
program=$(cat <<'EOF'
import os

import torch
import torch.distributed as dist

names = ("SLURM_PROCID", "SLURM_NTASKS") if os.environ["SPREAD"] == "slurm" else ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
rank, ranks = (int(os.environ[name]) for name in names)
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
if [ "$SPREAD" = slurm ]; then
  # The first of `gpu-[07-09,12]` is gpu-07. Nodes may have names that only Slurm knows.
  MASTER_ADDR=$(sed -E 's/^([^[,]*)(\[([^],-]*))?.*/\1\3/' <<< "$SLURM_STEP_NODELIST") MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
  getent hosts "$MASTER_ADDR" > /dev/null || MASTER_ADDR=$SLURM_LAUNCH_NODE_IPADDR
  exec python3 -c "$program"
fi
start=(mpirun -n 2 --oversubscribe -x BACKEND -x SPREAD -x MASTER_ADDR -x MASTER_PORT)
if [ "$SPREAD" = nodes ]; then
  read -r -a nodes <<< "$IMAGEBUILD_NODES"
  MASTER_ADDR=${nodes[0]}
  start+=(--host "${nodes[0]},${nodes[1]}")
else
  unset "${!SLURM_@}" # otherwise, mpirun would use the nodes of Slurm's job
fi
"${start[@]}" python3 -c "$program"
