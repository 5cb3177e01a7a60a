"""Written layouts depend only on their content, and missing blobs are detected."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from imagebuild.core.errors import CommandError, ResultError
from imagebuild.oci.image import images_in
from imagebuild.oci.layout import MANIFEST, Blob, Descriptor, Layout, layer_members
from imagebuild.oci.registry import copy_image
from tests.unit.image_files import layer

ARM64 = {"created": "2025-08-09T00:00:00Z", "os": "linux", "architecture": "arm64", "config": {"Env": ["PATH=/bin"]}}
AMD64 = ARM64 | {"architecture": "amd64"}


@pytest.fixture
def tar(tmp_path: Path) -> Path:
    path = tmp_path / "root.tar"
    path.write_bytes(layer({"./etc/debian_version": b"13.1\n"}))
    return path


def test_an_image_depends_on_content_alone(tmp_path: Path, tar: Path) -> None:
    layout = Layout(tmp_path / "layout")
    made = layout.add_image(tar, AMD64)
    digest = layout.write_index([made])
    blobs = list((layout.folder / "blobs" / "sha256").iterdir())
    assert len(blobs) == 4  # layer, config, manifest, index
    assert all(blob.name == hashlib.sha256(blob.read_bytes()).hexdigest() for blob in blobs)
    assert layout.path(digest) in blobs
    (image,) = images_in(layout.folder, tmp_path)
    assert gzip.decompress(image.layers[0].read()) == tar.read_bytes()
    root = {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(tar.read_bytes()).hexdigest()}"]}
    assert image.config == {**AMD64, "rootfs": root}

    other = tmp_path / "another name.tar"
    other.write_bytes(tar.read_bytes())
    os.utime(other, (0, 0))
    assert Layout(tmp_path / "b").add_image(other, AMD64) == made
    both = [layout.add_image(tar, ARM64), made]
    assert layout.write_index(both) == layout.write_index(both[::-1])
    assert [image.descriptor for image in images_in(layout.folder, tmp_path)] == both[::-1]


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(b"")])
def test_a_missing_or_cut_off_blob_is_noticed(
    tmp_path: Path, tar: Path, part: int, damage: Callable[[Path], object]
) -> None:
    layout, copied = Layout(tmp_path / "a"), Layout(tmp_path / "b")
    manifest = layout.add_image(tar, AMD64)
    image = layout.write_index([manifest])
    copied.start()
    assert copy_image(image, layout, copied)["manifests"] == 2
    assert layout.has(image)
    assert copied.has(image)
    document = json.loads(layout.path(manifest.digest).read_bytes())
    damage(layout.path([document["config"], *document["layers"]][part]["digest"]))
    assert not layout.has(image)
    layout.path(manifest.digest).write_bytes(b"{}")
    assert not layout.has(image)


def test_a_digest_does_not_lead_out_of_a_layout(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match=r"'sha256:\.\./\.\./x' is not a digest"):
        Layout(tmp_path).take(Descriptor(MANIFEST, "sha256:../../x", 1), Layout(tmp_path))


def test_a_blob_that_cannot_be_read_is_no_fault_of_the_connection(tmp_path: Path, tar: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Layout(tmp_path).add_image(tmp_path / "missing.tar", AMD64)
    assert list((tmp_path / "blobs" / "sha256").iterdir()) == []  # nothing is left of it
    layout = Layout(tmp_path)
    digest = layout.add_image(tar, AMD64).digest
    stream = layout.content(Descriptor(MANIFEST, digest, layout.path(digest).stat().st_size))
    layout.path(digest).unlink()
    with pytest.raises(CommandError, match="No such file"):
        list(stream)


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress], ids=["gzip", "zstd"])
def test_a_megabyte_of_zeros_does_not_come_at_once(tmp_path: Path, pack: Any) -> None:
    (tmp_path / "layer").write_bytes(data := pack(layer({"zeros": bytes(100 << 20)})))
    tracemalloc.start()
    with layer_members(Blob(tmp_path / "layer", len(data))) as members:
        assert [path for _, _, path in members] == ["zeros"]
    assert tracemalloc.get_traced_memory()[1] < 30 << 20
    tracemalloc.stop()
