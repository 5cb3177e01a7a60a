"""Write HTML pages that load nothing from the network: the page of a report, and the frame of the page
that lists images.

Contents of files are always text in a page, never markup."""

from __future__ import annotations

import base64
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from hashlib import sha256
from importlib import resources
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from imagebuild.bench.datapath import describe, rows_of
from imagebuild.bench.judge import best_row as judged_row
from imagebuild.bench.logs import open_log
from imagebuild.bench.models import BandwidthTest, PairedComparison, Run
from imagebuild.bench.verification import CheckResult
from imagebuild.core.console import format_size
from imagebuild.core.errors import ConfigError, ResultError, plural
from imagebuild.core.fields import natural_order
from imagebuild.core.patterns import data_of
from imagebuild.report import document
from imagebuild.report.charts import Drawing, NumberTable, bar_chart, difference_chart, heat_map, line_chart
from imagebuild.report.document import CLAIMS, NONE, SHOWN_STATES, Entry, Report, best_value, format_number, group_alike
from imagebuild.report.sweeps import Sweep, host_label
from imagebuild.report.text import template_of

_DATA = data_of(__file__)


def report_html(report: Report, logs: Sequence[LogText] = (), log_count: int = 0) -> str:
    """Return the page of a report. `log_count` is the number of all logs; `logs` are the logs that fit into the page.
    Raises ConfigError if a chart is needed and plotly is not installed."""
    page, numbers = lay_out(report), Counter(assertion.state for assertion in report.assertions)
    return render_page(
        "report.html.j2", page.drawings, program=template_text(__package__, "tables.js") if report.measured else "",
        report=report, about=report.about,
        created=datetime.fromisoformat(report.about.created).strftime("%-d %B %Y, %H:%M UTC"),
        counts=[(state, numbers[state]) for state in SHOWN_STATES], most_problems=_DATA["most_problems"],
        problems=group_alike(report.problems), alike=_alike_checks, page=page, rows=document.rows_of(report),
        diagnoses=_DATA["diagnoses"], skipped=group_alike(report.skips), versions=versions_of(report),
        files=[(s.path, ", ".join(s.tools) or "no known tool", s.lines, s.unread) for s in report.sources], logs=logs,
        paths=_paths_of(report), more_logs=max(0, log_count - len(logs)),
    )  # fmt: skip


def render_page(
    template: str, drawings: Sequence[Drawing] = (), *, package: str = "imagebuild.report", program: str = "",
    data: object = None, **values: Any,
) -> str:  # fmt: skip
    """Return a page that includes all its styles, charts and scripts.

    `package` contains the template. `program` is the script of the page; it must be trusted. It reads `data`, and can
    make tables sortable. Raises ConfigError if there are charts and plotly is not installed."""
    program = program and template_text(__package__, "sorting.js") + program
    figures = {drawing.id: drawing.figure for drawing in drawings}
    plotly = f"{plotly_js()}\n{template_text(__package__, 'charts.js')}" if figures else ""
    # The browser runs only scripts with these digests.
    digests = [sha256(text.encode()).digest() for text in (program, plotly) if text]
    policy = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    page = template_of(
        template, package, NONE=NONE, marks=_DATA["marks"], shell=shlex.join,
        CLAIMS=CLAIMS, number=format_number, bytes=document.format_bytes, line=document.one_line, file_size=format_size,
    )  # fmt: skip
    ours = {"css": template_text(__package__, "page.css"), "policy": policy or "'none'"}
    ours |= {"program": program, "plotly": plotly}
    trusted = {name: Markup(text) for name, text in ours.items()}  # noqa: S704 - ours, of plotly, or digests
    return page.render(data=data, figures=figures, **trusted, **values)


def template_text(package: str, name: str) -> str:
    """Return a style sheet or a script in the folder `templates` of a package."""
    return resources.files(package).joinpath("templates", name).read_text(encoding="utf-8")


def plotly_js() -> str:
    """Return plotly.js, which draws the charts. Raises ConfigError if plotly is not installed."""
    try:
        from plotly.offline import get_plotlyjs  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        how = "pip install 'imagebuild[report]', or with pipx: pipx inject imagebuild plotly"
        raise ConfigError(f"the page's charts need plotly, which is not installed; run: {how}") from error
    return str(get_plotlyjs())


