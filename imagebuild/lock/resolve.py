"""Complete, renew and check the lock: resolve sources to entries, find those that are incomplete, unused or changed."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

from imagebuild.core import settings
from imagebuild.core.console import Progress, format_size, redacted_text
from imagebuild.core.errors import Absent, CommandError, ConfigError, ImagebuildError, Unreachable, suggestion
from imagebuild.core.fields import Model, Platform
from imagebuild.core.files import write_text
from imagebuild.core.http import Advance
from imagebuild.core.run import for_each
from imagebuild.lock import repositories
from imagebuild.lock.upstream import Upstream
from imagebuild.project.lockfile import (
    TABLES,
    UNREAD,
    UNRESOLVED,
    Archive,
    BaseImage,
    Entry,
    GitRef,
    Key,
    Lock,
    LockedArchive,
    LockedImage,
    LockedRepository,
    PackageSource,
    Source,
    Table,
    WheelSet,
    describe_key,
    key_of,
    source_title,
    what_entry_lacks,
)
from imagebuild.project.matrix import Target
from imagebuild.project.plan import Project
from imagebuild.render.recipe import Recipe
from imagebuild.render.renderer import Renderer

T = TypeVar("T")
R = TypeVar("R")

# The lock as a table


def lock_table(lock: Lock) -> Table:
    """Return the entries of a lock as a flat table; changing it does not change the lock."""
    table: Table = {}
    for kind in TABLES:
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
        if isinstance(source, BaseImage) and source.facts:
            merged[key_of(source)] = source
        if isinstance(source, PackageSource) and isinstance(first, PackageSource):
            if (first.suite, first.key) != (source.suite, source.key):
                raise ConfigError(
                    f"{source.url}: one component says suite {first.suite!r} and key {first.key}, "
                    f"another suite {source.suite!r} and key {source.key}; let them say the same"
                )
            packages = tuple(sorted({*first.packages, *source.packages}))
            merged[key_of(source)] = PackageSource(source.url, source.suite, source.key, packages)
    return tuple(merged.values())


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
            raise ConfigError(f"{name}: no component, pin, base, image or address of a source{near}")
        result |= keys
    return frozenset(result)


def describe_entry(entry: Entry) -> str:
    """Return an entry in few words."""
    match entry:
        case str():
            return entry[:12]
        case LockedImage(digest=digest):
            return digest[:19]
        case LockedArchive(sha256=sha256):
            return sha256[:12]
        case LockedRepository():
            return f"{len(entry.packages)} packages, key {entry.fingerprint[-16:]}"
        case wheels:
            return ", ".join(f"{wheel.name} {wheel.version}" for wheel in wheels)


# Asking


def ask_each(
    items: Iterable[T],
    title: Callable[[T], str],
    ask: Callable[[T, Advance], R],
    upstream: Upstream,
    settle: Callable[[T, R | ImagebuildError], tuple[str, bool]],
) -> None:
    """Ask upstream about each item in a thread pool, and show the progress.

    `settle` is given one answer at a time, or the error instead of it. It returns what to show, and whether that is
    good. Ctrl-C, or another error, ends everything; what was settled until then stays.
    """
    turn = threading.Lock()

    def work(item: T) -> None:
        name = title(item)

        def advance(done: int, total: int | None) -> None:
            progress.advance(name, f"{format_size(done)} of {format_size(total)}")

        progress.begin(name, name)
        try:
            try:
                answer: R | ImagebuildError = ask(item, advance)
            except ImagebuildError as error:
                answer = error
            with turn:
                if not upstream.stopped:
                    text, good = settle(item, answer)
                    progress.end(name, text, good=good)
        except BaseException:
            upstream.stop()
            raise

    with Progress() as progress:
        for_each(work, items, upstream)


# Pinning


@dataclass
class Outcome:
    """Hold the results of pinning sources."""

    resolved: list[str] = field(default_factory=list)
    unresolved: dict[str, str] = field(default_factory=dict)
    """Source → why it could not be reached."""
    absent: dict[str, str] = field(default_factory=dict)
    """Source → who says not to have it."""
    wrong: dict[str, str] = field(default_factory=dict)
    """Source → what is wrong with the answer."""
    changes: list[str] = field(default_factory=list)
    """How facts differ from what the lock had before."""
    adaptations: list[str] = field(default_factory=list)
    """What images will adapt of the sources, a line for each."""

    def complaint(self) -> str:
        """Return a line for each source without an answer or with a wrong one; empty if there is none."""
        lines = []
        for headline, reasons in (
            ("wrong answers, so imagebuild.lock keeps what it had:", self.wrong),
            ("are not there; pin other versions, or name a mirror that has them:", self.absent),
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
    entries: Table,
    sources: Iterable[Source],
    upstream: Upstream,
    *,
    keep: Callable[[], None],
    anew: frozenset[Key] = frozenset(),
    mark: bool = True,
) -> Outcome:
    """Ask upstream for every source and change `entries`; `keep` is called after each change, to write it.

    A source that cannot be reached keeps its entry; if it had none, it becomes `unresolved` with `mark`. Entries in
    `anew` are pinned as if the lock did not have them, even if another key signs a repository now; of a repository,
    only the packages named there as `("repositories", address, package)` get new versions.
    """
    outcome = Outcome()

    def ask(source: Source, advance: Advance) -> Entry:
        key = key_of(source)
        before = entries.get(key)
        if key not in anew:
            return upstream.resolve(source, before, advance)
        if not (isinstance(source, PackageSource) and isinstance(before, LockedRepository)):
            return upstream.resolve(source, None, advance)
        renewed = tuple(p for p in source.packages if p not in before.packages or (*key, p) in anew)
        entry = upstream.resolve(replace(source, packages=renewed), None, advance)
        assert isinstance(entry, LockedRepository)
        candidates = {**(before.candidates or {}), **(entry.candidates or {})}
        return entry.model_copy(
            update={"packages": {**before.packages, **entry.packages}, "candidates": candidates or None}
        )

    def settle(source: Source, answer: Entry | ImagebuildError) -> tuple[str, bool]:
        key, name = key_of(source), source_title(source)
        if isinstance(answer, Unreachable):
            (outcome.absent if isinstance(answer, Absent) else outcome.unresolved)[name] = str(answer)
            if key not in entries and not mark:
                return "unresolved", False
            shown, good, entry = "unresolved", False, entries.get(key, UNRESOLVED)
        elif isinstance(answer, ImagebuildError):
            outcome.wrong[name] = str(answer)
            return "wrong", False
        else:
            # Of a repository, a package that is missing costs only what needs it.
            lacking = ""
            if isinstance(source, PackageSource) and isinstance(answer, LockedRepository):
                lacking = repositories.lacking_packages(source, answer)
            if lacking:
                outcome.wrong[name] = f"{lacking}; all else of it is pinned, so pin other versions of these"
            else:
                outcome.resolved.append(name)
            shown, good, entry = describe_entry(answer), not lacking, answer
        if entries.get(key) != entry:
            entries[key] = entry
            keep()
        return shown, good

    ask_each(sources, source_title, ask, upstream, settle)
    return outcome


# Checking


@dataclass(frozen=True)
class LockFinding:
    """Hold something about one entry that people should know."""

    state: str
    """`missing`, `unresolved`, `stale`, `changed`, `gone`, `moved` or `not checked`."""
    source: str
    detail: str = ""

    @property
    def fails(self) -> bool:
        """Return whether the lock is wrong. A tag of an image may move while the pinned digest is there."""
        return self.state not in {"moved", "not checked"}


def check_entries(entries: Table, sources: Iterable[Source], whole: Table | None) -> Iterator[LockFinding]:
    """Yield what the lock lacks and, if the sources are those of the whole matrix, what nothing uses.

    `whole` then has the entries of the project's own file; other entries come from the project that it extends.
    """
    sources = tuple(sources)
    for source in sources:
        problem = what_entry_lacks(source, entries.get(key_of(source)))
        if problem in (UNRESOLVED, UNREAD):
            detail = problem if problem == UNREAD else "upstream could not be reached yet"
            yield LockFinding("unresolved", source_title(source), detail)
        elif problem:
            yield LockFinding("missing", source_title(source), f"{problem}; `imagebuild lock` adds it")
    if whole is not None:
        for key, package in stale_entries(whole, sources):
            detail = "nothing in the matrix uses it; `imagebuild lock` removes it"
            yield LockFinding("stale", describe_key(key), f"{package}: {detail}" if package else detail)


def compare_entries(entries: Table, sources: Iterable[Source], upstream: Upstream) -> list[LockFinding]:
    """Return where upstream differs from the lock, for every source with a complete entry."""
    findings: list[LockFinding] = []

    def settle(source: Source, answer: str | ImagebuildError) -> tuple[str, bool]:
        if not answer:
            return "as locked", True
        state = upstream_state(answer, silent="not checked", as_locked="moved")
        findings.append(LockFinding(state, source_title(source), str(answer)))
        return state, False

    ask_each(
        [source for source in sources if not what_entry_lacks(source, entries.get(key_of(source)))],
        source_title,
        lambda source, advance: compare_entry(source, entries[key_of(source)], upstream, advance),
        upstream,
        settle,
    )
    return sorted(findings, key=lambda f: (f.state, f.source))


def upstream_state(answer: str | ImagebuildError, *, silent: str, as_locked: str) -> str:
    """Return the state of a source: `gone` or `changed`, or what is given for nobody's answer and for a good one."""
    match answer:
        case str():
            return as_locked
        case Absent():
            return "gone"
        case Unreachable():
            return silent
    return "changed"


