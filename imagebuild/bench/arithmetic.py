"""The arithmetic of nccl-tests: how the figures of a row follow from each other, and which collectives fit them. Pure.

With n ranks, three relations hold in every row:

* size = m * count * bytes of the type, where m is n if the collective divides the data among the ranks, else 1;
* algbw * time = size;
* busbw = f * algbw, where f is 2(n-1)/n for all_reduce, (n-1)/n if the collective divides the data, else 1.

Figures are rounded. A figure therefore stands for all values within half of its last printed digit, and a relation
holds if such values obey it. nccl-tests prints two decimals. Larger figures have fewer: releases before 2.17.3 drop
decimals of times from 100 µs and 10 ms, later releases print as many decimals as fit in six (bandwidth) or seven
characters (time), and then `1e+06` or `1.6e+07`. `_TIMES` and `_RATES` have the coarsest of these forms."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from imagebuild.bench.models import Half, NcclRow
from imagebuild.core.patterns import data_of

_DATA = data_of(__file__)
TYPE_BYTES: Mapping[str, int] = _DATA["type_bytes"]
"""Size in bytes of one element of each type."""


class _Traits(NamedTuple):
    """Properties of a collective that its rows show."""

    reduces: bool
    has_root: bool
    divides: bool
    """Whether the size is that of `count` elements for each rank."""
    checks_in_place: bool
    """Whether the program validates the data in place, since 2.13.1."""


_TRAITS = {name: _Traits(*row) for name, row in _DATA["traits"].items()}
"""The traits of each collective, except alltoallv, whose counts differ between ranks."""


def checks_in_place(collective: str | None) -> bool:
    """Return whether the program always validates data in place. False if the collective is unknown."""
    traits = _TRAITS.get(collective or "")
    return traits is not None and traits.checks_in_place


# Intervals of rounded figures

_TIMES, _RATES = ((100, 0.01), (10_000, 0.1), (1e7, 1)), ((1_000, 0.01), (10_000, 0.1), (1e6, 1))
"""Pairs of a limit and the value of the last digit of figures below the limit. Larger times have two digits, larger
bandwidths one."""


class Span(NamedTuple):
    """The values that a rounded figure may stand for."""

    low: float
    high: float


def span_of(figure: float, steps: Sequence[tuple[float, float]], digits: int) -> Span:
    """Return the span of a figure. A figure above all limits in `steps` has `digits` digits. A final zero of a decimal
    is not known to be printed, so it does not count as a digit."""
    last = next((step for limit, step in steps if figure < limit), None)
    if last is None:
        last = 10.0 ** (math.floor(math.log10(figure)) + 1 - digits)
    elif last < 1 and math.isclose(figure, round(figure, 1), rel_tol=1e-9):
        last = 0.1
    return Span(max(0.0, figure - last * 0.501), figure + last * 0.501)  # 0.501: binary fractions are not exact


def _common(spans: Collection[Span]) -> Span:
    """Return the values that are in all spans. `low` is above `high` if there are none."""
    return Span(max((span.low for span in spans), default=0), min((span.high for span in spans), default=math.inf))


def _ratio(half: Half) -> Span:
    """Return the span of busbw / algbw. `half` has both figures."""
    algbw, busbw = span_of(half.algbw_gb_s or 0, _RATES, 1), span_of(half.busbw_gb_s or 0, _RATES, 1)
    return Span(busbw.low / algbw.high, busbw.high / algbw.low if algbw.low else math.inf)


# Which collectives fit


_MOST_RANKS = 1 << 30


class Shape(NamedTuple):
    """What the figures of all rows have in common."""

    multiple: int | None
    """The m of the relations: size / (count * bytes of the type). `None`: unknown."""
    ratio: Span
    """The span of the f of the relations: busbw / algbw."""

    def ranks(self, collective: str | None) -> tuple[int, int] | None:
        """Return the least and the largest number of ranks that fit the collective. None if no number fits."""
        traits = _TRAITS.get(collective or "")
        (low, high), m = self.ratio, self.multiple
        if traits is None:
            return 1, _MOST_RANKS  # any number
        if (m or 1) > 1 and not traits.divides:
            return None
        if collective == "all_reduce":
            least, most = (2 / (2 - f) if 0 <= f < 2 - 1e-9 else float(_MOST_RANKS) for f in (low, high))
            return (math.ceil(least), math.floor(most)) if low < 2 and math.ceil(least) <= most else None
        # The first releases print algbw = busbw also for collectives that divide the data. One rank sends nothing.
        factors = [1.0, 0.0] if m in (None, 1) else [1.0]
        if traits.divides and collective != "hypercube":
            factors += [(m - 1) / m] if m else [low]
        if not any(low <= f <= high for f in factors) or (m is None and low > 1):
            return None
        return (m, m) if traits.divides and m else (1, _MOST_RANKS)


def shape_of(rows: Sequence[NcclRow]) -> Shape:
    """Return what the figures have in common. The caller knows that they do not contradict each other."""
    multiples = {row.size_bytes // data for row in rows if (data := row.count * TYPE_BYTES.get(row.dtype, 0))}
    halves = [half for row in rows if row.size_bytes for half in row.halves]
    known = [half for half in halves if math.isfinite((half.algbw_gb_s or 0) + (half.busbw_gb_s or 0))]
    ratios = [_ratio(half) for half in known if half.algbw_gb_s is not None and half.busbw_gb_s is not None]
    return Shape(max(multiples, default=None), _common(ratios))


def fitting_collectives(rows: Sequence[NcclRow], labels: Sequence[str], ranks: int | None) -> tuple[str, ...]:
    """Return the collectives that fit the figures and the columns of all rows.

    `labels` are the names of the columns, `ranks` is the number of listed ranks. A fact that fits no collective is
    ignored: the list of ranks may be cut, some programs print the operation `sum` for every collective, and releases
    before 2.13.1 validate data in place for every collective."""
    shape, operations, roots = shape_of(rows), {row.redop for row in rows}, {row.root for row in rows}
    is_old, has_operation = "error" in labels, not {"redop", "op"}.isdisjoint(labels)
    if is_old and has_operation and operations == {None}:
        return ("alltoall",)  # which leaves the column of the operation blank

    def fits(name: str, ranks: int | None) -> bool:
        traits, possible = _TRAITS[name], shape.ranks(name)
        is_divided = traits.divides if ranks == 1 else shape.multiple != 1
        if possible is None or not (ranks is None or possible[0] <= ranks <= possible[1]):
            return False
        return (traits.divides, traits.has_root) == (is_divided, roots.isdisjoint((None, -1)))

    others = {"alltoall"} if is_old and not has_operation else set()
    others |= {"hypercube"} if operations != {None} else set()  # which leaves the column blank in all releases
    names = [name for name in _TRAITS if name not in others]
    fitting = [name for name in names if fits(name, ranks)] or [name for name in names if fits(name, None)]
    is_reducing = operations.isdisjoint((None, "none"))
    fitting = [name for name in fitting if _TRAITS[name].reduces == is_reducing] or fitting
    out = any(row.out_of_place.wrong is not None for row in rows)
    inside = any(row.in_place.wrong is not None for row in rows if row.in_place)
    return tuple(name for name in fitting if not out or _TRAITS[name].checks_in_place == inside) or tuple(fitting)


def contradiction(rows: Sequence[NcclRow], collective: str | None, *, has_times: bool = True) -> str:
    """Return why the figures cannot all be right, or an empty text.

    If the collective is None, the figures must fit at least one collective. Counts of alltoallv are not checked,
    because they differ between ranks. `has_times` says whether bandwidths were computed from the printed times, which
    is not so for CPU times."""
    is_uneven = collective == "alltoallv"
    multiples: dict[int, int] = {}
    ratios: list[tuple[int, Span]] = []
    for row in rows:
        size, data = row.size_bytes, row.count * TYPE_BYTES.get(row.dtype, 0)
        if data and not is_uneven:
            multiples.setdefault(size // data, size)
            if size % data or len(multiples) > 1:
                return f"size and count of the row of {size} bytes do not fit each other"
        for half in row.halves if size else ():
            if half.time_us is None or half.algbw_gb_s is None or half.busbw_gb_s is None:
                return f"the row of {size} bytes has figures that are not numbers"
            time, rate, ratio = span_of(half.time_us, _TIMES, 2), span_of(half.algbw_gb_s, _RATES, 1), _ratio(half)
            sizes = [float(size)]
            if data and size > data and ratio.low <= 1 <= ratio.high:
                sizes.append(float(size - data))  # the first releases, and hypercube, leave out a rank's own data
            fits = any(rate.low * time.low <= moved / 1e3 <= rate.high * time.high for moved in sizes)
            if has_times and not is_uneven and not fits:
                return f"time and algbw of the row of {size} bytes do not fit each other"
            ratios.append((size, ratio))
    common = _common([ratio for _, ratio in ratios])
    if common.low > common.high:
        usual = median(ratio.low for _, ratio in ratios)
        size, _ = max(ratios, key=lambda entry: max(entry[1].low / usual - 1, 1 - entry[1].high / usual))
        return "" if is_uneven else f"algbw and busbw of the row of {size} bytes do not fit each other"
    shape = Shape(next(iter(multiples), None), common)
    if any(shape.ranks(name) for name in ((collective,) if collective else _TRAITS)):
        return ""
    bytes_of = f"size is {shape.multiple} * count" if (shape.multiple or 1) > 1 else "size is that of `count` elements"
    return f"{bytes_of}, busbw is {common.low:.3g} * algbw: these are not the figures of {collective or 'a collective'}"
