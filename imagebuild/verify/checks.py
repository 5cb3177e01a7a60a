"""Choose the checks of an image, run them, and judge what they print."""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, get_args

from imagebuild.bench import judge, read
from imagebuild.bench.judge import RunContext
from imagebuild.bench.models import AlgorithmName, Results, SpeedVerdict
from imagebuild.bench.profiles import Profile
from imagebuild.core import console
from imagebuild.core.errors import ConfigError, NothingSelected, ResultError
from imagebuild.core.fields import axis_facts, matches
from imagebuild.core.yaml import suggestion
from imagebuild.project.component import Check, Facilities, checks_of, missing_needs, nodes_needed
from imagebuild.project.load import Project, script_of
from imagebuild.project.records import CheckResult, Outcome
from imagebuild.verify.runner import Command, Execution, Session

SPEED = "-speed"
BAD = ("failed", "measurement-error", "regression")
"""Outcomes of a judgement that are a failure, the plainest first."""


def read_results(log: Path, source: str) -> Results:
    """What a benchmark printed, as far as it can be read; `source` is the check's name, which the log's path is not."""
    try:
        found = read.read_files([log])
    except ResultError:
        return Results()
    named = {
        part: tuple(item.model_copy(update={"source": source}) for item in getattr(found, part))
        for part in ("runs", "tests", "tables", "ucx", "diagnostics")
    }
    sources = tuple(entry.model_copy(update={"path": source}) for entry in found.sources)
    return found.model_copy(update={**named, "sources": sources})


def correctness_problem(results: Results, tool: str) -> str:
    """Why the results of a benchmark are no success; empty if they are."""
    items, fault = _TOOLS[tool](results)
    if not items:
        return f"no result of {tool} in the output"
    return next(filter(None, map(fault, items)), "")


def _runs(results: Results) -> tuple[tuple[Any, ...], Callable[[Any], str]]:
    return results.runs, lambda run: "" if run.verdict == "ok" else f"{run.verdict}: {run.reason}"


def _tests(results: Results) -> tuple[tuple[Any, ...], Callable[[Any], str]]:
    # A test that does not fit the machine is waived; alone it proves nothing.
    told = tuple(test for test in results.tests if test.status != "waived")
    return told, lambda test: "" if test.status == "passed" else f"{test.name or 'a test'}: {test.status}"


def _tables(results: Results) -> tuple[tuple[Any, ...], Callable[[Any], str]]:
    return results.tables, lambda table: "" if table.verdict == "ok" else f"{table.verdict}: {table.reason}"


def _ucx(results: Results) -> tuple[tuple[Any, ...], Callable[[Any], str]]:
    return results.ucx, lambda line: "" if line.final else "progress only, no final result"


def _diagnostics(results: Results) -> tuple[tuple[Any, ...], Callable[[Any], str]]:
    told = tuple(one for one in results.diagnostics if one.status not in {"skip", "not-run"})
    return told, lambda one: "" if one.status in {"pass", "warn"} else f"{one.test}: {one.status}"


_TOOLS: Mapping[str, Callable[[Results], tuple[tuple[Any, ...], Callable[[Any], str]]]] = {
    "nccl-tests": _runs,
    "nvbandwidth": _tests,
    "perftest": _tables,
    "ucx_perftest": _ucx,
    "dcgmi": _diagnostics,
}


def algorithm_of(environment: Mapping[str, str]) -> str | None:
    """The class of algorithm that variables make NCCL use, if they do."""
    if (chosen := environment.get("NCCL_ALGO", "").lower()) in get_args(AlgorithmName):
        return chosen
    return "ring" if environment.get("NCCL_NVLS_ENABLE") == "0" else None


