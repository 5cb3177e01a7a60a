"""Pushed images and OCI layouts of a build. test_publish.py shows that a pulled image is the built image."""

from __future__ import annotations

import json
import re

import pytest

from imagebuild.oci.layout import digest_of
from imagebuild.oci.registry import connect_registry
from tests.docker.conftest import TINY_TARGET, Tiny

pytestmark = pytest.mark.docker


def test_what_is_there_is_not_pushed_again(tiny: Tiny, registry: str) -> None:
    push = (TINY_TARGET, "--push", "--registry", f"{registry}/x")
    first = tiny.build(*push)
    assert not re.search("push of .* → 0 blobs", first.out + first.err)
    before = tiny.result()
    assert not (tiny.root / "build" / TINY_TARGET / "layout").exists()
    assert re.fullmatch(
        rf"{registry}/x/tiny-staging:staged-\d{{8}}T\d{{6}}Z-{str(before.digest)[7:19]}", before.tags[0]
    )
    again = tiny.build(*push)
    assert re.search(rf"push of {TINY_TARGET} to .* → 0 blobs", again.out + again.err)
    assert tiny.result().digest == before.digest
    tags = connect_registry(registry).at("x/tiny-staging").tags()
    assert sorted([*before.tags, *tiny.result().tags]) == sorted(f"{registry}/x/tiny-staging:{tag}" for tag in tags)


@pytest.mark.parametrize("compression", ["gzip", "zstd", "estargz"])
def test_output_is_an_oci_layout(tiny: Tiny, compression: str) -> None:
    tiny.build(TINY_TARGET, "--output", tiny.root / "layouts", "--compression", compression)
    layout, result = tiny.root / "layouts" / TINY_TARGET, tiny.result()
    assert json.loads((layout / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}
    (entry,) = json.loads((layout / "index.json").read_text())["manifests"]
    assert entry["digest"] == result.digest
    assert list(result.manifests.values()) == [result.digest]
    blobs = {f"sha256:{path.name}": path.read_bytes() for path in (layout / "blobs/sha256").iterdir()}
    assert all(digest_of(content) == digest for digest, content in blobs.items())
    manifest = json.loads(blobs[entry["digest"]])
    assert all(len(blobs[part["digest"]]) == part["size"] for part in [manifest["config"], *manifest["layers"]])
    assert result.compression == compression
    kind = f"application/vnd.oci.image.layer.v1.tar+{compression.replace('estargz', 'gzip')}"
    assert {layer["mediaType"] for layer in manifest["layers"]} == {kind}  # including the layer of the base
    toc = (
        "containerd.io/snapshot/stargz/toc.digest"  # the table of a layer's files, by which stargz-snapshotter knows it
    )
    assert {toc in layer["annotations"] for layer in manifest["layers"]} == {compression == "estargz"}
    assert result.size_bytes == sum(layer["size"] for layer in manifest["layers"])
    labels = json.loads(blobs[manifest["config"]["digest"]])["config"]["Labels"]
    assert labels["imagebuild.target"] == TINY_TARGET
