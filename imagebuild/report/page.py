"""Write a report as one HTML page that needs no network. What was read from files is text in it, never markup."""

from __future__ import annotations

import base64
import json
import math
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from html import escape
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from imagebuild.bench.models import BandwidthTest, Limit, PerftestTable, Run, SpeedVerdict
from imagebuild.core import console
from imagebuild.core.errors import ConfigError
from imagebuild.project.records import CheckResult, VerifyResult
from imagebuild.report.document import (
    GIB,
    NONE,
    STATES,
    Assertion,
    BestRow,
    Overall,
    Report,
    SpeedVerdicts,
    State,
    best_row,
    best_value,
    busbw,
    format_bytes,
    format_number,
    group_alike,
    latency,
    name_of,
    one_line,
    run_name,
    run_reason,
    speed_state,
    unique_names,
    verdicts_by_result,
    visible,
)

STATE_MARKS: dict[State, str] = {"passed": "✓", "failed": "✗", "skipped": NONE}
OVERALL_MARKS: dict[Overall, str] = {"ok": "✓", "failed": "✗", "not-verified": NONE, "nothing-read": "✗"}
MOST_PROBLEMS = 8
"""Problems that are listed at the top of the page."""


def report_html(report: Report, logs: Sequence[LogText] = ()) -> str:
    """Return the whole page. Raises ConfigError if a chart is needed and plotly is not installed."""
    page = lay_out(report)
    figures = {drawing.id: drawing.figure for drawing in page.drawings}
    plotly = plotly_js() if figures else ""
    script = _template_text("page.js")
    # The browser runs the scripts with these digests, and no other.
    digests = [base64.b64encode(sha256(text.encode()).digest()).decode() for text in (plotly, script) if text]
    numbers = Counter(assertion.state for assertion in report.assertions)
    return _templates().get_template("report.html.j2").render(
        report=report,
        about=report.about,
        created=datetime.fromisoformat(report.about.created).strftime("%-d %B %Y, %H:%M UTC"),
        mark=OVERALL_MARKS[report.overall],
        counts=[(state, numbers[state]) for state in STATES],
        problems=report.failures[:MOST_PROBLEMS],
        more_problems=max(0, len(report.failures) - MOST_PROBLEMS),
        page=page,
        sections=sections_of(page, logs),
        logs=logs,
        css=Markup(_template_text("page.css")),  # noqa: S704 - ours
        figures=_json_in_script(figures),
        plotly=Markup(plotly),  # noqa: S704 - of the plotly package
        script=Markup(script),  # noqa: S704 - ours
        policy=Markup(" ".join(f"'sha256-{digest}'" for digest in digests)),  # noqa: S704 - digests
    )  # fmt: skip


def plotly_js() -> str:
    """Return the program that draws the charts. Raises ConfigError if plotly is not installed."""
    try:
        from plotly.offline import get_plotlyjs  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        raise ConfigError("--html: charts need plotly, which is not installed; run: pip install plotly") from error
    return str(get_plotlyjs())


KEPT_BYTES = 128 * 1024
"""Bytes that are kept of each log. The end tells how a benchmark ended; logs with debug output can have 100 MB."""


@dataclass(frozen=True)
class LogText:
    """Hold the text of a log, or its end."""

    source: str
    text: str
    total_bytes: int
    dropped_bytes: int = 0
    """Bytes before `text` that were left out."""


def read_logs(paths: Iterable[Path], kept: int = KEPT_BYTES) -> tuple[LogText, ...]:
    """Return the ends of logs; those that cannot be read any more are left out."""
    logs = []
    for path in paths:
        try:
            with path.open("rb") as file:
                total = file.seek(0, 2)
                file.seek(max(0, total - kept))
                data = file.read(kept)
        except OSError:
            continue
        if total > kept:
            data = data[data.find(b"\n", 0, 4096) + 1 :]  # without the rest of a line, which could mislead
        logs.append(LogText(str(path), data.decode("utf-8", "replace"), total, total - len(data)))
    return tuple(logs)


# Templates


def _templates() -> jinja2.Environment:
    def without_control_characters(value: Any) -> Any:
        return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_template_text),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=without_control_characters,
    )
    environment.globals |= {
        "marks": STATE_MARKS,
        "dash_patterns": DASH_PATTERNS,
        "ceiling_colour": CEILING_COLOUR,
        "speed_state": speed_state,
        "number": format_number,
        "bytes": format_bytes,
        "line": one_line,
        "file_size": console.format_size,
    }
    return environment


