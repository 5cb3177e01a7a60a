"""Write a report for the terminal, as Markdown and as JUnit XML."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from xml.etree import ElementTree as ET

from rich.markup import escape

from imagebuild.bench.models import Run
from imagebuild.core import console
from imagebuild.core.console import markdown_table, out
from imagebuild.report.document import (
    CLAIMS,
    NONE,
    OUTCOMES,
    Assertion,
    Overall,
    Report,
    State,
    group_alike,
    one_line,
    summary_of,
    visible,
)

# Terminal

OVERALL_COLOURS: dict[Overall, str] = {
    "ok": "green", "limited": "yellow", "open": "red", "failed": "red", "nothing-read": "red",
}  # fmt: skip
STATE_COLOURS: dict[State, str] = {"passed": "green", "failed": "red", "open": "red", "skipped": "yellow"}
MARKS: dict[State, str] = {"passed": "✓", "failed": "✗", "open": "?", "skipped": "-"}
TERMINAL_LINES = 40
MOST_PROBLEMS, MOST_SKIPS, MOST_SOURCES, LEAST_ROWS = 12, 8, 3, 10
"""Lines of each part of the output, if there is more to say than fits on a terminal."""


def print_report(report: Report) -> None:
    """Print the report: results, problems, what was skipped, lines that could not be read, and the verdict.

    More than a terminal shows is cut. A sweep is one line, and what is wrong in it is named among the problems.
    """
    several_sources = len({assertion.source for assertion in report.assertions}) > 1
    notes: list[str] = []
    for assertions, most in ((report.problems, MOST_PROBLEMS), (report.skips, MOST_SKIPS)):
        lines = []
        for first, subjects in group_alike(assertions):
            parts = [_coloured(first), _plain(", ".join(subjects)), _plain(first.reason)]
            if first.state != "skipped" and len(subjects) == 1:
                shows_source = several_sources and first.source != first.subject and first.kind != "sweep"
                parts[:2] = [_plain(subjects[0] + (f" ({first.source})" if shows_source else "")), _coloured(first)]
            lines.append(f"{_mark(first.state)} {': '.join(filter(None, parts))}")
        more = f"… and {len(lines) - most + 1} more like these"
        notes += lines if len(lines) <= most else [*lines[: most - 1], more]
    unread = [source for source in report.sources if source.unread]
    for source in unread[:MOST_SOURCES]:
        looks = "1 line looks" if source.unread == 1 else f"{source.unread} lines look"
        notes.append(f"{_plain(source.path)}: {looks} like results and could not be read, for example:")
        examples = source.examples[: 3 if len(unread) == 1 else 1]
        notes += [f"    {escape(one_line(example, 160))}" for example in examples]
    if len(unread) > MOST_SOURCES:
        notes.append(f"… and {len(unread) - MOST_SOURCES} more files with such lines")
    if report.verifications:
        numbers = Counter(assertion.state for assertion in report.assertions if assertion.kind == "check")
        notes.insert(0, "image checks: " + ", ".join(f"{numbers[state]} {state}" for state in OUTCOMES))

    rows: list[tuple[str, ...]] = []
    entries = report.entries
    for sweep in report.sweeps:
        state, words = summary_of(sweep, entries)
        rows.append((_mark(state), *map(_plain, (f"{sweep.subject}: {sweep.scope}", *words, sweep.range))))
    rows += [
        (_mark(entry.state), *map(_plain, (entry.name, *entry.words, entry.best)))
        for entry in entries
        if not entry.sweep
    ]
    diagnostics = [item for item in report.assertions if item.kind == "diagnostic"]
    rows += [(_mark(item.state), _plain(item.subject), _coloured(item), "", "", "") for item in diagnostics]
    room = max(LEAST_ROWS, TERMINAL_LINES - 3 - len(notes))
    if len(rows) > room:
        rows[room:] = [("", f"… and {len(rows) - room} more; --json, --html and --markdown show them", "", "", "", "")]
    if rows:
        console.print_table(("", "result", *CLAIMS, "best"), rows)
    for note in notes:
        out.print(note)
    colour = OVERALL_COLOURS[report.overall]
    out.print(f"[{colour}]{_plain(report.headline)}[/] ({report.counts}; unread lines: {report.unread_lines})")


def _mark(state: State) -> str:
    return f"[{STATE_COLOURS[state]}]{MARKS[state]}[/]"


def _coloured(assertion: Assertion) -> str:
    return f"[{STATE_COLOURS[assertion.state]}]{_plain(assertion.word)}[/]"


def _plain(text: str) -> str:
    """Return one line in which rich finds no markup."""
    return escape(one_line(text))


# Markdown

SIGNS: dict[Overall, str] = {"ok": "✅", "limited": "☑️", "open": "⚠️", "failed": "❌", "nothing-read": "❌"}
MOST_LINES = 50
"""Lines of a list or a table."""
MOST_CHARACTERS = 65_000
"""Characters of the whole text. A comment on a pull request can have 65,536."""


def report_markdown(report: Report) -> str:
    """Return the report as Markdown: verdict, problems, results, images, and what was skipped or could not be read."""
    about = report.about
    origin = [f"Profile {_cell(about.profile)}."] if about.profile else []
    origin += [f"Compared with {_cell(about.baseline)}."] if about.baseline else []
    origin += [f"imagebuild {_cell(about.imagebuild)}."]
    parts = [f"## {SIGNS[report.overall]} {_cell(report.headline)}", f"{report.counts}. {' '.join(origin)}"]
    if report.problems:
        problems = [(f"**{_cell(p.subject)}**", _cell(p.word), _cell(p.reason)) for p in report.problems]
        parts.append("### Problems\n\n" + _markdown_list(problems))
    entries = report.entries
    if report.sweeps:
        sweeps = [(sweep.subject, sweep.scope, *summary_of(sweep, entries)[1], sweep.range) for sweep in report.sweeps]
        parts.append("### Sweeps\n\n" + _markdown_table(("sweep", "runs", *CLAIMS, "median and range"), sweeps))
    runs, others = [], []
    for entry in entries:
        row = (entry.name, *entry.words, entry.best)
        if not isinstance(entry.result, Run):
            others.append(row)
        elif not entry.sweep:
            share = NONE if entry.share_of_ceiling is None else f"{entry.share_of_ceiling:.0%}"
            runs.append((*row, share))
    if runs:
        columns = ("run", *CLAIMS, "bus bandwidth", "of the ceiling")
        parts.append("### Collectives\n\n" + _markdown_table(columns, runs))
    if others:
        parts.append("### Copies and messages\n\n" + _markdown_table(("test", *CLAIMS, "result"), others))
    if report.verifications:
        images = []
        for verification in report.verifications:
            numbers = Counter[State](check.outcome for check in verification.checks)
            images.append((verification.image, verification.platform, *(str(numbers[state]) for state in OUTCOMES)))
        parts.append("### Images\n\n" + _markdown_table(("image", "platform", *OUTCOMES), images))
    if report.skips:
        groups = [(_cell(s.word), _cell(", ".join(names)), _cell(s.reason)) for s, names in group_alike(report.skips)]
        summary = f"<summary>{len(report.skips)} skipped</summary>"
        parts.append(f"<details>{summary}\n\n{_markdown_list(groups)}\n\n</details>")
    if report.unread_lines:
        files = ", ".join(f"{_cell(source.path)} ({source.unread})" for source in report.sources if source.unread)
        parts.append(f"Lines that look like results and could not be read: {files}.")
    markdown = "\n\n".join(parts) + "\n"
    if len(markdown) <= MOST_CHARACTERS:
        return markdown
    return markdown[: markdown.rindex("\n", 0, MOST_CHARACTERS)] + "\n\nThe rest does not fit here.\n"


def _markdown_list(items: Sequence[tuple[str, ...]]) -> str:
    """Return a list; the parts of an item, already escaped, are separated by colons."""
    lines = [f"- {': '.join(filter(None, item))}" for item in items[:MOST_LINES]]
    if len(items) > MOST_LINES:
        lines.append(f"- … and {len(items) - MOST_LINES} more")
    return "\n".join(lines)


def _markdown_table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Return a table; cells are escaped."""
    lines = [tuple(map(_cell, row)) for row in rows[:MOST_LINES]]
    if len(rows) > MOST_LINES:
        lines.append((f"… and {len(rows) - MOST_LINES} more", *("",) * (len(columns) - 1)))
    return markdown_table(columns, lines)


