"""Resolve sources to entries of the lock, and find entries that are incomplete, unused or not as upstream."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Protocol

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from imagebuild.core import console
from imagebuild.core.errors import Absent, ConfigError, ImagebuildError, Unreachable, suggestion
from imagebuild.core.http import Advance
from imagebuild.core.run import answer_each
from imagebuild.lock import repositories
from imagebuild.lock.upstream import Upstream
from imagebuild.project.lockfile import (
    UNRESOLVED,
    Archive,
    BaseImage,
    Entry,
    GitRef,
    Key,
    Lock,
    LockedImage,
    LockedRepository,
    PackageSource,
    Source,
    Table,
    WheelSet,
    key_of,
    source_title,
)
from imagebuild.render.recipe import Recipe

# The lock as a table


def lock_table(lock: Lock) -> Table:
    """Return the entries of a lock as a flat table; changing it does not change the lock."""
    table: Table = {}
    for kind in ("archives", "git", "images", "repositories", "wheels"):
        for name, entry in getattr(lock, kind).items():
            if kind in ("git", "wheels"):
                table |= {(kind, name, part): value for part, value in entry.items()}
            else:
                table[kind, name] = entry
    return table


def lock_from_table(entries: Mapping[Key, Entry], day: date | None = None) -> Lock:
    """Return the lock with these entries and this date."""
    data: dict[str, Any] = {}
    for (kind, *names), entry in entries.items():
        parent = data.setdefault(kind, {})
        for name in names[:-1]:
            parent = parent.setdefault(name, {})
        parent[names[-1]] = entry
    return Lock.model_validate({**data, "date": day})


def lock_text(lock: Lock) -> str:
    """Return the text of the file: sorted, so that a diff shows what changed."""
    return json.dumps(lock.model_dump(mode="json", by_alias=True, exclude_none=True), indent=1, sort_keys=True) + "\n"


def merged_sources(sources: Iterable[Source]) -> tuple[Source, ...]:
    """Return one source for each entry of the lock, without those whose commit the matrix gives.

    A repository comes with the packages that all targets want of it. Raises ConfigError if two components give one
    repository different keys or suites.
    """
    merged: dict[Key, Source] = {}
    for source in sources:
        if isinstance(source, GitRef) and source.commit:
            continue
        first = merged.setdefault(key_of(source), source)
        if isinstance(source, PackageSource) and isinstance(first, PackageSource):
            if (first.suite, first.key) != (source.suite, source.key):
                raise ConfigError(
                    f"{source.url}: one component says suite {first.suite!r} and key {first.key}, "
                    f"another suite {source.suite!r} and key {source.key}; let them say the same"
                )
            packages = tuple(sorted({*first.packages, *source.packages}))
            merged[key_of(source)] = PackageSource(source.url, source.suite, source.key, packages)
    return tuple(merged.values())


def what_entry_lacks(source: Source, entry: Entry | None) -> str | None:
    """Return what an entry lacks for its source: `unresolved`, or a phrase; None if it lacks nothing.

    Raises ConfigError for a requirement of a wheel that cannot be read.
    """
    if entry is None:
        return "not in the lock"
    if entry == UNRESOLVED:
        return UNRESOLVED
    match source, entry:
        case PackageSource(packages=packages), LockedRepository():
            absent = [package for package in packages if package not in entry.packages]
            return f"the lock has no version of {', '.join(absent)}" if absent else None
        case WheelSet(requirements=requirements), tuple():
            versions = {canonicalize_name(wheel.name): wheel.version for wheel in entry}
            try:
                wanted = {canonicalize_name(r.name): r.specifier for r in map(Requirement, requirements)}
            except InvalidRequirement as error:
                raise ConfigError(f"wheels: {error}") from None
            if wanted.keys() != versions.keys() or not all(
                specifier.contains(versions[name], prereleases=True) for name, specifier in wanted.items()
            ):
                return f"the lock has other wheels than {', '.join(requirements)}"
    return None


def incomplete(entries: Table, sources: Iterable[Source]) -> list[Source]:
    """Return the sources whose entries lack something."""
    return [source for source in sources if what_entry_lacks(source, entries.get(key_of(source)))]


def stale_entries(entries: Mapping[Key, Entry], sources: Iterable[Source]) -> Iterator[tuple[Key, str | None]]:
    """Yield what no source uses: an entry as (key, None), a package of a repository as (key, package)."""
    wanted = {key_of(source): source for source in sources}
    for key, entry in entries.items():
        source = wanted.get(key)
        if source is None:
            yield key, None
        elif isinstance(source, PackageSource) and isinstance(entry, LockedRepository):
            yield from ((key, package) for package in entry.packages if package not in source.packages)


def without_stale(
    entries: Mapping[Key, Entry], sources: Iterable[Source], before: Iterable[Source] | None = None
) -> Table:
    """Return the entries without stale ones; with `before`, what these sources did not use either is kept."""
    table = dict(entries)
    unused_before = set() if before is None else set(stale_entries(entries, before))
    for key, package in stale_entries(entries, sources):
        if (key, package) in unused_before:
            continue
        entry = table[key]
        if package is None:
            del table[key]
        elif isinstance(entry, LockedRepository):
            kept = {name: version for name, version in entry.packages.items() if name != package}
            table[key] = entry.model_copy(update={"packages": kept})
    return table


# Names of entries


def owners(recipes: Iterable[Recipe]) -> dict[str, set[Key]]:
    """Return the keys of the entries of each component, pin, base and image of the matrix.

    The packages of a repository are further keys: `("repositories", address, package)`. An image's name means the
    image that it starts from, unless a component has the same name.
    """
    keys_of_owner: dict[str, set[Key]] = {}
    keys_of_image: dict[str, set[Key]] = {}
    for recipe in recipes:
        for name, source in recipe.owned_sources():
            key = key_of(source)
            keys = {key, *((*key, package) for package in getattr(source, "packages", ()))}
            if isinstance(source, BaseImage) and name == recipe.target.image:
                for alias in (name, source.reference):
                    keys_of_image.setdefault(alias, set()).update(keys)
                continue
            keys_of_owner.setdefault(name, set()).update(keys)
            if name in recipe.project.components and (pin := recipe.component(name).pin):
                keys_of_owner.setdefault(pin, set()).update(keys)
    return {**keys_of_image, **keys_of_owner}


def keys_of(names: Iterable[str], known: Mapping[str, set[Key]]) -> frozenset[Key]:
    """Return the keys of the entries that names mean: a name of `owners`, or a glob of addresses and references.

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


