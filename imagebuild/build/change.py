"""Say what a change of the project makes BuildKit execute again, and which targets CI has to build."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from math import ceil
from pathlib import Path
from typing import Any

from imagebuild.build import bake, buildx
from imagebuild.build.bake import CacheEntry
from imagebuild.build.buildx import BuildProgress, component_of
from imagebuild.core import console
from imagebuild.core.console import err, out
from imagebuild.core.errors import ConfigError
from imagebuild.core.fields import Model, Platform
from imagebuild.oci.reference import parse_reference
from imagebuild.oci.registry import connect_registry
from imagebuild.project import load
from imagebuild.project.changes import Changes
from imagebuild.project.lockfile import digest_of
from imagebuild.project.plan import Target, make_plan
from imagebuild.project.records import BuildResult
from imagebuild.project.revision import files_at_revision
from imagebuild.project.select import select_targets
from imagebuild.render.renderer import Renderer
from imagebuild.render.stages import Stage, needed_stages, stages_of

NOTHING = "nothing"
"""Argument of --from for an empty cache."""


@dataclass(frozen=True)
class ProjectState:
    """Hold what one state of a project says about builds."""

    renderer: Renderer
    targets: Sequence[Target]
    platforms: Sequence[str] = ()
    """Empty: the platforms of each target."""
    base: str = "bootstrap"

    def builds(self) -> Iterator[tuple[Target, Platform, dict[str, Stage]]]:
        """Yield each target for each of its platforms, with the stages that BuildKit executes, the image's last."""
        project = self.renderer.project
        bases = project.matrix.model.bases.values() if self.base == "bootstrap" else ()
        # What is bootstrapped instead of an official image depends on the release only.
        replaced = {digest_of(project.lock, b.image): f"bootstrapped {b.release}" for b in bases if b.release}
        for target in self.targets:
            text = self.renderer.dockerfile(target).text
            for platform in bake.platforms_of(target, self.platforms):
                yield target, platform, needed_stages(stages_of(text, platform, replaced))


def read_state(
    folder: Path, changes: Changes, select: Sequence[str], platforms: Sequence[str] = (), base: str = "bootstrap"
) -> ProjectState:
    """Read a project and select targets. Raises ConfigError with every mistake in it, NothingSelected if none fits."""
    project = load.load_project(folder).changed(changes)
    targets = select_targets(make_plan(project), select)
    return ProjectState(Renderer(project), targets, platforms, base)


class CostStage(Model):
    """Describe a stage of which steps will be executed."""

    stage: str
    component: str | None
    """Component whose stage it is; None for the final stage."""
    run: int
    """`RUN` steps that will be executed; one that targets or platforms share counts once."""
    targets: tuple[str, ...]
    """Targets that need them."""


class Cost(Model):
    """Describe what a change makes BuildKit execute, as `imagebuild plan --from … --json` prints it."""

    before: str
    """The state that was built, as --from names it."""
    after: str
    """The state to build: --to, or the working tree."""
    run: int
    """`RUN` steps that will be executed; one that targets or platforms share counts once."""
    run_of: int
    """All `RUN` steps."""
    stages: tuple[CostStage, ...]
    """Every stage with a step that will be executed, the final stage last."""


def compare_states(before: ProjectState | None, after: ProjectState, names: tuple[str, str]) -> Cost:
    """Return what building `after` executes if all of `before` was built, or nothing; both have `names`."""
    built = before.builds() if before else ()
    known = {key for _, _, stages in built for stage in stages.values() for _, key in stage.steps}
    everything: set[str] = set()
    executed: dict[str, dict[str, set[str]]] = {}  # stage → target → keys of its RUN steps
    for target, _, stages in after.builds():
        for name, stage in stages.items():
            runs = {key for word, key in stage.steps if word == "RUN"}
            everything |= runs
            if any(key not in known for _, key in stage.steps):
                executed.setdefault(name, {}).setdefault(target.id, set()).update(runs)
    costs = [
        CostStage(
            stage=name,
            component=component_of(name, after.renderer.project.components),
            run=len(set().union(*runs_of.values()) - known),
            targets=tuple(runs_of),
        )
        for name, runs_of in executed.items()
    ]
    return Cost(
        before=names[0],
        after=names[1],
        run=len(everything - known),
        run_of=len(everything),
        stages=tuple(sorted(costs, key=lambda cost: cost.component is None)),
    )


