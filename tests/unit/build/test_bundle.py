"""What a bundle says it has, what a target needs, and trees that stand in for stages."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path

import pytest

from imagebuild.build import (
    Bundle,
    BundleManifest,
    Download,
    NeededInputs,
    Recording,
    StoredFile,
    Trees,
    WheelFiles,
    needed_inputs,
)
from imagebuild.core import ResultError, pip_conf_text
from imagebuild.oci import Layout
from imagebuild.project import Plan, Project
from imagebuild.render import Renderer

COMMIT, SHA = "c" * 40, "d" * 64
MANIFEST = BundleManifest(
    created="2026-01-01T00:00:00+00:00",
    targets=("x",),
    stages={"key1": ("linux/amd64",), "key2": ("linux/amd64", "linux/arm64")},
    files={
        "https://a.b/x.tar": StoredFile(path="files/https/a.b/x.tar", sha256=SHA, size=1),
        "/wheels/x.whl": StoredFile(path="wheels/x.whl", sha256="e" * 64, size=1),
    },
    images={"debian:13@sha256:1": f"sha256:{SHA}"},
    git={COMMIT: "https://a.b/x.git"},
)


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return Bundle(tmp_path, MANIFEST)


@pytest.mark.parametrize(
    ("keys", "platforms", "why"),
    [
        ({"s": "key1"}, ["linux/amd64"], ""),
        ({"s": "key2"}, ["linux/amd64", "linux/arm64"], ""),
        ({"s": "key1"}, ["linux/arm64"], "the bundle was made without linux/arm64"),
        ({"s": "key1", "t": "key9"}, ["linux/amd64"], "the stage t differs from the one that the bundle was made for"),
    ],
)
def test_what_a_bundle_serves(bundle: Bundle, keys: dict[str, str], platforms: list[str], why: str) -> None:
    assert bundle.problem(keys, platforms) == why  # type: ignore[arg-type]


def test_what_contradicts_the_lock(bundle: Bundle) -> None:
    good = NeededInputs(
        {"a": Download("archive", "https://a.b/x.tar", SHA), "b": Download("git", "https://a.b/x.git", COMMIT)},
        frozenset({"debian:13@sha256:1"}),
        frozenset({WheelFiles("amd64", (f"x==1 --hash=sha256:{'e' * 64}",))}),
    )
    assert bundle.missing_inputs(good) == []
    bad = NeededInputs(
        {
            "a": Download("archive", "https://a.b/x.tar", "0" * 64),
            "b": Download("git", "https://a.b/x.git", "0" * 40),
            "c": Download("key", "https://a.b/key"),
        },
        frozenset({"debian:12@sha256:1"}),
        frozenset({WheelFiles("amd64", (f"x==1 --hash=sha256:{'f' * 64}",))}),
    )
    assert bundle.missing_inputs(bad) == [
        "another https://a.b/x.tar",
        f"no commit {'0' * 40} of https://a.b/x.git",
        "no https://a.b/key",
        f"no wheel x==1 --hash=sha256:{'f' * 64}",
        "no image debian:12@sha256:1",
    ]


def test_a_base_is_copied_and_damage_is_found(tmp_path: Path) -> None:
    trees = Trees(tmp_path / "trees")
    (tmp_path / "file").write_text("content")
    context = trees.add("key", tmp_path / "file", "file")
    digest = context.rpartition("@")[2]
    recording = Recording.start(tmp_path / "b", {})
    recording.images["debian:13@sha256:1"] = digest
    shutil.copytree(trees.layout, tmp_path / "b" / Bundle.IMAGES)
    recording.finish({}, {})
    copied = Bundle.read(tmp_path / "b")
    assert copied.find_damage(lambda _: None) == []
    layer = max(Path(copied.layout).rglob("blobs/sha256/*"), key=lambda p: p.stat().st_size)
    layer.write_bytes(b"X" * layer.stat().st_size)
    assert [text.partition(": ")[2] for text in copied.find_damage(lambda _: None)] == [
        "has changed; make the bundle again"
    ]
    layer.unlink()
    with pytest.raises(ResultError, match="is missing or cut off"):
        Layout(copied.layout).check(digest)


def layer_of(context: str, platform: str) -> list[tarfile.TarInfo]:
    layout, _, digest = context.removeprefix("oci-layout://").rpartition("@")
    index = json.loads(Layout(Path(layout)).path(digest).read_bytes())
    (manifest,) = [m for m in index["manifests"] if m["platform"]["architecture"] == platform]
    layers = json.loads(Layout(Path(layout)).path(manifest["digest"]).read_bytes())["layers"]
    with tarfile.open(Layout(Path(layout)).path(layers[0]["digest"])) as archive:
        return archive.getmembers()


def test_a_tree_is_like_what_add_makes(tmp_path: Path) -> None:
    trees = Trees(tmp_path / "trees")
    (tmp_path / "file").write_text("content")
    assert trees.find("key") is None
    context = trees.add("key", tmp_path / "file", "x.tar")
    assert trees.find("key") == context
    for platform in ("amd64", "arm64"):
        root, file = layer_of(context, platform)
        assert (root.name, root.mode, root.uid, root.isdir()) == (".", 0o755, 0, True)
        assert (file.name, file.mode, file.uid, file.gid) == ("x.tar", 0o600, 0, 0)
    next(Path(trees.layout).glob("blobs/sha256/*")).unlink()
    assert trees.find("key") is None


def test_a_tree_does_not_depend_on_this_machine(tmp_path: Path) -> None:
    found = []
    for name, mode in (("a", 0o664), ("b", 0o600)):
        folder = tmp_path / name
        folder.mkdir(mode=mode | 0o700)
        (folder / "file").write_text("x")
        (folder / "file").chmod(mode)
        (folder / "script").write_text("x")
        (folder / "script").chmod(mode | 0o100)
        (folder / ".dockerignore").write_text("*")
        (folder / "link").symlink_to("file")
        found.append(Trees(tmp_path / f"trees-{name}").add("key", folder))
    assert found[0].rpartition("@")[2] == found[1].rpartition("@")[2]
    modes = {m.name.removeprefix("./"): m.mode for m in layer_of(found[0], "amd64") if not m.issym()}
    assert modes == {".": 0o755, "file": 0o644, "script": 0o755, ".dockerignore": 0o644}


def test_inputs_of_this_project_are_those_of_its_dockerfiles(
    project: Project, full_plan: Plan, renderer: Renderer
) -> None:
    """Every ADD of something remote stands alone in a stage that a mirror can replace."""
    seen = set()
    for target in full_plan.targets:
        dockerfile = renderer.dockerfile(target)
        found = needed_inputs(renderer.recipe(target), project.lock, dockerfile.stages, target.platforms)
        stage = ""
        for line in dockerfile.text.splitlines():
            words = line.split()
            if words[:1] == ["FROM"]:
                stage = words[-1]
            elif words[:1] == ["ADD"] and "://" in line:
                item = found.stages[stage]
                seen.add(item.kind)
                assert item.url == next(w for w in words if "://" in w).partition("#")[0]
    assert seen == {"archive", "git", "key"}


def test_pip_is_told_the_index() -> None:
    assert pip_conf_text("https://i.example/s/") == "[global]\nindex-url = https://i.example/s/\n"
    assert pip_conf_text("http://10.0.0.1:80/s/").splitlines()[-1] == "trusted-host = 10.0.0.1"
    assert "https://me:a%40b@i.example/s/" in pip_conf_text("https://i.example/s/", ("me", "a@b"))
