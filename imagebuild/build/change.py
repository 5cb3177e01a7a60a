"""Say what a change of the project makes BuildKit execute again, and which targets CI has to build."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any, Literal, Protocol, get_args

from pydantic import ValidationError

from imagebuild.build import bake, buildx
from imagebuild.build.buildx import STEP_NAME, BuildOrigin, component_of
from imagebuild.core import console
from imagebuild.core.console import err, format_duration, markdown_table, out
from imagebuild.core.errors import ConfigError
from imagebuild.core.fields import Model, Platform
from imagebuild.core.files import read_text
from imagebuild.core.run import native_platform
from imagebuild.oci.reference import parse_reference
from imagebuild.project import load, plan
from imagebuild.project.component import checks_of
from imagebuild.project.load import Project
from imagebuild.project.lockfile import digest_of, with_unresolved
from imagebuild.project.matrix import Plan, Target
from imagebuild.project.plan import Pins
from imagebuild.project.records import BuildResult
from imagebuild.project.revision import ProjectPaths, files_at_revision
from imagebuild.render import stages
from imagebuild.render.renderer import Renderer
from imagebuild.render.stages import CacheStep

StepPlace = tuple[str, int, int, str, str]
"""Stage, number of the step, number of steps of the stage, command, platform of the image."""


@dataclass(frozen=True)
class PastTimes:
    """Hold the seconds that steps took when they were executed.

    A step is recognised by its place: it is step n of m of the same stage, with the same command, for the same
    platform. What it runs, such as a version, may have changed.
    """

    times: dict[StepPlace, list[float]] = field(default_factory=dict)

    def seconds(self, step: CacheStep, platforms: Iterable[str]) -> float | None:
        """Return the median of the past times of a step that is for these platforms, or None without any."""
        places = [(step.stage, step.number, step.total, step.word, platform) for platform in platforms]
        times = [seconds for place in places for seconds in self.times.get(place, ())]
        return round(median(times), 3) if times else None


def load_past_times(folder: Path) -> PastTimes:
    """Read each `<target>/result.json` in a folder of builds. Raises ConfigError for one that cannot be read."""
    return past_times_of(load_result(path) for path in sorted(folder.glob("*/result.json")))


def load_result(path: Path) -> BuildResult:
    """Read the result of a build. Raises ConfigError if the file is not one."""
    try:
        return BuildResult.model_validate_json(read_text(path))
    except ValidationError as error:
        raise ConfigError(f"{path}: is not a result of a build; remove it: {error.errors()[0]['msg']}") from None


def past_times_of(results: Iterable[BuildResult]) -> PastTimes:
    """Return the times of steps that were executed; a step that several results report counts once."""
    events: dict[tuple[StepPlace, str, float], None] = {}
    for result in results:
        # A base image from a registry is step 1 of the stages that start from it.
        shifted = {step.stage for step in result.steps if re.match(r"\[[^]]*\] FROM ", step.name)}
        for step in result.steps:
            parts = STEP_NAME.match(step.name)
            if not parts or step.cached or step.error:
                continue
            number, total = map(int, parts["n"].split("/"))
            command = parts["text"].partition(" ")[0]
            platforms: tuple[str, ...] = result.platforms  # builds for one platform do not show it
            if parts["platform"]:  # `linux/amd64->arm64` is a step on amd64 for arm64
                runs_on, arrow, arch = parts["platform"].partition("->")
                platforms = (f"linux/{arch}" if arrow else runs_on,)
            for platform in platforms:
                place = (step.stage, number - (step.stage in shifted), total, command, platform)
                events[place, step.name, step.seconds] = None
    times: dict[StepPlace, list[float]] = {}
    for place, _, seconds in events:
        times.setdefault(place, []).append(seconds)
    return PastTimes(times)


class CostStep(Model):
    """Describe a step that will be executed."""

    component: str | None
    """Component whose stage it is in; None for the final stage."""
    stage: str
    number: int
    """Number among the steps of its stage, from 1."""
    command: str
    """`RUN`, `COPY`, `ADD` or `WORKDIR`."""
    title: str
    """The start of the instruction."""
    compiles: bool
    """Does it compile upstream source?"""
    runs_on: str | None
    """Platform of the programs that it runs, emulated unless it is the build machine's; None if it runs none."""
    platforms: tuple[str, ...]
    """Platforms of the images that it is for."""
    targets: tuple[str, ...]
    """Targets that need it."""
    seconds: float | None
    """Median of what it took in past builds; None if it was in none."""
    key: str
    """Steps with equal keys are one step."""


