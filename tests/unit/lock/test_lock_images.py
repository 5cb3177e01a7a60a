"""Digests of images, from a registry that answers over HTTP."""

import socket

import pytest

from imagebuild.core.errors import Absent, CommandError, Unreachable
from imagebuild.core.http import Patience
from imagebuild.core.settings import Mirrors
from imagebuild.lock.upstream import Upstream
from imagebuild.project.lockfile import LockedImage
from tests.registry_fake import FakeRegistry, index, put_image


def test_an_index_and_its_platforms_and_a_tag_that_moves(server: FakeRegistry) -> None:
    platforms = ("linux/amd64", "linux/arm64", "linux/riscv64", "unknown/unknown")
    made = {name: put_image(server, "some/image", name.encode(), platform=name) for name in platforms}
    digest = index(server, "some/image", made.values(), "13")
    reference = f"{server.address}/some/image:13"
    found = Upstream().image(reference)
    assert found == LockedImage(digest=digest, platforms={name: made[name].digest for name in platforms[:2]})
    entry = made["linux/amd64"].digest
    server.at("some/image").put_manifest(server.at("some/image").manifest(entry), "13")
    assert Upstream().image(reference) == LockedImage(digest=entry)  # a single manifest has no platforms
    assert Upstream().image(reference, digest=digest) == found
    with pytest.raises(CommandError, match="the pinned digest is for one platform; `imagebuild lock --update` pins"):
        Upstream().image(reference, facts=True, digest=entry)
    with pytest.raises(Absent, match="the registry does not have it"):
        Upstream().image(reference, digest=f"sha256:{'0' * 64}")


def test_what_the_configuration_says_is_kept_unless_it_is_a_path_only(server: FakeRegistry) -> None:
    env = ["PATH=/usr/bin", "NCCL_VERSION=2.30.7-1"]
    platforms = ("linux/amd64", "linux/arm64")
    made = [put_image(server, "some/cuda", b"x", platform=platform, Env=env) for platform in platforms]
    index(server, "some/cuda", made, "13")
    facts = Upstream().image(f"{server.address}/some/cuda:13").facts or {}
    assert {platform: found.nccl for platform, found in facts.items()} == dict.fromkeys(platforms, "2.30.7-1")


def test_a_registry_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(Unreachable, match=f"{address}/some/image:13: .*[Cc]onnection refused") as caught:
        Upstream(patience=Patience(0)).image(f"{address}/some/image:13")
    assert not isinstance(caught.value, Absent)


def test_a_mirror_is_asked_for_the_public_image(server: FakeRegistry) -> None:
    digest = index(server, "some/image", [], "13-slim")
    upstream = Upstream(Mirrors(images={"docker.io/library/debian": f"{server.address}/some/image"}))
    assert upstream.image("debian:13-slim") == LockedImage(digest=digest)
    with pytest.raises(Absent, match="some/image:14-slim: the registry does not have it"):
        upstream.image("debian:14-slim")
