"""Read from Dockerfiles what builds fetch, and give it to BuildKit from mirrors.

Stages that hold a download are built from what imagebuild fetched, images are replaced by named contexts, and steps
that install packages get secrets. Steps compare inputs by content: builds with and without mirrors share their cache.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from urllib.parse import quote, urlsplit

import jinja2

from imagebuild.build.bake import FILES, BuildRun, platforms_of
from imagebuild.core.errors import Absent, CommandError, ConfigError, ResultError
from imagebuild.core.fields import Platform
from imagebuild.core.files import cache_folder, file_sha256, read_text, temporary_file
from imagebuild.core.http import Downloads, login_for
from imagebuild.core.run import run_program
from imagebuild.core.settings import Mirrors, Settings, ca_bundle, git_environment, load_settings, pip_conf_text
from imagebuild.render.stages import needed_stages, stages_of

DOWNLOAD = re.compile(r"^FROM scratch AS (\S+)\nADD (?:--checksum=sha256:(\w+) )?(\S+?)(?:#(\w+))? /$", re.MULTILINE)
"""A stage that holds nothing but a download, as `macros.j2` writes it: name, sha256, address, commit."""
IMAGE = re.compile(r"(?:^FROM (?:--platform=\S+ )?|from=)([^\s,]+@sha256:[0-9a-f]{64})", re.MULTILINE)
WHEEL = re.compile(r"^\S+==\S+(?: \\\n +--hash=sha256:[0-9a-f]{64})+", re.MULTILINE)


@dataclass(frozen=True)
class Download:
    """Describe what a stage downloads, and nothing else."""

    url: str
    sha256: str = ""
    """Of an archive. Builds check the fingerprint of a repository's key, which the lock has."""
    commit: str = ""


@dataclass(frozen=True)
class Needs:
    """List what one target needs from elsewhere, besides packages."""

    platforms: tuple[Platform, ...]
    stages: Mapping[str, Download]
    """Stage that holds nothing else → what it downloads."""
    images: frozenset[str]
    """Images as FROM names them, with digest."""
    wheels: frozenset[tuple[str, ...]]
    """What a stage asks pip for: entries of a requirements file, each with the hashes for all architectures."""


def needs_of(text: str, platforms: Sequence[Platform]) -> Needs:
    """Return what a Dockerfile fetches for some platforms."""
    wheels = (tuple(WHEEL.findall(stage)) for stage in text.split("\nFROM "))
    names = {name for platform in platforms for name in needed_stages(stages_of(text, platform))}
    downloads = DOWNLOAD.findall(text)
    return Needs(
        platforms=tuple(platforms),
        stages={name: Download(url, sha256, commit) for name, sha256, url, commit in downloads if name in names},
        images=frozenset(IMAGE.findall(text)),
        wheels=frozenset(filter(None, wheels)),
    )


def needs_of_targets(run: BuildRun) -> dict[str, Needs]:
    """Return target → what it fetches for the platforms that are built."""
    return {
        target.id: needs_of(run.dockerfiles[target.id].text, platforms_of(target, run.request.platforms))
        for target in run.request.targets
    }


def missing_images(run: BuildRun, needs: Mapping[str, Needs]) -> list[str]:
    """Return the needed images that no bootstrapped base replaces."""
    return sorted({image for need in needs.values() for image in need.images} - set(run.inputs.images))


def stored_path(url: str) -> str:
    """Return where a store keeps a download. Raises ConfigError for an address that is not that of a file."""
    address = urlsplit(url)
    name = address.path.lstrip("/") + (f"?{address.query}" if address.query else "")
    path = f"files/{address.scheme}/{address.netloc}/{quote(name, safe='/+~%=,@:!-._()')}"
    if ".." in path.split("/") or not address.netloc or name.endswith("/") or not name:
        raise ConfigError(f"{url}: is not the address of a file")
    return path


@dataclass(frozen=True)
class Git:
    """Run git with this machine's certificates and passwords, and with mirrors."""

    mirrors: Mirrors = field(default_factory=Mirrors)
    environ: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, folder: Path, *words: str) -> str:
        """Run git in a folder, and return what it prints. Raises CommandError."""
        options = ["-c", "advice.detachedHead=false"]
        for old, new in self.mirrors.downloads.items():
            options += ["-c", f"url.{new}.insteadOf={old}"]
        return run_program("git", "-C", str(folder), *options, *words, env={"GIT_TERMINAL_PROMPT": "0", **self.environ})

    def clone(self, download: Download, folder: Path) -> None:
        """Clone a commit with its submodules into a folder. Raises CommandError if the server does not have it."""
        folder.mkdir(parents=True, exist_ok=True)
        self(folder, "init", "--quiet")
        self(folder, "remote", "add", "origin", download.url)

        def fetch(reference: str, *depth: str) -> None:
            self(folder, "fetch", "--quiet", "--no-tags", *depth, "origin", reference)
            self(folder, "checkout", "--quiet", download.commit)
            self(folder, "submodule", "--quiet", "update", "--init", "--recursive", *depth)

        try:
            fetch(download.commit, "--depth=1")
        except CommandError:  # not every server gives a commit by its name, or without its history
            fetch("+refs/*:refs/from/*")


