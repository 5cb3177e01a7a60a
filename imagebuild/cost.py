"""What a change makes BuildKit execute again, and how long that took before. Pure.

A step is executed if its key (see `steps`) is not among those of the state before. What several targets or platforms
share is executed, and counted, once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from imagebuild import steps
from imagebuild.buildx import component_of
from imagebuild.config import Project
from imagebuild.fields import Model
from imagebuild.models import Target
from imagebuild.render import Renderer
from imagebuild.sources import digest_of
from imagebuild.timings import Past


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
class Side:
    """One state of a project, and what of it is built."""

    project: Project
    renderer: Renderer
    targets: Sequence[Target]
    platforms: tuple[str, ...] = ()
    """Empty: those of each target."""
    build_platform: str = "linux/amd64"
    base: str = "bootstrap"

    def settings(self, target: Target) -> list[steps.Setting]:
        """For each platform of a target that is built; none if it is for none of them."""
        names = [p for p in target.platforms if not self.platforms or p in self.platforms]
        return [steps.Setting(p, self.build_platform, self._bases(), self._ignores()) for p in names]

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

    step: steps.Step
    component: str | None
    compiles: bool
    targets: dict[str, None] = field(default_factory=dict)
    platforms: dict[str, None] = field(default_factory=dict)


def compare(before: Side | None, after: Side, names: tuple[str, str], past: Past | None = None) -> Cost:
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


def _uses(side: Side) -> dict[str, _Use]:
    """Key → step, for all targets and platforms of a side."""
    components = side.project.components
    uses: dict[str, _Use] = {}
    for target in side.targets:
        text = side.renderer.dockerfile(target).text
        for setting in side.settings(target):
            for step in steps.steps_of(text, setting):
                owner = component_of(step.stage, frozenset(components))
                compiles = step.last_run and owner == step.stage and components[owner].model.compiles
                use = uses.setdefault(step.key, _Use(step, owner, compiles))
                use.targets[target.id] = None
                use.platforms[setting.platform] = None
    return uses


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
