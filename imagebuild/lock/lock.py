"""Complete, renew and check the lock, and propose newer versions of pins: what `imagebuild lock` and `bump` call."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from functools import cached_property
from pathlib import Path

from imagebuild.core import settings
from imagebuild.core.fields import Model
from imagebuild.core.files import write_text
from imagebuild.lock import bump
from imagebuild.lock.resolve import (
    LockFinding,
    Outcome,
    check_entries,
    compare_entries,
    incomplete,
    keys_of,
    lock_from_table,
    lock_table,
    lock_text,
    merged_sources,
    owners,
    resolve_sources,
    without_stale,
)
from imagebuild.lock.upstream import Upstream
from imagebuild.project.load import Project
from imagebuild.project.lockfile import (
    UNRESOLVED,
    Source,
    Table,
    key_of,
)
from imagebuild.project.matrix import Target
from imagebuild.render.recipe import Recipe
from imagebuild.render.renderer import Renderer


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


class NewVersion(Model):
    """Describe a newer version of a pin."""

    pin: str
    row: int
    """Which of the pin's versions in the matrix, from 0."""
    version: str
    """What the matrix has."""
    newer: str


class KeptVersion(Model):
    """Describe a version that stays, and why."""

    pin: str
    version: str
    reason: str


class BumpResult(Model):
    """Describe what `imagebuild bump --json` writes."""

    changes: tuple[NewVersion, ...]
    kept: tuple[KeptVersion, ...]
    written: bool
    """Whether the files were changed."""
    unresolved: str = ""
    """With `--relock`: new sources that could not be pinned, a line for each."""


@dataclass(frozen=True)
class LockFile:
    """Hold the lock of a project, and what the chosen targets need of it."""

    project: Project
    renderer: Renderer
    targets: tuple[Target, ...]
    path: Path
    today: date = field(default_factory=lambda: datetime.now(UTC).date())

    @property
    def recipes(self) -> Iterator[Recipe]:
        """Yield the recipe of each target."""
        return (self.renderer.recipe(target) for target in self.targets)

    @cached_property
    def sources(self) -> tuple[Source, ...]:
        """Return what the targets need, each entry of the lock once. Raises ConfigError."""
        return merged_sources(source for recipe in self.recipes for source in recipe.sources())

    @cached_property
    def entries(self) -> Table:
        """Return the entries of the lock, to be changed."""
        return lock_table(self.project.lock)

    def unpinned(self, sources: Collection[Source]) -> int:
        """Return how many of the sources have no pin."""
        return sum(self.entries.get(key_of(source), UNRESOLVED) == UNRESOLVED for source in sources)

    def text(self, entries: Table) -> str:
        """Return the file with these entries. It keeps its date; a lock without one gets today's."""
        return lock_text(lock_from_table(entries, self.project.lock.date or self.today))

    def write(self) -> None:
        """Write the file with its entries as they are now."""
        write_text(self.path, self.text(self.entries))


def network_upstream(ca: Path | None) -> Upstream:
    """Return the network, by way of the user's mirrors. Raises ConfigError.

    `ca` is a bundle of certificates to trust; by default the machine's.
    """
    configured = settings.load_settings(os.environ)
    return Upstream(configured.mirrors, settings.ca_bundle(ca, os.environ), configured.netrc_file)


def complete_lock(lock: LockFile, upstream: Upstream, *, whole: bool) -> tuple[tuple[Source, ...], Outcome]:
    """Add what the lock lacks; if the targets are those of the `whole` matrix, remove what nothing uses.

    Returns the sources that the targets need, and what became of those that were asked for.
    """
    if whole and (kept := without_stale(lock.entries, lock.sources)) != lock.entries:
        lock.entries.clear()
        lock.entries.update(kept)
        lock.write()
    lacking = incomplete(lock.entries, lock.sources)
    return lock.sources, resolve_sources(lock.entries, lacking, upstream, keep=lock.write)


def update_lock(lock: LockFile, upstream: Upstream, names: Collection[str]) -> tuple[tuple[Source, ...], Outcome]:
    """Pin again what belongs to the names, and nothing else. Raises ConfigError for an unknown name.

    Returns the sources that belong to the names, and what became of them.
    """
    anew = keys_of(names, owners(lock.recipes))
    sources = tuple(source for source in lock.sources if key_of(source) in anew)
    return sources, resolve_sources(lock.entries, sources, upstream, keep=lock.write, anew=anew)


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


def bump_pins(
    lock: LockFile, upstream: Upstream, names: Collection[str], *, write: bool, relock: bool, pre: bool
) -> tuple[BumpResult, Mapping[Path, str]]:
    """Find newer versions of pins; with `write`, change the matrix, and the lock if it is to be completed (`relock`).

    Returns the result, and the changed files with their new texts. Raises ConfigError for a name that is no pin, or a
    line that cannot be edited.
    """
    proposals = bump.propose(lock.project, lock.targets, names, upstream, pre=pre)
    matrix = lock.project.matrix
    texts: dict[Path, str] = {}
    unresolved = ""
    if proposals.changes:
        wanted = bump.with_pins(lock.project, proposals.changes)
        texts[matrix.path] = bump.edited(matrix, wanted.matrix, proposals.changes)
        if relock:
            entries, unresolved = bump.relocked(lock.project, proposals.changes, upstream)
            texts[lock.path] = lock.text(entries)
    if write:
        for path, text in texts.items():
            write_text(path, text)
    result = BumpResult(
        changes=tuple(
            NewVersion(pin=pin, row=row, version=matrix.model.versions[pin][row].version, newer=newer)
            for (pin, row), newer in proposals.changes.items()
        ),
        kept=tuple(KeptVersion(pin=pin, version=version, reason=why) for pin, version, why in proposals.kept),
        written=write and bool(texts),
        unresolved=unresolved,
    )
    return result, texts
