"""Find the downloads in Dockerfiles, and replace them by files that imagebuild fetched, for example from mirrors.

A stage that only downloads a file is replaced by a stage that copies the fetched file. An image in FROM is replaced by
a named context of BuildKit. Steps that install packages get build secrets, which configure apt and pip to use mirrors.
BuildKit compares inputs by content, so builds with and without mirrors share their cache."""

from __future__ import annotations

import hashlib
import netrc
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from urllib.parse import quote, urlsplit

import jinja2

from imagebuild.build.bake import FILES, BuildRun, platforms_of
from imagebuild.core.errors import Absent, CommandError, ConfigError, ResultError
from imagebuild.core.fields import Platform
from imagebuild.core.files import cache_folder, file_sha256, refuse_outside, temporary_file
from imagebuild.core.git import check_out
from imagebuild.core.http import Downloads, login_for
from imagebuild.core.leftovers import temporary_folder
from imagebuild.core.run import run_program
from imagebuild.core.settings import Mirrors, Settings, ca_bundle, git_environment, load_settings, pip_conf_text
from imagebuild.render.stages import needed_stages, stages_of

DOWNLOAD = re.compile(
    r"^FROM scratch AS (\S+)\nADD (?:--checksum=sha256:(\w+) )?((?:(?:https?|ssh|git)://|git@)\S+?)(?:#(\w+))? /$",
    re.MULTILINE,
)
"""Matches a stage that only downloads, as `macros.j2` writes it. Groups: name, sha256, address, commit. A template can
also write such a stage; BuildKit would not read a repository on this machine, so neither does imagebuild."""
IMAGE = re.compile(r"(?:^FROM (?:--platform=\S+ )?|from=)([^\s,]+@sha256:[0-9a-f]{64})", re.MULTILINE)
PYTHON = re.compile(r"^PIP_PYTHON_VERSION=([0-9.]+)", re.MULTILINE)
WHEEL = re.compile(
    r"^[a-z0-9][\w.-]*(?:\[[\w.,-]*\])?==[\w.+!]+(?: \\\n +--hash=sha256:[0-9a-f]{64})+",
    re.MULTILINE | re.ASCII | re.IGNORECASE,
)
"""Matches a requirement and its hashes. Any template can write one, so it must name a package of the index: pip runs
the code of files and addresses on this machine."""


@dataclass(frozen=True)
class Download:
    """The file or git commit that a stage downloads. The stage does nothing else."""

    url: str
    sha256: str = ""
    """Hash of an archive. Empty for a commit, and for the key of a package repository: builds check the key's
    fingerprint."""
    commit: str = ""


@dataclass(frozen=True)
class Needs:
    """The downloads of one target, except packages."""

    platforms: tuple[Platform, ...]
    stages: Mapping[str, Download]
    """Maps each stage that only downloads to its download."""
    images: frozenset[str]
    """Names of images in FROM, with digests."""
    wheels: frozenset[tuple[str, tuple[str, ...]]]
    """The requirements of each stage that installs wheels: the version of Python (empty if the wheels fit every
    version), and the lines of the requirements file, with hashes for all architectures."""


def needs_of(text: str, platforms: Sequence[Platform]) -> Needs:
    """Return the downloads of a Dockerfile for some platforms."""
    stages = {stage: tuple(WHEEL.findall(stage)) for stage in text.split("\nFROM ")}
    wheels = {("".join(PYTHON.findall(stage)), lines) for stage, lines in stages.items() if lines}
    names = {name for platform in platforms for name in needed_stages(stages_of(text, platform))}
    downloads = DOWNLOAD.findall(text)
    return Needs(
        platforms=tuple(platforms),
        stages={name: Download(url, sha256, commit) for name, sha256, url, commit in downloads if name in names},
        images=frozenset(IMAGE.findall(text)),
        wheels=frozenset(wheels),
    )


def needs_of_targets(run: BuildRun) -> dict[str, Needs]:
    """Map the id of each target to its downloads for the platforms that are built."""
    return {
        target.id: needs_of(run.dockerfiles[target.id].text, platforms_of(target, run.request.platforms))
        for target in run.request.targets
    }


