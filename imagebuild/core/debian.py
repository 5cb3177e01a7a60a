"""Debian's file formats: dpkg's status file, Release files and package indexes of archives, lists of apt sources."""

import bz2
import gzip
import hashlib
import io
import lzma
import platform
import posixpath
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NamedTuple

from debian.deb822 import Deb822, Release
from debian.debian_support import NativeVersion
from zstandard import ZstdDecompressor, ZstdError

from imagebuild.core.errors import CommandError, ResultError

UNPACK: Mapping[str, Callable[[IO[bytes]], Any]] = {
    "Packages.xz": lzma.open,
    "Packages.zst": lambda file: ZstdDecompressor().stream_reader(file, read_across_frames=True),
    "Packages.gz": gzip.open, "Packages.bz2": bz2.open, "Packages": io.BufferedReader,
}  # fmt: skip
"""Maps each file name of a package index to the function that decompresses the file. The smallest file comes first."""
LARGEST_INDEX = 512 << 20
"""Maximum size of a decompressed package index, in bytes."""
LONGEST_VERSION = 1000
"""Maximum length of the version of a package. Python refuses numbers of more than 4300 digits."""
ETC = Path("/etc/apt")
_ONE_LINE = re.compile(r"^\s*deb\s+(?:\[(?P<options>[^]]*)\]\s+)?(?P<uri>\S+)\s+(?P<suite>\S+)(?P<components>.*)$")


def flat_repository_folder(url: str, suite: str) -> str | None:
    """Return the URL of the folder of a flat repository, with a final slash.
    None if the suite is below `dists/`, so that the repository is not flat."""
    if not suite.endswith("/"):
        return None
    path = posixpath.normpath(f"./{suite}")
    return f"{url.rstrip('/')}/" + ("" if path == "." else f"{path}/")


RETRY = "try again, or use another mirror"


def invalid_because(release: Release, now: datetime) -> str | None:
    """Return why apt does not accept the dates in a Release file, and what to do.
    None if it accepts them. Raises ResultError if a date cannot be read."""
    # apt accepts dates that are at most ten seconds in the future.
    for field, sign, late, problem in (
        ("Valid-Until", -1, 0, f"was valid until {{}}, so this is an old copy; {RETRY}"),
        ("Date", 1, 10, "is of {}, which is in the future; set the clock of this machine, or use another mirror"),
    ):
        try:
            date = parsedate_to_datetime(release[field]).astimezone(UTC) if release.get(field) else now
        except (ValueError, OverflowError):
            raise ResultError(f"{field} in the Release file is not a date: {release[field]!r}; {RETRY}") from None
        if sign * (date - now).total_seconds() > late:
            return problem.format(release[field])
    return None


def package_indexes(release: Release, folder: str = "") -> tuple[tuple[str, str, str], ...]:
    """Return the path, name and sha256 of each package index that a Release file lists, the smallest file first.

    `folder` is the folder of a component, such as `main/binary-amd64/`. `folder` is empty for a flat repository. If the
    server also has the file under its hash, this path comes first, because it cannot change between two requests.
    Raises ResultError if the list cannot be read."""
    try:
        listed = {posixpath.normpath(file["name"]): file["SHA256"] for file in release.get("SHA256", ())}
    except (KeyError, TypeError):
        raise ResultError(f"SHA256 in the Release file is not a list of hashes, sizes and names; {RETRY}") from None
    by_hash = release.get("Acquire-By-Hash", "").lower() == "yes"
    return tuple(
        (path, name, listed[folder + name])
        for name in UNPACK
        if folder + name in listed
        for path in (*([f"{folder}by-hash/SHA256/{listed[folder + name]}"] if by_hash else ()), folder + name)
    )


def verified_index(path: str, name: str, wanted: str, content: bytes) -> str:
    """Return the decompressed text of a package index. `name` says how it is compressed.

    Raises CommandError if the Release file lists another sha256 for the index, and ResultError if the index cannot be
    decompressed."""
    digest = hashlib.sha256(content).hexdigest()
    if digest != wanted.lower():
        raise CommandError(f"{path} has the SHA256 {digest}, but the signed release says {wanted}; try again")
    try:
        text = UNPACK[name](io.BytesIO(content)).read(LARGEST_INDEX + 1)
        if len(text) > LARGEST_INDEX:
            raise OSError(f"it is larger than {LARGEST_INDEX >> 20} MiB")
        return str(text, errors="replace")
    except (OSError, lzma.LZMAError, zlib.error, EOFError, ZstdError) as error:
        raise ResultError(f"{path} cannot be unpacked: {error}; {RETRY}") from None


