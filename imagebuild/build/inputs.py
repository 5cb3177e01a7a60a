"""Compute what builds fetch, and turn sources that imagebuild fetched itself into contexts of BuildKit."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from imagebuild.build import base
from imagebuild.core.fields import Commit
from imagebuild.core.files import write_text
from imagebuild.oci import layout
from imagebuild.oci.layout import CREATED, ImageSettings, add_tree, has_image
from imagebuild.project.lockfile import BaseImage, Lock, WheelSet, commit_of, digest_of, hash_of, wheels_of
from imagebuild.render import renderer
from imagebuild.render.recipe import ARCHS, Recipe


@dataclass(frozen=True)
class ArchiveFile:
    """An archive, pinned by its sha256."""

    url: str
    sha256: str


@dataclass(frozen=True)
class GitCommit:
    """A commit of a git repository."""

    url: str
    commit: Commit


@dataclass(frozen=True)
class KeyFile:
    """The key of a repository of packages. What the build trusts is its fingerprint, which the build checks."""

    url: str


Fetched = ArchiveFile | GitCommit | KeyFile


@dataclass(frozen=True)
class NeededInputs:
    """What one target needs from elsewhere, besides packages."""

    stages: dict[str, Fetched]
    """Stage that holds nothing else → what it holds."""
    images: frozenset[str]
    """As FROM names them, with digest."""
    wheels: frozenset[str]
    """Hashes."""


def needed_inputs(recipe: Recipe, lock: Lock, stages: Iterable[str], platforms: Iterable[str]) -> NeededInputs:
    """What a target's Dockerfile, which has these stages, fetches for the platforms. Raises ConfigError."""
    present = frozenset(stages)
    archs = [arch for arch in ARCHS if f"linux/{arch}" in set(platforms)]
    fetched = {stage: found for name in recipe.stages for stage, found in _fetched(recipe, name, lock)}
    unwanted = {f"{name}-source-{arch}" for name in recipe.stages for arch in ARCHS if arch not in archs}
    sources = tuple(recipe.sources())
    wheels = (w for s in sources if isinstance(s, WheelSet) for w in wheels_of(lock, s))
    return NeededInputs(
        {stage: found for stage, found in fetched.items() if stage in present - unwanted},
        frozenset(digest_of(lock, s.reference) for s in sources if isinstance(s, BaseImage)),
        frozenset(digest for wheel in wheels for arch, digest in wheel.sha256.items() if arch in archs),
    )


def _fetched(recipe: Recipe, name: str, lock: Lock) -> Iterator[tuple[str, Fetched]]:
    """Stage → what it fetches, of a component; the names are those that `macros.j2` gives them."""
    for arch, url in recipe.archives(name).items():
        if f"linux/{arch}" in recipe.target.platforms:
            yield f"{name}-source-{arch}", ArchiveFile(url, hash_of(lock, name, url))
    if git := recipe.git(name):
        yield f"{name}-source", GitCommit(git.url, commit_of(lock, git))
    if repository := renderer.package_repository(recipe, name, lock, stage=True):
        yield f"{name}-key", KeyFile(repository["key"])


ADDED_FILE = 0o600
"""What BuildKit's ADD gives a file that it downloaded."""


@dataclass(frozen=True)
class Trees:
    """A folder of trees, each under a key that says what it holds."""

    folder: Path

    @property
    def layout(self) -> Path:
        return self.folder / "layout"

    def find(self, key: str) -> str | None:
        """The context of a tree, if it is here."""
        try:
            digest: str = json.loads(self._record(key).read_text())["digest"]
        except (OSError, ValueError, LookupError):
            return None
        return f"oci-layout://{self.layout}@{digest}" if has_image(self.layout, digest) else None

    def add_file(self, key: str, name: str, path: Path) -> str:
        """A tree of one file, as ADD makes it; returns its context."""
        with tempfile.TemporaryDirectory(prefix="imagebuild-", dir=self._made()) as scratch:
            tar = Path(scratch) / "tar"
            with tarfile.open(tar, "w") as archive:
                archive.addfile(_root())
                about = archive.gettarinfo(path, name)
                about.mode = ADDED_FILE
                with path.open("rb") as file:
                    archive.addfile(_plain(about), file)
            return self._add(key, tar)

    def add_folder(self, key: str, folder: Path) -> str:
        """The files of a folder; returns their context."""

        def usual(about: tarfile.TarInfo) -> tarfile.TarInfo:
            # As git checks out with the usual umask, whatever the one here is.
            if not about.issym():
                about.mode = 0o755 if about.isdir() or about.mode & 0o100 else 0o644
            return _plain(about)

        with tempfile.TemporaryDirectory(prefix="imagebuild-", dir=self._made()) as scratch:
            tar = Path(scratch) / "tar"
            with tarfile.open(tar, "w") as archive:
                archive.add(folder, "./", filter=usual)
            return self._add(key, tar)

    def _made(self) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder

    def _add(self, key: str, tar: Path) -> str:
        digest = add_tree(self.layout, tar, tuple(base.ARCHITECTURES), ImageSettings(CREATED))
        write_text(self._record(key), json.dumps({"key": key, "digest": digest}))
        return f"oci-layout://{self.layout}@{digest}"

    def _record(self, key: str) -> Path:
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _root() -> tarfile.TarInfo:
    root = tarfile.TarInfo("./")
    root.type, root.mode = tarfile.DIRTYPE, 0o755
    return _plain(root)


