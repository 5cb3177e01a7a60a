"""All of the stand-in: made where the cache lacks it, and served."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from imagebuild.core import Arch, run_program, which
from imagebuild.oci import find_engine
from tests.upstream import bases, hpcx, packages, registry, repositories, wheels
from tests.upstream.keys import Keys
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
    """Compiled parts of HPC-X, for `hpcx.content`."""
    cache: Path
    gateway: str
    """The engine's bridge, by which its daemon and its containers reach this machine."""
    ports: dict[str, int] = field(default_factory=dict)

    @classmethod
    def make(
        cls,
        cache: Path,
        systems: Collection[str],
        *,
        sources: bool,
        archs: Sequence[Arch] = ("amd64",),
        log: Callable[[str], None] = lambda _line: None,
    ) -> Upstream:
        """Make what the cache folder lacks, after others who do so. Raises imagebuild's errors where that fails.

        `systems` are those of the targets to build, such as `13.2.1-ubuntu24.04`. Without `sources`, those of Open MPI
        cannot be compiled: to make them takes longer than all else. Images of Ubuntu are for `archs`.
        """
        workshop = Workshop.open(cache, archs, log)
        with (workshop.cache / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return cls._make(workshop, systems, sources=sources)

    @classmethod
    def _make(cls, workshop: Workshop, systems: Collection[str], *, sources: bool) -> Upstream:
        # A fresher base is no reason to make anything anew: nobody relies on what this holds.
        recipe = {n: (RECIPES / n, RECIPES / f"{n}.Dockerfile") for n in ("packages", "hpcx", "bases")}
        code = {name: HERE / f"{name}.py" for name in ("bases", "hpcx", "keys", "packages", "repositories", "wheels")}
        keys = Keys(workshop.piece("keys", [code["keys"]], Keys.make))
        header = workshop.piece(
            "nccl-header", [code["wheels"], str(wheels.pins("nccl-wheel", "2.32.3"))], wheels.nccl_header
        )

        def compile_packages(folder: Path) -> None:
            workshop.build("packages", f"--output=type=local,dest={folder}", nccl=header, keys=keys.public)

        built = workshop.piece("packages", [*recipe["packages"], header, keys.public], compile_packages)
        signed = workshop.piece(
            "repositories", [built, code["packages"], packages.EVIDENCE, keys.public],
            lambda folder: packages.publish(built, folder, keys),
        )  # fmt: skip
        git = workshop.piece("git", [code["repositories"], repositories.PROJECTS], repositories.make)
        hosts = {
            packages.NVIDIA: signed / packages.NVIDIA,
            packages.MELLANOX: signed / packages.MELLANOX,
            "github.com": git,
        }
        root = workshop.cache / "served"
        for host, folder in hosts.items():
            _link(root / host, folder)
        content, compiled = cls._compile(workshop, recipe["hpcx"], sources=sources)
        for archive in hpcx.distributions(systems):
            known = hpcx.release(archive.version)
            tree = hpcx.content(hpcx.files(known, archive), content, compiled, archive, known)
            inputs = [content, code["hpcx"], hpcx.EVIDENCE, *([compiled] if compiled else [])]
            made = workshop.piece(archive.name, inputs, partial(_pack, tree, archive))
            _link(root / hpcx.HOST / archive.path, made / "archive")
        images = cls._push(workshop, systems, [*recipe["bases"], code["bases"], bases.EVIDENCE, signed], signed, keys)
        return cls(root, images, keys, content, workshop.cache, _gateway(), _remembered(workshop.cache))

    @staticmethod
    def _compile(workshop: Workshop, recipe: tuple[Path, Path], *, sources: bool) -> tuple[Path, Path | None]:
        """The folder of compiled parts of HPC-X, and if wanted that of Open MPI's sources."""
        scripts, dockerfile = recipe

        def compile_parts(folder: Path) -> None:
            with tempfile.TemporaryDirectory() as table:
                (Path(table) / "libraries").write_text(hpcx.table())
                output = f"--output=type=local,dest={folder}"
                workshop.build("hpcx", "--target=content", output, table=Path(table))

        def pack_sources(folder: Path) -> None:
            workshop.build("hpcx", "--target=sources", f"--output=type=local,dest={folder}", table=scripts)

        parts = [scripts / name for name in ("ucx.sh", "ucc.sh", "stubs.sh")]
        content = workshop.piece("hpcx-content", [*parts, dockerfile, hpcx.table()], compile_parts)
        if not sources:
            return content, None
        return content, workshop.piece("hpcx-sources", [scripts / "openmpi.sh", dockerfile], pack_sources)

    @staticmethod
    def _push(
        workshop: Workshop, systems: Collection[str], inputs: Collection[Path], signed: Path, keys: Keys
    ) -> dict[str, str]:
        """`repository:tag` → digest of the base images for these systems."""
        wanted = bases.images(systems)
        versions = sorted({cuda.toolkit for _, _, cuda in wanted.values() if cuda} | {bases.TOOLKIT})
        toolkits = {v: workshop.piece(f"toolkit-{v}", [str(wheels.pins("cuda", v))], _toolkit(v)) for v in versions}
        contexts = {"packages": signed / packages.NVIDIA_UBUNTU, "keys": keys.public}
        made = {}
        with registry.running(workshop.cache / "registry", _free_port()) as address:
            for name, what in wanted.items():
                toolkit = toolkits[what[2].toolkit if what[2] else bases.TOOLKIT]

                def push(folder: Path, name: str = name, what: bases.Image = what, toolkit: Path = toolkit) -> None:
                    digest = bases.push(workshop, address, name, what, {**contexts, "toolkit": toolkit})
                    (folder / "digest").write_text(digest)

                made_from = [*inputs, str(what), *workshop.archs[1:]]
                made[name] = (workshop.piece(name.replace("/", "-"), made_from, push) / "digest").read_text()
        return made

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
        with registry.running(self.cache / "registry", ports["registry"]), server.running():
            yield server

    def resigned(self, repository: str, key: str) -> dict[str, bytes]:
        """Path → content of an apt repository's signatures by another key, for `Server.replace`.

        `repository` is a path such as `/linux.mellanox.com/public/repo/doca/3.5.0/ubuntu24.04/x86_64/`.
        """
        release = (self.root / repository.strip("/") / "Release").read_bytes()
        return {f"/{repository.strip('/')}/{name}": data for name, data in self.keys.sign(release, key).items()}


def _pack(tree: hpcx.Tree, archive: hpcx.Distribution, folder: Path) -> None:
    hpcx.pack(tree, archive, folder / "archive")


def _link(link: Path, target: Path) -> None:
    """It may be there, and another process may serve it; what an older layout of the cache has there goes."""
    if not link.is_symlink() or link.readlink() != target:
        if link.is_dir() and not link.is_symlink():
            shutil.rmtree(link)
        link.unlink(missing_ok=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)


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
