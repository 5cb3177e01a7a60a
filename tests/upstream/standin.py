"""All of the stand-in: made where the cache lacks it, and served."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from imagebuild.core import run_program, which
from imagebuild.oci import find_engine
from tests.upstream import bases, hpcx, packages, registry, repositories, wheels
from tests.upstream.keys import CUDA, DOCA, Keys
from tests.upstream.server import Server
from tests.upstream.workshop import RECIPES, Workshop

HERE = Path(__file__).parent
ADDRESSES = (
    "https://content.mellanox.com/",
    "https://linux.mellanox.com/",
    "http://linux.mellanox.com/",
    "https://developer.download.nvidia.com/",
    "https://github.com/",
)
PROGRAMS = {"docker-registry": "docker-registry", "git": "git", "gpg": "gnupg", "gpg-agent": "gpg-agent"}
"""What must be on the machine → the package that has it."""


def missing() -> list[str]:
    """Packages that this machine needs for the stand-in and lacks."""
    return [package for program, package in PROGRAMS.items() if not which(program)]


@dataclass
class Upstream:
    """The servers that the image `hpcx` is built from, on this machine."""

    root: Path
    """Files served, as root/<host>/<path of the address>."""
    images: Mapping[str, str]
    """`repository:tag` → digest of the image index."""
    keys: Keys
    content: Path
    """Parts of which `hpcx.pack` makes an archive."""
    cache: Path
    gateway: str
    """The engine's bridge, by which its daemon and its containers reach this machine."""
    ports: dict[str, int] = field(default_factory=dict)

    @classmethod
    def make(cls, cache: Path, log: Callable[[str], None] = lambda _line: None) -> Upstream:
        """Make what the cache folder lacks, after others who do so. Raises imagebuild's errors where that fails."""
        workshop = Workshop.open(cache, log)
        with (workshop.cache / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return cls._make(workshop)

    @classmethod
    def _make(cls, workshop: Workshop) -> Upstream:
        # A fresher base is no reason to make anything anew: nobody relies on what this holds.
        recipe = {n: (RECIPES / n, RECIPES / f"{n}.Dockerfile") for n in ("packages", "hpcx", "bases")}
        code = {name: HERE / f"{name}.py" for name in ("bases", "hpcx", "keys", "packages", "repositories", "wheels")}
        keys = Keys(workshop.piece("keys", [code["keys"]], Keys.make))
        header = workshop.piece(
            "nccl-header", [code["wheels"], str(wheels.pins("nccl-wheel", "2.32.3"))], wheels.nccl_header
        )

        def compile_packages(folder: Path) -> None:
            workshop.build("packages", f"--output=type=local,dest={folder}", nccl=header)

        built = workshop.piece("packages", [*recipe["packages"], header], compile_packages)
        signed = workshop.piece(
            "repositories", [built, code["packages"], code["keys"], keys.fingerprint(CUDA), keys.fingerprint(DOCA)],
            lambda folder: packages.publish(built, folder, keys),
        )  # fmt: skip
        content = workshop.piece(
            "hpcx-content", [*(p for p in (RECIPES / "hpcx").iterdir() if p.is_file()), recipe["hpcx"][1]],
            lambda folder: workshop.build("hpcx", f"--output=type=local,dest={folder}"),
        )  # fmt: skip
        archives = workshop.piece(
            "archives", [content, hpcx.TEXTS, code["hpcx"]], lambda folder: hpcx.make(content, folder)
        )
        git = workshop.piece("git", [code["repositories"], repositories.PROJECTS], repositories.make)
        versions = sorted({c.toolkit for c in bases.CUDA})
        toolkits = {v: workshop.piece(f"toolkit-{v}", [str(wheels.pins("cuda", v))], _toolkit(v)) for v in versions}

        def push(folder: Path) -> None:
            with registry.running(folder / "registry", _free_port()) as address:
                made = bases.push(workshop, address, signed / packages.NVIDIA_UBUNTU, keys.public, toolkits)
            (folder / "images.json").write_text(json.dumps(made))

        stored = workshop.piece("images", [*recipe["bases"], code["bases"], signed, *map(str, toolkits)], push)
        root = workshop.cache / "root"
        root.mkdir(exist_ok=True)
        for host, folder in {
            packages.NVIDIA: signed / packages.NVIDIA,
            packages.MELLANOX: signed / packages.MELLANOX,
            "content.mellanox.com": archives,
            "github.com": git,
        }.items():
            # It may be there, and another process may serve it.
            if not (root / host).is_symlink():
                (root / host).symlink_to(folder)
        images = json.loads((stored / "images.json").read_text())
        return cls(root, images, keys, content, workshop.cache, _gateway(), _remembered(workshop.cache))

    @property
    def address(self) -> str:
        """Base of what is served, for the engine's daemon and for its containers."""
        return f"http://{self.gateway}:{self.ports['server']}"

    @property
    def registry(self) -> str:
        """The registry as the daemon reaches it; being on the loopback, it may speak plain HTTP."""
        return f"127.0.0.1:{self.ports['registry']}"

    @property
    def configuration(self) -> str:
        """A configuration of a user who has these mirrors, as YAML."""
        lines = ["mirrors:", "  images:", f"    docker.io: {self.registry}", "  downloads:"]
        return "\n".join([*lines, *(f"    {a}: {self.address}/{a.split('//')[1]}" for a in ADDRESSES), ""])

    @contextmanager
    def serve(self) -> Iterator[Server]:
        """Run the server and the registry, on the ports of last time if they are free."""
        ports = {name: _free_port(self.ports.get(name, 0)) for name in ("server", "registry")}
        self.ports.update(ports)
        # Those of last time stay known where another process serves on them now.
        with suppress(FileExistsError), (self.cache / "ports.json").open("x") as file:
            file.write(json.dumps(ports))
        server = Server(self.root, ports["server"])
        with registry.running(self.cache / "images" / "registry", ports["registry"]), server.running():
            yield server

    def resigned(self, repository: str, key: str) -> dict[str, bytes]:
        """Path → content of an apt repository's signatures by another key, for `Server.replace`.

        `repository` is a path such as `/linux.mellanox.com/public/repo/doca/3.5.0/ubuntu24.04/x86_64/`.
        """
        release = (self.root / repository.strip("/") / "Release").read_bytes()
        return {f"/{repository.strip('/')}/{name}": data for name, data in self.keys.sign(release, key).items()}


def _toolkit(version: str) -> Callable[[Path], None]:
    return lambda folder: wheels.toolkit(version, folder)


def _gateway() -> str:
    found = find_engine(os.environ)
    words = ("docker", "network", "inspect", "bridge", "--format", "{{(index .IPAM.Config 0).Gateway}}")
    return run_program(*words, env=found.environment, timeout=20).strip()


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
