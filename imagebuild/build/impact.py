"""The impact of a change of the project: the stages in which BuildKit will run steps again."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from imagebuild.build import bake
from imagebuild.build.buildx import component_of
from imagebuild.build.state import NOTHING, ProjectState, read_state
from imagebuild.core import console
from imagebuild.core.console import out
from imagebuild.core.fields import Model
from imagebuild.project.project import Changes
from imagebuild.project.revision import files_at_revision


class StageImpact(Model):
    """A stage in which steps will run again."""

    stage: str
    component: str | None
    """The component that the stage builds; None for the final stage."""
    run: int
    """Number of `RUN` steps that will run. A step that targets or platforms share counts once."""
    targets: tuple[str, ...]
    """The ids of the targets that need these steps."""


class Impact(Model):
    """The steps that a change makes BuildKit run, as `imagebuild impact --json` writes them."""

    before: str
    """The state that was built, as the command line names it."""
    after: str
    """The state to build: the value of `--to`, or the working tree."""
    run: int
    """Number of `RUN` steps that will run. A step that targets or platforms share counts once."""
    run_of: int
    """Number of all `RUN` steps."""
    stages: tuple[StageImpact, ...]
    """Every stage with a step that will run, the final stage last."""


def compare_states(before: ProjectState | None, after: ProjectState, names: tuple[str, str]) -> Impact:
    """Return the steps that a build of `after` runs if the cache has every step of `before`.
    If `before` is None, the cache is empty. `names` are the names of both states in the result."""
    built = before.builds() if before else ()
    known = {key for _, _, stages in built for stage in stages.values() for _, key in stage.steps}
    everything: set[str] = set()
    executed: dict[str, dict[str, set[str]]] = {}  # keys of RUN steps, by stage and target
    for target, _, stages in after.builds():
        for name, stage in stages.items():
            runs = {key for word, key in stage.steps if word == "RUN"}
            everything |= runs
            if any(key not in known for _, key in stage.steps):
                executed.setdefault(name, {}).setdefault(target.id, set()).update(runs)
    impacts = [
        StageImpact(
            stage=name,
            component=component_of(name, after.renderer.project.components),
            run=len(set().union(*runs_of.values()) - known),
            targets=tuple(runs_of),
        )
        for name, runs_of in executed.items()
    ]
    return Impact(
        before=names[0],
        after=names[1],
        run=len(everything - known),
        run_of=len(everything),
        stages=tuple(sorted(impacts, key=lambda impact: impact.component is None)),
    )


def predict_impact(
    folder: Path, before: str, after: str | None, *, changes: Changes, select: Sequence[str],
    platforms: Sequence[str], base: str,
) -> Impact:  # fmt: skip
    """Return the steps that a build of the selected targets of `after` runs if every target of `before` was built.

    A state is a git revision or a folder. `before` can also be `nothing`. If `after` is None, the state to build is
    the working tree with `changes`. Raises ConfigError for a state that cannot be read, and for a platform without
    targets."""
    with ExitStack() as files:

        def at(reference: str | None) -> Path:
            return files.enter_context(files_at_revision(reference, folder)) if reference else folder

        built = None if before == NOTHING else read_state(at(before), Changes(), (), platforms, base)
        wanted = read_state(at(after), changes, select, platforms, base)
        bake.check_platforms(wanted.targets, platforms)
        return compare_states(built, wanted, (before, " ".join([after or "the working tree", *changes.options])))


def print_impact(impact: Impact, *, markdown: bool = False) -> None:
    """Print the stages with steps that will run, and the targets that need them, as tables or as Markdown."""
    stages = [(s.stage, s.component or "", str(s.run), str(len(s.targets))) for s in impact.stages]
    names = dict.fromkeys(target for stage in impact.stages for target in stage.targets)
    targets = [(name, ", ".join(s.stage for s in impact.stages if name in s.targets)) for name in names]
    show = (lambda *table: out.print(console.markdown_table(*table))) if markdown else console.print_table
    if stages:
        show(("stage", "component", "RUN steps", "targets"), stages)
        out.print()
        show(("target", "stages executed"), targets)
        out.print()
    change = f"from {impact.before} to {impact.after}"
    change = f"**{change}**" if markdown else change
    shared = "a step that targets or platforms share counts once"
    summary = f"{impact.run} of {impact.run_of} RUN steps are executed; {shared}"
    out.print(f"{change}: {summary}")
