"""Sources in git, fetched by commit into one bare repository, and checked out from it.

A commit's submodules come with it. git names everything by what it holds, so what has the name is what was asked for.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from imagebuild import programs
from imagebuild.apt import Run
from imagebuild.errors import CommandError, ConfigError, ResultError
from imagebuild.fields import Commit

MODULE = re.compile(r"submodule\.(?P<name>.*)\.(?P<key>path|url|update)\n(?P<value>.*)", re.DOTALL)


@dataclass(frozen=True)
class Submodule:
    """A commit of another repository in a folder of a commit."""

    path: str
    url: str
    commit: Commit


def parse_modules(listing: str, links: Mapping[str, Commit], url: str) -> Iterator[Submodule]:
    """Submodules of a commit: `listing` is its .gitmodules as `git config --null --list` prints it, `links` are the
    paths that the commit has. Raises ConfigError for a link without address.
    """
    modules: dict[str, dict[str, str]] = {}
    for entry in filter(None, listing.split("\0")):
        if found := MODULE.fullmatch(entry):
            modules.setdefault(found["name"], {})[found["key"]] = found["value"]
    by_path = {module.get("path"): module for module in modules.values()}
    for path, commit in links.items():
        module = by_path.get(path, {})
        if module.get("update") == "none":
            continue
        if "url" not in module:
            raise ConfigError(f"{url}: the submodule {path} has no address in .gitmodules")
        yield Submodule(path, resolved(module["url"], url), commit)


def resolved(url: str, parent: str) -> str:
    """The address of a submodule, which may be relative to its parent's."""
    if not url.startswith(("./", "../")):
        return url
    base = urlsplit(parent)
    return urlunsplit(base._replace(path=os.path.normpath(f"{base.path.rstrip('/')}/{url}")))


@dataclass(frozen=True)
class GitStore:
    """A bare repository with commits of many."""

    folder: Path
    mirrored: Callable[[str], str] = str
    """Address → where to fetch it from."""
    environ: Mapping[str, str] = field(default_factory=dict)
    run: Run = programs.run

    def git(self, *words: str, env: Mapping[str, str] | None = None) -> str:
        # Whoever copied a bundle to this machine need not be its user.
        trusted = ("git", "-c", "safe.directory=*", "-c", "advice.detachedHead=false", f"--git-dir={self.folder}")
        return self.run(*trusted, *words, env={"GIT_TERMINAL_PROMPT": "0", **self.environ, **(env or {})})

    def has(self, commit: Commit) -> bool:
        try:
            self.git("rev-parse", "--verify", "--quiet", f"refs/imagebuild/{commit}^{{commit}}")
        except CommandError:
            return False
        return True

    def fetch(self, url: str, commit: Commit) -> None:
        """Get a commit and its submodules. Raises CommandError if the server does not have it."""
        if not self.folder.exists():
            self.run("git", "init", "--quiet", "--bare", str(self.folder))
        if not self.has(commit):
            self._fetch_one(self.mirrored(url), commit)
        for module in self.submodules(url, commit):
            self.fetch(module.url, module.commit)

    def _fetch_one(self, address: str, commit: Commit) -> None:
        try:
            self.git("fetch", "--quiet", "--depth=1", "--no-tags", "--no-write-fetch-head", address, commit)
        except CommandError:  # not every server gives a commit by its name, or without its history
            self.git("fetch", "--quiet", "--no-tags", "--no-write-fetch-head", address, f"+refs/*:refs/from/{commit}/*")
        try:
            self.git("update-ref", f"refs/imagebuild/{commit}", commit)
        except CommandError:
            raise CommandError(f"{address}: has no commit {commit}") from None

    def submodules(self, url: str, commit: Commit) -> tuple[Submodule, ...]:
        """Submodules of a commit that is here. Raises ConfigError as `parse_modules`."""
        tree = self.git("ls-tree", "-r", "-z", commit).split("\0")
        entries = [line.partition("\t") for line in tree if line.startswith("160000 ")]
        links = {path: about.split()[2] for about, _, path in entries}
        if not links:
            return ()
        listing = self.git("config", "--null", "--list", "--blob", f"{commit}:.gitmodules")
        return tuple(parse_modules(listing, links, url))

    def checkout(self, url: str, commit: Commit, target: Path) -> None:
        """Write the files of a commit and of its submodules; nothing of git's own is among them."""
        with tempfile.TemporaryDirectory(prefix="imagebuild-") as scratch:
            index = {"GIT_INDEX_FILE": f"{scratch}/index"}
            self.git("read-tree", commit, env=index)
            self.git("--work-tree", str(target), "checkout-index", "--all", "--force", f"--prefix={target}/", env=index)
        for module in self.submodules(url, commit):
            (target / module.path).mkdir(parents=True, exist_ok=True)
            self.checkout(module.url, module.commit, target / module.path)

    def check(self, url: str, commit: Commit) -> None:
        """Raise ResultError if anything of a commit or its submodules is missing or damaged."""
        try:
            self.git("fsck", "--full", "--no-dangling", "--no-progress", commit)
            modules = self.submodules(url, commit)
        except CommandError as error:
            raise ResultError(f"{self.folder}: {url} {commit}: {error}; make the bundle again") from None
        for module in modules:
            self.check(module.url, module.commit)


@contextmanager
def environment(ca: Path | None, netrc: Path | None) -> Iterator[dict[str, str]]:
    """Variables that give git a CA bundle and passwords; git reads netrc only in the home folder."""
    result = {"GIT_SSL_CAINFO": str(ca)} if ca else {}
    with tempfile.TemporaryDirectory(prefix="imagebuild-") as home:
        if netrc:
            (Path(home) / ".netrc").symlink_to(netrc.absolute())
            own = os.environ.get("GIT_CONFIG_GLOBAL") or str(Path.home() / ".gitconfig")
            result |= {"HOME": home, "GIT_CONFIG_GLOBAL": own}
        yield result
