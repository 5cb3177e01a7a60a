"""Fixtures of unit tests: fake programs, processes and network devices, and servers on this machine."""

import base64
import gzip
import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import Mock

import pytest

from imagebuild import __main__
from imagebuild.build import private as build_private
from imagebuild.core import debian, run
from imagebuild.core.errors import CommandError
from imagebuild.oci.engine import EnginePaths
from tests import registry_fake
from tests.conftest import ROOT, git
from tests.faulty import Answer, Handler, Server, answering
from tests.registry_fake import FakeRegistry
from tests.upstream import server as upstream_server
from tests.upstream.keys import CUDA, Keys

BUILDX = {"docker buildx version": "github.com/docker/buildx 0.13.1+ds1 0.13.1+ds1-3\n"}


Call = Callable[..., tuple[int, str, str]]
"""A function that runs an imagebuild command in this process. It returns the exit status and both outputs."""


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Return a function that runs `imagebuild …` without starting a process."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["imagebuild", *map(str, arguments)])
        status = 0
        try:
            __main__.main()
        except SystemExit as end:
            status = int(end.code or 0)
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


@pytest.fixture(scope="module")
def keys() -> Iterator[Keys]:
    """Keys that sign archives, in a home folder of gpg."""
    # Short: the path of an agent's socket is limited.
    with tempfile.TemporaryDirectory(prefix="keys-") as folder:
        Keys.make(Path(folder))
        yield Keys(Path(folder))


class Runner:
    """A fake `run_program` that looks up answers by the beginning of the command. Other commands fail."""

    def __init__(self, answers: Mapping[str, str | Callable[[], str]]) -> None:
        self.answers = answers
        self.calls: list[str] = []

    def __call__(self, *argv: str, env: Mapping[str, str] | None = None, timeout: float | None = None) -> str:
        line = " ".join(argv)
        self.calls.append(line)
        for start, answer in self.answers.items():
            if line.startswith(start):
                return answer if isinstance(answer, str) else answer()
        raise CommandError(f"`{line}` failed (1): Cannot connect")

    def of(self, start: str) -> list[str]:
        return [call for call in self.calls if call.startswith(start)]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose processes and network devices are folders; the user is root."""

    for name in ("proc", "net/eth0"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "net/eth0/mtu").write_text("1400\n")
    monkeypatch.setattr(run, "PROC", tmp_path / "proc")
    monkeypatch.setattr(build_private, "NET", tmp_path / "net")
    monkeypatch.setattr(build_private, "BINFMT_D", tmp_path)
    monkeypatch.setattr(build_private, "BINFMT", tmp_path / "binfmt")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("os.kill", Mock(side_effect=AssertionError("a unit test ends no process")))
    monkeypatch.setattr("time.sleep", lambda _: None)
    return tmp_path


@pytest.fixture
def paths(machine: Path) -> EnginePaths:
    return EnginePaths(machine / "state", machine / "run", "ib-test")


@pytest.fixture
def private(paths: EnginePaths, monkeypatch: pytest.MonkeyPatch) -> EnginePaths:
    """Make `paths` the files of the private engine."""
    monkeypatch.setattr(EnginePaths, "of", lambda _: paths)
    return paths


def gone(word: str) -> bool:
    """Wait until no process has this word in its command line. Return whether that happened."""
    deadline = time.monotonic() + 60
    while (found := any(word in argv for _, argv in run.process_table().values())) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not found


@pytest.fixture
def forever() -> str:
    """A unique number of seconds for `sleep`, by which a process can be found."""
    return f"1000{os.getpid()}{time.monotonic_ns() % 10**6}"


LOGIN = "Basic " + base64.b64encode(b"me:secret").decode()


@pytest.fixture
def server() -> Iterator[FakeRegistry]:
    """A fake registry that is served on this machine."""
    with registry_fake.serve() as behaviour:
        yield behaviour


class Site:
    """A server that gives the answers of a list in order, and repeats the last one."""

    address = ""

    def __init__(self, *answers: Answer) -> None:
        self.asked: list[str | None] = []
        """The Authorization header of each request."""
        self._left = list(answers)

    def serve(self, handler: Handler) -> None:
        self.asked.append(handler.headers.get("Authorization"))
        handler.send(self._left.pop(0) if len(self._left) > 1 else self._left[0])


Serve = Callable[..., Site]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Return a function that starts a site with these answers."""
    with ExitStack() as running:

        def start(*answers: Answer) -> Site:
            site = Site(*answers)
            site.address = f"http://{running.enter_context(answering(Server(site.serve)))}/a.tar"
            return site

        yield start