class Offers(NamedTuple):
    """What package indexes offer for each of some names."""

    versions: Mapping[str, list[str]]
    """Maps each name to the versions of the package, oldest first."""
    providers: Mapping[str, list[str]] = MappingProxyType({})
    """Maps each name to the other packages that provide it."""
    hashes: Mapping[str, Collection[str]] = MappingProxyType({})
    """Maps each package, as `name=version`, to the sha256 of its files."""
    signed_by: tuple[str, ...] = ()
    """Fingerprints of the keys that signed the repository."""


def paragraphs_about(index: str, names: Iterable[str]) -> Iterator[Deb822]:
    """Yield the paragraphs of a package index whose field Package or Provides contains one of the names."""
    words = tuple(names)
    field = rf"^(?:Package|Provides):(?:.*[\s,])?(?:{'|'.join(map(re.escape, words))})(?![\w.+-])"
    # Parsing all paragraphs of a distribution's index would take many seconds, so most are left out by a fast test.
    for text in re.split(r"\n[ \t\r]*\n", index) if words else ():
        if any(word in text for word in words) and re.search(field, text, re.MULTILINE | re.IGNORECASE):
            yield Deb822(text)


def offers_in_index(
    index: str, names: Iterable[str], archs: Collection[str] = (), signed_by: tuple[str, ...] = ()
) -> Offers:
    """Return what a package index offers for the names.
    A version counts if it exists for each of `archs`. A version that dpkg could not read does not count."""
    found: dict[str, dict[str, set[str]]] = {name: {} for name in names}
    hashes: dict[str, set[str]] = {}
    providers: dict[str, set[str]] = {name: set() for name in found}
    for package in paragraphs_about(index, found):
        name, version, arch = (package.get(field, "") for field in ("Package", "Version", "Architecture"))
        with suppress(ResultError):
            version_key(version)
            if name in found:
                found[name].setdefault(version, set()).update(archs if arch in ("", "all") else [arch])
                hashes.setdefault(f"{name}={version}", set()).add(package.get("SHA256", ""))
            for text in package.get("Provides", "").split(",") if not archs or arch in (*archs, "all", "") else ():
                other = re.split(r"[\s(:]", text.strip())[0]
                if other in providers and other != name:
                    providers[other].add(name)
    return Offers(
        {name: sorted((v for v in of if of[v] >= set(archs)), key=version_key) for name, of in found.items()},
        {name: sorted(others) for name, others in providers.items() if others},
        hashes,
        signed_by,
    )


def package_names(index: str) -> set[str]:
    """Return the names of all packages in a package index."""
    return set(re.findall(r"^Package: *(\S+)", index, re.MULTILINE))


def upstream_version(version: str) -> str:
    """Return the part of a package's version that upstream chose, without epoch and revision: `5.0.9` for
    `1:6.0.0+really5.0.9-3build1`."""
    return re.sub(r"^\d+:|-[^-]*$", "", version).rpartition("+really")[2]


def version_key(version: str) -> NativeVersion:
    """Return a key that sorts versions of packages as dpkg does. Raises ResultError if the text is not a version."""
    if len(version) > LONGEST_VERSION:
        raise ResultError(f"the version {version[:20]}… is longer than {LONGEST_VERSION} characters")
    try:
        return NativeVersion(version)
    except ValueError as error:
        raise ResultError(str(error)) from None


@dataclass(frozen=True)
class Package:
    """A package that is installed in an image or on this machine."""

    name: str
    version: str
    architecture: str = ""
    source: str = ""
    """Name of the source package. The version of the source package follows in brackets if it differs from
    `version`."""
    provides: str = ""
    """Virtual packages that this package provides, as dpkg writes them."""


def installed_packages(status: str) -> tuple[Package, ...]:
    """Return the installed packages in a status file of dpkg."""
    fields = ["Package", "Status", "Version", "Architecture", "Source", "Provides"]
    return tuple(
        Package(p["Package"], *(p.get(name, "") for name in fields[2:]))
        # Lines, because the parser reads the file that a text of one line names.
        for p in Deb822.iter_paragraphs(status.split("\n"), fields=fields, use_apt_pkg=False)
        # Images without dpkg (distroless) list their packages without a status.
        if "Package" in p and p.get("Status", "ok installed").endswith(" installed")
    )


def package_versions(packages: Iterable[Package], architecture: str) -> dict[str, str]:
    """Return the version of each installed package.

    Maps names to versions. If the architecture of a package is not the architecture of the image, its name is
    `name:architecture`."""
    own = {"", "all", architecture}
    return {p.name if p.architecture in own else f"{p.name}:{p.architecture}": p.version for p in packages}