class Count(Model):
    """Count what will be executed; each step counts once."""

    run: int
    """`RUN` steps that will be executed."""
    run_of: int
    """All `RUN` steps."""
    compile: int
    """Those of `run` that compile upstream source."""
    other: int
    """`COPY`, `ADD` and `WORKDIR` steps that will be executed."""
    seconds: float
    """Sum of the past times of steps that have one, as if they ran one after the other."""
    untimed: int
    """Steps that will be executed and have no past time; they do not count in `seconds`."""


class CostPart(Count):
    """Count what will be executed of a component (or of a stage that belongs to none), or of a target."""

    name: str
    targets: int
    """Targets that need a step of it; 1 for a target."""


class Cost(Model):
    """Describe what a change makes BuildKit execute, as `imagebuild plan --from … --json` prints it."""

    before: str
    """The state that was built, as --from names it."""
    after: str
    """The state to build: --to, or the working tree."""
    total: Count
    components: tuple[CostPart, ...]
    """Components with a step that will be executed; the final stage comes last."""
    targets: tuple[CostPart, ...]
    """All selected targets."""
    steps: tuple[CostStep, ...]
    """Every step that will be executed."""


@dataclass(frozen=True)
class ProjectState:
    """Hold one state of a project, and what is built of it."""

    project: Project
    renderer: Renderer
    targets: Sequence[Target]
    platforms: tuple[str, ...] = ()
    """Empty: the platforms of each target."""
    build_platform: str = "linux/amd64"
    base: str = "bootstrap"

    def settings(self, target: Target) -> list[stages.Setting]:
        """Return a setting for each platform of a target that is built."""
        # What is bootstrapped depends on the release, whichever official image it replaces.
        bases = self.project.matrix.model.bases.values() if self.base == "bootstrap" else ()
        replaced = {digest_of(self.project.lock, b.image): f"bootstrapped {b.release}" for b in bases if b.release}
        ignores = {name: component.model.link_ignores for name, component in self.project.components.items()}
        names = [p for p in target.platforms if not self.platforms or p in self.platforms]
        return [stages.Setting(p, self.build_platform, replaced, ignores) for p in names]


@dataclass
class _Use:
    """Hold a step, and which targets and platforms need it."""

    step: stages.CacheStep
    component: str | None
    compiles: bool
    targets: dict[str, None] = field(default_factory=dict)
    platforms: dict[str, None] = field(default_factory=dict)


def compare_states(
    before: ProjectState | None, after: ProjectState, names: tuple[str, str], past: PastTimes | None = None
) -> Cost:
    """Return what building `after` executes if all of `before` was built, or if nothing was built.

    `names` has the names of the two states. Raises ConfigError if a template is wrong or the lock lacks a source.
    """
    known = _uses(before) if before else {}
    uses = _uses(after)
    past = past or PastTimes()
    executed = {
        key: CostStep(
            component=use.component,
            stage=use.step.stage,
            number=use.step.number,
            command=use.step.word,
            title=use.step.title,
            compiles=use.compiles,
            runs_on=use.step.runs_on if use.step.word == "RUN" else None,
            platforms=tuple(use.platforms),
            targets=tuple(use.targets),
            seconds=past.seconds(use.step, use.platforms),
            key=key,
        )
        for key, use in uses.items()
        if key not in known
    }
    of_component: dict[str, list[_Use]] = {}
    of_target: dict[str, list[_Use]] = {target.id: [] for target in after.targets}
    for use in uses.values():
        of_component.setdefault(use.component or use.step.stage, []).append(use)
        for target in use.targets:
            of_target[target].append(use)
    parts = [_part(name, used, executed) for name, used in of_component.items()]
    parts.sort(key=lambda part: part.name not in after.project.components)
    return Cost(
        before=names[0],
        after=names[1],
        total=_count(uses.values(), executed),
        components=tuple(part for part in parts if part.run or part.other),
        targets=tuple(
            _part(name, used, executed).model_copy(update={"targets": 1}) for name, used in of_target.items()
        ),
        steps=tuple(executed.values()),
    )


def _uses(state: ProjectState) -> dict[str, _Use]:
    """Return key → step, for all targets and platforms of a state."""
    components = state.project.components
    uses: dict[str, _Use] = {}
    for target in state.targets:
        text = state.renderer.dockerfile(target).text
        for setting in state.settings(target):
            for step in stages.steps_of(text, setting):
                owner = component_of(step.stage, frozenset(components))
                use = uses.setdefault(step.key, _Use(step, owner, compiles(step, state.project)))
                use.targets[target.id] = None
                use.platforms[setting.platform] = None
    return uses