def compare_entry(source: Source, entry: Entry, upstream: Upstream, advance: Advance) -> str:
    """Return what is to be said of a source that is as locked, mostly nothing.

    Raises Absent if it is gone, another ImagebuildError if upstream has something else, or does not answer.
    """
    match source, entry:
        case PackageSource(), LockedRepository():
            there_of_packages(source, entry, upstream)
        case WheelSet(component=component, version=version), tuple():
            pinned = tuple(f"{wheel.name}=={wheel.version}" for wheel in entry)
            hashes = {wheel.name: wheel.sha256 for wheel in upstream.wheels(WheelSet(component, version, pinned))}
            if changed := ", ".join(wheel.name for wheel in entry if hashes.get(wheel.name) != wheel.sha256):
                raise CommandError(f"the index has other files of {changed}")
        case BaseImage(reference), LockedImage(digest=digest):
            try:
                now = upstream.resolve(source, None, advance)
                if isinstance(now, LockedImage) and now.digest == digest:
                    return ""
                problem = f"the tag names {describe_entry(now)} now"
            except Absent:
                problem = "the tag is gone"
            if upstream.has_image(reference, digest):
                return f"{problem}; the pinned {digest[:19]} is still there"
            raise Absent(f"{problem}, and the pinned {digest[:19]} is gone")
        case ((Archive() | GitRef()), (str() | LockedArchive())):
            now = upstream.resolve(source, None, advance)
            if describe_entry(now) != describe_entry(entry):
                raise CommandError(f"upstream has {describe_entry(now)} now, locked is {describe_entry(entry)}")
            if now != entry:
                update = f"`imagebuild lock --update {source.url}`"
                raise CommandError(f"same archive, but imagebuild now reads other facts; {update} takes them")
        case _:
            raise AssertionError(f"{source_title(source)}: the lock's entry is of another kind")
    return ""


