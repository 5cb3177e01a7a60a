"""The changes between two states of a project, such as its files at a git revision.

They are the stages in which BuildKit will run steps again, and the targets that differ, as the job matrix of a GitHub
Actions workflow."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from imagebuild.build import bake
from imagebuild.build.buildx import component_of
from imagebuild.build.division import Build, sections, tasks_of
from imagebuild.core import console
from imagebuild.core.console import err, out
from imagebuild.core.errors import ConfigError
from imagebuild.core.fields import Model, Platform
from imagebuild.project import load
from imagebuild.project.lockfile import digest_of
from imagebuild.project.plan import Target, make_plan
from imagebuild.project.project import Changes
from imagebuild.project.revision import files_at_revision
from imagebuild.project.select import select_targets
from imagebuild.render.renderer import Renderer
from imagebuild.render.stages import Stage, needed_stages, stages_of

NOTHING = "nothing"
"""The name of the state before the first build: an empty cache."""


@dataclass(frozen=True)
class ProjectState:
    """One state of a project, with the targets to build."""

    renderer: Renderer
    targets: Sequence[Target]
    platforms: Sequence[str] = ()
    """The platforms to build for. Empty: all platforms of each target."""
    base: str = "bootstrap"
    """The value of `--base`."""

    def builds(self) -> Iterator[tuple[Target, Platform, dict[str, Stage]]]:
        """Yield each target for each of its platforms, with the stages that BuildKit runs, the final stage last."""
        project = self.renderer.project
        bases = project.matrix.model.bases.values() if self.base == "bootstrap" else ()
        # A bootstrapped base depends only on the release, not on the official image that it replaces.
        replaced = {digest_of(project.lock, b.image): f"bootstrapped {b.release}" for b in bases if b.release}
        for target in self.targets:
            text = self.renderer.dockerfile(target).text
            for platform in bake.platforms_of(target, self.platforms):
                yield target, platform, needed_stages(stages_of(text, platform, replaced))


def read_state(
    folder: Path, changes: Changes, select: Sequence[str], platforms: Sequence[str] = (), base: str = "bootstrap"
) -> ProjectState:
    """Read a project, select targets, and return the state.
    Raises ConfigError that lists every mistake in the project, and NothingSelected if no target is selected."""
    project = load.load_project(folder).changed(changes)
    targets = select_targets(make_plan(project, select if changes.options_of_plan else None), select)
    return ProjectState(Renderer(project), targets, platforms, base)


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


def job_matrix(
    pairs: Sequence[tuple[str, Platform]], max_jobs: int, builds: Callable[[], Iterable[Build]]
) -> dict[str, list[dict[str, Any]]]:
    """Return the `matrix` of a GitHub workflow with at most `max_jobs` jobs. Each job builds for one platform.

    `pairs` are targets with their platforms. `builds` returns them with their stages; this takes long, so it is called
    only if jobs have several targets. These are neighbours, and the jobs have about the same number of steps. The
    matrix names no runner, because a pull request could change it. Raises ConfigError if there are more platforms than
    jobs."""
    groups: dict[Platform, list[list[str]]] = defaultdict(list)
    for target, platform in pairs:
        groups[platform].append([target])
    if len(groups) > max_jobs:
        raise ConfigError(f"--max-jobs {max_jobs}: each platform needs a job; use at least {len(groups)}")
    if len(pairs) > max_jobs:
        groups |= _equal_groups(builds(), max_jobs)
    jobs: list[dict[str, Any]] = []
    for platform, parts in groups.items():
        arch = platform.removeprefix("linux/")
        for first, *others in parts:
            jobs.append(
                {
                    "name": f"{first} and {len(others)} more {arch}" if others else f"{first} {arch}",
                    "id": f"group{len(jobs) + 1:03}-{arch}" if others else f"{first}-{arch}",
                    "targets": " ".join([first, *others]),
                    "platform": platform,
                }
            )
    return {"include": jobs}


def _equal_groups(builds: Iterable[Build], max_jobs: int) -> dict[Platform, list[list[str]]]:
    """Map each platform to groups of neighbouring targets with about the same work, at most `max_jobs` in all."""
    own: dict[Platform, list[Build]] = defaultdict(list)
    for build in builds:
        own[build[1]].append(build)
    tasks = {platform: tasks_of(part, {}) for platform, part in own.items()}
    work = {platform: sum(task.work for task in part) for platform, part in tasks.items()}
    number = dict.fromkeys(own, 1)
    while sum(number.values()) < max_jobs and (more := [p for p in own if number[p] < len(own[p])]):
        number[max(more, key=lambda platform: work[platform] / number[platform])] += 1
    groups = {}
    for platform, part in tasks.items():
        if number[platform] == len(own[platform]):  # a target with much work would leave sections empty
            groups[platform] = [[target.id] for target, *_ in own[platform]]
        else:
            cut = sections(part, number[platform])
            groups[platform] = [[task.key for task in section] for section in cut if section]
    return groups


def print_matrix(state: ProjectState, targets: Sequence[Target], max_jobs: int) -> None:
    """Print the job matrix of `targets`, which belong to `state`, as one line of JSON.
    Raises ConfigError if one of the state's platforms is for no target of `state`."""
    bake.check_each_used(state.targets, state.platforms)
    # Publishing a target needs all its platforms, even if only one of them changed.
    pairs = [(t.id, platform) for t in targets for platform in bake.platforms_of(t, state.platforms)]
    matrix = job_matrix(pairs, max_jobs, replace(state, targets=targets).builds)
    if len(matrix["include"]) < len(pairs):
        err.print(f"{len(pairs)} builds in {len(matrix['include'])} jobs")
    out.print(json.dumps(matrix))


def changed_since(reference: str, folder: Path, after: ProjectState) -> list[Target]:
    """Return the targets that differ from an earlier state, which is a revision, a folder or `nothing`.

    A target differs if an input of its image changed, or if the target has a new platform or tag. This version of
    imagebuild renders both states. If imagebuild cannot read the earlier state, all targets differ. Raises ConfigError
    for a reference that is neither a revision nor a folder."""
    if reference == NOTHING:
        return list(after.targets)
    with files_at_revision(reference, folder) as there:
        try:
            before = read_state(there, Changes(), ())
            known = {target.id: (target, before.renderer.key(target)) for target in before.targets}
        except ConfigError as error:
            # This version may refuse a file that an older version accepted. CI must not fail because of such a file.
            err.print(f"{reference} cannot be read, so everything counts as changed: {error}")
            return list(after.targets)

    def differs(target: Target) -> bool:
        if target.id not in known:
            return True
        old, key = known[target.id]
        more_platforms = {*bake.platforms_of(target, after.platforms)} - {*old.platforms}
        more_tags = {*target.tags, *target.aliases} - {*old.tags, *old.aliases}
        return bool(more_platforms or more_tags) or key != after.renderer.key(target)

    return [target for target in after.targets if differs(target)]
