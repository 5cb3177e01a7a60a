"""Sources on servers of this machine: archives, git repositories, wheels and images."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import tarfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from imagebuild.core.errors import Absent, CommandError, ResultError, Unreachable
from imagebuild.core.fields import CPUS
from imagebuild.core.http import Patience
from imagebuild.core.run import MODULE, run_program
from imagebuild.core.settings import Mirrors
from imagebuild.lock.upstream import Upstream
from imagebuild.project.lockfile import Archive, LockedArchive, LockedImage, Unpacked, Wheel, WheelSet
from tests.conftest import git
from tests.faulty import Answer
from tests.registry_fake import FakeRegistry, index, put_image
from tests.unit.conftest import LOGIN, SHA256, Serve, at, head
from tests.unit.lock.lock_fakes import A
from tests.upstream.server import Server
from tests.upstream.wheels import make_wheel


@pytest.mark.programs
def test_an_archive_is_downloaded_once_to_be_hashed_and_read(downloads: Server, tmp_path: Path) -> None:
    (tmp_path / "stack-1/bin").mkdir(parents=True)
    (tmp_path / "stack-1/init.sh").write_text("export PATH=$PWD/bin:$PATH")
    packed = downloads.root / "host/stack.tbz"
    with tarfile.open(packed, "w:bz2") as archive:
        archive.add(tmp_path / "stack-1", "stack-1")
    wanted = Archive("stack", at(downloads, "host/stack.tbz"), Unpacked(prefix="/opt/stack", script=". ./init.sh"))
    entry = Upstream(patience=Patience(0.1, 0.001)).resolve(wanted, None, lambda *_: None)
    assert isinstance(entry, LockedArchive)
    assert (entry.sha256, entry.size) == (hashlib.sha256(packed.read_bytes()).hexdigest(), packed.stat().st_size)
    assert entry.facts
    assert entry.facts.environment == {"PATH": "/opt/stack/bin"}
    assert [request.path for request in downloads.requests] == ["/host/stack.tbz"]
    # A hash that was pinned without facts is compared.
    assert Upstream().resolve(wanted, entry.sha256, lambda *_: None) == entry
    with pytest.raises(CommandError, match=f"has the sha256 {entry.sha256}, but the lock says {SHA256}"):
        Upstream().resolve(wanted, SHA256, lambda *_: None)


@pytest.mark.programs
def test_tags_become_commits(project_git: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = project_git.as_uri()
    # The settings of a repository in the current folder, and modules there, are somebody else's programs.
    monkeypatch.chdir(project_git)
    git(project_git, "config", "url.ext::touch ran .insteadOf", "file:")
    (project_git / "pip.py").write_text("print('planted')")
    assert run_program(*MODULE, "pip", "--version").startswith("pip ")
    for tag in ("v3.4", "v3.10"):
        assert Upstream().commit(address, tag) == head(project_git, tag)
    assert Upstream().tags(address)["v3.10"] == head(project_git, "v3.10")
    for absent in ("v9", "v3"):  # not a pattern
        with pytest.raises(Absent, match=f"has no tag {absent}"):
            Upstream().commit(address, absent)
    with pytest.raises(Unreachable, match="gone.git: .*does not appear to be a git repository"):
        Upstream().tags(address.replace("tool", "gone"))


@pytest.mark.programs
def test_pip_is_asked_for_both_architectures(tmp_path: Path) -> None:
    """And not in the current folder, whose files name programs that pip and uv would run."""
    for arch in ("x86_64", "aarch64"):
        for version in ("1.2.3", "1.2.10", "1.3.0rc1"):
            make_wheel(tmp_path, "some-wheel", version, f"manylinux2014_{arch}")
    make_wheel(tmp_path, "half-wheel", "1", "manylinux2014_x86_64")

    def run(*argv: str, folder: str, **options: object) -> str:
        assert folder == "/"
        environ = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
        return run_program(*argv, env=environ, timeout=120, folder=folder)

    upstream = Upstream(run=run)
    (found,) = upstream.wheels(WheelSet("c", "1.2", ("some-wheel==1.2.*",)))
    assert (found.name, found.version) == ("some-wheel", "1.2.10")
    file = tmp_path / "some_wheel-1.2.10-py3-none-manylinux2014_aarch64.whl"
    assert found.sha256["arm64"] == hashlib.sha256(file.read_bytes()).hexdigest()
    with pytest.raises(CommandError, match="pip finds no half-wheel for arm64") as caught:
        upstream.wheels(WheelSet("c", "1", ("half-wheel",)))
    assert not isinstance(caught.value, Unreachable)


@pytest.mark.programs
@pytest.mark.parametrize("problem", ["", "pip does not install some-wheel 1.2 (.|\n)*Expected sha256"])
def test_another_file_than_the_index_stated_is_not_installed(tmp_path: Path, serve: Serve, problem: str) -> None:
    name = "some_wheel-1.2-py3-none-any.whl"
    content = make_wheel(tmp_path, "some-wheel", "1.2", "any").read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    page = Answer(200, f'<a href="{name}">{name}</a>'.encode(), {"Content-Type": "text/html"})
    second = Answer(200, content + b" " if problem else content)
    index = serve(page, Answer(200, content), page, second)

    def run(*argv: str, env: dict[str, str], **options: Any) -> str:
        own = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1"}
        return run_program(*argv, env={**env, **own}, **options)

    upstream = Upstream(Mirrors(python_index=f"{index.address}/"), run=run)
    with pytest.raises(CommandError, match=problem) if problem else nullcontext():
        stated = upstream.unpack_wheel("some-wheel", "1.2", tmp_path / "to", None)
        assert stated == f"some-wheel==1.2 --hash=sha256:{sha256}"
    assert (tmp_path / "to").exists() == (not problem)


@pytest.mark.programs
def test_git_and_pip_get_the_certificates_and_the_passwords_of_downloads(
    tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    (netrc := tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    got: dict[str, str] = {}

    def run(*argv: str, env: dict[str, str], **options: Any) -> str:
        got.update(env)
        return run_program(*argv, env={"PIP_CONFIG_FILE": os.devnull, **env, "PIP_CERT": ""}, **options)

    page = b'<a href="x-1-py3-none-any.whl#sha256=0">x-1-py3-none-any.whl</a>'
    found = serve(Answer(200, page, {"Content-Type": "text/html"}))
    refs = f"{'1' * 40}\trefs/tags/v1\n".encode()
    git = serve(Answer(401, headers={"WWW-Authenticate": 'Basic realm="x"'}), Answer(200, refs))
    upstream = Upstream(Mirrors(python_index=f"{found.address}/"), ca=tmp_path / "ca.crt", netrc=netrc, run=run)
    assert (upstream.wheel_versions("x"), set(found.asked)) == (("1",), {LOGIN})
    assert upstream.commit(git.address, "v1") == "1" * 40
    assert git.asked[:2] == [None, LOGIN]
    assert {got["PIP_CERT"], got["GIT_SSL_CAINFO"]} == {str(tmp_path / "ca.crt")}
    assert got["GIT_CONFIG_GLOBAL"] == str(tmp_path / "home/.gitconfig"), "the user's settings of git count"


@pytest.mark.programs
def test_a_package_index_that_is_down() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    upstream = Upstream(Mirrors(python_index=f"http://127.0.0.1:{port}/simple/"))
    with pytest.raises(Unreachable, match="the package index does not answer"):
        upstream.wheels(WheelSet("c", "1", ("no-such-wheel-anywhere==1",)))


@pytest.mark.parametrize("archive", [{"hash": f"sha256={A}", "hashes": {"sha256": A}}, {"hash": f"sha256={A}"}])
def test_reports_of_pip_before_and_since_23_1(archive: dict[str, object]) -> None:
    item = {"metadata": {"name": "w", "version": "1"}, "download_info": {"archive_info": archive}}
    upstream = Upstream(run=lambda *_, **__: json.dumps({"install": [item]}))
    assert upstream.wheels(WheelSet("c", "1", ("w==1",))) == (
        Wheel(name="w", version="1", sha256={"amd64": A, "arm64": A}),
    )


def python_set(*requirements: str, python: str = "3.13", without: tuple[str, ...] = ()) -> WheelSet:
    return WheelSet("python", python, requirements, python, without)


@pytest.mark.programs
def test_python_packages_with_what_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("uv")
    frameworks = {}
    for arch, cpu in CPUS.items():
        needs = "helper<3", "collectives==1; sys_platform == 'linux'"
        file = make_wheel(tmp_path, "framework", "2.0", f"manylinux_2_28_{cpu}", *needs)
        frameworks[arch] = hashlib.sha256(file.read_bytes()).hexdigest()
        make_wheel(tmp_path, "collectives", "1", f"manylinux2014_{cpu}", "only-for-collectives")
    make_wheel(tmp_path, "framework", "2.0", "win_amd64")
    for name, version, *more in (
        ("helper", "2.9", "old-python; python_version < '3.12'", "new-python; python_version >= '3.12'"), ("helper", "3.0"),
        ("old-python", "1"), ("new-python", "1"), ("only-for-collectives", "1"), ("half", "1", "framework>2"),
    ):  # fmt: skip
        make_wheel(tmp_path, name, version, "any", *more)
    make_wheel(tmp_path, "amd64-only", "1", "manylinux2014_x86_64")

    (planted := tmp_path / ".venv/bin/python").parent.mkdir(parents=True)
    planted.write_text(f"#!/bin/sh\ntouch {tmp_path}/planted\n")
    planted.chmod(0o755)
    (tmp_path / ".venv/pyvenv.cfg").write_text("home = /usr/bin\n")
    monkeypatch.chdir(tmp_path)

    def run(*argv: str, folder: str, **options: Any) -> str:
        environ = {"UV_NO_INDEX": "1", "UV_FIND_LINKS": str(tmp_path)}
        return run_program(*argv, env=environ, timeout=120, folder=folder)

    def versions(wanted: WheelSet) -> dict[str, str]:
        wheels = Upstream(run=run).wheels(wanted)
        assert [wheel.sha256 for wheel in wheels if wheel.name == "framework"] == [frameworks]
        return {wheel.name: wheel.version for wheel in wheels}

    brought = {"collectives": "1", "only-for-collectives": "1"}
    others = {"framework": "2.0", "helper": "2.9"}
    assert versions(python_set("framework==2.0")) == {**brought, **others, "new-python": "1"}
    without = python_set("framework==2.0", python="3.11", without=("collectives", "absent"))
    assert versions(without) == {**others, "old-python": "1"}
    for requirement, problem in (
        ("framework==3", "uv finds no framework==3 for amd64: (.|\n)*no version of framework==3"),
        ("half", r"uv finds no half for amd64: (.|\n)*framework>2"),
        ("amd64-only", "uv finds no amd64-only for arm64"),
    ):
        with pytest.raises(CommandError, match=problem) as caught:
            versions(python_set(requirement))
        assert not isinstance(caught.value, Unreachable)
    assert not (tmp_path / "planted").exists()


@pytest.mark.parametrize(
    ("printed", "fails", "error", "problem"),
    [
        ("packages = 1", False, ResultError, "uv's answer cannot be read"),
        ('[[packages]]\nname = "x"\nversion = "1"\nwheels = [{url = "u"}]', False, ResultError, "'hashes'"),
        ("No module named uv", True, CommandError, "is not installed; run `pip install uv`"),
        ("error: Failed to fetch: `https://r.test/x/`", True, Unreachable, "the package index does not answer"),
    ],
)
def test_answers_of_uv_that_are_of_no_use(printed: str, fails: bool, error: type[Exception], problem: str) -> None:
    def run(*argv: str, **_: object) -> str:
        if fails:
            raise CommandError(f"`{argv[0]}` failed (1): {printed}")
        return printed

    with pytest.raises(error, match=problem):
        Upstream(run=run).wheels(python_set("x==1"))


# Images in a registry


def test_an_index_and_its_platforms_and_a_tag_that_moves(server: FakeRegistry) -> None:
    platforms = ("linux/amd64", "linux/arm64", "linux/riscv64", "unknown/unknown")
    made = {name: put_image(server, "some/image", name.encode(), platform=name) for name in platforms}
    second = put_image(server, "some/image", b"another", platform="linux/amd64")  # engines run the first one
    digest = index(server, "some/image", [*made.values(), second], "13")
    reference = f"{server.address}/some/image:13"
    found = Upstream().image(reference)
    assert found == LockedImage(digest=digest, platforms={name: made[name].digest for name in platforms[:2]})
    entry = made["linux/amd64"].digest
    server.at("some/image").put_manifest(server.at("some/image").manifest(entry), "13")
    assert Upstream().image(reference) == LockedImage(digest=entry)  # a single manifest has no platforms
    assert Upstream().image(reference, digest=digest) == found
    with pytest.raises(CommandError, match="the pinned digest is for one platform; `imagebuild lock --update` pins"):
        Upstream().image(reference, facts=True, digest=entry)
    with pytest.raises(Absent, match="the registry does not have the image"):
        Upstream().image(reference, digest=f"sha256:{'0' * 64}")


def test_what_the_configuration_says_is_kept_unless_it_is_a_path_only(server: FakeRegistry) -> None:
    env = ["PATH=/usr/bin", "NCCL_VERSION=2.30.7-1"]
    platforms = ("linux/amd64", "linux/arm64")
    made = [put_image(server, "some/cuda", b"x", platform=platform, Env=env) for platform in platforms]
    index(server, "some/cuda", made, "13")
    facts = Upstream().image(f"{server.address}/some/cuda:13").facts or {}
    assert {platform: found.nccl for platform, found in facts.items()} == dict.fromkeys(platforms, "2.30.7-1")


def test_a_registry_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(Unreachable, match=f"{address}/some/image:13: .*[Cc]onnection refused") as caught:
        Upstream(patience=Patience(0)).image(f"{address}/some/image:13")
    assert not isinstance(caught.value, Absent)


def test_a_mirror_is_asked_for_the_public_image(server: FakeRegistry) -> None:
    digest = index(server, "some/image", [], "13-slim")
    upstream = Upstream(Mirrors(images={"docker.io/library/debian": f"{server.address}/some/image"}))
    assert upstream.image("debian:13-slim") == LockedImage(digest=digest)
    with pytest.raises(Absent, match="some/image:14-slim: the registry does not have the image"):
        upstream.image("debian:14-slim")
