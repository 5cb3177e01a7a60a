"""Downloads that are read from Dockerfiles, clones, the store, and the apt-get of steps with mirrors or a proxy."""

from __future__ import annotations

import re
from pathlib import Path
from shutil import copytree

import pytest

from imagebuild.build.inputs import (
    Download,
    DownloadStore,
    Git,
    apt_get_for_mirrors,
    apt_get_for_proxy,
    copy_commit,
    needs_of,
    stored_path,
)
from imagebuild.core.errors import CommandError, ConfigError, ResultError, Unreachable
from imagebuild.core.settings import Mirrors
from imagebuild.project.plan import Plan
from imagebuild.render.renderer import Renderer
from tests.conftest import ROOT, data, git, ran
from tests.upstream.server import Server

CASES = data("cases/build/inputs")


class Image:
    """A file system with a configuration of apt, and an apt-get that prints this configuration."""

    def __init__(self, root: Path) -> None:
        self.root = copytree(ROOT / "tests/data/apt/image", root, dirs_exist_ok=True)
        for folder in ("shm", "lists", "archives"):
            (root / folder).mkdir()

    def run(self, script: str, *words: str) -> str:
        places = {"/usr/bin/apt-get": "apt-get", "/dev/shm": "shm", "/etc/apt": "etc/apt"}
        places |= {"/var/lib/apt/lists": "lists", "/var/cache/apt/archives": "archives"}
        pattern = "|".join(map(re.escape, places))
        script = re.sub(pattern, lambda found: str(self.root / places[found[0]]), script)
        done = ran("sh", "-c", script, "apt-get", *words)
        assert (done.returncode, done.stderr) == (7, "")
        assert not list((self.root / "shm").iterdir())
        return done.stdout.replace(str(self.root), "")


@pytest.fixture
def image(tmp_path: Path) -> Image:
    return Image(tmp_path)


@pytest.mark.programs
def test_addresses_become_those_of_mirrors(image: Image) -> None:
    mirrors = {
        "https://archive.example/": "http://10.0.0.1:8080/a/",
        "http://archive.example/debian-security/": "http://10.0.0.2/s/",
        "https://packages.example/": "https://mirror.site/p&q/",
    }
    shown = image.run(apt_get_for_mirrors(mirrors), "install", "-y", "x=1")
    assert "deb http://10.0.0.1:8080/a/debian/ trixie main" in shown
    assert "URIs: http://10.0.0.2/s/" in shown.splitlines()
    assert "deb [signed-by=/k.gpg] https://mirror.site/p&q/cuda/ /" in shown
    assert "deb http://other.example/ x y" in shown
    assert "Pin: origin mirror.site" in shown
    assert shown.splitlines()[-1].endswith("install -y x=1")


@pytest.mark.programs
def test_a_rule_does_not_see_what_another_wrote_and_passwords_are_in_no_argument(image: Image, tmp_path: Path) -> None:
    mirrors = {"http://archive.example/": "http://packages.example/x/", "https://packages.example/": "http://m.site/"}
    machines = ("machine m.site", "machine http://m.site:80", "machine git.example", "machine x.m.site", "default")
    lines = [f"{name} login me password geheim{number}\n" for number, name in enumerate(machines)]
    (tmp_path / "passwords").write_text("".join(lines))
    shown = image.run(apt_get_for_mirrors(mirrors, tmp_path / "passwords"), "update")
    netrc, _, called = shown.partition("called:")
    assert "deb http://packages.example/x/debian/ trixie main" in netrc
    assert [line for line in netrc.splitlines(keepends=True) if "geheim" in line] == lines[:2]
    assert "geheim" not in called


@pytest.mark.programs
@pytest.mark.parametrize(
    ("recording", "command", "left"), CASES["all-goes-through-a-bundle-s-proxy-and-what-is-cached-hides-nothing"]
)
def test_all_goes_through_a_bundle_s_proxy_and_what_is_cached_hides_nothing(
    image: Image, recording: bool, command: str, left: list[str]
) -> None:
    for name in ("archives/x.deb", "lists/x_Packages"):
        (image.root / name).write_text("")
    shown = image.run(apt_get_for_proxy("http://10.0.0.1:99", recording=recording), "-qq", command)
    assert "deb [signed-by=/k.gpg] http://packages.example:443/cuda/ /" in shown
    assert "Pin: origin packages.example" in shown
    assert "-o Acquire::http::Proxy=http://10.0.0.1:99" in shown
    assert ("Check-Valid-Until" in shown) is not recording
    assert [f for f in ("archives/x.deb", "lists/x_Packages") if (image.root / f).exists()] == left


