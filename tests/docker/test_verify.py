"""`imagebuild verify` with real containers, a real ssh, and damaged or foreign images."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from docker import DockerClient
from pytest_docker.plugin import get_docker_services

from imagebuild.bench.verification import CheckResult, VerifyResult
from imagebuild.oci.engine import sleeping_containers
from imagebuild.project.load import load_project
from imagebuild.verify.checks import FAILED_LINE, judge_check, select_checks
from imagebuild.verify.docker import ContainerCluster, cluster_names, node_containers
from imagebuild.verify.runner import Execution
from tests.conftest import ROOT, git
from tests.docker.conftest import (
    REPOSITORY,
    TARGET,
    TINY_TARGET,
    Built,
    Imagebuild,
    Tiny,
    compose_command,
    copy_of_project,
    finish,
    sleeping,
    until,
    watched,
)
from tests.docker.test_quickstart import assert_proves_every_component, docker_build

pytestmark = pytest.mark.docker

Verify = Callable[..., VerifyResult]


@pytest.fixture
def verify(imagebuild: Imagebuild) -> Verify:
    return imagebuild.verify


def outcomes(result: VerifyResult) -> dict[str, str]:
    """Map all checks that start programs to their outcomes."""
    return {f"{c.component}/{c.check}": c.outcome for c in result.checks if c.component != "image"}


def the(result: VerifyResult, name: str) -> CheckResult:
    (found,) = [c for c in result.checks if f"{c.component}/{c.check}" == name]
    return found


@pytest.fixture(scope="module")
def by_docker(quickstart: Built, checkout: Path, client: DockerClient, host: str) -> VerifyResult:
    """Run all checks with the docker runner; return the result."""
    with watched(client, host) as environ:
        return Imagebuild(checkout, environ).verify(TARGET)


def without_nodes(result: dict[str, str], single: VerifyResult) -> dict[str, str]:
    """Remove the checks that were skipped in `single` because they need several nodes."""
    alone = {f"{c.component}/{c.check}" for c in single.checks if "nodes, 1 here" in c.reason}
    return {name: outcome for name, outcome in result.items() if name not in alone}


@pytest.fixture(scope="module")
def node(
    quickstart: Built, docker_ip: str, docker_compose_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Start the service `node` of the compose file; return the ssh command that reaches it.

    The service has its own compose project, because it needs the built image.
    """
    folder, project = tmp_path_factory.mktemp("node"), f"{REPOSITORY}-node"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "key"], check=True)
    command = compose_command(folder / "variables", NODE=quickstart.tag, KEY=(folder / "key.pub").read_text().strip())
    up, down = ["up --detach --wait node"], ["--profile node down --volumes --timeout 1"]
    with get_docker_services(command, str(docker_compose_file), project, up, down) as services:
        options = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
        yield f"ssh -p {services.port_for('node', 2299)} -i {folder}/key {options} root@{docker_ip}"


def test_verify_proves_every_component(by_docker: VerifyResult, quickstart: Built, imagebuild: Imagebuild) -> None:
    assert_proves_every_component(by_docker, quickstart, imagebuild)


def test_what_passed_is_not_repeated(quickstart: Built, verify: Verify, checkout: Path) -> None:
    git(checkout, "init", "--quiet")
    git(checkout, "add", "matrix.yaml", "imagebuild.lock", "dockerfiles")
    git(checkout, "commit", "--quiet", "--message", "x")
    try:
        first = verify(TARGET, "--only", "pmix", "--only", "nccl-wheel")
        again = verify(TARGET, "--only", "pmix", "--reuse")
    finally:
        shutil.rmtree(checkout / ".git")
    passed = {check.name: check.started for check in first.checks if check.outcome == "passed"}
    kept = {check.name: check.started for check in again.checks if check.reason.endswith("; not repeated")}
    assert kept
    assert kept == {name: started for name, started in passed.items() if name.startswith("pmix/")}
    assert again.surroundings == first.surroundings


def test_a_prefix_says_the_same(by_docker: VerifyResult, node: str, verify: Verify) -> None:
    result = verify(TARGET, "--runner", f"exec:{node}")
    assert without_nodes(outcomes(by_docker), result) == without_nodes(outcomes(result), result)
    assert len(without_nodes(outcomes(result), result)) > 30
    assert all("an OCI layout" in c.reason for c in result.checks if c.component == "image")
    assert (result.target, result.platform) == (TARGET, by_docker.platform)
    assert the(result, "openmpi-distro/ranks-as-user").command[: len(node.split())] == tuple(node.split())


def test_hosts_of_a_prefix_are_nodes(
    quickstart: Built, by_docker: VerifyResult, client: DockerClient, verify: Verify
) -> None:
    chosen = {"openmpi-distro/four-nodes-as-user", "ucx-distro/two-nodes", "sshd/refuses-root", "sshd/host-keys"}
    with node_containers(client, quickstart.tag, 4) as nodes:
        ContainerCluster(nodes)
        result = verify(
            TARGET, "--runner", f"exec:docker exec {nodes[0].name}", "--hosts", ",".join(cluster_names(4)),
            *(f"--only={name}" for name in chosen),
        )  # fmt: skip
    assert outcomes(result) == {name: outcomes(by_docker)[name] for name in chosen} == dict.fromkeys(chosen, "passed")