def compiles(step: stages.CacheStep, project: Project) -> bool:
    """Return whether a step compiles upstream source, which takes long."""
    component = project.components.get(step.stage)
    return step.last_run and component is not None and component.model.compiles


def _count(uses: Iterable[_Use], executed: Mapping[str, CostStep]) -> Count:
    uses = tuple(uses)
    steps = [executed[use.step.key] for use in uses if use.step.key in executed]
    return Count(
        run=sum(step.command == "RUN" for step in steps),
        run_of=sum(use.step.word == "RUN" for use in uses),
        compile=sum(step.compiles for step in steps),
        other=sum(step.command != "RUN" for step in steps),
        seconds=round(sum(step.seconds or 0 for step in steps), 3),
        untimed=sum(step.seconds is None for step in steps),
    )


def _part(name: str, uses: Sequence[_Use], executed: Mapping[str, CostStep]) -> CostPart:
    targets = {target for use in uses if use.step.key in executed for target in use.targets}
    return CostPart(name=name, targets=len(targets), **_count(uses, executed).model_dump())


@dataclass(frozen=True)
class CacheEntry:
    """Name what a compiling stage makes for one platform."""

    stage: str
    platform: Platform
    key: str

    @property
    def tag(self) -> str:
        """Return the tag of its cache, such as `ucx-amd64-0123456789abcdef`."""
        return f"{self.stage}-{self.platform.removeprefix('linux/')}-{self.key}"


CacheEntries = Mapping[str, tuple[CacheEntry, ...]]
"""Target → what it needs compiled."""


def cache_entries(state: ProjectState) -> dict[str, tuple[CacheEntry, ...]]:
    """Return all that each target of a state needs compiled."""
    compiling = {name for name, component in state.project.components.items() if component.model.compiles}
    entries: dict[str, list[CacheEntry]] = {target.id: [] for target in state.targets}
    for target in state.targets:
        text = state.renderer.dockerfile(target).text
        for setting in state.settings(target):
            keys = stages.stage_keys(text, [setting])
            needed = dict.fromkeys(step.stage for step in stages.steps_of(text, setting))
            platform = next(p for p in target.platforms if p == setting.platform)
            entries[target.id] += [CacheEntry(stage, platform, keys[stage]) for stage in needed if stage in compiling]
    return {target: tuple(of_target) for target, of_target in entries.items()}


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


def write_caches(
    request: buildx.BakeRequest,
    repository: str,
    wanted: CacheEntries,
    built: Sequence[BuildResult],
    origin: BuildOrigin,
) -> None:
    """Write the caches of what was compiled just now, and of what has none in the registry yet.

    Raises CommandError if that fails; images that were exported before stay so.
    """
    location = parse_reference(repository)
    registry = origin.connect(location.host)
    executed = {(result.target, step.stage) for result in built for step in result.steps if not step.cached}
    owners = {entry: target for target in request.targets for entry in wanted[target.id]}
    compiled = {entry for target, entries in wanted.items() for entry in entries if (target, entry.stage) in executed}
    chosen = {
        entry: target
        for entry, target in owners.items()
        if entry in compiled or registry.digest(location.repository, entry.tag) is None
    }
    if not chosen:
        return
    origin.progress.note(f"writing {len(chosen)} of {len(owners)} caches to {location.name}")
    content = bake.bake_file(request.targets, request.folder, request.options)
    caches = cache_bake_file(content, location.name, chosen)
    buildx.execute_bake(request, caches, origin.progress, "bake-caches.json")


NOTHING = "nothing"
"""Argument of --from for an empty cache."""
WORKING_TREE = "the working tree"


class LoadedProject(Protocol):
    """Hold a project that was read, and its plan."""

    @property
    def project(self) -> Project: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def versions(self) -> Pins: ...


Prepare = Callable[[Path, Path, Path, plan.Changes | None], LoadedProject]


@dataclass(frozen=True)
class CostRequest:
    """Hold what the command line asks for."""

    before: str
    """A git revision, a folder, or `nothing`."""
    after: str | None
    """A git revision or a folder; None: the working tree."""
    paths: ProjectPaths
    select: Sequence[str] = ()
    settings: Sequence[str] = ()
    platforms: Sequence[str] = ()
    base: str = "bootstrap"
    timings: Path = Path("build")


