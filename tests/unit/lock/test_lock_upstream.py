"""Asking real servers on this machine: signed repositories, git, pip; and the commands that do it."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from imagebuild.core.errors import Absent, CommandError, ConfigError, Unreachable
from imagebuild.core.http import Patience
from imagebuild.core.run import run_program
from imagebuild.core.settings import Mirrors
from imagebuild.lock.upstream import Upstream
from imagebuild.project.lockfile import Archive, LockedArchive, LockedRepository, PackageSource, Unpacked, WheelSet
from tests.conftest import LIBRARY, ROOT, Files, git
from tests.faulty import Answer
from tests.unit.conftest import LOGIN, Call, Serve
from tests.upstream.keys import CUDA, DOCA, Keys
from tests.upstream.server import Server
from tests.upstream.wheels import make_wheel

pytestmark = pytest.mark.programs

DATA = bytes(range(256)) * 8192
SHA256 = hashlib.sha256(DATA).hexdigest()
VERSIONS = ("nccl 2.9.9-1+cuda12.9", "nccl 2.32.3-1+cuda12.9", "tool 1:1.0~rc1", "tool 1:1.0")
PACKAGES = "".join("Package: {}\nVersion: {}\n\n".format(*version.split()) for version in VERSIONS)


@pytest.fixture
def server(tmp_path: Path, keys: Keys) -> Iterator[Server]:
    root = tmp_path / "server"
    (root / "host").mkdir(parents=True)
    (root / "host" / "a.tar").write_bytes(DATA)
    publish(root, keys)
    with Server(root).running() as running:
        yield running


def publish(root: Path, keys: Keys, *, by: str = CUDA) -> None:
    """A flat repository at /repo/, signed by a key."""
    folder = root / "repo"
    shutil.rmtree(folder, ignore_errors=True)
    keys.publish(folder, {"Packages.gz": gzip.compress(PACKAGES.encode())}, by)
    shutil.copy(keys.public / f"{by}.asc", folder / "key.asc")


def at(server: Server, path: str) -> str:
    return f"http://127.0.0.1:{server.port}/{path}"


def resolved(server: Server, *packages: str) -> LockedRepository:
    source = PackageSource(at(server, "repo/"), "/", at(server, "repo/key.asc"), packages)
    entry = Upstream(patience=Patience(0.1, 0.001)).resolve(source, None, lambda *_: None)
    assert isinstance(entry, LockedRepository)
    return entry


def test_an_archive_is_downloaded_once_to_be_hashed_and_read(server: Server, tmp_path: Path) -> None:
    (tmp_path / "stack-1/bin").mkdir(parents=True)
    (tmp_path / "stack-1/init.sh").write_text("export PATH=$PWD/bin:$PATH")
    packed = server.root / "host/stack.tbz"
    with tarfile.open(packed, "w:bz2") as archive:
        archive.add(tmp_path / "stack-1", "stack-1")
    wanted = Archive("stack", at(server, "host/stack.tbz"), Unpacked(prefix="/opt/stack", script=". ./init.sh"))
    entry = Upstream(patience=Patience(0.1, 0.001)).resolve(wanted, None, lambda *_: None)
    assert isinstance(entry, LockedArchive)
    assert (entry.sha256, entry.size) == (hashlib.sha256(packed.read_bytes()).hexdigest(), packed.stat().st_size)
    assert entry.facts
    assert entry.facts.environment == {"PATH": "/opt/stack/bin"}
    assert [request.path for request in server.requests] == ["/host/stack.tbz"]
    # A hash that was pinned without facts is compared.
    assert Upstream().resolve(wanted, entry.sha256, lambda *_: None) == entry
    with pytest.raises(CommandError, match=f"has the sha256 {entry.sha256}, but the lock says {SHA256}"):
        Upstream().resolve(wanted, SHA256, lambda *_: None)


def test_only_what_is_signed_counts(server: Server) -> None:
    text = (server.root / "repo" / "InRelease").read_bytes()
    server.replaced["/repo/InRelease"] = text.replace(b"Origin: test", b"Origin: evil")
    with pytest.raises(CommandError, match="the release is not signed by the repository's key: gpg says BADSIG"):
        resolved(server, "tool")
    other = gzip.compress(b"Package: tool\nVersion: 9\n")
    evil = f"SHA256:\n {hashlib.sha256(other).hexdigest()} 9 Packages.gz\n\n".encode()
    server.replaced["/repo/InRelease"] = evil + text
    assert resolved(server, "tool").packages == {"tool": "1:1.0"}


def test_a_suite_that_is_not_flat() -> None:
    with pytest.raises(ConfigError, match="the suite 'stable' is not flat"):
        Upstream().index(PackageSource("https://example.org/", "stable", "k", ()))


@pytest.fixture
def project_git(tmp_path: Path) -> Path:
    """A git repository with an annotated tag, a plain one and releases that are not stable."""
    folder = tmp_path / "tool.git"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    for number, tag in enumerate(["v3.4", "v3.5", "v3.10", "v4.0-rc1", "latest"]):
        git(folder, "commit", "-q", "--allow-empty", "-m", str(number))
        git(folder, "-c", "tag.gpgSign=false", "tag", *(["-a", "-m", tag] if tag == "v3.10" else []), tag)
    return folder


def head(folder: Path, tag: str) -> str:
    return git(folder, "rev-parse", f"{tag}^{{commit}}")


def test_tags_become_commits(project_git: Path) -> None:
    address = project_git.as_uri()
    for tag in ("v3.4", "v3.10"):
        assert Upstream().commit(address, tag) == head(project_git, tag)
    assert Upstream().tags(address)["v3.10"] == head(project_git, "v3.10")
    for absent in ("v9", "v3"):  # not a pattern
        with pytest.raises(Absent, match=f"has no tag {absent}"):
            Upstream().commit(address, absent)
    with pytest.raises(Unreachable, match="gone.git: .*does not appear to be a git repository"):
        Upstream().tags(address.replace("tool", "gone"))


def test_pip_is_asked_for_both_architectures(tmp_path: Path) -> None:
    for arch in ("x86_64", "aarch64"):
        for version in ("1.2.3", "1.2.10", "1.3.0rc1"):
            make_wheel(tmp_path, "some-wheel", version, f"manylinux2014_{arch}")
    make_wheel(tmp_path, "half-wheel", "1", "manylinux2014_x86_64")

    def run(*argv: str, **options: object) -> str:
        return run_program(*argv, env={"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}, timeout=120)

    upstream = Upstream(run=run)
    (found,) = upstream.wheels(WheelSet("c", "1.2", ("some-wheel==1.2.*",)))
    assert (found.name, found.version) == ("some-wheel", "1.2.10")
    file = tmp_path / "some_wheel-1.2.10-py3-none-manylinux2014_aarch64.whl"
    assert found.sha256["arm64"] == hashlib.sha256(file.read_bytes()).hexdigest()
    with pytest.raises(CommandError, match="pip finds no half-wheel for arm64") as caught:
        upstream.wheels(WheelSet("c", "1", ("half-wheel",)))
    assert not isinstance(caught.value, Unreachable)


def test_git_and_pip_get_the_certificates_and_the_passwords_of_downloads(
    tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    (netrc := tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    got: dict[str, str] = {}

    def run(*argv: str, env: dict[str, str], **options: float) -> str:
        got.update(env)
        return run_program(*argv, env={"PIP_CONFIG_FILE": os.devnull, **env, "PIP_CERT": ""}, **options)

    page = b'<a href="x-1-py3-none-any.whl#sha256=0">x-1-py3-none-any.whl</a>'
    index = serve(Answer(200, page, {"Content-Type": "text/html"}))
    refs = f"{'1' * 40}\trefs/tags/v1\n".encode()
    git = serve(Answer(401, headers={"WWW-Authenticate": 'Basic realm="x"'}), Answer(200, refs))
    upstream = Upstream(Mirrors(python_index=f"{index.address}/"), ca=tmp_path / "ca.crt", netrc=netrc, run=run)
    assert (upstream.wheel_versions("x"), set(index.asked)) == (("1",), {LOGIN})
    assert upstream.commit(git.address, "v1") == "1" * 40
    assert git.asked[:2] == [None, LOGIN]
    assert {got["PIP_CERT"], got["GIT_SSL_CAINFO"]} == {str(tmp_path / "ca.crt")}
    assert got["GIT_CONFIG_GLOBAL"] == str(tmp_path / "home/.gitconfig"), "the user's settings of git count"


def test_a_package_index_that_is_down() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    upstream = Upstream(Mirrors(python_index=f"http://127.0.0.1:{port}/simple/"))
    with pytest.raises(Unreachable, match="the package index does not answer"):
        upstream.wheels(WheelSet("c", "1", ("no-such-wheel-anywhere==1",)))


@pytest.fixture
def files(tiny: Files, server: Server, project_git: Path) -> Files:
    """The tiny project with an archive, a signed repository and git; its image is in the lock already."""
    (server.root / "host" / "b.tar").write_bytes(b"b" * (8 << 20))
    tiny.component(
        "library",
        LIBRARY + f"archive: {at(server, 'host/a.tar')}\npackages: {{runtime: [tool, 'nccl={{version}}-1+cuda12.9']}}\n"
        f"repository: {{name: repo, url: '{at(server, 'repo/')}', key: '{at(server, 'repo/key.asc')}'}}\n",
    )
    tiny.component("tool", f"{LIBRARY}requires: [library]\narchive: {at(server, 'host/b.tar')}\n")
    tiny.component(
        "git-tool", f"{LIBRARY}git: {project_git.as_uri()}\ntag: v{{version}}\n", build="FROM x AS git-tool\n"
    )
    tiny.replace("matrix.yaml", 'library: "1.2"', 'library: "2.9.9" # the library\n  git-tool: "3.4" # and this')
    tiny.replace("matrix.yaml", "[tool, library]", "[tool, library, git-tool]")
    tiny.lock({"images": {"debian:13-slim": {"digest": f"sha256:{'a' * 64}"}}})
    for name in ("library", "tool"):
        tiny.write(f"dockerfiles/components/{name}/build.j2", f"FROM x AS {name}\n")
    return tiny


Imagebuild = Callable[..., str]


@pytest.fixture
def imagebuild(files: Files, command: Call, monkeypatch: pytest.MonkeyPatch) -> Imagebuild:
    """`imagebuild …` in the project's folder: all that it prints."""

    def call(*words: str, expect: int = 0) -> str:
        status, out, err = command(*words)
        assert status == expect, out + err
        return out + err

    monkeypatch.chdir(files.root)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(files.root))
    return call


