"""The image that `make image` builds: its result, its cache, its checks, and secrets that must not be in it."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from docker import DockerClient

from imagebuild.bench.verification import VerifyResult
from tests.docker.conftest import REPOSITORY, TARGET, TINY_TARGET, Built, Imagebuild, Tiny

pytestmark = pytest.mark.docker


def docker_build(text: str, *options: str) -> None:
    """Build a Dockerfile without imagebuild: `docker buildx build - < Dockerfile`."""
    command = ["docker", "buildx", "build", "--load", *options, "-"]
    with tempfile.TemporaryDirectory() as folder:  # buildx leaves temporary files there
        environ = {**os.environ, "TMPDIR": folder}
        done = subprocess.run(command, input=text, text=True, stderr=subprocess.PIPE, env=environ, check=False)
    assert done.returncode == 0, done.stderr


def test_the_result_says_what_was_built(quickstart: Built, client: DockerClient) -> None:
    result = quickstart.result
    assert result.target == TARGET
    assert client.images.get(quickstart.tag).id == result.digest
    assert {s.component for s in result.steps} >= {"fetch", "cuda", "nccl-wheel"}
    assert all(s.cached or s.seconds > 0 for s in result.steps)
    assert not any(s.error for s in result.steps)


def test_again_everything_is_cached(quickstart: Built, imagebuild: Imagebuild) -> None:
    imagebuild("build", TARGET, "--platform", "local")  # rebuild steps that the engine has removed from its cache
    before = quickstart.result
    imagebuild("build", TARGET, "--platform", "local")
    assert quickstart.result.digest == before.digest
    assert all(step.cached for step in quickstart.result.steps)
    assert {s.stage for s in quickstart.result.steps} == {s.stage for s in before.steps}


def test_what_is_rendered_is_what_is_built(quickstart: Built, imagebuild: Imagebuild, client: DockerClient) -> None:
    text = imagebuild("render", TARGET).out
    assert text == (quickstart.folder / "Dockerfile").read_text()
    bake = json.loads((quickstart.folder.parent / "bake.json").read_text())
    (target,) = bake["target"].values()
    contexts = [f"--build-context={name}={value}" for name, value in target["contexts"].items()]
    tag = f"{REPOSITORY}/by-hand:1"
    docker_build(text, "--provenance=false", "--tag", tag, *contexts)
    assert client.images.get(tag).id == quickstart.result.digest


NODES = {
    *(f"openmpi-distro/{count}-nodes-as-{user}" for count in ("two", "four") for user in ("root", "user")),
    "openmpi-distro/two-nodes-own-server", "ucx-distro/two-nodes", "ucx-distro/mpi-two-nodes",
    "sshd/refuses-root", "sshd/refuses-user", "sshd/host-keys",
}  # fmt: skip
"""Checks in several containers that connect by ssh."""


def assert_proves_every_component(result: VerifyResult, built: Built, imagebuild: Imagebuild) -> None:
    """Assert that no check failed, skipped checks have a reason, and a check of each component passed."""
    assert (result.target, result.digest) == (built.result.target, built.result.digest)
    assert "failed" not in {check.outcome for check in result.checks}
    assert all(check.reason for check in result.checks if check.outcome == "skipped")
    (planned,) = json.loads(imagebuild("plan", built.result.target, "--json", "-").out)["targets"]
    passed = {f"{check.component}/{check.check}" for check in result.checks if check.outcome == "passed"}
    assert {name.partition("/")[0] for name in passed} == {"image", *planned["components"]}
    assert passed >= NODES


def test_verify_proves_every_component_of_devel(devel: Built, imagebuild: Imagebuild) -> None:
    """test_verify.py does the same for the runtime image, and compares other runners."""
    assert_proves_every_component(imagebuild.verify(devel.result.target), devel, imagebuild)


def test_verify_of_images_that_are_not_the_targets(tiny: Tiny) -> None:
    """tests/unit/verify/test_subject.py has an image that was built from other versions."""
    tag = f"{REPOSITORY}/foreign:1"
    docker_build("FROM scratch\nLABEL maker=other\n", "--tag", tag)
    foreign = tiny.imagebuild("verify", tag, expect=1)
    assert "has no labels imagebuild.component.*, so only the rules of its files are checked" in foreign.err
    assert "the image has neither an entrypoint nor a command" in foreign.out
    assert "not in the engine's image store" in tiny.imagebuild("verify", TINY_TARGET, expect=2).err


def files(client: DockerClient, tag: str, folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield path and content of each file in all layers of an image, and of its configuration."""
    saved = folder / "image.tar"
    with saved.open("wb") as file:
        file.writelines(client.images.get(tag).save())
    with tarfile.open(saved) as outer:
        for blob in (member for member in outer if member.isfile()):
            content = outer.extractfile(blob)
            assert content
            if content.peek(2)[:2] != b"\x1f\x8b":  # type: ignore[attr-defined]
                yield f"configuration {blob.name}", content.read()
                continue
            with gzip.open(content) as layer, tarfile.open(fileobj=layer, mode="r|") as inner:
                for member in inner:
                    data = inner.extractfile(member) if member.isfile() else None
                    yield member.name.removeprefix("./"), data.read() if data else b""
    saved.unlink()


def test_secrets_reach_the_step_and_nothing_else(tiny: Tiny, client: DockerClient, tmp_path: Path) -> None:
    """The CA bundle and the package index's address may be confidential, so they must not be in the image."""
    secrets = [f"certificate-of-{tiny.nonce}", f"password-of-{tiny.nonce}"]
    (tiny.root / "ca.pem").write_text(f"-----BEGIN CERTIFICATE-----\n{secrets[0]}\n")
    tiny.step(
        "--mount=type=secret,id=ca --mount=type=secret,id=pip.conf mkdir -p /out/runtime && "
        "sha256sum /run/secrets/ca > /out/runtime/ca && grep -c password-of /run/secrets/pip.conf"
    )
    index = f"https://me:{secrets[1]}@example.org/simple"
    tiny.build(TINY_TARGET, "--ca", tiny.root / "ca.pem", PIP_INDEX_URL=index)
    (tiny.root / "ca.pem").unlink()
    found = dict(files(client, tiny.result().tags[0], tmp_path))
    assert "ca" in found
    found |= {str(p): p.read_bytes() for p in tiny.root.rglob("*") if p.is_file()}
    assert not [name for name, content in found.items() for s in secrets if s.encode() in content]
