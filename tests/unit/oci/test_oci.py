import gzip
import hashlib
import json
import os
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

from imagebuild.oci import (
    MANIFEST,
    Descriptor,
    ImageSettings,
    add_image,
    blob_path,
    has_image,
    images_in,
    platform_json,
    prune_blobs,
    write_index,
)

SETTINGS = ImageSettings("2025-08-09T00:00:00Z", ("PATH=/bin",), ("bash",), {"b": "2", "a": "1"}, "made by hand")


@pytest.fixture
def tar(tmp_path: Path) -> Path:
    path = tmp_path / "root.tar"
    with tarfile.open(path, "w") as archive:
        entry = tarfile.TarInfo("./etc/debian_version")
        entry.size = 5
        archive.addfile(entry, BytesIO(b"13.1\n"))
    return path


def _json(layout: Path, digest: str) -> dict[str, object]:
    document = json.loads(blob_path(layout, digest).read_bytes())
    assert isinstance(document, dict)
    return document


def _reachable(layout: Path, digest: str) -> list[Descriptor]:
    manifest = json.loads(blob_path(layout, digest).read_bytes())
    return [Descriptor.from_json(item) for item in (manifest["config"], *manifest["layers"])]


@pytest.mark.parametrize(
    ("platform", "expected"),
    [
        ("linux/amd64", {"os": "linux", "architecture": "amd64"}),
        ("linux/arm/v7", {"os": "linux", "architecture": "arm", "variant": "v7"}),
    ],
)
def test_a_platform_is_spelled_as_oci_does_and_read_back(platform: str, expected: dict[str, str]) -> None:
    assert platform_json(platform) == expected
    descriptor = Descriptor(MANIFEST, "sha256:00", 1, platform)
    assert Descriptor.from_json(descriptor.to_json()) == descriptor


def test_every_blob_is_named_by_what_it_holds(tmp_path: Path, tar: Path) -> None:
    layout = tmp_path / "layout"
    digest = write_index(layout, [add_image(layout, tar, "linux/amd64", SETTINGS)])
    blobs = list((layout / "blobs" / "sha256").iterdir())
    assert len(blobs) == 4  # layer, config, manifest, index
    assert all(blob.name == hashlib.sha256(blob.read_bytes()).hexdigest() for blob in blobs)
    assert blob_path(layout, digest) in blobs
    assert json.loads((layout / "oci-layout").read_bytes()) == {"imageLayoutVersion": "1.0.0"}


def test_the_layer_unpacks_to_the_tar(tmp_path: Path, tar: Path) -> None:
    manifest = add_image(tmp_path, tar, "linux/amd64", SETTINGS)
    config, layer = _reachable(tmp_path, manifest.digest)
    packed = blob_path(tmp_path, layer.digest).read_bytes()
    assert len(packed) == layer.size
    assert gzip.decompress(packed) == tar.read_bytes()
    diff_id = f"sha256:{hashlib.sha256(tar.read_bytes()).hexdigest()}"
    assert _json(tmp_path, config.digest) == {
        "created": SETTINGS.created, "os": "linux", "architecture": "amd64",
        "config": {"Env": ["PATH=/bin"], "Cmd": ["bash"], "Labels": {"a": "1", "b": "2"}},
        "rootfs": {"type": "layers", "diff_ids": [diff_id]},
        "history": [{"created": SETTINGS.created, "created_by": "made by hand"}],
    }  # fmt: skip


def test_the_digest_depends_on_content_alone(tmp_path: Path, tar: Path) -> None:
    other = tmp_path / "another name.tar"
    other.write_bytes(tar.read_bytes())
    os.utime(other, (0, 0))
    first = add_image(tmp_path / "a", tar, "linux/amd64", SETTINGS)
    assert add_image(tmp_path / "b", other, "linux/amd64", SETTINGS) == first


def test_the_order_of_platforms_does_not_matter(tmp_path: Path, tar: Path) -> None:
    made = [add_image(tmp_path, tar, name, SETTINGS) for name in ("linux/arm64", "linux/amd64")]
    assert write_index(tmp_path, made) == write_index(tmp_path, made[::-1])
    assert [image.descriptor for image in images_in(tmp_path, tmp_path)] == made[::-1]


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(b"")])
def test_a_missing_or_cut_off_blob_is_noticed(tmp_path: Path, tar: Path, part: int, damage: object) -> None:
    manifest = add_image(tmp_path, tar, "linux/amd64", SETTINGS)
    image = write_index(tmp_path, [manifest])
    assert has_image(tmp_path, image)
    assert callable(damage)
    damage(blob_path(tmp_path, _reachable(tmp_path, manifest.digest)[part].digest))
    assert not has_image(tmp_path, image)


def test_nothing_is_left_of_a_failed_write(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        add_image(tmp_path, tmp_path / "missing.tar", "linux/amd64", SETTINGS)
    assert list((tmp_path / "blobs" / "sha256").iterdir()) == []


def test_pruning_keeps_what_is_needed_and_what_is_young(tmp_path: Path, tar: Path) -> None:
    kept = add_image(tmp_path, tar, "linux/amd64", SETTINGS)
    dropped = add_image(tmp_path, tar, "linux/arm64", SETTINGS)
    write_index(tmp_path, [kept])
    young = tmp_path / "blobs" / "sha256" / "young"
    for blob in (tmp_path / "blobs" / "sha256").iterdir():
        os.utime(blob, (1000, 1000))
    young.write_bytes(b"")
    prune_blobs(tmp_path, [kept], older_than=2000)
    assert has_image(tmp_path, kept.digest)
    assert not blob_path(tmp_path, dropped.digest).exists()
    assert young.exists()
