"""`imagebuild lock --check`: does the lock have what the matrix needs, no more, and is it still what upstream has?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from imagebuild.errors import Absent, ImagebuildError, Unreachable
from imagebuild.lockfile import UNRESOLVED, LockedImage, LockedRepository, Wheel
from imagebuild.locking import repositories
from imagebuild.locking.display import Display
from imagebuild.locking.entries import Entry, Key, Table, key_of, lacks, stale
from imagebuild.locking.pool import asked
from imagebuild.locking.resolve import shown
from imagebuild.locking.upstream import Upstream
from imagebuild.locking.web import Advance
from imagebuild.sources import Archive, BaseImage, GitRef, PackageSource, Source, WheelSet, title


@dataclass(frozen=True)
class Finding:
    """Something about one entry that people should know."""

    state: str
    """`missing`, `unresolved`, `stale`, `changed`, `gone`, `moved` or `not checked`."""
    source: str
    detail: str = ""

    @property
    def fails(self) -> bool:
        """A tag of an image may move, as long as what was pinned is there."""
        return self.state not in {"moved", "not checked"}


def offline(entries: Table, sources: Iterable[Source], *, whole: bool) -> Iterator[Finding]:
    """What the lock lacks, and, if the sources are those of the `whole` matrix, what nothing uses."""
    sources = tuple(sources)
    for source in sources:
        if why := lacks(source, entries.get(key_of(source))):
            if why == UNRESOLVED:
                yield Finding("unresolved", title(source), "nobody could ask upstream yet")
            else:
                yield Finding("missing", title(source), f"{why}; `imagebuild lock` adds it")
    if whole:
        for key, package in stale(entries, sources):
            detail = "nothing in the matrix uses it; `imagebuild lock` removes it"
            yield Finding("stale", named(key), f"{package}: {detail}" if package else detail)


def online(entries: Table, sources: Iterable[Source], upstream: Upstream, display: Display) -> list[Finding]:
    """Where upstream has something else under the name of a pin, for every source that the lock has in full."""
    complete = [source for source in sources if not lacks(source, entries.get(key_of(source)))]

    def ask(source: Source) -> Finding | None:
        display.begin(title(source))
        entry = entries[key_of(source)]
        return compare(source, entry, upstream, partial(display.advance, title(source)))

    found: list[Finding] = []
    with display, asked(complete, ask, upstream.stop) as answers:
        for source, answer in answers:
            finding = _from(answer, title(source)) if isinstance(answer, ImagebuildError) else answer
            display.end(title(source), finding.state if finding else "as locked", good=not finding)
            if finding:
                found.append(finding)
    return sorted(found, key=lambda f: (f.state, f.source))


def _from(error: ImagebuildError, name: str) -> Finding:
    if isinstance(error, Absent):
        return Finding("gone", name, str(error))
    return Finding("not checked" if isinstance(error, Unreachable) else "changed", name, str(error))


def compare(source: Source, entry: Entry, upstream: Upstream, advance: Advance) -> Finding | None:
    """What is different upstream, None if nothing. Raises ImagebuildError where upstream's answer is wrong or none."""
    match source, entry:
        case PackageSource(), LockedRepository():
            index = upstream.index(source, tuple(sorted(map(repositories.name_of, entry.packages))))
            repositories.check_key(source.url, index, entry)
            pinned = {p: f"{repositories.name_of(p)}={v}" for p, v in entry.packages.items() if p in source.packages}
            for exact in pinned.values():
                repositories.choose(source.url, index, exact)
            return None
        case WheelSet(component=component, version=version), tuple():
            exact_ones = tuple(f"{wheel.name}=={wheel.version}" for wheel in entry)
            return _wheels(source, entry, upstream.wheels(WheelSet(component, version, exact_ones)))
        case BaseImage(reference), LockedImage(digest=digest):
            return _image(reference, digest, upstream, advance)
        case ((Archive() | GitRef()), str()):
            now = upstream.resolve(source, None, advance)
            if now == entry:
                return None
            return Finding("changed", title(source), f"upstream has {shown(now)} now, locked is {shown(entry)}")
    raise AssertionError(f"{title(source)}: the lock's entry is of another kind")


def _image(reference: str, digest: str, upstream: Upstream, advance: Advance) -> Finding | None:
    name = title(BaseImage(reference))
    try:
        now = upstream.resolve(BaseImage(reference), None, advance)
        text = f"the tag names {shown(now)} now"
        if isinstance(now, LockedImage) and now.digest == digest:
            return None
    except Absent:
        text = "the tag is gone"
    if upstream.has_image(reference, digest):
        return Finding("moved", name, f"{text}; the pinned {digest[:19]} is still there")
    return Finding("gone", name, f"{text}, and the pinned {digest[:19]} is gone")


def _wheels(source: WheelSet, locked: tuple[Wheel, ...], now: tuple[Wheel, ...]) -> Finding | None:
    hashes = {wheel.name: wheel.sha256 for wheel in now}
    other = [wheel.name for wheel in locked if hashes.get(wheel.name) != wheel.sha256]
    return Finding("changed", title(source), f"the index has other files of {', '.join(other)}") if other else None


def named(key: Key) -> str:
    """An entry of the lock in the words of `sources.title`."""
    kind, *names = key
    words = {"archives": "archive", "images": "image", "repositories": "packages"}
    return " ".join((words.get(kind, kind), *names))
