"""Compute what builds fetch, and give it to BuildKit from mirrors.

BuildKit gets what imagebuild fetched as named contexts that replace stages and images, and steps that install packages
get secrets. Neither is in the Dockerfile, and steps compare inputs by content: builds with and without mirrors share
their cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tarfile
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal, get_args
from urllib.parse import quote, urlsplit, urlunsplit

import jinja2
from pydantic import Field

from imagebuild.build.bake import BuildInputs
from imagebuild.core.errors import Absent, CommandError, ConfigError, ResultError
from imagebuild.core.fields import ARCHS, Arch, Commit, Model, Platform
from imagebuild.core.files import file_sha256, read_text, temporary_file, write_text
from imagebuild.core.http import Downloads, login_for
from imagebuild.core.run import RunProgram, run_program
from imagebuild.core.settings import Settings, git_environment, pip_conf_text
from imagebuild.oci import layout
from imagebuild.oci.engine import Endpoint
from imagebuild.oci.layout import CREATED, ImageSettings, Layout
from imagebuild.project.lockfile import (
    BaseImage,
    Lock,
    Sha256,
    WheelSet,
    commit_of,
    digest_of,
    hash_of,
    wheels_of,
)
from imagebuild.render import renderer
from imagebuild.render.recipe import Recipe


@dataclass(frozen=True)
class Download:
    """Describe what a stage downloads."""

    kind: Literal["archive", "git", "key"]
    url: str
    pin: str = ""
    """An archive's sha256, or a commit. Builds check the fingerprint of a repository's key, which the lock has."""


@dataclass(frozen=True)
class WheelFiles:
    """Describe wheels for an architecture, as lines of a requirements file, each with its sha256."""

    arch: Arch
    requirements: tuple[str, ...]


@dataclass(frozen=True)
class NeededInputs:
    """List what one target needs from elsewhere, besides packages."""

    stages: dict[str, Download]
    """Stage that holds nothing else → what it downloads."""
    images: frozenset[str]
    """Images as FROM names them, with digest."""
    wheels: frozenset[WheelFiles]


def needed_inputs(recipe: Recipe, lock: Lock, stages: Iterable[str], platforms: Iterable[str]) -> NeededInputs:
    """Return what a target whose Dockerfile has these stages fetches for the platforms.

    Raises ConfigError if the lock lacks a source.
    """
    present, wanted = frozenset(stages), frozenset(platforms)
    archs = [arch for arch in ARCHS if f"linux/{arch}" in wanted]
    downloads: dict[str, Download] = {}  # the names of stages are those that `macros.j2` gives them
    for name in recipe.stages:
        for arch, url in recipe.archives(name).items():
            if arch in archs:
                downloads[f"{name}-source-{arch}"] = Download("archive", url, hash_of(lock, name, url))
        if git := recipe.git(name):
            downloads[f"{name}-source"] = Download("git", git.url, commit_of(lock, git))
        if repository := renderer.package_repository(recipe, name, lock, stage=True):
            downloads[f"{name}-key"] = Download("key", repository["key"])
    sources = tuple(recipe.sources())
    wheel_sets = [wheels_of(lock, source) for source in sources if isinstance(source, WheelSet)]
    return NeededInputs(
        {stage: download for stage, download in downloads.items() if stage in present},
        frozenset(digest_of(lock, source.reference) for source in sources if isinstance(source, BaseImage)),
        frozenset(
            WheelFiles(arch, tuple(f"{w.name}=={w.version} --hash=sha256:{w.sha256[arch]}" for w in wheels))
            for wheels in wheel_sets
            for arch in archs
        ),
    )


FILES = "files"


class StoredFile(Model):
    """Describe a file that was downloaded."""

    path: str
    """Path in the store's folder."""
    sha256: Sha256
    size: int = Field(ge=0)
    """Bytes."""


