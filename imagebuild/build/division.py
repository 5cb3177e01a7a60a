"""The division of a build: which builder builds which targets, and which of the stages that targets share. Pure."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from imagebuild.build.bake import CacheEntry
from imagebuild.core.fields import Platform
from imagebuild.project.plan import Target
from imagebuild.project.records import BuildResult
from imagebuild.render.stages import Stage

Build = tuple[Target, Platform, Mapping[str, Stage]]
"""A target for one of its platforms, with the stages that BuildKit runs, the final stage last."""
Builds = Iterable[Build]

LONGEST_STEP_S = 10**6


@dataclass(frozen=True)
class Task:
    """The work that one builder does without interruption: a stage for one platform, or the last stages of a target."""

    key: str
    """Key of the stage, or the id of the target."""
    target: Target
    """The target, or one of the targets that need the stage."""
    stage: CacheEntry | None
    """The stage, for one platform, and its cache. None if the task is a target, which is built for all its platforms.
    """
    work: float
    """Duration in seconds, or number of `RUN` steps if no duration is known."""
    needs: frozenset[str] = field(default_factory=frozenset)
    """Keys of all stages that the task needs, directly or through other stages."""


@dataclass(frozen=True)
class Division:
    """The tasks of each builder, in order, and how long they take."""

    parts: tuple[tuple[Task, ...], ...]
    makespan: float
    """Time from the start to the end of the last task, in the unit of `Task.work`."""
    bound: float
    """No division can end earlier: the larger of all work divided by the number of builders, and the longest chain."""

    unit: str = "steps"
    """`seconds` if durations of earlier builds are known, otherwise `steps`."""

    @property
    def summary(self) -> dict[str, Any]:
        """The division for programs."""
        shared = self.shared
        parts = [
            {
                "targets": [task.target.id for task in part if not task.stage],
                "stages": [task.stage.tag for task in part if task.stage and task.key in shared],
                "work": round(sum(task.work for task in part), 3),
            }
            for part in self.parts
        ]
        return {"unit": self.unit, "makespan": self.makespan, "bound": self.bound, "builders": parts}

    @property
    def shared(self) -> frozenset[str]:
        """Keys of the stages that one builder builds, and others need."""
        home = {task.key: number for number, part in enumerate(self.parts) for task in part}
        return frozenset(
            key for number, part in enumerate(self.parts) for task in part for key in task.needs if home[key] != number
        )


def durations(results: Iterable[BuildResult]) -> dict[str, float]:
    """Map the name of each stage that earlier builds ran to its duration in seconds, the longest of these builds."""
    longest: dict[str, float] = {}
    for result in results:
        total: dict[str, float] = defaultdict(float)
        for step in result.steps:
            # A project may contain results with any number.
            if not step.cached and not step.error and 0 <= step.seconds < LONGEST_STEP_S:
                total[step.stage] += step.seconds
        longest |= {stage: max(seconds, longest.get(stage, 0)) for stage, seconds in total.items()}
    return longest


def tasks_of(builds: Builds, known: Mapping[str, float]) -> list[Task]:
    """Return the tasks of a build. `known` maps stages to durations in seconds.

    A stage whose duration is not known gets, for each of its steps, the median of the known stages. If no duration is
    known, each `RUN` step counts as 1."""
    stages: dict[str, Task] = {}
    last: dict[str, Task] = {}
    typical = median(known.values()) if known else 1.0
    for target, platform, own in builds:
        *_, final = own
        for name, stage in own.items():
            runs = sum(word == "RUN" for word, _ in stage.steps)
            work = known.get(name, runs * typical)
            needs = frozenset(own[other].key for other in stage.needs)
            if name != final:
                stages.setdefault(
                    stage.key, Task(stage.key, target, CacheEntry(name, platform, stage.key), work, needs)
                )
            else:
                before = last.get(target.id, Task(target.id, target, None, 0.0))
                last[target.id] = Task(target.id, target, None, before.work + work, before.needs | needs)
    return [*stages.values(), *last.values()]


def divide(tasks: Sequence[Task], builders: int, unit: str = "steps") -> Division:
    """Divide tasks over equal builders, each of which does one task at a time.

    Neighbouring targets, which share most stages, stay together: each builder gets a section of the list of targets,
    and of the stages that builders share about the same work. Then, a builder that has nothing to do takes a task from
    the builder with the most work left. Each builder does the task with the longest chain of work after it first (list
    scheduling: R. L. Graham, Bounds on multiprocessing timing anomalies, 1969)."""
    users: dict[str, list[Task]] = defaultdict(list)
    for task in tasks:
        for key in task.needs:
            users[key].append(task)
    chain: dict[str, float] = {}
    for task in sorted(tasks, key=lambda task: len(task.needs), reverse=True):  # users before the stages they need
        chain[task.key] = task.work + max((chain[user.key] for user in users[task.key]), default=0.0)
    home = _homes(tasks, users, builders)
    left, waits = [0.0] * builders, {task.key: len(task.needs) for task in tasks}
    ready: list[list[tuple[float, str]]] = [[] for _ in range(builders)]
    for task in tasks:
        left[home[task.key]] += task.work
        if not task.needs:
            heapq.heappush(ready[home[task.key]], (-chain[task.key], task.key))
    known = {task.key: task for task in tasks}
    parts: list[list[Task]] = [[] for _ in range(builders)]
    running: list[tuple[float, str, int]] = []  # time of the end, key of the task, builder
    free, now = set(range(builders)), 0.0
    while True:
        # First, builders with tasks of their own, so that none of these tasks is taken away.
        for builder in sorted(free, key=lambda each: (not ready[each], each)):
            source = builder
            if not ready[builder]:
                source = max(range(builders), key=lambda each: (bool(ready[each]), left[each]))
            if ready[source]:
                _, key = heapq.heappop(ready[source])
                left[source] -= known[key].work
                parts[builder].append(known[key])
                free.remove(builder)
                heapq.heappush(running, (now + known[key].work, key, builder))
        if not running:
            bound = max(sum(task.work for task in tasks) / builders, max(chain.values(), default=0.0))
            return Division(tuple(map(tuple, parts)), now, bound, unit)
        now, key, builder = heapq.heappop(running)
        free.add(builder)
        for user in users[key]:
            waits[user.key] -= 1
            if not waits[user.key]:
                heapq.heappush(ready[home[user.key]], (-chain[user.key], user.key))


def sections(tasks: Sequence[Task], number: int) -> list[list[Task]]:
    """Cut the targets, in their order, into at most `number` sections of about equal work. Each target counts its share
    of every stage it needs."""
    targets, work = [task for task in tasks if not task.stage], {task.key: task.work for task in tasks}
    users = Counter(key for target in targets for key in target.needs)
    shares = [target.work + sum(work[key] / users[key] for key in target.needs) for target in targets]
    whole, before = sum(shares) or 1.0, 0.0
    cut: list[list[Task]] = [[] for _ in range(number)]
    for target, share in zip(targets, shares, strict=True):
        cut[min(number - 1, int((before + share / 2) / whole * number))].append(target)
        before += share
    return cut


def _homes(tasks: Sequence[Task], users: Mapping[str, Sequence[Task]], builders: int) -> dict[str, int]:
    """Map the key of each task to the builder that does it unless another builder has nothing to do: each builder has a
    section of the targets. A stage belongs to one of the builders whose targets need it."""
    homes: dict[str, int] = {}
    load = [0.0] * builders
    for home, targets in enumerate(sections(tasks, builders)):
        homes |= {target.key: home for target in targets}
        load[home] = sum(target.work for target in targets)
    for stage in sorted((task for task in tasks if task.stage), key=lambda task: -task.work):
        near = {homes[user.key] for user in users[stage.key] if not user.stage}
        home = homes[stage.key] = min(near, key=lambda each: (load[each], each))
        load[home] += stage.work
    return homes