@dataclass(frozen=True)
class AptSource:
    """A suite of an apt archive. `signed_by` is the path of a keyring, or the text of the key."""

    uri: str
    suite: str
    components: tuple[str, ...]
    signed_by: str | None = None


def os_release() -> dict[str, str]:
    """Return the fields of /etc/os-release of this machine. An empty mapping if the file does not exist."""
    with suppress(OSError):
        return platform.freedesktop_os_release()
    return {}


def parse_deb822(text: str) -> tuple[AptSource, ...]:
    """Return the enabled sources of binary packages in a `*.sources` file of apt."""
    return tuple(
        AptSource(uri, suite, tuple(stanza.get("Components", "").split()), stanza.get("Signed-By", "").strip() or None)
        for stanza in Deb822.iter_paragraphs(text.split("\n"), use_apt_pkg=False)
        if "deb" in stanza.get("Types", "").split() and stanza.get("Enabled", "yes").lower() != "no"
        for uri in stanza.get("URIs", "").split()
        for suite in stanza.get("Suites", "").split()
    )


def parse_oneline(text: str) -> tuple[AptSource, ...]:
    """Return the sources of binary packages in a `*.list` file of apt, without installation media (`cdrom:`)."""
    sources = []
    for line in text.splitlines():
        match = _ONE_LINE.match(line.split("#", 1)[0])
        if match and not match["uri"].startswith("cdrom:"):
            keyring = re.search(r"signed-by=(\S+)", match["options"] or "")
            components = tuple(match["components"].split())
            sources.append(AptSource(match["uri"], match["suite"], components, keyring[1] if keyring else None))
    return tuple(sources)


def _behind_mirror_list(source: AptSource) -> AptSource:
    """Replace a URL that names a mirror list (`mirror+file:/list`, as in cloud images) by the first URL in the list."""
    listing = Path(source.uri.removeprefix("mirror+file:").replace("///", "/"))
    if not source.uri.startswith("mirror+file:") or not listing.is_file():
        return source
    lines = [line.split()[0] for line in listing.read_text().splitlines() if line.strip() and line[0] != "#"]
    return replace(source, uri=lines[0]) if lines else source


def apt_sources() -> tuple[AptSource, ...]:
    """Return all apt sources of this machine, one for each suite."""
    parts = ETC / "sources.list.d"
    paths = [ETC / "sources.list", *sorted(parts.glob("*.list")), *sorted(parts.glob("*.sources"))]
    sources: list[AptSource] = []
    for path in filter(Path.is_file, paths):
        parse = parse_deb822 if path.suffix == ".sources" else parse_oneline
        sources.extend(map(_behind_mirror_list, parse(path.read_text())))
    return tuple(dict.fromkeys(sources))


def sources_for_release(sources: Iterable[AptSource], codename_from: str, codename_to: str) -> tuple[AptSource, ...]:
    """Return the sources of the distribution's own archive for another release, without backports.

    A third-party archive may also use the name of a release as a suite (`bookworm main`). Such an archive is left out:
    it is signed by another key than the suites -updates and -security, and not by apt's default key."""
    translated = {codename_from + part: codename_to + part for part in ("", "-updates", "-security")}
    own = [s for s in sources if s.suite in translated and "main" in s.components]
    keys = {s.signed_by for s in own if s.suite != codename_from} | {None}
    archive = [s for s in own if s.signed_by in keys or "-archive-" in Path(s.signed_by or "").name]
    return tuple(dict.fromkeys(replace(s, suite=translated[s.suite]) for s in archive))


def as_oneline(sources: Iterable[AptSource]) -> str:
    """Return apt sources as the text of a `*.list` file.

    Such a file can name a keyring, but cannot contain a key. If `signed_by` is a key, apt uses its default keyring
    instead."""
    lines = []
    for source in sources:
        keyring = source.signed_by if source.signed_by and "\n" not in source.signed_by else None
        option = f"[signed-by={keyring}] " if keyring else ""
        lines.append(f"deb {option}{source.uri} {source.suite} {' '.join(source.components)}\n")
    return "".join(lines)


def debian_sources(release: str = "trixie") -> tuple[AptSource, ...]:
    """Return the apt sources of a Debian release, with the archive that this machine uses.
    Return an empty tuple if the machine does not run Debian."""
    machine = os_release()
    codename = machine.get("VERSION_CODENAME", "")
    if machine.get("ID") != "debian" or not codename:
        return ()
    sources = sources_for_release(apt_sources(), codename, release)
    return tuple(replace(source, components=("main",)) for source in sources)
