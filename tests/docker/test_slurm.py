"""Ranks in the image, started by a real Slurm and wired up through PMIx, as root and as a normal user."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from docker import DockerClient

from imagebuild.project import VerifyResult
from tests.docker import slurm
from tests.docker.conftest import Built, Imagebuild
from tests.docker.slurm import NOBODY, Slurm

pytestmark = pytest.mark.docker

SUM = r"""
#include <mpi.h>
#include <stdio.h>
#include <unistd.h>
int main(int argc, char **argv) {
  int rank, size, sum = 0;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  printf("user %d: rank %d of %d, sum %d\n", getuid(), rank, size, sum);
  return MPI_Finalize();
}
"""


@dataclass(frozen=True)
class Cluster:
    """A Slurm, and the words that lead into the image."""

    slurm: Slurm
    enter: list[str]


@pytest.fixture(scope="module")
def cluster(quickstart: Built, devel: Built, client: DockerClient) -> Iterator[Cluster]:
    with slurm.running() as started:
        enter = started.unpack(client, quickstart.tag)
        (started.folder / "sum.c").write_text(SUM)
        compiled = ["mpicc", "/shared/sum.c", "-o", "/shared/sum"]
        client.containers.run(devel.tag, compiled, volumes=[f"{started.folder}:/shared"], remove=True)
        yield Cluster(started, enter)


def may_make_namespaces() -> bool:
    words = ["setpriv", f"--reuid={NOBODY}", "--clear-groups", "unshare", "--user", "--mount", "true"]
    return not subprocess.run(words, capture_output=True, check=False).returncode


@pytest.fixture(params=[0, NOBODY], ids=["root", "user"])
def uid(request: pytest.FixtureRequest) -> int:
    user: int = request.param
    if user and not may_make_namespaces():
        pytest.skip("this machine lets only root make namespaces")
    return user


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 2), (2, 4)])
def test_ranks_add_up(cluster: Cluster, uid: int, nodes: int, ranks: int) -> None:
    """Compiled in the devel image, run in the runtime image, by a Slurm whose PMIx is another version."""
    options = ["--mpi=pmix", f"--nodes={nodes}", f"--ntasks={ranks}"]
    done = cluster.slurm.srun(*options, *cluster.enter, cluster.slurm.folder / "sum", uid=uid)
    total = sum(range(ranks))
    message = sorted(re.findall("user .*", done.stdout))
    assert message == [f"user {uid}: rank {rank} of {ranks}, sum {total}" for rank in range(ranks)], done.stdout
    assert done.returncode == 0, done.stdout


def test_without_pmix_each_rank_is_alone(cluster: Cluster) -> None:
    """What the checks must not take for a success."""
    done = cluster.slurm.srun("--mpi=none", "--ntasks=2", *cluster.enter, cluster.slurm.folder / "sum")
    assert re.findall("rank .*", done.stdout) == ["rank 0 of 1, sum 0"] * 2


def test_verify_runs_checks_through_srun(
    cluster: Cluster, quickstart: Built, imagebuild: Imagebuild, tmp_path: Path
) -> None:
    runner = f"exec:srun {' '.join(cluster.enter)}"
    wanted = ["pmix/*", "ucx-distro/*"]
    results = verify(imagebuild, quickstart, tmp_path, cluster, runner, wanted)
    assert results["pmix/slurm"] == results["ucx-distro/mpi-slurm"] == results["pmix/loads"] == "passed"
    assert results["ucx-distro/two-nodes"] == "skipped"
    assert "failed" not in results.values()


def test_verify_finds_ranks_that_are_alone(
    cluster: Cluster, quickstart: Built, imagebuild: Imagebuild, tmp_path: Path
) -> None:
    """An image whose PMIx does not hear of Slurm's."""
    alone = "env --unset=PMIX_NAMESPACE --unset=PMIX_RANK"
    runner = f"exec:srun {' '.join(cluster.enter)} {alone}"
    results = verify(
        imagebuild, quickstart, tmp_path, cluster, runner, ["pmix/slurm", "ucx-distro/mpi-slurm"], expect=1
    )
    # The build left its image in the engine's store, which this runner does not read.
    assert results == {"image/same-files": "skipped", "pmix/slurm": "failed", "ucx-distro/mpi-slurm": "failed"}


def verify(
    imagebuild: Imagebuild,
    built: Built,
    folder: Path,
    cluster: Cluster,
    runner: str,
    checks: list[str],
    expect: int = 0,
) -> dict[str, str]:
    """Check -> outcome."""
    chosen = [word for check in checks for word in ("--only", check)]
    path = folder / "verify.json"
    variables = {name: cluster.slurm.environ[name] for name in ("SLURM_CONF", "TMPDIR")}
    target = built.result.target
    imagebuild("verify", target, "--runner", runner, *chosen, "--json", path, expect=expect, **variables)
    result = VerifyResult.model_validate_json(path.read_text())
    return {f"{c.component}/{c.check}": c.outcome for c in result.checks}
