"""No layer is read twice, and a cache that is damaged, foreign or old changes no result."""

from __future__ import annotations

import gzip
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from imagebuild.core.errors import ResultError
from imagebuild.oci.image import PlatformImage, image_in_registry, images_in
from imagebuild.oci.layout import Blob
from imagebuild.oci.reference import parse_reference
from imagebuild.verify import facts, layers
from imagebuild.verify.facts import FactCache
from imagebuild.verify.files import Layer
from imagebuild.verify.layers import read_layers, scan
from tests.registry_fake import FakeRegistry, put_image
from tests.unit.image_files import REAL, Files, Layout, Node, layer, symlink

LOWER: Files = {
    "usr/lib/libv.so.1": REAL["libv1.so"], "etc/passwd": b"root:\xff:0", "etc/key": b"-----BEGIN PRIVATE " + b"KEY-----\n" + b"aBcDeFgH" * 9,
    "bin": symlink("usr/bin"), "opt/x": Node(b"x", 0o4755, pax={"SCHILY.xattr.security.capability": "x"}),
}  # fmt: skip


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The diff ids of the layers that were read."""
    seen = list[str]()

    def count(blob: Blob) -> Layer:
        seen.append(str(blob.diff_id))
        return scan(blob)

    monkeypatch.setattr(layers, "scan", count)
    return seen


def pressed(data: bytes) -> bytes:
    return gzip.compress(data, 1, mtime=0)


def image(root: Path, *layers: Files, pack: Callable[[bytes], bytes] = pressed) -> PlatformImage:
    Layout(root).image([pack(layer(files)) for files in layers])
    return images_in(root, root)[0]


def folder_of_cache() -> Path:
    return FactCache.open().folder or pytest.fail("there is no cache")


def files_of_cache() -> list[Path]:
    return sorted(folder_of_cache().iterdir())


def test_only_the_layer_that_changed_is_read(tmp_path: Path, read: list[str]) -> None:
    first = image(tmp_path / "a", LOWER, {"opt/y": b"1"})
    found, number = read_layers(first)
    assert (number, len(read)) == (2, 2)
    assert read_layers(first) == (found, 0)
    # In another layout, with the layers in another order and a new one.
    second = image(tmp_path / "b", {"opt/y": b"1"}, {"opt/y": b"2"}, LOWER)
    again, number = read_layers(second)
    assert (number, read[2:]) == (1, [second.layers[1].diff_id])
    assert [[entry.layer for entry in one.entries] for one in again] == [[0], [1], [2] * len(LOWER)]
    assert again[2] == found[0].numbered(2)


def test_facts_are_those_that_were_read(tmp_path: Path) -> None:
    made = image(tmp_path / "a", LOWER, {b"caf\xe9".decode(errors="surrogateescape"): b"x"})
    fresh, number = read_layers(made)
    again, second = read_layers(made)
    assert again == fresh == tuple(scan(blob).numbered(i) for i, blob in enumerate(made.layers))
    # JSON cannot name the file of the second layer.
    assert (number, second) == (2, 1)


@pytest.mark.parametrize("pack", [pressed, bytes])
def test_a_layer_of_a_layout_that_was_damaged_later(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    made = image(tmp_path / "a", LOWER, pack=pack)
    read_layers(made)
    copy = image(tmp_path / "b", LOWER, pack=pack)
    for one in (made, copy):
        file = one.layers[0].file
        file.write_bytes(file.read_bytes()[:-1] + b"x")
        with pytest.raises(ResultError, match="is damaged"):
            read_layers(one)
        file.unlink()
        with pytest.raises(ResultError, match="is missing; build"):
            read_layers(one)


def test_a_stored_layer_with_the_diff_id_of_another_is_read(tmp_path: Path, read: list[str]) -> None:
    made, other = image(tmp_path / "a", LOWER), image(tmp_path / "b", {"opt/y": b"evil"})
    read_layers(made)
    forged = replace(other, layers=(replace(other.layers[0], diff_id=made.layers[0].diff_id),))
    with pytest.raises(ResultError, match="the digest after decompression is"):
        read_layers(forged)
    assert len(read) == 2


def test_known_layers_are_not_fetched_from_a_registry(tmp_path: Path) -> None:
    registry = FakeRegistry("registry.example")
    for name, content in (("1", [LOWER]), ("2", [LOWER, {"opt/y": b"2"}])):
        digest = put_image(registry, "app", *content).digest
        found = image_in_registry("app", parse_reference(f"registry.example/app@{digest}"), registry, tmp_path / name)
        assert read_layers(found.image(None))[1] == 1
        assert sum(path.is_file() for path in (tmp_path / name).rglob("*")) == 1


def link(path: Path) -> None:
    path.rename(path.with_name("x"))
    path.symlink_to("x")


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "changed": lambda path: path.write_bytes(path.read_bytes()[:40] + b"xx" + path.read_bytes()[42:]),
    "empty": lambda path: path.write_bytes(b""), "json": lambda path: path.write_bytes(b'{"diff_id": 1}'),
    "gone": Path.unlink, "link": link, "folder": folder,
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("start", ["facts-", "stored-"])
def test_a_damaged_file_of_the_cache(tmp_path: Path, read: list[str], kind: str, start: str) -> None:
    made = image(tmp_path / "a", LOWER)
    found, _ = read_layers(made)
    (file,) = (path for path in files_of_cache() if path.name.startswith(start))
    DAMAGE[kind](file)
    assert read_layers(made) == (found, 1)
    assert len(read) == 2


def test_a_folder_that_others_can_write_to_is_not_used(
    tmp_path: Path, read: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = image(tmp_path / "a", LOWER)
    read_layers(made)
    folder = folder_of_cache()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o770)
    assert read_layers(made)[1] == 1
    assert f"{folder}: is not used, because other users can change" in capsys.readouterr().err.replace("\n", " ")
    folder.chmod(0o700)
    folder.rename(folder.with_name("real"))
    folder.symlink_to("real")
    assert read_layers(made)[1] == 1
    folder.unlink()
    folder.with_name("real").rename(folder)
    # Files and folders of another user.
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert read_layers(made)[1] == 1
    monkeypatch.setattr(facts, "cache_folder", lambda _: Path("/proc/none"))
    assert read_layers(made)[1] == 1
    assert len(read) == 5


def test_other_code_reads_again(tmp_path: Path, read: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made = image(tmp_path / "a", LOWER)
    read_layers(made)
    monkeypatch.setattr(facts, "hash_of_readers", lambda: "0" * 64)
    assert read_layers(made)[1] == 1
    assert len(files_of_cache()) == 4


def test_old_and_excess_files_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_layers(image(tmp_path / "a", LOWER))
    for path in files_of_cache():
        os.utime(path, (0, time.time() - 31 * 86400))
    read_layers(image(tmp_path / "b", {"opt/y": b"2"}))
    new = files_of_cache()
    assert len(new) == 2
    monkeypatch.setattr(facts, "MOST_BYTES", sum(path.stat().st_size for path in new) + 1)
    for path in new:
        os.utime(path, (0, time.time() - 60))
    read_layers(image(tmp_path / "c", {"opt/z": b"3"}))
    kept = set(files_of_cache())
    assert len(kept & set(new)) < 2 <= len(kept - set(new))
