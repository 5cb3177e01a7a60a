"""Lay out charts: what plotly.js draws, the legend, the limits, and tables with the same numbers. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any, NamedTuple

from imagebuild.bench.models import Claim, Limit
from imagebuild.report.document import GIB, format_bytes, one_line

PALETTE = ("#2f7ed8", "#c2571a", "#178a6b", "#a855c7", "#9a7b00", "#d6336c", "#5b7083", "#7a5cff")
"""Colours of lines. Each has a contrast of at least 3:1 to the white and to the dark page."""
DASHES = {"solid": "none", "dash": "6 3", "dot": "2 2", "dashdot": "6 2 2 2"}
"""Dashes of plotly → of SVG, for legends."""
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star")
CEILING_COLOUR = "#d64545"
HEAT_COLOURS = [[0.0, "#fff0d9"], [0.6, "#ee9a4d"], [0.85, "#3d9a8b"], [1.0, "#0b4f5c"]]
"""Pairs that are slower than the best have warm colours, which stand out. The colours get steadily darker, so that they
can be printed in grey."""
MOST_COLUMNS_WITH_NUMBERS = 16
"""Rows and columns of a matrix up to which the cells of its heat map contain their numbers."""

Figure = dict[str, Any]
"""The `data` and `layout` that plotly.js draws."""


class NumberTable(NamedTuple):
    """Hold a table of numbers; the first cell of each row is its head."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


class Point(NamedTuple):
    """Hold a measured value of one message size."""

    size_bytes: int
    value: float
    details: tuple[str, ...] = ()
    """Lines that show while a pointer is over the point."""


@dataclass(frozen=True)
class Line:
    """Hold what was measured over message size, and what it is compared with."""

    name: str
    points: Sequence[Point]
    note: str = ""
    """Verdict on the data, if it is not `ok`."""
    ceilings: Sequence[Limit] = ()
    references: Sequence[Limit] = ()
    colour: str = ""
    dash: str = ""
    symbol: str = ""
    """Its looks, which `line_chart` chooses."""


class DrawnLimit(NamedTuple):
    """Describe a limit that a chart shows."""

    kind: str
    """`ceiling` or `reference`."""
    limit: Limit
    colour: str
    """For a reference, that of its line."""

    @property
    def text(self) -> str:
        """Return the value with its unit: `466.7 GB/s`."""
        return f"{self.limit.value:.4g} {self.limit.unit}"


@dataclass(frozen=True)
class Drawing:
    """Hold a chart, and what a page shows around it."""

    id: str
    title: str
    figure: Figure
    tables: Sequence[NumberTable]
    legend: Sequence[Line] = ()
    limits: Sequence[DrawnLimit] = ()
    claims: Sequence[Claim] = ()
    note: str = ""


