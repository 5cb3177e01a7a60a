"""Verify an image: read its files, run its checks with a runner, and write the evidence (the results and logs)."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

from imagebuild import __version__
from imagebuild.bench.models import Launch, Openness
from imagebuild.bench.profiles import Profile
from imagebuild.bench.verification import CheckResult, Surroundings, VerifyResult
from imagebuild.core import console, files
from imagebuild.core.errors import ConfigError
from imagebuild.core.fields import CPUS, VERSION
from imagebuild.core.patterns import data_of
from imagebuild.oci import engine
from imagebuild.project.plan import Plan
from imagebuild.project.project import Project
from imagebuild.project.revision import current_revision
from imagebuild.verify import checks, subject
from imagebuild.verify.checks import IMAGE, SAME_FILES, ImageCheck
from imagebuild.verify.docker import docker_session, pulled
from imagebuild.verify.inspection import Inspection
from imagebuild.verify.rules import IMAGE_CHECKS, judge_images, read_images
from imagebuild.verify.runner import EXEC, CannotRun, Command, ExecSession, Session, read_prefix
from imagebuild.verify.subject import ImageFinder, Subject

Start = Callable[[], AbstractContextManager[Session]]
"""Function that starts a session, which runs commands in an image."""
REUSE = "--reuse"
VALID = timedelta(days=1)
"""How long `--reuse` trusts a result: settings of the machine that imagebuild does not see may change."""
NO_FILES = (
    "the runner exec:PREFIX cannot read the image's files; as IMAGE, write NAME@DIGEST, an OCI layout, "
    "or a target that was built with --push or --output"
)


@dataclass(frozen=True)
class VerifyRequest:
    """The options of `imagebuild verify`."""

    image: str | None
    runner: str
    checks: Sequence[str]
    hosts: Sequence[str]
    pull: bool
    folder: Path
    output: Path | None
    environment: Mapping[str, str]
    profile: Profile | None
    launch: Launch | None = None
    """What the user said about benchmarks: numbers of nodes, GPUs of each node, and NVLink domains."""
    allowed: tuple[Openness, ...] = ()
    earlier: VerifyResult | None = None
    """An earlier result. What it proves is not repeated."""


def verify_image(project: Project, plan: Plan, request: VerifyRequest) -> VerifyResult:
    """Run the checks of an image, and return the results.

    The project provides the checks; the image may be from elsewhere. Raises ConfigError if the image cannot be found,
    CommandError if the runner fails. If the runner fails, the evidence folder contains the results so far."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="imagebuild-verify-")))
        files.refuse_links(request.output.glob("*") if request.output else ())
        image, start = find_image(plan, request, folder, stack)
        components = components_to_check(project, plan, image, request)
        chosen = checks.select_checks(project, IMAGE_CHECKS, components, request.checks, image.axes)
        planned = [check for check in chosen if check.check]
        rules = {check.name: check for check in chosen if not check.check}
        evidence = ResultFolder(
            image,
            request.output or folder / "evidence",
            request.output is not None,
            current_revision(project.root),
            profile=request.profile.name if request.profile else None,
            allowed=request.allowed,
            options=options_of(request),
            order={check.component: number for number, check in enumerate(planned)},
        )
        try:
            are_needed = rules or request.runner != "docker"
            inspections = read_images(image.found, project, plan) if image.found and are_needed else []

            def judge() -> None:
                with console.doing(f"{image.name}: judging its files"):
                    judged = list(judge_images(inspections))
                judged = judged or [checks.skipped_result(check, NO_FILES) for check in rules.values()]
                # If an image is for several platforms, the names of checks end with the platform.
                evidence.add(*(result for result in judged if result.check.partition(" ")[0] in rules))

            with threads(1) as pool:
                judging = pool.submit(judge)
                if planned:
                    run_commands(start, planned, request, evidence, inspections, other_work=judging)
                judging.result()
        finally:
            evidence.write()
        return evidence.result()


