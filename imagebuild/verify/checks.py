"""Choose the checks of an image, run them, and judge what they print."""

from __future__ import annotations

import hashlib
import json
import mmap
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path

from imagebuild.bench import judge, read
from imagebuild.bench.ceilings import forced_classes
from imagebuild.bench.judge import Expected
from imagebuild.bench.models import Diagnostic, Measurement, Results
from imagebuild.bench.profiles import Profile
from imagebuild.core import console
from imagebuild.core.errors import ConfigError, NothingSelected, suggestion
from imagebuild.core.fields import axis_facts, matches
from imagebuild.project.component import Check, missing_needs, nodes_needed
from imagebuild.project.load import script_of
from imagebuild.project.plan import Project
from imagebuild.project.records import SPEED, CheckResult, Outcome
from imagebuild.verify.runner import Command, Execution, Session

IMAGE = "image"
"""Stands for a component in the names of checks that read the image without starting it."""
SAME_FILES = "same-files"
"""Check of the image that says whether a prefix leads to it."""
SKIPPED_STATUS = 77
"""Exit status of a check that cannot run here; the last line of its output says why."""
OUTPUT_LIMIT = 20_000
"""Characters at the end of a check's output that are kept in the results."""
ANY_VERSION = r"[0-9][0-9A-Za-z.+:~-]*"
"""Pattern of `{version}` where nothing says which version the image has."""
UNCOMPARED = "any version accepted: the image does not say which it has"


@dataclass(frozen=True)
class ListedCheck:
    """Describe a check that can be chosen."""

    component: str
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
    """Return the checks that fit a glob `COMPONENT/CHECK`, or all if there are no globs; the image's own come first.

    An image has checks of its `components`, by default of all, and `image_checks`: name → what passing proves. A
    component alone as a glob means all of its checks. Raises ConfigError for a glob that fits no check of any image,
    NothingSelected if none fits this one's.
    """
    listed = [ListedCheck(IMAGE, f"{IMAGE}/{name}", text, None) for name, text in image_checks.items()]
    for component, document in project.components.items():
        checks = document.model.checks
        listed += [ListedCheck(component, f"{component}/{check.name}", check.description, check) for check in checks]
    owners = {IMAGE, *(project.components if components is None else components)}
    chosen = set()
    for pattern in patterns or ["*/*"]:
        glob = pattern if "/" in pattern else f"{pattern}/*"
        fitting = {entry.name for entry in listed if fnmatchcase(entry.name, glob)}
        if not fitting:
            component = glob.removesuffix("/*")
            near = suggestion(component, {entry.component if glob != component else entry.name for entry in listed})
            hint = near if "did you mean" in near else "; see `imagebuild verify --list`"
            raise ConfigError(f"--only {pattern}: no such check{hint}")
        chosen |= fitting
    selected = [entry for entry in listed if entry.name in chosen and entry.component in owners]
    if not selected:
        raise NothingSelected(
            f"--only {' '.join(patterns)}: the image has no component with these checks; `imagebuild verify --list "
            "IMAGE` lists its checks"
        )
    return selected


@dataclass(frozen=True)
class PlannedCheck:
    """Hold a check of a component whose script is read."""

    component: str
    version: str | None
    """Version of the component; None if the image does not say it."""
    check: Check
    script: str
    unfit: str = ""
    """Why it is not for an image with these axes; empty if it is."""

    @property
    def name(self) -> str:
        """Return `COMPONENT/CHECK`."""
        return f"{self.component}/{self.check.name}"

    @property
    def sha256(self) -> str:
        """Return the hash of the check."""
        return hash_of_check(self.check, self.script)


def plan_checks(
    project: Project, chosen: Iterable[ListedCheck], components: Mapping[str, str | None], axes: Mapping[str, str]
) -> list[PlannedCheck]:
    """Return the chosen checks that start something in an image, for its components and axes.

    Without axes, as for an image that does not name them, conditions on axes skip nothing. Raises ConfigError if a
    script cannot be read.
    """
    planned = []
    for entry in chosen:
        if check := entry.check:
            fits = not axes or matches(check.when, axis_facts(axes))
            conditions = ", ".join(f"{axis} {'|'.join(values)}" for axis, values in check.when.items())
            script = script_of(project, entry.component, check)
            version = components[entry.component]
            planned.append(
                PlannedCheck(entry.component, version, check, script, "" if fits else f"only for {conditions}")
            )
    return planned


def hash_of_check(check: Check, script: str) -> str:
    """Return the hash of all that decides whether a check passes."""
    document = check.model_dump(mode="json", exclude={"description"}) | {"script": script}
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def skipped_result(planned: PlannedCheck, reason: str) -> CheckResult:
    """Return the result of a check that could not begin."""
    return CheckResult(
        component=planned.component, check=planned.check.name, outcome="skipped", reason=reason, sha256=planned.sha256
    )