def describe_key(key: Key) -> str:
    """Return an entry's key in the words of `source_title`."""
    kind, *names = key
    words = {"archives": "archive", "images": "image", "repositories": "packages"}
    return " ".join((words.get(kind, kind), *names))


def describe_entry(entry: Entry) -> str:
    """Return an entry in few words."""
    match entry:
        case str():
            return entry[:12]
        case LockedImage(digest=digest):
            return digest[:19]
        case LockedRepository():
            return f"{len(entry.packages)} packages, key {entry.fingerprint[-16:]}"
        case wheels:
            return ", ".join(f"{wheel.name} {wheel.version}" for wheel in wheels)


# Progress


class Display(Protocol):
    """Show the progress of every source; `advance` is called from several threads."""

    def __enter__(self) -> object: ...
    def __exit__(self, *_: object) -> None: ...
    def begin(self, name: str) -> None: ...
    def advance(self, name: str, done: int, total: int | None) -> None: ...
    def end(self, name: str, text: str, *, good: bool) -> None: ...


class PlainDisplay:
    """Print a line for each source when its request ends, for logs."""

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
    """Show a bar for each request under way; results scroll up above the bars."""

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
    """Return a display with bars on a terminal, with lines elsewhere."""
    return LiveDisplay() if console.err.is_terminal else PlainDisplay()


# Pinning


@dataclass
class Outcome:
    """What became of the sources that were to be pinned."""

    resolved: list[str] = field(default_factory=list)
    unresolved: dict[str, str] = field(default_factory=dict)
    """Source → why it could not be reached."""
    wrong: dict[str, str] = field(default_factory=dict)
    """Source → what is wrong with the answer."""

    def complaint(self) -> str:
        """Return a line for each source without an answer or with a wrong one; empty if there is none."""
        lines = []
        for headline, reasons in (
            ("wrong answers, so imagebuild.lock keeps what it had:", self.wrong),
            ("could not be resolved; run this again where they can be reached:", self.unresolved),
        ):
            if reasons:
                lines.append(headline)
            for name, reason in sorted(reasons.items()):
                # The address stands before the reason anyway.
                address, colon, rest = reason.partition(": ")
                lines.append(f"  {name}: {rest if colon and name.split()[1] == address else reason}")
        return "\n".join(lines)


