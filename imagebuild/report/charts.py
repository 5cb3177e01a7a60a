"""Figures for plotly: bus bandwidth over message size, perftest tables, matrices as heat maps. Pure.

Colours of text, axes and grids are the page's, by CSS, so that a figure fits light, dark and paper. Lines differ by
colour, dash and marker, so that they can be told apart without colours too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from imagebuild.judgement import Judgement, Limit
from imagebuild.report import words
from imagebuild.report.clean import one_line
from imagebuild.results.models import BandwidthTest, Row, Run, Table

PALETTE = ("#2f7ed8", "#c2571a", "#178a6b", "#a855c7", "#9a7b00", "#d6336c", "#5b7083", "#7a5cff")
"""Each has a contrast of at least 3:1 to white and to the dark page."""
CEILING = "#d64545"
DASHES = ("solid", "dash", "dot", "dashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star")
CELLS_WITH_NUMBERS = 16
"""Ranks of a matrix up to which numbers fit into the cells of the heat map."""
SCALE = [[0.0, "#fff0d9"], [0.6, "#ee9a4d"], [0.85, "#3d9a8b"], [1.0, "#0b4f5c"]]
"""What is slower than the best pair is warm, so that it stands out; the lightness falls all the way, so it prints."""

Figure = dict[str, Any]
"""What plotly.js draws: `data` and `layout`."""


@dataclass(frozen=True)
class Line:
    """What tells a line from others, for the legend of the page."""

    name: str
    colour: str
    dash: str
    symbol: str
    note: str = ""
    """What is wrong with the run."""


@dataclass(frozen=True)
class Drawn:
    """A limit that is drawn in."""

    kind: str
    """`ceiling` or `reference`."""
    limit: Limit
    colour: str | None = None

    @property
    def text(self) -> str:
        """`466.7 GB/s`."""
        return f"{self.limit.value:.4g} {self.limit.unit}"


def line(name: str, number: int, note: str = "") -> Line:
    """The look of the line of that number."""
    lap = number // len(PALETTE)
    return Line(name, PALETTE[number % len(PALETTE)], DASHES[lap % len(DASHES)], SYMBOLS[number % len(SYMBOLS)], note)


def bandwidth(runs: Sequence[tuple[str, Run]], limits: Iterable[Drawn]) -> Figure:
    """Bus bandwidth over message size on logarithmic axes: a line for each run, the better placement of each row."""
    traces = []
    for number, (name, run) in enumerate(runs):
        points = sorted(_points(run.rows), key=lambda point: point[0])
        traces.append(_trace(line(name, number), points))
    largest = max((row.size_bytes for _, run in runs for row in run.rows), default=words.GIB)
    limits = tuple(limits)
    ceilings = [drawn.limit.value for drawn in limits if drawn.kind == "ceiling"]
    shapes = [_ceiling(drawn, ceilings) if drawn.kind == "ceiling" else _reference(drawn, largest) for drawn in limits]
    return _figure(traces, "bus bandwidth, GB/s", shapes, tuple(drawn.limit.value for drawn in limits))


def _points(rows: Iterable[Row]) -> list[tuple[int, float, str]]:
    # A logarithmic axis has no zero.
    found = [(row, speed) for row in rows if row.size_bytes > 0 and (speed := words.busbw(row))]
    return [(row.size_bytes, speed, _details(row)) for row, speed in found]


def _details(row: Row) -> str:
    parts = []
    for name, half in (("out of place", row.out_of_place), ("in place", row.in_place)):
        if half is not None:
            wrong = "" if half.wrong is None else f", {half.wrong} wrong"
            parts.append(f"{name} {words.number(half.busbw_gb_s)} GB/s, {words.number(half.time_us)} µs{wrong}")
    kind = " ".join(filter(None, (row.dtype, row.redop)))
    return "<br>".join([*parts, markup(kind)])


def transfers(tables: Sequence[tuple[str, Table]], unit: str) -> Figure:
    """Average bandwidth over message size of perftest tables in one unit."""
    traces = []
    for number, (name, table) in enumerate(tables):
        points = [
            (row.size_bytes, row.bw_average, "" if row.msg_rate is None else f"{row.msg_rate:g} million messages/s")
            for row in sorted(table.rows, key=lambda row: row.size_bytes)
            if row.bw_average and math.isfinite(row.bw_average) and row.size_bytes > 0
        ]
        traces.append(_trace(line(name, number), points))
    return _figure(traces, f"average bandwidth, {markup(unit)}")


def _trace(look: Line, points: Sequence[tuple[int, float, str]]) -> dict[str, Any]:
    from plotly import graph_objects as go  # noqa: PLC0415 - an extra, and slow to import

    return dict(
        go.Scatter(
            name=markup(look.name),
            x=[size for size, _, _ in points],
            y=[value for _, value, _ in points],
            customdata=[[markup(look.name), words.bytes_text(size), details] for size, _, details in points],
            mode="lines+markers",
            line={"color": look.colour, "width": 2, "dash": look.dash},
            marker={"size": 6, "symbol": look.symbol},
            hovertemplate="<b>%{customdata[0]}</b><br>%{customdata[1]}: %{y:.4g}<br>%{customdata[2]}<extra></extra>",
        ).to_plotly_json()
    )


def _reference(drawn: Drawn, largest: int) -> dict[str, Any]:
    """A line over the sizes that are judged."""
    return {
        "type": "line", "x0": words.GIB, "x1": max(largest, 2 * words.GIB), "y0": drawn.limit.value,
        "y1": drawn.limit.value, "line": {"color": drawn.colour, "width": 3, "dash": "dot"},
    }  # fmt: skip


def _ceiling(drawn: Drawn, ceilings: Sequence[float]) -> dict[str, Any]:
    """A line over the whole width. Only the outermost ones have room for a label, outside."""
    value = drawn.limit.value
    shape = {
        "type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": value, "y1": value,
        "line": {"color": CEILING, "width": 1.5, "dash": "dash"},
    }  # fmt: skip
    if value in {max(ceilings), min(ceilings)}:
        side = "bottom" if value == max(ceilings) else "top"
        shape["label"] = {
            "text": f"ceiling {drawn.text}",
            "textposition": "start",
            "yanchor": side,
            "font": {"size": 11},
        }
    return shape


def _figure(
    traces: list[dict[str, Any]], unit: str, shapes: Sequence[dict[str, Any]] = (), limits: Sequence[float] = ()
) -> Figure:
    sizes = [size for trace in traces for size in trace["x"]]
    speeds = [speed for trace in traces for speed in trace["y"]] + list(limits)
    marks = _size_marks(min(sizes, default=1), max(sizes, default=1))
    axis = {"type": "log", "showline": True, "ticks": "outside", "zeroline": False}
    # At least a decade, so that a flat line looks flat, and room above for the label of a ceiling.
    top = math.log10(max(speeds, default=10))
    low = min(math.log10(min(speeds, default=1)), top - 1)
    ticks = _speed_marks(low, top)
    return {
        "data": traces,
        "layout": {
            "showlegend": False,
            "hovermode": "closest",
            "margin": {"l": 56, "r": 16, "t": 16, "b": 52},
            "xaxis": {
                **axis, "title": {"text": "message size"}, "tickangle": 0, "tickvals": marks,
                "ticktext": [words.bytes_text(mark) for mark in marks],
            },
            "yaxis": {
                **axis, "title": {"text": unit}, "range": [low - 0.1, top + 0.3],
                "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks],
            },
            "shapes": list(shapes),
        },
    }  # fmt: skip


def _speed_marks(low: float, top: float) -> list[float]:
    """Powers of ten between exponents, and where those are few, twice and five times them."""
    steps = (1, 2, 5) if top - low < 2.5 else (1,)
    marks = [step * 10.0**power for power in range(math.floor(low), math.ceil(top) + 1) for step in steps]
    return [mark for mark in marks if low - 0.1 <= math.log10(mark) <= top + 0.3]


def _size_marks(least: int, largest: int) -> list[int]:
    """Powers of two for the axis, at most about eight."""
    first, last = max(0, least.bit_length() - 1), largest.bit_length()
    step = max(1, -(-(last - first) // 8))
    return [1 << power for power in range(first, last + 1, step)]


def heat_map(test: BandwidthTest) -> Figure:
    """A matrix as a heat map, from 0 so that noise does not look like a pattern."""
    from plotly import graph_objects as go  # noqa: PLC0415 - an extra, and slow to import

    matrix = between_devices(test)
    rows, columns = len(matrix), max(map(len, matrix), default=0)
    unit = markup(test.unit or "")
    numbers = max(rows, columns) <= CELLS_WITH_NUMBERS
    trace = go.Heatmap(
        z=matrix,
        x=[str(number) for number in range(columns)],
        y=[str(number) for number in range(rows)],
        text=[
            ["" if cell is None else f"{cell:.3g}" if cell < 100 else f"{cell:.0f}" for cell in row] for row in matrix
        ],
        zmin=0,
        zmax=max((cell for row in matrix for cell in row if cell is not None), default=1),
        colorscale=SCALE,
        # Of times, the long ones are slow.
        reversescale=test.unit in {"ns", "us"},
        xgap=1,
        ygap=1,
        hoverongaps=False,
        hovertemplate="row %{y}, column %{x}<br><b>%{z:.4g} " + unit + "</b><extra></extra>",
        texttemplate="%{text}" if numbers else None,
        textfont={"size": 11},
        colorbar={"title": {"text": unit}, "thickness": 12, "outlinewidth": 0},
    )
    data = trace.to_plotly_json()
    return {
        "data": [data],
        "layout": {
            "height": max(150, min(640, 90 + 34 * rows)),
            "margin": {"l": 44, "r": 8, "t": 40, "b": 12},
            "xaxis": {"title": {"text": "column"}, "side": "top", "type": "category", "showgrid": False},
            "yaxis": {"title": {"text": "row"}, "autorange": "reversed", "type": "category", "showgrid": False},
        },
    }


def between_devices(test: BandwidthTest) -> tuple[tuple[float | None, ...], ...]:
    """The matrix without its diagonal, if that is a copy within one device."""
    within = test.tool == "p2pBandwidthLatencyTest"

    def drawn(i: int, j: int, cell: float | None) -> float | None:
        return None if cell is None or not math.isfinite(cell) or (within and i == j) else cell

    return tuple(tuple(drawn(i, j, cell) for j, cell in enumerate(row)) for i, row in enumerate(test.matrix or ()))


def limits_of(runs: Sequence[tuple[str, Run]], judged: dict[int, tuple[Judgement, ...]]) -> tuple[Drawn, ...]:
    """The limits to draw: each ceiling once, and each run's reference in the colour of its line."""
    ceilings: dict[float, Drawn] = {}
    references: list[Drawn] = []
    for number, (name, run) in enumerate(runs):
        for judgement in judged.get(id(run), ()):
            if judgement.ceiling:
                ceilings.setdefault(round(judgement.ceiling.value, 1), Drawn("ceiling", judgement.ceiling))
            if judgement.reference and (judgement.size_bytes is None or judgement.size_bytes > words.GIB // 2):
                references.append(Drawn("reference", judgement.reference, line(name, number).colour))
    return (*ceilings.values(), *dict.fromkeys(references))


def markup(text: str) -> str:
    """Text for plotly, which reads some tags and entities of HTML."""
    return escape(one_line(text, 120), quote=False).replace("%{", "%\u200b{")