def options_of(request: VerifyRequest) -> tuple[str, ...]:
    """Return the options that can change which checks run, or their outcome, without values that may be private."""
    kept, profile = console.kept_environment(request.environment), request.profile
    told = request.launch.model_dump(include={"nodes", "gpus", "domains"}, exclude_none=True) if request.launch else {}
    variables = (f"--env {name}={kept.get(name, console.BLANK)}" for name in request.environment)
    named = [f"--profile {profile.stamp}"] if profile else []
    allowed = (f"--allow {claim}" for claim in request.allowed)
    hardware = (f"--{name} {number}" for name, number in told.items())
    hosts = [f"--hosts {console.BLANK}"] if request.hosts else []
    return (*variables, *allowed, *(f"--only {pattern}" for pattern in request.checks), *named, *hardware, *hosts)


def run_commands(
    start: Start, planned: Sequence[ImageCheck], request: VerifyRequest, evidence: ResultFolder,
    inspections: Sequence[Inspection], *, other_work: Future[Any],
) -> None:  # fmt: skip
    """Run checks: first as many at a time as the session has lanes; then one at a time those that need the machine for
    themselves, such as benchmarks. Those also wait for other work of this process.

    With the runner `exec:PREFIX`, first check that commands run in the same image whose files were read."""
    try:
        with start() as session:
            evidence.surroundings = session.surroundings = observe_surroundings(session, evidence)
            if not session.starts_image:
                wait([other_work])
                proof = CheckResult(component=IMAGE, check=SAME_FILES, outcome="skipped", reason=NO_FILES)
                if inspections:
                    read = inspections[0]
                    log, trees = evidence.log(IMAGE, SAME_FILES), [f"opt/{name}" for name in read.tree.names("opt")]
                    proof = checks.compare_files(session, read.tree, read.searched, trees, read.image.digest, log=log)
                evidence.add(proof)
                if proof.outcome == "failed":
                    raise CannotRun(f"the runner runs commands in another image: see the check {IMAGE}/{SAME_FILES}")

            kept = still_valid(request.earlier, evidence, planned) if request.earlier else {}
            if kept:
                evidence.options = (*evidence.options, REUSE)

            def run(check: ImageCheck) -> CheckResult:
                if same := kept.get(str(check)):
                    return same
                log = evidence.log(check.component, check.name)
                with console.doing(str(check)):
                    return checks.run_check(check, session, log, request.environment, request.launch)

            alone = [check for check in planned if check.runs_alone or session.lanes == 1]
            # Checks with most nodes are first, as they wait until all nodes are idle.
            others = sorted((check for check in planned if check not in alone), key=lambda check: -check.nodes)
            session.most_nodes = max((check.nodes for check in others), default=1)
            with threads(session.lanes) as pool, threads(session.node_lanes) as node_pool:
                running = [(node_pool if check.nodes > 1 else pool).submit(run, check) for check in others]
                evidence.add(*(future.result() for future in running))
            wait([other_work])
            for check in alone:
                evidence.add(result := run(check))
                if request.profile and check.check:
                    speed = checks.judged_speed(result, check.check, request.profile, request.allowed)
                    evidence.add(*([speed] if speed else []))
    except CannotRun as error:
        evidence.add(*(checks.skipped_result(check, str(error)) for check in planned))


def still_valid(earlier: VerifyResult, now: ResultFolder, planned: Sequence[ImageCheck]) -> dict[str, CheckResult]:
    """Map names of planned checks to the results that another run would only repeat.

    The check, the image, the commit of the project, the version of imagebuild and the machine have to be the same, and
    all files committed: a project without a commit could bring a result. Results with other options than `--only`, such
    as `--env` or `--nodes`, never count."""
    same = (
        now.image.digest is not None
        and not (now.revision or "-dirty").endswith("-dirty")
        and (earlier.digest, earlier.revision, earlier.version) == (now.image.digest, now.revision, __version__)
        and earlier.surroundings == now.surroundings
        and all(option.startswith((REUSE, "--only ")) for option in (*earlier.options, *now.options))
    )
    hashes = {str(check): checks.sha256_of(check) for check in planned}
    latest, found = datetime.now(UTC), dict[str, CheckResult]()
    for result in earlier.checks if same else ():
        began = datetime.fromisoformat(result.started) if result.started else None
        passed = result.outcome == "passed" and result.sha256 == hashes.get(result.name)
        if passed and began and latest - VALID <= began <= latest:
            reason = f"passed at {result.started}; not repeated"
            found[result.name] = result.model_copy(update={"reason": reason, "seconds": 0.0})
    return found


