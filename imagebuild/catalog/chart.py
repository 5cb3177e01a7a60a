"""A curve as a small drawing: bus bandwidth over message size, below its ceiling. Pure.

Colours are the page's, by CSS classes. The vertical axis begins at 0 and ends above the ceiling, so that the height is
the part of the limit that was reached.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from imagebuild.catalog.models import Curve
from imagebuild.report import words

WIDTH, HEIGHT = 360, 200
LEFT, RIGHT, TOP, BOTTOM = 40, 10, 16, 26
STEPS = (1, 2, 2.5, 5, 10)


@dataclass(frozen=True)
class Mark:
    """A line of the grid with its label."""

    at: float
    text: str


@dataclass(frozen=True)
class Bar:
    """A limit: a horizontal line."""

    y: float
    label_y: float
    text: str
    kind: str


@dataclass(frozen=True)
class Chart:
    """Where everything is, in the units of the drawing."""

    path: str
    dots: tuple[tuple[float, float], ...]
    across: tuple[Mark, ...]
    up: tuple[Mark, ...]
    bars: tuple[Bar, ...]


def draw(curve: Curve) -> Chart:
    """The drawing of a curve."""
    top = _top(curve)
    sizes = [size for size, _ in curve.points]
    low, high = math.log2(sizes[0]), math.log2(sizes[-1])
    span = max(high - low, 1.0)

    def x(size: float) -> float:
        return round(LEFT + (math.log2(size) - low) / span * (WIDTH - LEFT - RIGHT), 1)

    def y(rate: float) -> float:
        return round(HEIGHT - BOTTOM - rate / top * (HEIGHT - TOP - BOTTOM), 1)

    dots = tuple((x(size), y(min(rate, top))) for size, rate in curve.points)
    step = _step(top)
    return Chart(
        path="M" + "L".join(f"{a:g} {b:g}" for a, b in dots),
        dots=dots,
        across=tuple(Mark(x(size), words.bytes_text(size)) for size in _sizes(sizes[0], sizes[-1])),
        up=tuple(Mark(y(n * step), f"{n * step:g}") for n in range(int(top / step) + 1)),
        bars=_bars(curve, y),
    )


def _top(curve: Curve) -> float:
    limits = [bound.gb_s for bound in (curve.ceiling, curve.reference) if bound]
    return max([*(rate for _, rate in curve.points), *limits, 1e-9]) * 1.08


def _step(top: float) -> float:
    """Between lines of the grid, so that there are about four."""
    rough = top / 4
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in STEPS if factor * power >= rough)


def _sizes(least: int, largest: int) -> list[int]:
    """Powers of two, four or five of them."""
    first, last = math.ceil(math.log2(least)), math.floor(math.log2(largest))
    step = max(1, math.ceil((last - first) / 4))
    return [1 << power for power in range(first, last + 1, step)]


def _bars(curve: Curve, y: Callable[[float], float]) -> tuple[Bar, ...]:
    found = []
    if curve.ceiling:
        at = y(curve.ceiling.gb_s)
        found.append(Bar(at, at - 4, f"ceiling {words.number(curve.ceiling.gb_s)}", "ceiling"))
    if curve.reference:
        at = y(curve.reference.gb_s)
        # Below its own line, where the ceiling's label is not.
        found.append(Bar(at, at + 12, f"reference {words.number(curve.reference.gb_s)}", "reference"))
    return tuple(found)