def missing_images(run: BuildRun, needs: Mapping[str, Needs]) -> list[str]:
    """Return the names of images in FROM that no bootstrapped base image replaces."""
    return sorted({image for need in needs.values() for image in need.images} - set(run.inputs.images))


def stored_path(url: str) -> str:
    """Return the path, inside a store, of the file with this address.
    Raises ConfigError if the address is not that of a file."""
    try:
        address = urlsplit(url)
    except ValueError as error:  # such as https://[::1
        raise ConfigError(f"{url}: is not an address: {error}; correct it") from None
    name = address.path.lstrip("/") + (f"?{address.query}" if address.query else "")
    path = f"files/{address.scheme}/{address.netloc}/{quote(name, safe='/+~%=,@:!-._()')}"
    if ".." in path.split("/") or not address.netloc or name.endswith("/") or not name:
        raise ConfigError(f"{url}: is not the address of a file; write an address such as https://host/folder/file")
    return path


@dataclass(frozen=True)
class Git:
    """The git command, with this machine's certificates, passwords and mirrors."""

    mirrors: Mirrors = field(default_factory=Mirrors)
    environ: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, folder: Path, *words: str) -> str:
        """Run git in a folder, and return its output. Raises CommandError if git fails."""
        options = ["-c", "advice.detachedHead=false"]
        for old, new in self.mirrors.downloads.items():
            options += ["-c", f"url.{new}.insteadOf={old}"]
        return run_program("git", "-C", str(folder), *options, *words, env={"GIT_TERMINAL_PROMPT": "0", **self.environ})

    def clone(self, download: Download, folder: Path) -> None:
        """Clone a commit with its submodules into a folder. Raises CommandError if git fails."""
        folder.mkdir(parents=True, exist_ok=True)
        self(folder, "init", "--quiet")
        self(folder, "remote", "add", "origin", download.url)

        def fetch(reference: str, *depth: str) -> None:
            self(folder, "fetch", "--quiet", "--no-tags", *depth, "origin", reference)
            self(folder, "checkout", "--quiet", download.commit)
            self(folder, "submodule", "--quiet", "update", "--init", "--recursive", *depth)

        try:
            fetch(download.commit, "--depth=1")
        except CommandError:  # some servers refuse to send a commit by its hash, or without its history
            fetch("+refs/*:refs/from/*")


def copy_commit(clone: Path, commit: str, folder: Path) -> None:
    """Copy the files of a commit from a clone, with the same modes as ADD and without `.git`.
    Raises ResultError if the clone is damaged."""
    try:
        check_out(clone, commit, folder, within=clone)
    except (CommandError, ConfigError, OSError) as error:
        raise ResultError(f"{clone}: {error}; make the bundle again") from None
    for path in folder.rglob("*"):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)


@dataclass(frozen=True)
class DownloadStore:
    """A folder with downloads. If `web` and `git` are set, missing downloads are fetched. Links must not lead out of
    the folder: others may have made a bundle, and its files go to build steps.

    Several threads may use a store. Two threads that need the same download at the same time may both fetch the
    download."""

    folder: Path
    web: Downloads | None = None
    git: Git | None = None

    @classmethod
    @contextmanager
    def fetching(cls, folder: Path, settings: Settings, ca: Path | None) -> Iterator[DownloadStore]:
        """Yield a store that fetches missing downloads, with this machine's mirrors and passwords."""
        with git_environment(ca, settings.netrc_file) as environ:
            web = Downloads(settings.mirrors.download, ca, settings.netrc_file)
            yield cls(folder, web, Git(settings.mirrors, environ))

    def for_steps(self, trusted: Collection[str], settings: Settings, ca: Path | None) -> DownloadStore:
        """Return the same store for build steps. They can ask any host; only `trusted` hosts get logins."""
        return replace(self, web=Downloads(settings.mirrors.download, ca, settings.netrc_file, trusted=trusted))

    def get(self, url: str) -> Path:
        """Return the path of the file with this address. Fetch the file if the store lacks it.
        Raises Absent or Unreachable if the file cannot be fetched."""
        path = refuse_outside([self.folder], self.folder / stored_path(url), str(self.folder))
        if path.is_file():
            return path
        if not self.web:
            raise Absent(f"{self.folder}: the bundle does not contain {url}; make the bundle again")
        with temporary_file(self.folder) as partial:
            self.web.download(url, partial)
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.chmod(0o644)
            partial.replace(path)
        return path

    def clone(self, download: Download) -> Path:
        """Return the folder with the clone of a commit. Clone the commit if the store lacks it.
        Raises CommandError if git fails."""
        path = refuse_outside([self.folder], self.folder / "git" / download.commit, str(self.folder))
        if self.git and not path.exists():
            self.git.clone(download, path)
        return path


