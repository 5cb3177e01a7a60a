"""The command `imagebuild job`: input that is refused, and what is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from imagebuild.cli import ProjectFiles, offer_of_plan
from tests.conftest import ROOT
from tests.unit.conftest import Call

BAD = [
    ("mpijob --profile h101", "did you mean 'h100'?"),
    ("mpiob --profile h100", "job mpiob: unknown scheduler; did you mean 'mpijob'?"),
    ("mpijob --profile mi300x", "nccl-tests runs on NVIDIA GPUs only"),
    ("mpijob --profile h100 --fabric rocee", "--fabric rocee: unknown fabric; did you mean 'roce'?"),
    ("mpijob --profile h100 --feature shrap", "--feature shrap: unknown feature; did you mean 'sharp'?"),
    ("slurm --profile h100 --container docker", "--container docker: use pyxis or none"),
    ("slurm --profile gb200-nvl72 --nodes 19", "use 18 (1 * 18) or 20 (2 * 10)"),
    ("mpijob --profile h100 --nodes 1000000", "--nodes 1000000: must be from 1 to 9999"),
    ("mpijob --profile gb200-nvl72 --param rack-nodes=99", "--param rack-nodes=99: NVLink of gb200-nvl72 joins 18 nodes"),
    ("mpijob --profile h100 --param cpu=0", "--param cpu='0': must be a number of CPUs such as 110"),
    ("mpijob --profile h100 --param minutes=0", "--param minutes='0': must be a number from 1 to 9999"),
    ("slurm --profile h100 --param minutes=4 --param minutes=5", "--param minutes: given twice"),
    ("mpijob --profile h100 --param min-bw=0.0", "--param min-bw='0.0': must be a bus bandwidth in GB/s"),
    ("mpijob --profile h100 --container none", "--container none: is for Slurm only"),
    ("mpijob --profile h100 --param partition=x", "--param partition: only jobs of Slurm have it"),
    ("slurm --profile h100 --container none --param images=/x", "--param images: only pyxis keeps images in a folder"),
    ("slurm --profile h100 --container none --param driver=570", "it chooses an image, and this job has none"),
    ("slurm --profile h100 --param memory=1Gi", "--param memory: only jobs of Kubernetes have it"),
    ("mpijob --profile h100 --image r.io/x/y:1 --param driver=570", "chooses between images, but --image names the image"),
    ("mpijob --profile h100 --image r.io/x/y:1 --fabric ethernet --param hca=mlx5", "names no RDMA devices"),
    ("mpijob --profile h100 --image r.io/x/y:1 --feature noib --param resource=rdma/ib:1", "get no network cards"),
    ("mpijob --profile h100 --image _nothing_", "--image: is empty"),
    ("mpijob --profile h100 --nccl latest", "--nccl 'latest': not a version of NCCL such as 2.28.3"),
    ("slurm --profile h100 --nccl 2.28.3\nid", "not a version of NCCL"),
    ("mpijob --profile h100 --facts /nope", "--facts /nope: no such folder"),
    ("mpijob --profile h100 --catalog /nope", "/nope: cannot be read"),
    ("mpijob --profile h100 --catalog x --registry ghcr.io/acme", "--catalog and --registry exclude each other"),
    ("slurm --profile h100 --container none --registry ghcr.io/acme", "--registry: with --container none"),
    ("mpijob --profile h100", "this name has no registry to pull it from; name yours with --registry"),
    ("mpijob --profile h100 --registry a_space_b", "--registry 'a b': not a registry and folder"),
    ("mpijob --profile h100 --image hpcx-cuda13.4.2-ubuntu26.04-runtime", "this name has no registry"),
    ("slurm --profile gb200-nvl72 --nodes 2 --racks 1", "--nodes and --racks exclude each other"),
    ("slurm --profile h100 --racks 2", "--racks 2: NVLink of h100 ends at the node; use --nodes"),
    ("mpijob --profile h100 --fabric roce --feature sharp", "--feature sharp: only InfiniBand switches reduce"),
    ("mpijob --profile h100 --feature sharp,gdrcopy", "the SHARP plug-in does not use GDRCopy"),
    ("mpijob --profile h100 --feature sharp,noib", "SHARP is in the InfiniBand switches that noib does not use"),
    ("mpijob --profile h100 --feature sharp --nodes 1", "nothing of one node passes a switch"),
    ("mpijob --profile gb200-nvl72 --feature sharp", "takes a rack with NVLink across nodes for one node"),
    ("mpijob --profile h100 --feature sharp --test collectives", "SHARP serves all_reduce, all_gather and reduce_scatter"),
    ("mpijob --profile h100 --feature sharp --image r.io/x/hpcx:nccl2.21.5", "NCCL before 2.24 goes back to rings"),
    ("mpijob --profile gb200-nvl72 --racks 2 --image r.io/x/y:1", "--racks 2: all workers of an MPIJob have one template"),
    ("mpijob --profile gb200-nvl72 --racks 2 --image r.io/x/y:1 --param racks=a", "names 1, but the job needs 2"),
    ("mpijob --profile h100 --image r.io/x/y:1 --param racks=a", "NVLink of h100 ends at the node"),
    ("mpijob --profile h100 --image r.io/x/y:1 --param memory=960GB", "960Gi or 960G"),
    ("mpijob --profile h100 --image r.io/x/y:1 --param resource=ib:8", "such as rdma/ib:8"),
    ("mpijob --profile h100 --feature dra", "so there is no channel to allocate"),
    ("slurm --profile gb200-nvl72 --feature dra", "allocation is a part of Kubernetes"),
    ("mpijob --profile gb200-nvl72 --nodes 4 --feature multirack", "fit one rack; take --racks 2"),
    ("mpijob --profile h100 --fabric ethernet --feature gdrcopy", "NCCL uses GDRCopy with its InfiniBand"),
    ("mpijob --profile a40 --fabric ib", "the profile's cards do neither"),
    ("mpijob --profile h100 --fabric efa", "p4d, p4de, p5, p5en"),
    ("slurm --profile a3-mega --fabric tcpxo", "its receive daemon runs beside the benchmark"),
    ("mpijob --profile h100 --fabric gib", "only A3 Ultra (H200), A4 (B200)"),
    ("mpijob --profile gb200-nvl72 --image r.io/x/y:1-amd64", "is for amd64, but gb200-nvl72 is arm64"),
    ("mpijob --profile h100 --image x_space_y", "not the name of an image; write REPOSITORY:TAG"),
    ("mpijob --profile h100 --param NCCL_X=it's", 'NCCL_X: the value contains "\'"'),
    ("mpijob --profile h100 --param NCCL_X=a\nb", "NCCL_X: the value contains '\\n'"),
    ("mpijob --profile h100 --param NCCL_X=$HOME", "NCCL_X: the value contains '$'"),
    ("mpijob --profile h100 --param nonsense", "write NAME=VALUE"),
    ("mpijob --profile h100 --param minuts=3", "--param minuts: unknown parameter; did you mean 'minutes'?"),
    ("jobset --profile gb300-nvl72 --image r.io/x/y:1 --nodes 32 --feature dra,nics,debug --test collectives", "is longer than 43 characters; set another"),
    (f"mpijob --profile h100 --image r.io/x/y:1 --param name={'x' * 52}", "is longer than 51"),
    ("mpijob --profile h100 --param name=X", "must be a name of Kubernetes"),
    ("mpijob --profile h100 --image r.io/x/y:1 --feature sharp --param plugin=none", "--param plugin=none: --feature sharp needs the plug-in ibext"),
    ("mpijob --profile h100 --param rnak:X=1", "unknown scope 'rnak'; did you mean 'rank'?"),
    ("slurm --profile h100 --container none --param container:X=1", "there is no container"),
    ("slurm --profile h100 --image r.io/x/y:1 --param launcher:X=1", "Slurm starts ranks without a launcher"),
    ("mpijob --profile h100 --image r.io/x/y:1 --param batch:X=1", "Kubernetes has no batch script"),
    ("mpijob --profile h100 --param NCCL_NET_PLUGIN=none --param plugin=ofi --image r.io/x/hpcx:1", "the image has no plug-in 'ofi'"),
    ("mpijob --profile h100 --image r.io/x/y:1 --test collectives --param min-bw=100", "reach different rates"),
    ("slurm --profile h100 --feature debug,", "--feature: a name is empty"),
    ("slurm --profile h100 --feature debug --feature strict,debug", "--feature debug: given twice; leave one out"),
    ("slurm --profile h100 --nodes 2 --nodes 4", "--nodes: given twice; leave one out"),
    ("slurm --profile h100 --image r.io/x/y:1 --param NCCL_IB_HCA=a --param NCCL_IB_HCA=b", "--param NCCL_IB_HCA: given twice"),
    ("slurm --profile h100 -o a.sh --output b.sh", "--output: given twice"),
    ("mpijob --profile h100 --registry https://ghcr.io/acme", "'https://ghcr.io/acme': not a registry and folder such as"),
    ("slurm --profile h100 --nodes 64 --test pairs --param minutes=31", "minutes=31: too few for 63 rounds; take 32 or more"),
    ("slurm --profile h100 --container none --param gres=gpu:h100:4", "gres gpu:h100:4: asks for 4 GPUs of a node; h100 has 8"),
    ("slurm --profile h100 --container none --param gres=craynetwork:1", "asks for 0 GPUs of a node"),
    ("slurm --profile h100 --param gres=gpu:0", "must be resources of a node"),
    ("slurm --profile h100 --param nodelist=n[1-", "must be names of nodes such as node[01-04],node9"),
    ("slurm --profile h100 --container none --param nodelist=n[01-07]", "names 7 nodes, and the job has 8; sbatch would add others"),
    ("slurm --profile h100 --container none --param nodelist=n[1-40]", "names 40 nodes, and the job has 8; sbatch would start the job on all"),
    ("slurm --profile h100 --container none --param nodelist=n[1-99999999999]", "names more than 9999 nodes"),
    ("slurm --profile h100 --container none --param nodelist=n[1-8] --param exclude=x[1-9],n[08,8]", "the nodelist has n8; leave it out"),
    ("mpijob --profile h100 --param resource=nvidia.com/gpu:4", "must be a resource of cards and a number such as rdma/ib:8"),
    ("mpijob --profile h100 --image foo", "has no registry, so nodes would ask Docker Hub for it; write docker.io/library/foo"),
    ("mpijob --profile h100 --image hpcx-cuda13.4.2-ubuntu26.04-runtme", "did you mean 'hpcx-cuda13.4.2-ubuntu26.04-runtime'?"),
    ("mpijob --profile h100 --image r.io/x/y:1 --registry ghcr.io/acme", "--registry: --image r.io/x/y:1 names its own registry"),
    ("mpijob --profile h100 --nodes 8.5", "--nodes 8.5: must be a whole number"),
    ("mpijob --profile h100 --nods 8", "No such option: --nods"),
    ("mpijob --nodes 8", "Missing option '--profile'"),
    ("mpijob slurm --profile h100", "unexpected extra argument"),
    ("mpijob --profile h100 --catalog pyproject.toml", "--catalog pyproject.toml: not a list of images"),
    ("mpijob --profile h100 --image r.io/x/y:1 --nccl 2.28.3 -o _nothing_", "the name of the file to write is empty"),
    ("mpijob --profile h100 --param =x", "--param =x: write NAME=VALUE"),
    ("mpijob --profile gb200-nvl72 --racks 2 --image r.io/x/y:1 --param racks=a,a", "a is named twice; name 2 racks"),
    ("mpijob --profile gb200-nvl72 --image r.io/x/y:1 --param racks=NAME", "a value of the nodes' label nvidia.com/gpu.clique"),
    ("mpijob --profile gb200-nvl72 --nodes 32 --image r.io/x/y:1", "--nodes 32 on 2 racks: all workers"),
    ("mpijob --profile h100 --param cpu=0.5m", "--param cpu='0.5m': must be a number of CPUs such as 110, 2.5 or 500m"),
    ("mpijob --profile h100 --image r.io/x/y:1 --param min-bw=5000", "--param min-bw=5000: h100 reaches at most"),
    ("slurm --profile h100 --param account=a,b", "--param account='a,b': must be a name without blanks"),
    ("slurm --profile h100 --param cpus-per-task=99999", "must be a number from 1 to 9999"),
    ("slurm --profile h100 --param images=images", "must be a path that begins with / or with a variable"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "message"), BAD)
def test_bad_input_is_one_line_and_status_2(
    line: str, message: str, command: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    # quotes and line ends are part of words
    words = [word.replace("_space_", " ").replace("_nothing_", "") for word in line.split(" ")]
    monkeypatch.chdir(ROOT)
    status, out, err = command("job", *words)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


def test_the_command_writes_what_it_would_print(tmp_path: Path, command: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    line = "job slurm --profile h100 --param NCCL_FOO=1 --feature debug --registry ghcr.io/acme --param minutes=45"
    words = line.split(" ")
    status, printed, warnings = command(*words)
    assert (status, "does not read NCCL_FOO" in warnings) == (0, True)
    assert printed.startswith("#!/bin/bash\n# imagebuild job slurm --profile h100 --fabric ib --feature debug")
    assert "#SBATCH --time=45\n" in printed
    assert command(*words, "-o", tmp_path / "job.sh") == (0, "", warnings)
    assert (tmp_path / "job.sh").read_text() == printed


def test_without_a_project_the_images_that_come_with_imagebuild_are_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered = offer_of_plan(ProjectFiles(root=ROOT))
    monkeypatch.chdir(tmp_path)
    assert offer_of_plan(ProjectFiles()) == offered
