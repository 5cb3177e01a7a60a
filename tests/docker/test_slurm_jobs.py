"""Jobs on a real Slurm: it takes every script, and a stand-in for nccl-tests runs in them with a real Open MPI."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.docker import slurm
from tests.docker.conftest import install, until
from tests.docker.slurm import Slurm
from tests.unit.jobs.job_fakes import REFERENCE, text

pytestmark = pytest.mark.docker

SCRIPTS = ("a100-64.slurm", "b200-64-enroot-sharp.slurm", "gb200-nvl72-enroot.slurm")
"""Jobs of the reference: without a container, with one, and on a rack."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    """Four nodes that claim to have GPUs and more cores than this machine."""
    with slurm.running("CPUs=64 RealMemory=1000", gpus=8, nodes=4) as started:
        yield started


def sbatch(cluster: Slurm, folder: Path, *words: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sbatch", *map(str, words)], env={**cluster.environ, **env}, cwd=folder, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_slurm_takes_the_script(cluster: Slurm, tmp_path: Path, name: str) -> None:
    """On as many nodes as there are here; what it does not know, it refuses."""
    made = text(re.sub(r"--nodes \d+", "--nodes 2", REFERENCE[name]))
    options = subprocess.run(["sbatch", "--help"], capture_output=True, text=True, check=False).stdout
    if "--segment" not in options:  # before 24.05
        made = re.sub("#SBATCH --segment=.*\n", "", made)
    script = tmp_path / "job.sh"
    script.write_text(made)
    done = sbatch(cluster, tmp_path, "--test-only", script)
    assert done.returncode == 0, done.stdout
    assert re.search(r"Job \d+ to start at", done.stdout), done.stdout
    for spoiled in (made.replace("--mem=0", "--memory=0"), made.replace("--nodes=2", "--nodes=5")):
        script.write_text(spoiled)
        assert sbatch(cluster, tmp_path, "--test-only", script).returncode


@dataclass(frozen=True)
class Ended:
    """What is left of a job."""

    status: int
    output: str
    logs: dict[str, str]


@pytest.fixture(scope="module")
def programs(cluster: Slurm) -> Path:
    """A folder with the stand-in for nccl-tests, linked with the distribution's Open MPI, which Slurm's PMIx joins."""
    folder = cluster.folder / "programs"
    folder.mkdir()
    install("openmpi-bin", "libopenmpi-dev", "gcc", "libc6-dev")
    command = ["mpicc", str(ROOT / "tests/docker/nccl_standin.c"), "-o", str(folder / "all_reduce_perf")]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def run(cluster: Slurm, programs: Path, folder: Path, behaviour: str, *options: str, imagebuild: bool = True) -> Ended:
    """Run a job of four ranks a node to its end. The behaviour is `VERSION FAULT GB/S SLOW-NODE`."""
    (programs / "behaviour").write_text(behaviour)
    path, script = folder / "bin", folder / "job.sh"
    path.mkdir()
    if imagebuild:
        (path / "imagebuild").write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m imagebuild "$@"\n')
        (path / "imagebuild").chmod(0o755)
    line = f"slurm --profile a100-pcie --fabric ethernet --container none --nccl 2.28.3 --param programs={programs}"
    made = text(shlex.join([*shlex.split(line), "--param", "interface=lo", "--param", "name=it", *options]))
    # The half minute that is left for measuring in a job of one minute.
    script.write_text(made.replace("\ndeadline=30\n", "\ndeadline=10\n"))
    # The nodes share a machine and its name, so that Open MPI would take one node's shared memory for the other's.
    env = {"OMPI_MCA_btl": "tcp,self", "OMPI_MCA_btl_tcp_if_include": "lo"}
    env |= {"PATH": f"{path}:{cluster.environ['PATH']}", "IMAGEBUILD_PROFILES": str(ROOT / "profiles")}
    submitted = sbatch(cluster, folder, "--parsable", script, **env)
    assert not submitted.returncode, submitted.stdout
    status = wait_for(cluster, submitted.stdout.strip())
    output = "".join(file.read_text() for file in folder.glob("*.out"))
    return Ended(status, output, {file.stem: file.read_text() for file in folder.glob("it-*/*.log")})


def wait_for(cluster: Slurm, job: str) -> int:
    """Wait for the end of a job; return its exit status. `sbatch --wait` looks after 2, 10 and 42 seconds only."""

    def facts() -> dict[str, str]:
        command = ["scontrol", "show", "job", job]
        shown = subprocess.run(command, env=cluster.environ, capture_output=True, text=True, check=False).stdout
        return dict(re.findall(r"(JobState|ExitCode)=(\S+)", shown))

    assert until(lambda: facts()["JobState"] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"), 1200)
    return int(facts()["ExitCode"].partition(":")[0])


@pytest.mark.parametrize("version", ["2.13", "2.19"])
def test_a_job_runs_to_its_verdict(cluster: Slurm, programs: Path, tmp_path: Path, version: str) -> None:
    ended = run(cluster, programs, tmp_path, f"{version} none 9", "--nodes", "2")
    assert ended.status == 0, ended.output
    hosts = re.findall(r"# +Rank +(\d) .* on +(n\d) device", ended.logs["all_reduce"])
    assert hosts == [(str(i), f"n{i // 4 + 1}") for i in range(8)]
    assert ("=== imagebuild: json of all_reduce" in ended.output) == (version == "2.19")
    assert "hunter2" not in ended.output
    assert "all_reduce, 8 ranks, 2 nodes" in ended.output
    assert ended.output.rstrip().endswith("imagebuild: passed; speed was not judged")


@pytest.mark.parametrize(
    ("behaviour", "imagebuild", "option", "problem"),
    [
        ("2.19 wrong 9", True, "json=yes", "all_reduce: ended with status"),
        ("2.13 wrong 9", False, "json=yes", "all_reduce: wrong data in 1 of 32 sizes"),
        ("2.13 hang 9", False, "minutes=1", "all_reduce: did not end in time"),
        ("2.19 none 9", False, "suffix=_missing", "all_reduce: ended with status"),
    ],
)
def test_a_job_fails_without_a_result(
    cluster: Slurm, programs: Path, tmp_path: Path, behaviour: str, imagebuild: bool, option: str, problem: str
) -> None:
    ended = run(cluster, programs, tmp_path, behaviour, "--nodes", "2", "--param", option, imagebuild=imagebuild)
    assert ended.status
    assert problem in ended.output
    assert ended.output.rstrip().endswith("imagebuild: FAILED")
    assert imagebuild or "speed was not judged here; to judge it: imagebuild report" in ended.output


def test_pairs_run_side_by_side_and_the_slow_node_is_named(cluster: Slurm, programs: Path, tmp_path: Path) -> None:
    options = ("--nodes", "4", "--test", "pairs", "--param", "min-bw=5", "--param", "minutes=2")
    for attempt in ("first", "second"):
        (tmp_path / attempt).mkdir()
        ended = run(cluster, programs, tmp_path / attempt, "2.19 none 9 n3", *options, imagebuild=False)
        # Two runs of Open MPI side by side on nodes that are one machine sometimes crash or hang; the cause was not found.
        # What a job makes of that is tested above.
        if all("# Avg bus bandwidth" in log for log in ended.logs.values()):
            break
    assert ended.status != 0
    pairs = {frozenset(log.removeprefix("all_reduce-").split(",")) for log in ended.logs}
    assert pairs == {frozenset(pair) for pair in combinations(("n1", "n2", "n3", "n4"), 2)}
    slow = re.findall(r"all_reduce of (n\d,n\d): .* GB/s at best", ended.output)
    assert len(slow) == 3, ended.output
    assert all("n3" in pair for pair in slow)
    assert {len(re.findall("# +Rank ", log)) for log in ended.logs.values()} == {8}
