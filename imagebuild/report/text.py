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
    NONE,
    STATES,
    Assertion,
    Overall,
    Report,
    diagnostic_name,
    group_alike,
    one_line,
    visible,
)

# Terminal

OVERALL_COLOURS: dict[Overall, str] = {"ok": "green", "failed": "red", "not-verified": "yellow", "nothing-read": "red"}
WORD_COLOURS = {
    **dict.fromkeys(("ok", "passed", "pass", "fast enough"), "green"),
    **dict.fromkeys(("not judged", "not applicable", "waived", "skip", "not-found", "not-run", "warn"), "yellow"),
}
"""Colours of words that are not a failure."""


def print_report(report: Report) -> None:
    """Print the report: results, failures, what was skipped, lines that could not be read, and the verdict."""
    rows = []
    for entry in report.entries:
        if entry.state != "skipped":  # these are listed below, with their reasons
            speed = "; ".join(_coloured(verdict.state) for verdict in entry.speed) or NONE
            rows.append((_plain(entry.name), _coloured(entry.word), _plain(entry.best), speed))
    rows += [(_plain(diagnostic_name(d)), _coloured(d.status), NONE, NONE) for d in report.diagnostics]
    if rows:
        console.print_table(("result", "verdict", "best", "speed"), rows)
    if report.verifications:
        numbers = Counter(assertion.state for assertion in report.assertions if assertion.kind == "check")
        out.print("image checks: " + ", ".join(f"{numbers[state]} {state}" for state in STATES))
    several_sources = len({assertion.source for assertion in report.assertions}) > 1
    for failure in report.failures:
        shows_source = several_sources and failure.source != failure.subject
        subject = f"{failure.subject} ({failure.source})" if shows_source else failure.subject
        _print_assertion("[red]✗[/]", _plain(subject), f"[red]{_plain(failure.word)}[/]", _plain(failure.reason))
    for skip, subjects in group_alike(report.skips):
        word = f"[yellow]{_plain(skip.word)}[/]"
        _print_assertion("[yellow]-[/]", word, _plain(", ".join(subjects)), _plain(skip.reason))
    for source in report.sources:
        if source.unread:
            lines = "1 line looks" if source.unread == 1 else f"{source.unread} lines look"
            out.print(f"{_plain(source.path)}: {lines} like results and could not be read, for example:")
            for example in source.examples[:3]:
                out.print(f"    {one_line(example, 160)}", markup=False)
    colour = OVERALL_COLOURS[report.overall]
    out.print(f"[{colour}]{_plain(report.headline)}[/] ({report.counts}; unread lines: {report.unread_lines})")


def _print_assertion(mark: str, *parts: str) -> None:
    out.print(f"{mark} {': '.join(filter(None, parts))}")


def _coloured(word: str) -> str:
    return f"[{WORD_COLOURS.get(word, 'red')}]{_plain(word)}[/]"


def _plain(text: str) -> str:
    """Return one line in which rich finds no markup."""
    return escape(one_line(text))


# Markdown

MARKS: dict[Overall, str] = {"ok": "✅", "failed": "❌", "not-verified": "⚠️", "nothing-read": "❌"}
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
    parts = [f"## {MARKS[report.overall]} {_cell(report.headline)}", f"{report.counts}. {' '.join(origin)}"]
    if report.failures:
        problems = [(f"**{_cell(f.subject)}**", _cell(f.word), _cell(f.reason)) for f in report.failures]
        parts.append("### Problems\n\n" + _markdown_list(problems))
    runs, others = [], []
    for entry in report.entries:
        if isinstance(entry.result, Run):
            share = NONE if entry.share_of_ceiling is None else f"{entry.share_of_ceiling:.0%}"
            runs.append((entry.name, entry.word, entry.best, share, entry.outcomes))
        elif entry.state != "skipped":
            others.append((entry.name, entry.word, entry.best, entry.outcomes))
    if runs:
        columns = ("run", "data", "best bus bandwidth", "of the ceiling", "speed")
        parts.append("### Collectives\n\n" + _markdown_table(columns, runs))
    if others:
        parts.append("### Copies and messages\n\n" + _markdown_table(("test", "status", "result", "speed"), others))
    if report.verifications:
        images = []
        for verification in report.verifications:
            numbers = Counter(check.outcome for check in verification.checks)
            images.append((verification.image, verification.platform, *(str(numbers[state]) for state in STATES)))
        parts.append("### Images\n\n" + _markdown_table(("image", "platform", *STATES), images))
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
            if assertion.state == "failed":
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
        "failures": str(numbers["failed"]),
        "errors": "0",
        "skipped": str(numbers["skipped"]),
        "time": f"{sum(assertion.seconds for assertion in assertions):.3f}",
    }
