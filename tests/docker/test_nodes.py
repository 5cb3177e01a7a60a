"""Several containers of an image that connect by ssh: the checks find faults in them, and nothing is left."""

from __future__ import annotations

import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import pytest
from docker import DockerClient

from imagebuild.verify.docker import ContainerCluster, NodesUnreachable, node_containers
from tests.conftest import data
from tests.docker.conftest import REPOSITORY, Built, Imagebuild, containers, until, unused_networks
from tests.docker.test_quickstart import docker_build

CASES = data("cases/docker/nodes")

pytestmark = pytest.mark.docker


@pytest.fixture
def before(client: DockerClient) -> set[str]:
    """Return the unused networks that existed before the test."""
    return unused_networks(client)


FAULTS = CASES["faults"]


@pytest.mark.parametrize("fault", FAULTS)
def test_checks_find_what_is_broken(quickstart: Built, imagebuild: Imagebuild, fault: str) -> None:
    damage, check, reason = FAULTS[fault]
    tag = f"{REPOSITORY}/broken-{fault}:1"
    docker_build(f"FROM {quickstart.tag}\nRUN {damage}\n", "--tag", tag)
    found = imagebuild.verify(tag, "--only", check, expect=1).checks
    (result,) = [check for check in found if check.component != "image"]
    assert result.outcome == "failed"
    assert reason in f"{result.reason}\n{result.output}"


def test_nothing_is_left_of_nodes_that_do_not_reach_each_other(
    quickstart: Built, client: DockerClient, before: set[str]
) -> None:
    tag = f"{REPOSITORY}/no-ssh:1"
    docker_build(f"FROM {quickstart.tag}\nRUN rm /usr/bin/ssh\n", "--tag", tag)
    with pytest.raises(NodesUnreachable, match="no ssh$"), node_containers(client, tag, 2) as nodes:
        ContainerCluster(nodes)
    assert not containers(client)
    assert until(lambda: unused_networks(client) <= before)


def test_keys_are_of_this_cluster_and_in_memory(quickstart: Built, client: DockerClient, before: set[str]) -> None:
    seen = set()
    for _ in range(2):
        with node_containers(client, quickstart.tag, 2) as nodes:
            ContainerCluster(nodes)
            script = "stat -f -c %T ~/.ssh; ssh-keygen -y -f ~/.ssh/id_ed25519"
            for user in ("root", "mpiuser"):
                done = nodes[1].exec_run(["bash", "-euc", script], user=user)
                filesystem, key = cast(bytes, done.output).decode().splitlines()
                assert (done.exit_code, filesystem) == (0, "tmpfs")
                seen.add(key.split()[1])
            changed = {str(entry["Path"]) for node in nodes for entry in node.diff() or ()}
            assert not [path for path in changed if "/.ssh/" in path]
    assert len(seen) == 2
    assert until(lambda: unused_networks(client) <= before)


@pytest.mark.parametrize(("user", "home"), [("12345:0", "/home/mpi"), ("1000:0", "/home/mpiuser"), ("0:0", "/root")])
def test_mpirun_between_containers_whose_files_are_read_only(
    quickstart: Built, client: DockerClient, tmp_path: Path, user: str, home: str
) -> None:
    """The settings are those of docs/clusters.md. The user 12345 has no account, as in OpenShift."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "id_ed25519"], check=True)
    (tmp_path / "id_ed25519.pub").rename(tmp_path / "authorized_keys")
    (tmp_path / "id_ed25519").chmod(0o400 if user == "0:0" else 0o440)
    tmp_path.chmod(0o750)
    mark = REPOSITORY.partition("/")[0]
    names, nodes = (f"{mark}-node-1", f"{mark}-node-2"), []
    with ExitStack() as stack:
        network = client.networks.create(f"{mark}-mpi")
        stack.callback(network.remove)
        for name in names:
            node = client.containers.run(
                quickstart.tag, ["/usr/sbin/sshd", "-D", "-e", "-p", "2222"], detach=True, hostname=name, name=name,
                network=network.name, user=user, environment={"HOME": home}, read_only=True, tmpfs={"/tmp": ""},
                volumes={str(tmp_path): {"bind": f"{home}/.ssh", "mode": "ro"}},
            )  # fmt: skip
            stack.callback(node.remove, force=True)
            nodes.append(node)

        def run(command: str) -> str:
            own = {"HOME": home, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
            return cast(bytes, nodes[0].exec_run(["bash", "-c", command], environment=own).output).decode()

        ssh = f"with-user ssh -p 2222 -o BatchMode=yes -o LogLevel=ERROR {names[1]}"
        assert until(lambda: run(f"{ssh} hostname") == f"{names[1]}\n"), nodes[1].logs().decode()
        assert run(f"{ssh} id -u").split() == [user.partition(":")[0]]
        scan = run(f"ssh-keyscan -q -t ed25519 -p 2222 {' '.join(names)} 2> /dev/null")
        assert len({line.split()[-1] for line in scan.splitlines()}) == 2
        mpirun = f"with-user timeout 60 mpirun --host {','.join(names)} --prtemca plm_ssh_args '-p 2222' hostname"
        assert until(lambda: set(names) <= set(run(mpirun).split())), run(mpirun)
        places = {str(entry["Path"]) for entry in nodes[0].diff() or ()}  # docker creates mount points
        assert not [path for path in places if not f"{home}/.ssh".startswith(path)]