def project_state(
    project: Project, versions: Pins, targets: Sequence[Target], platforms: Sequence[str], base: str
) -> ProjectState:
    """Return a state to compare. Sources that the lock lacks are unresolved: a cost can be known before a hash is."""
    renderer = Renderer(project, versions)
    lock = with_unresolved(project.lock, (s for t in targets for s in renderer.recipe(t).sources()))
    resolved = replace(project, lock=lock)
    return ProjectState(resolved, Renderer(resolved, versions), targets, tuple(platforms), native_platform(), base)


def predict_cost(request: CostRequest, prepare: Prepare) -> Cost:
    """Return what building the selected targets of the later state executes if all targets of the earlier were built.

    Raises ConfigError for options that make no sense, and for a state that cannot be read.
    """
    if request.base not in ("bootstrap", "registry"):
        raise ConfigError(f"--base {request.base}: use bootstrap or registry")
    if request.after == NOTHING:
        raise ConfigError("--to nothing: only --from can be nothing")
    platforms = tuple(native_platform() if p == "local" else p for p in request.platforms)
    with ExitStack() as stack:

        def state(reference: str | None, changes: plan.Changes | None, select: Sequence[str]) -> ProjectState:
            paths = stack.enter_context(files_at_revision(reference, request.paths)) if reference else request.paths
            loaded = prepare(paths.matrix, paths.dockerfiles, paths.lock, changes)
            targets = plan.select_targets(loaded.plan, select)
            return project_state(loaded.project, loaded.versions, targets, platforms, request.base)

        before = None if request.before == NOTHING else state(request.before, None, ())
        after = state(request.after, plan.parse_changes(request.settings), request.select)
        for target in after.targets:
            bake.platforms_of(target, platforms)
        settings = (f"--set {setting}" for setting in request.settings)
        names = (request.before, " ".join([request.after or WORKING_TREE, *settings]))
        return compare_states(before, after, names, load_past_times(request.timings))


COMPONENT_COLUMNS = ("component", "RUN steps", "compile", "other steps", "targets", "time")
TARGET_COLUMNS = ("target", "RUN steps", "compile", "other steps", "time")


def show_cost(cost: Cost) -> None:
    """Print what is executed again, as tables."""
    if cost.components:
        console.print_table(COMPONENT_COLUMNS, _component_rows(cost))
        out.print()
    console.print_table(TARGET_COLUMNS, _target_rows(cost))
    out.print()
    out.print("\n".join(cost_summary(cost)), markup=False)


def _component_rows(cost: Cost) -> list[tuple[str, ...]]:
    return [
        (c.name, f"{c.run} of {c.run_of}", str(c.compile), str(c.other), str(c.targets), time_text(c))
        for c in cost.components
    ]


def _target_rows(cost: Cost) -> list[tuple[str, ...]]:
    return [(t.name, f"{t.run} of {t.run_of}", str(t.compile), str(t.other), time_text(t)) for t in cost.targets]


def time_text(count: Count) -> str:
    """Return the past times of what is executed, and the number of steps without one."""
    if count.untimed == count.run + count.other:
        return "unknown" if count.untimed else "-"
    return format_duration(count.seconds) + (f" + {count.untimed} unknown" if count.untimed else "")


def cost_summary(cost: Cost) -> list[str]:
    """Return the totals, in sentences."""
    total = cost.total
    lines = [
        f"from {cost.before} to {cost.after}:",
        f"RUN steps executed: {total.run} (of {total.run_of}); compile steps {total.compile}; "
        f"other steps {total.other}; a step that targets or platforms share counts once",
    ]
    steps = total.run + total.other
    if known := steps - total.untimed:
        lines.append(f"in past builds {known} of them took {format_duration(total.seconds)}, one after the other")
    if total.untimed:
        lines.append(f"{total.untimed} of {steps} have no past time")
    return lines


def cost_markdown(cost: Cost) -> Iterator[str]:
    """Yield the lines of a summary for GitHub Actions."""
    head, *totals = cost_summary(cost)
    yield f"**{head.removesuffix(':')}**"
    yield ""
    yield from (f"* {line}" for line in totals)
    for columns, rows in ((COMPONENT_COLUMNS, _component_rows(cost)), (TARGET_COLUMNS, _target_rows(cost))):
        if rows:
            yield ""
            yield markdown_table(columns, rows)


Reason = Literal["new", "image", "checks", "tags"]
"""How a target differs: it is new, its image is another, its checks are, or it has a tag that it did not have."""


