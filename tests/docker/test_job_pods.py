"""The pods of MPIJobs and JobSets, run as containers: the launcher reaches the workers and ends with the verdict.

The test does the work of the operators: host names in a network, and the MPI operator's keys, hostfile and variables.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from docker import DockerClient
from docker.models.containers import Container

from tests.docker.conftest import Built
from tests.unit.jobs.job_fakes import containers, objects, text

pytestmark = pytest.mark.docker

ARGUMENTS = "--profile a100-pcie --fabric ethernet --nodes 2 --nccl 2.28.3 --param programs=/bench --param minutes=2"
OF_OPERATOR = {
    "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
    "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
    "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
}
"""Environment variables that the MPI operator sets in its pods."""


@dataclass(frozen=True)
class Pods:
    """A network for containers, and their volumes. The containers are removed when `stack` ends."""

    stack: ExitStack
    client: DockerClient
    image: str
    network: str
    volumes: dict[str, dict[str, str]]

    def start(self, host: str, container: Mapping[str, Any], environment: Mapping[str, str]) -> Container:
        """Start a container of a pod. Workers of an MPIJob have no command, so they get the operator's: sshd."""
        given = {e["name"]: e["value"] for e in container.get("env", [])}
        command = [*container["command"], *container["args"]] if "command" in container else ["/usr/sbin/sshd", "-De"]
        made = self.client.containers.run(
            self.image, command, detach=True, hostname=host.split(".", maxsplit=1)[0], network=self.network,
            environment={**given, **environment}, volumes=self.volumes, user="root",
            networking_config={self.network: self.client.api.create_endpoint_config(aliases=[host])},
        )  # fmt: skip
        self.stack.callback(made.remove, force=True, v=True)
        return made


@pytest.fixture(scope="module")
def bench(devel: Built, client: DockerClient, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    (folder / "bench.c").write_text(Path(__file__).with_name("nccl_standin.c").read_text())
    (folder / "behaviour").write_text("2.19 none 400 -\n")
    command = ["mpicc", "/shared/bench.c", "-o", "/shared/all_reduce_perf"]
    client.containers.run(devel.tag, command, volumes=[f"{folder}:/shared"], user="root", remove=True)
    return folder


@pytest.fixture
def pods(quickstart: Built, client: DockerClient, bench: Path) -> Iterator[Pods]:
    network = client.networks.create(f"imagebuild-test-{bench.parent.name}", driver="bridge")
    with ExitStack() as stack:
        stack.callback(network.remove)
        volumes = {str(bench): {"bind": "/bench", "mode": "ro"}}
        yield Pods(stack, client, quickstart.tag, str(network.name), volumes)


def mount_as_operator(folder: Path, hosts: list[str], slots: int) -> dict[str, dict[str, str]]:
    """Create the files that the MPI operator mounts into pods, a key and the hostfile; return their volumes."""
    (folder / "hostfile").write_text("".join(f"{host} slots={slots}\n" for host in hosts))
    (folder / "keys").mkdir()
    command = ["ssh-keygen", "-q", "-t", "ecdsa", "-N", "", "-f", str(folder / "keys/id_rsa")]
    subprocess.run(command, check=True)
    (folder / "keys/authorized_keys").write_text((folder / "keys/id_rsa.pub").read_text())
    places = {"keys": ("/root/.ssh", "rw"), "hostfile": ("/etc/mpi/hostfile", "ro")}
    return {str(folder / name): {"bind": place, "mode": mode} for name, (place, mode) in places.items()}


@pytest.mark.parametrize("kind", ["jobset", "mpijob"])
def test_a_job_ends_with_its_verdict(kind: str, pods: Pods, tmp_path: Path) -> None:
    manifest = text(f"{kind} {ARGUMENTS} --image localhost/{pods.image}")
    name, roles = objects(manifest)[-1]["metadata"]["name"], containers(manifest)
    if kind == "jobset":
        first, hosts, variables = f"{name}-launcher-0-0.{name}", [f"{name}-worker-0-{i}.{name}" for i in range(2)], {}
    else:
        first, hosts = f"{name}-launcher.{name}", [f"{name}-worker-{i}.{name}.default.svc" for i in range(2)]
        variables = OF_OPERATOR
        pods.volumes.update(mount_as_operator(tmp_path, hosts, objects(manifest)[-1]["spec"]["slotsPerWorker"]))
    launcher = pods.start(first, roles["launcher"], variables)
    for host in hosts:  # the launcher waits for them
        pods.start(host, roles["worker"], {})
    status, log = launcher.wait(timeout=600)["StatusCode"], launcher.logs().decode()
    assert status == 0, log
    assert len(re.findall("#  Rank +[0-7] .* A100 80GB PCIe", log)) == 8, log
    assert '"env":[]' in log.partition("=== imagebuild: json of all_reduce\n")[2]
    assert "hunter2" not in log
    assert log.rstrip().endswith("imagebuild: passed; speed was not judged")
