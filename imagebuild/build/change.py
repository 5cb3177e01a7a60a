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
from imagebuild.core.console import err, format_duration, out
from imagebuild.core.errors import ConfigError
from imagebuild.core.fields import Model, Platform
from imagebuild.core.files import read_text
from imagebuild.core.run import native_platform
from imagebuild.oci.reference import parse_reference
from imagebuild.project import load, plan
from imagebuild.project import plan as planning
from imagebuild.project.component import checks_of
from imagebuild.project.load import Project
from imagebuild.project.lockfile import digest_of, with_unresolved
from imagebuild.project.matrix import Plan, Target
from imagebuild.project.records import BuildResult
from imagebuild.project.revision import ProjectPaths, files_at_revision
from imagebuild.render import stages
from imagebuild.render.renderer import Renderer
from imagebuild.render.stages import CacheStep

Place = tuple[str, int, int, str, str]
"""Stage, number of the step, steps of the stage, command, platform of the image."""


@dataclass(frozen=True)
class Past:
    """Seconds that steps took when they were executed.

    A step is known again by its place: it is the n-th of m steps of the same stage, with the same command, for the
    same platform. What it runs may have changed, such as a version.
    """

    taken: dict[Place, list[float]] = field(default_factory=dict)

    def seconds(self, step: CacheStep, platforms: Iterable[str]) -> float | None:
        """Median of the past times of a step that is for these platforms, None without any."""
        places = [(step.stage, step.number, step.total, step.word, platform) for platform in platforms]
        found = [seconds for place in places for seconds in self.taken.get(place, ())]
        return round(median(found), 3) if found else None


def load_past(folder: Path) -> Past:
    """Read `<target>/result.json` under a folder of builds. Raises ConfigError for one that cannot be read."""
    return past_of(load_result(path) for path in sorted(folder.glob("*/result.json")))


def load_result(path: Path) -> BuildResult:
    """A build's result. Raises ConfigError if the file is not one."""
    try:
        return BuildResult.model_validate_json(read_text(path))
    except ValidationError as error:
        raise ConfigError(f"{path}: is no result of a build; remove it: {error.errors()[0]['msg']}") from None


def past_of(results: Iterable[BuildResult]) -> Past:
    """Times of steps that were executed; a step that several results report counts once."""
    events: dict[tuple[Place, str, float], None] = {}
    for result in results:
        # With a base image from a registry, that is step 1 of the stages that start from it.
        shifted = {step.stage for step in result.steps if re.match(r"\[[^]]*\] FROM ", step.name)}
        for step in result.steps:
            found = STEP_NAME.match(step.name)
            if not found or step.cached or step.error:
                continue
            number, total = map(int, found["n"].split("/"))
            word = found["text"].partition(" ")[0]
            for platform in _platforms(found["platform"], result):
                place = (step.stage, number - (step.stage in shifted), total, word, platform)
                events[place, step.name, step.seconds] = None
    taken: dict[Place, list[float]] = {}
    for place, _, seconds in events:
        taken.setdefault(place, []).append(seconds)
    return Past(taken)


def _platforms(shown: str | None, result: BuildResult) -> tuple[str, ...]:
    """`linux/amd64->arm64` is a step on amd64 for arm64; builds for one platform do not show it."""
    if not shown:
        return result.platforms
    runs_on, arrow, arch = shown.partition("->")
    return (f"linux/{arch}" if arrow else runs_on,)


class CostStep(Model):
    """A step that will be executed."""

    component: str | None
    """Component whose stage it is in; none for the final stage."""
    stage: str
    number: int
    """From 1, among the steps of its stage."""
    command: str
    """`RUN`, `COPY`, `ADD` or `WORKDIR`."""
    title: str
    """The start of the instruction."""
    compiles: bool
    """Does it run a compiler on upstream source?"""
    runs_on: str | None
    """Platform whose programs run; another than the build machine's is emulated. None for a step that runs none."""
    platforms: tuple[str, ...]
    """Platforms of the images that it is for."""
    targets: tuple[str, ...]
    """Targets that need it."""
    seconds: float | None
    """Median of what it took in past builds; none if it was not in them."""
    key: str
    """Steps with equal keys are one step."""


