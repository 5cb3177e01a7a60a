"""An HTTP server on the engine's bridge with files for builds: an archive, Git repositories, a package repository."""

from __future__ import annotations

import hashlib
import posixpath
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from imagebuild.build.bundle import gateway_address
from imagebuild.oci.engine import find_engine
from tests.conftest import git
from tests.upstream.packages import package_with
from tests.upstream.server import Server

PASSWORD = "geheim-of-the-mirror"


class Content:
    """The files of a site. `nonce` makes them unique to a test."""

    def __init__(self, folder: Path, nonce: str) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "tool.tar").write_bytes(b"archive of " + nonce.encode())
        self.sha256 = hashlib.sha256((folder / "tool.tar").read_bytes()).hexdigest()
        self.commits = self._git(nonce)
        self._packages(nonce)

    def _git(self, nonce: str) -> dict[str, str]:
        """Create the repositories `sub` and `main`; return their commits. `sub` is a submodule of `main`."""
        work, commits = self.folder.with_name("work"), {}
        for name in ("sub", "main"):
            (work / name).mkdir(parents=True)
            git(work / name, "init", "--quiet")
            (work / name / f"{name}.c").write_text(nonce)
            (work / name / f"{name}.sh").write_text(nonce)
            (work / name / f"{name}.sh").chmod(0o755)
            (work / name / ".dockerignore").write_text("*\n")
            if name == "main":
                git(work / name, "submodule", "--quiet", "add", str(work / "sub"), "third/sub")
                git(work / name, "config", "-f", ".gitmodules", "submodule.third/sub.url", "../sub.git")
            git(work / name, "add", ".")
            git(work / name, "commit", "--quiet", "-m", nonce)
            git(self.folder, "clone", "--quiet", "--bare", str(work / name), f"{name}.git")
            git(self.folder / f"{name}.git", "update-server-info")
            commits[name] = git(work / name, "rev-parse", "HEAD")
        return commits

    def _packages(self, nonce: str) -> None:
        """Create an unsigned package repository with one package."""
        package = self.folder / "repo/mirrored_1_all.deb"
        package.parent.mkdir()
        package.write_bytes(package_with({"mirrored": nonce.encode()}, "mirrored"))
        digest, size = hashlib.sha256(package.read_bytes()).hexdigest(), package.stat().st_size
        about = f"Package: mirrored\nVersion: 1\nArchitecture: all\nFilename: ./{package.name}\n"
        (package.parent / "Packages").write_text(f"{about}Size: {size}\nSHA256: {digest}\n")


@dataclass(frozen=True)
class Site:
    """A running server, with the paths of its requests."""

    server: Server
    host: str

    @property
    def url(self) -> str:
        return f"http://{self.host}"

    @property
    def asked(self) -> list[str]:
        return [posixpath.normpath(request.path) for request in self.server.requests]


@contextmanager
def served(folder: Path, login: str = "") -> Iterator[Site]:
    with Server(folder, login=login).running() as server:
        yield Site(server, f"{gateway_address(find_engine())}:{server.port}")