@dataclass(frozen=True)
class TargetState:
    """Hold a target as one state of the project has it."""

    target: Target
    text: str
    """Its Dockerfile."""
    settings: Mapping[str, stages.Setting]
    """Platform → setting that it is built with."""
    checks: object
    """All that decides the result of the image's verification."""


@dataclass(frozen=True)
class ChangedTarget:
    """Name a target that differs on at least one of its platforms; publishing needs all of them."""

    target: Target
    reason: Reason


TargetStates = Mapping[str, TargetState]
"""Id → target."""


def target_states_before(reference: str, paths: ProjectPaths, prepare: Prepare) -> TargetStates:
    """Return the targets of another state; none for `nothing`, and for a state that this version cannot read any more.

    Raises ConfigError for what is neither a revision nor a folder.
    """
    if reference == NOTHING:
        return {}
    with files_at_revision(reference, paths) as files:
        try:
            loaded = prepare(files.matrix, files.dockerfiles, files.lock, None)
            return target_states(project_state(loaded.project, loaded.versions, loaded.plan.targets, (), "bootstrap"))
        except ConfigError as error:
            # What was right then may be a mistake for this version; CI must not stop at it.
            err.print(f"{reference} cannot be read, so everything counts as changed: {error}", markup=False)
            return {}


def target_states(state: ProjectState) -> TargetStates:
    """Return the targets of a state. Raises ConfigError if a template is wrong or a script is missing."""
    checks_of_components: dict[str, object] = {}
    result = {}
    for target in state.targets:
        for name in target.components:
            if name not in checks_of_components:
                component = state.project.components[name].model
                scripts = [(check, load.script_of(state.project, name, check)) for check in checks_of(component)]
                checks_of_components[name] = scripts, component.waivers, component.gpu_code
        image = state.project.matrix.model.images[target.image]
        result[target.id] = TargetState(
            target,
            state.renderer.dockerfile(target).text,
            {setting.platform: setting for setting in state.settings(target)},
            ([checks_of_components[name] for name in target.components], image.waivers, image.size_limit_mb),
        )
    return result


def changed_targets(before: TargetStates, after: TargetStates) -> Iterator[ChangedTarget]:
    """Yield the targets of `after` that differ in `before`, in the order of the plan.

    This version of imagebuild renders both: changes of its own code are not seen.
    """
    for new in after.values():
        old = before.get(new.target.id)
        reasons = [reason for platform in new.settings if (reason := _difference(old, new, platform))]
        if reasons:
            yield ChangedTarget(new.target, reasons[0])


def _difference(old: TargetState | None, new: TargetState, platform: str) -> Reason | None:
    if old is None or platform not in old.settings:
        return "new"
    # Keys take much longer than a comparison of texts, and most texts are equal.
    if (old.text, old.settings[platform]) != (new.text, new.settings[platform]):
        keys = {stages.result_key(state.text, state.settings[platform]) for state in (old, new)}
        if len(keys) > 1:
            return "image"
    if old.checks != new.checks:
        return "checks"
    if {*new.target.tags, *new.target.aliases} - {*old.target.tags, *old.target.aliases}:
        return "tags"
    return None


def changes_summary(changed: Sequence[ChangedTarget], total: int, reference: str) -> str:
    """Return one line for people."""
    counts = {reason: sum(change.reason == reason for change in changed) for reason in get_args(Reason)}
    reasons = ", ".join(f"{number} {reason}" for reason, number in counts.items() if number)
    return f"{len(changed)} of {total} targets differ from {reference}" + (f": {reasons}" if reasons else "")


CompileKeys = frozenset[str]
"""Keys of the steps that compile."""


@dataclass(frozen=True)
class PlatformBuild:
    """Name the build of a target for one platform."""

    target: str
    platform: Platform

    @property
    def arch(self) -> str:
        """Return the platform's architecture."""
        return self.platform.removeprefix("linux/")


Group = Sequence[PlatformBuild]
"""Builds for one platform, one after the other on one runner."""


