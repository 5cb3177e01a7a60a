"""`imagebuild verify`: the checks of an image, wherever a runner can run them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from rich.markup import escape

from imagebuild import __version__, checks, console, docker, engine, measured, selection, static, subject
from imagebuild.config import Project
from imagebuild.console import err, out
from imagebuild.errors import CommandError, ConfigError
from imagebuild.evidence import Evidence, evidence, surroundings
from imagebuild.models import Plan
from imagebuild.needs import Facilities
from imagebuild.profiles import Profile
from imagebuild.records import CheckResult, Surroundings, VerifyResult
from imagebuild.runners.base import NoRunner, Runner, Session, Unusable
from imagebuild.runners.docker import DockerRunner
from imagebuild.runners.exec import ExecRunner
from imagebuild.selection import Listed
from imagebuild.subject import Subject

EXEC = "exec:"
PLATFORMS = {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}
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
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables for all checks."""
    profile: Profile | None = None
    """Hardware that the speed of benchmarks is judged by."""


@dataclass(frozen=True)
class Work:
    """An image, what runs it, and what is to be said about it."""

    project: Project
    plan: Plan
    subject: Subject
    runner: Runner
    chosen: Sequence[Listed]
    components: Mapping[str, str | None]
    environment: Mapping[str, str]
    profile: Profile | None


def verify(project: Project, plan: Plan, wish: Wish) -> VerifyResult:
    """Run checks. Raises ConfigError for an image that cannot be found, CommandError if the runner fails.

    What was found until then is in the evidence folder also if something is raised.
    """
    work = prepared(project, plan, wish)
    with evidence(wish.output) as kept:
        progress = _Progress(work, kept)
        try:
            _run(work, kept, progress)
        finally:
            if progress.results:
                kept.write(progress.result())
        return progress.result()


def prepared(project: Project, plan: Plan, wish: Wish) -> Work:
    """Find the image, and choose the checks."""
    image, runner = _exec(plan, wish) if wish.runner.startswith(EXEC) else _docker(plan, wish)
    everything = selection.known(project, static.CHECKS)
    components: Mapping[str, str | None] = dict(image.components)
    if not components:
        if not wish.checks:
            raise ConfigError(
                f"{image.name}: nothing says which components it has (labels imagebuild.component.*), it was not built "
                "here; choose checks with --check 'COMPONENT/CHECK', see `imagebuild verify --list`"
            )
        components = dict.fromkeys(project.components)
    unknown = [name for name in components if name not in project.components]
    if unknown:
        raise ConfigError(f"{', '.join(unknown)}: the image says it has it, but no such component is known here")
    offered = selection.of_components(everything, components)
    chosen = selection.chosen(wish.checks, offered, everything)
    return Work(project, plan, image, runner, chosen, components, wish.environment, wish.profile)


def _exec(plan: Plan, wish: Wish) -> tuple[Subject, Runner]:
    if wish.pull:
        raise ConfigError("--pull: only the docker runner pulls")
    path = wish.layout or (subject.saved_at(wish.image) if wish.image else None)
    return subject.elsewhere(plan, wish.image, path), ExecRunner.parse(wish.runner.removeprefix(EXEC), wish.hosts)


def _docker(plan: Plan, wish: Wish) -> tuple[Subject, Runner]:
    if wish.runner != "docker":
        raise ConfigError(f"--runner {wish.runner}: is none; use docker, or exec:'PREFIX'")
    if wish.hosts:
        raise ConfigError("--hosts: only with --runner exec:'PREFIX'; the docker runner makes its own nodes")
    if wish.image is None:
        raise ConfigError("which image? Give a tag, a digest, a target's id or an OCI layout")
    path = subject.saved_at(wish.image)
    if path is None:
        client = docker.connect(engine.find(os.environ))
        found = subject.in_engine(client, plan, wish.image, pull=wish.pull)
        return replace(found, layout=wish.layout), DockerRunner(client)
    image = subject.saved(path)
    if not path.is_dir():
        return image, NoRunner("an archive is only read; unpack it into a folder, and its image can be started")
    try:
        return image, DockerRunner(docker.connect(engine.find(os.environ)))
    except CommandError as error:
        return image, NoRunner(str(error))


def _run(work: Work, kept: Evidence, progress: _Progress) -> None:
    wanted = [entry.name.partition("/") for entry in work.chosen]
    names = [name for component, _, name in wanted if component == selection.IMAGE]
    with static.started(work.subject, names, work.runner, work.project, work.plan) as reading:
        if any(entry.check for entry in work.chosen):
            try:
                with _startable(work) as reference, work.runner.session(reference) as session:
                    progress.surroundings = surroundings(session, work.runner.name, kept)
                    _in_session(work, session, kept, progress)
            except Unusable as error:
                for result in checks.skipped(_planned(work, Facilities()), str(error)):
                    progress.add(result)
        for result in reading():
            progress.add(result)


def _startable(work: Work) -> AbstractContextManager[str]:
    """What the runner knows the image by, while the context lasts."""
    if work.subject.layout and not work.subject.reference and isinstance(work.runner, DockerRunner):
        return subject.loaded(work.runner.client, work.subject.layout)
    return nullcontext(work.subject.reference or "")


def _in_session(work: Work, session: Session, kept: Evidence, progress: _Progress) -> None:
    # One after the other: what runs beside a benchmark changes what it measures.
    environment = {**(progress.surroundings.environment if progress.surroundings else {}), **work.environment}
    for planned in _planned(work, session.facilities):
        log = kept.log(planned.component, planned.check.name)
        result = checks.run(planned, session, log, work.environment)
        progress.add(result)
        if work.profile:
            for judged in measured.speed(result, planned.check, work.profile, environment):
                progress.add(judged)


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
        machine = self.surroundings.facts.get("machine", "") if self.surroundings else ""
        return VerifyResult(
            image=image.name,
            digest=image.digest,
            target=image.labels.get("imagebuild.target") or (image.target.id if image.target else None),
            platform=image.platform or PLATFORMS.get(machine, "unknown"),
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
    target, path = subject.target_of(plan, image), subject.saved_at(image)
    if target:
        components = target.components
    elif path:
        components = subject.saved(path).components
    else:
        client = docker.connect(engine.find(os.environ))
        components = subject.in_engine(client, plan, image, pull=False).components
    return selection.of_components(everything, components) if components else everything
