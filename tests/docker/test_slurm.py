"""Ranks in the image, started by a real Slurm and wired up through PMIx, as root and as a normal user."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from docker import DockerClient

from tests.docker import slurm
from tests.docker.conftest import Built
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


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 2), (2, 2), (2, 4)])
def test_ranks_add_up(cluster: Cluster, uid: int, nodes: int, ranks: int) -> None:
    """Compiled in the devel image, run in the runtime image, by a Slurm whose PMIx is another version."""
    options = ["--mpi=pmix", f"--nodes={nodes}", f"--ntasks={ranks}"]
    done = cluster.slurm.srun(*options, *cluster.enter, cluster.slurm.folder / "sum", uid=uid)
    total = sum(range(ranks))
    said = sorted(re.findall("user .*", done.stdout))
    assert said == [f"user {uid}: rank {rank} of {ranks}, sum {total}" for rank in range(ranks)], done.stdout
    assert done.returncode == 0, done.stdout


def test_without_pmix_each_rank_is_alone(cluster: Cluster) -> None:
    """What the checks must not take for a success."""
    done = cluster.slurm.srun("--mpi=none", "--ntasks=2", *cluster.enter, cluster.slurm.folder / "sum")
    assert re.findall("rank .*", done.stdout) == ["rank 0 of 1, sum 0"] * 2
