"""Signed repositories of packages: which key signs one, and which versions it has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from imagebuild.apt import Run
from imagebuild.errors import Absent, CommandError, ConfigError, ImagebuildError, ResultError
from imagebuild.lockfile import LockedRepository
from imagebuild.locking import debian
from imagebuild.locking.signatures import Signed, verify
from imagebuild.locking.web import Web
from imagebuild.sources import PackageSource

SHOWN_VERSIONS = 5


@dataclass(frozen=True)
class Index:
    """What a signed repository offers of the packages that were asked for."""

    fingerprints: tuple[str, ...]
    """Of the keys that signed it."""
    versions: Mapping[str, list[str]]
    """Package → versions, oldest first."""


def read(run: Run, web: Web, source: PackageSource, names: Iterable[str]) -> Index:
    """The repository's signed index.

    Raises Unreachable or Absent if a part of it cannot be had, CommandError if a signature or a hash is wrong or the
    release has expired, ConfigError for a suite that is not flat, ResultError for an index that cannot be read.
    """
    base = debian.flat_base(source.url, source.suite)
    if base is None:
        raise ConfigError(
            f"{source.url}: the suite {source.suite!r} is not flat: only those that end in / can be locked"
        )
    try:
        signed = _release(run, web, base, web.read(source.key))
        release = debian.fields(signed.text)
        if until := debian.expired(release, datetime.now(UTC)):
            raise CommandError(f"the release was valid until {until}; is this an old copy?")
        for path, algorithm, digest in debian.indexes(release):
            try:
                content = web.read(base + path)
            except Absent:
                continue  # a release may list forms that the server does not keep
            text = debian.unpacked(path, algorithm, digest, content)
            return Index(signed.fingerprints, debian.versions(text, names))
    except ImagebuildError as error:
        text = str(error)
        raise error if source.url in text or source.key in text else type(error)(f"{source.url}: {text}") from None
    raise ResultError(f"{source.url}: the signed release lists no index of packages with a sha256 that is there")


def resolve(run: Run, web: Web, source: PackageSource, known: LockedRepository | None) -> LockedRepository:
    """Key and versions of the packages that are wanted; versions that are known stay.

    Raises ConfigError if another key than the known one signs the repository, or it lacks a package; and as `read`.
    """
    index = read(run, web, source, (name_of(package) for package in source.packages))
    fingerprint = check_key(source.url, index, known)
    before = known.packages if known else {}
    todo = [package for package in source.packages if package not in before]
    found = {package: choose(source.url, index, package) for package in todo}
    return LockedRepository(fingerprint=fingerprint, packages={**before, **found})


def check_key(url: str, index: Index, known: LockedRepository | None) -> str:
    """The fingerprint of the key that signed. Raises ConfigError if it is not the known one."""
    if known is None or known.fingerprint in index.fingerprints:
        return known.fingerprint if known else index.fingerprints[0]
    raise ConfigError(
        f"{url}: is signed by the key {', '.join(index.fingerprints)}, but imagebuild.lock trusts "
        f"{known.fingerprint}; if its owner announced the change, `imagebuild lock --update {url}` takes the new key"
    )


def choose(url: str, index: Index, package: str) -> str:
    """The version of a package: the one that is asked for, or the newest. Raises ConfigError if it is not there."""
    name, _, wanted = package.partition("=")
    available = index.versions.get(name, [])
    if not available:
        raise ConfigError(f"{url}: has no package {name}")
    if wanted and wanted not in available:
        shown = ", ".join(reversed(available[-SHOWN_VERSIONS:]))
        raise ConfigError(f"{url}: has no {name} in version {wanted}; the newest: {shown}")
    return wanted or available[-1]


def name_of(package: str) -> str:
    return package.partition("=")[0]


def _release(run: Run, web: Web, base: str, key: bytes) -> Signed:
    try:
        inline = web.read(f"{base}InRelease")
    except Absent:
        content, signature = web.read(f"{base}Release"), web.read(f"{base}Release.gpg")
        return verify(run, key, content, signature)
    return verify(run, key, inline)