def judged_speed(
    result: CheckResult, check: Check, profile: Profile, environment: Mapping[str, str], *, one_host: bool = False
) -> Iterable[CheckResult]:
    """Beside a check of a benchmark, what is said about its speed; nothing beside others.

    With `one_host`, nodes are containers of one host, which are no nodes of a profile.
    """
    if not check.results or result.outcome == "skipped":
        return
    made = CheckResult(component=result.component, check=f"{result.check}{SPEED}", outcome="skipped")
    if result.outcome == "failed" or result.results is None:
        yield made.model_copy(update={"reason": "its data are not right, so its speed says nothing"})
        return
    if one_host and nodes_needed(check.needs) > 1:
        yield made.model_copy(update={"reason": "its nodes are containers of one host"})
        return
    known = RunContext(nodes=nodes_needed(check.needs), algorithm=algorithm_of({**environment, **check.environment}))
    judgements = judge.judge_results(result.results, profile, known)
    outcome, reason = _together(judgements)
    output = "\n".join(f"{one.subject}: {one.outcome}: {one.reason}" for one in judgements)
    yield made.model_copy(
        update={"outcome": outcome, "reason": reason, "output": output, "judgements": judgements},
    )


def _together(judgements: tuple[SpeedVerdict, ...]) -> tuple[Outcome, str]:
    for outcome in BAD:
        if found := [one for one in judgements if one.outcome == outcome]:
            return "failed", f"{outcome}: {found[0].subject}: {found[0].reason}"
    passed = [one for one in judgements if one.outcome == "passed"]
    if passed:
        return "passed", "; ".join(one.reason for one in passed[:1])
    return "skipped", judgements[0].reason if judgements else "nothing in the results is a speed"


SKIPPED_STATUS = 77
"""With it a check says that it cannot run here; its last line of output says why."""
OUTPUT_LIMIT = 20_000
"""Characters of a check's output that are kept in the results, from its end."""
ANY_VERSION = r"[0-9][0-9A-Za-z.+:~-]*"
"""What `{version}` stands for where nobody says which version the image has."""
UNCOMPARED = "any version accepted: the image does not say which it has"


@dataclass(frozen=True)
class PlannedCheck:
    """A check about to be run: its script is read, and skipping it is decided."""

    component: str
    version: str | None
    """`None` where the image does not say it."""
    check: Check
    script: str
    skip: str

    @property
    def name(self) -> str:
        return f"{self.component}/{self.check.name}"


def components_of(labels: Mapping[str, str]) -> dict[str, str]:
    """Component → version, as the image's labels say."""
    return _labelled(labels, "imagebuild.component.")


def axes_of(labels: Mapping[str, str]) -> dict[str, str]:
    """Axis → value of the image's target, as its labels say."""
    return _labelled(labels, "imagebuild.axis.")


def _labelled(labels: Mapping[str, str], prefix: str) -> dict[str, str]:
    return {name.removeprefix(prefix): value for name, value in labels.items() if name.startswith(prefix)}


def planned_checks(
    project: Project, components: Mapping[str, str | None], axes: Mapping[str, str], have: Facilities
) -> list[PlannedCheck]:
    """The checks of the components. Raises ConfigError if a component or a script is unknown here.

    Without axes, of an image that does not name them, conditions on them are no reason to skip.
    """
    unknown = [name for name in components if name not in project.components]
    if unknown:
        raise ConfigError(f"{', '.join(unknown)}: the image says it has it, but no such component is known here")
    result = []
    for name, version in components.items():
        for check in checks_of(project.components[name].model):
            if axes and not matches(check.when, axis_facts(axes)):
                skip = "only for " + ", ".join(f"{axis} {'|'.join(values)}" for axis, values in check.when.items())
            else:
                skip = missing_needs(check.needs, have)
            result.append(PlannedCheck(name, version, check, script_of(project, name, check), skip))
    return result


def skipped_results(checks: Iterable[PlannedCheck], reason: str) -> list[CheckResult]:
    """The results of checks that could not even begin."""
    return [
        CheckResult(component=p.component, check=p.check.name, outcome="skipped", reason=p.skip or reason)
        for p in checks
    ]


def command_of(planned: PlannedCheck, log: Path | None = None, more: Mapping[str, str] | None = None) -> Command:
    """What a check starts; `more` are variables besides its own, which come first."""
    check = planned.check
    return Command(
        script=planned.script, user=check.user, timeout_s=check.timeout_s,
        environment={**(more or {}), **check.environment},
        nodes=nodes_needed(check.needs), ranks=check.ranks, log=log,
    )  # fmt: skip


