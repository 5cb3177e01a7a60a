"""Write pages that need no network: that of a report, and the frame of the catalogue's.

What was read from files is text in them, never markup.
"""

from __future__ import annotations

import base64
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from hashlib import sha256
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from imagebuild.bench.judge import best_row as judged_row
from imagebuild.bench.logs import DAMAGED, open_log
from imagebuild.bench.models import BandwidthTest, PerftestTable, Run, UcxResult
from imagebuild.core.console import format_size
from imagebuild.core.errors import ConfigError, plural
from imagebuild.project.records import CheckResult, VerifyResult
from imagebuild.report.charts import DASHES, Drawing, Line, NumberTable, Point, bar_chart, heat_map, line_chart
from imagebuild.report.document import (
    CLAIMS,
    GIB,
    NONE,
    STATES,
    Entry,
    Overall,
    Report,
    State,
    claim_state,
    format_bytes,
    format_number,
    group_alike,
    not_void,
    one_line,
    unique_names,
    visible,
)
from imagebuild.report.sweeps import Sweep, host_label, host_order

STATE_MARKS: dict[State, str] = {"passed": "✓", "failed": "✗", "open": "?", "skipped": NONE}
OVERALL_MARKS: dict[Overall, str] = {"ok": "✓", "limited": NONE, "open": "?", "failed": "✗", "nothing-read": "✗"}
MOST_PROBLEMS = 8
"""Problems that are listed at the top of the page."""


def report_html(report: Report, logs: Sequence[LogText] = (), log_count: int = 0) -> str:
    """Return the page of a report, with these of its `log_count` logs.

    Raises ConfigError if a chart is needed and plotly is not installed.
    """
    page = lay_out(report)
    numbers = Counter(assertion.state for assertion in report.assertions)
    return render_page(
        "report.html.j2",
        page.drawings,
        program=template_text(__package__, "tables.js") if report.entries else "",
        report=report,
        about=report.about,
        created=datetime.fromisoformat(report.about.created).strftime("%-d %B %Y, %H:%M UTC"),
        mark=OVERALL_MARKS[report.overall],
        counts=[(state, numbers[state]) for state in STATES],
        problems=report.problems[:MOST_PROBLEMS],
        more_problems=max(0, len(report.problems) - MOST_PROBLEMS),
        claim_state=partial(claim_state, allowed=report.about.allowed),
        page=page,
        diagnostics=[assertion for assertion in report.assertions if assertion.kind == "diagnostic"],
        skipped=group_alike(report.skips),
        versions=list(versions_of(report)),
        logs=logs,
        more_logs=max(0, log_count - len(logs)),
    )


# Frames of pages


def render_page(
    template: str,
    drawings: Sequence[Drawing] = (),
    *,
    package: str = "imagebuild.report",
    program: str = "",
    data: object = None,
    **values: Any,
) -> str:
    """Return a page that holds everything it needs: styles, charts and scripts.

    `package` has the template. `program` is the page's own script, whose text is trusted; it reads `data`, and can make
    tables sortable.
    Raises ConfigError if there are charts and plotly is not installed.
    """

    def without_control_characters(value: Any) -> Any:
        return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(name) for name in dict.fromkeys((package, __package__))]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=without_control_characters,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.globals |= {
        "NONE": NONE,
        "STATES": STATES,
        "marks": STATE_MARKS,
        "dashes": DASHES,
        "checks_by_component": checks_by_component,
        "shell": shlex.join,
        "CLAIMS": CLAIMS,
        "claim_state": claim_state,
        "number": format_number,
        "bytes": format_bytes,
        "line": one_line,
        "host_label": host_label,
        "judged_row": judged_row,
        "file_size": format_size,
    }
    if program:
        program = template_text(__package__, "sorting.js") + program
    charts_program = template_text(__package__, "charts.js")
    figures = {drawing.id: drawing.figure for drawing in drawings}
    plotly = plotly_js() if figures else ""
    scripts = [text for text in (program, *((plotly, charts_program) if figures else ())) if text]
    # The browser runs the scripts with these digests, and no other.
    policy = " ".join(f"'sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}'" for text in scripts)
    return environment.get_template(template).render(
        css=Markup(template_text(__package__, "page.css")),  # noqa: S704 - ours
        policy=Markup(policy or "'none'"),  # noqa: S704 - digests
        program=Markup(program),  # noqa: S704 - ours
        data=data,
        figures=figures,
        plotly=Markup(plotly),  # noqa: S704 - of the plotly package
        charts_program=Markup(charts_program),  # noqa: S704 - ours
        **values,
    )


