"""`imagebuild lock`: sources to entries, each written as soon as it is known."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial

from imagebuild.errors import ImagebuildError, Unreachable
from imagebuild.lockfile import UNRESOLVED, LockedRepository
from imagebuild.locking.display import Display
from imagebuild.locking.entries import Entry, Key, Table, key_of, lacks
from imagebuild.locking.pool import asked
from imagebuild.locking.upstream import Upstream
from imagebuild.sources import PackageSource, Source, title


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
    return [source for source in sources if lacks(source, entries.get(key_of(source)))]


def resolve(
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
        advance = partial(display.advance, title(source))
        display.begin(title(source))
        if key not in anew:
            return upstream.resolve(source, before, advance)
        if not (isinstance(source, PackageSource) and isinstance(before, LockedRepository)):
            return upstream.resolve(source, None, advance)
        todo = tuple(p for p in source.packages if p not in before.packages or (*key, p) in anew)
        now = upstream.resolve(replace(source, packages=todo), None, advance)
        assert isinstance(now, LockedRepository)
        return now.model_copy(update={"packages": {**before.packages, **now.packages}})

    with display, asked(sources, ask, upstream.stop) as answers:
        for source, answer in answers:
            key, name = key_of(source), title(source)
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
