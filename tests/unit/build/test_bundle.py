"""What builds fetch: read from Dockerfiles, cloned, kept in a bundle, and played back by the package proxy."""

from __future__ import annotations

import http.client
import re
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from imagebuild.build.bundle import Bundle, BundleManifest, fetch_wheels, finish_bundle, package_proxy
from imagebuild.build.inputs import Download, DownloadStore, Git, Needs, copy_commit, needs_of, stored_path
from imagebuild.core.errors import CommandError, ConfigError, ResultError, Unreachable
from imagebuild.core.files import file_sha256
from imagebuild.core.http import Downloads, Patience
from imagebuild.core.settings import Mirrors, Settings, pip_conf_text
from imagebuild.project.plan import Plan
from imagebuild.render.renderer import Renderer
from tests.conftest import git
from tests.unit.conftest import Call
from tests.upstream.server import Server
from tests.upstream.wheels import make_wheel

MANIFEST = BundleManifest(
    created="2026-01-01T00:00:00+00:00",
    targets=("x",),
    stages={"key1": ("linux/amd64",), "key2": ("linux/amd64", "linux/arm64")},
)


def test_what_a_bundle_serves_and_how_damage_is_found(tmp_path: Path) -> None:
    for name in ("files/a", "git/x/.git/HEAD", "gone"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    finish_bundle(tmp_path, MANIFEST)
    bundle = Bundle.read(tmp_path)
    assert (bundle.manifest, bundle.find_damage()) == (MANIFEST, [])
    assert bundle.problem({"s": "key2"}, ["linux/amd64", "linux/arm64"]) == ""
    assert bundle.problem({"s": "key1"}, ["linux/arm64"]) == "the bundle was made without linux/arm64"
    assert bundle.problem({"s": "key1", "t": "key9"}, ["linux/amd64"]).startswith(
        "the stage t has changed since the bundle was made"
    )
    (tmp_path / "files/a").write_text("another")
    (tmp_path / "gone").unlink()
    assert bundle.find_damage() == [
        f"{tmp_path}/{name}; make the bundle again" for name in ("files/a: has changed", "gone: is missing")
    ]


def test_a_bundle_for_all_offline_builds(tmp_path: Path, command: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMAGEBUILD_CONFIG", str(tmp_path / "new" / "config.yaml"))
    for name in ("first", "second"):
        finish_bundle(tmp_path / name, MANIFEST)
        assert command("bundle", "use", tmp_path / name)[0] == 0
        assert (tmp_path / "new" / "offline-bundle").resolve() == tmp_path / name


def test_every_download_of_this_project_stands_alone_in_a_stage(full_plan: Plan, renderer: Renderer) -> None:
    """So a mirror can replace it; wheels and images are read from the Dockerfile, too."""
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
        wheels = "\n".join(wheel for stage in needs.wheels for wheel in stage)
        assert {*re.findall(r"--hash=\S+", text)} == {*re.findall(r"--hash=\S+", wheels)}
        assert {*re.findall(r"[\w./:-]+@sha256:[0-9a-f]{64}", text)} == needs.images
    assert archives


@pytest.fixture
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Download:
    """A repository with a submodule; git may fetch from files."""
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


NAME = "my_lib-1.0+x-py3-none-any.whl"
URL = "https://far.example/host/x_1.0+b~1.deb"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "site" / "host").mkdir(parents=True)
    (tmp_path / "site" / "host" / "x_1.0+b~1.deb").write_bytes(b"deb" * 100_000)
    with Server(tmp_path / "site").running() as server:
        yield server


@pytest.fixture
def store(tmp_path: Path, site: Server) -> DownloadStore:
    """A store that fetches."""
    near = f"http://127.0.0.1:{site.port}/"
    mirrors = Mirrors(downloads={"http://far.example/": near, "https://far.example/": near})
    return DownloadStore(tmp_path / "store", Downloads(mirrors.download, patience=Patience(0.1, 0.001)))


def ask(address: str, target: str, method: str = "GET") -> tuple[int, bytes]:
    with closing(http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)) as connection:
        connection.request(method, target)
        with connection.getresponse() as answer:
            return answer.status, answer.read()


