"""Write a report to the terminal, as Markdown and as JUnit XML. Load the templates of all formats."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import Any

import jinja2
from markupsafe import Markup
from rich.text import Text

from imagebuild.bench.models import State
from imagebuild.core import console
from imagebuild.core.console import Part, out, redacted_text, styled, visible
from imagebuild.core.patterns import data_of
from imagebuild.report.document import CLAIMS, Assertion, Report, group_alike, one_line, rows_of

_DATA = data_of(__file__)
_MOST = _DATA["most"]


def print_report(report: Report) -> None:
    """Print the report: results, problems, skipped assertions, unread lines, and the verdict.

    A sweep (the same benchmark on several groups of hosts) takes one line of the results. Slow hosts are among the
    problems."""
    notes: list[str | Text] = []
    if report.verifications:
        numbers = Counter(assertion.state for assertion in report.assertions if assertion.kind == "check")
        notes.append("image checks: " + ", ".join(f"{numbers[s]} {s}" for s in ("passed", "failed", "skipped")))
    for assertions, most in ((report.problems, _MOST["problems"]), (report.skips, _MOST["skips"])):
        lines = [_note(first, subjects) for first, subjects in group_alike(assertions)]
        notes += lines if len(lines) <= most else [*lines[:most], f"… and {len(lines) - most} more like these"]
    notes += [f"note: {', '.join(subjects)}: {one_line(note)}" for note, subjects in report.notes][: _MOST["skips"]]
    unread = [source for source in report.sources if source.unread]
    for source in unread[: _MOST["sources"]]:
        looks = "1 line looks" if source.unread == 1 else f"{source.unread} lines look"
        notes.append(f"{one_line(source.path)}: {looks} like results and could not be read, for example:")
        notes += [f"    {one_line(example, 160)}" for example in source.examples[:1]]
    if len(unread) > _MOST["sources"]:
        notes.append(f"… and {len(unread) - _MOST['sources']} more files with such lines")
    rows: list[tuple[Part, ...]] = [(_mark(row.state), *map(one_line, row.cells)) for row in rows_of(report)]
    if rows:
        console.print_table(("", "result", *CLAIMS, "best"), rows)
    for note in notes:
        out.print(note)
    headline = (one_line(report.headline), _DATA["colours"][report.state])
    out.print(styled(headline, f" ({report.counts}; unread lines: {report.unread_lines})"))


def _note(first: Assertion, subjects: tuple[str, ...]) -> Text:
    """Return a line about assertions with the same reason. The line names the file if there is only one assertion."""
    word = styled((one_line(first.word), _DATA["colours"][first.state]))
    parts: list[Part] = [word, one_line(", ".join(subjects)), one_line(first.reason, 600)]
    if first.state != "skipped" and len(subjects) == 1:
        shows_source = first.kind in CLAIMS and first.source != first.subject
        parts[:2] = [one_line(subjects[0] + (f" ({first.source})" if shows_source else "")), word]
    return styled(_mark(first.state), " ", Text(": ").join(styled(part) for part in parts if part))


def _mark(state: State) -> Text:
    return styled((_DATA["marks"][state], _DATA["colours"][state]))


def template_of(name: str, package: str = __package__, **values: Any) -> jinja2.Template:
    """Return a template of `package` or of this package. `values` are its global variables.
    In HTML and XML, text is escaped. In all formats, control characters are replaced. The filter `redacted` removes
    secrets from texts of logs and programs."""

    def without_control_characters(value: Any) -> Any:
        return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(name) for name in dict.fromkeys((package, __package__))]),
        autoescape=jinja2.select_autoescape(("html.j2", "xml.j2")), undefined=jinja2.StrictUndefined,
        finalize=without_control_characters, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.filters |= {"cell": markdown_cell, "redacted": redacted_text}
    environment.globals |= values
    return environment.get_template(name)


def report_markdown(report: Report) -> str:
    """Return the report as Markdown: verdict, problems, results, images, skipped assertions and unread lines."""
    template = template_of("report.md.j2", claims=CLAIMS, most=_MOST["lines"])
    markdown = template.render(
        report=report, about=report.about, sign=_DATA["signs"][report.state], rows=rows_of(report),
        skipped=group_alike(report.skips), problems=group_alike(report.problems),
    )  # fmt: skip
    if len(markdown) <= _MOST["characters"]:
        return markdown
    return markdown[: markdown.rindex("\n", 0, _MOST["characters"])] + "\n\nThe rest does not fit here.\n"


def markdown_cell(value: str) -> str:
    """Return the text on one line, without effect as Markdown: no markup, no mention (`@name`), no link."""
    escaped = re.sub(r"([\\`*{}\[\]<>|~#]|\b_|_\b|(?<!\w)_|_(?!\w))", r"\\\1", one_line(value).replace("&", "&amp;"))
    return escaped.replace("@", "@\u200b").replace("://", ":\u200b//")


def report_junit(report: Report) -> str:
    """Return the report as JUnit XML: a suite for each file or image, a case for each assertion.
    Servers recognise a case of an earlier run by its class and name. The name therefore contains no measured values."""
    suites: defaultdict[str, dict[str, Assertion]] = defaultdict(dict)
    times: Counter[tuple[str, str]] = Counter()
    for assertion in sorted(report.assertions, key=lambda assertion: assertion.source):
        name = f"{assertion.subject}: {assertion.kind}"
        times[assertion.source, name] += 1
        number = times[assertion.source, name]
        suites[assertion.source][f"{name} #{number}" if number > 1 else name] = assertion
    return template_of("report.xml.j2").render(report=report, suites=suites, most=_MOST["output"])
