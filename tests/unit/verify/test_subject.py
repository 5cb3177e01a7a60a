"""Images are found where they are: layouts, archives, a registry (in memory), the folder of builds, the plan."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from imagebuild.core.errors import ConfigError, NothingSelected, ResultError
from imagebuild.oci import image
from imagebuild.oci.image import FoundImage, images_in
from imagebuild.oci.layout import INDEX, MANIFEST, Descriptor, Manifest
from imagebuild.oci.registry import Registry
from imagebuild.project.plan import Plan, Target, make_plan
from imagebuild.project.records import BuildResult
from imagebuild.verify.subject import ImageFinder, path_of_image
from tests import registry_fake
from tests.conftest import Files, data
from tests.registry_fake import FakeRegistry, put_image
from tests.unit import image_files as make

CASES = data("cases/verify/subject")

FILES = {"etc/hostname": b"tiny\n"}


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "image_in_engine", lambda *_: None)


@contextmanager
def found_at(name: str, places: ImageFinder | None = None) -> Iterator[FoundImage]:
    with (places or ImageFinder()).find(name) as found:
        yield found


def test_a_layout_and_an_archive(tmp_path: Path) -> None:
    make.layout(tmp_path / "layout", {"x": b"1"}, FILES, User="me", Labels={"a": "b"})
    (tmp_path / "image.tar").write_bytes(make.saved(tmp_path / "layout"))
    for name in (f"oci:{tmp_path}/layout", str(tmp_path / "layout"), str(tmp_path / "image.tar")):
        with found_at(name) as found:
            image = found.image(None)
            assert image.settings["User"] == "me"
            assert image.labels == {"a": "b"}
            assert image.compressed
            again = image.as_layout(tmp_path / f"copy-{Path(name).name}")
            (same,) = images_in(again.folder, tmp_path)
            assert same.digest == image.digest
            assert [blob.read() for blob in same.layers]


@pytest.mark.parametrize(("name", "is_refused"), CASES["a-folder-does-not-take-the-place-of-an-image-in-a-registry"])
def test_a_folder_does_not_take_the_place_of_an_image_in_a_registry(
    name: str, is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make.layout(tmp_path / name, {"x": b"1"}, FILES)
    if is_refused:
        with pytest.raises(ConfigError, match=f"write ./{name}, or add a tag or a digest"):
            path_of_image(name)
    else:
        assert path_of_image(name) is None
    assert path_of_image(f"./{name}") == Path(name)
    assert path_of_image(f"oci:{name}") == Path(name)


@pytest.fixture
def registry() -> FakeRegistry:
    return FakeRegistry()


def at(registry: FakeRegistry, plan: Plan | None = None) -> ImageFinder:
    def connect(host: str) -> Registry:
        assert host == registry.host
        return registry

    return ImageFinder(plan or Plan(targets=(), excluded=()), connect=connect)


def test_an_index_of_a_registry(registry: FakeRegistry) -> None:
    images = [
        put_image(registry, "gpu/open", FILES, {"x": b"1"}, platform=f"linux/{arch}") for arch in ("amd64", "arm64")
    ]
    attestation = Descriptor(MANIFEST, images[0].digest, images[0].size, "unknown/unknown")
    digest = registry_fake.index(registry, "gpu/open", [*images, attestation], "1")
    for name in ("registry.test/gpu/open:1", f"registry.test/gpu/open@{digest}", "registry:registry.test/gpu/open:1"):
        with found_at(name, at(registry)) as found:
            assert found.platforms == ("linux/amd64", "linux/arm64")
            assert found.digest == digest
            image = found.image("linux/arm64")
            assert image.digest == images[1].digest
            assert image.fetch(image.layers[0]).read()
            assert image.repository
            with pytest.raises(
                ConfigError, match="is for linux/amd64, linux/arm64; choose one platform with --platform"
            ):
                found.image(None)


@pytest.mark.parametrize(("name", "message"), CASES["absent"])
def test_what_is_not_there(registry: FakeRegistry, name: str, message: str) -> None:
    registry.at("gpu/open").put_manifest(Manifest(b'{"schemaVersion": 2}', MANIFEST), "1")
    registry.at("gpu/open").put_manifest(Manifest(b'{"manifests": []}', INDEX), "2")
    error = ResultError if "cannot" in message else ConfigError
    with pytest.raises(error, match=message), found_at(name, at(registry)):
        pass
    if name.startswith("registry.test"):
        offline = pytest.raises(ConfigError, match="--offline forbids the registry")
        with offline, found_at(name, ImageFinder(offline=True)):
            pass


@pytest.fixture
def plan(tiny: Files) -> Plan:
    return make_plan(tiny.load())


def labels_of(target: Target) -> dict[str, str]:
    return {f"imagebuild.component.{name}": version for name, version in target.components.items()}


def test_targets_that_were_built(plan: Plan, tmp_path: Path) -> None:
    first, second = plan.targets[:2]
    places = ImageFinder(plan, tmp_path)
    with pytest.raises(ConfigError, match="is not built"), found_at(first.id, places):
        pass
    # What is misspelled is not looked for in a registry.
    with pytest.raises(NothingSelected, match=f"did you mean '{first.id}'"), found_at(f"{first.id}e", places):
        pass
    make.layout(tmp_path / first.id / "layout", FILES, Labels=labels_of(first))
    with found_at(first.id, places) as found:
        assert (found.name, found.image(None).labels) == (first.id, labels_of(first))
    # A build with other versions is not the target.
    make.layout(tmp_path / second.id / "layout", FILES, Labels=dict.fromkeys(labels_of(second), "0"))
    with pytest.raises(ConfigError, match="have other versions than in the plan"), found_at(second.id, places):
        pass


def test_a_target_that_was_pushed(plan: Plan, tmp_path: Path, registry: FakeRegistry) -> None:
    target = plan.targets[0]
    about = put_image(registry, "gpu/open", FILES, Labels=labels_of(target))
    result = BuildResult(
        target=target.id, digest=about.digest, tags=(), platforms=("linux/amd64",), size_bytes=None, seconds=1, steps=(),
        repository="registry.test/gpu/open", manifests={"linux/amd64": about.digest},
    )  # fmt: skip
    path = tmp_path / target.id / "result.json"
    path.parent.mkdir()
    path.write_text(result.model_dump_json())
    places = replace(at(registry, plan), folder=tmp_path)
    with found_at(target.id, places) as found:
        assert found.image(None).digest == about.digest
    with pytest.raises(ConfigError, match="is not built"), found_at(target.id, replace(places, offline=True)):
        pass
    path.write_text("{}")
    with (
        pytest.raises(ResultError, match=r"result.json: .*the version of imagebuild that wrote it"),
        found_at(target.id, places),
    ):
        pass


def test_no_room_for_an_archive_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(image, "images_in", full)
    with (
        pytest.raises(ResultError, match=r"No space left on device; if the disk is full, set TMPDIR"),
        ImageFinder().find("./image.tar"),
    ):
        pass


def test_a_base_image_that_this_machine_bootstrapped_needs_no_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place = tmp_path / "imagebuild/base/trixie-0"
    place.mkdir(parents=True)
    made = make.Layout(place / "made")
    digest = made.image([make.layer({"etc/debian_version": b"13"})])["digest"]
    made.root.rename(place / digest.removeprefix("sha256:"))
    own = make.diff_id(make.layer({"etc/debian_version": b"13"}))
    asked: list[str] = []
    finder = ImageFinder(connect=lambda host: asked.append(host) or FakeRegistry())  # type: ignore[func-returns-value]
    reference = f"docker.io/library/debian:13@sha256:{'0' * 64}"
    found = finder.find_base(reference, "trixie", [own, f"sha256:{'1' * 64}"])
    assert [layer.diff_id for layer in found.image(None).layers] == [own]
    assert not asked
    # Another image may be built on top of the same bootstrapped layers.
    for release, layers in ((None, [own]), ("bookworm", [own]), ("trixie", [f"sha256:{'1' * 64}", own])):
        asked.clear()
        with pytest.raises(ConfigError):
            finder.find_base(reference, release, layers)
        assert asked
