"""Layouts that are written: what is in them depends on content alone, and what is missing is noticed."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from imagebuild.core import CommandError
from imagebuild.oci import MANIFEST, Descriptor, ImageSettings, Layout, copy_image, images_in
from tests.unit.image_files import layer

SETTINGS = ImageSettings("2025-08-09T00:00:00Z", ("PATH=/bin",), ("bash",), {"b": "2", "a": "1"}, "made by hand")


@pytest.fixture
def tar(tmp_path: Path) -> Path:
    path = tmp_path / "root.tar"
    path.write_bytes(layer({"./etc/debian_version": b"13.1\n"}))
    return path


@pytest.mark.parametrize(
    ("platform", "expected"),
    [
        ("linux/amd64", {"os": "linux", "architecture": "amd64"}),
        ("linux/arm/v7", {"os": "linux", "architecture": "arm", "variant": "v7"}),
    ],
)
def test_a_platform_is_spelled_as_oci_does_and_read_back(platform: str, expected: dict[str, str]) -> None:
    descriptor = Descriptor(MANIFEST, "sha256:00", 1, platform)
    assert descriptor.to_json()["platform"] == expected
    assert Descriptor.from_json(descriptor.to_json()) == descriptor


def test_what_an_image_consists_of(tmp_path: Path, tar: Path) -> None:
    layout = Layout(tmp_path / "layout")
    digest = layout.write_index([layout.add_image(tar, "linux/amd64", SETTINGS)])
    blobs = list((layout.folder / "blobs" / "sha256").iterdir())
    assert len(blobs) == 4  # layer, config, manifest, index
    assert all(blob.name == hashlib.sha256(blob.read_bytes()).hexdigest() for blob in blobs)
    assert layout.path(digest) in blobs
    assert json.loads((layout.folder / "oci-layout").read_bytes()) == {"imageLayoutVersion": "1.0.0"}
    (image,) = images_in(layout.folder, tmp_path)
    assert gzip.decompress(image.layers[0].read()) == tar.read_bytes()
    assert image.config == {
        "created": SETTINGS.created, "os": "linux", "architecture": "amd64",
        "config": {"Env": ["PATH=/bin"], "Cmd": ["bash"], "Labels": {"a": "1", "b": "2"}},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(tar.read_bytes()).hexdigest()}"]},
        "history": [{"created": SETTINGS.created, "created_by": "made by hand"}],
    }  # fmt: skip


def test_digests_depend_on_content_alone(tmp_path: Path, tar: Path) -> None:
    other = tmp_path / "another name.tar"
    other.write_bytes(tar.read_bytes())
    os.utime(other, (0, 0))
    layout = Layout(tmp_path / "a")
    made = [layout.add_image(tar, name, SETTINGS) for name in ("linux/arm64", "linux/amd64")]
    assert Layout(tmp_path / "b").add_image(other, "linux/arm64", SETTINGS) == made[0]
    assert layout.write_index(made) == layout.write_index(made[::-1])
    assert [image.descriptor for image in images_in(layout.folder, tmp_path)] == made[::-1]


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(b"")])
def test_a_missing_or_cut_off_blob_is_noticed(
    tmp_path: Path, tar: Path, part: int, damage: Callable[[Path], object]
) -> None:
    layout, copied = Layout(tmp_path / "a"), Layout(tmp_path / "b")
    manifest = layout.add_image(tar, "linux/amd64", SETTINGS)
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


def test_nothing_is_left_of_a_failed_write(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Layout(tmp_path).add_image(tmp_path / "missing.tar", "linux/amd64", SETTINGS)
    assert list((tmp_path / "blobs" / "sha256").iterdir()) == []


def test_a_blob_that_cannot_be_read_is_no_fault_of_the_connection(tmp_path: Path, tar: Path) -> None:
    layout = Layout(tmp_path)
    digest = layout.add_image(tar, "linux/amd64", SETTINGS).digest
    stream = layout.content(Descriptor(MANIFEST, digest, layout.path(digest).stat().st_size))
    layout.path(digest).unlink()
    with pytest.raises(CommandError, match="No such file"):
        list(stream)