def template_text(package: str, name: str) -> str:
    """Return a style sheet or a script that lies beside the templates of a package."""
    return resources.files(package).joinpath("templates", name).read_text(encoding="utf-8")


def plotly_js() -> str:
    """Return the program that draws the charts. Raises ConfigError if plotly is not installed."""
    try:
        from plotly.offline import get_plotlyjs  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        how = "pip install 'imagebuild[report]', or with pipx: pipx inject imagebuild plotly"
        raise ConfigError(f"the page's charts need plotly, which is not installed; run: {how}") from error
    return str(get_plotlyjs())


KEPT_BYTES = 128 * 1024
"""Bytes that are kept of each log: its end shows how a benchmark ended, and debug output can have 100 MB."""
MOST_LOG_BYTES = 1024 * 1024
"""Bytes that are kept of all logs together."""


@dataclass(frozen=True)
class LogText:
    """Hold the text of a log, or its end."""

    source: str
    text: str
    total_bytes: int
    dropped_bytes: int = 0
    """Bytes before `text` that were left out."""


def read_logs(paths: Iterable[Path], kept: int = KEPT_BYTES) -> tuple[LogText, ...]:
    """Return the ends of logs, until they are `MOST_LOG_BYTES`; those that cannot be read any more are left out."""
    logs: list[LogText] = []
    room = MOST_LOG_BYTES
    for path in paths:
        try:
            with open_log(path) as file:
                total = file.seek(0, 2)
                file.seek(max(0, total - kept))
                data = file.read(kept)
        except (OSError, *DAMAGED):
            continue
        if total > kept:
            data = data[data.find(b"\n", 0, 4096) + 1 :]  # without the rest of a line, which could mislead
        room -= len(data)
        if room < 0:
            break
        logs.append(LogText(str(path), data.decode("utf-8", "replace"), total, total - len(data)))
    return tuple(logs)


# The parts of a report's page


@dataclass(frozen=True)
class Page:
    """Hold the results of a report, as its page shows them."""

    sweeps: Sequence[tuple[Sweep, Drawing, Sequence[Entry]]]
    """Each sweep with its picture and its runs, the slowest first."""
    runs: Sequence[Entry]
    """Runs that are no part of a sweep."""
    charts: Sequence[Drawing]
    matrices: Sequence[Drawing]
    copies: Sequence[Sequence[str]]
    """Rows of the tests of nvbandwidth with one value for each device."""
    transfers: Sequence[Drawing]
    messages: Sequence[Sequence[str]]
    """Rows of what perftest and ucx_perftest measured."""

    @property
    def drawings(self) -> tuple[Drawing, ...]:
        """Return everything that plotly draws."""
        return (*(drawing for _, drawing, _ in self.sweeps), *self.charts, *self.matrices, *self.transfers)


