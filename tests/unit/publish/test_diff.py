"""`imagebuild diff`: what differs, how it is shown, and what is said not to be compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from imagebuild.core.errors import ConfigError
from imagebuild.oci import image
from imagebuild.publish.diff import Comparison, compare_images
from imagebuild.verify.subject import ImageFinder
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
    return [(name, *both) for name, both in made.differences[title].items()]


def status(**versions: str) -> dict[str, bytes]:
    paragraphs = (
        f"Package: {n}\nStatus: install ok installed\nArchitecture: amd64\nVersion: {v}\n" for n, v in versions.items()
    )
    return {"var/lib/dpkg/status": "\n".join(paragraphs).encode()}


@pytest.fixture
def layouts(tmp_path: Path) -> tuple[str, str]:
    """Two images that differ in much, and share a layer."""
    labels = {"imagebuild.component.nccl": "1", "l": "1"}
    make.layout(tmp_path / "a", {"x": b"1"}, status(libc6="1", gone="1", same="1"), Env=["A=1"], Labels=labels)
    packages = status(libc6="2", new="<1> | 2", same="1")
    labels = {"imagebuild.component.nccl": "2"}
    make.layout(tmp_path / "b", {"x": b"1"}, packages, Env=["A=2"], Labels=labels, User="me")
    return f"oci:{tmp_path}/a", f"oci:{tmp_path}/b"


def test_two_layouts(layouts: tuple[str, str], command: Call, tmp_path: Path) -> None:
    a, b = layouts
    status, out, _ = command("diff", a, b, "--json", tmp_path / "diff.json", "--exit-code")
    made = Comparison.model_validate_json((tmp_path / "diff.json").read_text())
    assert status == 1
    assert changes(made, "components") == [("nccl", "1", "2")]
    assert changes(made, "packages") == [("gone", "1", None), ("libc6", "1", "2"), ("new", None, "<1> | 2")]
    assert changes(made, "environment") == [("A", "1", "2")]
    assert [(a is None, b is None) for _, a, b in changes(made, "layers")] == [(False, True), (True, False)]
    assert made.a.size_bytes > 0
    assert (made.a.digest != made.b.digest, made.notes) == (True, ())
    assert "libc6  1  2\n" in out
    assert out.splitlines()[-1] == "the images differ; size 0.0 MB in A, 0.0 MB in B"
    status, out, _ = command("diff", a, a, "--exit-code")
    assert (status, "no differences in the compared parts" in out) == (0, True)
    assert (command("diff", a, b)[0], command("diff", a)[0]) == (0, 2)
    status, _, err = command("diff", a, "./absent")
    assert (status, "does not exist" in err) == (2, True)


def test_a_target_that_comes_along_and_is_not_built(
    command: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No registry is asked for it, though no project is here."""
    monkeypatch.chdir(tmp_path)
    status, _, err = command("diff", *(f"quickstart-cuda13.5-debian13-{variant}" for variant in ("runtime", "devel")))
    assert (status, "quickstart-cuda13.5-debian13-runtime: the target is not built" in err) == (2, True)


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    """Packages of an image without dpkg, and sizes of layers that an engine saved unpacked."""
    make.layout(tmp_path / "a", {})
    make.Layout(tmp_path / "b").image([make.layer(status(libc6="1"))])
    made = compared(f"oci:{tmp_path}/a", f"oci:{tmp_path}/b")
    assert list(made.differences) == ["components", "environment", "layers"]
    assert f"packages are not compared: oci:{tmp_path}/a contains no dpkg packages" in made.notes[0]
    assert "b are not compressed; in a registry, their sizes" in made.notes[1]


def test_platforms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    for name, platforms in (("a", ("linux/amd64", "linux/arm64")), ("b", ("linux/amd64",))):
        several = make.Layout(tmp_path / name)
        for platform in platforms:
            several.image([make.layer({})], platform=platform)
    a, b = (f"oci:{tmp_path}/{name}" for name in "ab")
    made = compared(a, b)
    assert (made.a.platform, made.b.platform) == ("linux/arm64", "linux/amd64")
    assert compared(a, b, "linux/amd64").a.platform == "linux/amd64"
    with pytest.raises(ConfigError, match="is not for linux/arm64"):
        compared(a, b, "linux/arm64")


def test_with_sboms_a_registry_is_asked_for_no_layer() -> None:
    registry = FakeRegistry()
    finder = ImageFinder(connect=lambda _: registry)
    children = [put_image(registry, "gpu/open", {"x": b"1"}, status(libc6=version)) for version in ("1", "2")]
    names = [f"registry.test/gpu/open@{child.digest}" for child in children]
    attached.attach(registry, "gpu/open", children[0], "sbom", b"no JSON")
    found = changes(compared(*names, finder=finder), "packages")
    assert found == [("libc6", "1", "2")]
    for child, version in zip(children, ("1", "2"), strict=True):
        attached.attach(registry, "gpu/open", child, "sbom", attached.spdx(child.digest, libc6=version))
    manifests = [registry.at("gpu/open").manifest(child.digest).document for child in children]
    layers = [layer["digest"] for manifest in manifests for layer in manifest["layers"]]
    registry.asked.clear()
    made = compared(*names, finder=finder)
    assert changes(made, "packages") == found
    assert registry.asked_for("GET", "/blobs/") >= 2 * 2  # configurations and SBOMs
    assert registry.asked_for("GET", "/blobs/(" + "|".join(layers) + ")") == 0
    assert "were read from its SBOM, not verified" in made.notes[0]
