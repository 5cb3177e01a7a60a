"""Run `imagebuild lock` and `imagebuild bump`."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from functools import cached_property
from pathlib import Path

from rich.markup import escape

from imagebuild.core import console, settings
from imagebuild.core.console import out
from imagebuild.core.errors import CommandError
from imagebuild.core.files import write_text
from imagebuild.lock import bump, resolve
from imagebuild.lock.bump import edited
from imagebuild.lock.resolve import Outcome, display, keys_of, owners, resolve_sources, todo
from imagebuild.lock.upstream import Addresses, NetworkUpstream, Upstream
from imagebuild.project.load import Project
from imagebuild.project.lockfile import (
    UNRESOLVED,
    Source,
    Table,
    key_of,
    lock_from_table,
    lock_table,
    lock_text,
    merged_sources,
    without_stale,
)
from imagebuild.project.matrix import Target
from imagebuild.render.recipe import Recipe
from imagebuild.render.renderer import Renderer


def network_upstream(ca: Path | None) -> Upstream:
    """The network by the user's mirrors, with the CA bundle that is given or the machine's. Raises ConfigError."""
    configured = settings.load_settings(os.environ)
    mirrors = configured.mirrors
    addresses = Addresses(mirrors.image, mirrors.download, mirrors.python_index)
    return NetworkUpstream(addresses, settings.ca_bundle(ca, os.environ), configured.netrc_file)


@dataclass(frozen=True)
class LockRun:
    """What every command starts from."""

    project: Project
    renderer: Renderer
    targets: tuple[Target, ...]
    path: Path
    """Of the lock."""
    today: date = field(default_factory=lambda: datetime.now(UTC).date())

    @property
    def recipes(self) -> Iterable[Recipe]:
        return (self.renderer.recipe(target) for target in self.targets)

    @cached_property
    def sources(self) -> tuple[Source, ...]:
        """Each entry of the lock that the targets need once. Raises ConfigError."""
        return merged_sources(source for recipe in self.recipes for source in recipe.sources())

    @cached_property
    def entries(self) -> Table:
        return lock_table(self.project.lock)

    def write(self) -> None:
        write_text(self.path, self.text(self.entries))

    def text(self, entries: Table) -> str:
        """The file with these entries. Its date stays: the first one is today's."""
        return lock_text(lock_from_table(entries, self.project.lock.date or self.today))


def complete_lock(job: LockRun, asked: Upstream, *, whole: bool) -> None:
    """Add what the lock lacks; if the targets are those of the `whole` matrix, remove what nothing uses.

    Raises CommandError that lists what could not be resolved.
    """
    if whole and (kept := without_stale(job.entries, job.sources)) != job.entries:
        job.entries.clear()
        job.entries.update(kept)
        job.write()
    outcome = resolve_sources(job.entries, todo(job.entries, job.sources), asked, display(), keep=job.write)
    _conclude(job, job.sources, outcome)


def update_lock(job: LockRun, asked: Upstream, names: Collection[str]) -> None:
    """Resolve anew what belongs to the names, and nothing else. Raises CommandError, or ConfigError for a name."""
    anew = keys_of(names, owners(job.recipes))
    sources = tuple(source for source in job.sources if key_of(source) in anew)
    outcome = resolve_sources(job.entries, sources, asked, display(), keep=job.write, anew=anew)
    _conclude(job, sources, outcome)


def redate_lock(job: LockRun, day: date) -> None:
    """Write the lock with another date, and print what that means."""
    write_text(job.path, lock_text(lock_from_table(job.entries, day)))
    out.print(f"{job.path}: no file of an image is younger than {day} now; all digests change", markup=False)


def _conclude(job: LockRun, sources: tuple[Source, ...], outcome: Outcome) -> None:
    missing = sum(job.entries.get(key_of(source), UNRESOLVED) == UNRESOLVED for source in sources)
    state = f"{missing} of {len(sources)} sources have no pin" if missing else f"all {len(sources)} sources are pinned"
    out.print(f"{job.path}: {len(outcome.resolved)} resolved; {state}", markup=False)
    if complaint := outcome.complaint():
        raise CommandError(complaint)


def check_lock(job: LockRun, asked: Upstream | None, *, whole: bool) -> bool:
    """Print a table of what is not right with the lock; whether all is. Without `asked`, upstream is not compared.

    Raises CommandError if all that could be compared is right, but something could not.
    """
    findings = list(resolve.offline(job.entries, job.sources, whole=whole))
    if asked:
        findings += resolve.online(job.entries, job.sources, asked, display())
    if findings:
        console.print_table(
            ("state", "source", "what"), [(f.state, escape(f.source), escape(f.detail)) for f in findings]
        )
    if any(finding.fails for finding in findings):
        return False
    if count := sum(finding.state == "not checked" for finding in findings):
        raise CommandError(f"{job.path}: {count} sources could not be compared with upstream; all else is as locked")
    how = "" if asked else "; upstream was not asked"
    out.print(f"{job.path}: all {len(job.sources)} sources are as locked{how}", markup=False)
    return True


def bump_pins(
    job: LockRun, asked: Upstream, names: Collection[str], *, write: bool, with_lock: bool, pre: bool
) -> None:
    """Print newer versions as a diff of the matrix, and of the lock if it is wanted, or `write` them.

    Raises ConfigError for a name that is no pin or a line that cannot be edited, CommandError if a new version could
    not be resolved for the lock.
    """
    proposals = bump.propose(job.project, job.targets, names, asked, display(), pre=pre)
    if proposals.reasons:
        rows = [tuple(map(escape, row)) for row in proposals.reasons]
        console.print_table(("pin", "version", "stays, because it"), rows)
    if not proposals.changes:
        out.print("no newer version", markup=False)
        return
    matrix = job.project.matrix
    wanted = bump.with_pins(job.project, proposals.changes)
    texts = {matrix.path: edited(matrix, wanted.matrix, proposals.changes)}
    complaint = ""
    if with_lock:
        entries, complaint = bump.relocked(job.project, proposals.changes, asked, display())
        texts[job.path] = job.text(entries)
    for path, text in texts.items():
        if write:
            write_text(path, text)
            out.print(f"{path}: written", markup=False)
        else:
            sys.stdout.write(bump.diff(path, text))
    if complaint:
        raise CommandError(complaint)
