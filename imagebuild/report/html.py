"""The page: one file that needs no network. Everything that was read is text to it, never markup or program."""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

from imagebuild import console
from imagebuild.errors import ConfigError
from imagebuild.report import charts, images, words
from imagebuild.report.assertions import STATES, alike
from imagebuild.report.charts import Figure
from imagebuild.report.clean import one_line, visible
from imagebuild.report.document import Overall, Report
from imagebuild.report.page import Page, page
from imagebuild.report.raw import Raw

MARKS = {"passed": "✓", "failed": "✗", "skipped": words.NONE}
OVERALL: dict[Overall, str] = {"ok": "✓", "failed": "✗", "not-verified": words.NONE, "nothing-read": "✗"}
STROKES = {"solid": "none", "dash": "6 3", "dot": "2 2", "dashdot": "6 2 2 2"}
PROBLEMS = 8
"""Listed at the top of the page."""


def html(report: Report, raws: Sequence[Raw] = ()) -> str:
    """The whole page. Raises ConfigError if a chart is needed and plotly is not installed."""
    laid_out = page_of(report)
    figures = {drawing.id: drawing.figure for drawing in laid_out.drawings}
    plotly = plotly_js() if figures else ""
    script = _part("page.js")
    failed = [claim for claim in report.assertions if claim.state == "failed"]
    states = Counter(claim.state for claim in report.assertions)
    return _environment().get_template("report.html.j2").render(
        report=report,
        about=report.about,
        created=datetime.fromisoformat(report.about.created).strftime("%-d %B %Y, %H:%M UTC"),
        mark=OVERALL[report.overall],
        counts=[(state, states[state]) for state in STATES],
        problems=failed[:PROBLEMS],
        more_problems=max(0, len(failed) - PROBLEMS),
        skipped=alike(claim for claim in report.assertions if claim.state == "skipped"),
        sections=sections(report, laid_out, raws),
        **vars(laid_out),
        diagnostics=[claim for claim in report.assertions if claim.kind == "diagnostic"],
        images=[images.shown(verification) for verification in report.verifications],
        environment=environment(report),
        sources=[(s.path, ", ".join(s.tools) or "nothing known", str(s.lines), str(s.unread)) for s in report.sources],
        raws=raws,
        css=Markup(_part("page.css")),  # noqa: S704 - ours
        figures=embedded(figures),
        plotly=Markup(plotly),  # noqa: S704 - of the plotly package
        script=Markup(script),  # noqa: S704 - ours
        policy=Markup(" ".join(map(_hash, filter(None, (plotly, script))))),  # noqa: S704 - digests
    )  # fmt: skip


def page_of(report: Report) -> Page:
    """The layout. Raises ConfigError if plotly is needed and not installed."""
    try:
        return page(report)
    except ModuleNotFoundError as error:
        raise _no_plotly() from error


def plotly_js() -> str:
    """The program that draws the charts. Raises ConfigError if plotly is not installed."""
    try:
        from plotly.offline import get_plotlyjs  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        raise _no_plotly() from error
    return str(get_plotlyjs())


def _no_plotly() -> ConfigError:
    return ConfigError("--html: charts need plotly, which is not installed; run: pip install 'imagebuild[report]'")


def embedded(figures: Mapping[str, Figure]) -> Markup:
    """JSON that cannot end the script element it is in."""
    text = json.dumps(figures, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))  # noqa: S704


def _hash(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _part(name: str) -> str:
    return files("imagebuild.report").joinpath("templates", name).read_text(encoding="utf-8")


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_part), autoescape=True, undefined=jinja2.StrictUndefined, finalize=_harmless
    )
    environment.globals |= {
        "marks": MARKS,
        "strokes": STROKES,
        "number": words.number,
        "bytes": words.bytes_text,
        "ceiling_colour": charts.CEILING,
        "line": one_line,
        "file_size": console.size,
    }
    return environment


def _harmless(value: Any) -> Any:
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def sections(report: Report, laid_out: Page, raws: Sequence[Raw]) -> list[tuple[str, str]]:
    """The sections that the page has: id and title."""
    checked = [(f"image-{number}", "Image checks") for number in range(1, len(report.verifications) + 1)]
    found: list[tuple[object, tuple[str, str]]] = [
        (laid_out.cards, ("runs", "Collectives")),
        (laid_out.charts, ("bandwidth", "Bandwidth")),
        (laid_out.matrices or laid_out.copies, ("copies", "Copies")),
        (laid_out.transfers or laid_out.messages, ("messages", "Messages")),
        (report.diagnostics, ("diagnostics", "Diagnostics")),
        *((True, section) for section in checked),
        (any(claim.state == "skipped" for claim in report.assertions), ("skipped", "Skipped")),
        (True, ("origin", "Versions")),
        (raws, ("logs", "Raw logs")),
    ]
    return [section for present, section in found if present]


def environment(report: Report) -> list[tuple[str, str, str]]:
    """Versions and devices: what, value, and where that was read."""
    found: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    found["imagebuild", report.about.imagebuild].append("this report")
    if report.about.profile:
        found["profile", report.about.profile].append("--profile")
    if report.about.baseline:
        found["baseline", report.about.baseline].append("--baseline")
    for run in report.runs:
        found[run.tool, run.tool_version or "version not printed"].append(run.source)
        if run.device:
            found["GPU", run.device].append(run.source)
    for test in report.tests:
        found[test.tool, test.tool_version or "version not printed"].append(test.source)
    for verification in report.verifications:
        for what, value in images.facts(verification):
            found[what, value].append(f"imagebuild verify {verification.image}")
    return [(what, value, _places(places)) for (what, value), places in found.items()]


def _places(places: Sequence[str]) -> str:
    first, *others = dict.fromkeys(places)
    return f"{first} and {len(others)} more" if others else first