def copy_commit(clone: Path, commit: str, folder: Path) -> None:
    """Make of a clone what ADD makes of it, alike everywhere. Raises ResultError if an object of git is damaged."""
    git, check = Git(), "fsck --full --no-dangling --no-progress"
    try:
        # Git would run what the configuration names, and whoever made the clone may have written that.
        own = shutil.ignore_patterns("config", "hooks", "info")
        shutil.copytree(clone, folder, symlinks=True, dirs_exist_ok=True, ignore=own)
        git(folder, *check.split())
        git(folder, "reset", "--quiet", "--hard", commit)
        git(folder, "submodule", "--quiet", "update", "--init", "--recursive", "--force", "--no-fetch")
        git(folder, "submodule", "--quiet", "foreach", "--recursive", f"git {check}")
    except (CommandError, OSError) as error:
        raise ResultError(f"{clone}: {error}; make the bundle again") from None
    for path in [*folder.rglob(".git")]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in folder.rglob("*"):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)


@dataclass(frozen=True)
class DownloadStore:
    """Keep downloads, and fetch what is not here yet if `web` and `git` are given; several threads may use it.

    Two that want the same at the same time may both fetch it.
    """

    folder: Path
    web: Downloads | None = None
    git: Git | None = None

    @classmethod
    @contextmanager
    def fetching(cls, folder: Path, settings: Settings, ca: Path | None) -> Iterator[DownloadStore]:
        """Provide a store that fetches, through mirrors where there are any, with this machine's passwords."""
        with git_environment(ca, settings.netrc_file) as environ:
            web = Downloads(settings.mirrors.download, ca, settings.netrc_file)
            yield cls(folder, web, Git(settings.mirrors, environ))

    def get(self, url: str) -> Path:
        """Return the file of an address; fetch it if it is not here. Raises Absent or Unreachable if it fails."""
        path = self.folder / stored_path(url)
        if path.is_file():
            return path
        if not self.web:
            raise Absent(f"{self.folder}: has no {url}; make the bundle again")
        with temporary_file(self.folder) as partial:
            self.web.download(url, partial)
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.chmod(0o644)
            partial.replace(path)
        return path

    def clone(self, download: Download) -> Path:
        """Return the clone of a commit; make it if it is not here. Raises CommandError if that fails."""
        path = self.folder / "git" / download.commit
        if self.git and not path.exists():
            self.git.clone(download, path)
        return path


def sources_folder() -> Path:
    """Return the folder of the cache that keeps what stages download; it is there."""
    folder = cache_folder("sources")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def fetch_all(
    needs: Mapping[str, Needs],
    store: DownloadStore,
    note: Callable[[str], None],
    wanted: Callable[[str], bool] = bool,
) -> dict[str, dict[str, Path]]:
    """Fetch what targets download from addresses that are `wanted`, by default all; return target → stage → folder.

    A folder has the files, and a Dockerfile that makes of them what ADD makes. What has a pin is fetched once: the
    cache keeps it. Raises ResultError for a file that is not what the lock names, and what the store raises.
    """
    kept = sources_folder()

    @cache
    def folder_of(download: Download) -> Path:
        url, pin = download.url, download.sha256 or download.commit or file_sha256(store.get(download.url))
        folder = kept / hashlib.sha256(f"{url} {pin}".encode()).hexdigest()[:32]
        if folder.is_dir():
            return folder
        note(f"fetching {url} {download.commit}".rstrip())
        with tempfile.TemporaryDirectory(prefix="imagebuild-", dir=kept) as scratch:
            made = Path(scratch) / "made"
            (files := made / FILES).mkdir(parents=True)
            (made / "Dockerfile").write_text("FROM scratch\nCOPY . /\n")
            (made / "Dockerfile.dockerignore").touch()  # instead of the one that a source may have
            if download.commit:
                copy_commit(store.clone(download), download.commit, files)
            else:
                # ADD gives a file that it downloads the last part of its path as name, and this mode.
                copy = Path(shutil.copyfile(store.get(url), files / urlsplit(url).path.rpartition("/")[2]))
                copy.chmod(0o600)
                if (actual := file_sha256(copy)) != pin:
                    raise ResultError(f"{url}: its sha256 is {actual}, but imagebuild.lock has {pin}")
            try:
                made.rename(folder)
            except OSError:
                if not folder.is_dir():  # else another build was as fast
                    raise
        return folder

    return {
        target: {stage: folder_of(item) for stage, item in need.stages.items() if wanted(item.url)}
        for target, need in needs.items()
    }


