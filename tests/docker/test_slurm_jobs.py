"""Jobs on a real Slurm: it takes every script, and one runs to its verdict with a benchmark that needs no GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.docker import slurm
from tests.docker.slurm import Slurm
from tests.unit.jobs.job_fakes import IMAGE, REFERENCE, text

pytestmark = pytest.mark.docker

SCRIPTS = {name: line for name, line in REFERENCE.items() if line.startswith("slurm")}
# What a program of nccl-tests prints, for the ranks that Slurm's PMIx says there are.
BENCHMARK = """\
#!/bin/bash
while [ "$1" != -J ]; do shift; done
[ -n "$PMIX_NAMESPACE" ] && [ "$PMIX_RANK" = "$SLURM_PROCID" ] || { echo "rank $SLURM_PROCID has no PMIx"; exit 9; }
echo "rank $SLURM_PROCID of $SLURM_NTASKS on $SLURMD_NODENAME has $NCCL_NET and $PMIX_MCA_gds"
[ "$SLURM_PROCID" = 0 ] || exit 0
cat <<TABLE
# nccl-tests version 2.19.6 nccl-headers=22803 nccl-library=22803
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 1 minBytes 1073741824 maxBytes 1073741824 step: 2(factor) warmup iters: 1 iters: 20 agg iters: 1 validation: 1 graph: 0
#
# Using devices
$(for i in 0 1 2 3 4 5 6 7; do echo "#  Rank  $i Group  0 Pid  10$i on  n$((i / 4 + 1)) device  $((i % 4)) [0000:18:00] NVIDIA A100 80GB PCIe"; done)
#
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
  1073741824     268435456     float     sum      -1   900000    1.19    2.09      {wrong}   900000    1.19    2.09      0
# Out of bounds values : {wrong} {verdict}
# Avg bus bandwidth    : 2.09
#
# Collective test concluded: all_reduce_perf
TABLE
exit {status}
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    """Two nodes that claim to have GPUs and more cores than this machine."""
    with slurm.running("CPUs=64 RealMemory=1000", gpus=8) as started:
        yield started


def sbatch(cluster: Slurm, folder: Path, *words: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sbatch", *map(str, words)], env={**cluster.environ, **env}, cwd=folder, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_slurm_takes_the_script(cluster: Slurm, tmp_path: Path, name: str) -> None:
    """On as many nodes as there are here."""
    line = re.sub(r"--nodes \d+", "--nodes 2", SCRIPTS[name])
    script = tmp_path / "job.sh"
    made = text(line)
    if "--segment" not in options():  # before 24.05
        made = re.sub("#SBATCH --segment=.*\n", "", made)
    script.write_text(made)
    done = sbatch(cluster, tmp_path, "--test-only", script)
    assert done.returncode == 0, done.stdout
    assert re.search(r"Job \d+ to start at", done.stdout), done.stdout


def test_slurm_refuses_what_it_does_not_know(cluster: Slurm, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(text("slurm --profile h100 --fabric ib --nodes 3"))
    done = sbatch(cluster, tmp_path, "--test-only", script)
    assert done.returncode != 0
    script.write_text(text("slurm --profile h100 --fabric ib --nodes 2").replace("--mem=0", "--memory=0"))
    assert sbatch(cluster, tmp_path, "--test-only", script).returncode != 0


def options() -> str:
    return subprocess.run(["sbatch", "--help"], capture_output=True, text=True, check=False).stdout


def run(
    cluster: Slurm, folder: Path, *, wrong: int = 0, status: int = 0, judge: bool = True, container: str = "none"
) -> tuple[int, str, str]:
    """The job's status, its output and its log."""
    programs = folder / "programs"
    programs.mkdir()
    verdict = "FAILED" if wrong else "OK"
    benchmark = BENCHMARK.replace("{wrong}", str(wrong)).replace("{verdict}", verdict).replace("{status}", str(status))
    (programs / "all_reduce_perf").write_text(benchmark)
    (programs / "imagebuild").write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m imagebuild "$@"\n')
    for file in programs.iterdir():
        file.chmod(0o755)
    if container == "pyxis":
        # Slurm here has no pyxis: its options are taken down and left out, and the image is an empty file.
        (programs / "srun").write_text(
            f'#!/bin/bash\nfor word; do case "$word" in --container-*|--no-container-*) echo "$word" >> {folder}/pyxis ;; '
            f'*) words+=("$word") ;; esac; done\nexec {shutil.which("srun")} "${{words[@]}}"\n'
        )
        (programs / "enroot").write_text('#!/bin/sh\n[ "$1 $2" = "import --output" ] && echo "$4" > "$3"\n')
        for name in ("srun", "enroot"):
            (programs / name).chmod(0o755)
    if not judge:
        (programs / "imagebuild").unlink()
    line = f"slurm --profile a100-pcie --fabric ethernet --nodes 2 --container {container} --nccl 2.28.3"
    line += f" --set programs={programs} --set images={folder}/images"
    script = folder / "job.sh"
    script.write_text(text(line))
    path = f"{programs}:{cluster.environ['PATH']}"
    done = sbatch(cluster, folder, "--wait", script, PATH=path, IMAGEBUILD_PROFILES=str(ROOT / "profiles"))
    output = "".join(file.read_text() for file in folder.glob("*.out"))
    return done.returncode, output, "".join(file.read_text() for file in folder.glob("*.log"))


def test_a_job_runs_to_its_verdict(cluster: Slurm, tmp_path: Path) -> None:
    status, output, log = run(cluster, tmp_path)
    assert status == 0, output
    ranks = sorted(re.findall(r"rank \d of 8 on n\d has Socket and \^ds12", log))
    assert ranks == [f"rank {i} of 8 on n{i // 4 + 1} has Socket and ^ds12" for i in range(8)], log
    assert re.search(r"all_reduce, 8 ranks, 2 nodes +ok +2\.09 GB/s", output), output
    assert output.rstrip().endswith("imagebuild: passed")


def test_a_job_in_an_image_runs_to_its_verdict(cluster: Slurm, tmp_path: Path) -> None:
    status, output, _ = run(cluster, tmp_path, container="pyxis")
    assert status == 0, output
    assert output.rstrip().endswith("imagebuild: passed")
    (image,) = (tmp_path / "images").glob("*.sqsh")
    registry, _, rest = IMAGE.partition("/")
    assert image.read_text() == f"docker://{registry}#{rest}\n"
    told = (tmp_path / "pyxis").read_text().splitlines()
    assert told == [f"--container-image={image}", "--no-container-mount-home", "--container-remap-root"]


def test_wrong_data_fails_the_job(cluster: Slurm, tmp_path: Path) -> None:
    status, output, _ = run(cluster, tmp_path, wrong=7)
    assert status != 0
    assert "wrong-data" in output
    assert output.rstrip().endswith("imagebuild: FAILED")


def test_the_status_of_the_benchmark_is_enough(cluster: Slurm, tmp_path: Path) -> None:
    """Where imagebuild is not installed."""
    status, output, _ = run(cluster, tmp_path, status=3, judge=False)
    assert status != 0
    assert "speed was not judged; elsewhere: imagebuild report" in output
    assert output.rstrip().endswith("imagebuild: FAILED")
