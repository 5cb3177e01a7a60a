"""A site on the engine's bridge, with what builds fetch: an archive, sources in git, a repository of packages."""

from __future__ import annotations

import base64
import hashlib
import posixpath
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from imagebuild.build import gateway_address
from imagebuild.oci import find_engine
from tests.conftest import git, ran

PASSWORD = "geheim-of-the-mirror"


class Content:
    """Files for a site, made anew for each test."""

    def __init__(self, folder: Path, nonce: str) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "tool.tar").write_bytes(b"archive of " + nonce.encode())
        self.sha256 = hashlib.sha256((folder / "tool.tar").read_bytes()).hexdigest()
        self.commits = self._git(nonce)
        self._packages(nonce)

    def _git(self, nonce: str) -> dict[str, str]:
        """Repositories, and the commits in them: `main` has `sub` as a submodule."""
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
        """A repository of one package; it is not signed."""
        control = self.folder.with_name("deb") / "DEBIAN" / "control"
        control.parent.mkdir(parents=True)
        about = "Package: mirrored\nVersion: 1\nArchitecture: all\nMaintainer: x\nDescription: for a test\n"
        control.write_text(about)
        (control.parent.parent / "mirrored").write_text(nonce)
        (self.folder / "repo").mkdir()
        package = self.folder / "repo" / "mirrored_1_all.deb"
        ran("dpkg-deb", "--root-owner-group", "--build", control.parent.parent, package, check=True)
        digest, size = hashlib.sha256(package.read_bytes()).hexdigest(), package.stat().st_size
        index = f"{about}Filename: ./{package.name}\nSize: {size}\nSHA256: {digest}\n"
        (self.folder / "repo" / "Packages").write_text(index)


class Site(ThreadingHTTPServer):
    """Serves a folder, and remembers what it was asked for."""

    def __init__(self, folder: Path, login: str | None) -> None:
        self.asked: list[str] = []
        site = self

        class Handler(SimpleHTTPRequestHandler):
            def do_GET(self) -> None:
                site.asked.append(posixpath.normpath(self.path))
                given = self.headers.get("Authorization", "")
                if login and given != "Basic " + base64.b64encode(login.encode()).decode():
                    self.send_response(401)
                    self.send_header("WWW-Authenticate", 'Basic realm="site"')
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                else:
                    super().do_GET()

            def log_message(self, *_: object) -> None:
                pass

        address = gateway_address(find_engine())
        super().__init__((address, 0), partial(Handler, directory=str(folder)))
        self.host = f"{address}:{self.server_address[1]}"
        self.url = f"http://{self.host}"


@contextmanager
def served(folder: Path, login: str | None = None) -> Iterator[Site]:
    site = Site(folder, login)
    thread = Thread(target=site.serve_forever)
    thread.start()
    try:
        yield site
    finally:
        site.shutdown()
        site.server_close()
        thread.join()