def sources_folder() -> Path:
    """Return the folder, in imagebuild's cache, for downloads that replace stages. Make the folder if it is missing."""
    folder = cache_folder("sources")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def fetch_all(
    needs: Mapping[str, Needs],
    store: DownloadStore,
    note: Callable[[str], None],
    wanted: Callable[[str], bool] = bool,
) -> dict[str, dict[str, Path]]:
    """Fetch the downloads of targets. `[target][stage]` of the result is the folder with the files of a download.

    `wanted` gets the address of a download, and returns whether to fetch it. Default: fetch all. Each folder also
    contains a Dockerfile that makes the same layer as ADD. Downloads with a hash or commit are fetched once, and kept
    in the cache. Raises ResultError if a file does not have the hash in the lock, and the errors of the store."""
    kept = sources_folder()

    @cache
    def folder_of(download: Download) -> Path:
        url, pin = download.url, download.sha256 or download.commit or file_sha256(store.get(download.url))
        folder = kept / hashlib.sha256(f"{url} {pin}".encode()).hexdigest()[:32]
        if folder.is_dir():
            return folder
        note(f"fetching {url} {download.commit}".rstrip())
        with temporary_folder(kept) as scratch:
            made = scratch / "made"
            (files := made / FILES).mkdir(parents=True)
            (made / "Dockerfile").write_text("FROM scratch\nCOPY . /\n")
            (made / "Dockerfile.dockerignore").touch()  # overrides a .dockerignore in the downloaded files
            if download.commit:
                copy_commit(store.clone(download), download.commit, files)
            else:
                # ADD uses the same name, which is the last part of the address's path, and the same mode.
                copy = Path(shutil.copyfile(store.get(url), files / urlsplit(url).path.rpartition("/")[2]))
                copy.chmod(0o600)
                if (actual := file_sha256(copy)) != pin:
                    raise ResultError(f"{url}: the sha256 is {actual}, but imagebuild.lock contains {pin}")
            try:
                made.rename(folder)
            except OSError:
                if not folder.is_dir():  # if it exists, another build made it at the same time
                    raise
        return folder

    return {
        target: {stage: folder_of(item) for stage, item in need.stages.items() if wanted(item.url)}
        for target, need in needs.items()
    }


Provided = tuple[Mapping[str, str], Mapping[str, Mapping[str, Path]], Mapping[str, str]]
"""The inputs of a build from mirrors or a bundle, as three mappings: from images to contexts, from targets and stages
to folders, and from secrets to texts."""
Provide = Callable[[BuildRun, Callable[[str], None]], AbstractContextManager[Provided]]
"""Function that provides the inputs of a build from mirrors or a bundle. The build's `inputs` already contain the
bootstrapped base images. The second argument is a function that prints a note about the progress."""


@contextmanager
def from_mirrors(run: BuildRun, note: Callable[[str], None]) -> Iterator[Provided]:
    """Yield the inputs that have a mirror. BuildKit fetches all other inputs from the addresses in the Dockerfile."""
    needs = needs_of_targets(run)
    configured, ca = load_settings(os.environ), ca_bundle(run.request.ca, os.environ)
    mirrors, passwords = configured.mirrors, configured.netrc_file
    with (
        temporary_folder(sources_folder()) as scratch,
        DownloadStore.fetching(scratch, configured, ca) as store,
    ):
        stages = fetch_all(needs, store, note, lambda url: mirrors.download(url) != url)
    secrets = {}
    if mirrors.downloads:
        secrets["apt-get"] = apt_get_for_mirrors(mirrors.downloads, passwords)
    if mirrors.python_index:
        secrets["pip.conf"] = pip_conf_text(mirrors.python_index, login_for(mirrors.python_index, passwords))
    mirrored = {image: mirrors.image(image) for image in missing_images(run, needs)}
    yield {image: f"docker-image://{name}" for image, name in mirrored.items() if name != image}, stages, secrets