class Count(Model):
    """How much of something will be executed; each step counts once."""

    run: int
    """`RUN` steps that will be executed."""
    run_of: int
    """`RUN` steps there are."""
    compile: int
    """Those of `run` that compile upstream source."""
    other: int
    """`COPY`, `ADD` and `WORKDIR` steps that will be executed."""
    seconds: float
    """Sum of the past times of the steps that have one, as if one ran after the other."""
    untimed: int
    """Steps that will be executed and are in no past build; they are not in `seconds`."""


class CostPart(Count):
    """A component (or a stage that is no component's), or a target."""

    name: str
    targets: int
    """Targets that need a step of it; 1 for a target."""


class Cost(Model):
    """What `imagebuild plan --from … --json` prints."""

    before: str
    """The state that was built, as `--from` named it."""
    after: str
    """The state to build: `--to`, or the working tree."""
    total: Count
    components: tuple[CostPart, ...]
    """Those with a step that will be executed; the final stage is the last one."""
    targets: tuple[CostPart, ...]
    """All that were selected."""
    steps: tuple[CostStep, ...]
    """Every step that will be executed."""


@dataclass(frozen=True)
class ProjectState:
    """One state of a project, and what of it is built."""

    project: Project
    renderer: Renderer
    targets: Sequence[Target]
    platforms: tuple[str, ...] = ()
    """Empty: those of each target."""
    build_platform: str = "linux/amd64"
    base: str = "bootstrap"

    def settings(self, target: Target) -> list[stages.Setting]:
        """For each platform of a target that is built; none if it is for none of them."""
        names = [p for p in target.platforms if not self.platforms or p in self.platforms]
        return [stages.Setting(p, self.build_platform, self._bases(), self._ignores()) for p in names]

    def _bases(self) -> dict[str, str]:
        """What is bootstrapped depends on the release, whatever official image it replaces."""
        entries = self.project.matrix.model.bases.values() if self.base == "bootstrap" else ()
        lock = self.project.lock
        return {digest_of(lock, e.image): f"bootstrapped {e.release}" for e in entries if e.release}

    def _ignores(self) -> dict[str, tuple[str, ...]]:
        return {name: d.model.link_ignores for name, d in self.project.components.items()}


@dataclass
class _Use:
    """A step and who needs it."""

    step: stages.CacheStep
    component: str | None
    compiles: bool
    targets: dict[str, None] = field(default_factory=dict)
    platforms: dict[str, None] = field(default_factory=dict)


def compare_states(
    before: ProjectState | None, after: ProjectState, names: tuple[str, str], past: Past | None = None
) -> Cost:
    """What building `after` executes if all of `before` was built; everything if that is None.

    `names` is what the two are called. Raises ConfigError if a template is wrong or the lock lacks a source.
    """
    known = _uses(before) if before else {}
    uses = _uses(after)
    past = past or Past()
    again = {key: _cost_step(use, past) for key, use in uses.items() if key not in known}
    of_component: dict[str, list[_Use]] = {}
    of_target: dict[str, list[_Use]] = {target.id: [] for target in after.targets}
    for use in uses.values():
        of_component.setdefault(use.component or use.step.stage, []).append(use)
        for target in use.targets:
            of_target[target].append(use)
    parts = [_part(name, used, again) for name, used in of_component.items()]
    return Cost(
        before=names[0],
        after=names[1],
        total=_count(uses.values(), again),
        components=tuple(
            part
            for part in sorted(parts, key=lambda part: part.name not in after.project.components)
            if part.run or part.other
        ),
        targets=tuple(_part(name, used, again).model_copy(update={"targets": 1}) for name, used in of_target.items()),
        steps=tuple(again.values()),
    )


def _uses(side: ProjectState) -> dict[str, _Use]:
    """Key → step, for all targets and platforms of a side."""
    components = side.project.components
    uses: dict[str, _Use] = {}
    for target in side.targets:
        text = side.renderer.dockerfile(target).text
        for setting in side.settings(target):
            for step in stages.steps_of(text, setting):
                owner = component_of(step.stage, frozenset(components))
                use = uses.setdefault(step.key, _Use(step, owner, compiles(step, side.project)))
                use.targets[target.id] = None
                use.platforms[setting.platform] = None
    return uses