@pytest.fixture
def hung(tmp_path: Path, environ: dict[str, str]) -> tuple[Imagebuild, str]:
    """Return a project with checks that hang, and the number of seconds that they sleep."""
    (tmp_path / "project").mkdir()
    project = copy_of_project(tmp_path / "project")
    seconds = f"1000{int(uuid4().hex[:9], 16)}"
    checks = (ROOT / "tests/data/hung-checks.yaml").read_text().replace("SECONDS", seconds)
    component = project / "dockerfiles/components/pmix/component.yaml"
    text = component.read_text()
    assert text.count("\nchecks:\n") == 1
    component.write_text(text.replace("\nchecks:\n", f"\nchecks:\n{checks}"))
    return Imagebuild(project, environ), seconds


def test_a_hung_check_ends_with_all_it_started(quickstart: Built, hung: tuple[Imagebuild, str], tmp_path: Path) -> None:
    imagebuild, _ = hung
    chosen = ("--only", "pmix/hangs", "--only", "pmix/afterwards")
    imagebuild("verify", TARGET, *chosen, "--output", tmp_path / "kept", expect=1)
    result = VerifyResult.model_validate_json((tmp_path / "kept/verify.json").read_text())
    check = the(result, "pmix/hangs")
    assert (check.outcome, check.timeout, check.status) == ("failed", True, None)
    assert (check.reason, check.output) == ("did not end within 5 s", "before\n")
    assert the(result, "pmix/afterwards").outcome == "passed", the(result, "pmix/afterwards").output


def test_ctrl_c_ends_what_ssh_started(hung: tuple[Imagebuild, str], node: str) -> None:
    imagebuild, seconds = hung
    process = imagebuild.start("verify", TARGET, "--runner", f"exec:{node}", "--only", "pmix/forever")
    assert until(lambda: sleeping(seconds))
    process.send_signal(signal.SIGINT)
    assert finish(process).status == 130
    assert until(lambda: not sleeping(seconds))


def test_what_an_image_lacks_is_said(quickstart: Built, verify: Verify) -> None:
    tag, ranks = f"{REPOSITORY}/foreign:3", "openmpi-distro/ranks-as-user"
    damages = {
        "userdel mpiuser": (1, ranks, "the image has no user 'mpiuser'"),
        "rm /usr/bin/setpriv": (3, ranks, "the image has no setpriv"),
        "rm /usr/bin/timeout": (3, "pmix/loads", "the image has no timeout"),
        "rm /usr/bin/bash": (3, "pmix/loads", "the image has no bash"),
    }
    for damage, (status, check, reason) in damages.items():
        docker_build(f"FROM {quickstart.tag}\nRUN {damage}\n", "--tag", tag)
        assert the(verify(tag, "--only", check, expect=status), check).reason == reason
    # Unit tests cover further cases of foreign images without an engine.
    docker_build("FROM scratch\nLABEL maker=other\n", "--tag", tag)
    readable, nothing = verify(tag, "--only", "image/readable", "--only", "pmix/loads", expect=4).checks
    assert (readable.outcome, nothing.outcome, "sleep" in nothing.reason) == ("passed", "skipped", True)


def test_a_normal_user_s_image(quickstart: Built, verify: Verify, client: DockerClient) -> None:
    tag = f"{REPOSITORY}/foreign:5"
    docker_build(f"FROM {quickstart.tag}\nUSER mpiuser\n", "--tag", tag)
    assert the(verify(tag, "--only", "pmix/loads"), "pmix/loads").outcome == "passed"
    with sleeping_containers(client, tag) as (running,):
        result = verify(TARGET, "--runner", f"exec:docker exec {running.name}", "--only", "pmix", expect=3)
    assert the(result, "pmix/loads").reason == "needs the user root; commands run as mpiuser here"


PASS_ON_BASE = {
    "cuda/no-stubs", "cuda-image/lean", "cuda-image/no-stubs", "cuda-image/paths", "sshd/environment", "sshd/no-host-keys",
}  # fmt: skip
"""Checks that pass on an image without any component: they look for faults, not for things."""


def test_checks_of_missing_things_say_what_they_miss(tiny: Tiny, client: DockerClient) -> None:
    """Run the script of each check in an image that contains only the base."""
    tiny.build(TINY_TARGET, "--load")
    silent, passed = {}, set()
    with sleeping_containers(client, tiny.result().tags[0]) as (container,):
        for planned in select_checks(load_project(ROOT), {}):
            assert planned.check
            if planned.check.needs:
                continue
            script = f"{FAILED_LINE}\n{planned.script}"
            argv = ["timeout", "20", "bash", "-euo", "pipefail", "-c", script]
            done = container.exec_run(argv, environment=dict(planned.check.environment))
            assert isinstance(done.output, bytes)
            output = done.output.decode(errors="replace")
            reason = judge_check(planned.check, planned.version, Execution(tuple(argv), done.exit_code, output, 0))
            if not reason:
                passed.add(str(planned))
            elif not output.strip():
                silent[str(planned)] = reason
    assert not silent
    assert passed == PASS_ON_BASE
