"""A fake upstream that answers from tables, and locks for tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from imagebuild.core.debian import Offers
from imagebuild.core.errors import Absent, ImagebuildError, Unreachable
from imagebuild.core.http import Advance
from imagebuild.lock.distribution import ReleasePackages
from imagebuild.lock.repositories import locked_repository
from imagebuild.lock.upstream import Upstream
from imagebuild.project.lockfile import (
    Entry,
    Key,
    Lock,
    LockedImage,
    LockedRepository,
    PackageSource,
    Source,
    Wheel,
    WheelSet,
    key_of,
)

A, B, C = "a" * 64, "b" * 64, "c" * 64
KEY, OTHER = "A" * 40, "B" * 40
REPOSITORY = "https://packages.example/"


def lock_of(entries: Mapping[Key, Entry]) -> Lock:
    """Return a lock with these entries."""
    tables: dict[str, Any] = {}
    for (kind, name), entry in entries.items():
        tables.setdefault(kind, {})[name] = entry
    return Lock.model_validate(tables)


def packages(*names: str, url: str = REPOSITORY, key: str = "k") -> PackageSource:
    return PackageSource(url, "/", key, names)


def wheel(name: str, version: str) -> Wheel:
    return Wheel(name=name, version=version, sha256={"amd64": A, "arm64": B})


ENTRIES: dict[Key, Entry] = {
    ("archives", "https://example.org/a.tar"): A,
    ("git", "https://example.org/g.git v1"): "1" * 40,
    ("git", "https://example.org/g.git v2"): "2" * 40,
    ("images", "debian:13"): LockedImage(digest=f"sha256:{A}", platforms={"linux/amd64": f"sha256:{B}"}),
    ("repositories", REPOSITORY): LockedRepository(fingerprint=KEY, packages={"a": "1", "b=2": "2"}),
    ("wheels", "cuda 13.0"): (wheel("nvidia-nvcc", "13.0.88"),),
}
"""One entry of each kind."""


@dataclass
class Fake(Upstream):
    """A fake upstream. Sources that are not in its tables do not answer."""

    answers: Mapping[Key, Entry | ImagebuildError] = field(default_factory=dict)
    indexes: Mapping[str, Offers] = field(default_factory=dict)
    git_tags: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    wheel_lists: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    digests: frozenset[str] = frozenset()
    """Digests of the images that exist, with any tag."""
    lacking: Mapping[str, list[str] | ImagebuildError] = field(default_factory=dict)
    """Maps a base to the messages about packages that its archive lacks."""
    asked: list[tuple[str, ...]] = field(default_factory=list)

    def resolve(self, source: Source, known: Entry | None, advance: Advance) -> Entry:
        self.asked.append(key_of(source))
        if isinstance(source, PackageSource) and source.url in self.indexes:
            before = known if isinstance(known, LockedRepository) else None
            return locked_repository(source, self.indexes[source.url], before)
        if isinstance(known, LockedImage):
            if known.digest not in self.digests:
                raise Absent(f"{known.digest}: the registry does not have the image")
            return known
        return self._answer(key_of(source))

    def index(self, source: PackageSource) -> Offers:
        self.asked.append(("index", source.url, *source.packages))
        if source.url not in self.indexes:
            raise Unreachable(f"{source.url}: down")
        return self.indexes[source.url]

    def unavailable(self, wanted: ReleasePackages) -> list[str]:
        found = self.lacking.get(wanted.suite, [])
        if isinstance(found, ImagebuildError):
            raise found
        return found

    def wheels(self, wanted: WheelSet) -> tuple[Wheel, ...]:
        found = self._answer(key_of(wanted))
        assert isinstance(found, tuple)
        return found

    def tags(self, address: str, *patterns: str) -> dict[str, str]:
        if address not in self.git_tags:
            raise Unreachable(f"{address}: down")
        return dict(self.git_tags[address])

    def wheel_versions(self, name: str) -> tuple[str, ...]:
        return self.wheel_lists[name]

    def _answer(self, key: Key) -> Entry:
        found = self.answers.get(key, Unreachable(f"{key[1].partition(' ')[0]}: down"))
        if isinstance(found, ImagebuildError):
            raise found
        return found