def predict_cost(
    folder: Path, before: str, after: str | None, *, changes: Changes, select: Sequence[str],
    platforms: Sequence[str], base: str,
) -> Cost:  # fmt: skip
    """Return what building the selected targets of the later state executes if all targets of the earlier were built.

    A state is a git revision or a folder; `before` may be `nothing`, and without `after` that is the working tree, with
    `changes`. Raises ConfigError for options that make no sense, and for a state that cannot be read.
    """
    with ExitStack() as files:

        def at(reference: str | None) -> Path:
            return files.enter_context(files_at_revision(reference, folder)) if reference else folder

        built = None if before == NOTHING else read_state(at(before), Changes(), (), platforms, base)
        wanted = read_state(at(after), changes, select, platforms, base)
        bake.check_platforms(wanted.targets, platforms)
        return compare_states(built, wanted, (before, " ".join([after or "the working tree", *changes.options])))


def show_cost(cost: Cost, *, markdown: bool = False) -> None:
    """Print the stages that are executed again, for which targets; in Markdown, as a summary for GitHub Actions."""
    stages = [(s.stage, s.component or "", str(s.run), str(len(s.targets))) for s in cost.stages]
    names = dict.fromkeys(target for stage in cost.stages for target in stage.targets)
    targets = [(name, ", ".join(s.stage for s in cost.stages if name in s.targets)) for name in names]
    show = (lambda *table: out.print(console.markdown_table(*table), markup=False)) if markdown else console.print_table
    if stages:
        show(("stage", "component", "RUN steps", "targets"), stages)
        out.print()
        show(("target", "stages executed"), targets)
        out.print()
    change = f"from {cost.before} to {cost.after}"
    change = f"**{change}**" if markdown else change
    summary = f"{cost.run} of {cost.run_of} RUN steps are executed; one that targets or platforms share counts once"
    out.print(f"{change}: {summary}", markup=False)


def cache_entries(state: ProjectState) -> dict[str, list[CacheEntry]]:
    """Return target → the caches of the compiling stages that it needs, on all of its platforms."""
    components = state.renderer.project.components
    entries: dict[str, list[CacheEntry]] = {target.id: [] for target in state.targets}
    for target, platform, stages in state.builds():
        compiling = (name for name in stages if name in components and components[name].model.compiles)
        entries[target.id] += [CacheEntry(name, platform, stages[name].key) for name in compiling]
    return entries


def write_caches(run: bake.BuildRun, built: Sequence[BuildResult], progress: BuildProgress) -> None:
    """Write, from the builder's own cache, the caches of what was compiled just now or has none in the registry."""
    location = parse_reference(run.request.cache or "")
    place = connect_registry(location.host).at(location.repository)
    executed = {(result.target, step.stage) for result in built for step in result.steps if not step.cached}
    owners = {entry: target for target in run.request.targets for entry in run.caches[target.id]}
    content = bake.bake_file(run)
    chosen: dict[str, Any] = {
        entry.tag: {
            **content["target"][target.bake_name],
            "target": entry.stage,
            "platforms": [entry.platform],
            "tags": [],
            "output": ["type=cacheonly"],
            # A manifest like that of images: not every registry takes BuildKit's own form, an index.
            "cache-to": [
                f"type=registry,ref={location.name}:{entry.tag},mode=min,image-manifest=true,oci-mediatypes=true"
            ],
        }
        for entry, target in owners.items()
        if (target.id, entry.stage) in executed or place.digest(entry.tag) is None
    }
    if chosen:
        progress.note(f"writing {len(chosen)} of {len(owners)} caches to {location.name}")
        content["target"] |= chosen  # beside targets that are not built, and those that hold what was fetched
        content["group"]["default"]["targets"] = sorted(chosen)
        buildx.execute_bake(run, content, progress, "bake-caches.json")