def compiles(step: stages.CacheStep, project: Project) -> bool:
    """Whether a step compiles upstream source: those that take long."""
    component = project.components.get(step.stage)
    return step.last_run and component is not None and component.model.compiles


def _cost_step(use: _Use, past: Past) -> CostStep:
    step = use.step
    return CostStep(
        component=use.component,
        stage=step.stage,
        number=step.number,
        command=step.word,
        title=step.title,
        compiles=use.compiles,
        runs_on=step.runs_on if step.word == "RUN" else None,
        platforms=tuple(use.platforms),
        targets=tuple(use.targets),
        seconds=past.seconds(step, use.platforms),
        key=step.key,
    )


def _count(uses: Iterable[_Use], again: Mapping[str, CostStep]) -> Count:
    uses = tuple(uses)
    executed = [again[use.step.key] for use in uses if use.step.key in again]
    return Count(
        run=sum(step.command == "RUN" for step in executed),
        run_of=sum(use.step.word == "RUN" for use in uses),
        compile=sum(step.compiles for step in executed),
        other=sum(step.command != "RUN" for step in executed),
        seconds=round(sum(step.seconds or 0 for step in executed), 3),
        untimed=sum(step.seconds is None for step in executed),
    )


def _part(name: str, uses: Sequence[_Use], again: Mapping[str, CostStep]) -> CostPart:
    targets = {target for use in uses if use.step.key in again for target in use.targets}
    return CostPart(name=name, targets=len(targets), **_count(uses, again).model_dump())


@dataclass(frozen=True)
class CacheEntry:
    """What a compile stage makes for one platform."""

    stage: str
    platform: Platform
    key: str

    @property
    def tag(self) -> str:
        """`ucx-amd64-0123456789abcdef`."""
        return f"{self.stage}-{self.platform.removeprefix('linux/')}-{self.key}"


CacheEntries = Mapping[str, tuple[CacheEntry, ...]]
"""Target → what it is assembled from."""


def cache_entries(side: ProjectState) -> dict[str, tuple[CacheEntry, ...]]:
    """All that the targets of a side need compiled."""
    compiled = {name for name, component in side.project.components.items() if component.model.compiles}
    found: dict[str, tuple[CacheEntry, ...]] = {}
    for target in side.targets:
        text = side.renderer.dockerfile(target).text
        of_target: list[CacheEntry] = []
        for setting in side.settings(target):
            keys = stages.stage_keys(text, [setting])
            needed = dict.fromkeys(step.stage for step in stages.steps_of(text, setting))
            platform = next(p for p in target.platforms if p == setting.platform)
            of_target += [CacheEntry(stage, platform, keys[stage]) for stage in needed if stage in compiled]
        found[target.id] = tuple(of_target)
    return found


def made_by(results: Iterable[BuildResult], wanted: CacheEntries) -> frozenset[CacheEntry]:
    """Artefacts that a build executed a step of, and did not take from a cache."""
    executed = {(r.target, step.stage) for r in results for step in r.steps if not step.cached}
    return frozenset(a for target, found in wanted.items() for a in found if (target, a.stage) in executed)


def cache_bake_file(content: Mapping[str, Any], repository: str, owners: Mapping[CacheEntry, Target]) -> dict[str, Any]:
    """A bake file that writes caches of artefacts, from the `content` of the one that built their targets.

    All that it builds is in the builder's own cache.
    """
    entries = {
        artefact.tag: {
            **content["target"][target.bake_name],
            "target": artefact.stage,
            "platforms": [artefact.platform],
            "tags": [],
            "output": ["type=cacheonly"],
            # A manifest as images have it: not every registry takes the index that is BuildKit's own form.
            "cache-to": [
                f"type=registry,ref={repository}:{artefact.tag},mode=min,image-manifest=true,oci-mediatypes=true"
            ],
        }
        for artefact, target in owners.items()
    }
    return {"group": {"default": {"targets": sorted(entries)}}, "target": entries}