class LogText(NamedTuple):
    """The text of a log, or its end."""

    source: str
    text: str
    total_bytes: int
    dropped_bytes: int
    """Number of bytes before `text` that were left out."""


def read_logs(paths: Iterable[Path], kept: int = _DATA["kept_bytes"]) -> tuple[LogText, ...]:
    """Return the ends of logs, up to 1 MiB in total. Logs that are no longer readable are left out."""
    logs: list[LogText] = []
    room = _DATA["most_log_bytes"]
    for path in paths:
        try:
            with open_log(path) as file:
                total = file.seek(0, 2)
                file.seek(max(0, total - kept))
                data = file.read(kept)
        except (OSError, ResultError):
            continue
        if total > kept:
            data = data[data.find(b"\n", 0, 4096) + 1 :]  # without the first line, which is incomplete
        room -= len(data)
        if room < 0:
            break
        logs.append(LogText(str(path), data.decode("utf-8", "replace"), total, total - len(data)))
    return tuple(logs)


# Charts of a report


class Page(NamedTuple):
    """The charts of a report."""

    sweeps: Sequence[tuple[Sweep, Drawing, NumberTable]]
    """Each sweep with its chart and a table of its runs, the slowest first."""
    comparisons: Sequence[Drawing]
    charts: Sequence[Drawing]
    matrices: Sequence[Drawing]

    @property
    def drawings(self) -> tuple[Drawing, ...]:
        return (*(drawing for _, drawing, _ in self.sweeps), *self.comparisons, *self.charts, *self.matrices)


def lay_out(report: Report) -> Page:
    """Return the charts of a report."""
    runs = [(entry, entry.result) for entry in report.entries if isinstance(entry.result, Run)]
    sweeps = []
    for number, sweep in enumerate(report.sweeps, 1):
        members = [(judged_row(run)[0] or 0, entry, run) for entry, run in runs if entry.sweep is sweep]
        rows = [
            (host_label(run.hosts), format_number(value), f"{value / sweep.centre_gb_s:.0%}",
             *document.words_of(entry.judgement), run.source)
            for value, entry, run in sorted(members, key=itemgetter(0))
        ]  # fmt: skip
        numbers = NumberTable(f"Runs of {sweep.subject}", ("hosts", "GB/s", "of the median", *CLAIMS, "file"), rows)
        sweeps.append((sweep, _sweep_picture(f"sweep-{number}", sweep), numbers))
    wide = [test for test in report.tests if test.matrix and min(len(test.matrix), max(map(len, test.matrix))) > 1]
    matrices = [_matrix_picture(f"matrix-{number}", test) for number, test in enumerate(wide, 1)]
    alternating = {pair.source for pair in report.paired}  # their runs are in the charts of the comparisons
    alone = [item for item in runs if not item[0].sweep and item[1].source not in alternating]
    return Page(sweeps, list(_difference_charts(report.paired)), list(_bandwidth_charts(alone)), matrices)


def _difference_charts(comparisons: Iterable[PairedComparison]) -> Iterator[Drawing]:
    """Yield a chart for each collective of each comparison."""
    number = 0
    for pair in comparisons:
        for collective in dict.fromkeys(item.collective for item in pair.differences):
            own = [item for item in pair.differences if item.collective == collective]
            number += 1
            yield difference_chart(f"difference-{number}", f"{collective}: compared with {pair.sides[0]}", own)


def _matrix_picture(id_: str, test: BandwidthTest) -> Drawing:
    matrix = test.matrix or ()
    columns = ("", *map(str, range(max(map(len, matrix)))))
    rows = [(str(i), *(format_number(cell) for cell in row)) for i, row in enumerate(matrix)]
    numbers = NumberTable(f"{test.subject}, {test.unit or 'unit unknown'}", columns, rows)
    notes = ["" if test.verdict == "ok" else test.verdict, best_value(test), f"sum {format_number(test.sum)}"]
    picture = heat_map(matrix, test.unit or "")
    return Drawing(id_, test.subject, picture, [numbers], [" · ".join(filter(None, notes))])