Provided = tuple[Mapping[str, str], Mapping[str, Mapping[str, Path]], Mapping[str, str]]
"""What mirrors or a bundle give to a build: image → context, target → stage → folder, secret → text."""
Provide = Callable[[BuildRun, Callable[[str], None]], AbstractContextManager[Provided]]
"""Provides that for a build, whose `inputs` have the bootstrapped bases; the other argument takes notes."""


@contextmanager
def from_mirrors(run: BuildRun, note: Callable[[str], None]) -> Iterator[Provided]:
    """Provide the inputs that have a mirror; BuildKit fetches the rest as the Dockerfile says."""
    needs = needs_of_targets(run)
    configured, ca = load_settings(os.environ), ca_bundle(run.request.ca, os.environ)
    mirrors, netrc = configured.mirrors, configured.netrc_file
    with (
        tempfile.TemporaryDirectory(prefix="imagebuild-", dir=sources_folder()) as scratch,
        DownloadStore.fetching(Path(scratch), configured, ca) as store,
    ):
        stages = fetch_all(needs, store, note, lambda url: mirrors.download(url) != url)
    secrets = {}
    if mirrors.downloads:
        secrets["apt-get"] = apt_get_for_mirrors(mirrors.downloads, read_text(netrc) if netrc else "")
    if mirrors.python_index:
        secrets["pip.conf"] = pip_conf_text(mirrors.python_index, login_for(mirrors.python_index, netrc))
    mirrored = {image: mirrors.image(image) for image in missing_images(run, needs)}
    yield {image: f"docker-image://{name}" for image, name in mirrored.items() if name != image}, stages, secrets


# Addresses in apt's sources may lack the slash at the end.
ADD_SLASHES = (
    r"s|\(https\{0,1\}://[^[:space:]]*[^/[:space:]]\)\([[:space:]]\)|\1/\2|g",
    r"s|\(https\{0,1\}://[^[:space:]]*[^/[:space:]]\)$|\1/|",
)
# A proxy sees the whole address of http requests only, so port 443 tells it that the address was one of https.
HTTPS_TO_PORT_443 = r"s|https://\([^/: ]*\)/|http://\1:443/|g"


def apt_get_for_mirrors(downloads: Mapping[str, str], netrc: str = "") -> str:
    """Return an apt-get script that rewrites addresses by their beginnings; `netrc` is the text of that file."""
    # Images name an archive by http or https, as they like: a mirror is for both, unless there are two.
    other = {"http": "https", "https": "http"}
    both = {f"{other[urlsplit(old).scheme]}:{old.partition(':')[2]}": new for old, new in downloads.items()}
    longest_first = sorted((both | dict(downloads)).items(), key=lambda pair: len(pair[0]), reverse=True)
    # A rule must not change what another rule wrote: each writes a number, and the last rules replace those.
    sources = [f"s|{_sed_pattern(old)}|\x01{i}\x01|g" for i, (old, _) in enumerate(longest_first)]
    sources += [f"s|\x01{i}\x01|{_sed_replacement(new)}|g" for i, (_, new) in enumerate(longest_first)]
    hosts = {urlsplit(old).hostname or "": urlsplit(new).hostname or "" for old, new in downloads.items()}
    preferences = [
        rf's|^\(Pin: *origin *"\{{0,1\}}\){_sed_pattern(old)}\("\{{0,1\}} *\)$|\1{_sed_replacement(new)}\2|'
        for old, new in hosts.items()
    ]
    return _apt_get(sources, preferences=preferences, netrc=netrc.rstrip("\n"))


def apt_get_for_proxy(address: str, *, recording: bool) -> str:
    """Return an apt-get script that gets everything through a bundle's proxy at `http://host:port`."""
    # A proxy that records sends a file when it has all of it.
    # A bundle's indices are as old as the bundle; their signatures are verified all the same.
    more = "Acquire::http::Timeout=3600" if recording else "Acquire::Check-Valid-Until=false"
    proxies = [f"Acquire::{scheme}::Proxy={address}" for scheme in ("http", "https")]
    # Indices that are newer than the bundle's would ask for packages that it lacks.
    outdated = ["/var/lib/apt/lists/*", *(["/var/cache/apt/archives/*.deb"] if recording else [])]
    return _apt_get([HTTPS_TO_PORT_443], outdated=outdated, options=[*proxies, "Acquire::PDiffs=false", more])


def _apt_get(sources: Sequence[str], **parts: object) -> str:
    # This package's templates need no autoescaping: a shell reads them.
    environment = jinja2.Environment(trim_blocks=True, keep_trailing_newline=True)  # noqa: S701
    text = (Path(__file__).parent / "templates" / "apt-get.sh.j2").read_text()
    return environment.from_string(text).render(sources=[*ADD_SLASHES, *sources], **parts)


def _sed_pattern(text: str) -> str:
    return re.sub(r"([][\\.*^$|])", r"\\\1", text)


def _sed_replacement(text: str) -> str:
    return re.sub(r"([\\&|])", r"\\\1", text)
