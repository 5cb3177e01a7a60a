"""Packages from the archives of the distributions: which of them a release lacks, before a build stops.

Images and build stages install these packages without a pin, because apt verifies them. The lock does not contain
them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, lru_cache, partial
from typing import NamedTuple

from debian.deb822 import Release

from imagebuild.core import debian
from imagebuild.core.errors import CommandError, Unreachable, suggestion
from imagebuild.core.fields import Arch
from imagebuild.core.http import Downloads
from imagebuild.core.patterns import data_of
from imagebuild.core.run import RunProgram
from imagebuild.lock.repositories import SIGNED, key_in_package, missing, read_packages, signed_release
from imagebuild.project.lockfile import Fingerprint, PackageSource
from imagebuild.project.matrix import PACKAGE, Base


class Distribution(NamedTuple):
    """An entry of archives.yaml, which explains the fields."""

    releases: Mapping[str, str]
    keyring: str
    keys: Collection[Fingerprint]
    components: Collection[str]
    suites: Mapping[Arch, Collection[str]] = {}


@cache
def known_distributions() -> Mapping[str, Distribution]:
    """Return the distributions whose archives are known."""
    return {name: Distribution(**row) for name, row in data_of(__file__, "archives").items()}


class DistributionArchive(NamedTuple):
    """The archive of a distribution's release for an architecture."""

    distribution: Distribution
    suites: tuple[str, ...]
    """URLs of the suites, the release itself first."""


def archive_of(base: Base, arch: Arch) -> DistributionArchive | None:
    """Return the archive whose packages an image of this base can install. None if no archive is known."""
    name, _, tag = base.image.rpartition(":")
    distribution = known_distributions().get(name.rpartition("/")[2])
    for version, release in distribution.releases.items() if distribution else ():
        if base.release == release or tag.replace(".", "-").startswith((version.replace(".", "-"), release)):
            assert distribution
            own = tuple(f"{s.uri.rstrip('/')}/dists/{s.suite}/" for s in debian.debian_sources(release))
            suites = tuple(url.format(release=release) for url in distribution.suites.get(arch, ()))
            return DistributionArchive(distribution, suites or own) if suites or own else None
    return None


INSTALL = re.compile(r"\bapt-get\s(?:[^\n;&|\\]|\\\n)*?(?<=\s)install\s((?:[^\n;&|\\]|\\\n)*)")
"""Matches the words after `apt-get install`, also on continued lines."""


def installed_packages(text: str) -> Iterator[str]:
    """Yield the packages that the shell commands of a Dockerfile install, as `name` or `name=version`.
    Packages whose names contain other variables than TARGETARCH are left out."""
    for words in INSTALL.findall(re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE)):
        for word in words.replace("\\\n", " ").split():
            package = word.strip("'\"").removesuffix("*").replace(":$TARGETARCH", "")
            if PACKAGE.fits(package):
                yield package


@dataclass(frozen=True)
class ReleasePackages(PackageSource):
    """The packages that images and build stages install from the archive of a release, for one architecture."""

    archive: DistributionArchive | None = None
    owners: tuple[tuple[str, str], ...] = ()
    """Each package, with a component or image that installs it."""


def check_packages(run: RunProgram, web: Downloads, wanted: ReleasePackages) -> list[str]:
    """Return a message about each package that apt cannot install in an image.

    Suites are read until all packages are found. Raises Unreachable if a suite does not answer or no archive is known,
    and CommandError if an archive is not signed by its keys."""
    if wanted.archive is None:
        raise Unreachable(f"{wanted.suite}: the archive of {wanted.url} is not known; Debian's is known only on Debian")
    distribution, (first, *_) = wanted.archive
    read = lru_cache(1)(partial(read_packages, web))  # the first index is read twice
    folders = [f"{component}/binary-{wanted.archs[0]}/" for component in distribution.components]
    versions, providers = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    names, lacking, key = set[str](), list[str](), b""
    for base in wanted.archive.suites:
        content = web.read(f"{base}InRelease")
        if not key:
            # This release is not trusted yet. Its package only leads to keys, whose fingerprints are known.
            unsigned = Release(SIGNED.sub(rb"\g<text>", content).decode(errors="replace"))
            index = read(base, debian.package_indexes(unsigned, folders[0]))
            key = key_in_package(web, first.partition("dists/")[0], index, distribution.keyring)
        release, signers = signed_release(run, key, content)
        if not set(signers) & set(distribution.keys):
            raise CommandError(f"{base}InRelease: is signed by {', '.join(signers)}, which is not a key of the archive")
        for folder in folders:
            index = read(base, debian.package_indexes(release, folder))
            offers = debian.offers_in_index(index, map(package_name, wanted.packages))
            for table, more in ((versions, offers.versions), (providers, offers.providers)):
                for name, found in more.items():
                    table[name].update(found)
            lacking = [p for p in wanted.packages if not _installable(p, versions, providers)]
            if not lacking:
                return []
            names |= debian.package_names(index)
    return [
        f"{owner}: {wanted.suite} {_problem(package, versions, providers, names)}"
        for package, owner in wanted.owners
        if package in lacking
    ]


def package_name(package: str) -> str:
    """Return the name in `name`, `name:architecture` or `name=version`."""
    return re.split("[:=]", package)[0]


Table = Mapping[str, Collection[str]]


def _installable(package: str, versions: Table, providers: Table) -> bool:
    """Return whether apt finds a package as images request it: with this beginning of the version, or under this name.
    Instead of a name without version, apt also takes the only package that provides the name."""
    name, _, wanted = package_name(package), *package.partition("=")[1:]
    fitting = any(fnmatchcase(version, f"{wanted}*") for version in versions[name])
    return fitting or (not wanted and not versions[name] and len(providers[name]) == 1)


def _problem(package: str, versions: Table, providers: Table, names: set[str]) -> str:
    """Return why apt does not find a package, and what to request instead. `names` contains all packages."""
    name, wanted = package_name(package), debian.upstream_version(package.partition("=")[2])
    known = sorted(versions[name], key=debian.version_key)
    text = missing(package, known, sorted(providers[name]))
    for version in reversed(known):
        if f"{debian.upstream_version(version)}.".startswith(f"{wanted}."):
            other = re.sub("-[^-]*$", "", version)
            return f"{text}; {other} is this upstream version: request {other}"
    return text if known or providers[name] else text + suggestion(name, names)
