"""mpirun reaches another container over sshd, as root and as a normal user. pytest-docker starts the containers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from docker import DockerClient
from pytest_docker.plugin import Services

from tests.docker.conftest import MARK, Built, install, until

pytestmark = pytest.mark.docker

OWNERS = {"root": 0, "mpiuser": 1000}
SUM = r"""
#include <mpi.h>
#include <stdio.h>
int main(int argc, char **argv) {
  int rank, sum = 0, length;
  char host[MPI_MAX_PROCESSOR_NAME];
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  MPI_Get_processor_name(host, &length);
  printf("%s: 0 + 1 + 2 + 3 = %d\n", host, sum);
  return MPI_Finalize();
}
"""
Execute = Callable[..., subprocess.CompletedProcess[str]]


def execute_in(container: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a container, as the container's user."""
    command = ["docker", "exec", container, *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="session")
def docker_compose_file(
    quickstart: Built, devel: Built, client: DockerClient, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """For pytest-docker: the services, with a key that logs in, one that does not, and an MPI program."""
    if not shutil.which("ssh-keygen"):
        install("openssh-client")
    shared = tmp_path_factory.mktemp("shared")
    (shared / "programs").mkdir()
    (shared / "programs" / "sum.c").write_text(SUM)
    compiled = ["mpicc", "/programs/sum.c", "-o", "/programs/sum"]
    client.containers.run(devel.tag, compiled, volumes=[f"{shared}/programs:/programs"], remove=True)
    for user, uid in OWNERS.items():
        folder = shared / user
        folder.mkdir(mode=0o700)
        for name in ("id_ed25519", "wrong"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
        (folder / "id_ed25519.pub").rename(folder / "authorized_keys")
        for path in (folder, *folder.iterdir()):
            os.chown(path, uid, uid)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("IMAGE", quickstart.tag)
        patched.setenv("SHARED", str(shared))
        yield str(Path(__file__).parent / "docker-compose.yml")
    shutil.rmtree(shared)


@pytest.fixture(scope="session")
def docker_compose_project_name() -> str:
    return f"imagebuild-test-{MARK}"


@pytest.fixture(scope="session")
def docker_setup() -> str:
    return "up --wait"


@pytest.fixture(scope="session")
def docker_cleanup() -> str:
    return "down --volumes --timeout 1"


@pytest.fixture
def execute(docker_services: Services, docker_compose_project_name: str) -> Execute:
    """Run a program in a service's container."""
    return lambda service, *argv: execute_in(f"{docker_compose_project_name}-{service}-1", *argv)


MPIRUN = {
    "root": ["env", "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1", "mpirun"],
    "user": ["mpirun", "--prtemca", "plm_ssh_args", "-p 2222"],
}
REPORT = 'echo "$(id -un) on $(hostname): rank $OMPI_COMM_WORLD_RANK of $OMPI_COMM_WORLD_SIZE, $NVIDIA_VISIBLE_DEVICES"'


@pytest.mark.parametrize(("who", "name"), [("root", "root"), ("user", "mpiuser")])
def test_ranks_run_on_both_hosts(execute: Execute, who: str, name: str) -> None:
    hosts = [f"{who}1", f"{who}2"]
    done = execute(hosts[0], *MPIRUN[who], "-n", "4", "--host", ":2,".join(hosts) + ":2", "sh", "-c", REPORT)
    assert done.returncode == 0, done.stderr
    # The image's environment too is the same on the other side.
    expected = [f"{name} on {hosts[rank // 2]}: rank {rank} of 4, all" for rank in range(4)]
    assert sorted(done.stdout.splitlines()) == sorted(expected)


@pytest.mark.parametrize("who", ["root", "user"])
def test_a_program_adds_up_over_both_hosts(execute: Execute, who: str) -> None:
    """Compiled in the devel image, run in the runtime image."""
    done = execute(f"{who}1", *MPIRUN[who], "-n", "4", "--host", f"{who}1:2,{who}2:2", "/programs/sum")
    assert done.returncode == 0, done.stderr
    hosts = [f"{who}1", f"{who}1", f"{who}2", f"{who}2"]
    assert sorted(done.stdout.splitlines()) == [f"{host}: 0 + 1 + 2 + 3 = 6" for host in hosts]


@pytest.mark.parametrize(("who", "port"), [("root", "22"), ("user", "2222")])
def test_only_the_right_key_logs_in(execute: Execute, who: str, port: str) -> None:
    ssh = ["ssh", "-p", port, "-o", "BatchMode=yes", "-o", "IdentitiesOnly=yes"]
    right = execute(f"{who}1", *ssh, f"{who}2", "hostname")
    assert (right.returncode, right.stdout.strip()) == (0, f"{who}2"), right.stderr
    wrong = execute(f"{who}1", *ssh, "-v", "-i", "~/.ssh/wrong", f"{who}2", "hostname")
    assert wrong.returncode == 255
    assert re.search("Offering public key: .*/wrong ", wrong.stderr)
    # No other way is even offered.
    assert "Permission denied (publickey)" in wrong.stderr


def test_a_normal_user_s_server_lets_only_that_user_in(execute: Execute) -> None:
    ssh = ["ssh", "-p", "2222", "-o", "BatchMode=yes"]
    assert execute("user1", *ssh, "root@user2", "id").returncode == 255
    assert execute("user1", *ssh, "mpiuser@user2", "id", "-un").stdout == "mpiuser\n"


def test_every_container_has_its_own_host_key(execute: Execute, client: DockerClient, quickstart: Built) -> None:
    scanned = execute("root1", "ssh-keyscan", "-t", "ed25519", "root1", "root2").stdout
    keys = {line.split()[2] for line in scanned.splitlines() if not line.startswith("#")}
    assert len(keys) == 2
    fresh = client.containers.run(quickstart.tag, ["/usr/sbin/sshd", "-D", "-e"], detach=True)

    def key() -> str:
        return execute_in(str(fresh.id), "cut", "-d ", "-f2", "/etc/ssh/ssh_host_ed25519_key.pub").stdout.strip()

    try:
        assert until(lambda: bool(key()))
        before = key()
        assert before not in keys
        # The same container keeps its key: whoever knows the host is not alarmed.
        fresh.restart(timeout=1)
        assert until(lambda: key() == before)
    finally:
        fresh.remove(force=True)
