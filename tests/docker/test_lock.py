"""Digests of images, from a real registry."""

from __future__ import annotations

import hashlib
import json
import socket
from typing import Any
from urllib.request import Request, urlopen

import pytest

from imagebuild.core import Absent, Mirrors, Unreachable
from imagebuild.lock import Upstream, incomplete, resolve_sources
from imagebuild.project import BaseImage, LockedImage, Table
from tests.docker.conftest import Services

pytestmark = pytest.mark.docker

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"


class Registry:
    """The distribution's docker-registry, with images of no layers."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.base = f"http://{address}/v2/some/image"

    def put(self, tag: str, content: dict[str, Any]) -> str:
        """The digest of a manifest, which is written with line ends that no text mode may touch."""
        data = json.dumps(content, indent=1).replace("\n", "\r\n").encode()
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        for name in (tag, digest):
            headers = {"Content-Type": content["mediaType"]}
            urlopen(Request(f"{self.base}/manifests/{name}", data, headers, method="PUT")).close()
        return digest

    def image(self, tag: str, architecture: str, **more: str) -> str:
        config = json.dumps(
            {"architecture": architecture, "os": "linux", "rootfs": {"type": "layers", "diff_ids": []}, **more}
        )
        data = config.encode()
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        with urlopen(Request(f"{self.base}/blobs/uploads/", method="POST")) as answer:
            place = answer.headers["Location"]
        headers = {"Content-Type": "application/octet-stream"}
        urlopen(Request(f"{place}&digest={digest}", data, headers, method="PUT")).close()
        blob = {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": digest, "size": len(data)}
        return self.put(tag, {"schemaVersion": 2, "mediaType": MANIFEST, "config": blob, "layers": []})

    def index(self, tag: str, **platforms: str) -> str:
        """An index; the platform of `unknown` is that of attestations."""
        entries = [
            {"mediaType": MANIFEST, "digest": digest, "size": 1,
             "platform": {"architecture": name, "os": "unknown" if name == "unknown" else "linux"}}
            for name, digest in platforms.items()
        ]  # fmt: skip
        return self.put(tag, {"schemaVersion": 2, "mediaType": INDEX, "manifests": entries})


@pytest.fixture(scope="module")
def registry(services: Services) -> Registry:
    return Registry(services.emptied().registry)


def test_an_index_and_its_platforms(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")  # no engine is needed
    made = {arch: registry.image(arch, arch) for arch in ("amd64", "arm64", "riscv64", "unknown")}
    digest = registry.index("13", **made)
    found = Upstream().image(f"{registry.address}/some/image:13")
    assert found == LockedImage(digest=digest, platforms={"linux/amd64": made["amd64"], "linux/arm64": made["arm64"]})


def test_a_single_manifest_has_no_platforms(registry: Registry) -> None:
    digest = registry.image("one", "amd64")
    assert Upstream().image(f"{registry.address}/some/image:one") == LockedImage(digest=digest)


def test_a_tag_that_moved(registry: Registry) -> None:
    before = registry.image("moving", "amd64")
    after = registry.image("moving", "amd64", author="somebody else")
    reference = f"{registry.address}/some/image:moving"
    assert Upstream().image(reference).digest == after != before
    assert Upstream().has_image(reference, before)
    assert not Upstream().has_image(reference, f"sha256:{'0' * 64}")


def test_a_tag_that_is_not_there_and_a_registry_that_is_not_there(registry: Registry) -> None:
    with pytest.raises(Absent, match="some/image:gone: the registry does not have it"):
        Upstream().image(f"{registry.address}/some/image:gone")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(Unreachable, match="[Cc]onnection refused") as caught:
        Upstream().image(f"{address}/some/image:13")
    assert not isinstance(caught.value, Absent)


def test_the_lock_names_the_public_image_and_a_mirror_is_asked(registry: Registry) -> None:
    digest = registry.image("13-slim", "amd64")
    mirrors = Mirrors(images={"docker.io/library/debian": f"{registry.address}/some/image"})
    entries: Table = {}
    sources = [BaseImage("debian:13-slim"), BaseImage("debian:14-slim")]
    outcome = resolve_sources(entries, incomplete(entries, sources), Upstream(mirrors), keep=lambda: None)
    assert entries == {
        ("images", "debian:13-slim"): LockedImage(digest=digest),
        ("images", "debian:14-slim"): "unresolved",
    }
    assert "does not have it" in outcome.unresolved["image debian:14-slim"]