@contextmanager
def threads(number: int) -> Iterator[ThreadPoolExecutor]:
    """Yield a pool of threads, which does not wait for running commands after an error: they end with their session."""
    pool = ThreadPoolExecutor(number)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def find_image(plan: Plan, request: VerifyRequest, folder: Path, stack: ExitStack) -> tuple[Subject, Start]:
    """Return the image, and a function that starts a session in the image.

    Fetched files of the image are below `folder`. A pulled image is removed when the stack closes. Raises ConfigError
    if options contradict each other or the image cannot be found."""
    finder = ImageFinder(plan, request.folder)
    if request.runner.startswith(EXEC):
        if request.pull:
            raise ConfigError("--pull: only the docker runner can pull an image; leave the option out")
        # The session starts only after the options are checked, as it may take long.
        session = cache(partial(ExecSession, read_prefix(request.runner.removeprefix(EXEC)), request.hosts))
        platform = lambda: platform_of(session().surroundings)  # noqa: E731
        return subject.subject_elsewhere(finder, request.image, folder, platform), lambda: nullcontext(session())
    if request.runner != "docker":
        raise ConfigError(f"--runner {request.runner}: unknown runner; use docker or exec:PREFIX")
    if request.hosts:
        raise ConfigError("--hosts: the docker runner starts nodes itself; remove --hosts, or use --runner exec:PREFIX")
    if not request.image:
        raise ConfigError("IMAGE: the name is missing; name a tag, a digest, a target's id or an OCI layout")
    if subject.path_of_image(request.image):
        image = subject.subject_elsewhere(finder, request.image, folder)
        return image, partial(docker_session, None, None, image.found)
    client = engine.connect_engine(engine.find_engine())
    if request.pull and not subject.target_with_id(plan, request.image):
        stack.enter_context(pulled(client, request.image))
    engine.remove_leftovers(client)
    image = subject.subject_in_engine(client, plan, request.image, folder)
    return image, partial(docker_session, client, image.reference, image.found)


def components_to_check(
    project: Project, plan: Plan, image: Subject, request: VerifyRequest
) -> Mapping[str, str | None]:
    """Return the components whose checks run, each with its version in the image.

    If the image's labels name no components, return none, or, if the request chooses checks, all components of the
    project, without versions. None are needed for checks of the image's files alone. Raises ConfigError if the labels
    are not known and the request chooses no checks, or if the project lacks a component of the image."""
    if request.checks and all(re.match(f"{IMAGE}(/|$)", pattern) for pattern in request.checks):
        return {}
    if unknown := ", ".join(name for name in image.components if name not in project.components):
        raise ConfigError(
            f"{unknown}: the image has this component, but the project does not; "
            "run the command in the project that built the image, or check only its files with `--only image`"
        )
    if image.components:
        return image.components
    if not request.checks:
        subject.refuse_misspelled(plan, image.name)
        if image.found:
            console.err.print(
                f"{image.name} has no labels imagebuild.component.*, so only the rules of its files are checked"
            )
            return {}
        raise ConfigError(
            f"{image.name}: a tag may have moved since the container was started, so its labels are not read; "
            "name a target or a digest (NAME@sha256:…), "
            "or choose checks with --only 'COMPONENT/CHECK' (`imagebuild verify --list` lists them)"
        )
    return dict.fromkeys(project.components)