def write_caches(
    request: buildx.BakeRequest,
    repository: str,
    wanted: CacheEntries,
    built: Sequence[BuildResult],
    origin: BuildOrigin,
) -> None:
    """Write the caches of what was compiled just now, and of what has none in the registry yet.

    Raises CommandError if that fails; what was delivered before stays so.
    """
    place = parse_reference(repository)
    asked = origin.connect(place.host)
    owners = {artefact: target for target in request.targets for artefact in wanted[target.id]}
    made = made_by(built, wanted)
    chosen = {a: t for a, t in owners.items() if a in made or asked.digest(place.repository, a.tag) is None}
    if not chosen:
        return
    origin.progress.note(f"writing {len(chosen)} of {len(owners)} caches to {place.name}")
    content = bake.bake_file(request.targets, request.folder, request.options)
    buildx.execute_bake(request, cache_bake_file(content, place.name, chosen), origin.progress, "bake-caches.json")


NOTHING = "nothing"
"""Instead of a state: an empty cache."""
WORKING_TREE = "the working tree"
SHARED = "a step that targets or platforms share counts once"


class LoadedProject(Protocol):
    """A project that was read, and its plan."""

    @property
    def project(self) -> Project: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def versions(self) -> planning.Pins: ...


Prepare = Callable[[Path, Path, Path, plan.Changes | None], LoadedProject]


@dataclass(frozen=True)
class CostRequest:
    """What the command line asks for."""

    before: str
    """A git revision, a folder, or `nothing`."""
    after: str | None
    """The same, but for `nothing`; the working tree if None."""
    places: ProjectPaths
    select: Sequence[str] = ()
    settings: Sequence[str] = ()
    platforms: Sequence[str] = ()
    base: str = "bootstrap"
    timings: Path = Path("build")


def show_cost(cost: Cost) -> None:
    """Print what is executed again, as tables."""
    if cost.components:
        console.print_table(COMPONENT, _component_rows(cost))
        out.print()
    console.print_table(TARGET, _target_rows(cost))
    out.print()
    out.print("\n".join(cost_summary(cost)), markup=False)


def project_state(
    project: Project, versions: plan.Pins, targets: Sequence[Target], platforms: Sequence[str], base: str
) -> ProjectState:
    """One side of a comparison. What the lock lacks is taken as unresolved: a cost can be known before a hash is."""
    renderer = Renderer(project, versions)
    lock = with_unresolved(project.lock, (s for t in targets for s in renderer.recipe(t).sources()))
    full = replace(project, lock=lock)
    return ProjectState(full, Renderer(full, versions), targets, tuple(platforms), native_platform(), base)


def named_platforms(platforms: Sequence[str]) -> tuple[str, ...]:
    """Platforms, with this machine's for `local`."""
    return tuple(native_platform() if p == "local" else p for p in platforms)


def preview(wish: CostRequest, prepare: Prepare) -> Cost:
    """What building the selected targets of the state after executes, all targets of the state before being built."""
    if wish.base not in ("bootstrap", "registry"):
        raise ConfigError(f"--base {wish.base}: 'bootstrap' or 'registry'")
    if wish.after == NOTHING:
        raise ConfigError("--to nothing: only --from can be that")
    platforms = named_platforms(wish.platforms)
    with ExitStack() as stack:

        def side(reference: str | None, changes: plan.Changes | None, select: Sequence[str]) -> ProjectState:
            places = stack.enter_context(files_at_revision(reference, wish.places)) if reference else wish.places
            work = prepare(places.matrix, places.dockerfiles, places.lock, changes)
            targets = plan.select_targets(work.plan, select)
            return project_state(work.project, work.versions, targets, platforms, wish.base)

        before = None if wish.before == NOTHING else side(wish.before, None, ())
        after = side(wish.after, plan.parse_changes(wish.settings), wish.select)
        for target in after.targets:
            if not after.settings(target):
                named, known = ", ".join(platforms), ", ".join(target.platforms)
                raise ConfigError(f"{target.id}: is not for {named}; it is for {known}")
        names = (wish.before, " ".join([wish.after or WORKING_TREE, *(f"--set {s}" for s in wish.settings)]))
        return compare_states(before, after, names, load_past(wish.timings))


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
    return format_duration(count.seconds) + (f" + {count.untimed} unknown" if count.untimed else "")