def locked(files: Files) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads((files.root / "imagebuild.lock").read_text())
    return found


def test_lock_from_nothing_check_and_changes(
    imagebuild: Imagebuild, files: Files, server: Server, project_git: Path, keys: Keys
) -> None:
    assert "imagebuild.lock: all 5 sources are pinned" in imagebuild("lock")
    lock = locked(files)
    tag = f"{project_git.as_uri()} v3.4"
    assert lock["archives"][at(server, "host/a.tar")] == SHA256
    assert lock["git"] == {tag: head(project_git, "v3.4")}
    assert lock["repositories"][at(server, "repo/")] == {
        "fingerprint": keys.fingerprint(CUDA),
        "packages": {"nccl=2.9.9-1+cuda12.9": "2.9.9-1+cuda12.9", "tool": "1:1.0"},
        "candidates": {"nccl": ["2.9.9-1+cuda12.9", "2.32.3-1+cuda12.9"], "tool": ["1:1.0~rc1", "1:1.0"]},
    }
    server.requests.clear()
    assert "all 5 sources are pinned" in imagebuild("lock")
    assert server.requests == []
    assert imagebuild("lock", "--check", "--offline") == "as locked: 5\nupstream was not asked\n"

    text = (files.root / "imagebuild.lock").read_text()
    git(project_git, "tag", "-f", "v3.4", "v3.5")
    publish(server.root, keys, by=DOCA)
    (server.root / "host" / "a.tar").unlink()
    out = imagebuild("lock", "--check", expect=1)
    assert re.search(rf"gone +archive {at(server, 'host/a.tar')}", out)
    assert f"upstream now has {head(project_git, 'v3.5')[:12]}, but the lock has {lock['git'][tag][:12]}" in out
    assert f"imagebuild.lock trusts {keys.fingerprint(CUDA)}" in out
    assert {request.method for request in server.requests if request.path.endswith(".tar")} == {"HEAD"}
    assert (files.root / "imagebuild.lock").read_text() == text

    imagebuild("lock", "--update", "git-tool")
    assert locked(files)["git"] == {tag: head(project_git, "v3.5")}
    assert {**locked(files), "git": lock["git"]} == lock
    imagebuild("lock", "--update", at(server, "repo/"))
    assert locked(files)["repositories"][at(server, "repo/")]["fingerprint"] == keys.fingerprint(DOCA)
    assert "no component" in imagebuild("lock", "--update", "git-tol", expect=2)


