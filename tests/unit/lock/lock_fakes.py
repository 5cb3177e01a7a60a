"""Upstream for unit tests: answers from tables, and what was asked."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from imagebuild.core import Advance, ImagebuildError, Unreachable
from imagebuild.lock import PackageIndex, check_key, choose
from imagebuild.project import Entry, LockedRepository, PackageSource, Source, Wheel, WheelSet, key_of

A, B, C = "a" * 64, "b" * 64, "c" * 64
KEY, OTHER = "A" * 40, "B" * 40


@dataclass
class Fake:
    """Where the table has no answer, nobody answers."""

    answers: Mapping[tuple[str, ...], Entry | ImagebuildError] = field(default_factory=dict)
    indexes: Mapping[str, PackageIndex] = field(default_factory=dict)
    git_tags: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    wheel_lists: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    digests: frozenset[str] = frozenset()
    asked: list[tuple[str, ...]] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)

    def resolve(self, source: Source, known: Entry | None, advance: Advance) -> Entry:
        key = key_of(source)
        self.asked.append(key)
        if isinstance(source, PackageSource) and source.url in self.indexes:
            index = self.indexes[source.url]
            before = known if isinstance(known, LockedRepository) else None
            fingerprint = check_key(source.url, index, before)
            packages = dict(before.packages) if before else {}
            for package in source.packages:
                packages.setdefault(package, choose(source.url, index, package))
            return LockedRepository(fingerprint=fingerprint, packages=packages)
        return self._answer(self.answers.get(key), " ".join(key))

    def has_image(self, reference: str, digest: str) -> bool:
        return digest in self.digests

    def index(self, source: PackageSource, names: tuple[str, ...]) -> PackageIndex:
        self.asked.append(("index", source.url, *names))
        if source.url not in self.indexes:
            raise Unreachable(f"{source.url}: down")
        return self.indexes[source.url]

    def wheels(self, wanted: WheelSet) -> tuple[Wheel, ...]:
        found = self._answer(self.answers.get(key_of(wanted)), wanted.component)
        assert isinstance(found, tuple)
        return found

    def tags(self, address: str) -> dict[str, str]:
        if address not in self.git_tags:
            raise Unreachable(f"{address}: down")
        return dict(self.git_tags[address])

    def wheel_versions(self, name: str) -> tuple[str, ...]:
        return self.wheel_lists[name]

    def stop(self) -> None:
        self.stopped.set()

    def _answer(self, found: Entry | ImagebuildError | None, name: str) -> Entry:
        if found is None:
            raise Unreachable(f"{name}: down")
        if isinstance(found, ImagebuildError):
            raise found
        return found


class Silent:
    """A display that keeps what it is told."""

    def __init__(self) -> None:
        self.ended: dict[str, str] = {}

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def begin(self, name: str) -> None:
        pass

    def advance(self, name: str, done: int, total: int | None) -> None:
        pass

    def end(self, name: str, text: str, *, good: bool) -> None:
        self.ended[name] = text