def cost_summary(result: Cost) -> list[str]:
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
            f"in past builds {known} of them took {format_duration(total.seconds)}, one after the other" * bool(known)
        )
        lines.append(f"{total.untimed} of {steps} have no past time" * bool(total.untimed))
    return [line for line in lines if line]


def cost_markdown(result: Cost) -> Iterator[str]:
    head, *totals = cost_summary(result)
    yield f"**{head.removesuffix(':')}**"
    yield ""
    yield from (f"* {line}" for line in totals)
    for columns, rows in ((COMPONENT, _component_rows(result)), (TARGET, _target_rows(result))):
        if rows:
            yield ""
            yield f"| {' | '.join(columns)} |"
            yield "|---" * len(columns) + "|"
            yield from (f"| {' | '.join(row)} |" for row in rows)


Reason = Literal["new", "image", "checks", "tags"]
"""Why: the other state has no such target, makes another image of it, checks it otherwise, or lacks a tag of it."""


@dataclass(frozen=True)
class TargetState:
    """A target as one state of the project has it."""

    target: Target
    text: str
    """Its Dockerfile."""
    settings: Mapping[str, stages.Setting]
    """Platform → for whom it is built."""
    checked: object
    """All that decides what verification says about the image."""


@dataclass(frozen=True)
class ChangedTarget:
    """A target that differs on at least one of its platforms; publishing needs all of them."""

    target: Target
    reason: Reason


State = Mapping[str, TargetState]
"""Id → target."""


def target_states_before(reference: str, places: ProjectPaths, prepare: Prepare) -> State:
    """The project in another state; empty for `nothing`, and for one that this version cannot read any more.

    Raises ConfigError for what is neither a revision nor a folder.
    """
    if reference == NOTHING:
        return {}
    with files_at_revision(reference, places) as found:
        try:
            work = prepare(found.matrix, found.dockerfiles, found.lock, None)
            return target_states(project_state(work.project, work.versions, work.plan.targets, (), "bootstrap"))
        except ConfigError as error:
            # What was right then may be a mistake for this version; CI must not stop at it.
            err.print(f"{reference} cannot be read, so everything counts as changed: {error}", markup=False)
            return {}


def target_states(side: ProjectState) -> State:
    """The targets of a side. Raises ConfigError if a template is wrong or a script is missing."""
    of_component: dict[str, object] = {}
    result = {}
    for target in side.targets:
        for name in target.components:
            if name not in of_component:
                of_component[name] = _checked(side.project, name)
        image = side.project.matrix.model.images[target.image]
        result[target.id] = TargetState(
            target,
            side.renderer.dockerfile(target).text,
            {setting.platform: setting for setting in side.settings(target)},
            ([of_component[name] for name in target.components], image.waivers, image.size_limit_mb),
        )
    return result


def _checked(project: Project, name: str) -> object:
    component = project.components[name].model
    scripts = [(check, load.script_of(project, name, check)) for check in checks_of(component)]
    return scripts, component.waivers, component.gpu_code


def changed_targets(before: State, after: State) -> Iterator[ChangedTarget]:
    """What of `after` is not the same in `before`, in the order of the plan.

    Both are rendered by this version of imagebuild: what a change of its own code does is not seen.
    """
    for new in after.values():
        old = before.get(new.target.id)
        reasons = [reason for platform in new.settings if (reason := _reason(old, new, platform))]
        if reasons:
            yield ChangedTarget(new.target, reasons[0])


def _reason(old: TargetState | None, new: TargetState, platform: str) -> Reason | None:
    if old is None or platform not in old.settings:
        return "new"
    # Keys take much longer than a comparison of texts, and most texts are equal.
    same = (old.text, old.settings[platform]) == (new.text, new.settings[platform])
    if not same and _key(old, platform) != _key(new, platform):
        return "image"
    if old.checked != new.checked:
        return "checks"
    if {*new.target.tags, *new.target.aliases} - {*old.target.tags, *old.target.aliases}:
        return "tags"
    return None


def _key(seen: TargetState, platform: str) -> str:
    return stages.result_key(seen.text, seen.settings[platform])