def stored_path(url: str) -> str:
    """Return where a store keeps a download. Raises ConfigError for an address that is not that of a file."""
    address = urlsplit(url)
    name = address.path.lstrip("/") + (f"?{address.query}" if address.query else "")
    path = f"{FILES}/{address.scheme}/{address.netloc}/{quote(name, safe='/+~%=,@:!-._()')}"
    if ".." in path.split("/") or not address.netloc or name.endswith("/") or not name:
        raise ConfigError(f"{url}: is not the address of a file")
    return path


class DownloadStore:
    """Keep downloads, and fetch what is not here yet if `web` is given; several threads may use it."""

    def __init__(self, folder: Path, files: dict[str, StoredFile], web: Downloads | None = None) -> None:
        self.folder = folder
        self.files = files
        """Address → file."""
        self._web = web
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    def get(self, url: str) -> Path:
        """Return the file of an address; fetch it if it is not here whole. Raises Absent or Unreachable if it fails."""
        with self._locks[url]:
            entry = self.files.get(url)
            if entry and (path := self.folder / entry.path).is_file() and path.stat().st_size == entry.size:
                return path
            if not self._web:
                raise Absent(f"{self.folder}: has no {url}; make the bundle again")
            path = self.folder / stored_path(url)
            with temporary_file(self.folder / FILES) as partial:
                self._web.download(url, partial)
                path.parent.mkdir(parents=True, exist_ok=True)
                partial.chmod(0o644)
                partial.replace(path)
            self.add(url, path)
            return path

    def add(self, url: str, path: Path) -> None:
        """Register a file that is in the store's folder already."""
        place, size = str(path.relative_to(self.folder)), path.stat().st_size
        self.files[url] = StoredFile(path=place, sha256=file_sha256(path), size=size)

    def checked(self, url: str) -> Path:
        """Return the file of an address. Raises ResultError if it is missing or has changed."""
        try:
            path = self.get(url)
        except Absent as error:
            raise ResultError(str(error)) from None
        if file_sha256(path) != self.files[url].sha256:
            raise ResultError(f"{path}: has changed; make the bundle again")
        return path


SUBMODULE_ENTRY = re.compile(r"submodule\.(?P<name>.*)\.(?P<key>path|url|update)\n(?P<value>.*)", re.DOTALL)


@dataclass(frozen=True)
class Submodule:
    """Describe a submodule: a commit of another repository that belongs into a folder of a commit."""

    path: str
    url: str
    commit: Commit


def parse_modules(listing: str, links: Mapping[str, Commit], url: str) -> Iterator[Submodule]:
    """Yield the submodules of a commit of the repository at `url`.

    `listing` is its .gitmodules as `git config --null --list` prints it, `links` is path → commit. Raises ConfigError
    for a link without an address.
    """
    modules: dict[str, dict[str, str]] = {}
    for entry in filter(None, listing.split("\0")):
        if match := SUBMODULE_ENTRY.fullmatch(entry):
            modules.setdefault(match["name"], {})[match["key"]] = match["value"]
    by_path = {module.get("path"): module for module in modules.values()}
    for path, commit in links.items():
        module = by_path.get(path, {})
        if module.get("update") == "none":
            continue
        if "url" not in module:
            raise ConfigError(f"{url}: the submodule {path} has no address in .gitmodules")
        yield Submodule(path, absolute_url(module["url"], url), commit)


def absolute_url(url: str, parent: str) -> str:
    """Return the address of a submodule, which may be relative to its parent's."""
    if not url.startswith(("./", "../")):
        return url
    base = urlsplit(parent)
    return urlunsplit(base._replace(path=os.path.normpath(f"{base.path.rstrip('/')}/{url}")))