def group_builds(
    builds: Sequence[PlatformBuild], jobs: int, compiled: Callable[[PlatformBuild], CompileKeys]
) -> list[Group]:
    """Divide builds into at most `jobs` groups: one build each if there are so few, else groups as even as possible.

    Builds that compile the same stay together, so that few runners compile it. `compiled` returns what a build
    compiles; it is called only if there are more builds than jobs. Raises ConfigError if there are more platforms than
    jobs.
    """
    if len(builds) <= jobs:
        return [(build,) for build in builds]
    platforms = {build.platform: [b for b in builds if b.platform == build.platform] for build in builds}
    if len(platforms) > jobs:
        raise ConfigError(f"--github-jobs {jobs}: a job is for one platform, and there are {len(platforms)} platforms")
    clusters = [list(_clusters(of_platform, compiled)) for of_platform in platforms.values()]
    size = 1
    while len(groups := [group for of_platform in clusters for group in _fill(of_platform, size)]) > jobs:
        size += 1
    order = {build: i for i, build in enumerate(builds)}
    return sorted((sorted(group, key=order.__getitem__) for group in groups), key=lambda group: order[group[0]])


def _clusters(builds: Sequence[PlatformBuild], compiled: Callable[[PlatformBuild], CompileKeys]) -> Iterator[Group]:
    """Yield groups of builds that compile the same; neighbours share as much as possible."""
    keys = {build: compiled(build) for build in builds}
    shared = Counter(key for of_build in keys.values() for key in of_build)
    # Keys that most builds share come first, so that sorting the paths makes a tree of them.
    paths = {build: sorted(of_build, key=lambda key: (-shared[key], key)) for build, of_build in keys.items()}
    for _, cluster in groupby(sorted(builds, key=paths.__getitem__), key=paths.__getitem__):
        yield list(cluster)


def _fill(clusters: Iterable[Group], size: int) -> list[list[PlatformBuild]]:
    """Put clusters into groups of at most `size` builds; cut only those that are larger than that."""
    groups: list[list[PlatformBuild]] = []
    for cluster in clusters:
        if groups and len(groups[-1]) + len(cluster) <= size:
            groups[-1] += cluster
            continue
        pieces = -(-len(cluster) // size)
        groups += [list(cluster[i * len(cluster) // pieces : (i + 1) * len(cluster) // pieces]) for i in range(pieces)]
    return groups


def job_matrix(groups: Sequence[Group], runners: Mapping[Platform, Sequence[str]]) -> dict[str, list[dict[str, Any]]]:
    """Return the `matrix` of a job. Raises ConfigError for a platform without a runner."""
    if unknown := {group[0].platform for group in groups} - set(runners):
        raise ConfigError(f"github-runners: no runner for {', '.join(sorted(unknown))}; add its label in the matrix")
    entries = []
    for number, group in enumerate(groups, 1):
        first, arch = group[0], group[0].arch
        alone = len(group) == 1
        labels = list(runners[first.platform])
        entries.append(
            {
                "name": f"{first.target} {arch}" if alone else f"{first.target} and {len(group) - 1} more {arch}",
                "id": f"{first.target}-{arch}" if alone else f"group{number:03}-{arch}",
                "targets": " ".join(build.target for build in group),
                "platform": first.platform,
                "runner": labels[0] if len(labels) == 1 else labels,
            }
        )
    return {"include": entries}


def print_workflow_jobs(
    workspace: LoadedProject,
    targets: Sequence[Target],
    platforms: Sequence[str],
    *,
    since: str | None,
    paths: ProjectPaths,
    prepare: Prepare,
    jobs: int,
) -> None:
    """Print the matrix of a workflow as one line of JSON; with `since`, only targets that differ from that revision.

    Raises ConfigError for an unknown revision, or if no target is for one of the platforms.
    """
    state = project_state(workspace.project, workspace.versions, targets, platforms, "bootstrap")
    if not any(state.settings(target) for target in targets):
        raise ConfigError(f"--platform {' '.join(platforms)}: no selected target is for it")
    if since is not None:
        changed = list(changed_targets(target_states_before(since, paths, prepare), target_states(state)))
        err.print(changes_summary(changed, len(targets), since), markup=False)
        targets = [change.target for change in changed]
    builds = [PlatformBuild(t.id, p) for t in targets for p in t.platforms if p in platforms or not platforms]
    by_id = {target.id: target for target in targets}

    def compiled(build: PlatformBuild) -> CompileKeys:
        text = state.renderer.dockerfile(by_id[build.target]).text
        setting = stages.Setting(build.platform, build.platform)
        return frozenset(s.key for s in stages.steps_of(text, setting) if compiles(s, workspace.project))

    groups = group_builds(builds, jobs, compiled)
    if len(groups) < len(builds):
        err.print(f"{len(builds)} builds in {len(groups)} jobs of at most {max(map(len, groups))}", markup=False)
    out.print(json.dumps(job_matrix(groups, workspace.project.matrix.model.github_runners)), markup=False)