def test_every_download_of_this_project_stands_alone_in_a_stage(full_plan: Plan, renderer: Renderer) -> None:
    """Only then can a mirror replace the download. Wheels and images are read from the Dockerfile, too."""
    archives = 0
    for target in full_plan.targets:
        text = renderer.dockerfile(target).text
        needs, half = needs_of(text, target.platforms), needs_of(text, ["linux/arm64"])
        remote = [line for line in text.splitlines() if line.startswith("ADD ")]
        assert len(remote) == len(needs.stages)
        for line, download in zip(remote, needs.stages.values(), strict=True):
            assert f"{download.url}{'#' * bool(download.commit)}{download.commit} /" in line
            assert download.sha256 in line
        archives += len([name for name in needs.stages if name.endswith("-amd64")])
        assert not [name for name in half.stages if name.endswith("-amd64")]
        wheels = "\n".join(wheel for _, stage in needs.wheels for wheel in stage)
        assert {*re.findall(r"--hash=\S+", text)} == {*re.findall(r"--hash=\S+", wheels)}
        assert {*re.findall(r"[\w./:-]+@sha256:[0-9a-f]{64}", text)} == needs.images
    assert archives


@pytest.mark.parametrize("text", CASES["of_this_machine"])
def test_a_dockerfile_names_no_code_and_no_file_of_this_machine(text: str) -> None:
    """pip would run the code of a source archive, and git would copy a private repository into the image."""
    needs = needs_of(text.replace("HASH", f"\\\n    --hash=sha256:{'0' * 64}"), ["linux/amd64"])
    assert [*needs.stages, *needs.wheels] == []


@pytest.fixture
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Download:
    """A commit in a repository with a submodule. git is allowed to fetch from local folders."""
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "protocol.file.allow")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "always")
    for name in ("sub", "main"):
        (tmp_path / name).mkdir()
        git(tmp_path / name, "init", "--quiet")
        (tmp_path / name / name).write_text(name)
        (tmp_path / name / name).chmod(0o700)
        (tmp_path / name / ".dockerignore").write_text("*\n")
        git(tmp_path / name, "add", ".")
        git(tmp_path / name, "commit", "--quiet", "-m", name)
    git(tmp_path / "main", "submodule", "--quiet", "add", "../sub", "3rd/sub")
    git(tmp_path / "main", "commit", "--quiet", "-m", "submodule")
    return Download("http://nowhere.invalid/main", commit=git(tmp_path / "main", "rev-parse", "HEAD"))


def mirror(folder: Path) -> Git:
    return Git(Mirrors.model_construct(downloads={"http://nowhere.invalid/": f"file://{folder}/"}))


@pytest.mark.programs
def test_a_clone_of_a_mirror_becomes_what_add_makes(tmp_path: Path, upstream: Download) -> None:
    mirror(tmp_path).clone(upstream, clone := tmp_path / "clone")
    (clone / "main").write_text("changed")
    with (clone / ".git" / "config").open("a") as file:
        file.write("[core]\n\tfsmonitor = touch ../ran; false\n")
    copy_commit(clone, upstream.commit, made := tmp_path / "made")
    modes = {str(p.relative_to(made)): oct(p.stat().st_mode & 0o777) for p in made.rglob("*") if p.is_file()}
    assert modes == {
        "main": "0o755", ".dockerignore": "0o644", ".gitmodules": "0o644", "3rd/sub/sub": "0o755", "3rd/sub/.dockerignore": "0o644",
    }  # fmt: skip
    assert (made / "main").read_text() == "main"
    assert not (tmp_path / "ran").exists()
    with pytest.raises(CommandError, match="a{40}"):
        mirror(tmp_path).clone(Download(upstream.url, commit="a" * 40), tmp_path / "other")


@pytest.mark.programs
@pytest.mark.parametrize("module", ["", "modules/3rd/sub/"])
def test_a_clone_that_is_damaged_is_refused(tmp_path: Path, upstream: Download, module: str) -> None:
    mirror(tmp_path).clone(upstream, clone := tmp_path / "clone")
    objects = clone / ".git" / module / "objects"
    for victim in [*objects.glob("pack/*.pack"), *(path for path in objects.glob("??/*"))]:
        victim.chmod(0o644)
        victim.write_bytes(victim.read_bytes()[:-30] + b"0" * 30)
    with pytest.raises(ResultError, match="(?s)clone: .*make the bundle again"):
        copy_commit(clone, upstream.commit, tmp_path / "made")


def test_half_a_download_is_not_kept(store: DownloadStore, site: Server) -> None:
    site.truncated.append("/host/")
    with pytest.raises(Unreachable, match="ended after"):
        store.get("https://far.example/host/x_1.0+b~1.deb")
    assert not [path for path in store.folder.rglob("*") if path.is_file()]


def test_addresses_that_are_no_files() -> None:
    for url in ("https://a.b/", "https://a.b/x/", "https://a.b/../../etc/passwd", "https:///x", "https://[::1"):
        with pytest.raises(ConfigError, match="is not (the|an) address"):
            stored_path(url)
