"""`imagebuild plan --from`: read two states of a project, compare them, print what a build would execute."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from imagebuild import console, cost
from imagebuild import plan as planning
from imagebuild.build import native_platform
from imagebuild.config import Project
from imagebuild.console import duration, out
from imagebuild.cost import Cost, Count, Side
from imagebuild.errors import ConfigError
from imagebuild.models import Plan, Target
from imagebuild.render import Renderer
from imagebuild.revision import Places, files_of
from imagebuild.sources import with_unresolved
from imagebuild.timings import load_past

NOTHING = "nothing"
"""Instead of a state: an empty cache."""
WORKING_TREE = "the working tree"
SHARED = "a step that targets or platforms share counts once"


class Work(Protocol):
    """A project that was read, and its plan."""

    @property
    def project(self) -> Project: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def versions(self) -> planning.Pins: ...


Form = Literal["table", "json", "markdown"]
Prepare = Callable[[Path, Path, Path, planning.Changes | None], Work]


@dataclass(frozen=True)
class Wish:
    """What the command line asks for."""

    before: str
    """A git revision, a folder, or `nothing`."""
    after: str | None
    """The same, but for `nothing`; the working tree if None."""
    places: Places
    select: Sequence[str] = ()
    settings: Sequence[str] = ()
    platforms: Sequence[str] = ()
    base: str = "bootstrap"
    timings: Path = Path("build")
    form: Form = "table"


def form_of(before: str | None, *, as_json: bool, markdown: bool, other: bool) -> Form:
    """How to print it. Raises ConfigError for options of `plan` that do not go together."""
    if before is None:
        raise ConfigError("--to, --markdown and --platform: need --from; --platform may also go with --github")
    if as_json + markdown + other > 1:
        raise ConfigError("--json, --markdown, --github and --why exclude each other")
    if other:
        raise ConfigError("--from: is for a table, --json or --markdown; not for --github or --why")
    return "json" if as_json else "markdown" if markdown else "table"


def show(wish: Wish, prepare: Prepare) -> None:
    """Print what is executed again. Raises ConfigError or NothingSelected."""
    result = preview(wish, prepare)
    if wish.form == "json":
        out.print(result.model_dump_json(indent=1), markup=False)
    elif wish.form == "markdown":
        sys.stdout.write("\n".join(_markdown(result)) + "\n")
    else:
        if result.components:
            console.table(COMPONENT, _component_rows(result))
            out.print()
        console.table(TARGET, _target_rows(result))
        out.print()
        out.print("\n".join(summary(result)), markup=False)


def side_of(
    project: Project, versions: planning.Pins, targets: Sequence[Target], platforms: Sequence[str], base: str
) -> Side:
    """One side of a comparison. What the lock lacks is taken as unresolved: a cost can be known before a hash is."""
    renderer = Renderer(project, versions)
    lock = with_unresolved(project.lock, (s for t in targets for s in renderer.recipe(t).sources()))
    full = replace(project, lock=lock)
    return Side(full, Renderer(full, versions), targets, tuple(platforms), native_platform(), base)


def named_platforms(platforms: Sequence[str]) -> tuple[str, ...]:
    """Platforms, with this machine's for `local`."""
    return tuple(native_platform() if p == "local" else p for p in platforms)


def preview(wish: Wish, prepare: Prepare) -> Cost:
    """What building the selected targets of the state after executes, all targets of the state before being built."""
    if wish.base not in ("bootstrap", "registry"):
        raise ConfigError(f"--base {wish.base}: 'bootstrap' or 'registry'")
    if wish.after == NOTHING:
        raise ConfigError("--to nothing: only --from can be that")
    platforms = named_platforms(wish.platforms)
    with ExitStack() as stack:

        def side(reference: str | None, changes: planning.Changes | None, select: Sequence[str]) -> Side:
            places = stack.enter_context(files_of(reference, wish.places)) if reference else wish.places
            work = prepare(places.matrix, places.dockerfiles, places.lock, changes)
            targets = planning.select(work.plan, select)
            return side_of(work.project, work.versions, targets, platforms, wish.base)

        before = None if wish.before == NOTHING else side(wish.before, None, ())
        after = side(wish.after, planning.parse_changes(wish.settings), wish.select)
        for target in after.targets:
            if not after.settings(target):
                named, known = ", ".join(platforms), ", ".join(target.platforms)
                raise ConfigError(f"{target.id}: is not for {named}; it is for {known}")
        names = (wish.before, " ".join([wish.after or WORKING_TREE, *(f"--set {s}" for s in wish.settings)]))
        return cost.compare(before, after, names, load_past(wish.timings))


COMPONENT = ("component", "RUN steps", "compile", "other steps", "targets", "time")
TARGET = ("target", "RUN steps", "compile", "other steps", "time")


def _component_rows(result: Cost) -> list[tuple[str, ...]]:
    return [
        (c.name, f"{c.run} of {c.run_of}", str(c.compile), str(c.other), str(c.targets), time(c))
        for c in result.components
    ]


def _target_rows(result: Cost) -> list[tuple[str, ...]]:
    return [(t.name, f"{t.run} of {t.run_of}", str(t.compile), str(t.other), time(t)) for t in result.targets]


def time(count: Count) -> str:
    """Past times of what is executed, and of how many steps they are not known."""
    if count.untimed == count.run + count.other:
        return "unknown" if count.untimed else "-"
    return duration(count.seconds) + (f" + {count.untimed} unknown" if count.untimed else "")


def summary(result: Cost) -> list[str]:
    """The totals, in sentences."""
    total = result.total
    lines = [
        f"from {result.before} to {result.after}:",
        f"RUN steps executed: {total.run} (of {total.run_of}); compile steps {total.compile}; "
        f"other steps {total.other}; {SHARED}",
    ]
    if steps := total.run + total.other:
        known = steps - total.untimed
        lines.append(
            f"in past builds {known} of them took {duration(total.seconds)}, one after the other" * bool(known)
        )
        lines.append(f"{total.untimed} of {steps} have no past time" * bool(total.untimed))
    return [line for line in lines if line]


def _markdown(result: Cost) -> Iterator[str]:
    head, *totals = summary(result)
    yield f"**{head.removesuffix(':')}**"
    yield ""
    yield from (f"* {line}" for line in totals)
    for columns, rows in ((COMPONENT, _component_rows(result)), (TARGET, _target_rows(result))):
        if rows:
            yield ""
            yield f"| {' | '.join(columns)} |"
            yield "|---" * len(columns) + "|"
            yield from (f"| {' | '.join(row)} |" for row in rows)
