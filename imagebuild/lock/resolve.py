"""Resolve sources to entries of the lock, and check the entries that are there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Protocol

from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from imagebuild.core import console
from imagebuild.core.errors import Absent, ConfigError, ImagebuildError, Unreachable
from imagebuild.core.http import Advance
from imagebuild.core.run import answer_each
from imagebuild.core.yaml import suggestion
from imagebuild.lock import repositories
from imagebuild.lock.upstream import Upstream
from imagebuild.project.lockfile import (
    UNRESOLVED,
    Archive,
    BaseImage,
    Entry,
    GitRef,
    Key,
    LockedImage,
    LockedRepository,
    PackageSource,
    Source,
    Table,
    Wheel,
    WheelSet,
    key_of,
    source_title,
    stale_entries,
    what_entry_lacks,
)
from imagebuild.render.recipe import Recipe


def owners(recipes: Iterable[Recipe]) -> dict[str, set[Key]]:
    """Component, pin, base or image of the matrix → its entries; packages of a repository as further keys.

    An image's name means the image it starts from, unless a component has the same name.
    """
    found: dict[str, set[Key]] = {}
    bases: dict[str, set[Key]] = {}
    for recipe in recipes:
        for name, source in recipe.owned_sources():
            key = key_of(source)
            keys = {key, *((*key, package) for package in getattr(source, "packages", ()))}
            if isinstance(source, BaseImage) and name == recipe.target.image:
                for meant in (name, source.reference):
                    bases.setdefault(meant, set()).update(keys)
                continue
            found.setdefault(name, set()).update(keys)
            if name in recipe.project.components and (pin := recipe.component(name).pin):
                found.setdefault(pin, set()).update(keys)
    return {**bases, **found}


def keys_of(names: Iterable[str], known: Mapping[str, set[Key]]) -> frozenset[Key]:
    """The entries that names mean: a name of `owners`, or a glob of addresses and references.

    Raises ConfigError for a name that means nothing.
    """
    result: set[Key] = set()
    every = set().union(*known.values())
    for name in names:
        keys = known.get(name) or {key for key in every if fnmatchcase(key[1], name)}
        if not keys:
            near = suggestion(name, [*known, *(key[1] for key in every)] if "/" in name else dict(known))
            raise ConfigError(f"--update {name}: no component, pin, base, image or address of a source{near}")
        result |= keys
    return frozenset(result)


class Display(Protocol):
    """Is told about every source; `advance` from several threads."""

    def __enter__(self) -> object: ...
    def __exit__(self, *_: object) -> None: ...
    def begin(self, name: str) -> None: ...
    def advance(self, name: str, done: int, total: int | None) -> None: ...
    def end(self, name: str, text: str, *, good: bool) -> None: ...


class PlainDisplay:
    """A line for each source as it is known, for logs."""

    def __init__(self) -> None:
        self.began = time.monotonic()

    def __enter__(self) -> PlainDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def begin(self, name: str) -> None:
        pass

    def advance(self, name: str, done: int, total: int | None) -> None:
        pass

    def end(self, name: str, text: str, *, good: bool) -> None:
        console.err.print(f"{time.monotonic() - self.began:7.1f}  {escape(name)} {'→' if good else '✗'} {escape(text)}")


class LiveDisplay:
    """A bar for each source under way; what is known scrolls up above them."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(20), DownloadColumn(), TimeElapsedColumn())
        self.progress = Progress(*columns, console=console.err, transient=True)
        self.tasks: dict[str, TaskID] = {}

    def __enter__(self) -> LiveDisplay:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def begin(self, name: str) -> None:
        self.tasks[name] = self.progress.add_task(escape(name), total=None)

    def advance(self, name: str, done: int, total: int | None) -> None:
        self.progress.update(self.tasks[name], completed=done, total=total)

    def end(self, name: str, text: str, *, good: bool) -> None:
        if name in self.tasks:
            self.progress.remove_task(self.tasks.pop(name))
        mark = "[green]✓[/]" if good else "[red]✗[/]"
        self.progress.console.print(f"{mark} {escape(name)} [dim]{escape(text)}[/]")