def _cell(value: str) -> str:
    """Return one line in which nothing is markup, nobody is mentioned (`@name`) and no address becomes a link."""
    escaped = re.sub(r"([\\`*{}\[\]<>|~#]|\b_|_\b|(?<!\w)_|_(?!\w))", r"\\\1", one_line(value).replace("&", "&amp;"))
    return escaped.replace("@", "@\u200b").replace("://", ":\u200b//")


# JUnit

OUTPUT_CHARACTERS = 64 * 1024
"""Characters that are kept of the end of a failed check's output; servers that show JUnit refuse large files."""


def report_junit(report: Report) -> str:
    """Return the report as JUnit XML: a suite for each file or image, a case for each assertion."""
    root = ET.Element("testsuites", {"name": visible(report.about.title), **_junit_counts(report.assertions)})
    by_source = sorted(report.assertions, key=lambda assertion: assertion.source)
    for source, group in groupby(by_source, key=lambda assertion: assertion.source):
        assertions = tuple(group)
        attributes = {"name": visible(source), "timestamp": report.about.created, **_junit_counts(assertions)}
        suite = ET.SubElement(root, "testsuite", attributes)
        times: Counter[tuple[str, str]] = Counter()
        for assertion in assertions:
            times[assertion.kind, assertion.subject] += 1
            number = times[assertion.kind, assertion.subject]
            # Servers follow a case from run to run by its class and name, so the name contains no measured values.
            name = visible(f"{assertion.subject}: {assertion.kind}") + (f" #{number}" if number > 1 else "")
            case = ET.SubElement(suite, "testcase", name=name, classname=f"imagebuild.{assertion.kind}")
            case.set("time", f"{assertion.seconds:.3f}")
            message = visible(": ".join(filter(None, (assertion.word, assertion.reason))))
            if assertion.state in ("failed", "open"):
                ET.SubElement(case, "failure", message=message, type=assertion.word).text = visible(assertion.reason)
            elif assertion.state == "skipped":
                ET.SubElement(case, "skipped", message=message)
            if assertion.output:
                ET.SubElement(case, "system-out").text = visible(assertion.output[-OUTPUT_CHARACTERS:])
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _junit_counts(assertions: Sequence[Assertion]) -> dict[str, str]:
    numbers = Counter(assertion.state for assertion in assertions)
    return {
        "tests": str(len(assertions)),
        "failures": str(numbers["failed"] + numbers["open"]),
        "errors": "0",
        "skipped": str(numbers["skipped"]),
        "time": f"{sum(assertion.seconds for assertion in assertions):.3f}",
    }