APT_KEY = "/usr/share/keyrings/debian-archive-keyring.gpg"
DEB822, ONE_LINE = ((ROOT / f"tests/data/apt/{name}").read_text() for name in ("debian.sources", "sources.list"))


@dataclass
class AptMachine:
    """A fake Debian 12 machine with its own /etc/apt."""

    etc: Path
    release: dict[str, str] = field(default_factory=dict)

    def become(self, name: str, version: str, codename: str) -> None:
        self.release |= {"ID": name, "VERSION_ID": version, "VERSION_CODENAME": codename}

    def listing(self, name: str) -> Path:
        return self.etc / "sources.list.d" / name


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AptMachine:
    made = AptMachine(tmp_path)
    for folder in ("sources.list.d", "preferences.d"):
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(debian, "ETC", tmp_path)
    monkeypatch.setattr("platform.freedesktop_os_release", lambda: made.release)
    monkeypatch.setattr(build_private, "POLICY", tmp_path / "policy-rc.d")
    monkeypatch.setattr("shutil.which", lambda program: f"/usr/bin/{program}")
    made.become("debian", "12", "bookworm")
    made.listing("debian.sources").write_text(DEB822)
    return made


DATA = bytes(range(256)) * 8192
SHA256 = hashlib.sha256(DATA).hexdigest()
VERSIONS = ("nccl 2.9.9-1+cuda12.9", "nccl 2.32.3-1+cuda12.9", "tool 1:1.0~rc1", "tool 1:1.0")
PACKAGES = "".join("Package: {}\nVersion: {}\n\n".format(*version.split()) for version in VERSIONS)


@pytest.fixture
def downloads(tmp_path: Path, keys: Keys) -> Iterator[upstream_server.Server]:
    """A server with the archive /host/a.tar and the signed package repository /repo/."""
    root = tmp_path / "server"
    (root / "host").mkdir(parents=True)
    (root / "host" / "a.tar").write_bytes(DATA)
    publish(root, keys)
    with upstream_server.Server(root).running() as running:
        yield running


def publish(root: Path, keys: Keys, *, by: str = CUDA) -> None:
    """Write a flat repository at /repo/, signed by a key."""
    folder = root / "repo"
    shutil.rmtree(folder, ignore_errors=True)
    keys.publish(folder, {"Packages.gz": gzip.compress(PACKAGES.encode())}, by)
    shutil.copy(keys.public / f"{by}.asc", folder / "key.asc")


def at(server: upstream_server.Server, path: str) -> str:
    return f"http://127.0.0.1:{server.port}/{path}"


@pytest.fixture
def project_git(tmp_path: Path) -> Path:
    """A git repository with an annotated tag, lightweight tags and a pre-release."""
    folder = tmp_path / "tool.git"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    for number, tag in enumerate(["v3.4", "v3.5", "v3.10", "v4.0-rc1", "latest"]):
        git(folder, "commit", "-q", "--allow-empty", "-m", str(number))
        git(folder, "-c", "tag.gpgSign=false", "tag", *(["-a", "-m", tag] if tag == "v3.10" else []), tag)
    return folder


def head(folder: Path, tag: str) -> str:
    return git(folder, "rev-parse", f"{tag}^{{commit}}")
