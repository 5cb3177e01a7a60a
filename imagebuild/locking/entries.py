"""The lock as a flat table, and what of it a set of sources needs. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import date
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from imagebuild.errors import ConfigError
from imagebuild.lockfile import UNRESOLVED, Lock, LockedImage, LockedRepository, Unresolved, Wheel
from imagebuild.sources import Archive, BaseImage, GitRef, PackageSource, Source, WheelSet

Key = tuple[str, ...]
"""Where an entry stands in the lock: `("git", address, tag)`."""
Entry = str | LockedImage | LockedRepository | tuple[Wheel, ...]
"""What the lock has for a source: a hash, a commit, an image, … or `unresolved`."""
Table = dict[Key, Entry]

NESTED = ("git", "wheels")
KINDS = ("archives", "git", "images", "repositories", "wheels")


def key_of(source: Source) -> Key:
    match source:
        case Archive(_, url):
            return ("archives", url)
        case GitRef(url, tag, _):
            return ("git", url, tag)
        case BaseImage(reference):
            return ("images", reference)
        case WheelSet(component, version, _):
            return ("wheels", component, version)
        case PackageSource(url):
            return ("repositories", url)


def table(lock: Lock) -> Table:
    """The lock, flat; changes do not reach the lock."""
    found: Table = {}
    for kind in KINDS:
        for name, entry in getattr(lock, kind).items():
            if kind in NESTED:
                found |= {(kind, name, part): value for part, value in entry.items()}
            else:
                found[kind, name] = entry
    return found


def lock_of(entries: Mapping[Key, Entry], day: date | None = None) -> Lock:
    """The lock of a table, with its date."""
    data: dict[str, Any] = {}
    for (kind, *names), entry in entries.items():
        place = data.setdefault(kind, {})
        for name in names[:-1]:
            place = place.setdefault(name, {})
        place[names[-1]] = entry
    return Lock.model_validate({**data, "date": day})


def text_of(lock: Lock) -> str:
    """The file: sorted, so that a diff shows what changed."""
    return json.dumps(lock.model_dump(mode="json", by_alias=True, exclude_none=True), indent=1, sort_keys=True) + "\n"


def merged(sources: Iterable[Source]) -> tuple[Source, ...]:
    """Each entry of the lock once: the packages that targets want of one repository together, no given commits.

    Raises ConfigError if two components give one repository different keys or suites.
    """
    found: dict[Key, Source] = {}
    for source in sources:
        if isinstance(source, GitRef) and source.commit:
            continue
        before = found.setdefault(key_of(source), source)
        if isinstance(source, PackageSource) and isinstance(before, PackageSource):
            if (before.suite, before.key) != (source.suite, source.key):
                raise ConfigError(
                    f"{source.url}: one component says suite {before.suite!r} and key {before.key}, "
                    f"another suite {source.suite!r} and key {source.key}"
                )
            packages = tuple(sorted({*before.packages, *source.packages}))
            found[key_of(source)] = PackageSource(source.url, source.suite, source.key, packages)
    return tuple(found.values())


def lacks(source: Source, entry: Entry | None) -> Unresolved | str | None:
    """What the entry lacks for the source, None if nothing: `unresolved`, or in words."""
    if entry is None:
        return "not in the lock"
    if entry == UNRESOLVED:
        return UNRESOLVED
    match source, entry:
        case PackageSource(packages=packages), LockedRepository():
            absent = [package for package in packages if package not in entry.packages]
            return f"the lock has no version of {', '.join(absent)}" if absent else None
        case WheelSet(requirements=requirements), tuple():
            return None if _fit(requirements, entry) else f"the lock has other wheels than {', '.join(requirements)}"
    return None


def _fit(requirements: tuple[str, ...], wheels: tuple[Wheel, ...]) -> bool:
    """Are these wheels what is required, no more and no less?"""
    versions = {canonicalize_name(wheel.name): wheel.version for wheel in wheels}
    try:
        wanted = [Requirement(text) for text in requirements]
    except InvalidRequirement as error:
        raise ConfigError(f"wheels: {error}") from None
    return {canonicalize_name(r.name) for r in wanted} == versions.keys() and all(
        r.specifier.contains(versions[canonicalize_name(r.name)], prereleases=True) for r in wanted
    )


def stale(entries: Mapping[Key, Entry], sources: Iterable[Source]) -> Iterator[tuple[Key, str | None]]:
    """Entries that no source uses, and packages of repositories: (key, None) or (key, package)."""
    wanted = {key_of(source): source for source in sources}
    for key, entry in entries.items():
        source = wanted.get(key)
        if source is None:
            yield key, None
        elif isinstance(source, PackageSource) and isinstance(entry, LockedRepository):
            yield from ((key, package) for package in entry.packages if package not in source.packages)


def pruned(entries: Mapping[Key, Entry], sources: Iterable[Source], before: Iterable[Source] | None = None) -> Table:
    """The entries without stale ones; `before`: without those only that the sources before that used."""
    result = dict(entries)
    unused_before = set() if before is None else set(stale(entries, before))
    for key, package in stale(entries, sources):
        if (key, package) in unused_before:
            continue
        entry = result[key]
        if package is None:
            del result[key]
        elif isinstance(entry, LockedRepository):
            left = {name: version for name, version in entry.packages.items() if name != package}
            result[key] = entry.model_copy(update={"packages": left})
    return result