def _plain(about: tarfile.TarInfo) -> tarfile.TarInfo:
    about.uid = about.gid = 0
    about.uname = about.gname = ""
    about.mtime = int(layout.EPOCH)
    return about


WRAPPER = r"""#!/bin/sh
# apt-get through mirrors: rewrites where packages come from, for this one call.
set -eu
etc=$(mktemp -d /dev/shm/imagebuild-apt.XXXXXX)
trap 'rm -rf "$etc"' EXIT
trap 'exit 143' HUP INT TERM
chmod 755 "$etc"
mkdir "$etc/sources" "$etc/preferences"
touch "$etc/netrc"
chmod 600 "$etc/netrc"
cat > "$etc/netrc" <<'NETRC'
@NETRC@
NETRC
cat > "$etc/sources.sed" <<'RULES'
@SOURCES@
RULES
cat > "$etc/preferences.sed" <<'RULES'
@PREFERENCES@
RULES
copy() { # RULES FILE TARGET
  if [ -f "$2" ]; then sed -f "$etc/$1.sed" "$2" > "$3"; fi
}
copy sources /etc/apt/sources.list "$etc/sources.list"
for file in /etc/apt/sources.list.d/*; do copy sources "$file" "$etc/sources/${file##*/}"; done
copy preferences /etc/apt/preferences "$etc/preferences.list"
for file in /etc/apt/preferences.d/*; do copy preferences "$file" "$etc/preferences/${file##*/}"; done
@BEFORE@
/usr/bin/apt-get -o Dir::Etc::SourceList="$etc/sources.list" -o Dir::Etc::SourceParts="$etc/sources" \
  -o Dir::Etc::Preferences="$etc/preferences.list" -o Dir::Etc::PreferencesParts="$etc/preferences" \
  -o Dir::Etc::netrc="$etc/netrc" @OPTIONS@"$@"
"""

FORGET = r"""case " $* " in
*" update "*) rm -rf @WHAT@ ;;
esac"""
LISTS = "/var/lib/apt/lists/*"
ARCHIVES = "/var/cache/apt/archives/*.deb"

# Addresses in apt's sources may lack the slash at the end.
SLASHES = (
    r"s|\(https\{0,1\}://[^[:space:]]*[^/[:space:]]\)\([[:space:]]\)|\1/\2|g",
    r"s|\(https\{0,1\}://[^[:space:]]*[^/[:space:]]\)$|\1/|",
)
# A proxy sees the whole address of http only, so port 443 tells it that the address was one of https.
TO_PROXY = r"s|https://\([^/: ]*\)/|http://\1:443/|g"


def for_mirrors(downloads: Mapping[str, str], netrc: str = "") -> str:
    """The script that rewrites addresses by their beginnings; `netrc` is the text of that file."""
    longest_first = sorted(downloads, key=lambda p: len(p.partition("://")[2]), reverse=True)
    # A rule must not see what another one wrote: each puts a number there, and the last rules put the addresses.
    sources = [f"s|{_schemes(prefix, downloads)}|\x01{i}\x01|g" for i, prefix in enumerate(longest_first)]
    sources += [f"s|\x01{i}\x01|{_replacement(downloads[prefix])}|g" for i, prefix in enumerate(longest_first)]
    hosts = {_host(old): _host(new) for old, new in downloads.items()}
    preferences = [
        rf's|^\(Pin: *origin *"\{{0,1\}}\){_pattern(old)}\("\{{0,1\}} *\)$|\1{_replacement(new)}\2|'
        for old, new in hosts.items()
    ]
    return _script(sources, preferences, netrc=netrc)


def for_depot(address: str, *, recording: bool) -> str:
    """The script that gets everything through the depot, a proxy at `http://host:port`."""
    options = {"Acquire::http::Proxy": address, "Acquire::https::Proxy": address, "Acquire::PDiffs": "false"}
    if not recording:
        # A bundle's indices are as old as the bundle; they are signed all the same.
        options["Acquire::Check-Valid-Until"] = "false"
    # Indices that are newer than the bundle's would ask for packages that it lacks.
    forget = FORGET.replace("@WHAT@", f"{LISTS} {ARCHIVES}" if recording else LISTS)
    return _script([TO_PROXY], [], before=forget, options=options)


def _script(
    sources: Sequence[str],
    preferences: Sequence[str],
    *,
    netrc: str = "",
    before: str = "",
    options: Mapping[str, str] | None = None,
) -> str:
    words = "".join(f"-o {shlex.quote(f'{name}={value}')} " for name, value in (options or {}).items())
    parts = {
        "NETRC": netrc.rstrip("\n"),
        "SOURCES": "\n".join([*SLASHES, *sources]),
        "PREFERENCES": "\n".join(preferences),
        "BEFORE": before,
        "OPTIONS": words,
    }
    return re.sub(r"@([A-Z]+)@", lambda found: parts[found[1]], WRAPPER)


def _schemes(prefix: str, downloads: Mapping[str, str]) -> str:
    """The pattern of a prefix: for http and https, unless there is one for the other too."""
    scheme, _, rest = prefix.partition("://")
    other = {"http": "https", "https": "http"}[scheme]
    return _pattern(prefix) if f"{other}://{rest}" in downloads else rf"https\{{0,1\}}://{_pattern(rest)}"


def _host(url: str) -> str:
    """Apt's `origin`: the host without port."""
    return urlsplit(url).hostname or ""


def _pattern(text: str) -> str:
    return re.sub(r"([][\\.*^$|])", r"\\\1", text)


def _replacement(text: str) -> str:
    return re.sub(r"([\\&|])", r"\\\1", text)
