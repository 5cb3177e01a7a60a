"""Make the charts of a page: figures for plotly.js, and tables with the same numbers. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from imagebuild.bench.models import Difference, Limit, Run, SpeedClaim
from imagebuild.core.patterns import data_of
from imagebuild.report.document import NONE, format_bytes, format_number, one_line

STYLES = data_of(__file__)
MOST_COLUMNS_WITH_NUMBERS = 16
"""Largest number of rows or columns for which the cells of a heat map contain numbers."""

Figure = dict[str, Any]
"""The `data` and `layout` of a chart of plotly.js."""


def _styled(style: Mapping[str, Any], **own: Any) -> dict[str, Any]:
    """Return a style with own values. If both have a mapping for a key, the mappings are combined."""
    combined = {key: style[key] | value for key, value in own.items() if isinstance(style.get(key), dict)}
    return {**style, **own, **combined}


class NumberTable(NamedTuple):
    """A table of numbers. The first cell of each row is its header."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


class Drawing(NamedTuple):
    """A chart, with its title, tables and notes."""

    id: str
    title: str
    figure: Figure
    tables: Sequence[NumberTable]
    notes: Sequence[str]
    """Lines of text below the chart."""


def line_chart(id_: str, title: str, runs: Sequence[tuple[str, Run, SpeedClaim]]) -> Drawing:
    """Draw bus bandwidth over message size on logarithmic axes. `runs` are names, runs and claims about their speed.

    Equal ceilings and references are drawn once."""
    traces = [_trace(name, run, number) for number, (name, run, _) in enumerate(runs)]
    sizes = [size for trace in traces for size in trace["x"]] or [1]
    styles, limits, lines = STYLES["lines"], dict[str, Limit](), []
    for (_, _, speed), trace in zip(runs, traces, strict=True):
        for kind, limit in (("ceiling", speed.ceiling), ("reference", speed.reference)):
            if limit and (name := f"{kind} {limit.value:.4g} GB/s") not in limits:
                limits[name] = limit
                # Labels of references would overlap those of ceilings. References are only in the legend.
                text = [name if kind == "ceiling" else "", ""]
                ends = {"x": [min(sizes), max(sizes)], "y": [limit.value] * 2}
                line = {"color": trace["line"]["color"]} | styles[kind]
                lines.append(_styled(styles["limit"], name=name, line=line, text=text, **ends))
    traces += lines
    values = [value for trace in traces for value in trace["y"]] or [1.0]
    # The axis covers at least a factor of ten, so that a flat line looks flat.
    low, top = math.log10(min(values)), math.log10(max(values))
    low = min(low, top - 1)
    layout = _styled(styles["layout"], xaxis=_size_ticks(sizes), yaxis={"range": [low - 0.1, top + 0.2]})
    notes = [f"{name}: {limit.what}" for name, limit in limits.items()]
    tables = [_run_table(name, run) for name, run, _ in runs]
    return Drawing(id_, title, {"data": traces, "layout": layout}, tables, notes)