def _sweep_picture(id_: str, sweep: Sweep) -> Drawing:
    """Draw a sweep of pairs as a matrix of hosts, and other sweeps as bars, the slowest first."""
    hosts = [(host.label, f"{host.gb_s:.4g}", str(host.runs), str(host.slow_runs)) for host in sweep.hosts]
    numbers = NumberTable("Hosts", ("host", "best GB/s", "runs", "slow runs"), hosts)
    if sweep.nodes == 2:
        names = sorted((host.hosts[0] for host in sweep.hosts), key=natural_order)
        speeds = {hosts: group.least_gb_s for group in sweep.groups for hosts in (group.hosts, group.hosts[::-1])}
        figure = heat_map([[speeds.get((row, column)) for column in names] for row in names], "GB/s", names)
    else:
        values = [group.least_gb_s for group in sweep.groups]
        names = [group.label for group in sweep.groups]
        figure = bar_chart(names, values, "GB/s", sweep.centre_gb_s, sweep.limit_gb_s)
    note = f"median {sweep.range}; slow below {sweep.limit_gb_s:.4g} GB/s"
    return Drawing(id_, f"{sweep.subject}: {sweep.scope}", figure, [numbers], [note])


def _bandwidth_charts(runs: Sequence[tuple[Entry, Run]]) -> Iterator[Drawing]:
    """Yield a chart of bus bandwidth over message size for each number of ranks and nodes, on which ceilings depend."""

    def scale(item: tuple[Entry, Run]) -> tuple[bool, int, int]:
        return item[1].ranks is None, item[1].nodes or 0, item[1].ranks or 0

    drawable = [item for item in runs if any(row.size_bytes > 0 and row.busbw_gb_s for row in item[1].rows)]
    for number, ((_, nodes, ranks), group) in enumerate(groupby(sorted(drawable, key=scale), key=scale), 1):
        title = plural(ranks, "rank") if ranks else "Number of ranks unknown"
        title += f", {plural(nodes, 'node')}" if nodes else ""
        lines = []
        for entry, run in group:
            # Leave out the numbers of ranks and nodes, because the title contains them.
            name = (run.collective or "unknown collective") + entry.name.removeprefix(run.subject)
            name += "" if run.verdict == "ok" else f", {run.verdict}"
            lines.append((name, run, entry.judgement.speed))
        yield line_chart(f"bandwidth-{number}", title, lines)


def _alike_checks(checks: Iterable[CheckResult]) -> list[list[CheckResult]]:
    """Group the judgements that failed for one reason. Each other check is a group of its own."""
    groups: defaultdict[tuple[str, str], list[CheckResult]] = defaultdict(list)
    for check in sorted(checks, key=lambda check: check.outcome):
        is_judged = check.outcome == "failed" and check.judgements
        groups[check.outcome, check.reason if is_judged else check.name].append(check)
    return list(groups.values())


def _paths_of(report: Report) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Return what carried the data: the results with equal facts, the facts in one line, and as rows of a table."""
    names: defaultdict[tuple[tuple[str, str], ...], list[str]] = defaultdict(list)
    lines = {}
    for name, path in report.paths:
        key = tuple(rows_of(path))
        names[key].append(name)
        lines[key] = describe(path)
    return [(", ".join(group), lines[key], list(key)) for key, group in names.items()]


def versions_of(report: Report) -> list[tuple[str, str, str]]:
    """Return the versions of tools, the GPUs, and facts about the hosts on which checks ran, each with its source."""
    about = report.about
    facts = [
        ("imagebuild", about.imagebuild, "this report"),
        ("profile", about.profile, "--profile"),
        ("baseline", about.baseline, "--baseline"),
    ]
    measured: tuple[Run | BandwidthTest, ...] = (*report.runs, *report.tests)
    for result in measured:
        facts.append((result.tool, result.tool_version or "version not printed", result.source))
        facts += [("GPU", device, result.source) for device in result.devices]
    for verified in report.verifications:
        own = [("image", f"{verified.image}, {verified.platform}, {verified.digest or 'digest unknown'}")]
        own.append(("imagebuild", verified.version))
        if place := verified.surroundings:
            own += [("runner", place.runner), ("GPUs", str(place.gpus)), *place.facts.items()]
            own += [(f"no {facility}", reason) for facility, reason in place.why.items()]
        facts += [(item, value, f"imagebuild verify {verified.image}") for item, value in own]
    places: defaultdict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for item, value, found_in in facts:
        if value:
            places[item, value][found_in] = None
    return [
        (*fact, f"{first} and {len(others)} more" if others else first) for fact, (first, *others) in places.items()
    ]