def lay_out(report: Report) -> Page:
    """Return the parts of the page that show results."""
    entries = report.entries
    runs = [(entry, entry.result) for entry in entries if isinstance(entry.result, Run)]
    alone = [(entry, run) for entry, run in runs if not entry.sweep]
    sweeps, curves = [], alone
    for number, sweep in enumerate(report.sweeps, 1):
        members = sorted(
            ((entry, run) for entry, run in runs if entry.sweep is sweep), key=lambda item: judged_row(item[1])[0] or 0
        )
        sweeps.append((sweep, _sweep_picture(f"sweep-{number}", sweep), [entry for entry, _ in members]))
        # The slowest, and a typical one beside them.
        curves = [*curves, *members[:MOST_CURVES], members[len(members) // 2]]
    messages = [entry for entry in entries if isinstance(entry.result, PerftestTable | UcxResult)]
    matrices: list[Drawing] = []
    copies: list[tuple[str, ...]] = []
    for entry, test in zip(entries[len(runs) :], report.tests, strict=False):
        matrix = test.matrix or ()
        if len(matrix) > 1 and max(map(len, matrix)) > 1:
            columns = ("", *map(str, range(max(map(len, matrix)))))
            rows = [(str(i), *(format_number(cell, 1) for cell in row)) for i, row in enumerate(matrix)]
            numbers = NumberTable(f"{entry.result.subject}, {test.unit or 'unit unknown'}", columns, rows)
            note = [claim_note(entry), entry.best, test.tool]
            note += [f"sum {format_number(test.sum)}"] if test.sum is not None else []
            text = " · ".join(filter(None, note))
            id_ = f"matrix-{len(matrices) + 1}"
            claims = [claim for claim in (entry.data, entry.participation, *entry.speed) if not_void(claim)]
            picture = heat_map(matrix, test.unit or "")
            matrices.append(Drawing(id_, entry.result.subject, picture, [numbers], claims=claims, note=text))
        else:
            cells = [format_number(cell, 1) for row in matrix for cell in row]
            values = ", ".join(cells[:16]) + (" …" if len(cells) > 16 else "")
            copies.append(
                (entry.result.subject, values or NONE, format_number(test.sum), test.unit or NONE, *entry.words)
            )
    return Page(
        sweeps=sweeps,
        runs=[entry for entry, _ in alone],
        charts=list(_bandwidth_charts(curves)),
        matrices=matrices,
        copies=copies,
        transfers=list(_transfer_charts(report.tables)),
        messages=[(entry.result.subject, entry.best, *entry.words, entry.result.source) for entry in messages],
    )


MOST_CURVES = 3
"""Slowest runs of a sweep whose bandwidth over message size is drawn, beside a typical one."""
MOST_HOSTS = 150
"""Hosts up to which a sweep of pairs is a matrix; a larger one is a bar for each host."""


def _sweep_picture(id_: str, sweep: Sweep) -> Drawing:
    """Draw pairs as a matrix of hosts, single hosts and larger groups as bars, the slowest first."""
    title = f"{sweep.subject}: {sweep.scope}"
    hosts = [(host.label, f"{host.gb_s:.4g}", str(host.runs), str(host.slow_runs)) for host in sweep.hosts]
    numbers = NumberTable("Hosts", ("host", "median GB/s", "runs", "slow runs"), hosts)
    if sweep.nodes == 2 and len(sweep.hosts) <= MOST_HOSTS:
        names = sorted((host.hosts[0] for host in sweep.hosts), key=host_order)
        speeds = {hosts: group.gb_s for group in sweep.groups for hosts in (group.hosts, group.hosts[::-1])}
        figure = heat_map([[speeds.get((row, column)) for column in names] for row in names], "GB/s", names)
    else:
        shown = sweep.hosts if sweep.nodes == 2 else sweep.groups
        values = [group.gb_s for group in shown]
        figure = bar_chart([group.label for group in shown], values, "GB/s", sweep.centre_gb_s, sweep.limit_gb_s)
    note = f"median {sweep.range}; slow below {sweep.limit_gb_s:.4g} GB/s"
    return Drawing(id_, title, figure, [numbers], note=note)


def claim_note(entry: Entry) -> str:
    """Return the state of a result's data if it is a failure; else nothing."""
    return entry.data.state if entry.data.standing() == "failed" else ""


RUN_COLUMNS = (
    "size", "bytes", "count", "type", "op", "root",
    "µs", "algbw", "busbw GB/s", "wrong", "in place µs", "algbw", "busbw GB/s", "wrong",
)  # fmt: skip


def _bandwidth_charts(runs: Sequence[tuple[Entry, Run]]) -> Iterator[Drawing]:
    """Yield a chart of bus bandwidth over message size for each scale, since ceilings depend on the scale."""

    def scale(item: tuple[Entry, Run]) -> tuple[bool, int, int]:
        return item[1].ranks is None, item[1].nodes or 0, item[1].ranks or 0

    drawable = [item for item in runs if any(row.size_bytes > 0 and row.busbw_gb_s for row in item[1].rows)]
    for number, ((_, nodes, ranks), group) in enumerate(groupby(sorted(drawable, key=scale), key=scale), 1):
        title = plural(ranks, "rank") if ranks else "Number of ranks unknown"
        title += f", {plural(nodes, 'node')}" if nodes else ""
        lines, tables = [], []
        for entry, run in group:
            # Without the scale, which the title has.
            name = (run.collective or "unknown collective") + entry.name.removeprefix(run.subject)
            large = [verdict for verdict in entry.speed if (verdict.size_bytes or GIB) > GIB // 2]
            lines.append(
                Line(
                    name,
                    _run_points(run),
                    claim_note(entry),
                    ceilings=[verdict.ceiling for verdict in entry.speed if verdict.ceiling],
                    references=[verdict.reference for verdict in large if verdict.reference],
                )
            )
            tables.append(_run_table(name, run))
        yield line_chart(f"bandwidth-{number}", title, "bus bandwidth, GB/s", lines, tables)


def _run_points(run: Run) -> list[Point]:
    """Return the better placement of each row; details show both."""
    points = []
    for row in run.rows:
        details = []
        for name, half in (("out of place", row.out_of_place), ("in place", row.in_place)):
            if half is not None:
                wrong = "" if half.wrong is None else f", {half.wrong} wrong"
                rate, time = format_number(half.busbw_gb_s), format_number(half.time_us)
                details.append(f"{name} {rate} GB/s, {time} µs{wrong}")
        details.append(" ".join(filter(None, (row.dtype, row.redop))))
        points.append(Point(row.size_bytes, row.busbw_gb_s or 0, tuple(details)))
    return points


def _run_table(name: str, run: Run) -> NumberTable:
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
        rows.append(cells)
    return NumberTable(name, RUN_COLUMNS, rows)


def _transfer_charts(tables: Sequence[PerftestTable]) -> Iterator[Drawing]:
    """Yield a chart of average bandwidth over message size for each unit in which perftest measured several sizes."""
    several = [table for table in tables if len([row for row in table.rows if row.bw_average and row.size_bytes]) > 1]
    for number, unit in enumerate(dict.fromkeys(table.unit for table in several), 1):
        same_unit = [table for table in several if table.unit == unit]
        names = unique_names([(table.test or "perftest", table.source) for table in same_unit])
        lines, numbers = [], []
        for name, table in zip(names, same_unit, strict=True):
            points, rows = [], []
            for row in table.rows:
                details = () if row.msg_rate is None else (f"{row.msg_rate:g} million messages/s",)
                points.append(Point(row.size_bytes, row.bw_average or 0, details))
                values = map(format_number, (row.bw_peak, row.bw_average, row.msg_rate))
                rows.append((format_bytes(row.size_bytes), *values))
            lines.append(Line(name, points))
            numbers.append(NumberTable(name, ("size", "peak", "average", "million messages/s"), rows))
        shown = unit or "unit unknown"
        yield line_chart(f"transfer-{number}", f"perftest, {shown}", f"average bandwidth, {shown}", lines, numbers)


def checks_by_component(verification: VerifyResult) -> dict[str, list[CheckResult]]:
    """Return component → its checks; what failed comes first."""
    checks: dict[str, list[CheckResult]] = {}
    for check in sorted(verification.checks, key=lambda check: check.outcome != "failed"):
        checks.setdefault(check.component, []).append(check)
    return checks


def versions_of(report: Report) -> Iterator[tuple[str, str, str]]:
    """Yield versions of tools, devices and facts of the places where checks ran, each with where it was found."""
    origin = report.about
    sources: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    sources["imagebuild", origin.imagebuild].append("this report")
    if origin.profile:
        sources["profile", origin.profile].append("--profile")
    if origin.baseline:
        sources["baseline", origin.baseline].append("--baseline")
    results: list[Run | BandwidthTest] = [*report.runs, *report.tests]
    for result in results:
        sources[result.tool, result.tool_version or "version not printed"].append(result.source)
        if isinstance(result, Run) and result.device:
            sources["GPU", result.device].append(result.source)
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