# A proxy sees the complete address only of http requests. Port 443 tells the proxy that the original scheme was https.
HTTPS_TO_PORT_443 = r"s|https://\([^/: ]*\)/|http://\1:443/|g"


def apt_get_for_mirrors(downloads: Mapping[str, str], netrc_file: Path | None = None) -> str:
    """Return a script to run instead of apt-get: it replaces addresses of package archives by addresses of mirrors.

    `downloads` maps the start of addresses to the replacement of this start. A build step can read the
    script, so it contains only the passwords of mirrors, from a netrc file."""
    # Images may use http or https for an archive. If only one scheme has a mirror, use this mirror for both.
    other = {"http": "https", "https": "http"}
    both = {f"{other[urlsplit(old).scheme]}:{old.partition(':')[2]}": new for old, new in downloads.items()}
    longest_first = sorted((both | dict(downloads)).items(), key=lambda pair: len(pair[0]), reverse=True)
    # A rule must not change the result of another rule. So each rule writes a number, which is replaced at the end.
    sources = [f"s|{_sed_pattern(old)}|\x01{i}\x01|g" for i, (old, _) in enumerate(longest_first)]
    sources += [f"s|\x01{i}\x01|{_sed_replacement(new)}|g" for i, (_, new) in enumerate(longest_first)]
    hosts = {urlsplit(old).hostname or "": urlsplit(new).hostname or "" for old, new in downloads.items()}
    preferences = [
        rf's|^\(Pin: *origin *"\{{0,1\}}\){_sed_pattern(old)}\("\{{0,1\}} *\)$|\1{_sed_replacement(new)}\2|'
        for old, new in hosts.items()
    ]
    entries = netrc.netrc(netrc_file).hosts.items() if netrc_file else ()
    passwords = (
        f"machine {name} login {user} password {password}"
        for name, (user, _, password) in entries  # apt also reads names such as http://host
        if urlsplit(name if "://" in name else f"//{name}").hostname in hosts.values()
    )
    return _apt_get(sources, preferences=preferences, netrc="\n".join(passwords))


def apt_get_for_proxy(address: str, *, recording: bool) -> str:
    """Return a script to run instead of apt-get: it fetches all files through a bundle's proxy, `http://host:port`."""
    # When a bundle is made, the proxy sends a file only after the complete file has been fetched.
    # When a bundle is used, its package lists may have expired; apt still verifies their signatures.
    more = "Acquire::http::Timeout=3600" if recording else "Acquire::Check-Valid-Until=false"
    proxies = [f"Acquire::{scheme}::Proxy={address}" for scheme in ("http", "https")]
    # Package lists that are newer than the bundle could name packages that the bundle lacks.
    outdated = ["/var/lib/apt/lists/*", *(["/var/cache/apt/archives/*.deb"] if recording else [])]
    return _apt_get([HTTPS_TO_PORT_443], outdated=outdated, options=[*proxies, "Acquire::PDiffs=false", more])


def _apt_get(sources: Sequence[str], **parts: object) -> str:
    # The template is a shell script, so HTML escaping would be wrong.
    environment = jinja2.Environment(trim_blocks=True, keep_trailing_newline=True)  # noqa: S701
    text = (Path(__file__).parent / "templates" / "apt-get.sh.j2").read_text()
    return environment.from_string(text).render(sources=sources, **parts)


def _sed_pattern(text: str) -> str:
    return re.sub(r"([][\\.*^$|])", r"\\\1", text)


def _sed_replacement(text: str) -> str:
    return re.sub(r"([\\&|])", r"\\\1", text)