@dataclass(frozen=True)
class GitStore:
    """Keep commits of many repositories in one bare repository."""

    folder: Path
    mirrored: Callable[[str], str] = str
    """Address → where to fetch it from."""
    environ: Mapping[str, str] = field(default_factory=dict)
    run: RunProgram = run_program

    def git(self, *words: str, env: Mapping[str, str] | None = None) -> str:
        """Run git on the repository. Raises CommandError."""
        # The folder may belong to whoever copied a bundle to this machine.
        trusted = ("git", "-c", "safe.directory=*", "-c", "advice.detachedHead=false", f"--git-dir={self.folder}")
        return self.run(*trusted, *words, env={"GIT_TERMINAL_PROMPT": "0", **self.environ, **(env or {})})

    def has(self, commit: Commit) -> bool:
        """Return whether a commit is here."""
        try:
            self.git("rev-parse", "--verify", "--quiet", f"refs/imagebuild/{commit}^{{commit}}")
        except CommandError:
            return False
        return True

    def fetch(self, url: str, commit: Commit) -> None:
        """Fetch a commit and its submodules. Raises CommandError if the server does not have it."""
        if not self.folder.exists():
            self.run("git", "init", "--quiet", "--bare", str(self.folder))
        if not self.has(commit):
            address, quiet = self.mirrored(url), ("fetch", "--quiet", "--no-tags", "--no-write-fetch-head")
            try:
                self.git(*quiet, "--depth=1", address, commit)
            except CommandError:  # not every server gives a commit by its name, or without its history
                self.git(*quiet, address, f"+refs/*:refs/from/{commit}/*")
            try:
                self.git("update-ref", f"refs/imagebuild/{commit}", commit)
            except CommandError:
                raise CommandError(f"{address}: has no commit {commit}") from None
        for module in self.submodules(url, commit):
            self.fetch(module.url, module.commit)

    def submodules(self, url: str, commit: Commit) -> tuple[Submodule, ...]:
        """Return the submodules of a commit that is here. Raises ConfigError as `parse_modules` does."""
        tree = self.git("ls-tree", "-r", "-z", commit).split("\0")
        entries = [line.partition("\t") for line in tree if line.startswith("160000 ")]
        links = {path: description.split()[2] for description, _, path in entries}
        if not links:
            return ()
        listing = self.git("config", "--null", "--list", "--blob", f"{commit}:.gitmodules")
        return tuple(parse_modules(listing, links, url))

    def checkout(self, url: str, commit: Commit, target: Path) -> None:
        """Write the files of a commit and of its submodules; git's own files are not among them."""
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