def resolve_sources(
    entries: Table, sources: Iterable[Source], upstream: Upstream, display: Display, *, keep: Callable[[], None],
    anew: frozenset[Key] = frozenset(),
) -> Outcome:  # fmt: skip
    """Ask upstream for every source and change `entries`; `keep` is called after each change, to write it.

    A source that cannot be reached becomes `unresolved` if it had no entry, and keeps its entry otherwise. Entries in
    `anew` are pinned as if the lock did not have them, even if another key signs a repository now; of a repository,
    only the packages named there as `("repositories", address, package)` get new versions.
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
        renewed = tuple(p for p in source.packages if p not in before.packages or (*key, p) in anew)
        entry = upstream.resolve(replace(source, packages=renewed), None, advance)
        assert isinstance(entry, LockedRepository)
        return entry.model_copy(update={"packages": {**before.packages, **entry.packages}})

    with display, answer_each(sources, ask, upstream.stop) as answers:
        for source, answer in answers:
            key, name = key_of(source), source_title(source)
            if isinstance(answer, Unreachable):
                outcome.unresolved[name] = str(answer)
                display.end(name, "unresolved", good=False)
                entry = entries.get(key, UNRESOLVED)
            elif isinstance(answer, ImagebuildError):
                outcome.wrong[name] = str(answer)
                display.end(name, "wrong", good=False)
                continue
            else:
                outcome.resolved.append(name)
                display.end(name, describe_entry(answer), good=True)
                entry = answer
            if entries.get(key) != entry:
                entries[key] = entry
                keep()
    return outcome


# Checking


@dataclass(frozen=True)
class LockFinding:
    """Something about one entry that people should know."""

    state: str
    """`missing`, `unresolved`, `stale`, `changed`, `gone`, `moved` or `not checked`."""
    source: str
    detail: str = ""

    @property
    def fails(self) -> bool:
        """Return whether the lock is wrong. A tag of an image may move while the pinned digest is there."""
        return self.state not in {"moved", "not checked"}


def check_entries(entries: Table, sources: Iterable[Source], *, whole: bool) -> Iterator[LockFinding]:
    """Yield what the lock lacks, and, if the sources are those of the `whole` matrix, what nothing uses."""
    sources = tuple(sources)
    for source in sources:
        if problem := what_entry_lacks(source, entries.get(key_of(source))):
            if problem == UNRESOLVED:
                yield LockFinding("unresolved", source_title(source), "upstream could not be reached yet")
            else:
                yield LockFinding("missing", source_title(source), f"{problem}; `imagebuild lock` adds it")
    if whole:
        for key, package in stale_entries(entries, sources):
            detail = "nothing in the matrix uses it; `imagebuild lock` removes it"
            yield LockFinding("stale", describe_key(key), f"{package}: {detail}" if package else detail)


def compare_entries(
    entries: Table, sources: Iterable[Source], upstream: Upstream, display: Display
) -> list[LockFinding]:
    """Return where upstream has something else under the name of a pin, for every complete entry of the sources."""

    def ask(source: Source) -> LockFinding | None:
        display.begin(source_title(source))
        advance = partial(display.advance, source_title(source))
        return compare_entry(source, entries[key_of(source)], upstream, advance)

    complete = [source for source in sources if not what_entry_lacks(source, entries.get(key_of(source)))]
    findings: list[LockFinding] = []
    with display, answer_each(complete, ask, upstream.stop) as answers:
        for source, answer in answers:
            finding = answer
            if isinstance(finding, ImagebuildError):
                states = {Absent: "gone", Unreachable: "not checked"}
                state = next((state for kind, state in states.items() if isinstance(finding, kind)), "changed")
                finding = LockFinding(state, source_title(source), str(finding))
            display.end(source_title(source), finding.state if finding else "as locked", good=not finding)
            if finding:
                findings.append(finding)
    return sorted(findings, key=lambda f: (f.state, f.source))


def compare_entry(source: Source, entry: Entry, upstream: Upstream, advance: Advance) -> LockFinding | None:
    """Return what is different upstream, None if nothing.

    Raises ImagebuildError where upstream's answer is wrong, or there is none.
    """
    name = source_title(source)
    match source, entry:
        case PackageSource(), LockedRepository():
            index = upstream.index(source, tuple(sorted(map(repositories.name_of, entry.packages))))
            repositories.check_key(source.url, index, entry)
            for package, version in entry.packages.items():
                if package in source.packages:
                    repositories.choose(source.url, index, f"{repositories.name_of(package)}={version}")
            return None
        case WheelSet(component=component, version=version), tuple():
            pinned = tuple(f"{wheel.name}=={wheel.version}" for wheel in entry)
            hashes = {wheel.name: wheel.sha256 for wheel in upstream.wheels(WheelSet(component, version, pinned))}
            changed = ", ".join(wheel.name for wheel in entry if hashes.get(wheel.name) != wheel.sha256)
            return LockFinding("changed", name, f"the index has other files of {changed}") if changed else None
        case BaseImage(reference), LockedImage(digest=digest):
            try:
                now = upstream.resolve(source, None, advance)
                if isinstance(now, LockedImage) and now.digest == digest:
                    return None
                problem = f"the tag names {describe_entry(now)} now"
            except Absent:
                problem = "the tag is gone"
            if upstream.has_image(reference, digest):
                return LockFinding("moved", name, f"{problem}; the pinned {digest[:19]} is still there")
            return LockFinding("gone", name, f"{problem}, and the pinned {digest[:19]} is gone")
        case ((Archive() | GitRef()), str()):
            now = upstream.resolve(source, None, advance)
            detail = f"upstream has {describe_entry(now)} now, locked is {describe_entry(entry)}"
            return LockFinding("changed", name, detail) if now != entry else None
    raise AssertionError(f"{name}: the lock's entry is of another kind")
