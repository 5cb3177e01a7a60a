"""The pods of MPIJobs and JobSets, as containers: workers are reached, ranks add up, and the launcher ends with the verdict.

What the operators do is done here: names in a network, and for the MPI operator keys, a hostfile and its variables.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from docker import DockerClient
from docker.models.containers import Container

from tests.docker.conftest import Built
from tests.unit.jobs.job_fakes import text

pytestmark = pytest.mark.docker

ARGUMENTS = "--profile a100-pcie --fabric ethernet --nodes 2 --nccl 2.28.3 --param programs=/bench --param minutes=2"


@dataclass(frozen=True)
class Pods:
    """A network, and what is mounted into containers of it."""

    client: DockerClient
    image: str
    network: str
    bench: Path

    def start(self, stack: ExitStack, name: str, container: Mapping[str, Any], **more: Any) -> Container:
        """A container as a pod's. `more` is of the Docker API."""
        given = {e["name"]: e["value"] for e in container.get("env", [])}
        volumes = {str(self.bench): {"bind": "/bench", "mode": "ro"}, **more.pop("volumes", {})}
        endpoint = self.client.api.create_endpoint_config(aliases=more.pop("aliases", [name]))
        command = more.pop("command", None) or [*container["command"], *container["args"]]
        made = self.client.containers.run(
            self.image, command, detach=True, hostname=name.split(".", maxsplit=1)[0], network=self.network,
            environment={**given, **more.pop("environment", {})}, volumes=volumes,
            networking_config={self.network: endpoint}, user="root", **more,
        )  # fmt: skip
        stack.callback(made.remove, force=True, v=True)
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
    try:
        yield Pods(client, quickstart.tag, str(network.name), bench)
    finally:
        network.remove()


@contextmanager
def jobset(pods: Pods) -> Iterator[Container]:
    made = yaml.safe_load(text(f"jobset {ARGUMENTS} --image localhost/{pods.image}"))
    name = made["metadata"]["name"]
    specs = {j["name"]: j["template"]["spec"] for j in made["spec"]["replicatedJobs"]}
    containers = {role: spec["template"]["spec"]["containers"][0] for role, spec in specs.items()}
    with ExitStack() as stack:
        for i in range(specs["worker"]["completions"]):
            host = f"{name}-worker-0-{i}.{name}"
            pods.start(stack, host, containers["worker"])
        yield pods.start(stack, f"{name}-launcher-0-0.{name}", containers["launcher"])


@contextmanager
def mpijob(pods: Pods, folder: Path) -> Iterator[Container]:
    made = yaml.safe_load(text(f"mpijob {ARGUMENTS} --image localhost/{pods.image}"))
    name = made["metadata"]["name"]
    specs = made["spec"]["mpiReplicaSpecs"]
    hosts = [f"{name}-worker-{i}.{name}.default.svc" for i in range(specs["Worker"]["replicas"])]
    (folder / "hostfile").write_text("".join(f"{host} slots={made['spec']['slotsPerWorker']}\n" for host in hosts))
    keys = folder / "keys"
    keys.mkdir()
    command = ["ssh-keygen", "-q", "-t", "ecdsa", "-N", "", "-f", str(keys / "id_rsa")]
    subprocess.run(command, check=True)
    (keys / "authorized_keys").write_text((keys / "id_rsa.pub").read_text())
    volumes = {
        str(keys): {"bind": "/root/.ssh", "mode": "rw"},
        str(folder / "hostfile"): {"bind": "/etc/mpi/hostfile", "mode": "ro"},
    }
    operator = {
        "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
        "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
        "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
        "K_MPI_JOB_ROLE": "launcher",
    }
    worker = specs["Worker"]["template"]["spec"]["containers"][0]
    with ExitStack() as stack:
        env = {"K_MPI_JOB_ROLE": "worker"}
        serve = ["/usr/sbin/sshd", "-De"]
        launcher = specs["Launcher"]["template"]["spec"]["containers"][0]
        started = pods.start(stack, f"{name}-launcher.{name}", launcher, volumes=volumes, environment=operator)
        for host in hosts:  # for which the launcher waits
            pods.start(stack, host, worker, command=serve, volumes=dict(volumes), environment=env)
        yield started


@pytest.mark.parametrize("kind", ["jobset", "mpijob"])
def test_a_job_ends_with_its_verdict(kind: str, pods: Pods, tmp_path: Path) -> None:
    with jobset(pods) if kind == "jobset" else mpijob(pods, tmp_path) as launcher:
        status = launcher.wait(timeout=600)["StatusCode"]
        log = launcher.logs().decode()
    assert status == 0, log
    assert len(re.findall("#  Rank +[0-7] .* A100 80GB PCIe", log)) == 8, log
    assert '"env":[]' in log.partition("=== imagebuild: json of all_reduce\n")[2]
    assert "hunter2" not in log
    assert log.rstrip().endswith("imagebuild: passed; speed was not judged")
