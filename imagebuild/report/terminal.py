"""A report in the terminal: one line a result, what was skipped, what could not be read, and the verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rich.markup import escape

from imagebuild import console
from imagebuild.console import out
from imagebuild.judgement import Judgement
from imagebuild.report import matching, words
from imagebuild.report.assertions import Assertion, State
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
    for claim in report.assertions:
        if claim.state == "failed":
            out.print(f"[red]✗[/] {_safe(claim.subject)}: [red]{claim.word}[/]{_because(claim)}")
    for claim in report.assertions:
        if claim.state == "skipped":
            out.print(f"[yellow]-[/] {_safe(claim.subject)}: [yellow]{claim.word}[/]{_because(claim)}")
    for source in report.sources:
        if source.unread:
            out.print(f"{_safe(source.path)}: {source.unread} lines look like results and could not be read, such as:")
            for example in source.examples[:3]:
                out.print(f"    {one_line(example, 160)}", markup=False)
    overall = OVERALL[report.overall]
    out.print(f"[{overall}]{_safe(report.headline)}[/] ({report.counts}; {report.unread_lines} lines unread)")


def _rows(report: Report) -> Iterator[tuple[str, str, str, str]]:
    judged = matching.by_result(report, report.judgements)
    for run, name in zip(report.runs, words.run_names(report.runs), strict=True):
        yield name, run.verdict, words.best_text(run), _speed(judged[id(run)])
    for test in report.tests:
        total = f"sum {words.number(test.sum)} {test.unit or ''}".rstrip() if test.sum is not None else "–"
        yield test.name or "unnamed test", test.status, total, _speed(judged[id(test)])
    for table in report.tables:
        yield table.test or "perftest", table.verdict, words.table_best(table), _speed(judged[id(table)])
    for ucx in report.ucx:
        yield words.ucx_name(ucx), "ok" if ucx.final else "truncated", words.ucx_best(ucx), "–"
    for one in report.diagnostics:
        yield one.test + (f", {one.entity}" if one.entity else ""), one.status, "–", "–"


def _speed(judgements: tuple[Judgement, ...]) -> str:
    return "; ".join(_coloured(one.outcome) for one in judgements) or "–"


def _coloured(word: str) -> str:
    colour = {"ok": "green", "passed": "green", "pass": "green"}.get(word)
    colour = colour or ("yellow" if word in {"not-comparable", "waived", "skip", "not-found", "not-run", "warn"} else "red")
    return f"[{colour}]{_safe(word)}[/]"


def _because(claim: Assertion) -> str:
    reason = one_line(claim.reason)
    return f": {escape(reason)}" if reason else ""


def _safe(text: str) -> str:
    return escape(one_line(text))
