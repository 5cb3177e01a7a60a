"""Choose the checks of an image, run them, and judge what they print."""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from imagebuild.bench import judge, read
from imagebuild.bench.ceilings import forced_classes
from imagebuild.bench.judge import Expected
from imagebuild.bench.models import Results
from imagebuild.bench.profiles import Profile
from imagebuild.core import console
from imagebuild.core.errors import ConfigError, NothingSelected, ResultError, suggestion
from imagebuild.core.fields import axis_facts, matches
from imagebuild.project.component import Check, Facilities, missing_needs, nodes_needed
from imagebuild.project.load import Project, script_of
from imagebuild.project.records import CheckResult, Outcome
from imagebuild.verify.runner import Command, Execution, Session

IMAGE = "image"
"""Stands for a component in the names of checks that read the image without starting it."""
SKIPPED_STATUS = 77
"""Exit status of a check that cannot run here; the last line of its output says why."""
OUTPUT_LIMIT = 20_000
"""Characters at the end of a check's output that are kept in the results."""
ANY_VERSION = r"[0-9][0-9A-Za-z.+:~-]*"
"""Pattern of `{version}` where nothing says which version the image has."""
UNCOMPARED = "any version accepted: the image does not say which it has"
SPEED = "-speed"
"""Follows the name of a check in the name of the result about its speed."""


def components_of(labels: Mapping[str, str]) -> dict[str, str]:
    """Return component → version by the labels of an image."""
    return _labels_with(labels, "imagebuild.component.")


def axes_of(labels: Mapping[str, str]) -> dict[str, str]:
    """Return axis → value of an image's target by its labels."""
    return _labels_with(labels, "imagebuild.axis.")


def _labels_with(labels: Mapping[str, str], prefix: str) -> dict[str, str]:
    return {name.removeprefix(prefix): value for name, value in labels.items() if name.startswith(prefix)}


@dataclass(frozen=True)
class ListedCheck:
    """Describe a check that can be chosen."""

    name: str
    """`COMPONENT/CHECK`"""
    description: str
    check: Check | None
    """None for a check that starts nothing in the image."""


def select_checks(
    project: Project,
    image_checks: Mapping[str, str],
    components: Iterable[str] | None = None,
    patterns: Sequence[str] = (),
) -> list[ListedCheck]:
    """Return the checks that fit one of the globs `COMPONENT/CHECK`, all without a glob: the image's own come first.

    An image has checks of its `components`, by default of all, and `image_checks`: name → what passing proves. A
    component alone as a glob means all of its checks. Raises ConfigError for a glob that fits no check of any image,
    NothingSelected if none fits this one's.
    """
    listed = [ListedCheck(f"{IMAGE}/{name}", text, None) for name, text in image_checks.items()]
    for component, document in project.components.items():
        named = ((f"{component}/{check.name}", check) for check in document.model.checks)
        listed += [ListedCheck(name, check.description, check) for name, check in named]
    owners = {IMAGE, *(project.components if components is None else components)}
    chosen = set()
    for pattern in patterns or ["*/*"]:
        glob = pattern if "/" in pattern else f"{pattern}/*"
        fitting = {entry.name for entry in listed if fnmatchcase(entry.name, glob)}
        if not fitting:
            names = {entry.name for entry in listed}
            if glob.endswith("/*"):
                near = suggestion(glob.removesuffix("/*"), {name.partition("/")[0] for name in names})
            else:
                near = suggestion(glob, names)
            raise ConfigError(f"--only {glob}: no such check{near or '; see `imagebuild verify --list`'}")
        chosen |= {name for name in fitting if name.partition("/")[0] in owners}
    if not chosen:
        raise NothingSelected(f"--only {' '.join(patterns)}: the image has no component with these checks")
    return [entry for entry in listed if entry.name in chosen]


@dataclass(frozen=True)
class PlannedCheck:
    """Hold a check whose script is read, and for which it is decided whether it is skipped."""

    component: str
    version: str | None
    """Version of the component; None if the image does not tell it."""
    check: Check
    script: str
    skip: str
    """Why the check is skipped; empty if it is not."""

    @property
    def name(self) -> str:
        """Return `COMPONENT/CHECK`."""
        return f"{self.component}/{self.check.name}"