def display() -> Display:
    """Bars on a terminal, lines elsewhere."""
    return LiveDisplay() if console.err.is_terminal else PlainDisplay()


@dataclass
class Outcome:
    """What became of the sources."""

    resolved: list[str] = field(default_factory=list)
    unresolved: dict[str, str] = field(default_factory=dict)
    """Source → why it could not be asked."""
    wrong: dict[str, str] = field(default_factory=dict)
    """Source → what is wrong with the answer."""

    def complaint(self) -> str:
        """What is not well, a line for each source; empty if all is."""
        parts = []
        if self.wrong:
            parts += ["wrong answers, so imagebuild.lock keeps what it had:", *_listed(self.wrong)]
        if self.unresolved:
            parts += ["could not be resolved; run this again where they can be reached:", *_listed(self.unresolved)]
        return "\n".join(parts)


def todo(entries: Table, sources: Iterable[Source]) -> list[Source]:
    """The sources whose entries lack something."""
    return [source for source in sources if what_entry_lacks(source, entries.get(key_of(source)))]


def resolve_sources(
    entries: Table, sources: Iterable[Source], upstream: Upstream, display: Display, *, keep: Callable[[], None],
    anew: frozenset[Key] = frozenset(),
) -> Outcome:  # fmt: skip
    """Ask for every source and change `entries`; `keep` is called after each change, to write it.

    What could not be asked becomes `unresolved` if there was nothing, and stays as it was otherwise. For entries in
    `anew`, what the lock has does not count, not even the key of a repository; there also packages are named, as
    `("repositories", address, package)`, and the others keep their versions.
    """
    outcome = Outcome()

    def ask(source: Source) -> Entry:
        key = key_of(source)
        before = entries.get(key)
        advance = partial(display.advance, source_title(source))
        display.begin(source_title(source))
        if key not in anew:
            return upstream.resolve(source, before, advance)
        if not (isinstance(source, PackageSource) and isinstance(before, LockedRepository)):
            return upstream.resolve(source, None, advance)
        todo = tuple(p for p in source.packages if p not in before.packages or (*key, p) in anew)
        now = upstream.resolve(replace(source, packages=todo), None, advance)
        assert isinstance(now, LockedRepository)
        return now.model_copy(update={"packages": {**before.packages, **now.packages}})

    with display, answer_each(sources, ask, upstream.stop) as answers:
        for source, answer in answers:
            key, name = key_of(source), source_title(source)
            if isinstance(answer, ImagebuildError):
                reasons = outcome.unresolved if isinstance(answer, Unreachable) else outcome.wrong
                reasons[name] = str(answer)
                display.end(name, "unresolved" if isinstance(answer, Unreachable) else "wrong", good=False)
                entry: Entry | None = entries.get(key, UNRESOLVED if isinstance(answer, Unreachable) else None)
            else:
                entry = answer
                outcome.resolved.append(name)
                display.end(name, shown(answer), good=True)
            if entry is not None and entries.get(key) != entry:
                entries[key] = entry
                keep()
    return outcome


def shown(entry: Entry) -> str:
    """An entry in few words."""
    if isinstance(entry, str):
        return entry[:12]
    if isinstance(entry, tuple):
        return ", ".join(f"{wheel.name} {wheel.version}" for wheel in entry)
    digest = getattr(entry, "digest", None)
    if digest:
        return str(digest)[:19]
    return f"{len(getattr(entry, 'packages', ()))} packages, key {getattr(entry, 'fingerprint', '')[-16:]}"


def _listed(reasons: dict[str, str]) -> list[str]:
    return [f"  {name}: {_without(name, why)}" for name, why in sorted(reasons.items())]


def _without(name: str, why: str) -> str:
    """The reason without the address that stands before it anyway."""
    first, colon, rest = why.partition(": ")
    return rest if colon and name.split()[1] == first else why


