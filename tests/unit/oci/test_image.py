"""Images in layouts, archives, streams and registries. Damaged images are errors."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zstandard

from imagebuild.core.errors import CommandError, ConfigError, ResultError
from imagebuild.oci.image import PlatformImage, image_in_registry, images_in, images_stored
from imagebuild.oci.layout import Descriptor
from imagebuild.oci.reference import parse_reference
from imagebuild.project.plan import Plan
from imagebuild.render.renderer import Renderer
from imagebuild.verify.layers import scan_all
from imagebuild.verify.rules import judge_images, read_images
from imagebuild.verify.subject import ImageFinder
from tests.conftest import data
from tests.handmade import handmade
from tests.registry_fake import FakeRegistry, put_image
from tests.unit import image_files
from tests.unit.image_files import Layout, layer, saved

CASES = data("cases/oci/image")

FILES = {"etc/hostname": b"tiny\n"}
INDEX = "application/vnd.oci.image.index.v1+json"


def paths(image: PlatformImage) -> list[str]:
    return [entry.path for found in scan_all(image.layers, 1) for entry in found.entries]


def read(source: Any, folder: Path) -> list[list[str]]:
    folder.mkdir(exist_ok=True)
    return [paths(image) for image in images_in(source, folder)]


@pytest.mark.parametrize(
    "pack",
    [bytes, gzip.compress, zstandard.compress, lambda data: gzip.compress(data[:700]) + gzip.compress(data[700:])],
    ids=["plain", "gzip", "zstd", "gzip-members"],
)
def test_layers_of_every_compression(tmp_path: Path, pack: Any) -> None:
    Layout(tmp_path / "x").image([pack(layer(FILES))])
    (image,) = images_in(tmp_path / "x", tmp_path)
    (found,) = scan_all(image.layers, 1)
    assert [entry.path for entry in found.entries] == ["etc/hostname"]
    assert bool(found.compression) == (pack is not bytes)


def test_folder_tar_compressed_tar_and_stream_are_the_same(tmp_path: Path) -> None:
    made = Layout(tmp_path / "x")
    made.image([gzip.compress(layer(FILES))])
    (tmp_path / "x.tar").write_bytes(saved(made.root))
    (tmp_path / "x.tar.gz").write_bytes(gzip.compress(saved(made.root)))
    (tmp_path / "x.tar.zst").write_bytes(zstandard.compress(saved(made.root)))
    stream = [saved(made.root)[i : i + 777] for i in range(0, len(saved(made.root)), 777)]
    for source in (*(tmp_path / name for name in ("x", "x.tar", "x.tar.gz", "x.tar.zst")), [b"", *stream]):
        assert read(source, tmp_path / "spool") == [["etc/hostname"]]
    # Nothing else than what is of images is unpacked.
    (tmp_path / "evil.tar").write_bytes(saved(made.root, {"../evil": b"x", "blobs/sha256/../../evil": b"x"}))
    assert read(tmp_path / "evil.tar", tmp_path / "other") == [["etc/hostname"]]
    assert not list(tmp_path.rglob("evil"))


def test_several_platforms(renderer: Renderer, full_plan: Plan, tmp_path: Path) -> None:
    made = Layout(tmp_path / "x")
    made.image([layer({"a": b""})])
    made.image([layer({"b": b""})], platform="linux/arm64")
    attestation = made.image([layer({"no": b""})], platform="unknown/unknown")
    assert attestation["platform"]["os"] == "unknown"
    absent = {"mediaType": image_files.MANIFEST, "digest": f"sha256:{'0' * 64}", "size": 1}
    nested = made.json({"manifests": [*made.manifests, absent]}, INDEX)
    made.manifests = [nested]
    made.write()
    assert read(made.root, tmp_path) == [["a"], ["b"]]
    with ImageFinder().find(str(made.root)) as found:
        names = {result.check for result in judge_images(read_images(found, renderer.project, full_plan))}
    assert {"readable linux/amd64", "readable linux/arm64"} <= names


def test_images_in_the_folder_of_an_engine_are_read_in_place_if_they_are_complete(tmp_path: Path) -> None:
    made = Layout(tmp_path / "engine")
    whole = made.image([layer({"a": b"1"})])
    other = made.image([layer({"b": b"1"})], platform="linux/arm64")
    index = made.json({"manifests": [whole, other, {**whole, "digest": f"sha256:{'0' * 64}"}]}, INDEX)["digest"]
    (tmp_path / "engine/index.json").unlink(missing_ok=True)
    folder = tmp_path / "engine"
    assert [image.platform for image in images_stored(folder, index)] == ["linux/amd64", "linux/arm64"]
    (image,) = images_stored(folder, whole["digest"])
    image.layers[0].file.unlink()  # an engine removes the layers of an image that it no longer has
    assert [image.platform for image in images_stored(folder, index)] == ["linux/arm64"]
    assert images_stored(folder, whole["digest"]) == ()
    assert images_stored(folder, f"sha256:{'1' * 64}") == images_stored(tmp_path / "absent", index) == ()


def test_the_first_manifest_of_a_platform_is_chosen_as_engines_do(tmp_path: Path) -> None:
    """Engines ignore annotations, and treat the usual variant as none. An entry without platform comes last."""
    made = Layout(tmp_path / "x")
    first, second = (made.image([layer({name: b""})]) for name in ("first", "second"))
    arm, unnamed = made.image([layer({"arm": b""})], platform="linux/arm64"), dict(made.image([layer({"no": b""})]))
    del unnamed["platform"]
    annotated = first | {"annotations": {"vnd.docker.reference.type": "attestation-manifest"}}
    usual = arm | {"platform": arm["platform"] | {"variant": "v8"}}
    made.manifests = [made.json({"manifests": [unnamed, annotated, second, usual, arm]}, INDEX)]
    made.write()
    assert read(made.root, tmp_path) == [["first"], ["arm"]]


@pytest.mark.parametrize("platform", CASES["no-other-name-of-a-platform-hides-the-image-that-engines-choose"])
def test_no_other_name_of_a_platform_hides_the_image_that_engines_choose(
    platform: dict[str, str], tmp_path: Path
) -> None:
    made = Layout(tmp_path / "x")
    first, second = (made.image([layer({name: b""})]) for name in ("first", "second"))
    made.manifests = [made.json({"manifests": [first | {"platform": platform}, second]}, INDEX)]
    made.write()
    assert read(made.root, tmp_path) == [["first"]]


def test_an_index_that_engines_read_differently_is_refused(tmp_path: Path) -> None:
    """New versions of containerd skip an entry with features that they do not know; others ignore the features."""
    made = Layout(tmp_path / "x")
    first, second = (made.image([layer({name: b""})]) for name in ("first", "second"))
    featured = first | {"platform": first["platform"] | {"os.features": ["new"]}}
    made.manifests = [made.json({"manifests": [featured, second]}, INDEX)]
    made.write()
    with pytest.raises(ResultError, match=r"os\.features: engines do not agree"):
        read(made.root, tmp_path)
    featured["platform"]["os"] = "windows"
    assert Descriptor.from_json(featured).platform == "windows/amd64"


@pytest.mark.parametrize(("change", "reason"), CASES["images-that-engines-refuse"])
def test_images_that_engines_refuse(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    made = Layout(tmp_path / "x")
    made.image([layer(FILES)], change)
    with pytest.raises(ResultError, match=reason):
        read(made.root, tmp_path)


def test_bombs_and_files_without_end_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("imagebuild.core.files.FIFO_S", 0.2)
    sparse = {"GNU.sparse.size": 1 << 50, "GNU.sparse.numblocks": 0, "GNU.sparse.major": 0, "GNU.sparse.minor": 1}
    for number, members in enumerate([[{"n": "a", "x": sparse}], [{"n": "a", "x": {"comment": "x" * (2 << 20)}}]]):
        made = Layout(tmp_path / str(number))
        made.image([gzip.compress(handmade(members))])
        with pytest.raises(ResultError, match=r"larger than (4 GiB|1 MiB)"):
            read(made.root, tmp_path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match="not a regular file"):
        images_in(tmp_path / "fifo", tmp_path)


def test_what_is_no_image_or_several(tmp_path: Path) -> None:
    made = Layout(tmp_path / "x")
    made.manifests.append(dict(made.image([layer(FILES)])))
    made.write()
    assert len(images_in(made.root, tmp_path)) == 1  # under two names
    made.image([layer({"other": b""})])
    with pytest.raises(ConfigError, match="several images for linux/amd64"):
        images_in(made.root, tmp_path)
    (tmp_path / "text").write_text("hello")
    (tmp_path / "other.tar").write_bytes(layer(FILES))
    (tmp_path / "empty").mkdir()
    for name in ("text", "other.tar", "empty"):
        with pytest.raises(ConfigError, match="neither an OCI image layout nor an archive"):
            images_in(tmp_path / name, tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        images_in(tmp_path / "absent", tmp_path)


def damaged(made: Layout, name: str, data: bytes) -> None:
    (made.root / "blobs" / "sha256" / name.removeprefix("sha256:")).write_bytes(data)


def test_a_layer_with_other_content_is_an_error(tmp_path: Path) -> None:
    made = Layout(tmp_path / "x")
    other = gzip.compress(layer({"etc/hostname": b"evil\n"}))
    image = made.image([gzip.compress(layer(FILES))])
    manifest = json.loads((made.root / "blobs/sha256" / image["digest"][7:]).read_bytes())
    damaged(made, manifest["layers"][0]["digest"], other)
    with pytest.raises(ResultError, match="is damaged; its digest is sha256:"):
        read(made.root, tmp_path)
    damaged(made, manifest["config"]["digest"], b"{}")
    with pytest.raises(ResultError, match="is damaged"):
        images_in(made.root, tmp_path)
    (made.root / "blobs/sha256" / manifest["config"]["digest"][7:]).unlink()
    with pytest.raises(ResultError, match="cannot be read: No such file"):
        images_in(made.root, tmp_path)


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"manifests": [{}]}', '{"manifests": []}', '{"manifests": 3}'])
def test_an_index_that_makes_no_sense(tmp_path: Path, index: str) -> None:
    made = Layout(tmp_path / "x")
    (made.root / "index.json").write_text(index)
    with pytest.raises(ResultError):
        images_in(made.root, tmp_path)


def test_a_path_that_leads_out_of_the_image(tmp_path: Path) -> None:
    made = Layout(tmp_path / "x")
    made.image([layer({"../../etc/passwd": b"x"})])
    with pytest.raises(ResultError, match="leads out"):
        read(made.root, tmp_path)


@pytest.fixture
def registry() -> FakeRegistry:
    return FakeRegistry()


def in_registry(registry: FakeRegistry, digest: str, folder: Path) -> PlatformImage:
    name = f"registry.test/gpu/open@{digest}"
    return image_in_registry(name, parse_reference(name), registry, folder / "layers").image(None)


def test_layers_are_fetched_only_if_asked_for(registry: FakeRegistry, tmp_path: Path) -> None:
    about = put_image(registry, "gpu/open", {"x": b"1"}, FILES, {"y": b"1"})

    def fetched() -> int:
        return registry.asked_for("GET", "/blobs/") - 1  # the configuration, which a layout asks for again

    image = in_registry(registry, about.digest, tmp_path)
    assert fetched() == 0
    image.fetch(image.layers[1])
    assert fetched() == 1
    copied = image.as_layout(tmp_path / "layout")
    assert fetched() == 4
    (same,) = images_in(copied.folder, tmp_path)
    assert same.digest == about.digest
    assert [len(blob.read()) for blob in same.layers]


def test_a_layer_that_does_not_fit_or_was_damaged_on_its_way_is_not_used(
    registry: FakeRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = put_image(registry, "gpu/open", FILES)
    image = in_registry(registry, about.digest, tmp_path)
    registry.repositories["gpu/open"].blobs[str(image.layers[0].digest)] = b"something else"
    with pytest.raises(CommandError, match="the registry sent wrong content for blob"):
        image.fetch(image.layers[0])
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(ResultError, match=r"0.0 GB do not fit in .*; set TMPDIR to a folder with more space"):
        image.fetch(image.layers[0])