def require_known(project: Project, components: Iterable[str]) -> None:
    """Raise ConfigError if the project lacks one of an image's components."""
    unknown = [name for name in components if name not in project.components]
    if unknown:
        raise ConfigError(
            f"{', '.join(unknown)}: a component of the image, but no such component is known here; "
            "verify it in the project that built it"
        )


def planned_checks(
    project: Project, components: Mapping[str, str | None], axes: Mapping[str, str], have: Facilities
) -> list[PlannedCheck]:
    """Return the checks of the components. Raises ConfigError if a component is unknown or a script cannot be read.

    Without axes, as for an image that does not name them, conditions on axes skip nothing.
    """
    require_known(project, components)
    planned = []
    for name, version in components.items():
        for check in project.components[name].model.checks:
            if axes and not matches(check.when, axis_facts(axes)):
                skip = "only for " + ", ".join(f"{axis} {'|'.join(values)}" for axis, values in check.when.items())
            else:
                skip = missing_needs(check.needs, have)
            planned.append(PlannedCheck(name, version, check, script_of(project, name, check), skip))
    return planned


def skipped_result(planned: PlannedCheck, reason: str) -> CheckResult:
    """Return the result of a check that could not begin, for this reason if it has none of its own."""
    return CheckResult(
        component=planned.component, check=planned.check.name, outcome="skipped", reason=planned.skip or reason
    )


def command_of(planned: PlannedCheck, log: Path | None = None, environment: Mapping[str, str] | None = None) -> Command:
    """Return the command of a check; its own variables count more than those of `environment`."""
    check = planned.check
    return Command(
        script=planned.script, user=check.user, timeout_s=check.timeout_s,
        environment={**(environment or {}), **check.environment},
        nodes=nodes_needed(check.needs), ranks=check.ranks, log=log,
    )  # fmt: skip


def run_check(
    planned: PlannedCheck, session: Session, log: Path, environment: Mapping[str, str] | None = None
) -> CheckResult:
    """Run a check with these variables beside its own, or say why it cannot run.

    A failed check is a result; raises CommandError if the runner fails.
    """
    command = command_of(planned, log, environment)
    if obstacle := planned.skip or session.obstacle(command):
        return skipped_result(planned, obstacle)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    hung = 0
    while (execution := session.run(command)).timed_out and hung + 1 < planned.check.attempts:
        hung += 1
    results = None
    outcome: Outcome = "skipped"
    if execution.status == SKIPPED_STATUS and execution.output.strip():
        reason = execution.output.strip().splitlines()[-1]
    else:
        reason = judge_check(planned.check, planned.version, execution, log)
        if tool := planned.check.results:
            results = read_results(log, planned.name)
            if execution.status is not None:
                reason = "; ".join(filter(None, (reason, correctness_problem(results, tool))))
        outcome = "failed" if reason else "passed"
        if not reason and planned.version is None and "{version}" in (planned.check.expect or ""):
            reason = UNCOMPARED
    if hung:
        late = f"{hung + execution.timed_out} of {hung + 1} attempts did not end within {command.timeout_s} s"
        reason = "; ".join(filter(None, ("" if execution.timed_out else reason, late)))
    return CheckResult(
        component=planned.component,
        check=planned.check.name,
        outcome=outcome,
        reason=reason,
        output=console.redacted_text(execution.output[-OUTPUT_LIMIT:]),
        seconds=round(execution.seconds, 3),
        command=execution.argv,
        status=execution.status,
        timeout=execution.timed_out,
        environment=dict(execution.environment),
        started=started,
        results=results,
    )


