"""`imagebuild diff`: what differs, how it is shown, and what is said not to be compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from imagebuild.core import ConfigError
from imagebuild.oci import Blob, Descriptor, Layout, Manifest, PlatformImage, Registry, image, images_in
from imagebuild.publish import (
    Comparison,
    compare_images,
    dpkg_status,
    instructions_of,
    print_comparison,
    settings_of,
    summarise,
)
from imagebuild.verify import ImageFinder, Layer
from tests import attached
from tests.registry_fake import FakeRegistry, put_image
from tests.unit import image_files as make
from tests.unit.conftest import Call


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "image_in_engine", lambda *_: None)


def compared(
    a: str | Path, b: str | Path, platform: str | None = None, *, finder: ImageFinder | None = None
) -> Comparison:
    return compare_images((str(a), str(b)), finder or ImageFinder(), platform)


def changes(made: Comparison, title: str) -> list[tuple[str, str | None, str | None]]:
    (section,) = [section for section in made.sections if section.title == title]
    return [(c.name, c.a, c.b) for c in section.changes]


def status(**versions: str) -> dict[str, bytes]:
    paragraphs = (
        f"Package: {n}\nStatus: install ok installed\nArchitecture: amd64\nVersion: {v}\n" for n, v in versions.items()
    )
    return {"var/lib/dpkg/status": "\n".join(paragraphs).encode()}


@pytest.fixture
def layouts(tmp_path: Path) -> tuple[str, str]:
    """Two images that differ in much, and share a layer."""
    labels = {"imagebuild.component.nccl": "1", "l": "1", "org.opencontainers.image.licenses": "x" * 150 + " AND a"}
    make.layout(tmp_path / "a", {"x": b"1"}, status(libc6="1", gone="1", same="1"), Env=["A=1"], Labels=labels)
    labels |= {"imagebuild.component.nccl": "2", "org.opencontainers.image.licenses": "x" * 150 + " AND b"}
    packages = status(libc6="2", new="<1> | 2", same="1")
    make.layout(tmp_path / "b", {"x": b"1"}, packages, Env=["A=2"], Labels=labels, User="me")
    return f"oci:{tmp_path}/a", f"oci:{tmp_path}/b"


def test_two_layouts(layouts: tuple[str, str]) -> None:
    a, b = layouts
    made = compared(a, b)
    assert changes(made, "components") == [("nccl", "1", "2")]
    assert changes(made, "packages") == [("gone", "1", None), ("libc6", "1", "2"), ("new", None, "<1> | 2")]
    assert changes(made, "environment") == [("A", "1", "2")]
    assert changes(made, "settings") == [("User", None, "me")]
    assert [name for name, _, _ in changes(made, "labels")] == ["org.opencontainers.image.licenses"]
    assert changes(made, "platforms") == []
    assert [(a is None, b is None) for _, a, b in changes(made, "layers")] == [(True, False), (False, True)]
    assert made.sizes.a > made.sizes.shared > 0
    assert {section.title: section.same for section in made.sections}["packages"] == 1
    assert made.a.digest
    assert made.not_compared == ()
    same = compared(a, a)
    assert not same.differs
    assert summarise(same).startswith("nothing that was compared differs; 0.0 MB becomes 0.0 MB, 0.0 MB shared")


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    """Packages of an image without dpkg, and sizes of layers that an engine saved unpacked."""
    make.layout(tmp_path / "a", {})
    make.Layout(tmp_path / "b").image([make.layer(status(libc6="1"))])
    made = compared(f"oci:{tmp_path}/a", f"oci:{tmp_path}/b")
    assert f"packages: oci:{tmp_path}/a has no packages of dpkg" in made.not_compared
    assert "b are not compressed, so a registry has other sizes and digests" in made.notes[0]


DPKG = "var/lib/dpkg/status"


@pytest.mark.parametrize(
    ("layers", "found", "read"),
    [
        ([{DPKG: b"a"}], "a", 1),
        ([{DPKG: b"a"}, {DPKG: b"b"}], "b", 1),
        ([{DPKG: b"a"}, {"etc/x": b"b"}], "a", 2),
        ([{DPKG: b"a"}, {"var/lib/dpkg/.wh.status": b""}, {"etc/x": b"b"}], "", 3),
        ([{DPKG: b"a"}, {"var/lib/dpkg/.wh..wh..opq": b""}], "", 2),
        ([{DPKG: b"a"}, {"var/lib/dpkg/.wh..wh..opq": b"", DPKG: b"b"}], "b", 1),
        ([{DPKG: b"a"}, {DPKG: make.symlink("elsewhere")}], "", 1),
        ([{DPKG: b"a"}, {"var/lib/dpkg": make.folder(), "var/lib/dpkg/.wh.status-old": b""}], "a", 2),
        (
            [{f"{DPKG}.d/base": b"old", f"{DPKG}.d/c": b"C", f"{DPKG}.d/c.md5sums": b"0"},
             {f"{DPKG}.d/.wh.base": b"", f"{DPKG}.d/new": b"N"}],
            "C\n\nN", 2,
        ),
        ([{}], "", 1),
    ],
)  # fmt: skip
def test_packages_are_read_from_the_topmost_layer_down(
    tmp_path: Path, layers: list[make.Files], found: str, read: int
) -> None:
    (image,) = images_in(make.layout(tmp_path, *layers), tmp_path)
    known: dict[str, Layer] = {}
    assert (dpkg_status(image, known), len(known)) == (found, read)
    assert dpkg_status(image, known) == found


def test_settings() -> None:
    config: dict[str, Any] = {
        "User": "", "Env": ["PATH=/a:/b", "X=1=2"], "Labels": {"a": "b"}, "Entrypoint": ["sh", "-c"],
        "ExposedPorts": {"22/tcp": {}, "80/tcp": {}}, "WorkingDir": "/x", "Cmd": None, "Healthcheck": {"Test": ["NONE"]},
    }  # fmt: skip
    assert settings_of(config) == {
        "Entrypoint": "sh -c", "ExposedPorts": "22/tcp 80/tcp", "WorkingDir": "/x", "Healthcheck": "{'Test': ['NONE']}",
    }  # fmt: skip


def test_layers_have_the_instructions_that_made_them() -> None:
    history = [
        {"created_by": "ADD  x"},
        {"created_by": "ENV a=b", "empty_layer": True},
        {"created_by": "RUN # buildkit"},
    ]
    layers = tuple(Blob(Path(), 1, f"sha256:{letter}") for letter in "ab")
    image = PlatformImage("linux/amd64", Manifest(b"{}", ""), {"history": history}, layers, Layout(Path()))
    assert instructions_of(image) == {"sha256:a": "ADD x", "sha256:b": "RUN"}
    # What does not fit says nothing.
    assert instructions_of(replace(image, layers=layers[:1])) == {}


def test_platforms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    amd64, arm64 = "linux/amd64", "linux/arm64"
    for name, platforms in (("a", (amd64, arm64)), ("b", (amd64, arm64)), ("c", (amd64,)), ("d", (arm64,))):
        several = make.Layout(tmp_path / name)
        for platform in platforms:
            several.image([make.layer({})], platform=platform)
    a, b, c, d = (f"oci:{tmp_path}/{name}" for name in "abcd")
    made = compared(a, b)
    assert made.a.platform == made.b.platform == arm64
    assert "linux/amd64: compare it with --platform linux/amd64" in made.not_compared
    made = compared(a, c)
    assert made.a.platform == made.b.platform == amd64
    assert changes(made, "platforms") == [(arm64, "yes", None)]
    assert "no platform is in both: linux/amd64 is compared with linux/arm64" in compared(c, d).not_compared
    with pytest.raises(ConfigError, match="is not for linux/arm64"):
        compared(a, c, arm64)


REPOSITORY = "gpu/open"


def names(*images: Descriptor) -> list[str]:
    return [f"registry.test/{REPOSITORY}@{image.digest}" for image in images]


def places(registry: FakeRegistry) -> ImageFinder:
    def connect(_: str) -> Registry:
        return registry

    return ImageFinder(connect=connect)


def test_a_registry_with_sboms_is_asked_for_no_layer() -> None:
    registry = FakeRegistry()
    a, b = put_image(registry, "gpu/open", {"x": b"1"}), put_image(registry, "gpu/open", {"x": b"2"})
    for number, child in enumerate((a, b), 1):
        attached.attach(registry, REPOSITORY, child, "sbom", attached.spdx(libc6=str(number)))
    made = compared(*names(a, b), finder=places(registry))
    assert registry.asked_for("GET", "/blobs/") == 2 * 2  # configuration and SBOM; no layer
    assert changes(made, "packages") == [("libc6", "1", "2")]
    assert "those of its SBOM; no layer was fetched" in made.notes[0]


def test_a_registry_without_sboms() -> None:
    registry = FakeRegistry()
    a, b = (
        put_image(registry, "gpu/open", {"x": b"1"}, status(libc6="1")),
        put_image(registry, "gpu/open", {"x": b"1"}, status(libc6="2")),
    )
    attached.attach(registry, REPOSITORY, a, "sbom", b"no JSON")
    made = compared(*names(a, b), finder=places(registry))
    assert changes(made, "packages") == [("libc6", "1", "2")]
    assert "has no SBOM with packages, so 0.0 MB of its layers were fetched" in made.notes[0]


# Showing


def test_the_table(layouts: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    made = compared(*layouts).model_copy(update={"notes": ("a note",), "not_compared": ("something",)})
    print_comparison(made)
    message = capsys.readouterr().out
    for part in ("nccl", "…xxxxx AND a", "libc6  1  2", "a note", "not compared: something"):
        assert part in message, part
    assert message.splitlines()[-1].startswith(
        "1 component, 3 packages, 1 variable, 1 setting, 1 label, 2 layers differ; 0.0 MB becomes 0.0 MB ("
    )


def test_command(layouts: tuple[str, str], command: Call, tmp_path: Path) -> None:
    a, b = layouts
    done, out, _ = command("diff", a, b, "--json", str(tmp_path / "diff.json"))
    assert (done, "libc6  1" in out) == (0, True)
    assert Comparison.model_validate_json((tmp_path / "diff.json").read_text()).differs
    assert command("diff", a, b, "--exit-code")[0] == 1
    assert command("diff", a, a, "--exit-code")[0] == 0
    assert command("diff", a)[0] == 2
    done, _, err = command("diff", a, "./absent")
    assert (done, "does not exist" in err) == (2, True)
