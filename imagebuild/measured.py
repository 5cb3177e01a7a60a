"""What benchmarks printed in checks: read from their logs; whether it is good, and whether it is fast."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

from imagebuild import judge, needs
from imagebuild.ceilings import AlgorithmName
from imagebuild.component import Check
from imagebuild.errors import ResultError
from imagebuild.judge import Known
from imagebuild.judgement import Judgement
from imagebuild.profiles import Profile
from imagebuild.records import CheckResult, Outcome
from imagebuild.results import read as reading
from imagebuild.results.models import Results

SPEED = "-speed"
BAD = ("failed", "measurement-error", "regression")
"""Outcomes of a judgement that are a failure, the plainest first."""


def read(log: Path, source: str) -> Results:
    """What a benchmark printed, as far as it can be read; `source` is the check's name, which the log's path is not."""
    try:
        found = reading.read([log])
    except ResultError:
        return Results()
    named = {
        part: tuple(item.model_copy(update={"source": source}) for item in getattr(found, part))
        for part in ("runs", "tests", "tables", "ucx", "diagnostics")
    }
    sources = tuple(entry.model_copy(update={"path": source}) for entry in found.sources)
    return found.model_copy(update={**named, "sources": sources})


def bad(results: Results, tool: str) -> str:
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


def algorithm(environment: Mapping[str, str]) -> str | None:
    """The class of algorithm that variables make NCCL use, if they do."""
    if (chosen := environment.get("NCCL_ALGO", "").lower()) in get_args(AlgorithmName):
        return chosen
    return "ring" if environment.get("NCCL_NVLS_ENABLE") == "0" else None


def speed(
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
    if one_host and needs.nodes(check.needs) > 1:
        yield made.model_copy(update={"reason": "its nodes are containers of one host"})
        return
    known = Known(nodes=needs.nodes(check.needs), algorithm=algorithm({**environment, **check.environment}))
    judgements = judge.judge(result.results, profile, known)
    outcome, reason = _together(judgements)
    output = "\n".join(f"{one.subject}: {one.outcome}: {one.reason}" for one in judgements)
    yield made.model_copy(
        update={"outcome": outcome, "reason": reason, "output": output, "judgements": judgements},
    )


def _together(judgements: tuple[Judgement, ...]) -> tuple[Outcome, str]:
    for outcome in BAD:
        if found := [one for one in judgements if one.outcome == outcome]:
            return "failed", f"{outcome}: {found[0].subject}: {found[0].reason}"
    passed = [one for one in judgements if one.outcome == "passed"]
    if passed:
        return "passed", "; ".join(one.reason for one in passed[:1])
    return "skipped", judgements[0].reason if judgements else "nothing in the results is a speed"