def _size_ticks(sizes: Sequence[int]) -> dict[str, Any]:
    """Return up to nine powers of two as the marks of an axis."""
    first, last = min(sizes).bit_length() - 1, max(sizes).bit_length()
    marks = [1 << power for power in range(first, last + 1, -(-(last - first) // 8))]
    return {"tickvals": marks, "ticktext": [format_bytes(mark) for mark in marks]}


def difference_chart(id_: str, title: str, differences: Sequence[Difference]) -> Drawing:
    """Draw the difference in speed over message size, with the band of its interval, for each side of a comparison."""
    style, traces = STYLES["differences"], []
    for number, side in enumerate(dict.fromkeys(item.side for item in differences)):
        own = sorted((item for item in differences if item.side == side), key=lambda item: item.size_bytes)
        sizes, colour = [item.size_bytes for item in own], STYLES["palette"][number % len(STYLES["palette"])]
        edge = [*(item.high for item in own), *(item.low for item in reversed(own))]
        traces.append(_styled(style["band"], x=[*sizes, *reversed(sizes)], y=edge, fillcolor=colour))
        name, texts = _plotly_text(side), [f"{format_bytes(item.size_bytes)}: {item.words}" for item in own]
        line = {"color": colour}
        traces.append(_styled(style["line"], name=name, x=sizes, y=[i.percent for i in own], text=texts, line=line))
    rows = [
        (format_bytes(item.size_bytes), str(item.size_bytes), item.side, format_number(item.first_rate),
         format_number(item.rate), item.words)
        for item in differences
    ]  # fmt: skip
    layout = _styled(style["layout"], xaxis=_size_ticks([item.size_bytes for item in differences]))
    return Drawing(id_, title, {"data": traces, "layout": layout}, [NumberTable(title, style["columns"], rows)], [])


def _trace(name: str, run: Run, number: int) -> dict[str, Any]:
    """Return the line of a run: the faster half of each row. The hover text shows both halves."""
    points = []
    for row in sorted(run.rows, key=lambda row: row.size_bytes):
        details = [" ".join(filter(None, (row.dtype, row.redop)))]
        for place, half in zip(("out of place", "in place"), row.halves, strict=False):
            wrong = "" if half.wrong is None else f", {half.wrong} wrong"
            details.append(f"{place} {format_number(half.busbw_gb_s)} GB/s, {format_number(half.time_us)} µs{wrong}")
        if row.size_bytes > 0 and (speed := row.busbw_gb_s or 0) > 0:
            shown = f"{format_bytes(row.size_bytes)}: {speed:.4g}<br>{_plotly_text('; '.join(details))}"
            points.append((row.size_bytes, speed, shown))
    sizes, speeds, texts = map(list, zip(*points, strict=True)) if points else ([], [], [])
    return _styled(
        STYLES["lines"]["run"], name=_plotly_text(name), x=sizes, y=speeds, text=texts,
        line={"color": STYLES["palette"][number % len(STYLES["palette"])]},
        marker={"symbol": STYLES["symbols"][number % len(STYLES["symbols"])]},
    )  # fmt: skip


def _run_table(name: str, run: Run) -> NumberTable:
    rows = []
    for row in run.rows:
        cells: list[object] = [format_bytes(row.size_bytes), row.size_bytes, row.count, row.dtype, row.redop, row.root]
        for half in (row.out_of_place, row.in_place):
            values = (half.time_us, half.algbw_gb_s, half.busbw_gb_s) if half else (None, None, None)
            cells += [*map(format_number, values), half.wrong if half else None]
        rows.append([NONE if cell is None else str(cell) for cell in cells])
    return NumberTable(name, STYLES["columns_of_runs"], rows)


def heat_map(matrix: Sequence[Sequence[float | None]], unit: str, names: Sequence[str] = ()) -> Figure:
    """Return the heat map of a matrix. `names` are the labels of its rows and columns. Default: their numbers.

    The colours cover the range of the data, but at least a quarter of the best value, so that noise does not look like
    a pattern."""
    cells = [[None if cell is None or not math.isfinite(cell) else cell for cell in row] for row in matrix]
    rows, columns = len(cells), max(map(len, cells), default=0)
    values = [cell for row in cells for cell in row if cell is not None] or [1.0]
    is_time, least, most = unit in {"ns", "us"}, min(values), max(values)
    unit = _plotly_text(unit)
    trace = _styled(
        STYLES["heat_map"]["trace"],
        z=cells,
        x=list(map(_plotly_text, names)) or list(map(str, range(columns))),
        y=list(map(_plotly_text, names)) or list(map(str, range(rows))),
        zmin=least if is_time else min(least, 0.75 * most),
        zmax=max(most, least / 0.75) if is_time else most,
        reversescale=is_time,  # for latencies, high values are slow
        hovertemplate=f"%{{y}} ↔ %{{x}}<br><b>%{{z:.4g}} {unit}</b><extra></extra>",
        colorbar={"title": {"text": unit}},
    )
    if max(rows, columns) <= MOST_COLUMNS_WITH_NUMBERS:
        trace["texttemplate"] = "%{z:.3~g}" if most < 100 else "%{z:.0f}"
    layout = _styled(STYLES["heat_map"]["layout"], height=max(150, min(640, 90 + 34 * rows)))
    return {"data": [trace], "layout": layout}


def bar_chart(names: Sequence[str], values: Sequence[float], unit: str, median: float, limit: float) -> Figure:
    labels, unit, style = [_plotly_text(name) for name in names], _plotly_text(unit), STYLES["bars"]
    colours = [STYLES["ceiling_colour"] if value < limit else STYLES["palette"][0] for value in values]
    hover = f"%{{x}}<br><b>%{{y:.4g}} {unit}</b><extra></extra>"
    bars = {"type": "bar", "x": labels, "y": [*values], "marker": {"color": colours}, "hovertemplate": hover}
    line = _styled(style["median"], x=labels, y=[median] * len(labels), name=f"median {median:.4g}")
    return {"data": [bars, line], "layout": _styled(style["layout"], yaxis={"title": {"text": unit}})}


def _plotly_text(text: str) -> str:
    """Return the text, escaped for plotly, which interprets some tags, entities and placeholders."""
    return escape(one_line(text, 120), quote=False).replace("%{", "%\u200b{")
