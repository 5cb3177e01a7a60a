"""What is built can be pushed; test_publish.py pulls it."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from docker import DockerClient

from tests.docker.conftest import REPOSITORY, Tiny

pytestmark = pytest.mark.docker


def blob(layout: Path, digest: str) -> bytes:
    content = (layout / "blobs" / digest.replace(":", "/")).read_bytes()
    assert digest == f"sha256:{hashlib.sha256(content).hexdigest()}"
    return content


MANIFESTS = ("oci.image.manifest.v1", "oci.image.index.v1", "docker.distribution.manifest.v2")
TINY_TARGET = "tiny-cuda13.0-debian13-runtime"


def manifest_of(registry: str, repository: str, reference: str) -> bytes:
    accept = {"Accept": ", ".join(f"application/vnd.{kind}+json" for kind in MANIFESTS)}
    with urlopen(Request(f"http://{registry}/v2/{repository}/manifests/{reference}", headers=accept)) as answer:
        return bytes(answer.read())


def tags(registry: str, repository: str) -> list[str]:
    with urlopen(f"http://{registry}/v2/{repository}/tags/list") as answer:
        return list(json.load(answer)["tags"])


def test_push(registry: str, tiny: Tiny, client: DockerClient) -> None:
    repository = f"{registry}/{REPOSITORY}"
    tiny.build(TINY_TARGET, "--push", "--registry", repository)
    result = tiny.result()
    assert result.repository == f"{repository}/tiny-staging"
    assert list(result.manifests.values()) == [result.digest]
    assert not (tiny.root / "build" / TINY_TARGET / "layout").exists()

    # What the registry has under the digest is what the result says, and nobody has a tag to pull it by.
    staging = f"{REPOSITORY}/tiny-staging"
    manifest = manifest_of(registry, staging, str(result.digest))
    assert result.digest == f"sha256:{hashlib.sha256(manifest).hexdigest()}"
    assert sum(layer["size"] for layer in json.loads(manifest)["layers"]) == result.size_bytes
    (tag,) = tags(registry, staging)
    assert result.tags == (f"{result.repository}:{tag}",)
    assert re.fullmatch(rf"staged-\d{{8}}T\d{{6}}Z-{str(result.digest)[7:19]}", tag)
    assert not client.images.list(result.repository)


def test_what_is_there_is_not_pushed_again(tiny: Tiny, registry: str) -> None:
    push = (TINY_TARGET, "--push", "--registry", f"{registry}/x")
    first = tiny.build(*push)
    assert not re.search("pushed .*: 0 blobs", first.out + first.err)
    before = tiny.result()
    again = tiny.build(*push)
    assert re.search(rf"pushed {TINY_TARGET}: 0 blobs", again.out + again.err)
    assert tiny.result().digest == before.digest
    assert sorted([*before.tags, *tiny.result().tags]) == sorted(
        f"{registry}/x/tiny-staging:{tag}" for tag in tags(registry, "x/tiny-staging")
    )


@pytest.mark.parametrize("compression", ["gzip", "zstd:3"])
def test_output_is_an_oci_layout(tiny: Tiny, compression: str) -> None:
    tiny.build("cuda=13.0", "--output", tiny.root / "layouts", "--compression", compression)
    for target in ("tiny-cuda13.0-debian13-runtime", "tiny-cuda13.0-debian13-devel"):
        layout, result = tiny.root / "layouts" / target, tiny.result(target)
        assert json.loads((layout / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}
        (entry,) = json.loads((layout / "index.json").read_text())["manifests"]
        assert entry["digest"] == result.digest
        assert list(result.manifests.values()) == [result.digest]
        manifest = json.loads(blob(layout, entry["digest"]))
        for part in [manifest["config"], *manifest["layers"]]:
            assert len(blob(layout, part["digest"])) == part["size"]
        kind = f"application/vnd.oci.image.layer.v1.tar+{compression.partition(':')[0]}"
        assert {layer["mediaType"] for layer in manifest["layers"]} == {kind}  # the base's too
        assert result.size_bytes == sum(layer["size"] for layer in manifest["layers"])
        labels = json.loads(blob(layout, manifest["config"]["digest"]))["config"]["Labels"]
        assert labels["imagebuild.target"] == target
