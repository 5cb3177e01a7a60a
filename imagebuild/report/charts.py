"""Make the charts of a page: figures for plotly.js, and tables with the same numbers. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

from imagebuild.bench.models import Limit, Run, SpeedClaim
from imagebuild.report.document import NONE, format_bytes, format_number, one_line

PALETTE = ("#2f7ed8", "#c2571a", "#178a6b", "#a855c7", "#9a7b00", "#d6336c", "#5b7083", "#7a5cff")
"""Colours of lines. Each has a contrast of at least 3:1 to the light and to the dark page."""
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star", "cross")
CEILING_COLOUR = "#d64545"
HEAT_COLOURS = [[0.0, "#fff0d9"], [0.6, "#ee9a4d"], [0.85, "#3d9a8b"], [1.0, "#0b4f5c"]]
"""Colours of heat maps. Slow pairs have warm colours, which stand out. Faster pairs are darker, so that a print in grey
remains readable."""
MOST_COLUMNS_WITH_NUMBERS = 16
"""Largest number of rows or columns for which the cells of a heat map contain numbers."""

Figure = dict[str, Any]
"""The `data` and `layout` of a chart of plotly.js."""


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

    A ceiling is a dashed red line. A reference is a dotted line in the colour of the first run with this reference.
    Equal ceilings and references are drawn once."""
    traces = [_trace(name, run, number) for number, (name, run, _) in enumerate(runs)]
    sizes = [size for trace in traces for size in trace["x"]] or [1]
    limits: dict[str, Limit] = {}
    for (_, _, speed), line in zip(runs, tuple(traces), strict=True):
        ceiling = {"dash": "dash", "width": 1.5, "color": CEILING_COLOUR}
        reference = {"dash": "dot", "width": 3, "color": line["line"]["color"]}
        for kind, limit, style in (("ceiling", speed.ceiling, ceiling), ("reference", speed.reference, reference)):
            if limit and (name := f"{kind} {limit.value:.4g} GB/s") not in limits:
                limits[name] = limit
                # Labels of references would overlap those of ceilings. References are only in the legend.
                label = {"text": [name if kind == "ceiling" else "", ""], "textposition": "top right"}
                ends = {"x": [min(sizes), max(sizes)], "y": [limit.value] * 2, "mode": "lines+text"}
                traces.append({"name": name, "hoverinfo": "name", "line": style, **ends, **label})
    values = [value for trace in traces for value in trace["y"]] or [1.0]
    # The axis covers at least a factor of ten, so that a flat line looks flat.
    top = math.log10(max(values))
    low = min(math.log10(min(values)), top - 1)
    first, last = min(sizes).bit_length() - 1, max(sizes).bit_length()
    marks = [1 << power for power in range(first, last + 1, -(-(last - first) // 8))]
    layout = {
        "showlegend": True,
        "legend": {"orientation": "h", "y": -0.2},
        "margin": {"l": 56, "r": 16, "t": 16, "b": 52},
        "xaxis": {
            "type": "log", "title": {"text": "message size"}, "tickangle": 0, "tickvals": marks,
            "ticktext": [format_bytes(mark) for mark in marks],
        },
        "yaxis": {"type": "log", "title": {"text": "bus bandwidth, GB/s"}, "range": [low - 0.1, top + 0.2]},
    }  # fmt: skip
    notes = [f"{name}: {limit.what}" for name, limit in limits.items()]
    return Drawing(
        id_, title, {"data": traces, "layout": layout}, [_run_table(name, run) for name, run, _ in runs], notes
    )


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
    return {
        "name": _plotly_text(name),
        "x": [size for size, _, _ in points],
        "y": [speed for _, speed, _ in points],
        "text": [shown for _, _, shown in points],
        "mode": "lines+markers",
        "line": {"color": PALETTE[number % len(PALETTE)], "width": 2},
        "marker": {"size": 6, "symbol": SYMBOLS[number % len(SYMBOLS)]},
        "hovertemplate": "<b>%{fullData.name}</b><br>%{text}<extra></extra>",
    }


def _run_table(name: str, run: Run) -> NumberTable:
    columns = (
        "size", "bytes", "count", "type", "op", "root",
        "µs", "algbw", "busbw GB/s", "wrong", "in place µs", "algbw", "busbw GB/s", "wrong",
    )  # fmt: skip
    rows = []
    for row in run.rows:
        cells: list[object] = [format_bytes(row.size_bytes), row.size_bytes, row.count, row.dtype, row.redop, row.root]
        for half in (row.out_of_place, row.in_place):
            values = (half.time_us, half.algbw_gb_s, half.busbw_gb_s) if half else (None, None, None)
            cells += [*map(format_number, values), half.wrong if half else None]
        rows.append([NONE if cell is None else str(cell) for cell in cells])
    return NumberTable(name, columns, rows)


def heat_map(matrix: Sequence[Sequence[float | None]], unit: str, names: Sequence[str] = ()) -> Figure:
    """Return the heat map of a matrix. `names` are the labels of its rows and columns. Default: their numbers.

    The colours cover the range of the data, but at least a quarter of the best value, so that noise does not look like
    a pattern."""
    cells = [[None if cell is None or not math.isfinite(cell) else cell for cell in row] for row in matrix]
    rows, columns = len(cells), max(map(len, cells), default=0)
    values = [cell for row in cells for cell in row if cell is not None] or [1.0]
    is_time, least, most = unit in {"ns", "us"}, min(values), max(values)
    trace: dict[str, Any] = {
        "type": "heatmap",
        "z": cells,
        "x": list(map(_plotly_text, names)) or list(map(str, range(columns))),
        "y": list(map(_plotly_text, names)) or list(map(str, range(rows))),
        "zmin": least if is_time else min(least, 0.75 * most),
        "zmax": max(most, least / 0.75) if is_time else most,
        "colorscale": HEAT_COLOURS,
        # For latencies, high values are slow.
        "reversescale": is_time,
        "hoverongaps": False,
        "hovertemplate": "%{y} ↔ %{x}<br><b>%{z:.4g} " + _plotly_text(unit) + "</b><extra></extra>",
        "colorbar": {"title": {"text": _plotly_text(unit)}, "thickness": 12},
    }
    if max(rows, columns) <= MOST_COLUMNS_WITH_NUMBERS:
        trace["texttemplate"] = "%{z:.3~g}" if most < 100 else "%{z:.0f}"
    axis = {"type": "category", "automargin": True}
    layout = {
        "height": max(150, min(640, 90 + 34 * rows)),
        "margin": {"l": 44, "r": 8, "t": 40, "b": 12},
        "xaxis": {**axis, "side": "top"},
        "yaxis": {**axis, "autorange": "reversed"},
    }
    return {"data": [trace], "layout": layout}


def bar_chart(names: Sequence[str], values: Sequence[float], unit: str, median: float, limit: float) -> Figure:
    labels = [_plotly_text(name) for name in names]
    bars = {
        "type": "bar",
        "x": labels,
        "y": list(values),
        "marker": {"color": [CEILING_COLOUR if value < limit else PALETTE[0] for value in values]},
        "hovertemplate": "%{x}<br><b>%{y:.4g} " + _plotly_text(unit) + "</b><extra></extra>",
    }
    line = {"x": labels, "y": [median] * len(labels), "mode": "lines", "line": {"dash": "dash", "color": PALETTE[6]}}
    layout = {
        "height": 340,
        "showlegend": False,
        "margin": {"l": 56, "r": 8, "t": 24, "b": 40},
        "xaxis": {"type": "category", "automargin": True},
        "yaxis": {"title": {"text": _plotly_text(unit)}, "rangemode": "tozero"},
    }
    return {"data": [bars, line | {"name": f"median {median:.4g}", "hoverinfo": "name"}], "layout": layout}


def _plotly_text(text: str) -> str:
    """Return the text, escaped for plotly, which interprets some tags, entities and placeholders."""
    return escape(one_line(text, 120), quote=False).replace("%{", "%\u200b{")
