"""A build that several builders share. Builders exchange the stages that they share through caches in a registry."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from imagebuild.build.bake import BuildRun, bake_file_of_caches
from imagebuild.build.buildx import (
    BuildProgress,
    EventStream,
    execute_bake,
    export_images,
    repository_at,
    run_bake,
    write_caches,
    write_dockerfiles,
)
from imagebuild.build.division import Builds, Division, Task, divide, durations, tasks_of
from imagebuild.core.console import err, out, print_table
from imagebuild.core.errors import CommandError
from imagebuild.core.files import read_text
from imagebuild.core.run import end_children, for_each
from imagebuild.project.records import BuildResult


def earlier_results(folder: Path, targets: Iterable[str]) -> Iterator[BuildResult]:
    """Yield the results of earlier builds of the targets with these ids. A file that cannot be read is no result."""
    for target in targets:
        for file in sorted((folder / target).glob("*.json")):
            try:
                yield BuildResult.model_validate_json(read_text(file))
            except (ValueError, OSError):
                continue


def division_of(builds: Builds, folder: Path, builders: int) -> Division:
    """Divide targets over builders, with the durations of earlier builds in a build folder, if any."""
    builds = [*builds]
    known = durations(earlier_results(folder, {target.id for target, *_ in builds}))
    return divide(tasks_of(builds, known), builders, "seconds" if known else "steps")


def print_division(division: Division) -> None:
    """Print which builder builds which targets, and how many stages it builds for others."""
    parts = division.summary["builders"]
    print_table(("target", "builder"), [(name, str(n)) for n, part in enumerate(parts, 1) for name in part["targets"]])
    out.print()
    rows = [
        (str(n), str(len(part["targets"])), str(len(part["stages"])), f"{part['work']:.0f}")
        for n, part in enumerate(parts, 1)
    ]
    print_table(("builder", "targets", "stages for others", f"work in {division.unit}"), rows)
    out.print()
    ratio = division.makespan / (division.bound or 1)
    out.print(f"ends after {division.makespan:.0f} {division.unit}, {ratio:.2f} times the least possible")


@dataclass
class Board:
    """The stages that are in the registry. The threads of all builders wait for stages here."""

    awaited: frozenset[str]
    """Keys of all stages that one builder builds for others."""
    there: set[str]
    """Keys of those stages that are in the registry."""
    stopped: bool = False
    """Whether a builder failed, or the user interrupted the build. No builder begins another task."""
    error: CommandError | None = None
    """The first error. The errors of other builders follow from it, as it ends their work."""
    changed: threading.Condition = field(default_factory=threading.Condition)

    def ready(self, needs: Sequence[frozenset[str]]) -> int:
        """Wait until a builder can begin the first of its tasks. `needs` are the stages of other builders that each
        task needs. Return the number of tasks that it can begin together: 0 if the builders stop."""
        with self.changed:
            while not self.stopped:
                number = next((i for i, keys in enumerate(needs) if not keys <= self.there), len(needs))
                if number:
                    return number
                self.changed.wait()
        return 0

    def add(self, keys: set[str]) -> None:
        with self.changed:
            self.there |= keys
            self.changed.notify_all()

    def stop(self, error: CommandError | None = None) -> None:
        """Stop all builders: those that wait at once, and those that work by ending their buildx."""
        with self.changed:
            self.stopped, self.error = True, self.error or error
            self.changed.notify_all()
        end_children()


@dataclass(frozen=True)
class Share:
    """The part of a build that one builder does."""

    run: BuildRun
    """The build with only the targets of this builder. The caches are those of all targets."""
    tasks: tuple[Task, ...]
    """The targets, and the stages that other builders need, in order."""
    stream: EventStream
    metadata: dict[str, Any] = field(default_factory=dict)

    def build(self, board: Board, progress: BuildProgress) -> None:
        """Do all tasks, each as soon as the stages of other builders that it needs are in the registry."""
        own, todo = {task.key for task in self.tasks}, [*self.tasks]
        try:
            while todo and (number := board.ready([(task.needs & board.awaited) - own for task in todo])):
                # buildx writes the caches of stages and the images of targets in different ways.
                _, tasks = next(groupby(todo[:number], key=lambda task: task.stage is None))
                batch = [*tasks]
                self._build(batch, progress)
                board.add({task.key for task in batch})
                del todo[: len(batch)]
        except CommandError as error:
            board.stop(type(error)(f"builder {self.run.part}: {error}"))
            raise
        except BaseException:
            board.stop()
            raise

    def _build(self, tasks: Sequence[Task], progress: BuildProgress) -> None:
        targets = {task.target.id: task.target for task in tasks}
        part = replace(self.run, request=replace(self.run.request, targets=tuple(targets.values())))
        if chosen := {task.stage: task.target for task in tasks if task.stage}:
            write_dockerfiles(part)
            execute_bake(part, bake_file_of_caches(part, chosen), progress, "bake-stages.json", self.stream)
        else:
            _, built = run_bake(part, progress, self.stream)
            self.metadata.update(built)


def build_on_all(run: BuildRun, builds: Builds, progress: BuildProgress) -> list[BuildResult]:
    """Build all targets on the builders of the request, and return the results in the order of the targets.

    Nothing is pushed before all images are built. Raises what `run_bake` raises, with the name of the builder."""
    request, began = run.request, time.monotonic()
    division = division_of(builds, request.folder, len(request.builders))
    place = repository_at(request.cache or "")
    shared = division.shared
    entries = {task.key: task.stage for part in division.parts for task in part if task.stage and task.key in shared}
    there = {key for key, entry in entries.items() if place.digest(entry.tag)}
    caches = {
        task.target.id: [*run.caches[task.target.id], *(entries[key] for key in sorted(task.needs & {*entries}))]
        for part in division.parts
        for task in part
        if not task.stage
    }
    board = Board(frozenset(entries), there)
    shares = []
    for name, part in zip(request.builders, division.parts, strict=True):
        tasks = tuple(task for task in part if not task.stage or task.key in entries.keys() - there)
        targets = tuple(task.target for task in part if not task.stage)
        own = replace(request, builders=(name,), targets=targets)
        part_run = replace(run, request=own, part=name, caches=caches)
        shares.append(Share(part_run, tasks, EventStream(name)))
        progress.note(f"builder {name}: {len(targets)} targets, and {len(tasks) - len(targets)} stages for others")
    try:
        for_each(lambda share: share.build(board, progress), shares, board, jobs=len(shares))
    except CommandError as error:
        raise board.error or error from None
    except KeyboardInterrupt:
        err.print("interrupted: the builders keep the steps that ended; run the same command again to go on from there")
        raise
    results: dict[str, BuildResult] = {}
    for share in shares:
        seconds = time.monotonic() - began
        built = export_images(share.run, share.stream, share.metadata, seconds, progress)
        results |= {result.target: result for result in built}
        write_caches(replace(share.run, caches=run.caches), built, progress)
    return [results[target.id] for target in request.targets]
