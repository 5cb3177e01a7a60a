"""Asking real servers on this machine: signed repositories, git, pip; and the commands that do it."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import lzma
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Literal

import pytest

from imagebuild.core import (
    Absent,
    CommandError,
    ConfigError,
    Mirrors,
    Patience,
    Unreachable,
    run_program,
)
from imagebuild.lock import Upstream, incomplete
from imagebuild.project import (
    Archive,
    ArchiveTree,
    Entry,
    LockedArchive,
    LockedRepository,
    PackageSource,
    Table,
    WheelSet,
    key_of,
)
from tests.conftest import LIBRARY, ROOT, Files
from tests.unit.conftest import LOGIN, Site
from tests.upstream.keys import CUDA, DOCA, Keys
from tests.upstream.server import Server
from tests.upstream.wheels import make_wheel

pytestmark = pytest.mark.programs

DATA = bytes(range(256)) * 8192
SHA256 = hashlib.sha256(DATA).hexdigest()
PACKAGES = "".join(
    f"Package: {name}\nVersion: {version}\nArchitecture: amd64\n\n"
    for name, version in [
        ("nccl", "2.9.9-1+cuda12.9"),
        ("nccl", "2.32.3-1+cuda12.9"),
        ("tool", "1:1.0~rc1"),
        ("tool", "1:1.0"),
    ]
)


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
    folder.mkdir()
    (folder / "Packages.gz").write_bytes(gzip.compress(PACKAGES.encode()))
    (folder / "Packages.xz").write_bytes(lzma.compress(PACKAGES.encode()))
    lines = [f" {hashlib.sha256(p.read_bytes()).hexdigest()} {p.stat().st_size} {p.name}" for p in folder.iterdir()]
    release = "\n".join(["Origin: test", "SHA256:", *lines, ""]).encode()
    (folder / "InRelease").write_bytes(keys.sign(release, by)["InRelease"])
    for name in (CUDA, DOCA):
        shutil.copy(keys.public / f"{name}.asc", folder)
        shutil.copy(keys.public / f"{name}.gpg", folder)


def at(server: Server, path: str) -> str:
    return f"http://127.0.0.1:{server.port}/{path}"


def source(server: Server, *packages: str, key: str = f"{CUDA}.asc") -> PackageSource:
    return PackageSource(at(server, "repo/"), "/", at(server, f"repo/{key}"), packages)


def resolved(server: Server, *packages: str, known: Entry | None = None, key: str = f"{CUDA}.asc") -> Entry:
    return Upstream(patience=Patience(0.1, 0.001)).resolve(source(server, *packages, key=key), known, lambda *_: None)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def test_an_archive_is_downloaded_once_to_be_hashed_and_read(server: Server) -> None:
    content = tar_of({"stack-1/init.sh": b"export PATH=$PWD/bin:$PATH", "stack-1/bin/tool": b""}, "w:bz2")
    (server.root / "host/stack.tbz").write_bytes(content)
    tree = ArchiveTree(prefix="/opt/stack", script=". ./init.sh")
    wanted = Archive("stack", at(server, "host/stack.tbz"), tree)
    entry = Upstream(patience=Patience(0.1, 0.001)).resolve(wanted, "unresolved", lambda *_: None)
    assert isinstance(entry, LockedArchive)
    assert (entry.sha256, entry.size) == (hashlib.sha256(content).hexdigest(), len(content))
    assert entry.facts
    assert entry.facts.environment == {"PATH": "/opt/stack/bin"}
    assert [request.path for request in server.requests] == ["/host/stack.tbz"]
    # A hash that was pinned without facts is compared.
    table: Table = {key_of(wanted): entry.sha256}
    assert incomplete(table, [wanted]) == [wanted]
    assert Upstream().resolve(wanted, entry.sha256, lambda *_: None) == entry
    with pytest.raises(CommandError, match=f"has the sha256 {entry.sha256}, but the lock says {SHA256}"):
        Upstream().resolve(wanted, SHA256, lambda *_: None)


@pytest.mark.parametrize("key", [f"{CUDA}.asc", f"{CUDA}.gpg"])
def test_a_signed_repository(server: Server, keys: Keys, key: str) -> None:
    assert resolved(server, "tool", "nccl=2.9.9-1+cuda12.9", key=key) == LockedRepository(
        fingerprint=keys.fingerprint(CUDA),
        packages={"tool": "1:1.0", "nccl=2.9.9-1+cuda12.9": "2.9.9-1+cuda12.9"},
        candidates={"tool": ("1:1.0~rc1", "1:1.0"), "nccl": ("2.9.9-1+cuda12.9", "2.32.3-1+cuda12.9")},
    )


def tar_of(files: dict[str, bytes], mode: Literal["w:xz", "w:bz2"]) -> bytes:
    """A packed archive with these files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def package_with(files: dict[str, bytes]) -> bytes:
    """A Debian package with these files."""
    members = {
        "debian-binary": b"2.0\n",
        "control.tar.xz": tar_of({"./control": b""}, "w:xz"),
        "data.tar.xz": tar_of({f"./{name}": data for name, data in files.items()}, "w:xz"),
    }
    result = b"!<arch>\n"
    for name, data in members.items():
        head = f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(data):<10}`\n"
        result += head.encode() + data + b"\n" * (len(data) % 2)
    return result


INDEX_9 = b"Package: tool\nVersion: 9\n"


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("InRelease", None, "the signature is not of this text"),
        ("InRelease", b"Origin: test\n", "there is no signature"),
        (f"{CUDA}.asc", b"<html>", "expected an OpenPGP key"),
    ],
)
def test_what_was_tampered_with(server: Server, name: str, content: bytes | None, reason: str) -> None:
    text = (server.root / "repo" / "InRelease").read_bytes()
    server.replace(f"/repo/{name}", content or text.replace(b"Origin: test", b"Origin: evil"))
    with pytest.raises(CommandError, match=f"repo/: .*{reason}"):
        resolved(server, "tool")


def test_text_around_the_signature_does_not_count(server: Server) -> None:
    text = (server.root / "repo" / "InRelease").read_bytes()
    evil = f"SHA256:\n {hashlib.sha256(gzip.compress(INDEX_9)).hexdigest()} 9 Packages.gz\n\n".encode()
    server.replace("/repo/InRelease", evil + text)
    entry = resolved(server, "tool")
    assert isinstance(entry, LockedRepository)
    assert entry.packages == {"tool": "1:1.0"}


def test_a_suite_that_is_not_flat() -> None:
    with pytest.raises(ConfigError, match="the suite 'stable' is not flat"):
        Upstream().index(PackageSource("https://example.org/", "stable", "k", ()), ())


@pytest.fixture
def project_git(tmp_path: Path) -> Path:
    """A git repository with an annotated tag, a plain one and releases that are not stable."""
    folder = tmp_path / "tool.git"

    def run(*words: str) -> None:
        who = ("-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "tag.gpgSign=false")
        subprocess.run(["git", *who, "-C", folder, *words], check=True, capture_output=True)

    folder.mkdir()
    run("init", "-q", "-b", "main")
    for number, tag in enumerate(["v3.4", "v3.5", "v3.10", "v4.0-rc1", "latest"]):
        run("commit", "-q", "--allow-empty", "-m", str(number))
        run("tag", *(["-a", "-m", tag] if tag == "v3.10" else []), tag)
    return folder


def head(folder: Path, tag: str) -> str:
    words = ["git", "-C", str(folder), "rev-parse", f"{tag}^{{commit}}"]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


def test_tags_become_commits(project_git: Path) -> None:
    address = project_git.as_uri()
    for tag in ("v3.4", "v3.10"):
        assert Upstream().commit(address, tag) == head(project_git, tag)
    assert Upstream().tags(address)["v3.10"] == head(project_git, "v3.10")
    with pytest.raises(Absent, match="has no tag v9"):
        Upstream().commit(address, "v9")
    with pytest.raises(Absent, match="has no tag v3"):  # not a pattern
        Upstream().commit(address, "v3")
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
    assert found.sha256["arm64"] == hashlib.sha256(
        (tmp_path / "some_wheel-1.2.10-py3-none-manylinux2014_aarch64.whl").read_bytes()
    ).hexdigest()  # fmt: skip
    with pytest.raises(CommandError, match="pip finds no half-wheel for arm64") as caught:
        upstream.wheels(WheelSet("c", "1", ("half-wheel",)))
    assert not isinstance(caught.value, Unreachable)


def test_git_and_pip_get_the_certificates_and_the_passwords_of_downloads(
    tmp_path: Path, serve: type[Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    (netrc := tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    got: dict[str, str] = {}

    def run(*argv: str, env: dict[str, str], **options: float) -> str:
        got.update(env)
        return run_program(*argv, env={"PIP_CONFIG_FILE": os.devnull, **env, "PIP_CERT": ""}, **options)

    page = b'<a href="x-1-py3-none-any.whl#sha256=0">x-1-py3-none-any.whl</a>'
    index = serve((200, {"Content-Type": "text/html", "Content-Length": str(len(page))}, page))
    refs = f"{'1' * 40}\trefs/tags/v1\n".encode()
    wants_login = (401, {"WWW-Authenticate": 'Basic realm="x"', "Content-Length": "0"}, b"")
    git = serve(wants_login, (200, {"Content-Length": str(len(refs))}, refs))
    upstream = Upstream(Mirrors(python_index=f"{index.address}/"), ca=tmp_path / "ca.crt", netrc=netrc, run=run)
    assert (upstream.wheel_versions("x"), set(index.asked)) == (("1",), {LOGIN})
    assert upstream.commit(git.address, "v1") == "1" * 40
    assert git.asked[:2] == [None, LOGIN]
    assert {got["PIP_CERT"], got["GIT_SSL_CAINFO"]} == {str(tmp_path / "ca.crt")}
    assert got["GIT_CONFIG_GLOBAL"] == str(tmp_path / "home/.gitconfig"), "the user's settings of git count"


def test_a_package_index_that_is_down() -> None:
    upstream = Upstream(Mirrors(python_index=f"http://127.0.0.1:{free_port()}/simple/"))
    with pytest.raises(Unreachable, match="its index does not answer"):
        upstream.wheels(WheelSet("c", "1", ("no-such-wheel-anywhere==1",)))


class Command:
    """`imagebuild …` in a folder, as people call it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {
            **os.environ,
            "XDG_CONFIG_HOME": str(folder),
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(folder / "tmp"),
        }
        (folder / "tmp").mkdir()

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "imagebuild", *words], cwd=self.folder, env=self.environ, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - no threads here
        )  # fmt: skip

    def __call__(self, *words: str, expect: int = 0) -> str:
        process = self.start(*words)
        out, err = process.communicate(timeout=120)
        assert process.returncode == expect, f"{process.returncode}\n{out}\n{err}"
        assert "Traceback" not in err
        return out + err

    @property
    def lock(self) -> dict[str, dict[str, object]]:
        read: dict[str, dict[str, object]] = json.loads((self.folder / "imagebuild.lock").read_text())
        return read


@pytest.fixture
def files(tiny: Files, server: Server, project_git: Path) -> Files:
    """The tiny project with an archive, a signed repository and git; its image is in the lock already."""
    (server.root / "host" / "b.tar").write_bytes(b"b" * (8 << 20))
    tiny.component(
        "library",
        LIBRARY + f"archive: {at(server, 'host/a.tar')}\npackages: {{runtime: [tool, 'nccl={{version}}-1+cuda12.9']}}\n"
        f"repository: {{name: repo, url: '{at(server, 'repo/')}', key: '{at(server, f'repo/{CUDA}.asc')}'}}\n",
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


@pytest.fixture
def command(files: Files) -> Command:
    return Command(files.root)


def test_lock_from_nothing_check_and_changes(command: Command, server: Server, project_git: Path, keys: Keys) -> None:
    printed = command("lock")
    assert "imagebuild.lock: 4 resolved; all 5 sources are pinned" in printed
    lock = command.lock
    assert lock["archives"][at(server, "host/a.tar")] == SHA256
    assert lock["git"][project_git.as_uri()] == {"v3.4": head(project_git, "v3.4")}
    assert lock["repositories"][at(server, "repo/")] == {
        "fingerprint": keys.fingerprint(CUDA),
        "packages": {"nccl=2.9.9-1+cuda12.9": "2.9.9-1+cuda12.9", "tool": "1:1.0"},
        "candidates": {"nccl": ["2.9.9-1+cuda12.9", "2.32.3-1+cuda12.9"], "tool": ["1:1.0~rc1", "1:1.0"]},
    }
    text = (command.folder / "imagebuild.lock").read_text()
    server.forget()
    assert "0 resolved; all 5 sources are pinned" in command("lock")
    assert server.requests == []
    assert "all 5 sources are as locked; upstream was not asked" in command("lock", "--check", "--offline")

    (server.root / "host" / "a.tar").write_bytes(b"other")
    subprocess.run(["git", "-C", project_git, "tag", "-f", "v3.4", "v3.5"], check=True, capture_output=True)
    publish(server.root, keys, by=DOCA)
    shutil.copy(keys.public / f"{DOCA}.asc", server.root / "repo" / f"{CUDA}.asc")
    out = command("lock", "--check", expect=1)
    assert f"changed      archive {at(server, 'host/a.tar')}" in out
    assert f"upstream has {head(project_git, 'v3.5')[:12]} now, locked is {lock_commit(lock, project_git)[:12]}" in out
    assert f"imagebuild.lock trusts {keys.fingerprint(CUDA)}" in out
    assert (command.folder / "imagebuild.lock").read_text() == text

    command("lock", "--update", "git-tool")
    after = command.lock
    assert after["git"][project_git.as_uri()] == {"v3.4": head(project_git, "v3.5")}
    assert {**after, "git": lock["git"]} == lock
    assert "wrong answers" not in command("lock", "--update", at(server, "repo/"))
    assert command.lock["repositories"][at(server, "repo/")]["fingerprint"] == keys.fingerprint(DOCA)  # type: ignore[index]
    assert "no component" in command("lock", "--update", "git-tol", expect=2)


def lock_commit(lock: dict[str, dict[str, object]], folder: Path) -> str:
    found = lock["git"][folder.as_uri()]
    assert isinstance(found, dict)
    return str(found["v3.4"])


def test_what_nothing_uses_goes_unless_targets_are_selected(command: Command, files: Files) -> None:
    command("lock")
    content = command.lock
    content["archives"]["https://example.org/old.tar"] = "0" * 64
    files.write("imagebuild.lock", json.dumps(content))
    assert "stale  archive https://example.org/old.tar" in command("lock", "--check", "--offline", expect=1)
    command("lock", "cuda=13.0")
    assert "https://example.org/old.tar" in command.lock["archives"]
    command("lock")
    assert "https://example.org/old.tar" not in command.lock["archives"]


def test_a_failure_costs_what_failed_and_nothing_else(command: Command, server: Server, files: Files) -> None:
    command("lock")
    before = command.lock
    component = "dockerfiles/components/tool/component.yaml"
    files.replace(component, at(server, "host/b.tar"), f"{at(server, 'host/{cuda}.tar')}\nkey: [cuda]")
    files.replace("matrix.yaml", 'git-tool: "3.4"', 'git-tool: "3.5"')
    server.forget()
    # One target: its sources only, each asked for and shown once; nothing is written of what failed.
    out = command("lock", "tiny-cuda12.9-debian13-runtime", expect=4)
    assert f"archive {at(server, 'host/12.9.tar')}: the server does not have it (404)" in out
    assert [request.path for request in server.requests] == ["/host/12.9.tar"]
    shown = [line.split()[1:] for line in out.splitlines() if re.match(r" +[0-9]+\.[0-9] ", line)]
    assert sorted(line[0] for line in shown) == ["archive", "git"]
    assert {**command.lock, "git": before["git"]} == before
    # All: what is there is written, and what was there stays, in use or not.
    (server.root / "host" / "13.0.tar").write_bytes(b"13")
    command("lock", expect=4)
    failed = command.lock
    assert failed["archives"][at(server, "host/12.9.tar")] == "unresolved"
    assert "unresolved  archive" in command("lock", "--check", "--offline", expect=1)
    assert failed["archives"][at(server, "host/13.0.tar")] == hashlib.sha256(b"13").hexdigest()
    assert failed["archives"].items() >= before["archives"].items()
    assert all(tag in str(failed["git"]) for tag in ("v3.4", "v3.5"))
    (server.root / "host" / "12.9.tar").write_bytes(b"12")
    command("lock")
    assert at(server, "host/b.tar") not in command.lock["archives"]


class Stuck(BaseHTTPRequestHandler):
    """Sends the beginning of a file and then nothing."""

    release = threading.Event()

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000000")
        self.end_headers()
        self.wfile.write(b"x" * 1000)
        self.wfile.flush()
        self.release.wait(600)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_resumes(command: Command, server: Server, files: Files, how: signal.Signals) -> None:
    Stuck.release.clear()
    with HTTPServer(("127.0.0.1", 0), Stuck) as stuck:
        threading.Thread(target=stuck.serve_forever, daemon=True).start()
        slow = f"http://127.0.0.1:{stuck.server_address[1]}/b.tar"
        files.replace("dockerfiles/components/tool/component.yaml", at(server, "host/b.tar"), slow)
        process = command.start("lock")
        deadline = time.monotonic() + 120
        while not ((command.folder / "imagebuild.lock").exists() and len(command.lock.get("repositories", {}))
                   and command.lock.get("git") and command.lock.get("archives")):  # fmt: skip
            assert time.monotonic() < deadline, "was not written on the way"
            time.sleep(0.05)
        process.send_signal(how)
        _, err = process.communicate(timeout=120)
        assert process.returncode == (130 if how == signal.SIGINT else 143), err
        assert "Traceback" not in err
        Stuck.release.set()
        stuck.shutdown()
    assert slow not in command.lock["archives"]
    assert list((command.folder / "tmp").iterdir()) == []
    files.replace("dockerfiles/components/tool/component.yaml", slow, at(server, "host/b.tar"))
    server.forget()
    assert "1 resolved; all 5 sources are pinned" in command("lock")
    assert [r.path for r in server.requests] == ["/host/b.tar"]


def test_the_users_mirrors_are_asked(command: Command, server: Server, files: Files) -> None:
    component = "dockerfiles/components/library/component.yaml"
    files.write(component, (files.root / component).read_text().replace(at(server, ""), "https://example.org/"))
    files.write("config.yaml", f"mirrors: {{downloads: {{https://example.org/: '{at(server, '')}'}}}}\n")
    command.environ["IMAGEBUILD_CONFIG"] = str(files.root / "config.yaml")
    shutil.move(server.root / "host" / "a.tar", server.root / "host" / "kept")
    gone = rf"https://example.org/host/a.tar \(as http://127.0.0.1:{server.port}/host/a.tar\)"
    assert re.search(gone, command("lock", expect=4))
    shutil.move(server.root / "host" / "kept", server.root / "host" / "a.tar")
    command("lock")
    assert command.lock["archives"]["https://example.org/host/a.tar"] == SHA256
    assert "https://example.org/repo/" in command.lock["repositories"]


def test_bump_proposes_and_writes(command: Command, project_git: Path) -> None:
    command("lock")
    before = (command.folder / "matrix.yaml").read_text()
    out = command("bump")
    changed = {line for line in out.splitlines() if line[:1] in "+-" and line[1:3] not in {"--", "++"}}
    assert changed == {
        '-  git-tool: "3.4" # and this', '+  git-tool: "3.10" # and this',
        '-  library: "2.9.9" # the library', '+  library: "2.32.3" # the library',
    }  # fmt: skip
    assert "tool  3.4      nobody lists its versions" in out
    assert (command.folder / "matrix.yaml").read_text() == before
    out = command("bump", "--pre", "git-tool", "--relock")
    assert '+  git-tool: "4.0-rc1" # and this' in out
    assert f'+   "v4.0-rc1": "{head(project_git, "v4.0-rc1")}"' in out
    assert '-   "v3.4": ' in out
    assert "+  library: " not in out
    command("bump", "--write", "--relock")
    after = before.replace('git-tool: "3.4"', 'git-tool: "3.10"').replace('"2.9.9"', '"2.32.3"')
    assert (command.folder / "matrix.yaml").read_text() == after
    assert "all 5 sources are as locked" in command("lock", "--check", "--offline")
    assert "no newer version" in command("bump")
