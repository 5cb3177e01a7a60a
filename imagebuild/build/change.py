"""Say what a change of the project makes BuildKit execute again, and which targets CI has to build."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from math import ceil
from typing import Any, Literal, get_args

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
from imagebuild.project.load import ProjectPaths
from imagebuild.project.lockfile import digest_of
from imagebuild.project.matrix import Target
from imagebuild.project.plan import Changes, Project
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

    project: Project
    targets: Sequence[Target]
    texts: Mapping[str, str]
    """Target → Dockerfile."""
    platforms: Sequence[str] = ()
    """Empty: the platforms of each target."""
    base: str = "bootstrap"
    checks: Mapping[str, object] = field(default_factory=dict)
    """Target → all that decides the result of its verification."""

    @cached_property
    def bases(self) -> dict[str, str]:
        """Return official image → what is bootstrapped instead, which depends on the release only."""
        bases = self.project.matrix.model.bases.values() if self.base == "bootstrap" else ()
        return {digest_of(self.project.lock, b.image): f"bootstrapped {b.release}" for b in bases if b.release}

    def platforms_of(self, target: Target) -> tuple[Platform, ...]:
        """Return the platforms that a target is built for, of those that were chosen."""
        return tuple(p for p in target.platforms if not self.platforms or p in self.platforms)

    def stages(self, target: Target, platform: str) -> dict[str, Stage]:
        """Return name → stage, of all stages that BuildKit executes for a target; the last one is the image."""
        return needed_stages(stages_of(self.texts[target.id], platform, self.bases))


def read_state(
    paths: ProjectPaths, changes: Changes, select: Sequence[str], platforms: Sequence[str] = (), base: str = "bootstrap"
) -> ProjectState:
    """Read a project and render targets; sources that the lock lacks are unresolved, as their hashes need not be known.

    Raises ConfigError with every mistake in the files, NothingSelected if no target is selected.
    """
    project = load.load_project(paths.matrix, paths.dockerfiles, paths.lock)
    versions = plan.versions_with(project, changes)
    targets = plan.select_targets(plan.make_plan(project, changes), select)
    renderer = Renderer(project, versions).with_unresolved(targets)
    texts = {target.id: renderer.dockerfile(target).text for target in targets}
    return ProjectState(renderer.project, targets, texts, platforms, base, _checks_of_targets(project, targets))


def _checks_of_targets(project: Project, targets: Iterable[Target]) -> dict[str, object]:
    of_components: dict[str, object] = {}
    for name, document in project.components.items():
        scripts = [(check, load.script_of(project, name, check)) for check in document.model.checks]
        of_components[name] = scripts, document.model.waivers, document.model.gpu_code
    images = {name: (i.waivers, i.size_limit_mb) for name, i in project.matrix.model.images.items()}
    return {
        target.id: ([of_components[name] for name in target.components], images[target.image]) for target in targets
    }


class CostStep(Model):
    """Describe a step that will be executed."""

    component: str | None
    """Component whose stage it is in; None for the final stage."""
    stage: str
    number: int
    """Number among the steps of its stage, from 1."""
    command: str
    """`RUN`, `COPY`, `ADD` or `WORKDIR`."""
    platforms: tuple[str, ...]
    """Platforms of the images that it is for."""
    targets: tuple[str, ...]
    """Targets that need it."""
    key: str
    """Steps with equal keys are one step."""


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
    targets: dict[str, tuple[str, ...]]
    """Selected target → stages with a step that will be executed."""
    steps: tuple[CostStep, ...]
    """Every step that will be executed."""


def steps_of(state: ProjectState) -> dict[str, CostStep]:
    """Return key → step, for all targets and platforms of a state."""
    components = frozenset(state.project.components)
    places: dict[str, tuple[str, int, str]] = {}
    users: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for target in state.targets:
        for platform in state.platforms_of(target):
            for name, stage in state.stages(target, platform).items():
                for number, (command, key) in enumerate(stage.steps, 1):
                    places.setdefault(key, (name, number, command))
                    targets, platforms = users.setdefault(key, ({}, {}))
                    targets[target.id] = platforms[platform] = None
    return {
        key: CostStep(
            component=component_of(name, components),
            stage=name,
            number=number,
            command=command,
            targets=tuple(users[key][0]),
            platforms=tuple(users[key][1]),
            key=key,
        )
        for key, (name, number, command) in places.items()
    }


def compare_states(before: ProjectState | None, after: ProjectState, names: tuple[str, str]) -> Cost:
    """Return what building `after` executes if all of `before` was built, or if nothing was built.

    `names` has the names of the two states.
    """
    known = steps_of(before) if before else {}
    steps = steps_of(after)
    executed = [step for step in steps.values() if step.key not in known]
    executed.sort(key=lambda step: step.component is None)
    stages: dict[str, dict[str, None]] = {target.id: {} for target in after.targets}
    for step in executed:
        for target in step.targets:
            stages[target][step.stage] = None
    return Cost(
        before=names[0],
        after=names[1],
        run=sum(step.command == "RUN" for step in executed),
        run_of=sum(step.command == "RUN" for step in steps.values()),
        targets={target: tuple(names) for target, names in stages.items()},
        steps=tuple(executed),
    )


@dataclass(frozen=True)
class ChangeRequest:
    """Hold what the command line asks for: two states of the project."""

    before: str | None
    """A git revision, a folder, or `nothing`; None: there is nothing to compare with."""
    paths: ProjectPaths
    changes: Changes = field(default_factory=Changes)
    """Of the later state."""
    after: str | None = None
    """A git revision or a folder; None: the working tree."""
    select: Sequence[str] = ()
    platforms: Sequence[str] = ()
    base: str = "bootstrap"


def predict_cost(request: ChangeRequest) -> Cost:
    """Return what building the selected targets of the later state executes if all targets of the earlier were built.

    Raises ConfigError for options that make no sense, and for a state that cannot be read.
    """
    if request.after == NOTHING:
        raise ConfigError("--to nothing: only --from can be nothing")

    def state(reference: str | None, changes: Changes, select: Sequence[str]) -> ProjectState:
        with files_at_revision(reference, request.paths) if reference else nullcontext(request.paths) as paths:
            return read_state(paths, changes, select, request.platforms, request.base)

    before = None if request.before == NOTHING else state(request.before, Changes(), ())
    after = state(request.after, request.changes, request.select)
    for target in after.targets:
        bake.platforms_of(target, request.platforms)
    name = " ".join([request.after or WORKING_TREE, *request.changes.options])
    return compare_states(before, after, (request.before or "", name))


def show_cost(cost: Cost, *, markdown: bool = False) -> None:
    """Print the stages that are executed again, for which targets; in Markdown, as a summary for GitHub Actions."""
    counts = Counter((step.stage, step.command == "RUN") for step in cost.steps)
    components = {step.stage: step.component or "" for step in cost.steps}
    users = Counter(stage for stages in cost.targets.values() for stage in stages)
    stage_rows = [
        (stage, component, str(counts[stage, True]), str(counts[stage, False]), str(users[stage]))
        for stage, component in components.items()
    ]
    target_rows = [(target, ", ".join(stages) or "none") for target, stages in cost.targets.items()]
    tables = (
        (("stage", "component", "RUN steps", "other steps", "targets"), stage_rows),
        (("target", "stages executed"), target_rows),
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


def cache_entries(state: ProjectState, target: Target, platform: Platform) -> list[CacheEntry]:
    """Return the caches of the compiling stages that a target needs for a platform."""
    compiling = {name for name, component in state.project.components.items() if component.model.compiles}
    stages = state.stages(target, platform)
    return [CacheEntry(name, platform, stage.key) for name, stage in stages.items() if name in compiling]


def cache_bake_file(content: Mapping[str, Any], repository: str, owners: Mapping[CacheEntry, Target]) -> dict[str, Any]:
    """Return a bake file that writes caches, from the `content` of the one that built the targets.

    All that it builds is in the builder's own cache already.
    """
    targets = {
        entry.tag: {
            **content["target"][target.bake_name],
            "target": entry.stage,
            "platforms": [entry.platform],
            "tags": [],
            "output": ["type=cacheonly"],
            # A manifest like that of images: not every registry takes BuildKit's own form, an index.
            "cache-to": [
                f"type=registry,ref={repository}:{entry.tag},mode=min,image-manifest=true,oci-mediatypes=true"
            ],
        }
        for entry, target in owners.items()
    }
    return {"group": {"default": {"targets": sorted(targets)}}, "target": targets}


def write_caches(run: bake.BuildRun, built: Sequence[BuildResult], progress: BuildProgress) -> None:
    """Write the caches of what was compiled just now, and of what has none in the registry yet.

    Raises CommandError if that fails; images that were exported before stay so.
    """
    location = parse_reference(run.request.cache or "")
    place = oci.connect_registry(location.host).at(location.repository)
    executed = {(result.target, step.stage) for result in built for step in result.steps if not step.cached}
    owners = {entry: target for target in run.request.targets for entry in run.caches[target.id]}
    compiled = {e for target, entries in run.caches.items() for e in entries if (target, e.stage) in executed}
    chosen = {entry: target for entry, target in owners.items() if entry in compiled or place.digest(entry.tag) is None}
    if not chosen:
        return
    progress.note(f"writing {len(chosen)} of {len(owners)} caches to {location.name}")
    content = cache_bake_file(bake.bake_file(run), location.name, chosen)
    buildx.execute_bake(run, content, progress, "bake-caches.json")


Reason = Literal["new", "image", "date", "checks", "tags"]
"""How a target differs: it is new; its image differs; the lock's date does, which is the latest time of files; its
checks do; or it has a tag that it did not have."""


def changed_targets(before: ProjectState, after: ProjectState) -> dict[str, Reason]:
    """Return the targets of `after` that differ in `before` on at least one of their platforms, each with a reason.

    This version of imagebuild renders both: changes of its own code are not seen.
    """
    known = {target.id: target for target in before.targets}
    reasons: dict[str, Reason] = {}
    for new in after.targets:
        old = known.get(new.id)
        if not old or not set(after.platforms_of(new)) <= set(old.platforms):
            reasons[new.id] = "new"
        elif _images_differ(before, old, after, new):
            reasons[new.id] = "image"
        elif before.project.lock.date != after.project.lock.date:
            reasons[new.id] = "date"
        elif before.checks[old.id] != after.checks[new.id]:
            reasons[new.id] = "checks"
        elif {*new.tags, *new.aliases} - {*old.tags, *old.aliases}:
            reasons[new.id] = "tags"
    return reasons


def _images_differ(before: ProjectState, old: Target, after: ProjectState, new: Target) -> bool:
    if before.texts[old.id] == after.texts[new.id] and before.bases == after.bases:  # faster than keys
        return False
    states = ((before, old), (after, new))
    images = ([[*s.stages(target, p).values()][-1].key for p in after.platforms_of(new)] for s, target in states)
    return next(images) != next(images)


Build = tuple[str, Platform]
"""The build of a target for one platform."""


def group_builds(
    builds: Sequence[Build], jobs: int, compiled: Callable[[Build], Iterable[str]]
) -> list[Sequence[Build]]:
    """Divide builds into at most `jobs` groups, each for one platform, as even as possible.

    Builds that compile the same are neighbours, so that few runners compile it. `compiled` returns the keys of what a
    build compiles; it is called only if there are more builds than jobs. Raises ConfigError if there are more
    platforms than jobs.
    """
    if len(builds) <= jobs:
        return [[build] for build in builds]
    numbers = Counter(platform for _, platform in builds)
    if len(numbers) > jobs:
        raise ConfigError(f"--github-jobs {jobs}: a job is for one platform, and there are {len(numbers)} platforms")
    keys = {build: tuple(compiled(build)) for build in builds}
    shared = Counter(key for of_build in keys.values() for key in of_build)
    # Keys that most builds share come first, so that sorting makes a tree of them.
    order = {build: sorted(of_build, key=lambda key: (-shared[key], key)) for build, of_build in keys.items()}
    size = next(size for size in count(1) if sum(ceil(n / size) for n in numbers.values()) <= jobs)
    groups: list[Sequence[Build]] = []
    for platform, number in numbers.items():
        ordered = sorted((build for build in builds if build[1] == platform), key=order.__getitem__)
        parts = ceil(number / size)
        groups += [ordered[i * number // parts : (i + 1) * number // parts] for i in range(parts)]
    return groups


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


def print_workflow_jobs(request: ChangeRequest, jobs: int) -> None:
    """Print the matrix of a workflow as one line of JSON; with an earlier state, only of targets that differ from it.

    Raises ConfigError for an unknown revision, or if no target is for one of the platforms.
    """
    state = read_state(request.paths, request.changes, request.select, request.platforms)
    targets = list(state.targets)
    if not any(state.platforms_of(target) for target in targets):
        raise ConfigError(f"--platform {' '.join(request.platforms)}: no selected target is for it")
    if request.before is not None:
        reasons = changed_since(request.before, request.paths, state)
        counts = Counter(reasons.values())
        text = ", ".join(f"{counts[reason]} {reason}" for reason in get_args(Reason) if counts[reason])
        summary = f"{len(reasons)} of {len(targets)} targets differ from {request.before}"
        err.print(f"{summary}: {text}" if text else summary, markup=False)
        targets = [target for target in targets if target.id in reasons]
    # Publishing needs all platforms of a target that differs on one of them.
    builds = [(target.id, platform) for target in targets for platform in state.platforms_of(target)]

    by_id = {target.id: target for target in targets}
    groups = group_builds(builds, jobs, lambda b: [entry.key for entry in cache_entries(state, by_id[b[0]], b[1])])
    if len(groups) < len(builds):
        err.print(f"{len(builds)} builds in {len(groups)} jobs of at most {max(map(len, groups))}", markup=False)
    out.print(json.dumps(job_matrix(groups, state.project.matrix.model.github_runners)), markup=False)


def changed_since(reference: str, paths: ProjectPaths, after: ProjectState) -> dict[str, Reason]:
    """Return the targets that differ from another state; all if that is `nothing`, or this version cannot read it.

    Raises ConfigError for what is neither a revision nor a folder.
    """
    everything: dict[str, Reason] = {target.id: "new" for target in after.targets}
    if reference == NOTHING:
        return everything
    with files_at_revision(reference, paths) as files:
        try:
            return changed_targets(read_state(files, Changes(), ()), after)
        except ConfigError as error:
            # What was right then may be a mistake for this version; CI must not stop at it.
            err.print(f"{reference} cannot be read, so everything counts as changed: {error}", markup=False)
            return everything
