"""Run the checks of an image, wherever a runner can run them, and keep the evidence."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from rich.markup import escape

from imagebuild import __version__
from imagebuild.bench.profiles import Profile
from imagebuild.core import console, files
from imagebuild.core.console import err, out
from imagebuild.core.errors import CommandError, ConfigError
from imagebuild.oci import engine
from imagebuild.project.component import Facilities, Need
from imagebuild.project.load import Project
from imagebuild.project.matrix import Plan
from imagebuild.project.plan import Pins
from imagebuild.project.records import CheckResult, Surroundings, VerifyResult
from imagebuild.verify import checks, subject
from imagebuild.verify.checks import ListedCheck
from imagebuild.verify.docker import DockerRunner
from imagebuild.verify.prefix import ExecRunner
from imagebuild.verify.rules import RULES, inspect
from imagebuild.verify.runner import Command, NoRunner, Runner, Session, Unusable
from imagebuild.verify.subject import Subject

RESULTS = "verify.json"
REPORT_TIMEOUT_S = 60
GPU, RDMA = Need("gpus"), Need("rdma")
REPORTS: dict[str, tuple[str, Need | None]] = {
    "os-release": ("cat /etc/os-release", None),
    "processors": ("lscpu", None),
    "gpus": ("nvidia-smi -q", GPU),
    "topology": ("nvidia-smi topo -m", GPU),
    "nvlink": ("nvidia-smi nvlink --status", GPU),
    "rdma": ("ibv_devinfo -v || rdma link show", RDMA),
}
"""File in the evidence folder → what prints it, and what must be there for it."""
ENVIRONMENT = "cat /proc/self/environ"


@dataclass(frozen=True)
class EvidenceFolder:
    """A folder for logs and results."""

    folder: Path
    kept: bool
    """Whether anybody will look into it afterwards."""

    def log(self, component: str, check: str) -> Path:
        # Checks of images for several platforms are called `labels linux/arm64`.
        name = re.sub(r"[^\w.-]+", "-", check)
        return self.folder / f"{component}.{name}.log"

    def settled(self, result: CheckResult) -> CheckResult:
        """The result with the name of its log, which is deleted if nobody wants it."""
        path = self.log(result.component, result.check)
        if not self.kept:
            path.unlink(missing_ok=True)
            return result
        if not path.exists() and result.output:
            files.write_text(path, result.output)
        return result.model_copy(update={"log": path.name}) if path.exists() else result

    def write(self, result: VerifyResult) -> None:
        if self.kept:
            files.write_text(self.folder / RESULTS, result.model_dump_json(indent=1) + "\n")


@contextmanager
def evidence(folder: Path | None) -> Iterator[EvidenceFolder]:
    """Evidence in a folder, or in a temporary one that goes with the context."""
    if folder:
        yield EvidenceFolder(folder, kept=True)
        return
    with tempfile.TemporaryDirectory(prefix="imagebuild-verify-") as temporary:
        yield EvidenceFolder(Path(temporary), kept=False)


def surroundings(session: Session, runner: str, kept: EvidenceFolder) -> Surroundings:
    """What the place is like; with a folder to keep it, also what programs say about it."""
    place, have = session.place, session.facilities
    made = Surroundings(
        runner=runner, gpus=have.gpus, rdma=have.rdma, nodes=have.nodes, slurm=have.slurm, why=dict(have.why),
        user=place.user, facts=dict(place.facts),
    )  # fmt: skip
    asked = Command(ENVIRONMENT, user=place.user, timeout_s=REPORT_TIMEOUT_S)
    if session.obstacle(asked):
        return made
    variables = dict(v.split("=", 1) for v in session.run(asked).output.split("\0") if "=" in v)
    variables = {name: value for name, value in variables.items() if re.match(r"\w+$", name)}
    variables.pop("IMAGEBUILD_RUN", None)
    reports = {}
    for name, (script, need) in REPORTS.items() if kept.kept else ():
        if need and need.missing(have):
            continue
        path = kept.folder / f"{name}.txt"
        if session.run(Command(script, user=place.user, timeout_s=REPORT_TIMEOUT_S, log=path)).status == 0:
            reports[script] = path.name
        else:
            path.unlink(missing_ok=True)
    return made.model_copy(update={"environment": console.redacted_environment(variables), "reports": reports})


CHECKS = {
    "readable": "Every layer can be read",
    **{rule.name: rule.description for rule in RULES},
    "waivers": "All exceptions that the components and the matrix declare are needed",
}
UNREADABLE = "not through this runner; give an OCI layout of the image with --layout"


@contextmanager
def started(
    image: Subject, names: Sequence[str], runner: Runner, inspect: Callable[..., tuple[CheckResult, ...]]
) -> Iterator[Callable[[], list[CheckResult]]]:
    """Begin to read the image with `inspection.inspect`; what is yielded waits for the results."""

    def read() -> list[CheckResult]:
        if image.layout:
            found = inspect(image.layout)
        elif isinstance(runner, DockerRunner) and image.reference:
            found = inspect(engine.save_image(runner.client, image.reference), platform=image.platform)
        else:
            return [CheckResult(component="image", check=n, outcome="skipped", reason=UNREADABLE) for n in names]
        # Of an image for several platforms, results have the platform after their name.
        return [result for result in found if result.check.partition(" ")[0] in names]

    if not names:
        yield list
        return
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        yield reading.result


EXEC = "exec:"
PLATFORMS = {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}
SLOW_S = 5
"""Seconds from which on a check is reported as it ends, not only in the table at the end."""


@dataclass(frozen=True)
class VerifyRequest:
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
class Verification:
    """An image, what runs it, and what is to be said about it."""

    project: Project
    plan: Plan
    versions: Pins
    """With which the plan was made."""
    subject: Subject
    runner: Runner
    chosen: Sequence[ListedCheck]
    components: Mapping[str, str | None]
    environment: Mapping[str, str]
    profile: Profile | None


def verify_image(project: Project, plan: Plan, versions: Pins, wish: VerifyRequest) -> VerifyResult:
    """Run checks. Raises ConfigError for an image that cannot be found, CommandError if the runner fails.

    What was found until then is in the evidence folder also if something is raised.
    """
    work = prepare(project, plan, versions, wish)
    with evidence(wish.output) as kept:
        progress = _Progress(work, kept)
        try:
            _run(work, kept, progress)
        finally:
            if progress.results:
                kept.write(progress.result())
        return progress.result()


def prepare(project: Project, plan: Plan, versions: Pins, wish: VerifyRequest) -> Verification:
    """Find the image, and choose the checks."""
    image, runner = _exec(plan, wish) if wish.runner.startswith(EXEC) else _docker(plan, wish)
    everything = checks.known_checks(project, CHECKS)
    components: Mapping[str, str | None] = dict(image.components)
    if not components:
        if not wish.checks:
            raise ConfigError(
                f"{image.name}: nothing says which components it has (labels imagebuild.component.*), it was not built "
                "here; choose checks with --only 'COMPONENT/CHECK', see `imagebuild verify --list`"
            )
        components = dict.fromkeys(project.components)
    unknown = [name for name in components if name not in project.components]
    if unknown:
        raise ConfigError(f"{', '.join(unknown)}: the image says it has it, but no such component is known here")
    offered = checks.checks_of_components(everything, components)
    chosen = checks.chosen_checks(wish.checks, offered, everything)
    return Verification(project, plan, versions, image, runner, chosen, components, wish.environment, wish.profile)


def _exec(plan: Plan, wish: VerifyRequest) -> tuple[Subject, Runner]:
    if wish.pull:
        raise ConfigError("--pull: only the docker runner pulls")
    path = wish.layout or (subject.saved_at(wish.image) if wish.image else None)
    return subject.elsewhere(plan, wish.image, path), ExecRunner.parse(wish.runner.removeprefix(EXEC), wish.hosts)


def _docker(plan: Plan, wish: VerifyRequest) -> tuple[Subject, Runner]:
    if wish.runner != "docker":
        raise ConfigError(f"--runner {wish.runner}: is none; use docker, or exec:'PREFIX'")
    if wish.hosts:
        raise ConfigError("--hosts: only with --runner exec:'PREFIX'; the docker runner makes its own nodes")
    if wish.image is None:
        raise ConfigError("which image? Give a tag, a digest, a target's id or an OCI layout")
    path = subject.saved_at(wish.image)
    if path is None:
        client = engine.connect_engine(engine.find_engine(os.environ))
        found = subject.in_engine(client, plan, wish.image, pull=wish.pull)
        return replace(found, layout=wish.layout), DockerRunner(client)
    image = subject.saved(path)
    if not path.is_dir():
        return image, NoRunner("an archive is only read; unpack it into a folder, and its image can be started")
    try:
        return image, DockerRunner(engine.connect_engine(engine.find_engine(os.environ)))
    except CommandError as error:
        return image, NoRunner(str(error))


def _run(work: Verification, kept: EvidenceFolder, progress: _Progress) -> None:
    wanted = [entry.name.partition("/") for entry in work.chosen]
    names = [name for component, _, name in wanted if component == checks.IMAGE]
    inspected = partial(inspect, project=work.project, plan=work.plan, versions=work.versions)
    with started(work.subject, names, work.runner, inspected) as reading:
        if any(entry.check for entry in work.chosen):
            try:
                with _startable(work) as reference, work.runner.session(reference) as session:
                    progress.surroundings = surroundings(session, work.runner.name, kept)
                    _in_session(work, session, kept, progress)
            except Unusable as error:
                for result in checks.skipped_results(_planned(work, Facilities()), str(error)):
                    progress.add(result)
        for result in reading():
            progress.add(result)


def _startable(work: Verification) -> AbstractContextManager[str]:
    """What the runner knows the image by, while the context lasts."""
    if work.subject.layout and not work.subject.reference and isinstance(work.runner, DockerRunner):
        return subject.loaded(work.runner.client, work.subject.layout)
    return nullcontext(work.subject.reference or "")


def _in_session(work: Verification, session: Session, kept: EvidenceFolder, progress: _Progress) -> None:
    # One after the other: what runs beside a benchmark changes what it measures.
    environment = {**(progress.surroundings.environment if progress.surroundings else {}), **work.environment}
    for planned in _planned(work, session.facilities):
        log = kept.log(planned.component, planned.check.name)
        result = checks.run_check(planned, session, log, work.environment)
        progress.add(result)
        if work.profile:
            for judged in checks.judged_speed(
                result, planned.check, work.profile, environment, one_host=isinstance(work.runner, DockerRunner)
            ):
                progress.add(judged)


def _planned(work: Verification, have: Facilities) -> list[checks.PlannedCheck]:
    wanted = {entry.name for entry in work.chosen}
    every = checks.planned_checks(work.project, work.components, work.subject.axes, have)
    return [planned for planned in every if planned.name in wanted]


class _Progress:
    """Results so far."""

    def __init__(self, work: Verification, kept: EvidenceFolder) -> None:
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
            checks=tuple(sorted(self.results, key=lambda r: r.component != checks.IMAGE)),
            labels=dict(image.labels),
            started=self.started,
            version=__version__,
            surroundings=self.surroundings,
        )


def print_results(result: VerifyResult) -> None:
    """Print a table of the checks, and the output of those that failed."""
    rows = [(c.component, c.check, console.MARKS[c.outcome], c.reason, f"{c.seconds:.1f} s") for c in result.checks]
    console.print_table(("component", "check", "outcome", "why", "time"), rows)
    for check in result.checks:
        if check.outcome == "failed":
            out.print(f"\n[bold]{check.component} {check.check}[/]: {escape(check.reason)}")
            out.print(check.output.rstrip() or "(no output)", markup=False)
    out.print(f"{result.image}, {result.platform}: {summary(result.checks)}")


def summary(results: tuple[CheckResult, ...]) -> str:
    """`24 passed, 0 failed, 1 skipped`."""
    count = {outcome: sum(r.outcome == outcome for r in results) for outcome in console.MARKS}
    return ", ".join(f"{number} {outcome}" for outcome, number in count.items())


def list_checks(project: Project, plan: Plan, image: str | None) -> list[ListedCheck]:
    """The checks that can be chosen, of an image or of all there are."""
    everything = checks.known_checks(project, CHECKS)
    if image is None:
        return everything
    target, path = subject.target_of(plan, image), subject.saved_at(image)
    if target:
        components = target.components
    elif path:
        components = subject.saved(path).components
    else:
        client = engine.connect_engine(engine.find_engine(os.environ))
        components = subject.in_engine(client, plan, image, pull=False).components
    return checks.checks_of_components(everything, components) if components else everything
