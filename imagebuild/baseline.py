"""What became slower since an earlier measurement: `report --baseline OLD.json`. Pure.

Results are compared where collective, ranks, nodes, type, operation and size are the same; matrices cell by cell and
perftest size by size. Sizes below 1 MiB (perftest: 64 KiB) show latency and are left out. Everything is done with
logarithms, so that a change is a fraction at every size, and with medians, so that one odd row changes little. With
d(p) = median of the new values at a point p - median of the old ones:

* Noise of one d(p) is 1.4826 * MAD of d over the points of the group, where there are five: the scale of a normal
  distribution from its median absolute deviation (Hampel 1974), with sizes of 1 GiB and more around a median of their
  own. Where rows or runs are repeated, it is at least what their scatter says.
* A change of the whole group, or of its sizes of 1 GiB and more, is the median of d there. Its error is
  1.2533 * noise / sqrt(points), that of a median, and what runs of the same document differ by as a whole, where there
  are three. It is a regression if the median of d is below -max(floor, K * error).
* One point is a regression of its own if d(p) is below -max(2 * floor, K_POINT * noise). 3.5 is the cut-off of
  Iglewicz and Hoaglin (1993) for such scores.
* The floor is FLOOR, or LONE_FLOOR where no document has three runs to say by how much whole runs differ. Both are
  choices: a single run is expected to be off by 2 %.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from statistics import median

from imagebuild.judge import GATE_BYTES, subject
from imagebuild.judgement import Judgement, Limit, Outcome
from imagebuild.results.models import BandwidthTest, Results, Row, Run, Table
from imagebuild.transfers import GBIT

FLOOR = 0.03
LONE_FLOOR = 0.05
FEW = 5
K = 3.0
K_POINT = 3.5
SMALLEST = 2**20
SMALLEST_WIRE = 2**16

Point = int | tuple[int, int]
"""A size in bytes, or a cell of a matrix."""


@dataclass
class Series:
    """The values of one thing that was measured, in the order of measuring."""

    source: str
    unit: str
    devices: set[str] = field(default_factory=set)
    runs: list[dict[Point, list[float]]] = field(default_factory=list)
    """Of each run: logarithms of the values at each point."""
    unfit: str = ""
    """Why its values cannot be compared."""

    def at(self, point: Point) -> list[float]:
        return [value for run in self.runs for value in run.get(point, ())]

    def points(self) -> set[Point]:
        return {point for run in self.runs for point in run}


def compare(new: Results, old: Results) -> tuple[Judgement, ...]:
    """A judgement for everything that was measured in either document: `passed`, `regression` or `not-comparable`."""
    ours, theirs = _series(new), _series(old)
    return tuple(_judge(name, ours.get(name), theirs.get(name)) for name in dict.fromkeys((*ours, *theirs)))


def _judge(name: str, new: Series | None, old: Series | None) -> Judgement:
    if new is None or old is None:
        known = new or old
        assert known is not None
        why = "it was not measured this time" if new is None else "the baseline does not have it"
        return _said(known, name, "not-comparable", why)
    if why := new.unfit or (old.unfit and f"in the baseline, {old.unfit}"):
        return _said(new, name, "not-comparable", why)
    if new.devices and old.devices and new.devices != old.devices:
        return _said(new, name, "not-comparable", f"{_all(new.devices)} now, {_all(old.devices)} in the baseline")
    shared = new.points() & old.points()
    if not shared:
        return _said(new, name, "not-comparable", "no size of 1 MiB or more is in both")
    return _changed(name, new, old, {point: median(new.at(point)) - median(old.at(point)) for point in shared})


def _changed(name: str, new: Series, old: Series, changes: dict[Point, float]) -> Judgement:
    """The rule of the module's docstring."""
    noise, between = _noise(new, old, changes), _between_runs(new, old)
    floor = -math.log1p(-(LONE_FLOOR if between is None else FLOOR))
    large = {point: change for point, change in changes.items() if _large(point)}
    told = f"noise {noise:.1%}" if noise is not None else "too few values to know the noise"
    text, best, limit = "", max(changes, key=lambda point: median(old.at(point))), 0.0
    for part in (large, changes) if large else (changes,):
        centre = median(part.values())
        error = math.hypot(1.2533 * (noise or 0) / math.sqrt(len(part)), between or 0)
        limit = -max(floor, K * error)
        which = " of 1 GiB and more" if part is large else ""
        text = (
            f"median change {_percent(centre)} over {_points(len(part))}{which}; {_percent(limit)} is flagged; {told}"
        )
        if centre < limit:
            return _said(new, name, "regression", text, old=old, point=best, limit=limit)
    worst, point_limit = min(changes, key=lambda point: changes[point]), -max(2 * floor, K_POINT * (noise or 0))
    if changes[worst] < point_limit:
        where = f"{_named(worst)}: {_percent(changes[worst])}; {_percent(point_limit)} is flagged; {text}"
        return _said(new, name, "regression", where, old=old, point=worst, limit=point_limit)
    return _said(new, name, "passed", text, old=old, point=best, limit=limit)