@dataclass(frozen=True)
class Trees:
    """Keep file trees as images that BuildKit takes as contexts, each under a key that says what it holds."""

    folder: Path

    @property
    def layout(self) -> Path:
        """Return the folder of the OCI layout."""
        return self.folder / "layout"

    def ensure_folder(self) -> Path:
        """Make the folder if it is not there, and return it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder

    def find(self, key: str) -> str | None:
        """Return the context of a tree, or None if it is not here."""
        try:
            digest: str = json.loads(self._record(key).read_text())["digest"]
        except (OSError, ValueError, LookupError):
            return None
        return f"oci-layout://{self.layout}@{digest}" if Layout(self.layout).has(digest) else None

    def add(self, key: str, path: Path, name: str = "") -> str:
        """Add the files of a folder, or one file under a name, as ADD makes it; return their context.

        The result does not depend on this machine: owners, times and modes are set.
        """

        def usual(entry: tarfile.TarInfo) -> tarfile.TarInfo:
            entry.uid = entry.gid = 0
            entry.uname = entry.gname = ""
            entry.mtime = int(layout.EPOCH)
            if not entry.issym():
                entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
            if name and entry.isfile():
                entry.mode = 0o600  # BuildKit's ADD gives it to what it downloads
            return entry

        with tempfile.TemporaryDirectory(prefix="imagebuild-", dir=self.ensure_folder()) as scratch:
            tar = Path(scratch) / "tar"
            with tarfile.open(tar, "w") as archive:
                if name:
                    root = tarfile.TarInfo("./")
                    root.type = tarfile.DIRTYPE
                    archive.addfile(usual(root))
                archive.add(path, name or "./", filter=usual)
            digest = Layout(self.layout).add_tree(tar, get_args(Platform), ImageSettings(CREATED))
        write_text(self._record(key), json.dumps({"key": key, "digest": digest}))
        return f"oci-layout://{self.layout}@{digest}"

    def _record(self, key: str) -> Path:
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


APT_LISTS = "/var/lib/apt/lists/*"
APT_ARCHIVES = "/var/cache/apt/archives/*.deb"

# Addresses in apt's sources may lack the slash at the end.
ADD_SLASHES = (
    r"s|\(https\{0,1\}://[^[:space:]]*[^/[:space:]]\)\([[:space:]]\)|\1/\2|g",
    r"s|\(https\{0,1\}://[^[:space:]]*[^/[:space:]]\)$|\1/|",
)
# A proxy sees the whole address of http requests only, so port 443 tells it that the address was one of https.
HTTPS_TO_PORT_443 = r"s|https://\([^/: ]*\)/|http://\1:443/|g"


def apt_get_for_mirrors(downloads: Mapping[str, str], netrc: str = "") -> str:
    """Return an apt-get script that rewrites addresses by their beginnings; `netrc` is the text of that file."""
    longest_first = sorted(downloads, key=lambda prefix: len(prefix.partition("://")[2]), reverse=True)
    sources = []
    for i, prefix in enumerate(longest_first):
        scheme, _, rest = prefix.partition("://")
        other = {"http": "https", "https": "http"}[scheme]
        # A prefix is for http and https, unless each has one.
        both = f"{other}://{rest}" not in downloads
        pattern = rf"https\{{0,1\}}://{_sed_pattern(rest)}" if both else _sed_pattern(prefix)
        # A rule must not change what another rule wrote: each writes a number, and the last rules replace those.
        sources.append(f"s|{pattern}|\x01{i}\x01|g")
    sources += [f"s|\x01{i}\x01|{_sed_replacement(downloads[prefix])}|g" for i, prefix in enumerate(longest_first)]
    hosts = {urlsplit(old).hostname or "": urlsplit(new).hostname or "" for old, new in downloads.items()}
    preferences = [
        rf's|^\(Pin: *origin *"\{{0,1\}}\){_sed_pattern(old)}\("\{{0,1\}} *\)$|\1{_sed_replacement(new)}\2|'
        for old, new in hosts.items()
    ]
    return _apt_get(sources, preferences=preferences, netrc=netrc.rstrip("\n"))


def apt_get_for_proxy(address: str, *, recording: bool) -> str:
    """Return an apt-get script that gets everything through a bundle's proxy at `http://host:port`."""
    options = [f"Acquire::http::Proxy={address}", f"Acquire::https::Proxy={address}", "Acquire::PDiffs=false"]
    # A proxy that records sends a file when it has all of it.
    # A bundle's indices are as old as the bundle; their signatures are verified all the same.
    options.append("Acquire::http::Timeout=3600" if recording else "Acquire::Check-Valid-Until=false")
    # Indices that are newer than the bundle's would ask for packages that it lacks.
    outdated = [APT_LISTS, APT_ARCHIVES] if recording else [APT_LISTS]
    return _apt_get([HTTPS_TO_PORT_443], outdated=outdated, options=options)


def _apt_get(sources: Sequence[str], **parts: object) -> str:
    # This package's templates need no autoescaping: a shell reads them.
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True)  # noqa: S701
    text = (Path(__file__).parent / "templates" / "apt-get.sh.j2").read_text()
    parts = {"netrc": "", "preferences": (), "outdated": (), "options": (), **parts}
    return environment.from_string(text).render(sources=[*ADD_SLASHES, *sources], **parts)


def _sed_pattern(text: str) -> str:
    return re.sub(r"([][\\.*^$|])", r"\\\1", text)


def _sed_replacement(text: str) -> str:
    return re.sub(r"([\\&|])", r"\\\1", text)