def run_check(planned: PlannedCheck, session: Session, log: Path, more: Mapping[str, str] | None = None) -> CheckResult:
    """Run a check, or say why it cannot run; `more` are variables besides its own.

    A failed check is a result; raises CommandError if the runner fails.
    """
    command = command_of(planned, log, more)
    if reason := planned.skip or session.obstacle(command):
        return skipped_results([planned], reason)[0]
    started = datetime.now(UTC).isoformat(timespec="seconds")
    hung = 0
    while (execution := session.run(command)).timed_out and hung + 1 < planned.check.attempts:
        hung += 1
    results = None
    outcome: Outcome = "skipped"
    if execution.status == SKIPPED_STATUS and execution.output.strip():
        reason = execution.output.strip().splitlines()[-1]
    else:
        results = read_results(log, planned.name) if planned.check.results else None
        reason = judge_check(planned.check, planned.version, execution, log)
        if results and planned.check.results and execution.status is not None:
            reason = "; ".join(filter(None, (reason, correctness_problem(results, planned.check.results))))
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
    """Why a check failed; empty if it passed."""
    if execution.problem:
        return execution.problem
    if execution.timed_out:
        return f"did not end within {check.timeout_s} s"
    if execution.status:
        return f"exit status {execution.status}"
    if check.expect is not None:
        pattern = check.expect.replace("{version}", re.escape(version) if version is not None else ANY_VERSION)
        if not _found(pattern, execution.output, log):
            return f"the output has no {pattern!r}"
    return ""


def _found(pattern: str, end: str, log: Path | None) -> bool:
    """Whether the output has the pattern: in the end of it that is in memory, or anywhere in the log."""
    if re.search(pattern, end, re.MULTILINE):
        return True
    if log is None or not log.exists() or not log.stat().st_size:
        return False
    with log.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
        return re.search(pattern.encode(), whole, re.MULTILINE) is not None


IMAGE = "image"
"""Stands before the names of checks that read an image without starting it."""


@dataclass(frozen=True)
class ListedCheck:
    """A check that can be chosen."""

    name: str
    description: str
    check: Check | None
    """`None` for one that starts nothing in the image."""


def known_checks(project: Project, static: Mapping[str, str]) -> list[ListedCheck]:
    """All checks there are; `static` are those of the image as a whole, with what they prove."""
    listed = [ListedCheck(f"{IMAGE}/{name}", text, None) for name, text in static.items()]
    for component, document in project.components.items():
        listed += [
            ListedCheck(f"{component}/{check.name}", check.description, check) for check in checks_of(document.model)
        ]
    return listed


def checks_of_components(listed: Iterable[ListedCheck], components: Iterable[str]) -> list[ListedCheck]:
    """Those of an image with these components."""
    wanted = {IMAGE, *components}
    return [entry for entry in listed if entry.name.partition("/")[0] in wanted]


def chosen_checks(
    patterns: Sequence[str], offered: Sequence[ListedCheck], everything: Sequence[ListedCheck]
) -> list[ListedCheck]:
    """What fits the patterns `component/check`; a component alone means all of its checks. Without patterns, all.

    Raises ConfigError for a name that is not known anywhere, NothingSelected if nothing is left.
    """
    wanted = [pattern if "/" in pattern else f"{pattern}/*" for pattern in patterns] or ["*"]
    for pattern in wanted:
        if not _fit(pattern, everything):
            names = [entry.name for entry in everything]
            near = suggestion(pattern, names) if pattern.endswith("/*") is False else _component(pattern, names)
            raise ConfigError(f"--only {pattern}: no such check{near or '; see `imagebuild verify --list`'}")
    found = {entry.name: entry for pattern in wanted for entry in _fit(pattern, offered)}
    if not found:
        raise NothingSelected(f"--only {' '.join(patterns)}: the image has nothing that these checks are about")
    return [entry for entry in offered if entry.name in found]


def _fit(pattern: str, listed: Iterable[ListedCheck]) -> list[ListedCheck]:
    return [entry for entry in listed if fnmatchcase(entry.name, pattern)]


def _component(pattern: str, names: Iterable[str]) -> str:
    return suggestion(pattern.removesuffix("/*"), {name.partition("/")[0] for name in names})
