"""What the page shows, in its order: the report as cards, charts and tables. Pure; the template only lays it out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from imagebuild.judgement import Judgement
from imagebuild.report import charts, matching, words
from imagebuild.report.assertions import JUDGED, State
from imagebuild.report.document import Report
from imagebuild.results.models import BandwidthTest, Run

Judged = Mapping[int, tuple[Judgement, ...]]


@dataclass(frozen=True)
class Numbers:
    """A table."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Said:
    """A judgement as the page words it."""

    state: State
    outcome: str
    reason: str


@dataclass(frozen=True)
class Drawing:
    """A chart with its legend, its limits and the tables with its numbers."""

    id: str
    title: str
    figure: charts.Figure
    tables: tuple[Numbers, ...]
    legend: tuple[charts.Line, ...] = ()
    limits: tuple[charts.Drawn, ...] = ()
    judgements: tuple[Said, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Meter:
    """How much of the ceiling was reached; widths in per cent."""

    width: float
    label: str
    state: State
    reference: float | None


@dataclass(frozen=True)
class Card:
    """One run in the summary."""

    name: str
    run: Run
    state: State
    best: words.Best | None
    meter: Meter | None
    judgements: tuple[Said, ...]
    facts: str

    @property
    def why(self) -> str:
        """The reason of the verdict."""
        return words.why(self.run)


@dataclass(frozen=True)
class Page:
    """The parts that take more than a look into the report."""

    cards: tuple[Card, ...]
    charts: tuple[Drawing, ...]
    matrices: tuple[Drawing, ...]
    transfers: tuple[Drawing, ...]
    copies: tuple[tuple[str, ...], ...]
    messages: tuple[Numbers, ...] = field(default=())

    @property
    def drawings(self) -> tuple[Drawing, ...]:
        return (*self.charts, *self.matrices, *self.transfers)


def page(report: Report) -> Page:
    """The report as it is laid out."""
    judged = matching.by_result(report, report.judgements)
    names = words.names_of(report.runs)
    runs = tuple(zip(names, report.runs, strict=True))
    square = [test for test in report.tests if _is_matrix(test)]
    flat = [test for test in report.tests if test.status == "passed" and not _is_matrix(test)]
    return Page(
        cards=tuple(_card(name, run, judged[id(run)]) for name, run in runs),
        charts=tuple(_bandwidth_charts(runs, judged)),
        matrices=tuple(_matrix(number, test, judged) for number, test in enumerate(square, 1)),
        transfers=tuple(_transfer_charts(report)),
        copies=tuple(_copy(test, judged) for test in flat),
        messages=tuple(_messages(report)),
    )


def said(judgements: Iterable[Judgement]) -> tuple[Said, ...]:
    """What is said about speed."""
    return tuple(Said(JUDGED.get(one.outcome, "failed"), one.outcome, one.reason) for one in judgements)


def _card(name: str, run: Run, judgements: Sequence[Judgement]) -> Card:
    kinds = sorted({" ".join(filter(None, (row.dtype, row.redop))) for row in run.rows})
    parts = [
        run.device or "",
        run.tool + (f" {run.tool_version}" if run.tool_version else ""),
        f"{len(run.rows)} sizes" + (f", rows cut: {run.partial_rows}" if run.partial_rows else ""),
        ", ".join(kinds[:4]),
        run.source,
    ]
    state: State = "passed" if run.verdict == "ok" else "failed"
    facts = " · ".join(filter(None, parts))
    return Card(name, run, state, words.best(run), _meter(judgements), said(judgements), facts)


def _meter(judgements: Iterable[Judgement]) -> Meter | None:
    for one in judgements:
        if one.ceiling and one.measured is not None:
            share = one.measured / one.ceiling.value
            reference = one.reference.value / one.ceiling.value * 100 if one.reference else None
            label = f"{share:.0%} of the ceiling, {one.ceiling.value:.4g} {one.ceiling.unit}"
            if one.reference:
                label += f"; the mark is the reference, {one.reference.value:.4g}"
            state = JUDGED.get(one.outcome, "failed")
            return Meter(
                round(min(100.0, share * 100), 1), label, state, None if reference is None else min(99.5, reference)
            )
    return None


def _bandwidth_charts(runs: Sequence[tuple[str, Run]], judged: Judged) -> Iterable[Drawing]:
    """One chart for each scale, since ceilings depend on it."""

    def scale(item: tuple[str, Run]) -> tuple[bool, int, int]:
        return item[1].ranks is None, item[1].nodes or 0, item[1].ranks or 0

    drawable = [item for item in runs if any(row.size_bytes > 0 and words.busbw(row) for row in item[1].rows)]
    for number, ((_, nodes, ranks), group) in enumerate(groupby(sorted(drawable, key=scale), key=scale), 1):
        members = _shortly(tuple(group))
        limits = charts.limits_of(members, dict(judged))
        yield Drawing(
            id=f"bandwidth-{number}",
            title=_scale_title(ranks, nodes),
            figure=charts.bandwidth(members, limits),
            tables=tuple(_rows(name, run) for name, run in members),
            legend=tuple(
                charts.line(name, index, "" if run.verdict == "ok" else run.verdict)
                for index, (name, run) in enumerate(members)
            ),
            limits=limits,
        )


def _shortly(members: Sequence[tuple[str, Run]]) -> tuple[tuple[str, Run], ...]:
    """Without what the title of the chart says already."""
    return tuple(
        ((run.collective or "collective unknown") + name.removeprefix(words.run_name(run)), run)
        for name, run in members
    )


def _scale_title(ranks: int, nodes: int) -> str:
    parts = [f"{ranks} rank{'s' * (ranks != 1)}" if ranks else "Number of ranks unknown"]
    parts += [f"{nodes} node{'s' * (nodes != 1)}"] if nodes else []
    return ", ".join(parts)


ROW_COLUMNS = (
    "size", "bytes", "count", "type", "op", "root",
    "µs", "algbw", "busbw GB/s", "wrong", "in place µs", "algbw", "busbw GB/s", "wrong",
)  # fmt: skip


def _rows(name: str, run: Run) -> Numbers:
    def text(value: object) -> str:
        return words.NONE if value is None else str(value)

    rows = []
    for row in run.rows:
        cells = [words.bytes_text(row.size_bytes), str(row.size_bytes), str(row.count), row.dtype]
        cells += [text(row.redop), text(row.root)]
        for half in (row.out_of_place, row.in_place):
            values = (half.time_us, half.algbw_gb_s, half.busbw_gb_s) if half else (None, None, None)
            cells += [words.number(value) for value in values]
            cells.append(text(half.wrong if half else None))
        rows.append(tuple(cells))
    return Numbers(name, ROW_COLUMNS, tuple(rows))


def _is_matrix(test: BandwidthTest) -> bool:
    return test.matrix is not None and len(test.matrix) > 1 and max(map(len, test.matrix)) > 1


def _matrix(number: int, test: BandwidthTest, judged: Judged) -> Drawing:
    assert test.matrix is not None
    columns = ("", *map(str, range(max(map(len, test.matrix)))))
    rows = tuple((str(i), *(words.number(cell, 1) for cell in row)) for i, row in enumerate(test.matrix))
    name = words.name_of(test)
    parts = [words.test_range(test), test.tool, f"sum {words.number(test.sum)}" if test.sum is not None else ""]
    if test.status != "passed":
        parts.insert(0, test.status)
    return Drawing(
        id=f"matrix-{number}",
        title=name,
        figure=charts.heat_map(test),
        tables=(Numbers(f"{name}, {test.unit or 'unit unknown'}", columns, rows),),
        judgements=said(judged[id(test)]),
        note=" · ".join(filter(None, parts)),
    )


def _copy(test: BandwidthTest, judged: Judged) -> tuple[str, ...]:
    cells = [words.number(cell, 1) for row in test.matrix or () for cell in row]
    values = ", ".join(cells[:16]) + (" …" if len(cells) > 16 else "")
    speed = "; ".join(one.outcome for one in judged[id(test)]) or words.NONE
    return words.name_of(test), values or words.NONE, words.number(test.sum), test.unit or words.NONE, speed


def _transfer_charts(report: Report) -> Iterable[Drawing]:
    """A chart for each unit in which a perftest table has several sizes."""
    many = [t for t in report.tables if len([row for row in t.rows if row.bw_average and row.size_bytes]) > 1]
    units = dict.fromkeys(table.unit for table in many)
    for number, unit in enumerate(units, 1):
        same = [table for table in many if table.unit == unit]
        members = list(zip(words.names_of(same), same, strict=True))
        yield Drawing(
            id=f"transfer-{number}",
            title=f"perftest, {unit or 'unit unknown'}",
            figure=charts.transfers(members, unit or "unit unknown"),
            tables=tuple(
                Numbers(
                    name,
                    ("size", "peak", "average", "million messages/s"),
                    tuple(
                        (words.bytes_text(r.size_bytes), *map(words.number, (r.bw_peak, r.bw_average, r.msg_rate)))
                        for r in table.rows
                    ),
                )
                for name, table in members
            ),
            legend=tuple(charts.line(name, index) for index, (name, _) in enumerate(members)),
        )


def _messages(report: Report) -> Iterable[Numbers]:
    if report.tables:
        judged = matching.by_result(report, report.judgements)
        rows = [
            (words.name_of(t), words.table_best(t), "; ".join(o.outcome for o in judged[id(t)]) or words.NONE, t.source)
            for t in report.tables
        ]
        yield Numbers("perftest: the best size of each table", ("test", "best", "speed", "file"), tuple(rows))
    if report.ucx:
        found = [
            (
                words.ucx_name(one),
                words.NONE if one.size_bytes is None else words.bytes_text(one.size_bytes),
                words.number(words.latency(one.latency_us)),
                words.number(one.bandwidth_mib_s.get("average")),
                words.number(one.rate_msg_s.get("average")),
                one.source,
            )
            for one in report.ucx
        ]
        columns = ("test", "size", "latency µs", "MiB/s", "messages/s", "file")
        yield Numbers("ucx_perftest: typical latency, average bandwidth", columns, tuple(found))
