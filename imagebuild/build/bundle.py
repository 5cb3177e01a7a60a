"""Keep all that builds of some targets fetch in one folder, for machines without a network."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import ClassVar, Literal, Protocol
from urllib.parse import quote, unquote, urldefrag, urljoin, urlsplit, urlunsplit

from pydantic import Field

from imagebuild.build.inputs import ArchiveFile, GitCommit, NeededInputs
from imagebuild.core import yaml
from imagebuild.core.errors import CommandError, ConfigError, ResultError
from imagebuild.core.fields import Commit, Model, Platform
from imagebuild.core.files import write_text
from imagebuild.core.http import Fetcher, MissingFile, announced_length, file_sha256, read_chunks, temporary_file
from imagebuild.core.run import RunProgram, run_program
from imagebuild.core.settings import Mirrors
from imagebuild.oci.layout import check_image, copy_to_layout, pull_image
from imagebuild.project.lockfile import Digest, Sha256

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
    run: RunProgram = run_program

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


FILES = "files"
Sink = Callable[[bytes], object]
Start = Callable[[int | None], Sink]
"""Told the length of what comes, if known; returns what takes it."""


class StoredFile(Model):
    """A file that was downloaded."""

    path: str
    """In the bundle's folder."""
    sha256: Sha256
    size: int = Field(ge=0)
    """Bytes."""


def path_of(url: str) -> str:
    """Where a download is kept in the bundle. Raises ConfigError for an address that leaves the folder."""
    address = urlsplit(url)
    name = address.path.lstrip("/") + (f"?{address.query}" if address.query else "")
    path = f"{FILES}/{address.scheme}/{address.netloc}/{quote(name, safe='/+~%=,@:!-._()')}"
    if ".." in path.split("/") or not address.netloc or name.endswith("/") or not name:
        raise ConfigError(f"{url}: is not the address of a file")
    return path


class DownloadStore:
    """Keeps downloads; may be used by several threads."""

    def __init__(self, folder: Path, files: dict[str, StoredFile]) -> None:
        self.folder = folder
        self.files = files
        """Address → file."""

    def find(self, url: str) -> Path | None:
        """The file of an address, if it is here in full."""
        entry = self.files.get(url)
        if not entry:
            return None
        path = self.folder / entry.path
        return path if path.is_file() and path.stat().st_size == entry.size else None

    def check(self, url: str) -> None:
        """Raise ResultError if a file is missing or has changed."""
        entry, path = self.files[url], self.find(url)
        if path is None or file_sha256(path) != entry.sha256:
            what = "has changed" if path else "is missing or cut off"
            raise ResultError(f"{self.folder / entry.path}: {what}; make the bundle again")


class RecordingStore(DownloadStore):
    """Fetches what it does not have yet, and keeps it."""

    def __init__(self, folder: Path, fetcher: Fetcher, mirrors: Mirrors) -> None:
        super().__init__(folder, {})
        self.fetcher = fetcher
        self.mirrors = mirrors
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    def get(self, url: str, start: Start = lambda _: lambda _: None) -> Path:
        """The file of an address. While it is fetched, `start`'s sink is given each part; of one that is here
        already it is given nothing. Raises NotThere and CommandError as the fetcher, OSError as the sink.
        """
        with self._locks[url]:
            return self.find(url) or self._fetch(url, start)

    def _fetch(self, url: str, start: Start) -> Path:
        path = self.folder / path_of(url)
        content, size = hashlib.sha256(), 0
        where = self.mirrors.download(url)
        with temporary_file(self.folder / FILES) as partial:
            with self.fetcher.open(where) as answer, partial.open("wb") as file:
                sink = start(announced_length(answer))
                held = b""
                for chunk in read_chunks(answer, where):
                    file.write(chunk)
                    content.update(chunk)
                    size += len(chunk)
                    sink(held)
                    held = chunk
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.chmod(0o644)
            partial.replace(path)
        self.files[url] = StoredFile(path=path_of(url), sha256=content.hexdigest(), size=size)
        sink(held)  # the end comes last: whoever has all of it may rely on it being kept
        return path


MANIFEST = "manifest.json"


class BundleManifest(Model):
    """The file `manifest.json` of a bundle."""

    format: Literal[1] = 1
    created: str
    """When it was complete, in UTC. Packages and security updates are those of that time."""
    targets: tuple[str, ...]
    stages: dict[str, tuple[Platform, ...]]
    """Key of a build stage → platforms for which it was built when the bundle was made."""
    files: dict[str, StoredFile]
    """Address → file: archives, keys, packages, wheels."""
    wheels: dict[str, str] = Field(default_factory=dict)
    """File name of a wheel → address."""
    images: dict[str, Digest] = Field(default_factory=dict)
    """Image as FROM names it → what stands in for it: itself, or a bootstrapped base."""
    git: dict[Commit, str] = Field(default_factory=dict)
    """Commit → address of its repository."""