# The commands


class LockCheck(Model):
    """Describe what `imagebuild lock --check --json` writes."""

    lock: str
    """File of the lock."""
    sources: int
    """Entries that the targets need."""
    upstream: bool
    """Whether the entries were compared with upstream."""
    findings: tuple[LockFinding, ...]
    """What people should know; nothing if all is as locked."""

    @property
    def unchecked(self) -> int:
        """Return the number of sources that could not be compared with upstream."""
        return sum(finding.state == "not checked" for finding in self.findings)

    @property
    def exit_status(self) -> int:
        """Return 1 if an entry is wrong, 4 if a source could not be compared with upstream, else 0."""
        return 1 if any(finding.fails for finding in self.findings) else 4 if self.unchecked else 0


@dataclass(frozen=True)
class LockFile:
    """Hold the lock of a project, and what the chosen targets need of it."""

    project: Project
    renderer: Renderer
    targets: tuple[Target, ...]
    path: Path
    today: date = field(default_factory=lambda: datetime.now(UTC).date())
    platforms: tuple[Platform, ...] = ()
    """The only platforms that sources are needed for; all if empty."""

    @property
    def recipes(self) -> Iterator[Recipe]:
        """Yield the recipe of each target, or one for each platform that was chosen."""
        for target in self.targets:
            recipe = self.renderer.recipe(target)
            chosen = [platform for platform in self.platforms if platform in target.platforms]
            yield from map(recipe.for_platform, chosen) if self.platforms else (recipe,)

    @cached_property
    def sources(self) -> tuple[Source, ...]:
        """Return what the targets need, one source for each entry of the lock. Raises ConfigError if they disagree."""
        return merged_sources(source for recipe in self.recipes for source in recipe.sources())

    @cached_property
    def entries(self) -> Table:
        """Return the project's entries and those of the extended project that targets need; callers change them."""
        table, own = lock_table(self.project.lock), lock_table(self.project.own_lock)
        return {**without_stale(table, self.sources), **{key: table[key] for key in own}}

    def unpinned(self, sources: Collection[Source]) -> int:
        """Return how many of the sources have no pin."""
        return len(incomplete(self.entries, sources))

    def text(self, entries: Table) -> str:
        """Return the file with these entries. It keeps its date; a lock without one gets today's."""
        return lock_text(lock_from_table(entries, self.project.lock.date or self.today))

    def write(self) -> None:
        """Write the file with its entries as they are now."""
        write_text(self.path, self.text(self.entries))

    def resolve(self, sources: Iterable[Source], upstream: Upstream, **options: Any) -> Outcome:
        """Ask upstream for sources as `resolve_sources` does; the outcome says what that changes, too."""
        before = dict(self.entries)
        outcome = resolve_sources(self.entries, sources, upstream, keep=self.write, **options)
        outcome.changes, outcome.adaptations = facts_changes(before, self.entries), list(self.adaptations(before))
        return outcome

    def adaptations(self, before: Mapping[Key, Entry]) -> Iterator[str]:
        """Yield a line for each thing that images adapt of sources whose facts are new or changed since `before`."""
        project = replace(self.project, lock=lock_from_table(self.entries))
        now = replace(self, project=project, renderer=Renderer(project, self.renderer.versions))
        renewed = {k for k, entry in self.entries.items() if getattr(entry, "facts", None) and entry != before.get(k)}
        lines: dict[str, None] = {}
        for recipe in now.recipes if renewed else ():
            if any(key_of(source) in renewed for source in recipe.sources()):
                lines |= dict.fromkeys(recipe.adaptations())
        yield from lines