REPORT_TIMEOUT_S = 60
REPORTS: Mapping[str, str] = data_of(__file__)
"""Maps each file of the evidence folder, without `.txt`, to the script that prints its content."""


def observe_surroundings(session: Session, evidence: ResultFolder) -> Surroundings:
    """Return the surroundings of checks (GPUs, RDMA, nodes, Slurm), with the environment variables of commands.
    If the evidence folder is kept, also write the output of the scripts in REPORTS to this folder."""
    place = session.surroundings
    command = Command("cat /proc/self/environ", user=place.user, timeout_s=REPORT_TIMEOUT_S)
    if session.obstacle(command):
        return place
    variables = dict(v.split("=", 1) for v in session.run(command).output.split("\0") if re.match(r"\w+=", v))
    reports = {}
    for name, script in REPORTS.items() if evidence.kept else ():
        path = evidence.folder / f"{name}.txt"
        printed = session.run(Command(script, user=place.user, timeout_s=REPORT_TIMEOUT_S, log=path))
        if printed.status == 0 and printed.output.strip():
            reports[script] = path.name
        else:
            path.unlink(missing_ok=True)
    return place.model_copy(update={"environment": console.kept_environment(variables), "reports": reports})


def platform_of(place: Surroundings | None) -> str:
    """Return the platform of the place where checks run, such as `linux/amd64`; `unknown` if it is not known."""
    machine = place.facts.get("machine") if place else None
    return next((f"linux/{arch}" for arch, cpu in CPUS.items() if cpu == machine), "unknown")


SLOW_S = 5
"""Minimum duration in seconds of a passed check that is printed when the check ends. Faster checks are only in the
final table."""


@dataclass
class ResultFolder:
    """The results of a verification, with the logs of checks in a folder."""

    image: Subject
    folder: Path
    kept: bool
    """Whether the folder is kept after the verification."""
    revision: str | None
    profile: str | None = None
    allowed: tuple[Openness, ...] = ()
    options: tuple[str, ...] = ()
    order: Mapping[str, int] = field(default_factory=dict)
    """Maps components to numbers by which the results are sorted. Checks of the image's files are first."""
    results: list[CheckResult] = field(default_factory=list)
    surroundings: Surroundings | None = None
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def log(self, component: str, check: str) -> Path:
        """Return the path of the file for the complete output of a check."""
        # The name of a check may end with a platform: `labels linux/arm64`.
        name = re.sub(r"[^\w.-]+", "-", check)
        return self.folder / f"{component}.{name}.log"

    def add(self, *results: CheckResult) -> None:
        """Add results with the names of their logs, and print a line for each failed or slow check."""
        for result in results:
            path = self.log(result.component, result.check)
            if result.output and not path.exists():
                files.write_text(path, result.output)
            kept = self.kept and path.exists()
            self.results.append(result.model_copy(update={"log": path.name}) if kept else result)
            if result.outcome == "failed" or result.seconds >= SLOW_S:
                took = f" {result.name} ({result.seconds:.1f} s)"
                console.err.print(console.styled(console.MARKS[result.outcome], took))

    def write(self) -> None:
        """Write the results so far to the folder; do nothing if there are none."""
        if self.results:
            files.write_text(self.folder / "verify.json", self.result().model_dump_json(indent=1) + "\n")

    def result(self) -> VerifyResult:
        """Return the results so far, with the checks of the image's files first."""
        image = self.image
        label = image.labels.get("imagebuild.target", "")  # perhaps of a foreign image
        return VerifyResult(
            image=image.name,
            digest=image.digest,
            target=label if VERSION.fits(label) else image.target.id if image.target else None,
            platform=", ".join(image.found.platforms) if image.found else platform_of(self.surroundings),
            checks=tuple(sorted(self.results, key=lambda result: self.order.get(result.component, -1))),
            labels=dict(image.labels),
            started=self.started,
            version=__version__,
            revision=self.revision,
            surroundings=self.surroundings,
            profile=self.profile,
            allowed=self.allowed,
            options=self.options,
        )