def run_check(
    planned: PlannedCheck, session: Session, log: Path, environment: Mapping[str, str] | None = None
) -> CheckResult:
    """Run a check with these variables and its own, which replace them; or say why it cannot run.

    A failed check is a result; raises CommandError if the runner fails.
    """
    check = planned.check
    command = Command(
        script=planned.script, user=check.user, timeout_s=check.timeout_s,
        environment={**(environment or {}), **check.environment},
        nodes=nodes_needed(check.needs), ranks=check.ranks, log=log,
    )  # fmt: skip
    missing = planned.unfit or missing_needs(check.needs, session.facilities)
    # An image with this component should have the user; of an image that does not say what it has, nobody knows.
    unknown = "" if missing or planned.version is None else session.unknown_user(check.user)
    if missing := missing or unknown or session.obstacle(command):
        skipped = skipped_result(planned, missing)
        return skipped.model_copy(update={"outcome": "failed"}) if unknown else skipped
    started = datetime.now(UTC).isoformat(timespec="seconds")
    hung = 0
    while (execution := session.run(command)).timed_out and hung + 1 < check.attempts:
        hung += 1
    results = None
    outcome: Outcome = "skipped"
    if execution.status == SKIPPED_STATUS and execution.output.strip():
        reason = execution.output.strip().splitlines()[-1]
    else:
        reason = judge_check(check, planned.version, execution, log)
        if tool := check.results:
            results = read_results(log, planned.name)
            if execution.status is not None:
                reason = "; ".join(filter(None, (reason, correctness_problem(results, tool))))
        outcome = "failed" if reason else "passed"
        if not reason and planned.version is None and "{version}" in (check.expect or ""):
            reason = UNCOMPARED
    if hung:
        late = f"{hung + execution.timed_out} of {hung + 1} attempts did not end within {command.timeout_s} s"
        reason = "; ".join(filter(None, ("" if execution.timed_out else reason, late)))
    return CheckResult(
        component=planned.component,
        check=check.name,
        outcome=outcome,
        reason=reason,
        output=console.redacted_text(execution.output[-OUTPUT_LIMIT:]),
        seconds=round(execution.seconds, 3),
        command=execution.argv,
        status=execution.status,
        timeout=execution.timed_out,
        environment=dict(execution.environment),
        started=started,
        sha256=planned.sha256,
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
    return "" if as_expected else f"the output has nothing that matches '{pattern}'"


def read_results(log: Path, name: str) -> Results:
    """Read what a benchmark printed, as far as it can be read; results have the check's `name` as their source."""
    results = read.read_text(name, log.read_text(errors="replace")) if log.exists() else Results()
    return results if any(source.tools for source in results.sources) else Results()


def correctness_problem(results: Results, tool: str) -> str:
    """Return why a benchmark's results are not a success; empty if they are."""
    tables = tuple(table for table in results.tables if table.tool == tool)
    of_tool: Mapping[str, Sequence[Measurement | Diagnostic]] = {
        "nccl-tests": results.runs, "nvbandwidth": results.tests, "dcgmi": results.diagnostics,
    }  # fmt: skip
    found = of_tool.get(tool, tables)
    # A test that does not fit the machine is waived; alone it proves nothing.
    claims = [(item.subject, judge.data_claim(item)) for item in found if item.verdict != "waived"]
    if not claims:
        return f"no result of {tool} in the output"
    return next((f"{subject}: {claim.reason}" for subject, claim in claims if claim.standing() == "failed"), "")


def judged_speed(
    result: CheckResult, check: Check, profile: Profile, environment: Mapping[str, str], *, one_host: bool = False
) -> Iterator[CheckResult]:
    """Yield a result about the speed of a benchmark beside the one about its data; nothing for other checks.

    With `one_host`, nodes are containers of one host, which no profile describes.
    """
    if not check.results or result.outcome == "skipped":
        return
    name = f"{result.check}{SPEED}"
    speed = CheckResult(component=result.component, check=name, outcome="skipped", sha256=result.sha256)
    if result.outcome == "failed" or result.results is None:
        yield speed.model_copy(update={"reason": "its data are not right, so its speed is not judged"})
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
    reason = "the results have no speed that can be judged"
    if failures:
        reason = "{0}: {1.state}: {1.reason}".format(*failures[0])
    elif speeds := passed or [judgement.speed for judgement in judged if judgement.speed.reason]:
        reason = speeds[0].reason
    output = "\n".join(f"{j.subject}: {claim.state}: {claim.reason}" for j in judged for claim in j.claims)
    yield speed.model_copy(
        update={"outcome": outcome, "reason": reason, "output": output, "judgements": judged},
    )