def network_upstream(ca: Path | None) -> Upstream:
    """Return the upstream that asks over the network and the user's mirrors. Raises ConfigError for wrong settings.

    `ca` is a bundle of certificates to trust; by default the machine's.
    """
    configured = settings.load_settings(os.environ)
    return Upstream(configured.mirrors, settings.ca_bundle(ca, os.environ), configured.netrc_file)


def complete_lock(lock: LockFile, upstream: Upstream, *, whole: bool) -> tuple[tuple[Source, ...], Outcome]:
    """Add what the lock lacks; if the targets are those of the `whole` matrix, remove what nothing uses.

    Returns the sources that the targets need, and what became of those that were asked for.
    """
    outcome = lock.resolve(incomplete(lock.entries, lock.sources), upstream, mark=whole)
    # After a failure, what was used before may be wanted again.
    if whole and not outcome.complaint() and (kept := without_stale(lock.entries, lock.sources)) != lock.entries:
        lock.entries.clear()
        lock.entries.update(kept)
        lock.write()
    return lock.sources, outcome


def update_lock(lock: LockFile, upstream: Upstream, names: Collection[str]) -> tuple[tuple[Source, ...], Outcome]:
    """Pin again what belongs to the names, and nothing else. Raises ConfigError for an unknown name.

    Returns the sources that belong to the names, and what became of them.
    """
    anew = keys_of(names, owners(lock.recipes))
    sources = tuple(source for source in lock.sources if key_of(source) in anew)
    return sources, lock.resolve(sources, upstream, anew=anew)


