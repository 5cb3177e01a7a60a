"""What is claimed about each result. Correctness and speed are separate claims; every output shows the same ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from imagebuild.judgement import Judgement
from imagebuild.records import VerifyResult
from imagebuild.report import words
from imagebuild.results.models import BandwidthTest, Diagnostic, Results

Kind = Literal["correctness", "speed", "check", "diagnostic", "reading"]
State = Literal["passed", "failed", "skipped"]

STATES: tuple[State, ...] = ("passed", "failed", "skipped")

JUDGED: dict[str, State] = {"passed": "passed", "not-comparable": "skipped"}
TESTED: dict[str, State] = {"passed": "passed", "waived": "skipped", "not-found": "skipped"}
DIAGNOSED: dict[str, State] = {"pass": "passed", "warn": "passed", "skip": "skipped", "not-run": "skipped"}
"""What is in none of these is a failure."""


@dataclass(frozen=True)
class Assertion:
    """One claim, and whether it holds."""

    kind: Kind
    source: str
    """File, or image for a check."""
    subject: str
    state: State
    word: str
    """The result in the words of its own kind: `wrong-data`, `measurement-error`, `waived`."""
    reason: str = ""
    seconds: float = 0.0
    output: str = ""
    """Of a check that failed."""


def of_results(results: Results) -> list[Assertion]:
    """Whether what was read is whole and right; speed is not considered."""
    found = [
        Assertion("correctness", run.source, words.name_of(run), _if_ok(run.verdict), run.verdict, words.why(run))
        for run in results.runs
    ]
    found += [_of_test(test) for test in results.tests]
    found += [
        Assertion("correctness", table.source, words.name_of(table), _if_ok(table.verdict), table.verdict, table.reason)
        for table in results.tables
    ]
    for ucx in results.ucx:
        word = "ok" if ucx.final else "truncated"
        reason = "" if ucx.final else "only progress lines were printed, no final result"
        found.append(Assertion("correctness", ucx.source, words.name_of(ucx), _if_ok(word), word, reason))
    for source, group in groupby(results.diagnostics, key=lambda one: one.source):
        found += _of_diagnostics(source, tuple(group))
    return found


def _if_ok(word: str) -> State:
    return "passed" if word == "ok" else "failed"


def _of_test(test: BandwidthTest) -> Assertion:
    state = TESTED.get(test.status, "failed")
    reason = "" if state == "passed" else test.reason or f"{test.tool} says so"
    return Assertion("correctness", test.source, words.name_of(test), state, test.status, reason)


def _of_diagnostics(source: str, group: tuple[Diagnostic, ...]) -> list[Assertion]:
    found = [
        Assertion(
            "diagnostic",
            source,
            f"{one.test}, {one.entity}" if one.entity else one.test,
            DIAGNOSED.get(one.status, "failed"),
            one.status,
            "; ".join(one.messages),
        )
        for one in group
    ]
    if all(claim.state == "skipped" for claim in found):
        reason = "every test was skipped, so nothing is known about the hardware"
        found.append(Assertion("diagnostic", source, "dcgmi diag", "failed", "not-verified", reason))
    return found


def of_judgements(judgements: Iterable[Judgement]) -> list[Assertion]:
    """Whether results are as fast as they should be, and not faster than they can be."""
    return [
        Assertion("speed", one.source, one.subject, JUDGED.get(one.outcome, "failed"), one.outcome, one.reason)
        for one in judgements
    ]


def of_verification(verification: VerifyResult) -> list[Assertion]:
    """The checks of an image, but for those that say of a speed what the judgements say."""
    return [
        Assertion(
            "check",
            verification.image,
            f"{one.component} {one.check}",
            one.outcome,
            one.outcome,
            one.reason,
            one.seconds,
            one.output if one.outcome == "failed" else "",
        )
        for one in verification.checks
        if not one.judgements
    ]


def alike(claims: Iterable[Assertion]) -> list[tuple[Assertion, tuple[str, ...]]]:
    """Claims with the same word and reason as one, with all their subjects; repeated ones as `name (3 times)`."""
    groups: dict[tuple[str, str], list[Assertion]] = {}
    for claim in claims:
        groups.setdefault((claim.word, claim.reason), []).append(claim)
    found = []
    for group in groups.values():
        times = Counter(claim.subject for claim in group)
        subjects = tuple(name if count == 1 else f"{name} ({count} times)" for name, count in times.items())
        found.append((group[0], subjects))
    return found


def of_unread(files: Iterable[str]) -> list[Assertion]:
    """Files that were named: somebody expected a result in each."""
    return [Assertion("reading", file, file, "failed", "no-result", "no result was found in it") for file in files]