def changes_summary(found: Sequence[ChangedTarget], total: int, reference: str) -> str:
    """One line for people."""
    counts = {reason: sum(c.reason == reason for c in found) for reason in get_args(Reason)}
    why = ", ".join(f"{number} {reason}" for reason, number in counts.items() if number)
    return f"{len(found)} of {total} targets differ from {reference}" + (f": {why}" if why else "")


MOST_JOBS = 256
"""Entries that a matrix of GitHub Actions may have."""

Compiled = frozenset[str]
"""Keys of the steps that compile."""


@dataclass(frozen=True)
class PlatformBuild:
    """A target on one platform."""

    target: str
    platform: Platform

    @property
    def arch(self) -> str:
        return self.platform.removeprefix("linux/")


Group = Sequence[PlatformBuild]
"""Builds of one platform, one after the other on one runner."""


def group_builds(
    builds: Sequence[PlatformBuild], jobs: int, compiled: Callable[[PlatformBuild], Compiled]
) -> list[Group]:
    """At most `jobs` groups: one for each build if that is enough, else as even as may be.

    What compiles the same is kept together, so that few runners compile it too; `compiled` is asked only if there
    are more builds than jobs. Raises ConfigError if there are more platforms than jobs.
    """
    if len(builds) <= jobs:
        return [(build,) for build in builds]
    platforms = {build.platform: [b for b in builds if b.platform == build.platform] for build in builds}
    if len(platforms) > jobs:
        raise ConfigError(f"--github-jobs {jobs}: a job is for one platform, and there are {len(platforms)}")
    clusters = [list(_clusters(of_platform, compiled)) for of_platform in platforms.values()]
    size = 1
    while len(groups := [g for each in clusters for g in _filled(each, size)]) > jobs:
        size += 1
    place = {build: i for i, build in enumerate(builds)}
    return sorted((sorted(group, key=place.__getitem__) for group in groups), key=lambda group: place[group[0]])


def _clusters(builds: Sequence[PlatformBuild], compiled: Callable[[PlatformBuild], Compiled]) -> Iterator[Group]:
    """Builds that compile the same; neighbours share as much as they can."""
    keys = {build: compiled(build) for build in builds}
    shared = Counter(key for of_build in keys.values() for key in of_build)
    # What most builds share comes first, so that sorting makes a tree of it.
    paths = {build: sorted(of_build, key=lambda key: (-shared[key], key)) for build, of_build in keys.items()}
    for _, cluster in groupby(sorted(builds, key=paths.__getitem__), key=paths.__getitem__):
        yield list(cluster)


def _filled(clusters: Iterable[Group], size: int) -> list[list[PlatformBuild]]:
    """Groups of at most `size`; a cluster is cut only if it is larger than that."""
    groups: list[list[PlatformBuild]] = []
    for cluster in clusters:
        if groups and len(groups[-1]) + len(cluster) <= size:
            groups[-1] += cluster
            continue
        pieces = -(-len(cluster) // size)
        groups += [list(cluster[i * len(cluster) // pieces : (i + 1) * len(cluster) // pieces]) for i in range(pieces)]
    return groups


def job_matrix(groups: Sequence[Group], runners: Mapping[Platform, Sequence[str]]) -> dict[str, list[dict[str, Any]]]:
    """The `matrix` of a job. Raises ConfigError for a platform without runner."""
    if unknown := {group[0].platform for group in groups} - set(runners):
        raise ConfigError(f"github-runners: no runner for {', '.join(sorted(unknown))}; name its label there")
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
    """Print the matrix of a workflow as one line of JSON; with `since`, for what differs from that revision only.

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

    def compiled(build: PlatformBuild) -> Compiled:
        text = state.renderer.dockerfile(by_id[build.target]).text
        setting = stages.Setting(build.platform, build.platform)
        return frozenset(s.key for s in stages.steps_of(text, setting) if compiles(s, workspace.project))

    groups = group_builds(builds, jobs, compiled)
    if len(groups) < len(builds):
        err.print(f"{len(builds)} builds in {len(groups)} jobs of at most {max(map(len, groups))}", markup=False)
    out.print(json.dumps(job_matrix(groups, workspace.project.matrix.model.github_runners)), markup=False)
