"""The division of a build over several builders."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from imagebuild.build.bake import CacheEntry
from imagebuild.build.division import Division, Task, divide, durations, tasks_of
from imagebuild.build.impact import ProjectState
from imagebuild.project.plan import Plan, Target
from imagebuild.project.records import BuildResult, Step
from imagebuild.render.renderer import Renderer

NODES = (1, 2, 3, 4, 8, 16, 32, 64)
LARGEST = 1.25
"""Largest allowed ratio of the makespan to the lower bound."""


@pytest.fixture(scope="module")
def shipped(full_plan: Plan, renderer: Renderer) -> list[Task]:
    """The tasks of all targets of the shipped project, by the number of steps."""
    return tasks_of(ProjectState(renderer, full_plan.targets).builds(), {})


def replay(division: Division, tasks: Sequence[Task]) -> float:
    """Do the tasks of each builder in order, each after all that it needs, and return the time of the end.

    This is independent of `divide`: it knows nothing of chains or of builders that are free."""
    work = {task.key: task.work for task in tasks}
    assert sorted(task.key for part in division.parts for task in part) == sorted(work)
    ends: dict[str, float] = {}
    todo = [list(part) for part in division.parts]
    clock = [0.0] * len(todo)
    while any(todo):
        ready = [n for n, part in enumerate(todo) if part and part[0].needs <= ends.keys()]
        assert ready, "each builder waits for another one"
        for n in ready:
            task = todo[n].pop(0)
            clock[n] = ends[task.key] = max([clock[n], *(ends[key] for key in task.needs)]) + task.work
    return max(clock)


@pytest.mark.parametrize("nodes", NODES)
def test_the_shipped_targets_end_near_the_lower_bound(shipped: list[Task], nodes: int) -> None:
    division = divide(shipped, nodes)
    assert replay(division, shipped) == pytest.approx(division.makespan)
    assert division.bound >= sum(task.work for task in shipped) / nodes
    assert division.makespan <= LARGEST * division.bound


def invented(target: Target, number: int, seed: int) -> list[Task]:
    """Tasks like those of large projects: families of targets share long stages, and these share short ones."""
    chance = random.Random(seed)
    stages: list[Task] = []

    def stage(work: float, needs: frozenset[str]) -> frozenset[str]:
        key = f"stage-{len(stages)}"
        stages.append(Task(key, target, CacheEntry(key, "linux/amd64", key), work, needs))
        return needs | {key}

    roots = [stage(chance.uniform(5, 20), frozenset()) for _ in range(4)]
    families = [stage(chance.lognormvariate(4.5, 1), chance.choice(roots)) for _ in range(number // 10)]
    more = [stage(chance.lognormvariate(4, 1), chance.choice(families)) for _ in range(number // 5)]
    ends = [
        Task(f"target-{n}", target, None, chance.uniform(30, 90), more[n * len(more) // number]) for n in range(number)
    ]
    used = frozenset[str]().union(*(task.needs for task in ends))
    return [*(task for task in stages if task.key in used), *ends]


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("number", [89, 1000])
def test_invented_targets_end_near_the_lower_bound(full_plan: Plan, number: int, nodes: int) -> None:
    for seed in range(2):
        tasks = invented(full_plan.targets[0], number, seed)
        division = divide(tasks, nodes)
        assert replay(division, tasks) == pytest.approx(division.makespan)
        longest = max(task.work for task in tasks)
        # Tasks cannot be cut: with many builders, each gets so few of them that one more is a large part of the work.
        assert division.makespan <= max(LARGEST * division.bound, division.bound + longest)


def test_builders_share_few_stages(shipped: list[Task]) -> None:
    division = divide(shipped, 2)
    stages = sum(task.stage is not None for task in shipped)
    assert 0 < len(division.shared) < stages / 2


def test_durations_of_earlier_builds_replace_the_number_of_steps(full_plan: Plan, renderer: Renderer) -> None:
    target = full_plan.targets[0]

    def result(*steps: tuple[str, float, bool]) -> BuildResult:
        ran = tuple(Step(name=s, target=target.id, stage=s, component=None, cached=c, seconds=t) for s, t, c in steps)
        return BuildResult(
            target=target.id, digest=None, tags=(), platforms=("linux/amd64",), size_bytes=None, seconds=1, steps=ran
        )

    broken = [("cuda", float(seconds), False) for seconds in ("nan", "inf", "1e308", "-1")]
    known = durations(
        [result(*broken, ("cuda", 5, False), ("cuda", 6, False), ("fetch", 3, True)), result(("cuda", 2, False))]
    )
    assert known == {"cuda": 11}
    tasks = tasks_of(ProjectState(renderer, [target], ("linux/amd64",)).builds(), known)
    assert {task.stage.stage: task.work for task in tasks if task.stage}["cuda"] == 11
    assert [task.key for task in tasks if not task.stage] == [target.id]
