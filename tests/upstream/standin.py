"""All of the stand-in: made if the cache lacks it, and served."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from imagebuild.build import bootstrap
from imagebuild.core import cache_folder, run_program, which
from imagebuild.oci import find_engine
from tests.upstream import bases, hpcx, packages, registry, repositories, wheels
from tests.upstream.keys import Keys
from tests.upstream.server import Server

HERE = Path(__file__).parent
CACHE = cache_folder().parent / "upstream"
"""Of all tests."""
RECIPES = HERE / "recipes"
ADDRESSES = (
    "https://content.mellanox.com/",
    "https://linux.mellanox.com/",
    "https://developer.download.nvidia.com/",
    "https://github.com/",
)
PROGRAMS = {"docker-registry": "docker-registry", "git": "git", "gpg": "gnupg", "gpg-agent": "gpg-agent"}
"""What must be on the machine → the package that has it."""
ARCHIVE = hpcx.Distribution("ubuntu24.04", 13)
"""The one that is served."""


def missing() -> list[str]:
    """Packages that this machine needs for the stand-in and lacks."""
    return [package for program, package in PROGRAMS.items() if not which(program)]


@dataclass
class Upstream:
    """The servers that the image `hpcx` is built from, on this machine."""

    cache: Path
    gateway: str
    """The engine's bridge, by which its daemon and its containers reach this machine."""
    ports: dict[str, int] = field(default_factory=dict)

    @classmethod
    def make(cls, cache: Path, *, sources: bool, log: Callable[[str], None] = lambda _line: None) -> Upstream:
        """Make all of it if the cache folder has it from other recipes, or not at all.

        Without `sources`, those of Open MPI cannot be compiled: to make them takes longer than all else.
        """
        cache.mkdir(parents=True, exist_ok=True)
        cache, stamp = cache.absolute(), cache / "made-from"
        wanted = [_digest(), "sources"]
        with (cache / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not stamp.is_file() or stamp.read_text().split()[: 1 + sources] != wanted[: 1 + sources]:
                for name in ("made-from", "keys", "header", "packages", "content", "openmpi", "toolkit", "served"):
                    shutil.rmtree(cache / name, ignore_errors=True)
                stamp.unlink(missing_ok=True)
                Making(cache, log).everything(sources=sources)
                stamp.write_text(" ".join(wanted[: 1 + sources]))
        words = ("docker", "network", "inspect", "bridge", "--format", "{{(index .IPAM.Config 0).Gateway}}")
        gateway = run_program(*words, env=find_engine(os.environ).environment, timeout=20).strip()
        return cls(cache, gateway, _remembered(cache))

    @property
    def root(self) -> Path:
        """Files served, as root/<host>/<path of the address>."""
        return self.cache / "served"

    @property
    def content(self) -> Path:
        """Compiled parts of HPC-X, for `hpcx.content`."""
        return self.cache / "content"

    @property
    def keys(self) -> Keys:
        return Keys(self.cache / "keys")

    @property
    def configuration(self) -> str:
        """A configuration of a user who has these mirrors, as YAML."""
        base = f"http://{self.gateway}:{self.ports['server']}"
        # On the loopback, the registry may speak plain HTTP.
        lines = ["mirrors:", f"  images: {{docker.io: '127.0.0.1:{self.ports['registry']}'}}", "  downloads:"]
        return "\n".join([*lines, *(f"    {a}: {base}/{a.split('//')[1]}" for a in ADDRESSES), ""])

    @contextmanager
    def serve(self) -> Iterator[Server]:
        """Run the server and the registry, on the ports of last time if they are free."""
        self.ports.update({name: _free_port(self.ports[name]) for name in ("server", "registry")})
        # Those of last time stay known where another process serves on them now.
        with suppress(FileExistsError), (self.cache / "ports.json").open("x") as file:
            file.write(json.dumps(self.ports))
        server = Server(self.root, self.ports["server"])
        with registry.running(self.cache / "registry", self.ports["registry"]), server.running():
            yield server

    def resigned(self, repository: str, key: str) -> dict[str, bytes]:
        """Path → content of an apt repository's signatures by another key, for `Server.replaced`.

        `repository` is a path such as `/linux.mellanox.com/public/repo/doca/3.5.0/ubuntu24.04/x86_64/`.
        """
        release = (self.root / repository.strip("/") / "Release").read_bytes()
        return {f"/{repository.strip('/')}/{name}": data for name, data in self.keys.sign(release, key).items()}


class Making:
    """Make the stand-in in a folder, in containers on a bootstrapped Debian 13; BuildKit caches the steps."""

    def __init__(self, cache: Path, log: Callable[[str], None]) -> None:
        self.cache, self.log = cache, log
        self.base = bootstrap(["linux/amd64"], cache_folder(), release="trixie", log=log)
        self.docker: Mapping[str, str] = find_engine(os.environ).environment

    def folder(self, name: str) -> Path:
        """A folder of this name, in which something is made now."""
        self.log(f"making {name}")
        (self.cache / name).mkdir(parents=True)
        return self.cache / name

    def everything(self, *, sources: bool) -> None:
        Keys.make(self.folder("keys"))
        keys = Keys(self.cache / "keys")
        header, toolkit, served = self.folder("header"), self.folder("toolkit"), self.folder("served")
        wheels.nccl_header(header)
        wheels.toolkit(bases.TOOLKIT, toolkit)
        built = self.exported("packages", "packages", nccl=header, keys=keys.public)
        packages.publish(built, served, keys)
        repositories.make(served / "github.com")
        self._archive(served / hpcx.HOST / ARCHIVE.path, sources=sources)
        contexts = {"packages": served / packages.NVIDIA_UBUNTU, "keys": keys.public, "toolkit": toolkit}
        with registry.running(self.cache / "registry", _free_port()) as address:
            for name, (variant, cuda) in bases.images().items():
                self.log(f"making {name}")
                options, tail = bases.build_options(variant, cuda)
                output = f"--output=type=image,name={address}/{name},push=true,compression-level=1"
                self.build("bases", *options, output, tail=tail, contexts=contexts)

    def _archive(self, target: Path, *, sources: bool) -> None:
        """Write the archive of HPC-X."""
        with tempfile.TemporaryDirectory() as table:
            (Path(table) / "libraries").write_text(hpcx.table())
            content = self.exported("content", "hpcx", "--target=content", table=Path(table))
            openmpi = self.exported("openmpi", "hpcx", "--target=sources", table=Path(table)) if sources else None
        known = hpcx.release(ARCHIVE.version)
        hpcx.pack(hpcx.content(hpcx.files(known, ARCHIVE), content, openmpi, ARCHIVE, known), ARCHIVE, target)

    def exported(self, name: str, recipe: str, *options: str, **contexts: Path) -> Path:
        """What a recipe makes, in a folder of this name."""
        folder = self.folder(name)
        self.build(recipe, *options, f"--output=type=local,dest={folder}", contexts=contexts)
        return folder

    def build(self, recipe: str, *options: str, contexts: Mapping[str, Path], tail: str = "") -> None:
        """Run `recipes/<recipe>.Dockerfile`, and `tail` after it, with its folder and other folders as contexts."""
        named = {"debian:13-standin": self.base, **contexts}
        with tempfile.NamedTemporaryFile("w", suffix=".Dockerfile") as file:
            file.write((RECIPES / f"{recipe}.Dockerfile").read_text() + tail)
            file.flush()
            run_program(
                "docker", "buildx", "build", "--progress=plain", "--provenance=false", "--platform=linux/amd64",
                *(word for name, value in named.items() for word in ("--build-context", f"{name}={value}")),
                "--file", file.name, *options, str(RECIPES / recipe),
                env=self.docker,
            )  # fmt: skip


def _digest() -> str:
    """Of all that the stand-in is made from. A fresher base is no reason to make it anew: nobody relies on that."""
    total = hashlib.sha256(repr([wheels.pins("nccl-wheel", "2.32.3"), wheels.pins("cuda", bases.TOOLKIT)]).encode())
    for file in sorted(path for path in HERE.rglob("*") if path.is_file() and path.suffix not in (".pyc", ".md")):
        total.update(file.name.encode() + file.read_bytes() + b"\0")
    return total.hexdigest()


def _remembered(cache: Path) -> dict[str, int]:
    """Ports of last time: with the same addresses, steps that were built stay cached."""
    with suppress(OSError, ValueError):
        return dict(json.loads((cache / "ports.json").read_text()))
    return {name: _free_port() for name in ("server", "registry")}


def _free_port(wanted: int = 0) -> int:
    with socket.socket() as trial:
        # A port that was served from a moment ago is free.
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("", wanted))
        except OSError:
            trial.bind(("", 0))
        return int(trial.getsockname()[1])