@dataclass(frozen=True)
class InputsRequest:
    """Hold what mirrors and bundles need to know about a build."""

    needs: Mapping[str, NeededInputs]
    """Target → what it needs."""
    given: BuildInputs
    """What the build has already: bases that were bootstrapped, and this machine's secrets."""
    engine: Endpoint
    settings: Settings
    ca: Path | None
    trees: Trees
    secrets: Path
    """Folder for secrets; nobody else may read it."""
    note: Callable[[str], None]
    """Function that shows what is being done."""

    @property
    def images(self) -> list[str]:
        """Return the needed images that no base replaces."""
        return sorted({image for need in self.needs.values() for image in need.images} - set(self.given.images))

    def provide(
        self, images: Mapping[str, str], stages: Mapping[str, Mapping[str, str]], secrets: Mapping[str, str]
    ) -> BuildInputs:
        """Return what the build has already, with these added; the text of a secret goes into a file of its name."""
        for name, text in secrets.items():
            (self.secrets / name).write_text(text)
        files = {name: self.secrets / name for name in secrets}
        return BuildInputs({**self.given.images, **images}, stages, {**self.given.secrets, **files})


def contexts_of(
    request: InputsRequest, file: Callable[[str], Path], git: GitStore, wanted: Callable[[str], bool] = bool
) -> dict[str, dict[str, str]]:
    """Fetch what targets download from addresses that are `wanted`, by default all; return target → stage → context.

    `file` returns the file of an address. Raises ResultError for a file that is not what the lock names, and what
    `file` and the git store raise.
    """
    trees, note = request.trees, request.note

    @cache
    def context_of(download: Download) -> str:
        kind, url = download.kind, download.url
        pin = download.pin or file_sha256(file(url))
        key = f"git {pin}" if kind == "git" else f"{kind} {url} {pin}"
        if context := trees.find(key):
            return context
        note(f"fetching {url} {pin}" if kind == "git" else f"fetching {url}")
        if kind == "git":
            if not git.has(pin):
                git.fetch(url, pin)
            with tempfile.TemporaryDirectory(prefix="imagebuild-", dir=trees.ensure_folder()) as folder:
                git.checkout(url, pin, Path(folder))
                return trees.add(key, Path(folder))
        path = file(url)
        if (actual := file_sha256(path)) != pin:
            raise ResultError(f"{url}: its sha256 is {actual}, but imagebuild.lock has {pin}")
        # ADD gives a file that it downloads the last part of its path as name.
        return trees.add(key, path, urlsplit(url).path.rpartition("/")[2])

    return {
        target: {stage: context_of(item) for stage, item in need.stages.items() if wanted(item.url)}
        for target, need in request.needs.items()
    }


@contextmanager
def inputs_from_mirrors(request: InputsRequest) -> Iterator[BuildInputs]:
    """Provide the inputs that have a mirror; BuildKit fetches the rest as the Dockerfile says."""
    mirrors, netrc_file = request.settings.mirrors, request.settings.netrc_file
    with (
        tempfile.TemporaryDirectory(prefix="imagebuild-", dir=request.trees.ensure_folder()) as scratch,
        git_environment(request.ca, netrc_file) as environ,
    ):
        store = DownloadStore(Path(scratch), {}, Downloads(mirrors.download, request.ca, netrc_file))
        git = GitStore(Path(scratch) / "git", mirrors.download, environ)
        stages = contexts_of(request, store.get, git, lambda url: mirrors.download(url) != url)
    secrets = {}
    if mirrors.downloads:
        netrc = read_text(netrc_file) if netrc_file else ""
        secrets["apt-get"] = apt_get_for_mirrors(mirrors.downloads, netrc)
    if mirrors.python_index:
        secrets["pip.conf"] = pip_conf_text(mirrors.python_index, login_for(mirrors.python_index, netrc_file))
    images = {image: f"docker-image://{m}" for image in request.images if (m := mirrors.image(image)) != image}
    yield request.provide(images, stages, secrets)