def line_chart(id_: str, title: str, unit: str, lines: Sequence[Line], tables: Sequence[NumberTable]) -> Drawing:
    """Draw lines over message size on logarithmic axes. Points that such axes do not have are left out."""
    legend, traces = [], []
    for number, line in enumerate(lines):
        colour, symbol = PALETTE[number % len(PALETTE)], SYMBOLS[number % len(SYMBOLS)]
        # The dash differs where a colour is used again.
        dash = tuple(DASHES)[number // len(PALETTE) % len(DASHES)]
        legend.append(replace(line, colour=colour, dash=dash, symbol=symbol))
        traces.append(_trace(legend[-1]))
    limits = _drawn_limits(legend)

    sizes = [size for trace in traces for size in trace["x"]]
    values = [value for trace in traces for value in trace["y"]] + [drawn.limit.value for drawn in limits]
    # About eight powers of two.
    first, last = max(0, min(sizes, default=1).bit_length() - 1), max(sizes, default=1).bit_length()
    marks = [1 << power for power in range(first, last + 1, max(1, -(-(last - first) // 8)))]
    # At least a decade, so that a flat line looks flat, and room above for the label of a ceiling.
    top = math.log10(max(values, default=10))
    low = min(math.log10(min(values, default=1)), top - 1)
    # Powers of ten, and where those are few, twice and five times them.
    factors = (1, 2, 5) if top - low < 2.5 else (1,)
    ticks = [factor * 10.0**power for power in range(math.floor(low), math.ceil(top) + 1) for factor in factors]
    ticks = [tick for tick in ticks if low - 0.1 <= math.log10(tick) <= top + 0.3]
    axis = {"type": "log", "showline": True, "ticks": "outside", "zeroline": False}
    layout = {
        "showlegend": False,
        "hovermode": "closest",
        "margin": {"l": 56, "r": 16, "t": 16, "b": 52},
        "xaxis": {
            **axis, "title": {"text": "message size"}, "tickangle": 0, "tickvals": marks,
            "ticktext": [format_bytes(mark) for mark in marks],
        },
        "yaxis": {
            **axis, "title": {"text": _plotly_text(unit)}, "range": [low - 0.1, top + 0.3],
            "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks],
        },
        "shapes": _limit_shapes(limits, max(sizes, default=GIB)),
    }  # fmt: skip
    return Drawing(id_, title, {"data": traces, "layout": layout}, tables, legend, limits)


def _trace(line: Line) -> dict[str, Any]:
    drawable = (p for p in line.points if p.size_bytes > 0 and p.value > 0 and math.isfinite(p.value))
    points = sorted(drawable, key=lambda point: point.size_bytes)
    return {
        "type": "scatter",
        "name": _plotly_text(line.name),
        "x": [point.size_bytes for point in points],
        "y": [point.value for point in points],
        "customdata": [
            [format_bytes(point.size_bytes), "<br>".join(map(_plotly_text, filter(None, point.details)))]
            for point in points
        ],
        "mode": "lines+markers",
        "line": {"color": line.colour, "width": 2, "dash": line.dash},
        "marker": {"size": 6, "symbol": line.symbol},
        "hovertemplate": "<b>%{fullData.name}</b><br>%{customdata[0]}: %{y:.4g}<br>%{customdata[1]}<extra></extra>",
    }


def _drawn_limits(lines: Sequence[Line]) -> tuple[DrawnLimit, ...]:
    """Return each ceiling and each reference once; a reference has the colour of the first line that it is for."""
    drawn: dict[tuple[object, ...], DrawnLimit] = {}
    for line in lines:
        for ceiling in line.ceilings:
            drawn.setdefault((round(ceiling.value, 1),), DrawnLimit("ceiling", ceiling, CEILING_COLOUR))
    for line in lines:
        for limit in line.references:
            drawn.setdefault((limit.value, limit.what), DrawnLimit("reference", limit, line.colour))
    return tuple(drawn.values())


def _limit_shapes(limits: Sequence[DrawnLimit], largest_size: int) -> list[dict[str, Any]]:
    """Return a line over the whole width for each ceiling, and one over the sizes that are judged for each reference.

    Every ceiling has a label, alternately at the left and at the right; those of the lower half are below their lines,
    so that labels of neighbours do not meet.
    """
    ceilings = sorted(drawn.limit.value for drawn in limits if drawn.kind == "ceiling")
    shapes: list[dict[str, Any]] = []
    for drawn in limits:
        value = drawn.limit.value
        shape: dict[str, Any] = {"type": "line", "y0": value, "y1": value}
        if drawn.kind == "reference":
            shape |= {"x0": GIB, "x1": max(largest_size, 2 * GIB)}
            shape |= {"line": {"color": drawn.colour, "width": 3, "dash": "dot"}}
        else:
            place = ceilings.index(value)
            shape |= {"xref": "paper", "x0": 0, "x1": 1}
            shape |= {"line": {"color": drawn.colour, "width": 1.5, "dash": "dash"}}
            shape["label"] = {
                "text": f"ceiling {drawn.text}",
                "textposition": "end" if place % 2 else "start",
                "yanchor": "top" if place < len(ceilings) // 2 else "bottom",
                "font": {"size": 11},
            }
        shapes.append(shape)
    return shapes


def heat_map(matrix: Sequence[Sequence[float | None]], unit: str, names: Sequence[str] = ()) -> Figure:
    """Return the heat map of a matrix, whose rows and columns may have `names`.

    Its colours are scaled to the data, but over a quarter of the best value at least, so that noise is no pattern.
    """
    cells = [[None if cell is None or not math.isfinite(cell) else cell for cell in row] for row in matrix]
    rows, columns = len(cells), max(map(len, cells), default=0)
    values = [cell for row in cells for cell in row if cell is not None] or [1.0]
    is_time, least, most = unit in {"ns", "us"}, min(values), max(values)
    what = "%{y} ↔ %{x}" if names else "row %{y}, column %{x}"
    trace: dict[str, Any] = {
        "type": "heatmap",
        "z": cells,
        "x": [_plotly_text(name) for name in names] or [str(number) for number in range(columns)],
        "y": [_plotly_text(name) for name in names] or [str(number) for number in range(rows)],
        "zmin": least if is_time else min(least, 0.75 * most),
        "zmax": max(most, least / 0.75) if is_time else most,
        "colorscale": HEAT_COLOURS,
        # Of times, the long ones are slow.
        "reversescale": is_time,
        "xgap": 1,
        "ygap": 1,
        "hoverongaps": False,
        "hovertemplate": what + "<br><b>%{z:.4g} " + _plotly_text(unit) + "</b><extra></extra>",
        "textfont": {"size": 11},
        "colorbar": {"title": {"text": _plotly_text(unit)}, "thickness": 12, "outlinewidth": 0},
    }
    if max(rows, columns) <= MOST_COLUMNS_WITH_NUMBERS:
        trace["text"] = [
            ["" if cell is None else f"{cell:.3g}" if cell < 100 else f"{cell:.0f}" for cell in row] for row in cells
        ]
        trace["texttemplate"] = "%{text}"
    axis = {"type": "category", "showgrid": False, "automargin": bool(names)}
    titles = [{} if names else {"title": {"text": title}} for title in ("column", "row")]
    return {
        "data": [trace],
        "layout": {
            "height": max(150, min(640, 90 + 34 * rows)),
            "margin": {"l": 44, "r": 8, "t": 40, "b": 12},
            "xaxis": {**axis, **titles[0], "side": "top"},
            "yaxis": {**axis, **titles[1], "autorange": "reversed"},
        },
    }


def bar_chart(names: Sequence[str], values: Sequence[float], unit: str, median: float, limit: float) -> Figure:
    """Return a bar for each value, in red below the limit, and a line for their median."""
    trace = {
        "type": "bar",
        "x": [_plotly_text(name) for name in names],
        "y": list(values),
        "marker": {"color": [CEILING_COLOUR if value < limit else PALETTE[0] for value in values]},
        "hovertemplate": "%{x}<br><b>%{y:.4g} " + _plotly_text(unit) + "</b><extra></extra>",
    }
    line: dict[str, Any] = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": median, "y1": median}
    line |= {"line": {"color": PALETTE[6], "width": 1.5, "dash": "dash"}}
    line["label"] = {"text": f"median {median:.4g}", "textposition": "end", "yanchor": "bottom"}
    layout = {
        "height": 340,
        "margin": {"l": 56, "r": 8, "t": 24, "b": 40},
        "xaxis": {"type": "category", "showgrid": False, "automargin": True},
        "yaxis": {"title": {"text": _plotly_text(unit)}, "rangemode": "tozero"},
        "shapes": [line],
    }
    return {"data": [trace], "layout": layout}


def _plotly_text(text: str) -> str:
    """Return text for plotly, which interprets some tags, entities and placeholders."""
    return escape(one_line(text, 120), quote=False).replace("%{", "%\u200b{")
