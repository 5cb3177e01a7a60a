"""A few files of an image: from the topmost layer down, and as a container sees them."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from imagebuild.core import (
    Package,
    ResultError,
    installed_packages,
    package_versions,
)
from imagebuild.oci import DPKG, LayerPart, WantedFiles, dpkg_status, images_in
from imagebuild.verify import Tree, scan
from tests.unit import image_files as make
from tests.unit.image_files import Files, folder, hardlink, symlink
from tests.unit.publish import vulnerability_samples as samples

STATUS = "var/lib/dpkg/status"


def parts(root: Path, wanted: WantedFiles, *layers: Files) -> tuple[dict[str, bytes], int]:
    """What is found, and how many layers were read for it."""
    (image,) = images_in(make.layout(root, *layers), root)
    read: dict[str, LayerPart] = {}
    return image.files(wanted, read), len(read)


@pytest.mark.parametrize(
    ("layers", "found", "read"),
    [
        ([{STATUS: b"a"}], b"a", 1),
        ([{STATUS: b"a"}, {STATUS: b"b"}], b"b", 1),
        ([{STATUS: b"a"}, {"etc/x": b"b"}], b"a", 2),
        ([{STATUS: b"a"}, {"var/lib/dpkg/.wh.status": b""}, {"etc/x": b"b"}], None, 2),
        ([{STATUS: b"a"}, {"var/lib/.wh.dpkg": b""}], None, 1),
        ([{STATUS: b"a"}, {"var/lib/dpkg/.wh..wh..opq": b""}], None, 1),
        ([{STATUS: b"a"}, {".wh..wh..opq": b""}], None, 1),
        ([{STATUS: b"a"}, {"var/lib/dpkg/.wh..wh..opq": b"", STATUS: b"b"}], b"b", 1),
        ([{STATUS: b"a"}, {STATUS: symlink("elsewhere")}], None, 1),
        ([{STATUS: b"a"}, {"var/lib/dpkg": folder(), "var/lib/dpkg/.wh.status-old": b""}], b"a", 2),
        ([{}], None, 1),
    ],
)
def test_the_topmost_counts(tmp_path: Path, layers: list[Files], found: bytes | None, read: int) -> None:
    files, number = parts(tmp_path, DPKG, *layers)
    assert files.get(STATUS) == found
    assert number == read
    # What is read from all layers together says the same.
    (image,) = images_in(tmp_path, tmp_path)
    entry = Tree(scan(blob, i) for i, blob in enumerate(image.layers)).find(STATUS)
    assert (entry.text if entry and entry.kind == "file" else None) == found


def test_hard_links_are_not_followed(tmp_path: Path) -> None:
    """As in a layer, they lead to another member, which is not what is looked for."""
    files, _ = parts(tmp_path, DPKG, {"x": b"a", STATUS: hardlink("x")})
    assert files == {}


def test_packages_of_images_without_dpkg(tmp_path: Path) -> None:
    base = {
        "var/lib/dpkg/status.d/base": b"Package: base-files\nVersion: 13\nArchitecture: all\n",
        "var/lib/dpkg/status.d/libc6": b"Package: libc6\nVersion: 2.41\nArchitecture: amd64\n\n",
        "var/lib/dpkg/status.d/libc6.md5sums": b"1234  x\n",
    }
    above = {"var/lib/dpkg/status.d/.wh.base": b"", "var/lib/dpkg/status.d/new": b"Package: new\nVersion: 1\n"}
    files, _ = parts(
        tmp_path, WantedFiles((*DPKG.paths, "usr/lib/os-release", "etc/os-release"), DPKG.folders), base, above
    )
    assert package_versions(installed_packages(dpkg_status(files) or ""), "amd64") == {"libc6": "2.41", "new": "1"}
    assert dpkg_status({}) is None


def test_a_damaged_layer_is_no_empty_one(tmp_path: Path) -> None:
    make.layout(tmp_path, {STATUS: b"a"})
    (image,) = images_in(tmp_path, tmp_path)
    (blob,) = image.layers
    blob.file.write_bytes(gzip.compress(make.layer({"other": b""})))
    (image,) = images_in(tmp_path, tmp_path)
    with pytest.raises(ResultError, match="is damaged"):
        DPKG.part(image.layers[0])


def test_installed_packages() -> None:
    found = installed_packages(samples.STATUS)
    assert found == (
        Package("libssl3t64", "3.5.7-1~deb13u3", "amd64", "openssl"),
        Package("libc6", "2.41-12", "amd64", "glibc"),
        Package("libfoo", "1.0", "i386"),
    )
    assert package_versions(found, "amd64") == {
        "libssl3t64": "3.5.7-1~deb13u3",
        "libc6": "2.41-12",
        "libfoo:i386": "1.0",
    }