@dataclass(frozen=True)
class Bundle:
    """A bundle that is complete."""

    folder: Path
    manifest: BundleManifest

    GIT: ClassVar[str] = "git"
    IMAGES: ClassVar[str] = "images"

    @classmethod
    def read(cls, folder: Path) -> Bundle:
        """Raises ConfigError if the folder holds no complete bundle."""
        path = folder.absolute() / MANIFEST
        if not path.is_file():
            raise ConfigError(
                f"{folder}: no bundle is here ({MANIFEST} is missing); `imagebuild bundle create` makes one"
            )
        mistakes = yaml.Mistakes()
        document = yaml.load_yaml(path, BundleManifest, mistakes)
        mistakes.stop_if_any()
        assert document is not None
        return cls(folder.absolute(), document.model)

    @cached_property
    def shelf(self) -> DownloadStore:
        return DownloadStore(self.folder, dict(self.manifest.files))

    @cached_property
    def git(self) -> GitStore:
        return GitStore(self.folder / self.GIT)

    @property
    def layout(self) -> Path:
        return self.folder / self.IMAGES

    def contexts(self, wanted: Iterable[str]) -> dict[str, str]:
        """Image → context. Raises ConfigError for an image that the bundle lacks."""
        absent = sorted(set(wanted) - set(self.manifest.images))
        if absent:
            raise ConfigError(f"{self.folder}: the bundle has no {', '.join(absent)}")
        return {image: f"oci-layout://{self.layout}@{self.manifest.images[image]}" for image in wanted}

    def lacks(self, keys: Mapping[str, str], platforms: Iterable[Platform]) -> str:
        """Why a target cannot be built from the bundle; empty if it can. `keys` is stage → key.

        A stage with the same key fetches the same things.
        """
        for stage, key in keys.items():
            if key not in self.manifest.stages:
                return f"the stage {stage} is another than when the bundle was made"
            absent = set(platforms) - set(self.manifest.stages[key])
            if absent:
                return f"it was made without {', '.join(sorted(absent))}"
        return ""

    def damage(self, note: Callable[[str], None]) -> list[str]:
        """What is missing or has changed since the bundle was made."""
        checks: list[tuple[Callable[..., None], tuple[object, ...]]] = []
        checks += [(self.shelf.check, (url,)) for url in self.manifest.files]
        checks += [(check_image, (self.layout, digest)) for digest in sorted(set(self.manifest.images.values()))]
        checks += [(self.git.check, (url, commit)) for commit, url in self.manifest.git.items()]
        note(f"checking {len(checks)} files, images and commits")
        found = []
        for check, arguments in checks:
            try:
                check(*arguments)
            except ResultError as error:
                found.append(str(error))
        return found

    def contradictions(self, need: NeededInputs) -> list[str]:
        """Where the lock wants something else for a target than the bundle has."""
        found = []
        for item in need.stages.values():
            if isinstance(item, GitCommit):
                if item.commit not in self.manifest.git:
                    found.append(f"no commit {item.commit} of {item.url}")
            elif item.url not in self.manifest.files:
                found.append(f"no {item.url}")
            elif isinstance(item, ArchiveFile) and self.manifest.files[item.url].sha256 != item.sha256:
                found.append(f"another {item.url}")
        has = {self.manifest.files[url].sha256 for url in self.manifest.wheels.values()}
        found += [f"no wheel with sha256 {digest}" for digest in sorted(need.wheels - has)]
        found += [f"no image {image}" for image in sorted(need.images - set(self.manifest.images))]
        return found


