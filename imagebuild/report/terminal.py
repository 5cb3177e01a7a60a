"""A report in the terminal: one line a result, what was skipped, what could not be read, and the verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rich.markup import escape

from imagebuild import console
from imagebuild.console import out
from imagebuild.judgement import Judgement
from imagebuild.report import matching, words
from imagebuild.report.assertions import TESTED, Assertion, State, alike
from imagebuild.report.clean import one_line
from imagebuild.report.document import Report

COLOURS: dict[State, str] = {"passed": "green", "failed": "red", "skipped": "yellow"}
OVERALL = {"ok": "green", "failed": "red", "not-verified": "yellow", "nothing-read": "red"}


def show(report: Report) -> None:
    """Print the report."""
    rows = [(_safe(name), _coloured(verdict), _safe(best), speed) for name, verdict, best, speed in _rows(report)]
    if rows:
        console.table(("result", "verdict", "best", "speed"), rows)
    if report.verifications:
        claims = [claim for claim in report.assertions if claim.kind == "check"]
        states = Counter(claim.state for claim in claims)
        out.print("checks of images: " + ", ".join(f"{states[s]} {s}" for s in COLOURS))
    several = len({claim.source for claim in report.assertions}) > 1
    for claim in report.assertions:
        if claim.state == "failed":
            where = f" ({_safe(claim.source)})" if several and claim.source != claim.subject else ""
            out.print(f"[red]✗[/] {_safe(claim.subject)}{where}: [red]{claim.word}[/]{_because(claim)}")
    for claim, subjects in alike(claim for claim in report.assertions if claim.state == "skipped"):
        out.print(f"[yellow]-[/] [yellow]{claim.word}[/]: {_safe(', '.join(subjects))}{_because(claim)}")
    for source in report.sources:
        if source.unread:
            out.print(f"{_safe(source.path)}: {source.unread} unread (lines that look like results), such as")
            for example in source.examples[:3]:
                out.print(f"    {one_line(example, 160)}", markup=False)
    overall = OVERALL[report.overall]
    out.print(f"[{overall}]{_safe(report.headline)}[/] ({report.counts}; unread lines: {report.unread_lines})")


def _rows(report: Report) -> Iterator[tuple[str, str, str, str]]:
    judged = matching.by_result(report, report.judgements)
    for run, name in zip(report.runs, words.names_of(report.runs), strict=True):
        yield name, run.verdict, words.best_text(run), _speed(judged[id(run)])
    # What was skipped is listed below.
    tests = [test for test in report.tests if TESTED.get(test.status) != "skipped"]
    for test, name in zip(tests, words.names_of(tests), strict=True):
        yield name, test.status, words.best_text(test), _speed(judged[id(test)])
    for table, name in zip(report.tables, words.names_of(report.tables), strict=True):
        yield name, table.verdict, words.best_text(table), _speed(judged[id(table)])
    for ucx, name in zip(report.ucx, words.names_of(report.ucx), strict=True):
        yield name, "ok" if ucx.final else "truncated", words.best_text(ucx), words.NONE
    for one in report.diagnostics:
        yield one.test + (f", {one.entity}" if one.entity else ""), one.status, words.NONE, words.NONE


def _speed(judgements: tuple[Judgement, ...]) -> str:
    return "; ".join(_coloured(one.outcome) for one in judgements) or words.NONE


def _coloured(word: str) -> str:
    colour = {"ok": "green", "passed": "green", "pass": "green"}.get(word)
    colour = colour or (
        "yellow" if word in {"not-comparable", "waived", "skip", "not-found", "not-run", "warn"} else "red"
    )
    return f"[{colour}]{_safe(word)}[/]"


def _because(claim: Assertion) -> str:
    reason = one_line(claim.reason)
    return f": {escape(reason)}" if reason else ""


def _safe(text: str) -> str:
    return escape(one_line(text))