def job_matrix(
    builds: Sequence[tuple[str, Platform]], most: int, runners: Mapping[Platform, Sequence[str]]
) -> dict[str, list[dict[str, Any]]]:
    """Return the `matrix` of a workflow: `most` jobs or fewer, each of neighbours for one platform."""
    parts: dict[Platform, list[str]] = {}
    for target, platform in builds:
        parts.setdefault(platform, []).append(target)
    if len(parts) > most:
        raise ConfigError(f"--github-jobs {most}: a job is for one platform, and there are {len(parts)} platforms")
    if missing := parts.keys() - runners.keys():
        raise ConfigError(f"github-runners: no runner for {min(missing)}; add its label in the matrix")
    size = next(size for size in count(1) if sum(ceil(len(part) / size) for part in parts.values()) <= most)
    jobs: list[dict[str, Any]] = []
    for platform, targets in parts.items():
        arch = platform.removeprefix("linux/")
        for start in range(0, len(targets), size):
            first, *more = group = targets[start : start + size]
            jobs.append(
                {
                    "name": f"{first} and {len(more)} more {arch}" if more else f"{first} {arch}",
                    "id": f"group{len(jobs) + 1:03}-{arch}" if more else f"{first}-{arch}",
                    "targets": " ".join(group),
                    "platform": platform,
                    "runner": list(runners[platform]),
                }
            )
    return {"include": jobs}


def print_workflow_jobs(state: ProjectState, folder: Path, since: str | None, most: int) -> None:
    """Print the matrix of a workflow as one line of JSON; with an earlier state, only of targets that differ from it.

    Raises ConfigError for an unknown revision, or if no target is for one of the platforms.
    """
    if not any(bake.platforms_of(target, state.platforms) for target in state.targets):
        raise ConfigError(f"--platform {' '.join(state.platforms)}: no selected target is for it; leave it out")
    targets = state.targets
    if since is not None:
        targets = changed_since(since, folder, state)
        err.print(f"{len(targets)} of {len(state.targets)} targets differ from {since}", markup=False)
    # Publishing needs all platforms of a target that differs on one of them.
    builds = [(t.id, platform) for t in targets for platform in bake.platforms_of(t, state.platforms)]
    matrix = job_matrix(builds, most, state.renderer.project.matrix.model.github_runners)
    if len(matrix["include"]) < len(builds):
        err.print(f"{len(builds)} builds in {len(matrix['include'])} jobs", markup=False)
    out.print(json.dumps(matrix), markup=False)


def changed_since(reference: str, folder: Path, after: ProjectState) -> list[Target]:
    """Return the targets that differ from another state; all if that is `nothing`, or this version cannot read it.

    A target differs if what its image depends on does, or if it has a platform or a tag that it had not. This version
    of imagebuild renders both states. Raises ConfigError for what is neither a revision nor a folder.
    """
    if reference == NOTHING:
        return list(after.targets)
    with files_at_revision(reference, folder) as there:
        try:
            before = read_state(there, Changes(), ())
            known = {target.id: (target, before.renderer.key(target)) for target in before.targets}
        except ConfigError as error:
            # What was right then may be a mistake for this version; CI must not stop at it.
            err.print(f"{reference} cannot be read, so everything counts as changed: {error}", markup=False)
            return list(after.targets)

    def differs(target: Target) -> bool:
        if target.id not in known:
            return True
        old, key = known[target.id]
        more_platforms = {*bake.platforms_of(target, after.platforms)} - {*old.platforms}
        more_tags = {*target.tags, *target.aliases} - {*old.tags, *old.aliases}
        return bool(more_platforms or more_tags) or key != after.renderer.key(target)

    return [target for target in after.targets if differs(target)]
