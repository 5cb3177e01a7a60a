"""A real Slurm of two nodes: `verify` starts ranks in an image, whose PMIx is another version than Slurm's; jobs run.

Jobs run a stand-in for nccl-tests with the distribution's Open MPI; nodes claim GPUs and cores that this machine lacks.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from docker import DockerClient

from imagebuild.project import VerifyResult
from tests.conftest import ROOT
from tests.docker import slurm
from tests.docker.conftest import Built, Imagebuild, install, until
from tests.docker.slurm import Slurm
from tests.unit.jobs.job_fakes import REFERENCE, text

pytestmark = pytest.mark.docker


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    with slurm.running() as started:
        yield started


# Checks of images

RANKS = ("pmix/slurm", "ucx-distro/mpi-slurm", "openmpi-distro/sum-slurm")
"""Checks of ranks: they know Slurm's PMIx server, make a world, and add up."""


def test_verify_runs_ranks_through_srun(
    cluster: Slurm, devel: Built, client: DockerClient, imagebuild: Imagebuild, tmp_path: Path
) -> None:
    runner = f"exec:srun {' '.join(cluster.unpack(client, devel.tag))}"
    variables = {name: cluster.environ[name] for name in ("SLURM_CONF", "TMPDIR")}
    chosen = [f"--only={check}" for check in (*RANKS, "pmix/loads", "ucx-distro/two-nodes")]
    for more, outcome in (
        ("", "passed"),
        # An image whose PMIx does not hear of Slurm's, so that each rank is alone.
        (" env --unset=PMIX_NAMESPACE --unset=PMIX_RANK", "failed"),
    ):
        path, status = tmp_path / f"{outcome}.json", int(outcome == "failed")
        words: tuple[str | Path, ...] = (
            "verify",
            devel.result.target,
            "--runner",
            runner + more,
            *chosen,
            "--json",
            path,
        )
        imagebuild(*words, expect=status, **variables)
        result = VerifyResult.model_validate_json(path.read_text())
        found = {f"{check.component}/{check.check}": check.outcome for check in result.checks}
        # The build left its image in the engine's store, which this runner does not read.
        others = {"image/same-files": "skipped", "pmix/loads": "passed", "ucx-distro/two-nodes": "skipped"}
        assert found == dict.fromkeys(RANKS, outcome) | others


# Jobs

SCRIPTS = ("a100-64.slurm", "b200-64-enroot-sharp.slurm", "gb200-nvl72-enroot.slurm")
"""Jobs of the reference: without a container, with one, and on a rack."""


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
    log: str


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
    """Run a job of two nodes with four ranks each to its end. The behaviour is `VERSION FAULT GB/S`."""
    (programs / "behaviour").write_text(behaviour)
    path, script = folder / "bin", folder / "job.sh"
    path.mkdir()
    if imagebuild:
        (path / "imagebuild").write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m imagebuild "$@"\n')
        (path / "imagebuild").chmod(0o755)
    line = f"slurm --profile a100-pcie --fabric ethernet --nodes 2 --container none --nccl 2.28.3 --param programs={programs}"
    made = text(shlex.join([*shlex.split(line), "--param", "interface=lo", "--param", "name=it", *options]))
    # The half minute that is left for measuring in a job of one minute.
    script.write_text(made.replace("\ndeadline=30\n", "\ndeadline=10\n"))
    # The nodes share a machine and its name, so that Open MPI would take one node's shared memory for the other's.
    env = {"OMPI_MCA_btl": "tcp,self", "OMPI_MCA_btl_tcp_if_include": "lo"}
    env |= {"PATH": f"{path}:{cluster.environ['PATH']}", "IMAGEBUILD_PROFILES": str(ROOT / "profiles")}
    submitted = sbatch(cluster, folder, "--parsable", script, **env)
    assert not submitted.returncode, submitted.stdout
    show = ["scontrol", "show", "job", submitted.stdout.strip()]

    def facts() -> dict[str, str]:
        shown = subprocess.run(show, env=cluster.environ, capture_output=True, text=True, check=False).stdout
        return dict(re.findall(r"(JobState|ExitCode)=(\S+)", shown))

    # `sbatch --wait` looks after 2, 10 and 42 seconds only.
    assert until(lambda: facts()["JobState"] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"), 1200)
    output, log = ("".join(file.read_text() for file in folder.glob(glob)) for glob in ("*.out", "it-*/*.log"))
    return Ended(int(facts()["ExitCode"].partition(":")[0]), output, log)


@pytest.mark.parametrize("version", ["2.13", "2.19"])
def test_a_job_runs_to_its_verdict(cluster: Slurm, programs: Path, tmp_path: Path, version: str) -> None:
    ended = run(cluster, programs, tmp_path, f"{version} none 9")
    assert ended.status == 0, ended.output
    hosts = re.findall(r"# +Rank +(\d) .* on +(n\d) device", ended.log)
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
    ended = run(cluster, programs, tmp_path, behaviour, "--param", option, imagebuild=imagebuild)
    assert ended.status
    assert problem in ended.output
    assert ended.output.rstrip().endswith("imagebuild: FAILED")
    assert imagebuild or "speed was not judged here; to judge it: imagebuild report" in ended.output
