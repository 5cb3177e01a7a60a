"""Several containers of the image that reach each other by ssh: the checks on them, and faults that they must find."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
from docker import DockerClient

from imagebuild.oci import execute_script
from imagebuild.project import CheckResult, VerifyResult
from imagebuild.verify import NodesUnreachable, cluster
from tests.docker.conftest import REPOSITORY, Built, Imagebuild, containers, until, unused_networks
from tests.docker.test_quickstart import docker_build

pytestmark = pytest.mark.docker

NODES = [
    "openmpi-distro/*-nodes*",
    "sshd/refuses-*",
    "sshd/host-keys",
    "ucx-distro/*two-nodes",
]


@pytest.fixture
def before(client: DockerClient) -> set[str]:
    """Networks without use that were there before the test."""
    return unused_networks(client)


def verify(imagebuild: Imagebuild, tag: str, folder: Path, *checks: str, expect: int = 0) -> list[CheckResult]:
    """The results of some checks of an image."""
    chosen = [word for check in checks for word in ("--only", check)]
    imagebuild("verify", tag, *chosen, "--json", folder / "verify.json", expect=expect)
    result = VerifyResult.model_validate_json((folder / "verify.json").read_text())
    return [check for check in result.checks if check.component != "image"]


@pytest.mark.parametrize("variant", ["quickstart", "devel"])
def test_checks_on_two_and_four_nodes_pass(
    request: pytest.FixtureRequest, variant: str, imagebuild: Imagebuild, client: DockerClient,
    before: set[str], tmp_path: Path,
) -> None:  # fmt: skip
    built: Built = request.getfixturevalue(variant)
    results = {f"{c.component}/{c.check}": c for c in verify(imagebuild, built.tag, tmp_path, *NODES)}
    passed = {name for name, check in results.items() if check.outcome == "passed"}
    assert passed >= {f"openmpi-distro/{n}-nodes-as-{u}" for n in ("two", "four") for u in ("root", "user")}
    assert passed >= {"openmpi-distro/two-nodes-own-server", "sshd/refuses-root", "sshd/refuses-user", "sshd/host-keys"}
    assert passed >= {"ucx-distro/two-nodes", "ucx-distro/mpi-two-nodes"}
    assert {c.reason for c in results.values() if c.outcome == "skipped"} <= {"only for variant devel"}
    if variant == "devel":
        assert passed == set(results)
    assert until(lambda: unused_networks(client) <= before)


FAULTS = {
    # The right key is not looked for.
    "other-keys": (
        "echo AuthorizedKeysFile /etc/ssh/others > /etc/ssh/sshd_config.d/00-mine.conf",
        "sshd/host-keys",
        "does not let root in",
    ),
    # Ranks start, but each believes to be alone.
    "mpirun": (
        r"printf '#!/bin/sh\nwhile [ \"$1\" != bash ]; do shift; done\nexec \"$@\"\n' > /usr/local/bin/mpirun && "
        "chmod +x /usr/local/bin/mpirun",
        "openmpi-distro/two-nodes-as-user",
        "exit status 1",
    ),
    "passwords": (
        "echo PasswordAuthentication yes > /etc/ssh/sshd_config.d/00-mine.conf",
        "sshd/refuses-root",
        "exit status 1",
    ),
    "host-keys": ("ssh-keygen -q -A", "sshd/host-keys", "exit status 1"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_checks_find_what_is_broken(quickstart: Built, imagebuild: Imagebuild, tmp_path: Path, fault: str) -> None:
    damage, check, reason = FAULTS[fault]
    tag = f"{REPOSITORY}/broken-{fault}:1"
    docker_build(f"FROM {quickstart.tag}\nRUN {damage}\n", "--tag", tag)
    (result,) = verify(imagebuild, tag, tmp_path, check, expect=1)
    assert result.outcome == "failed"
    assert reason in f"{result.reason}\n{result.output}"


def test_nothing_is_left_of_nodes_that_do_not_reach_each_other(
    quickstart: Built, client: DockerClient, before: set[str]
) -> None:
    tag = f"{REPOSITORY}/no-ssh:1"
    docker_build(f"FROM {quickstart.tag}\nRUN rm /usr/bin/ssh\n", "--tag", tag)
    with pytest.raises(NodesUnreachable, match="no ssh$"), cluster(client, tag, 2):
        pytest.fail("there are nodes")
    assert not containers(client)
    assert until(lambda: unused_networks(client) <= before)


def test_keys_are_of_this_cluster_and_in_memory(quickstart: Built, client: DockerClient) -> None:
    seen = set()
    for _ in range(2):
        with cluster(client, quickstart.tag, 2) as nodes:
            script = (
                "stat -f -c %T ~/.ssh; cat ~/.ssh/id_ed25519.pub; cut -d' ' -f1,3 /etc/ssh/ssh_host_ed25519_key.pub"
            )
            for user in ("root", "mpiuser"):
                status, text = execute_script(nodes[0], script, user=user, timeout_s=10, environment={})
                assert status == 0, text
                filesystem, key, _ = text.splitlines()
                assert filesystem == "tmpfs"
                seen.add(key.split()[1])
            changed = {str(entry["Path"]) for node in nodes for entry in node.diff() or ()}
            assert not [path for path in changed if "/.ssh/" in path]
    assert len(seen) == 4


def test_a_container_keeps_its_host_key_when_it_starts_again(quickstart: Built, client: DockerClient) -> None:
    """Whoever knows the host is not alarmed."""
    fresh = client.containers.run(quickstart.tag, ["/usr/sbin/sshd", "-D", "-e"], detach=True)

    def key() -> str:
        words = ["cut", "-d ", "-f2", "/etc/ssh/ssh_host_ed25519_key.pub"]
        command = ["docker", "exec", str(fresh.id), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout

    try:
        assert until(lambda: bool(key()))
        before = key()
        time.sleep(0.5)
        fresh.restart(timeout=1)
        assert until(lambda: key() == before)
    finally:
        fresh.remove(force=True)