def test_a_proxy_records_and_plays_back(store: DownloadStore, site: Server) -> None:
    target = "http://far.example:443/host/x_1.0+b~1.deb"
    log: list[str] = []
    (store.folder / "wheels").mkdir(parents=True)
    (store.folder / "wheels" / NAME).write_bytes(b"a wheel")
    with (
        package_proxy("127.0.0.1", store, log.append) as recording,
        package_proxy("127.0.0.1", DownloadStore(store.folder), log.append) as replaying,
    ):
        assert ask(replaying, target)[0] == 404
        for address in (recording, recording, replaying):
            assert ask(address, target) == (200, b"deb" * 100_000)
        assert ask(replaying, target, "HEAD") == (200, b"")
        assert [r.path for r in site.requests] == ["/host/x_1.0+b~1.deb"]
        assert (store.folder / "files/https/far.example/host/x_1.0+b~1.deb").is_file()
        assert ask(recording, "http://far.example/host/gone")[0] == 404
        site.failing["/host/"] = [503] * 9999
        assert ask(recording, "http://far.example/host/x_1.0+b~1.deb")[0] == 502
        assert f'<a href="{NAME.replace("+", "%2B")}">'.encode() in ask(replaying, "/wheels/")[1]
        assert ask(replaying, f"/wheels/{NAME.replace('+', '%2B')}") == (200, b"a wheel")
        refused = [ask(recording, path)[0] for path in ("/", "/simple/", "/../etc/passwd", "/wheels/../../a.whl")]
        assert refused == [502, 502, 502, 404]
    assert len(log) == 6
    assert "503" in log[2]


def test_half_a_download_is_not_kept(store: DownloadStore, site: Server) -> None:
    site.truncated.append("/host/")
    with pytest.raises(Unreachable, match="ended after"):
        store.get(URL)
    assert not [path for path in store.folder.rglob("*") if path.is_file()]


@pytest.mark.programs
def test_wheels_are_fetched_for_both_architectures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    made = [make_wheel(tmp_path, "my-lib", "1.0", f"manylinux2014_{cpu}") for cpu in ("x86_64", "aarch64")]

    def fetch(*hashes: str) -> None:
        wheel = " \\\n  ".join(["my-lib==1.0", *(f"--hash=sha256:{sha256}" for sha256 in hashes)])
        needs = Needs(("linux/amd64", "linux/arm64"), {}, frozenset(), frozenset({(wheel,)}))
        fetch_wheels(tmp_path / "wheels", {"target": needs}, Settings(), None, lambda _: None)

    fetch(*map(file_sha256, made))
    assert {path.name: file_sha256(path) for path in (tmp_path / "wheels").iterdir()} == {
        path.name: file_sha256(path) for path in made
    }
    shutil.rmtree(tmp_path / "wheels")
    match = r"pip cannot download my-lib==1.0 for amd64: (.|\n)*DO NOT MATCH THE HASHES"
    with pytest.raises(CommandError, match=match):
        fetch("0" * 64)


def test_addresses_that_are_no_files() -> None:
    for url in ("https://a.b/", "https://a.b/x/", "https://a.b/../../etc/passwd", "https:///x"):
        with pytest.raises(ConfigError, match="is not the address of a file"):
            stored_path(url)


def test_pip_is_told_the_index() -> None:
    assert pip_conf_text("https://i.example/s/") == "[global]\nindex-url = https://i.example/s/\n"
    assert pip_conf_text("http://10.0.0.1:80/s/").splitlines()[-1] == "trusted-host = 10.0.0.1"
    assert "https://me:a%40b@i.example/s/" in pip_conf_text("https://i.example/s/", ("me", "a@b"))
