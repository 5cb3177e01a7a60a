"""The complete stand-in. It is created if the cache does not contain it, and served."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from imagebuild.build.base import bootstrap
from imagebuild.build.bundle import gateway_address
from imagebuild.core.files import cache_folder
from imagebuild.core.run import run_program
from imagebuild.oci.engine import find_engine
from tests.upstream import bases, hpcx, packages, registry, repositories, wheels
from tests.upstream.keys import Keys
from tests.upstream.server import Server

HERE = Path(__file__).parent
CACHE = cache_folder().absolute().parent / "upstream"
"""The folder with a stand-in for each release of Ubuntu, shared by all tests."""
RECIPES = HERE / "recipes"
ADDRESSES = (
    "https://content.mellanox.com/",
    "https://linux.mellanox.com/",
    "http://linux.mellanox.com/",
    "https://developer.download.nvidia.com/",
    "https://github.com/",
)
PROGRAMS = {"docker-registry": "docker-registry", "git": "git", "gpg": "gnupg", "gpg-agent": "gpg-agent"}
"""Maps each required program to its package."""


@dataclass
class Upstream:
    """Local servers that replace the upstream servers of the image `hpcx`, for the targets with one base image."""

    cuda: bases.Cuda
    gateway: str
    """The address of the engine's bridge, at which the engine and its containers reach this machine."""
    ports: dict[str, int] = field(default_factory=dict)
    """The ports of `server` and `registry` while they run."""

    @property
    def folder(self) -> Path:
        return CACHE / self.cuda.os

    @property
    def root(self) -> Path:
        """The folder with the served files: `root/<host>/<path>`."""
        return self.folder / "served"

    @property
    def content(self) -> Path:
        """Compiled parts of HPC-X, for `hpcx.content`."""
        return self.folder / "content"

    @property
    def keys(self) -> Keys:
        return Keys(self.folder / "keys")

    def archive(self, cpu: str = "x86_64") -> hpcx.Distribution:
        """The archive of HPC-X that is served for a CPU."""
        return hpcx.Distribution(self.cuda.os, 13, cpu)

    @classmethod
    def make(cls, cuda: bases.Cuda, *, sources: bool) -> Upstream:
        """Create the stand-in if the cache does not contain it, or contains it from other recipes.

        `sources` adds source archives of Open MPI that can be compiled. They take longer than all other parts.
        """
        upstream = cls(cuda, gateway_address(find_engine(os.environ)))
        upstream.folder.mkdir(parents=True, exist_ok=True)
        stamp, wanted = upstream.folder / "made-from", [_digest(), "sources"][: 1 + sources]
        with (upstream.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not stamp.is_file() or stamp.read_text().split()[: 1 + sources] != wanted:
                stamp.unlink(missing_ok=True)
                for name in ("keys", "header", "packages", "content", "openmpi", "toolkit", "served"):
                    shutil.rmtree(upstream.folder / name, ignore_errors=True)
                Making(upstream).everything(sources=sources)
                stamp.write_text(" ".join(wanted))
        return upstream

    @property
    def configuration(self) -> str:
        """The YAML configuration of imagebuild that uses the stand-in as mirrors."""
        base = f"http://{self.gateway}:{self.ports['server']}"
        # Registries on the loopback interface may use plain HTTP.
        lines = ["mirrors:", f"  images: {{docker.io: '127.0.0.1:{self.ports['registry']}'}}", "  downloads:"]
        return "\n".join([*lines, *(f"    {a}: {base}/{a.split('//')[1]}" for a in ADDRESSES), ""])

    @contextmanager
    def serve(self) -> Iterator[Server]:
        """Run the server and the registry. Use the ports of the first run if they are free.

        The engine's cache stays valid as long as the addresses do not change.
        """
        file = self.folder / "ports.json"
        wanted = json.loads(file.read_text()) if file.exists() else {"server": 0, "registry": 0}
        self.ports |= {name: registry.free_port(port) for name, port in wanted.items()}
        if not file.exists():
            file.write_text(json.dumps(self.ports))
        server = Server(self.root, self.ports["server"])
        with registry.running(self.folder / "registry", self.ports["registry"]), server.running():
            yield server

    def resigned(self, repository: str, key: str) -> dict[str, bytes]:
        """Map the paths of an apt repository's signatures to signatures by another key, for `Server.replaced`.

        `repository` is a path such as `/linux.mellanox.com/public/repo/doca/3.5.0/ubuntu24.04/x86_64/`.
        """
        release = (self.root / repository.strip("/") / "Release").read_bytes()
        return {f"/{repository.strip('/')}/{name}": data for name, data in self.keys.sign(release, key).items()}


class Making:
    """The creation of the stand-in, in containers on a bootstrapped Debian 13. BuildKit caches the steps."""

    def __init__(self, upstream: Upstream) -> None:
        self.upstream = upstream
        self.base = bootstrap(["linux/amd64"], cache_folder(), release="trixie")
        self.docker: Mapping[str, str] = find_engine(os.environ).environment

    def everything(self, *, sources: bool) -> None:
        header, served, keys = (self.folder(name) for name in ("header", "served", "keys"))
        Keys.make(keys)
        wheels.take("nccl-wheel", "2.32.3", "nvidia/nccl/include/nccl.h", header / "nccl.h")
        images = bases.images(self.upstream.cuda)
        versions = {cuda.toolkit for _, cuda in images.values()}
        toolkits = {version: self.folder(f"toolkit/{version}") for version in versions}
        for version, toolkit in toolkits.items():
            wheels.take("cuda", version, f"nvidia/cu{version.partition('.')[0]}", toolkit / "cuda")
        public = self.upstream.keys.public
        built = self.exported("packages", "packages", nccl=header, keys=public)
        packages.publish(built, served, self.upstream.keys)
        repositories.make(served / "github.com")
        self._archives(served / hpcx.HOST, sources=sources)
        contexts = {"packages": served / packages.NVIDIA_UBUNTU, "keys": public}
        with registry.running(self.upstream.folder / "registry") as address:
            for name, (variant, cuda) in images.items():
                options, tail = bases.build_options(variant, cuda)
                output = f"--output=type=image,name={address}/{name},push=true,compression-level=1"
                used = {**contexts, "toolkit": toolkits[cuda.toolkit]}
                self.build("bases", *options, output, tail=tail, contexts=used)
                run_program("docker", "image", "rm", f"{address}/{name}", env=self.docker)

    def _archives(self, folder: Path, *, sources: bool) -> None:
        """Write the archives of HPC-X."""
        with tempfile.TemporaryDirectory() as table:
            (Path(table) / "libraries").write_text(hpcx.table())
            content = self.exported("content", "hpcx", "--target=content", table=Path(table))
            openmpi = self.exported("openmpi", "hpcx", "--target=sources", table=Path(table)) if sources else None
        for archive in map(self.upstream.archive, hpcx.MACHINES):
            known = hpcx.release(archive.version)
            files = hpcx.content(hpcx.files(known, archive), content, openmpi, archive, known)
            hpcx.pack(files, archive, folder / archive.path)

    def exported(self, name: str, recipe: str, *options: str, **contexts: Path) -> Path:
        """Run a recipe, and export its files to a folder of the cache; return the folder."""
        folder = self.folder(name)
        self.build(recipe, *options, f"--output=type=local,dest={folder}", contexts=contexts)
        return folder

    def build(self, recipe: str, *options: str, contexts: Mapping[str, Path], tail: str = "") -> None:
        """Build `recipes/<recipe>.Dockerfile` with the lines `tail` at its end.

        The build context is the folder of the recipe. `contexts` are further folders.
        """
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

    def folder(self, name: str) -> Path:
        """Create a folder in the cache."""
        folder = self.upstream.folder / name
        folder.mkdir(parents=True)
        return folder


def _digest() -> str:
    """Return the digest of all inputs of the stand-in, except the base image. A newer base needs no new stand-in."""
    pins = [wheels.pins("nccl-wheel", "2.32.3"), *(wheels.pins("cuda", cuda.toolkit) for cuda in bases.known())]
    total = hashlib.sha256(repr(pins).encode())
    for file in sorted(path for path in HERE.rglob("*") if path.is_file() and path.suffix not in (".pyc", ".md")):
        total.update(file.name.encode() + file.read_bytes() + b"\0")
    return total.hexdigest()