def test_a_failure_costs_what_failed_and_nothing_else(imagebuild: Imagebuild, server: Server, files: Files) -> None:
    imagebuild("lock")
    before = locked(files)
    component = "dockerfiles/components/tool/component.yaml"
    files.replace(component, at(server, "host/b.tar"), f"{at(server, 'host/{cuda}.tar')}\nkey: [cuda]")
    files.replace("matrix.yaml", 'git-tool: "3.4"', 'git-tool: "3.5"')
    server.requests.clear()
    # One target: its sources only, each asked for and shown once; nothing is written of what failed.
    out = imagebuild("lock", "tiny-cuda12.9-debian13-runtime", expect=4)
    assert f"archive {at(server, 'host/12.9.tar')}: the server does not have it (404)" in out
    assert [request.path for request in server.requests] == ["/host/12.9.tar"]
    shown = [line.split()[1:] for line in out.splitlines() if re.match(r" +[0-9]+\.[0-9] ", line)]
    assert sorted(line[0] for line in shown) == ["archive", "git"]
    assert {**locked(files), "git": before["git"]} == before
    assert "not used" in imagebuild("lock", "--check", "--offline", expect=1)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_resumes(imagebuild: Imagebuild, files: Files, server: Server, how: signal.Signals) -> None:
    server.cut.clear()
    server.truncated.append("/host/b.tar")
    (temporary := files.root / "tmp").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "imagebuild", "lock"], env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)},
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - no threads here
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not all(locked(files).get(kind) for kind in ("archives", "git", "repositories")):
        assert time.monotonic() < deadline, "was not written on the way"
        time.sleep(0.05)
    process.send_signal(how)
    _, err = process.communicate(timeout=120)
    assert process.returncode == (130 if how == signal.SIGINT else 143), err
    assert "Traceback" not in err
    server.cut.set()
    assert at(server, "host/b.tar") not in locked(files)["archives"]
    assert list(temporary.iterdir()) == []
    server.truncated.clear()
    server.requests.clear()
    assert "all 5 sources are pinned" in imagebuild("lock")
    assert [r.path for r in server.requests] == ["/host/b.tar"]


def test_bump_proposes_and_writes(imagebuild: Imagebuild, files: Files) -> None:
    before = (files.root / "matrix.yaml").read_text()
    out = imagebuild("bump")
    changed = {line for line in out.splitlines() if line[:1] in "+-" and line[1:3] not in {"--", "++"}}
    assert changed == {
        '-  git-tool: "3.4" # and this', '+  git-tool: "3.10" # and this',
        '-  library: "2.9.9" # the library', '+  library: "2.32.3" # the library',
    }  # fmt: skip
    assert "tool  3.4      no server lists its versions" in out
    assert (files.root / "matrix.yaml").read_text() == before
    assert "+  library: " not in imagebuild("bump", "git-tool")
    assert "matrix.yaml: written; `imagebuild lock` pins the new versions" in imagebuild("bump", "--write")
    after = before.replace('git-tool: "3.4"', 'git-tool: "3.10"').replace('"2.9.9"', '"2.32.3"')
    assert (files.root / "matrix.yaml").read_text() == after
    assert "no newer version" in imagebuild("bump")
