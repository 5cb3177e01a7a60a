"""Say what a change of the project makes BuildKit execute again, and which targets CI has to build."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from math import ceil
from pathlib import Path
from typing import Any

from imagebuild import oci
from imagebuild.build import bake, buildx
from imagebuild.build.bake import CacheEntry
from imagebuild.build.buildx import BuildProgress, component_of
from imagebuild.core import console
from imagebuild.core.console import err, out
from imagebuild.core.errors import ConfigError
from imagebuild.core.fields import Model, Platform
from imagebuild.oci.reference import parse_reference
from imagebuild.project import load, plan
from imagebuild.project.lockfile import digest_of
from imagebuild.project.matrix import Target
from imagebuild.project.plan import Changes
from imagebuild.project.records import BuildResult
from imagebuild.project.revision import files_at_revision
from imagebuild.render.renderer import Renderer
from imagebuild.render.stages import Stage, needed_stages, stages_of

NOTHING = "nothing"
"""Argument of --from for an empty cache."""
WORKING_TREE = "the working tree"


@dataclass(frozen=True)
class ProjectState:
    """Hold what one state of a project says about builds."""

    renderer: Renderer
    targets: Sequence[Target]
    platforms: Sequence[str] = ()
    """Empty: the platforms of each target."""
    base: str = "bootstrap"

    @cached_property
    def bases(self) -> dict[str, str]:
        """Return official image → what is bootstrapped instead, which depends on the release only."""
        project = self.renderer.project
        bases = project.matrix.model.bases.values() if self.base == "bootstrap" else ()
        return {digest_of(project.lock, b.image): f"bootstrapped {b.release}" for b in bases if b.release}

    def builds(self) -> Iterator[tuple[Target, Platform, dict[str, Stage]]]:
        """Yield each target for each of its platforms, with the stages that BuildKit executes, the image's last."""
        for target in self.targets:
            text = self.renderer.dockerfile(target).text
            for platform in bake.platforms_of(target, self.platforms):
                yield target, platform, needed_stages(stages_of(text, platform, self.bases))


def read_state(
    folder: Path, changes: Changes, select: Sequence[str], platforms: Sequence[str] = (), base: str = "bootstrap"
) -> ProjectState:
    """Read a project and select targets; of sources without a pin, the hashes need not be known.

    Raises ConfigError with every mistake in the files, NothingSelected if no target is selected.
    """
    project = load.load_project(folder).changed(changes)
    targets = plan.select_targets(plan.make_plan(project), select)
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
    """Return what building `after` executes if all of `before` was built, or if nothing was built.

    `names` has the names of the two states.
    """
    built = (stage for _, _, stages in before.builds() for stage in stages.values()) if before else ()
    known = {key for stage in built for _, key in stage.steps}
    everything: set[str] = set()
    runs: dict[str, set[str]] = {}
    users: dict[str, dict[str, None]] = {}
    for target, _, stages in after.builds():
        for name, stage in stages.items():
            everything |= {key for word, key in stage.steps if word == "RUN"}
            if not all(key in known for _, key in stage.steps):
                users.setdefault(name, {})[target.id] = None
                runs.setdefault(name, set()).update(key for word, key in stage.steps if word == "RUN")
    executed = [
        CostStage(
            stage=name,
            component=component_of(name, after.renderer.project.components),
            run=len(runs[name] - known),
            targets=tuple(targets),
        )
        for name, targets in users.items()
    ]
    return Cost(
        before=names[0],
        after=names[1],
        run=len(everything - known),
        run_of=len(everything),
        stages=tuple(sorted(executed, key=lambda stage: stage.component is None)),
    )


def predict_cost(
    folder: Path,
    before: str | None,
    after: str | None = None,
    *,
    changes: Changes,
    select: Sequence[str] = (),
    platforms: Sequence[str] = (),
    base: str = "bootstrap",
) -> Cost:
    """Return what building the selected targets of the later state executes if all targets of the earlier were built.

    A state is a git revision or a folder; `before` may be `nothing`, and without `after` that is the working tree, with
    `changes`. Raises ConfigError for options that make no sense, and for a state that cannot be read.
    """
    with ExitStack() as files:

        def state(reference: str | None, changes: Changes, select: Sequence[str]) -> ProjectState:
            there = files_at_revision(reference, folder) if reference else nullcontext(folder)
            return read_state(files.enter_context(there), changes, select, platforms, base)

        built = None if before == NOTHING else state(before, Changes(), ())
        wanted = state(after, changes, select)
        bake.check_platforms(wanted.targets, platforms)
        return compare_states(built, wanted, (before or "", " ".join([after or WORKING_TREE, *changes.options])))


def show_cost(cost: Cost, *, markdown: bool = False) -> None:
    """Print the stages that are executed again, for which targets; in Markdown, as a summary for GitHub Actions."""
    stage_rows = [(s.stage, s.component or "", str(s.run), str(len(s.targets))) for s in cost.stages]
    targets: dict[str, list[str]] = {}
    for stage in cost.stages:
        for target in stage.targets:
            targets.setdefault(target, []).append(stage.stage)
    tables = (
        (("stage", "component", "RUN steps", "targets"), stage_rows),
        (("target", "stages executed"), [(target, ", ".join(stages)) for target, stages in targets.items()]),
    )
    change = f"from {cost.before} to {cost.after}"
    summary = f"{cost.run} of {cost.run_of} RUN steps are executed; one that targets or platforms share counts once"
    if markdown:
        texts = [f"**{change}**: {summary}", *(console.markdown_table(*table) for table in tables if table[1])]
        out.print("\n\n".join(texts), markup=False)
        return
    for columns, rows in tables:
        if rows:
            console.print_table(columns, rows)
            out.print()
    out.print(f"{change}: {summary}", markup=False)


