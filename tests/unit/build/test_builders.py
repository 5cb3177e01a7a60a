"""Several builders that share a build: the order of their tasks, and what one that fails means for the others."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from imagebuild.build import builders
from imagebuild.build.bake import BuildRun, CacheEntry
from imagebuild.build.builders import Board, Share
from imagebuild.build.buildx import BuildProgress, EventStream
from imagebuild.build.division import Task
from imagebuild.core.errors import CommandError
from imagebuild.core.run import for_each
from imagebuild.project.plan import Plan
from imagebuild.render.renderer import Renderer
from tests.unit.build.test_buildx import run_of

Parts = Mapping[str, Sequence[tuple[str, str]]]
"""Maps each builder to its tasks: the key, in lower case for a stage, and the keys of the stages that the task needs."""


def share_work(run: BuildRun, parts: Parts, broken: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], str]:
    """Do the tasks on several builders. Return the keys in the order of their ends, and the error."""
    ended: list[str] = []
    lock = threading.Lock()

    def build(share: Share, tasks: Sequence[Task], _: BuildProgress) -> None:
        for task in tasks:
            if task.key == broken:
                raise CommandError(f"{task.key} failed")
            with lock:
                assert task.needs <= {*ended}, f"{task.key} begins before what it needs"
                ended.append(task.key)

    monkeypatch.setattr(Share, "_build", build)
    monkeypatch.setattr(builders, "end_children", lambda: None)
    target = run.request.targets[0]
    tasks = {
        name: tuple(
            Task(key, target, CacheEntry(key, "linux/amd64", key) if key.islower() else None, 1, frozenset(needs))
            for key, needs in part
        )
        for name, part in parts.items()
    }
    board = Board(frozenset(task.key for part in tasks.values() for task in part if task.stage), set())
    shares = [Share(replace(run, part=name), part, EventStream(name)) for name, part in tasks.items()]
    try:
        for_each(lambda share: share.build(board, BuildProgress()), shares, board, jobs=len(shares))
    except CommandError:
        return ended, str(board.error)
    return ended, ""


PARTS: Parts = {
    "one": [("a", ""), ("c", "ab"), ("D", "abc")],
    "two": [("b", ""), ("E", "ac"), ("f", "b"), ("G", "bf")],
    "three": [("H", "abcf")],
}


@pytest.fixture
def run(full_plan: Plan, renderer: Renderer, tmp_path: Path) -> BuildRun:
    return run_of(renderer, full_plan, tmp_path, "quickstart-cuda13.5-debian13-runtime")


def test_each_task_waits_for_the_stages_of_other_builders(run: BuildRun, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(20):
        ended, error = share_work(run, PARTS, "", monkeypatch)
        assert (sorted(ended), error) == (sorted(key for part in PARTS.values() for key, _ in part), "")


@pytest.mark.parametrize(("broken", "builder"), [("a", "one"), ("b", "two"), ("E", "two"), ("H", "three")])
def test_a_builder_that_fails_stops_all_and_is_named(
    run: BuildRun, monkeypatch: pytest.MonkeyPatch, broken: str, builder: str
) -> None:
    ended, error = share_work(run, PARTS, broken, monkeypatch)
    assert error == f"builder {builder}: {broken} failed"
    assert broken not in ended
