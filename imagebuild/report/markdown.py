"""A report as Markdown, for a pull request."""

from __future__ import annotations

import re
from collections.abc import Iterable

from imagebuild.judgement import Judgement
from imagebuild.report import matching, words
from imagebuild.report.assertions import STATES, TESTED, Assertion, alike
from imagebuild.report.clean import one_line
from imagebuild.report.document import Report

MARKS = {"ok": "✅", "failed": "❌", "not-verified": "⚠️", "nothing-read": "❌"}
LISTED = 50
"""Lines of a list or a table."""
CHARACTERS = 65_000
"""A comment on a pull request has at most 65,536."""


def text(report: Report) -> str:
    """The whole report: verdict, problems, collectives, other results, checks, and what was skipped or not read."""
    parts = [f"## {MARKS[report.overall]} {cell(report.headline)}", f"{report.counts}. {_origin(report)}"]
    failed, skipped = (
        [claim for claim in report.assertions if claim.state == state] for state in ("failed", "skipped")
    )
    if failed:
        parts.append("### Problems\n\n" + _list(failed))
    parts += [*_runs(report), *_others(report), *_checks(report)]
    if skipped:
        parts.append(f"<details><summary>{len(skipped)} skipped</summary>\n\n{_grouped(skipped)}\n\n</details>")
    if report.unread_lines:
        files = ", ".join(f"{cell(s.path)} ({s.unread})" for s in report.sources if s.unread)
        parts.append(f"Lines that look like results and could not be read: {files}.")
    whole = "\n\n".join(parts) + "\n"
    if len(whole) <= CHARACTERS:
        return whole
    return whole[: whole.rindex("\n", 0, CHARACTERS)] + "\n\nThe rest does not fit here.\n"


def _origin(report: Report) -> str:
    about = report.about
    said = [f"Profile {cell(about.profile)}." if about.profile else "", f"imagebuild {cell(about.imagebuild)}."]
    if about.baseline:
        said.insert(1, f"Compared with {cell(about.baseline)}.")
    return " ".join(filter(None, said))


def _list(claims: list[Assertion]) -> str:
    lines = [
        f"- **{cell(claim.subject)}**: {cell(claim.word)}" + (f": {cell(claim.reason)}" if claim.reason else "")
        for claim in claims[:LISTED]
    ]
    if len(claims) > LISTED:
        lines.append(f"- … and {len(claims) - LISTED} more")
    return "\n".join(lines)


def _grouped(claims: list[Assertion]) -> str:
    groups = [
        f"- {cell(claim.word)}: {cell(', '.join(subjects))}" + (f": {cell(claim.reason)}" if claim.reason else "")
        for claim, subjects in alike(claims)
    ]
    return "\n".join(groups[:LISTED])


def _runs(report: Report) -> list[str]:
    if not report.runs:
        return []
    judged = matching.by_result(report, report.judgements)
    rows = [
        (name, run.verdict, words.best_text(run), _share(judged[id(run)]), _speed(judged[id(run)]))
        for run, name in zip(report.runs, words.names_of(report.runs), strict=True)
    ]
    return ["### Collectives\n\n" + table(("run", "data", "best bus bandwidth", "of the ceiling", "speed"), rows)]


def _others(report: Report) -> list[str]:
    judged = matching.by_result(report, report.judgements)
    tests = [test for test in report.tests if TESTED.get(test.status) != "skipped"]
    rows = [
        (name, test.status, words.best_text(test), _speed(judged[id(test)]))
        for test, name in zip(tests, words.names_of(tests), strict=True)
    ]
    rows += [
        (name, table.verdict, words.best_text(table), _speed(judged[id(table)]))
        for table, name in zip(report.tables, words.names_of(report.tables), strict=True)
    ]
    rows += [
        (name, "ok" if ucx.final else "truncated", words.best_text(ucx), words.NONE)
        for ucx, name in zip(report.ucx, words.names_of(report.ucx), strict=True)
    ]
    return ["### Copies and messages\n\n" + table(("test", "status", "result", "speed"), rows)] if rows else []


def _checks(report: Report) -> list[str]:
    rows = [
        (v.image, v.platform, *(str(sum(c.outcome == state for c in v.checks)) for state in STATES))
        for v in report.verifications
    ]
    return ["### Images\n\n" + table(("image", "platform", *STATES), rows)] if rows else []


def _share(judgements: tuple[Judgement, ...]) -> str:
    shares = [f"{j.measured / j.ceiling.value:.0%}" for j in judgements if j.ceiling and j.measured is not None]
    return shares[0] if shares else words.NONE


def _speed(judgements: tuple[Judgement, ...]) -> str:
    return "; ".join(one.outcome for one in judgements) or words.NONE


def table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table; cells are escaped."""
    rows = tuple(rows)
    lines = [columns, ("---",) * len(columns), *(tuple(map(cell, row)) for row in rows[:LISTED])]
    if len(rows) > LISTED:
        lines.append((f"… and {len(rows) - LISTED} more", *("",) * (len(columns) - 1)))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(value: str) -> str:
    """One line in which nothing is markup, no name is mentioned and no address becomes a link."""
    escaped = re.sub(r"([\\`*{}\[\]<>|~#]|\b_|_\b|(?<!\w)_|_(?!\w))", r"\\\1", one_line(value).replace("&", "&amp;"))
    return escaped.replace("@", "@\u200b").replace("://", ":\u200b//")