@dataclass(frozen=True)
class LockFinding:
    """Something about one entry that people should know."""

    state: str
    """`missing`, `unresolved`, `stale`, `changed`, `gone`, `moved` or `not checked`."""
    source: str
    detail: str = ""

    @property
    def fails(self) -> bool:
        """A tag of an image may move, as long as what was pinned is there."""
        return self.state not in {"moved", "not checked"}


def offline(entries: Table, sources: Iterable[Source], *, whole: bool) -> Iterator[LockFinding]:
    """What the lock lacks, and, if the sources are those of the `whole` matrix, what nothing uses."""
    sources = tuple(sources)
    for source in sources:
        if why := what_entry_lacks(source, entries.get(key_of(source))):
            if why == UNRESOLVED:
                yield LockFinding("unresolved", source_title(source), "nobody could ask upstream yet")
            else:
                yield LockFinding("missing", source_title(source), f"{why}; `imagebuild lock` adds it")
    if whole:
        for key, package in stale_entries(entries, sources):
            detail = "nothing in the matrix uses it; `imagebuild lock` removes it"
            yield LockFinding("stale", named(key), f"{package}: {detail}" if package else detail)


def online(entries: Table, sources: Iterable[Source], upstream: Upstream, display: Display) -> list[LockFinding]:
    """Where upstream has something else under the name of a pin, for every source that the lock has in full."""
    complete = [source for source in sources if not what_entry_lacks(source, entries.get(key_of(source)))]

    def ask(source: Source) -> LockFinding | None:
        display.begin(source_title(source))
        entry = entries[key_of(source)]
        return compare(source, entry, upstream, partial(display.advance, source_title(source)))

    found: list[LockFinding] = []
    with display, answer_each(complete, ask, upstream.stop) as answers:
        for source, answer in answers:
            finding = _from(answer, source_title(source)) if isinstance(answer, ImagebuildError) else answer
            display.end(source_title(source), finding.state if finding else "as locked", good=not finding)
            if finding:
                found.append(finding)
    return sorted(found, key=lambda f: (f.state, f.source))


def _from(error: ImagebuildError, name: str) -> LockFinding:
    if isinstance(error, Absent):
        return LockFinding("gone", name, str(error))
    return LockFinding("not checked" if isinstance(error, Unreachable) else "changed", name, str(error))


def compare(source: Source, entry: Entry, upstream: Upstream, advance: Advance) -> LockFinding | None:
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
            return LockFinding(
                "changed", source_title(source), f"upstream has {shown(now)} now, locked is {shown(entry)}"
            )
    raise AssertionError(f"{source_title(source)}: the lock's entry is of another kind")


def _image(reference: str, digest: str, upstream: Upstream, advance: Advance) -> LockFinding | None:
    name = source_title(BaseImage(reference))
    try:
        now = upstream.resolve(BaseImage(reference), None, advance)
        text = f"the tag names {shown(now)} now"
        if isinstance(now, LockedImage) and now.digest == digest:
            return None
    except Absent:
        text = "the tag is gone"
    if upstream.has_image(reference, digest):
        return LockFinding("moved", name, f"{text}; the pinned {digest[:19]} is still there")
    return LockFinding("gone", name, f"{text}, and the pinned {digest[:19]} is gone")


def _wheels(source: WheelSet, locked: tuple[Wheel, ...], now: tuple[Wheel, ...]) -> LockFinding | None:
    hashes = {wheel.name: wheel.sha256 for wheel in now}
    other = [wheel.name for wheel in locked if hashes.get(wheel.name) != wheel.sha256]
    return (
        LockFinding("changed", source_title(source), f"the index has other files of {', '.join(other)}")
        if other
        else None
    )


def named(key: Key) -> str:
    """An entry of the lock in the words of `sources.title`."""
    kind, *names = key
    words = {"archives": "archive", "images": "image", "repositories": "packages"}
    return " ".join((words.get(kind, kind), *names))