def judge_check(check: Check, version: str | None, execution: Execution, log: Path | None = None) -> str:
    """Return why a check failed; empty if it passed."""
    if execution.problem:
        return execution.problem
    if execution.timed_out:
        return f"did not end within {check.timeout_s} s"
    if execution.status:
        return f"exit status {execution.status}"
    if check.expect is None:
        return ""
    pattern = check.expect.replace("{version}", re.escape(version) if version is not None else ANY_VERSION)
    as_expected = re.search(pattern, execution.output, re.MULTILINE) is not None
    # What is in memory is only the end of the output.
    if not as_expected and log is not None and log.exists() and log.stat().st_size:
        with log.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
            as_expected = re.search(pattern.encode(), whole, re.MULTILINE) is not None
    return "" if as_expected else f"the output has no {pattern!r}"


def read_results(log: Path, source: str) -> Results:
    """Read what a benchmark printed, as far as it can be read; `source` replaces the log's path in the results."""
    try:
        results = read.read_files([log])
    except ResultError:
        return Results()
    renamed = {
        part: tuple(item.model_copy(update={"source": source}) for item in getattr(results, part))
        for part in ("runs", "tests", "tables", "ucx", "diagnostics")
    }
    sources = tuple(item.model_copy(update={"path": source}) for item in results.sources)
    return results.model_copy(update={**renamed, "sources": sources})


def correctness_problem(results: Results, tool: str) -> str:
    """Return why a benchmark's results are no success; empty if they are."""

    def verdict(item: Any) -> str:
        return "" if item.verdict == "ok" else f"{item.verdict}: {item.reason}"

    # A test that does not fit the machine is waived or skipped; alone it proves nothing.
    items_and_problem: Mapping[str, tuple[Sequence[Any], Callable[[Any], str]]] = {
        "nccl-tests": (results.runs, verdict),
        "perftest": (results.tables, verdict),
        "nvbandwidth": (
            [test for test in results.tests if test.status != "waived"],
            lambda test: "" if test.status == "passed" else f"{test.name or 'a test'}: {test.status}",
        ),
        "ucx_perftest": (results.ucx, lambda line: "" if line.final else "progress only, no final result"),
        "dcgmi": (
            [test for test in results.diagnostics if test.status not in {"skip", "not-run"}],
            lambda test: "" if test.status in {"pass", "warn"} else f"{test.test}: {test.status}",
        ),
    }
    items, problem = items_and_problem[tool]
    if not items:
        return f"no result of {tool} in the output"
    return next(filter(None, map(problem, items)), "")


def judged_speed(
    result: CheckResult, check: Check, profile: Profile, environment: Mapping[str, str], *, one_host: bool = False
) -> Iterator[CheckResult]:
    """Yield a result about the speed of a benchmark beside the one about its data; nothing for other checks.

    With `one_host`, nodes are containers of one host, which no profile describes.
    """
    if not check.results or result.outcome == "skipped":
        return
    speed = CheckResult(component=result.component, check=f"{result.check}{SPEED}", outcome="skipped")
    if result.outcome == "failed" or result.results is None:
        yield speed.model_copy(update={"reason": "its data are not right, so its speed says nothing"})
        return
    nodes = nodes_needed(check.needs)
    if one_host and nodes > 1:
        yield speed.model_copy(update={"reason": "its nodes are containers of one host"})
        return
    settings = {**environment, **check.environment}
    judged = judge.judge_results(result.results, profile, Expected(nodes=nodes, algorithms=forced_classes(settings)))
    # Which GPUs take part is the runner's choice, so fewer than the profile's node has are no failure.
    allowed = ("partial",)
    worst = [(judgement.subject, judgement.worst(allowed)) for judgement in judged]
    failures = [(subject, claim) for subject, claim in worst if claim.standing(allowed) == "failed"]
    passed = [judgement.speed for judgement in judged if judgement.speed.state == "fast enough"]
    outcome: Outcome = "failed" if failures else "passed" if passed else "skipped"
    reason = "nothing in the results is a speed"
    if failures:
        reason = "{0}: {1.state}: {1.reason}".format(*failures[0])
    elif speeds := passed or [judgement.speed for judgement in judged if judgement.speed.reason]:
        reason = speeds[0].reason
    output = "\n".join(f"{j.subject}: {claim.state}: {claim.reason}" for j in judged for claim in j.claims)
    yield speed.model_copy(
        update={"outcome": outcome, "reason": reason, "output": output, "judgements": judged},
    )