def cache_entries(state: ProjectState) -> dict[str, list[CacheEntry]]:
    """Return target → the caches of the compiling stages that it needs, on all of its platforms."""
    components = state.renderer.project.components
    compiling = {name for name, component in components.items() if component.model.compiles}
    entries: dict[str, list[CacheEntry]] = {target.id: [] for target in state.targets}
    for target, platform, stages in state.builds():
        found = (CacheEntry(name, platform, stage.key) for name, stage in stages.items() if name in compiling)
        entries[target.id] += found
    return entries


def write_caches(run: bake.BuildRun, built: Sequence[BuildResult], progress: BuildProgress) -> None:
    """Write the caches of what was compiled just now, and of what has none in the registry yet.

    What this builds is in the builder's own cache. Raises CommandError if that fails; images that were exported before
    stay so.
    """
    location = parse_reference(run.request.cache or "")
    place = oci.connect_registry(location.host).at(location.repository)
    executed = {(result.target, step.stage) for result in built for step in result.steps if not step.cached}
    owners = {entry: target for target in run.request.targets for entry in run.caches[target.id]}
    given = bake.bake_file(run)["target"]
    # A manifest like that of images: not every registry takes BuildKit's own form, an index.
    form = "mode=min,image-manifest=true,oci-mediatypes=true"
    chosen: dict[str, Any] = {
        entry.tag: {
            **given[target.bake_name],
            "target": entry.stage,
            "platforms": [entry.platform],
            "tags": [],
            "output": ["type=cacheonly"],
            "cache-to": [f"type=registry,ref={location.name}:{entry.tag},{form}"],
        }
        for entry, target in owners.items()
        if (target.id, entry.stage) in executed or place.digest(entry.tag) is None
    }
    if not chosen:
        return
    progress.note(f"writing {len(chosen)} of {len(owners)} caches to {location.name}")
    fetched = {name: entry for name, entry in given.items() if name.startswith(bake.FETCHED)}
    content = {"group": {"default": {"targets": sorted(chosen)}}, "target": {**chosen, **fetched}}
    buildx.execute_bake(run, content, progress, "bake-caches.json")


Build = tuple[str, Platform]
"""The build of a target for one platform."""


def group_builds(builds: Sequence[Build], jobs: int) -> list[Sequence[Build]]:
    """Divide builds into at most `jobs` groups of neighbours, each for one platform.

    Raises ConfigError if there are more platforms than jobs.
    """
    if len(builds) <= jobs:
        return [[build] for build in builds]
    platforms = dict.fromkeys(platform for _, platform in builds)
    if len(platforms) > jobs:
        raise ConfigError(f"--github-jobs {jobs}: a job is for one platform, and there are {len(platforms)} platforms")
    parts = [[build for build in builds if build[1] == platform] for platform in platforms]
    size = next(size for size in count(1) if sum(ceil(len(part) / size) for part in parts) <= jobs)
    return [part[start : start + size] for part in parts for start in range(0, len(part), size)]


def job_matrix(
    groups: Sequence[Sequence[Build]], runners: Mapping[Platform, Sequence[str]]
) -> dict[str, list[dict[str, Any]]]:
    """Return the `matrix` of a job. Raises ConfigError for a platform without a runner."""
    entries = []
    for number, group in enumerate(groups, 1):
        first, platform = group[0]
        if platform not in runners:
            raise ConfigError(f"github-runners: no runner for {platform}; add its label in the matrix")
        arch, more = platform.removeprefix("linux/"), len(group) - 1
        labels = list(runners[platform])
        entries.append(
            {
                "name": f"{first} and {more} more {arch}" if more else f"{first} {arch}",
                "id": f"group{number:03}-{arch}" if more else f"{first}-{arch}",
                "targets": " ".join(target for target, _ in group),
                "platform": platform,
                "runner": labels[0] if len(labels) == 1 else labels,
            }
        )
    return {"include": entries}


def print_workflow_jobs(state: ProjectState, folder: Path, since: str | None, jobs: int) -> None:
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
    groups = group_builds(builds, jobs)
    if len(groups) < len(builds):
        err.print(f"{len(builds)} builds in {len(groups)} jobs of at most {max(map(len, groups))}", markup=False)
    out.print(json.dumps(job_matrix(groups, state.renderer.project.matrix.model.github_runners)), markup=False)


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
        old, key = known.get(target.id, (None, ""))
        if old is None or set(bake.platforms_of(target, after.platforms)) - set(old.platforms):
            return True
        more = {*target.tags, *target.aliases} - {*old.tags, *old.aliases}
        return bool(more) or key != after.renderer.key(target)

    return [target for target in after.targets if differs(target)]