@dataclass
class Recording:
    """A bundle that is being made."""

    folder: Path
    stages: dict[str, set[Platform]]
    """Key of a build stage → platforms."""
    images: dict[str, str] = field(default_factory=dict)

    @classmethod
    def start(cls, folder: Path, stages: dict[str, set[Platform]]) -> Recording:
        """Raises ConfigError for a folder that has something in it."""
        folder = folder.absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise ConfigError(f"{folder}: is not empty; remove it, or name another folder")
        except OSError as error:
            raise ConfigError(f"{folder}: cannot be written: {error.strerror}") from None
        return cls(folder, stages)

    def add_image(self, image: str, where: str, note: Callable[[str], None]) -> str:
        """Pull an image into the bundle; returns its context."""
        note(f"pulling {image}")
        return self._named(image, pull_image(where, self.folder / Bundle.IMAGES))

    def add_base(self, image: str, context: str) -> str:
        """Copy a bootstrapped base into the bundle; returns its context."""
        layout, _, digest = context.removeprefix("oci-layout://").rpartition("@")
        copy_to_layout(Path(layout), digest, self.folder / Bundle.IMAGES)
        return self._named(image, digest)

    def _named(self, image: str, digest: str) -> str:
        self.images[image] = digest
        return f"oci-layout://{self.folder / Bundle.IMAGES}@{digest}"

    def finish(
        self, files: Mapping[str, StoredFile], wheels: Mapping[str, str], needs: Mapping[str, NeededInputs]
    ) -> None:
        """Write the manifest: from now on it is a bundle."""
        commits = {i.commit: i.url for need in needs.values() for i in need.stages.values() if isinstance(i, GitCommit)}
        manifest = BundleManifest(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            targets=tuple(needs),
            stages={key: tuple(sorted(platforms)) for key, platforms in sorted(self.stages.items())},
            files=dict(sorted(files.items())),
            wheels=dict(sorted(wheels.items())),
            images=dict(sorted(self.images.items())),
            git=commits,
        )
        write_text(self.folder / MANIFEST, manifest.model_dump_json(indent=1, by_alias=True) + "\n")


ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if tag == "a" and name == "href" and value]


def read(text: str, page: str) -> dict[str, tuple[str, str]]:
    """File name → address and sha256, from the page of a project at the address `page`; files without sha256 are
    left out: a lock has it for each.
    """
    if text.lstrip().startswith("{"):
        entries = [(f["url"], f.get("hashes", {}).get("sha256", "")) for f in json.loads(text).get("files", ())]
    else:
        links = _Links()
        links.feed(text)
        entries = []
        for href in links.found:
            url, fragment = urldefrag(href)
            entries.append((url, fragment.removeprefix("sha256=") if fragment.startswith("sha256=") else ""))
    full = [(urljoin(page, url), digest) for url, digest in entries if digest]
    return {unquote(urlsplit(url).path.rpartition("/")[2]): (url, digest) for url, digest in full}


def project_of(file: str) -> str:
    """The normalised name of the project that a wheel is of."""
    return normalized(file.partition("-")[0])


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def write(files: Mapping[str, str], names: Iterable[str]) -> str:
    """A page with links to the wheels `names`; `files` is file name → sha256."""
    links = "".join(f'<a href="/wheels/{escape(n)}#sha256={files[n]}">{escape(n)}</a><br>\n' for n in sorted(names))
    return f"<!DOCTYPE html><html><body>\n{links}</body></html>\n"


class WheelIndex(Protocol):
    """What pip asks."""

    def page(self, project: str) -> str:
        """The page of a project. Raises NotThere."""

    def wheel(self, name: str, start: Start) -> Path:
        """The file of a wheel. Raises NotThere."""


@dataclass(frozen=True)
class StoredIndex:
    """Wheels of a bundle: file name → address."""

    shelf: DownloadStore
    wheels: Mapping[str, str]

    def page(self, project: str) -> str:
        names = [n for n in self.wheels if project_of(n) == normalized(project)]
        if not names:
            raise MissingFile(f"the bundle has no wheel of {project}")
        return write({n: self.shelf.files[self.wheels[n]].sha256 for n in names}, names)

    def wheel(self, name: str, start: Start) -> Path:  # noqa: ARG002 - nothing is fetched
        path = self.shelf.find(self.wheels.get(name, ""))
        if path is None:
            raise MissingFile(f"the bundle has no wheel {name}")
        return path


@dataclass
class RecordingIndex:
    """Fetches wheels from a site's index and keeps them."""

    shelf: RecordingStore
    address: str
    """Of the index: its pages are `<address><project>/`."""
    wanted: frozenset[str]
    """Hashes in the lock."""
    wheels: dict[str, str] = field(default_factory=dict)
    """File name → address, of those that were fetched."""
    _offered: dict[str, tuple[str, str]] = field(default_factory=dict)

    def page(self, project: str) -> str:
        url = f"{self.address}{normalized(project)}/"
        text = self.shelf.fetcher.read(url, ACCEPT).decode("utf-8", "replace")
        found = {name: entry for name, entry in read(text, url).items() if entry[1] in self.wanted}
        self._offered.update(found)
        return write({name: digest for name, (_, digest) in found.items()}, found)

    def wheel(self, name: str, start: Start) -> Path:
        if name not in self._offered:
            raise MissingFile(f"no page offered {name}")
        url, digest = self._offered[name]
        self.wheels[name] = url  # before pip has all of it, for the build may end then
        try:
            path = self.shelf.get(url, start)
            if self.shelf.files[url].sha256 != digest:
                raise ResultError(f"{url}: its sha256 is not {digest}, as the index says")
        except BaseException:
            del self.wheels[name]
            raise
        return path
