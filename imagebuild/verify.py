"""`imagebuild verify`: the checks of an image, wherever a runner can run them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from docker import DockerClient
from rich.markup import escape

from imagebuild import __version__, checks, console, docker, engine, selection, static, subject
from imagebuild.config import Project
from imagebuild.console import err, out
from imagebuild.errors import ConfigError
from imagebuild.evidence import Evidence, evidence, surroundings
from imagebuild.measured import bad, read
from imagebuild.models import Plan
from imagebuild.needs import Facilities
from imagebuild.records import CheckResult, Surroundings, VerifyResult
from imagebuild.runners.base import Runner, Session, Unusable
from imagebuild.runners.docker import DockerRunner
from imagebuild.runners.exec import ExecRunner
from imagebuild.selection import Listed
from imagebuild.subject import Subject

EXEC = "exec:"
SLOW_S = 5
"""Seconds from which on a check is reported as it ends, not only in the table at the end."""


@dataclass(frozen=True)
class Wish:
    """What `verify` was asked for."""

    image: str | None
    runner: str = "docker"
    checks: Sequence[str] = ()
    hosts: Sequence[str] = ()
    layout: Path | None = None
    """Files of the image, where the runner cannot read them."""
    pull: bool = False
    output: Path | None = None


@dataclass(frozen=True)
class Work:
    """An image, what runs it, and what is to be said about it."""

    project: Project
    subject: Subject
    runner: Runner
    chosen: Sequence[Listed]
    components: dict[str, str | None]


def verify(project: Project, plan: Plan, wish: Wish) -> VerifyResult:
    """Run checks. Raises ConfigError for an image that cannot be found, CommandError if the runner fails.

    What was found until then is in the evidence folder also if something is raised.
    """
    with prepared(project, plan, wish) as work, evidence(wish.output) as kept:
        progress = _Progress(work, kept)
        try:
            _run(work, kept, progress)
        finally:
            if progress.results:
                kept.write(progress.result())
        return progress.result()


@contextmanager
def prepared(project: Project, plan: Plan, wish: Wish) -> Iterator[Work]:
    """Find the image, and choose the checks. What was loaded for it goes with the context."""
    if wish.runner.startswith(EXEC):
        if wish.pull:
            raise ConfigError("--pull: only the docker runner pulls")
        made = ExecRunner.parse(wish.runner.removeprefix(EXEC), wish.hosts)
        yield _work(project, subject.elsewhere(plan, wish.image, wish.layout), made, wish.checks)
        return
    if wish.runner != "docker":
        raise ConfigError(f"--runner {wish.runner}: is none; use docker, or exec:'PREFIX'")
    if wish.hosts:
        raise ConfigError("--hosts: only with --runner exec:'PREFIX'; the docker runner makes its own nodes")
    if wish.image is None:
        raise ConfigError("which image? Give a tag, a digest, a target's id or an OCI layout")
    client = docker.connect(engine.find(os.environ))
    with _found(client, plan, wish.image, wish) as image:
        yield _work(project, image, DockerRunner(client), wish.checks)


@contextmanager
def _found(client: DockerClient, plan: Plan, image: str, wish: Wish) -> Iterator[Subject]:
    if subject.is_layout(image):
        with subject.loaded(client, Path(image)) as name:
            yield subject.renamed(subject.in_engine(client, plan, name, pull=False), image, Path(image))
    else:
        found = subject.in_engine(client, plan, image, pull=wish.pull)
        yield subject.renamed(found, found.name, wish.layout) if wish.layout else found


def _work(project: Project, image: Subject, runner: Runner, patterns: Sequence[str]) -> Work:
    everything = selection.known(project, static.CHECKS)
    components: dict[str, str | None] = dict(image.components)
    if not components:
        if not patterns:
            raise ConfigError(
                f"{image.name}: nothing says which components it has (labels imagebuild.component.*), it was not built "
                "here; choose checks with --check 'COMPONENT/CHECK', see `imagebuild verify --list`"
            )
        components = dict.fromkeys(project.components)
    unknown = [name for name in components if name not in project.components]
    if unknown:
        raise ConfigError(f"{', '.join(unknown)}: the image says it has it, but no such component is known here")
    offered = selection.of_components(everything, components)
    return Work(project, image, runner, selection.chosen(patterns, offered, everything), components)


def _run(work: Work, kept: Evidence, progress: _Progress) -> None:
    wanted = [entry.name for entry in work.chosen]
    names = [name.partition("/")[2] for name in wanted if name.startswith(f"{selection.IMAGE}/")]
    dynamic = any(entry.check for entry in work.chosen)
    with static.started(work.subject, names, work.runner) as reading:
        if dynamic:
            try:
                with work.runner.session(work.subject.reference or "") as session:
                    progress.surroundings = surroundings(session, work.runner.name, kept)
                    _in_session(work, session, kept, progress.add)
            except Unusable as error:
                for result in checks.skipped(_planned(work, Facilities()), str(error)):
                    progress.add(result)
        for result in reading():
            progress.add(result)


def _in_session(work: Work, session: Session, kept: Evidence, add: Callable[[CheckResult], None]) -> None:
    # One after the other: what runs beside a benchmark changes what it measures.
    for planned in _planned(work, session.facilities):
        add(checks.run(planned, session, kept.log(planned.component, planned.check.name), read, bad))


def _planned(work: Work, have: Facilities) -> list[checks.Planned]:
    wanted = {entry.name for entry in work.chosen}
    every = checks.planned(work.project, work.components, work.subject.axes, have)
    return [planned for planned in every if planned.name in wanted]


class _Progress:
    """Results so far."""

    def __init__(self, work: Work, kept: Evidence) -> None:
        self.work, self.kept = work, kept
        self.results: list[CheckResult] = []
        self.surroundings: Surroundings | None = None
        self.started = datetime.now(UTC).isoformat(timespec="seconds")

    def add(self, result: CheckResult) -> None:
        self.results.append(self.kept.settled(result))
        if result.outcome == "failed" or result.seconds >= SLOW_S:
            err.print(f"{console.MARKS[result.outcome]} {result.component}/{result.check} ({result.seconds:.1f} s)")

    def result(self) -> VerifyResult:
        image = self.work.subject
        return VerifyResult(
            image=image.name,
            digest=image.digest,
            target=image.labels.get("imagebuild.target") or (image.target.id if image.target else None),
            platform=image.platform,
            checks=tuple(sorted(self.results, key=lambda r: r.component != selection.IMAGE)),
            labels=dict(image.labels),
            started=self.started,
            version=__version__,
            surroundings=self.surroundings,
        )


def show(result: VerifyResult) -> None:
    """Print a table of the checks, and the output of those that failed."""
    rows = [(c.component, c.check, console.MARKS[c.outcome], c.reason, f"{c.seconds:.1f} s") for c in result.checks]
    console.table(("component", "check", "outcome", "why", "time"), rows)
    for check in result.checks:
        if check.outcome == "failed":
            out.print(f"\n[bold]{check.component} {check.check}[/]: {escape(check.reason)}")
            out.print(check.output.rstrip() or "(no output)", markup=False)
    out.print(f"{result.image}, {result.platform}: {summary(result.checks)}")


def summary(results: tuple[CheckResult, ...]) -> str:
    """`24 passed, 0 failed, 1 skipped`."""
    count = {outcome: sum(r.outcome == outcome for r in results) for outcome in console.MARKS}
    return ", ".join(f"{number} {outcome}" for outcome, number in count.items())


def listed(project: Project, plan: Plan, image: str | None) -> list[Listed]:
    """The checks that can be chosen, of an image or of all there are."""
    everything = selection.known(project, static.CHECKS)
    if image is None:
        return everything
    target = subject.target_of(plan, image)
    if target:
        components = target.components
    else:
        client = docker.connect(engine.find(os.environ))
        components = subject.in_engine(client, plan, image, pull=False).components
    return selection.of_components(everything, components) if components else everything