def shown_sources(lock: LockFile, names: Collection[str]) -> Iterator[str]:
    """Yield lines with all that the lock knows of sources, named as for `update_lock`.

    Of an unpacked archive, they say what images adapt. Raises ConfigError for an unknown name.
    """
    chosen = keys_of(names, owners(lock.recipes))
    for key in sorted(key_of(source) for source in lock.sources if key_of(source) in chosen):
        yield describe_key(key)
        yield from (f"  {name}: {text}" for name, text in flat_entry(lock.entries.get(key, "not in the lock")).items())
    adapted = {
        f"  {line}"
        for recipe in lock.recipes
        if any(key_of(source) in chosen and getattr(source, "tree", None) for source in recipe.sources())
        for line in recipe.adaptations()
    }
    if adapted:
        yield "adapted in images"
        yield from sorted(adapted)


def flat_entry(entry: Entry) -> dict[str, str]:
    """Return an entry as name → text, such as `environment.PATH`; an entry that is one value has no name."""
    flat: dict[str, str] = {}

    def visit(name: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for part, inner in value.items():
                visit(f"{name}.{part}".removeprefix(".facts").removeprefix("."), inner)
        elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
            for item in value:
                visit(f"{name}.{item.get('name', '')}", item)
        elif isinstance(value, list | tuple):
            flat[name] = ", ".join(" ".join(item) if isinstance(item, list | tuple) else str(item) for item in value)
        else:
            flat[name or "pin"] = str(value)

    if isinstance(entry, Model):
        visit("", entry.model_dump(mode="json", by_alias=True, exclude_none=True))
    else:
        visit("", [wheel.model_dump() for wheel in entry] if isinstance(entry, tuple) else entry)
    return flat


def facts_changes(before: Mapping[Key, Entry], after: Mapping[Key, Entry]) -> list[str]:
    """Return how facts differ from those of the same source, or, for a new address, of the one most like it."""
    lines = []
    for key, entry in after.items():
        if entry == before.get(key) or not getattr(entry, "facts", None):
            continue
        known = {"".join(other): other for other, old in before.items() if other[0] == key[0] and hasattr(old, "facts")}
        for like in get_close_matches("".join(key), known, 1, 0.8):
            old, new = flat_entry(before[known[like]]), flat_entry(entry)
            changed = [name for name in {**old, **new} if old.get(name) != new.get(name)]
            lines += [describe_key(key)] if changed else []
            lines += [f"  {name}: {old.get(name, 'absent')} → {new.get(name, 'absent')}" for name in changed]
    return lines


def redate_lock(lock: LockFile, day: date) -> None:
    """Write the lock with another date."""
    write_text(lock.path, lock_text(lock_from_table(lock.entries, day)))


def check_lock(lock: LockFile, upstream: Upstream | None, *, whole: bool) -> LockCheck:
    """Return what is wrong with the lock; without `upstream`, nothing is compared with it.

    If the targets are those of the `whole` matrix, entries that nothing uses are wrong too.
    """
    own = lock_table(lock.project.own_lock) if whole else None
    findings = list(check_entries(lock.entries, lock.sources, own))
    if upstream:
        findings += compare_entries(lock.entries, lock.sources, upstream)
    return LockCheck(lock=str(lock.path), sources=len(lock.sources), upstream=bool(upstream), findings=tuple(findings))


# Asking before building


class SourceReport(Model):
    """Describe what a server answers about a source, which is not downloaded."""

    source: str
    state: Literal["as locked", "not locked", "changed", "gone", "no answer"]
    locked: str
    """What imagebuild.lock has of it, in few words; empty if it has nothing."""
    found: str
    consequence: str = ""
    """What becomes of a build; empty if all is well."""


class UpstreamReport(Model):
    """Describe what `imagebuild doctor --upstream --json` writes."""

    imagebuild: str
    """Version."""
    asked: datetime
    targets: tuple[str, ...]
    sources: tuple[SourceReport, ...]

    @property
    def exit_status(self) -> int:
        """Return 1 if a build would stop, 4 if a server did not answer, else 0."""
        states = {report.state for report in self.sources}
        return 1 if states - {"as locked", "no answer"} else 4 if "no answer" in states else 0


def examine_upstream(lock: LockFile, upstream: Upstream, version: str) -> UpstreamReport:
    """Ask every server of the targets whether it has what is wanted, and compare the answer with the lock.

    Archives are not downloaded, images not pulled. `version` is that of imagebuild, for the report.
    """
    reports: list[SourceReport] = []
    names = tuple(target.id for target in lock.targets)
    platforms = lock.platforms or tuple(dict.fromkeys(p for target in lock.targets for p in target.platforms))
    consequences = {  # the worst first
        "changed": "a build stops where it verifies this; `imagebuild lock --update {address}` takes what is there now",
        "gone": "a build stops here unless a cache has it; take another version, or a mirror that has it",
        "not locked": f"a build stops before its first step; `imagebuild lock {' '.join(names[:3])}` pins it",
        "no answer": "nothing is known; ask where the server can be reached, or name a mirror in the configuration",
        "as locked": "",
    }

    def ask(source: Source, advance: Advance) -> str:
        entry = lock.entries.get(key_of(source))
        return probe_source(source, None if entry == UNRESOLVED else entry, upstream, advance, platforms)

    def settle(source: Source, answer: str | ImagebuildError) -> tuple[str, bool]:
        entry = lock.entries.get(key_of(source))
        lacks = what_entry_lacks(source, entry)
        state: Any = upstream_state(answer, silent="no answer", as_locked="not locked" if lacks else "as locked")
        title = source_title(source)
        found = redacted_text(str(answer).removeprefix(f"{title.split(' ')[1]}: "))
        if lacks and state != "not locked":
            found += "; the lock has no pin of it either"
        consequence = consequences[state].format(address=key_of(source)[1])
        locked = describe_entry(entry) if entry else ""
        reports.append(SourceReport(source=title, state=state, locked=locked, found=found, consequence=consequence))
        return state, state == "as locked"

    ask_each(lock.sources, source_title, ask, upstream, settle)
    reports.sort(key=lambda report: ([*consequences].index(report.state), report.source))
    return UpstreamReport(
        imagebuild=version, asked=datetime.now(UTC).replace(microsecond=0), targets=names, sources=tuple(reports)
    )


def probe_source(
    source: Source, entry: Entry | None, upstream: Upstream, advance: Advance, platforms: Collection[Platform]
) -> str:
    """Return what a server has under the name of a source, in words.

    Raises ImagebuildError if that differs from the lock's entry, or is missing.
    """
    match source:
        case Archive(url=url):
            size = upstream.web.length(url)
            known = getattr(entry, "size", None)
            if known is not None and size is not None and size != known:
                raise CommandError(f"{url}: has {size} bytes, but the lock says {known}")
            return format_size(size) if size is not None else "there, of unknown size"
        case PackageSource():
            return there_of_packages(source, entry if isinstance(entry, LockedRepository) else None, upstream)
    note = compare_entry(source, entry, upstream, advance) if entry is not None else ""
    # Of an image, what is behind the digest of the lock: a digest of one platform has no others.
    now = upstream.resolve(source, entry, advance) if entry is None or isinstance(entry, LockedImage) else entry
    if isinstance(now, LockedImage) and now.platforms and (lacking := set(platforms) - set(now.platforms)):
        raise CommandError(f"is for {', '.join(now.platforms)}, not for {', '.join(sorted(lacking))}")
    return note or describe_entry(now)


def there_of_packages(source: PackageSource, entry: LockedRepository | None, upstream: Upstream) -> str:
    """Return the key that signs a repository, and the versions that it has of what is locked or else wanted.

    Raises ConfigError with all that differs.
    """
    index = upstream.index(source, tuple(sorted({*map(repositories.name_of, source.packages)})))
    locked = {name: version for name, version in (entry.packages if entry else {}).items() if version != UNRESOLVED}
    wanted = [f"{repositories.name_of(p)}={locked[p]}" if p in locked else p for p in source.packages]
    chosen, problems = repositories.choose(index.versions, wanted)
    try:
        repositories.check_key(source.url, index, entry)
    except ConfigError as error:
        problems.insert(0, str(error).removeprefix(f"{source.url}: "))
    if problems:
        raise ConfigError(f"{source.url}: {'; '.join(problems)}")
    shown = [f"{repositories.name_of(package)} {version}" for package, version in chosen.items()]
    return f"signed by {', '.join(index.fingerprints)}; {', '.join(shown)}"