def _noise(new: Series, old: Series, changes: dict[Point, float]) -> float | None:
    """Standard deviation of one d(p), or `None` where nothing says it."""
    found = []
    if len(changes) >= FEW:
        parts = ([c for point, c in changes.items() if _large(point) is large] for large in (True, False))
        rest = [change - median(part) for part in parts for change in part]
        found.append(1.4826 * median(map(abs, rest)))
    counts = [min(len(series.at(point)) for point in changes) for series in (new, old)]
    for series in (new, old):
        rest = [r for point in changes for r in _residuals(series.at(point))]
        if len(rest) >= FEW:
            found.append(1.4826 * median(map(abs, rest)) * math.sqrt(sum(1 / count for count in counts)))
    return max(found, default=None)


def _large(point: Point) -> bool:
    return isinstance(point, int) and point >= GATE_BYTES


def _residuals(values: list[float]) -> list[float]:
    """What repeated values differ by from the true one: less from their own median, so that is made up for."""
    if len(values) < 2:
        return []
    return [(value - median(values)) * math.sqrt(len(values) / (len(values) - 1)) for value in values]


def _between_runs(new: Series, old: Series) -> float | None:
    """Error of d from what whole runs differ by, or `None` where no document has three runs."""
    scales = []
    for series in (new, old):
        if len(series.runs) >= 3:
            offsets = [
                median(value - median(series.at(point)) for point, values in run.items() for value in values)
                for run in series.runs
                if run
            ]
            scales.append(1.4826 * median(map(abs, offsets)))
    return max(scales) * math.sqrt(1 / len(new.runs) + 1 / len(old.runs)) if scales else None


def _said(
    series: Series,
    name: str,
    outcome: Outcome,
    reason: str,
    *,
    old: Series | None = None,
    point: Point | None = None,
    limit: float | None = None,
) -> Judgement:
    reference = None
    if old is not None and point is not None:
        before = math.exp(median(old.at(point)))
        reference = Limit(value=round(before, 3), unit=series.unit, what=f"the baseline, {old.source}")
    return Judgement(
        source=series.source,
        subject=name,
        measured=round(math.exp(median(series.at(point))), 3) if point is not None else None,
        size_bytes=point if isinstance(point, int) else None,
        unit=series.unit,
        ceiling=None,
        reference=reference,
        tolerance=round(math.exp(limit), 4) if limit is not None else None,
        outcome=outcome,
        reason=reason,
    )


def _series(results: Results) -> dict[str, Series]:
    """Everything that was measured, by what it is."""
    found: dict[str, Series] = {}
    for run in results.runs:
        _add_run(found, run)
    for test in results.tests:
        if test.unit == "GB/s":
            cells = _cells(test) if test.status == "passed" else {}
            why = "" if cells else f"the test's status is {test.status}"
            _add(found, test.name or "unnamed test", Series(test.source, "GB/s", runs=[cells], unfit=why))
    for table in results.tables:
        if rows := _wire(table):
            why = "" if table.verdict == "ok" else f"its verdict is {table.verdict}"
            _add(found, table.test or "unknown test", Series(table.source, "Gb/s", runs=[rows], unfit=why))
    return found


def _add_run(found: dict[str, Series], run: Run) -> None:
    what = subject(run.collective, run.ranks, run.nodes)
    why = "" if run.verdict == "ok" else f"its verdict is {run.verdict}"
    groups: dict[str, dict[Point, list[float]]] = {} if run.rows else {what: {}}
    for row in run.rows:
        operation = f" {row.redop}" if row.redop and row.redop != "none" else ""
        points = groups.setdefault(f"{what}, {row.dtype}{operation}", {})
        if row.size_bytes >= SMALLEST and (values := list(_placements(row))):
            points.setdefault(row.size_bytes, []).append(sum(values) / len(values))
    for name, points in groups.items():
        _add(found, name, Series(run.source, "GB/s", {run.device} if run.device else set(), [points], why))


def _add(found: dict[str, Series], name: str, series: Series) -> None:
    """One more run of the thing. A run that failed does not spoil others."""
    known = found.get(name)
    if known is None or (known.unfit and not series.unfit):
        found[name] = series
    elif not series.unfit:
        known.runs += series.runs
        known.devices |= series.devices


def _placements(row: Row) -> Iterator[float]:
    for half in (row.out_of_place, row.in_place):
        if half and half.busbw_gb_s:
            yield math.log(half.busbw_gb_s)


def _cells(test: BandwidthTest) -> dict[Point, list[float]]:
    rows = enumerate(test.matrix or ())
    return {(i, j): [math.log(cell)] for i, row in rows for j, cell in enumerate(row) if cell and cell > 0}


def _wire(table: Table) -> dict[Point, list[float]]:
    scale = GBIT.get(table.unit or "")
    rows: dict[Point, list[float]] = {}
    for row in table.rows if scale else ():
        if row.bw_average and row.size_bytes >= SMALLEST_WIRE and scale:
            rows.setdefault(row.size_bytes, []).append(math.log(row.bw_average * scale))
    return rows


def _percent(change: float) -> str:
    return f"{math.expm1(change):+.1%}"


def _points(count: int) -> str:
    return "one value" if count == 1 else f"{count} values"


def _named(point: Point) -> str:
    return f"{point} bytes" if isinstance(point, int) else f"row {point[0]}, column {point[1]}"


def _all(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