def _template_text(name: str) -> str:
    return resources.files("imagebuild.report").joinpath("templates", name).read_text(encoding="utf-8")


def _json_in_script(figures: Mapping[str, Figure]) -> Markup:
    """Return JSON that cannot end the script element around it."""
    text = json.dumps(figures, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))  # noqa: S704


# The parts of the page


@dataclass(frozen=True)
class PageTable:
    """Describe a table."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Drawing:
    """Describe a chart with its legend, its limits, and tables of its numbers."""

    id: str
    title: str
    figure: Figure
    tables: tuple[PageTable, ...]
    legend: tuple[ChartLine, ...] = ()
    limits: tuple[DrawnLimit, ...] = ()
    verdicts: tuple[SpeedVerdict, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Meter:
    """Describe a bar that shows how much of the ceiling was reached; lengths are in per cent."""

    width: float
    label: str
    state: State
    reference: float | None


@dataclass(frozen=True)
class Card:
    """Describe a run for the summary."""

    name: str
    run: Run
    state: State
    reason: str
    best: BestRow | None
    meter: Meter | None
    verdicts: tuple[SpeedVerdict, ...]
    facts: str
    """GPU, version of the tool, types of data and file."""


Evidence = tuple[tuple[str, str], ...]
"""Titles and texts."""


@dataclass(frozen=True)
class ShownCheck:
    """Describe a check with its evidence."""

    check: str
    outcome: str
    reason: str
    evidence: Evidence


@dataclass(frozen=True)
class ShownComponent:
    """List the checks of a component, failed ones first."""

    name: str
    counts: str
    checks: tuple[ShownCheck, ...]


@dataclass(frozen=True)
class ShownImage:
    """Describe an image with its components, those with failed checks first."""

    name: str
    facts: str
    components: tuple[ShownComponent, ...]
    evidence: Evidence


@dataclass(frozen=True)
class Page:
    """Hold the parts of the page that are computed from the report."""

    cards: tuple[Card, ...]
    charts: tuple[Drawing, ...]
    matrices: tuple[Drawing, ...]
    copies: tuple[tuple[str, ...], ...]
    """Tests of nvbandwidth with one value for each device."""
    transfers: tuple[Drawing, ...]
    messages: tuple[PageTable, ...]
    images: tuple[ShownImage, ...]
    diagnostics: tuple[Assertion, ...]
    skipped: tuple[tuple[Assertion, tuple[str, ...]], ...]
    versions: tuple[tuple[str, str, str], ...]
    """Item, value, and the source of the value."""
    sources: tuple[tuple[str, str, str, str], ...]
    """File, tools whose output was found in it, number of lines, number of unread lines."""

    @property
    def drawings(self) -> tuple[Drawing, ...]:
        """Return everything that plotly draws."""
        return (*self.charts, *self.matrices, *self.transfers)


def lay_out(report: Report) -> Page:
    """Return the parts of the page."""
    verdicts = verdicts_by_result(report, report.judgements)
    runs = list(zip(unique_names(report.runs), report.runs, strict=True))
    matrices = [test for test in report.tests if _is_matrix(test)]
    copies = []
    for test in report.tests:
        if test.status == "passed" and not _is_matrix(test):
            cells = [format_number(cell, 1) for row in test.matrix or () for cell in row]
            values = ", ".join(cells[:16]) + (" …" if len(cells) > 16 else "")
            outcomes = _outcomes(verdicts[id(test)])
            copies.append((name_of(test), values or NONE, format_number(test.sum), test.unit or NONE, outcomes))
    return Page(
        cards=tuple(_card(name, run, verdicts[id(run)]) for name, run in runs),
        charts=tuple(_bandwidth_charts(runs, verdicts)),
        matrices=tuple(_matrix_drawing(number, test, verdicts[id(test)]) for number, test in enumerate(matrices, 1)),
        copies=tuple(copies),
        transfers=tuple(_transfer_charts(report.tables)),
        messages=tuple(_message_tables(report, verdicts)),
        images=tuple(shown_image(verification) for verification in report.verifications),
        diagnostics=tuple(assertion for assertion in report.assertions if assertion.kind == "diagnostic"),
        skipped=tuple(group_alike(report.skips)),
        versions=tuple(versions_of(report)),
        sources=tuple(
            (source.path, ", ".join(source.tools) or "no known tool", str(source.lines), str(source.unread))
            for source in report.sources
        ),
    )


def sections_of(page: Page, logs: Sequence[LogText]) -> list[tuple[str, str]]:
    """Return id and title of each section that the page has."""
    sections: list[tuple[object, str, str]] = [
        (page.cards, "runs", "Collectives"),
        (page.charts, "bandwidth", "Bandwidth"),
        (page.matrices or page.copies, "copies", "Copies"),
        (page.transfers or page.messages, "messages", "Messages"),
        (page.diagnostics, "diagnostics", "Diagnostics"),
        *((True, f"image-{number}", "Image checks") for number in range(1, len(page.images) + 1)),
        (page.skipped, "skipped", "Skipped"),
        (True, "origin", "Versions"),
        (logs, "logs", "Raw logs"),
    ]
    return [(id_, title) for present, id_, title in sections if present]


def _card(name: str, run: Run, verdicts: tuple[SpeedVerdict, ...]) -> Card:
    kinds = sorted({" ".join(filter(None, (row.dtype, row.redop))) for row in run.rows})
    facts = [
        run.device or "",
        f"{run.tool} {run.tool_version}" if run.tool_version else run.tool,
        f"{len(run.rows)} sizes" + (f", {run.partial_rows} incomplete rows" if run.partial_rows else ""),
        ", ".join(kinds[:4]),
        run.source,
    ]
    meter = None
    for verdict in verdicts:
        if meter is None and verdict.ceiling and verdict.measured is not None:
            ceiling = verdict.ceiling.value
            share, reference = verdict.measured / ceiling, None
            label = f"{share:.0%} of the ceiling, {ceiling:.4g} {verdict.ceiling.unit}"
            if verdict.reference:
                reference = min(99.5, verdict.reference.value / ceiling * 100)
                label += f"; the mark is the reference, {verdict.reference.value:.4g}"
            meter = Meter(round(min(100.0, share * 100), 1), label, speed_state(verdict), reference)
    return Card(
        name=name,
        run=run,
        state="passed" if run.verdict == "ok" else "failed",
        reason=run_reason(run),
        best=best_row(run),
        meter=meter,
        verdicts=verdicts,
        facts=" · ".join(filter(None, facts)),
    )


def versions_of(report: Report) -> Iterator[tuple[str, str, str]]:
    """Yield versions of tools, devices and facts of the places where checks ran, each with where it was found."""
    origin = report.about
    sources: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    sources["imagebuild", origin.imagebuild].append("this report")
    if origin.profile:
        sources["profile", origin.profile].append("--profile")
    if origin.baseline:
        sources["baseline", origin.baseline].append("--baseline")
    for run in report.runs:
        sources[run.tool, run.tool_version or "version not printed"].append(run.source)
        if run.device:
            sources["GPU", run.device].append(run.source)
    for test in report.tests:
        sources[test.tool, test.tool_version or "version not printed"].append(test.source)
    for verification in report.verifications:
        digest = verification.digest or "digest unknown"
        facts = [("image", f"{verification.image}, {verification.platform}, {digest}")]
        if verification.version:
            facts.append(("imagebuild", verification.version))
        if place := verification.surroundings:
            facts += [("runner", place.runner), ("GPUs", str(place.gpus)), *place.facts.items()]
            facts += [(f"no {facility}", reason) for facility, reason in place.why.items()]
        for fact in facts:
            sources[fact].append(f"imagebuild verify {verification.image}")
    for (item, value), found_in in sources.items():
        first, *others = dict.fromkeys(found_in)
        yield item, value, f"{first} and {len(others)} more" if others else first


# Images


def shown_image(verification: VerifyResult) -> ShownImage:
    checks_of: dict[str, list[CheckResult]] = {}
    for check in sorted(verification.checks, key=lambda check: check.outcome != "failed"):
        checks_of.setdefault(check.component, []).append(check)
    components = []
    for name, checks in checks_of.items():
        numbers = Counter(check.outcome for check in checks)
        components.append(
            ShownComponent(
                name=name,
                counts=", ".join(f"{numbers[state]} {state}" for state in STATES if numbers[state]),
                checks=tuple(ShownCheck(c.check, c.outcome, c.reason, tuple(_evidence(c))) for c in checks),
            )
        )
    place = verification.surroundings
    facts = (verification.platform, verification.target, verification.digest, verification.started)
    return ShownImage(
        name=verification.image,
        facts=" · ".join(filter(None, facts)),
        components=tuple(components),
        evidence=(("All environment variables", _variables(place.environment)),) if place and place.environment else (),
    )


def _evidence(check: CheckResult) -> Iterator[tuple[str, str]]:
    if check.command:
        end = "killed at its time limit" if check.timeout else f"exit status {check.status}"
        yield f"Command, {end}, {check.seconds:.1f} s", shlex.join(check.command)
    if check.environment:
        yield "Environment", _variables(check.environment)
    if check.output:
        yield "Output" + (f", the end of {check.log}" if check.log else ""), check.output


def _variables(environment: Mapping[str, str]) -> str:
    return "\n".join(f"{name}={value}" for name, value in sorted(environment.items()))


# Charts and tables of results

PALETTE = ("#2f7ed8", "#c2571a", "#178a6b", "#a855c7", "#9a7b00", "#d6336c", "#5b7083", "#7a5cff")
"""Colours of lines. Each has a contrast of at least 3:1 to the white and to the dark page."""
DASHES = ("solid", "dash", "dot", "dashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star")
DASH_PATTERNS = {"solid": "none", "dash": "6 3", "dot": "2 2", "dashdot": "6 2 2 2"}
"""Dashes of plotly → of SVG, for legends."""
CEILING_COLOUR = "#d64545"
HEAT_COLOURS = [[0.0, "#fff0d9"], [0.6, "#ee9a4d"], [0.85, "#3d9a8b"], [1.0, "#0b4f5c"]]
"""Pairs that are slower than the best have warm colours, which stand out. The colours get steadily darker, so that they
can be printed in grey."""
MOST_COLUMNS_WITH_NUMBERS = 16
"""Rows and columns of a matrix up to which the cells of its heat map contain their numbers."""

Figure = dict[str, Any]
"""The `data` and `layout` that plotly.js draws."""


@dataclass(frozen=True)
class ChartLine:
    """Describe the look of a line, for the chart and for its legend."""

    name: str
    colour: str
    dash: str
    symbol: str
    note: str = ""
    """Verdict on the data, if it is not `ok`."""


@dataclass(frozen=True)
class DrawnLimit:
    """Describe a limit that a chart shows."""

    kind: str
    """`ceiling` or `reference`."""
    limit: Limit
    colour: str | None = None
    """Colour of the line that the reference is for; None for a ceiling."""

    @property
    def text(self) -> str:
        """Return the value with its unit: `466.7 GB/s`."""
        return f"{self.limit.value:.4g} {self.limit.unit}"


def _chart_line(name: str, number: int, note: str = "") -> ChartLine:
    """Return the look of the line with this number; the dash differs where a colour is used again."""
    round_ = number // len(PALETTE)
    return ChartLine(
        name=name,
        colour=PALETTE[number % len(PALETTE)],
        dash=DASHES[round_ % len(DASHES)],
        symbol=SYMBOLS[number % len(SYMBOLS)],
        note=note,
    )


def _bandwidth_charts(runs: Sequence[tuple[str, Run]], verdicts: SpeedVerdicts) -> Iterator[Drawing]:
    """Yield a chart of bus bandwidth over message size for each scale, since ceilings depend on the scale."""

    def scale(named_run: tuple[str, Run]) -> tuple[bool, int, int]:
        run = named_run[1]
        return run.ranks is None, run.nodes or 0, run.ranks or 0

    drawable = [item for item in runs if any(row.size_bytes > 0 and busbw(row) for row in item[1].rows)]
    for number, ((_, nodes, ranks), group) in enumerate(groupby(sorted(drawable, key=scale), key=scale), 1):
        title = f"{ranks} rank{'s' * (ranks != 1)}" if ranks else "Number of ranks unknown"
        title += f", {nodes} node{'s' * (nodes != 1)}" if nodes else ""
        members: list[tuple[ChartLine, Run]] = []
        for index, (name, run) in enumerate(group):
            # Without the scale, which the title has.
            short = (run.collective or "collective unknown") + name.removeprefix(run_name(run))
            members.append((_chart_line(short, index, "" if run.verdict == "ok" else run.verdict), run))
        limits = drawn_limits(members, verdicts)
        yield Drawing(
            id=f"bandwidth-{number}",
            title=title,
            figure=_figure([_run_trace(line, run) for line, run in members], "bus bandwidth, GB/s", limits),
            tables=tuple(_run_table(line.name, run) for line, run in members),
            legend=tuple(line for line, _ in members),
            limits=limits,
        )


def drawn_limits(members: Iterable[tuple[ChartLine, Run]], verdicts: SpeedVerdicts) -> tuple[DrawnLimit, ...]:
    """Return each ceiling once, and each run's reference in the colour of its line."""
    ceilings: dict[float, DrawnLimit] = {}
    references: list[DrawnLimit] = []
    for line, run in members:
        for verdict in verdicts.get(id(run), ()):
            if verdict.ceiling:
                ceilings.setdefault(round(verdict.ceiling.value, 1), DrawnLimit("ceiling", verdict.ceiling))
            if verdict.reference and (verdict.size_bytes is None or verdict.size_bytes > GIB // 2):
                references.append(DrawnLimit("reference", verdict.reference, line.colour))
    return (*ceilings.values(), *dict.fromkeys(references))


def _run_trace(line: ChartLine, run: Run) -> dict[str, Any]:
    """Return the line of a run: the better placement of each row; details show both."""
    points = []
    for row in sorted(run.rows, key=lambda row: row.size_bytes):
        speed = busbw(row)
        if row.size_bytes <= 0 or not speed:
            continue  # a logarithmic axis has no zero
        details = []
        for name, half in (("out of place", row.out_of_place), ("in place", row.in_place)):
            if half is not None:
                wrong = "" if half.wrong is None else f", {half.wrong} wrong"
                rate, time = format_number(half.busbw_gb_s), format_number(half.time_us)
                details.append(f"{name} {rate} GB/s, {time} µs{wrong}")
        details.append(_plotly_text(" ".join(filter(None, (row.dtype, row.redop)))))
        points.append((row.size_bytes, speed, "<br>".join(details)))
    return _trace(line, points)


RUN_COLUMNS = (
    "size", "bytes", "count", "type", "op", "root",
    "µs", "algbw", "busbw GB/s", "wrong", "in place µs", "algbw", "busbw GB/s", "wrong",
)  # fmt: skip


def _run_table(name: str, run: Run) -> PageTable:
    def text(value: object) -> str:
        return NONE if value is None else str(value)

    rows = []
    for row in run.rows:
        cells = [format_bytes(row.size_bytes), str(row.size_bytes), str(row.count), row.dtype]
        cells += [text(row.redop), text(row.root)]
        for half in (row.out_of_place, row.in_place):
            values = (half.time_us, half.algbw_gb_s, half.busbw_gb_s) if half else (None, None, None)
            cells += [format_number(value) for value in values]
            cells.append(text(half.wrong if half else None))
        rows.append(tuple(cells))
    return PageTable(name, RUN_COLUMNS, tuple(rows))


def _is_matrix(test: BandwidthTest) -> bool:
    return test.matrix is not None and len(test.matrix) > 1 and max(map(len, test.matrix)) > 1


def _matrix_drawing(number: int, test: BandwidthTest, verdicts: tuple[SpeedVerdict, ...]) -> Drawing:
    matrix = test.matrix or ()
    columns = ("", *map(str, range(max(map(len, matrix)))))
    rows = tuple((str(i), *(format_number(cell, 1) for cell in row)) for i, row in enumerate(matrix))
    name = name_of(test)
    note = [
        test.status if test.status != "passed" else "",
        best_value(test),
        test.tool,
        f"sum {format_number(test.sum)}" if test.sum is not None else "",
    ]
    return Drawing(
        id=f"matrix-{number}",
        title=name,
        figure=heat_map(test),
        tables=(PageTable(f"{name}, {test.unit or 'unit unknown'}", columns, rows),),
        verdicts=verdicts,
        note=" · ".join(filter(None, note)),
    )


def _outcomes(verdicts: Iterable[SpeedVerdict]) -> str:
    return "; ".join(verdict.outcome for verdict in verdicts) or NONE


def _transfer_charts(tables: Iterable[PerftestTable]) -> Iterator[Drawing]:
    """Yield a chart of average bandwidth over message size for each unit in which perftest measured several sizes."""
    several = [table for table in tables if len([row for row in table.rows if row.bw_average and row.size_bytes]) > 1]
    for number, unit in enumerate(dict.fromkeys(table.unit for table in several), 1):
        same_unit = [table for table in several if table.unit == unit]
        names = unique_names(same_unit)
        lines = [_chart_line(name, index) for index, name in enumerate(names)]
        traces = []
        for line, table in zip(lines, same_unit, strict=True):
            points = [
                (row.size_bytes, row.bw_average, "" if row.msg_rate is None else f"{row.msg_rate:g} million messages/s")
                for row in sorted(table.rows, key=lambda row: row.size_bytes)
                if row.bw_average and math.isfinite(row.bw_average) and row.size_bytes > 0
            ]
            traces.append(_trace(line, points))
        columns = ("size", "peak", "average", "million messages/s")
        yield Drawing(
            id=f"transfer-{number}",
            title=f"perftest, {unit or 'unit unknown'}",
            figure=_figure(traces, f"average bandwidth, {_plotly_text(unit or 'unit unknown')}"),
            tables=tuple(
                PageTable(
                    name,
                    columns,
                    tuple(
                        (format_bytes(r.size_bytes), *map(format_number, (r.bw_peak, r.bw_average, r.msg_rate)))
                        for r in table.rows
                    ),
                )
                for name, table in zip(names, same_unit, strict=True)
            ),
            legend=tuple(lines),
        )


def _message_tables(report: Report, verdicts: SpeedVerdicts) -> Iterator[PageTable]:
    if report.tables:
        rows = tuple((name_of(t), best_value(t), _outcomes(verdicts[id(t)]), t.source) for t in report.tables)
        yield PageTable("perftest: the best size of each table", ("test", "best", "speed", "file"), rows)
    if report.ucx:
        ucx_rows = tuple(
            (
                name_of(ucx),
                NONE if ucx.size_bytes is None else format_bytes(ucx.size_bytes),
                format_number(latency(ucx.latency_us)),
                format_number(ucx.bandwidth_mib_s.get("average")),
                format_number(ucx.rate_msg_s.get("average")),
                ucx.source,
            )
            for ucx in report.ucx
        )
        columns = ("test", "size", "latency µs", "MiB/s", "messages/s", "file")
        yield PageTable("ucx_perftest: typical latency, average bandwidth", columns, ucx_rows)


# Figures of plotly


def _trace(line: ChartLine, points: Sequence[tuple[int, float, str]]) -> dict[str, Any]:
    """Return a line through points: message size, value, and details that show while a pointer is over the point."""
    return {
        "type": "scatter",
        "name": _plotly_text(line.name),
        "x": [size for size, _, _ in points],
        "y": [value for _, value, _ in points],
        "customdata": [[_plotly_text(line.name), format_bytes(size), details] for size, _, details in points],
        "mode": "lines+markers",
        "line": {"color": line.colour, "width": 2, "dash": line.dash},
        "marker": {"size": 6, "symbol": line.symbol},
        "hovertemplate": "<b>%{customdata[0]}</b><br>%{customdata[1]}: %{y:.4g}<br>%{customdata[2]}<extra></extra>",
    }


def _figure(traces: list[dict[str, Any]], unit: str, limits: Sequence[DrawnLimit] = ()) -> Figure:
    """Return a figure with logarithmic axes."""
    sizes = [size for trace in traces for size in trace["x"]]
    speeds = [speed for trace in traces for speed in trace["y"]] + [drawn.limit.value for drawn in limits]
    # About eight powers of two.
    first, last = max(0, min(sizes, default=1).bit_length() - 1), max(sizes, default=1).bit_length()
    marks = [1 << power for power in range(first, last + 1, max(1, -(-(last - first) // 8)))]
    # At least a decade, so that a flat line looks flat, and room above for the label of a ceiling.
    top = math.log10(max(speeds, default=10))
    low = min(math.log10(min(speeds, default=1)), top - 1)
    # Powers of ten, and where those are few, twice and five times them.
    factors = (1, 2, 5) if top - low < 2.5 else (1,)
    ticks = [factor * 10.0**power for power in range(math.floor(low), math.ceil(top) + 1) for factor in factors]
    ticks = [tick for tick in ticks if low - 0.1 <= math.log10(tick) <= top + 0.3]
    axis = {"type": "log", "showline": True, "ticks": "outside", "zeroline": False}
    return {
        "data": traces,
        "layout": {
            "showlegend": False,
            "hovermode": "closest",
            "margin": {"l": 56, "r": 16, "t": 16, "b": 52},
            "xaxis": {
                **axis, "title": {"text": "message size"}, "tickangle": 0, "tickvals": marks,
                "ticktext": [format_bytes(mark) for mark in marks],
            },
            "yaxis": {
                **axis, "title": {"text": unit}, "range": [low - 0.1, top + 0.3],
                "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks],
            },
            "shapes": _limit_shapes(limits, max(sizes, default=GIB)),
        },
    }  # fmt: skip


def _limit_shapes(limits: Sequence[DrawnLimit], largest_size: int) -> list[dict[str, Any]]:
    """Return a line over the whole width for each ceiling, and one over the sizes that are judged for each reference.

    Only the highest and the lowest ceiling have room for a label, on their outer side.
    """
    ceilings = [drawn.limit.value for drawn in limits if drawn.kind == "ceiling"]
    shapes: list[dict[str, Any]] = []
    for drawn in limits:
        value = drawn.limit.value
        shape: dict[str, Any] = {"type": "line", "y0": value, "y1": value}
        if drawn.kind == "reference":
            shape |= {"x0": GIB, "x1": max(largest_size, 2 * GIB)}
            shape |= {"line": {"color": drawn.colour, "width": 3, "dash": "dot"}}
        else:
            shape |= {"xref": "paper", "x0": 0, "x1": 1}
            shape |= {"line": {"color": CEILING_COLOUR, "width": 1.5, "dash": "dash"}}
            if value in {max(ceilings), min(ceilings)}:
                side = "bottom" if value == max(ceilings) else "top"
                font = {"size": 11}
                text = f"ceiling {drawn.text}"
                shape["label"] = {"text": text, "textposition": "start", "yanchor": side, "font": font}
        shapes.append(shape)
    return shapes


def heat_map(test: BandwidthTest) -> Figure:
    """Return the heat map of a matrix. Its colours begin at 0, so that noise does not look like a pattern."""
    # The diagonal of p2pBandwidthLatencyTest is a copy within one device, which is much faster.
    without_diagonal = test.tool == "p2pBandwidthLatencyTest"
    matrix = [
        [
            None if cell is None or not math.isfinite(cell) or (without_diagonal and i == j) else cell
            for j, cell in enumerate(row)
        ]
        for i, row in enumerate(test.matrix or ())
    ]
    rows, columns = len(matrix), max(map(len, matrix), default=0)
    unit = _plotly_text(test.unit or "")
    trace: dict[str, Any] = {
        "type": "heatmap",
        "z": matrix,
        "x": [str(number) for number in range(columns)],
        "y": [str(number) for number in range(rows)],
        "text": [
            ["" if cell is None else f"{cell:.3g}" if cell < 100 else f"{cell:.0f}" for cell in row] for row in matrix
        ],
        "zmin": 0,
        "zmax": max((cell for row in matrix for cell in row if cell is not None), default=1),
        "colorscale": HEAT_COLOURS,
        # Of times, the long ones are slow.
        "reversescale": test.unit in {"ns", "us"},
        "xgap": 1,
        "ygap": 1,
        "hoverongaps": False,
        "hovertemplate": "row %{y}, column %{x}<br><b>%{z:.4g} " + unit + "</b><extra></extra>",
        "textfont": {"size": 11},
        "colorbar": {"title": {"text": unit}, "thickness": 12, "outlinewidth": 0},
    }
    if max(rows, columns) <= MOST_COLUMNS_WITH_NUMBERS:
        trace["texttemplate"] = "%{text}"
    return {
        "data": [trace],
        "layout": {
            "height": max(150, min(640, 90 + 34 * rows)),
            "margin": {"l": 44, "r": 8, "t": 40, "b": 12},
            "xaxis": {"title": {"text": "column"}, "side": "top", "type": "category", "showgrid": False},
            "yaxis": {"title": {"text": "row"}, "autorange": "reversed", "type": "category", "showgrid": False},
        },
    }


def _plotly_text(text: str) -> str:
    """Return text for plotly, which interprets some tags, entities and placeholders."""
    return escape(one_line(text, 120), quote=False).replace("%{", "%\u200b{")
