"""Find what became slower since an earlier measurement: `report --baseline OLD.json`. Pure.

Results are compared where collective, ranks, nodes, type, operation and size are the same; matrices cell by cell and
perftest size by size. Sizes below 1 MiB (perftest: 64 KiB) show latency and are left out. Everything is done with
logarithms, so that a change is a fraction at every size, and with medians, so that one odd row changes little. With
d(p) = median of the new values at a point p - median of the old ones:

* Noise is the standard deviation of one d(p). With five points or more it is 1.4826 * the median absolute deviation of
  d, the scale of a normal distribution (Hampel 1974), where sizes of 1 GiB and more deviate from a median of their own.
  If rows or runs are repeated, it is at least what these differ by.
* The change of all sizes, or of those of 1 GiB and more, is the median of d there. Its error has two parts: that of a
  median, 1.2533 * noise / sqrt(points), and that of whole runs, if a document has three of them to tell by how much
  they differ. It is a regression if the median of d is below -max(floor, K * error).
* A point alone is a regression if d(p) is below -max(2 * floor, K_POINT * noise). 3.5 is the cut-off of Iglewicz and
  Hoaglin (1993) for such scores.
* If whole runs of either document differ by more than SPREAD, nothing passes: what is no regression by these rules
  stays open.
* The floor is FLOOR, or LONE_FLOOR if no document has three runs. Both are choices: a single run is expected to be off
  by 2 %.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median

from imagebuild.bench.ceilings import GBIT_UNITS
from imagebuild.bench.judge import GATE_BYTES, NO_PARTICIPATION, WIRE_BYTES
from imagebuild.bench.models import (
    DataClaim,
    Judgement,
    Limit,
    Openness,
    ParticipationClaim,
    Results,
    Run,
    SpeedClaim,
    SpeedState,
)

FLOOR = 0.03
LONE_FLOOR = 0.05
SPREAD = 0.2
"""Largest fraction by which repeated runs may differ as a whole; the medians of runs that differ more show nothing."""
LEAST_POINTS = 5
K = 3.0
K_POINT = 3.5
MAD_SCALE = 1.4826
"""Standard deviation of a normal distribution / its median absolute deviation."""
MEDIAN_ERROR = 1.2533
"""Standard error of a median / that of a mean."""
NO_DATA = DataClaim(state="not applicable", reason="compared with the baseline")
SMALLEST = 2**20
"""Least size in bytes at which collectives are compared."""

Point = int | tuple[int, int]
"""A size in bytes, or row and column of a cell of a matrix."""


@dataclass
class Series:
    """Hold the measured values of one quantity, from one or more runs in their order."""

    source: str
    unit: str
    devices: set[str] = field(default_factory=set)
    runs: list[dict[Point, list[float]]] = field(default_factory=list)
    """Of each run: logarithms of the values at each point."""
    problem: str = ""
    """Why its values cannot be compared."""

    def at(self, point: Point) -> list[float]:
        """Return the values of all runs at a point."""
        return [value for run in self.runs for value in run.get(point, ())]

    def points(self) -> set[Point]:
        return {point for run in self.runs for point in run}


def compare_with_baseline(new: Results, old: Results) -> tuple[Judgement, ...]:
    """Compare new results with the baseline; a measurement that only the baseline has is a failure."""
    new_series, old_series = _series_of(new), _series_of(old)
    judgements = []
    for name in dict.fromkeys((*new_series, *old_series)):
        now, before, vanished = new_series.get(name), old_series.get(name), ""
        if now and before:
            speed, vanished = _compare(now, before), _vanished(now, before)
        elif now:
            speed = _claim(now, "not judged", "the baseline does not have it")
        else:
            vanished = "the baseline has it, but it was not measured this time"
            speed = _claim(old_series[name], "not judged", vanished)
        participation = ParticipationClaim(state="incomplete", reason=vanished) if vanished else NO_PARTICIPATION
        source = (now or old_series[name]).source
        judgements.append(
            Judgement(source=source, subject=name, data=NO_DATA, participation=participation, speed=speed)
        )
    return tuple(judgements)


def _vanished(new: Series, old: Series) -> str:
    """Return which cells, or which sizes above the largest that was measured now, only the baseline has."""
    largest = max((point for point in new.points() if isinstance(point, int)), default=0)
    lost = sorted(p for p in old.points() - new.points() if not isinstance(p, int) or p > largest)
    if not lost:
        return ""
    what = f"sizes of {lost[0]} to {lost[-1]} bytes" if isinstance(lost[0], int) else f"pairs of devices ({len(lost)})"
    return f"not measured this time: {what}, which the baseline has"


def _compare(new: Series, old: Series) -> SpeedClaim:
    """Judge one series by the rule of the module's docstring."""
    if problem := new.problem or (old.problem and f"in the baseline, {old.problem}"):
        return _claim(new, "not judged", problem, allow="unjudged")
    if new.devices and old.devices and new.devices != old.devices:
        now, before = ", ".join(sorted(new.devices)), ", ".join(sorted(old.devices))
        return _claim(new, "not judged", f"the GPU is {now}, in the baseline it is {before}", allow="unjudged")
    shared = new.points() & old.points()
    if not shared:
        return _claim(new, "not judged", "no size of 1 MiB or more was measured in both", allow="unjudged")
    changes = {point: median(new.at(point)) - median(old.at(point)) for point in shared}
    noise, between = _noise(new, old, changes), _error_between_runs(new, old)
    noise_text = f"noise {noise:.1%}" if noise is not None else "too few values to estimate the noise"
    floor = -math.log1p(-(LONE_FLOOR if between is None else FLOOR))
    best = max(changes, key=lambda point: median(old.at(point)))
    large = {point: change for point, change in changes.items() if _is_large(point)}
    reason, limit = "", 0.0
    for group in (large, changes) if large else (changes,):
        centre = median(group.values())
        error = math.hypot(MEDIAN_ERROR * (noise or 0) / math.sqrt(len(group)), between or 0)
        limit = -max(floor, K * error)
        count = "one value" if len(group) == 1 else f"{len(group)} values"
        sizes = " of 1 GiB and more" if group is large else ""
        reason = f"median change {_percent(centre)} over {count}{sizes}; the limit is {_percent(limit)}; {noise_text}"
        if centre < limit:
            return _claim(new, "too slow", reason, old=old, point=best, limit=limit)
    worst = min(changes, key=lambda point: changes[point])
    point_limit = -max(2 * floor, K_POINT * (noise or 0))
    if changes[worst] < point_limit:
        where = f"{worst} bytes" if isinstance(worst, int) else f"row {worst[0]}, column {worst[1]}"
        reason = f"{where}: {_percent(changes[worst])}; the limit is {_percent(point_limit)}; {reason}"
        return _claim(new, "too slow", reason, old=old, point=worst, limit=point_limit)
    problem = _scatter(new, "") or _scatter(old, " of the baseline")
    state: SpeedState = "not judged" if problem else "fast enough"
    reason = "; ".join(filter(None, (problem, reason)))
    allow: Openness | None = "unjudged" if problem else None
    return _claim(new, state, reason, allow=allow, old=old, point=best, limit=limit)


def _noise(new: Series, old: Series, changes: dict[Point, float]) -> float | None:
    """Return the standard deviation of one d(p); None if there are too few values to estimate it."""
    estimates = []
    if len(changes) >= LEAST_POINTS:
        groups = ([c for point, c in changes.items() if _is_large(point) is large] for large in (True, False))
        deviations = [change - median(group) for group in groups for change in group]
        estimates.append(MAD_SCALE * median(map(abs, deviations)))
    repetitions = [min(len(series.at(point)) for point in changes) for series in (new, old)]
    for series in (new, old):
        residuals = []
        for values in map(series.at, changes):
            if len(values) > 1:
                # Values differ less from their own median than from the true one.
                correction = math.sqrt(len(values) / (len(values) - 1))
                residuals += [(value - median(values)) * correction for value in values]
        if len(residuals) >= LEAST_POINTS:
            scale = math.sqrt(sum(1 / count for count in repetitions))
            estimates.append(MAD_SCALE * median(map(abs, residuals)) * scale)
    return max(estimates, default=None)


def _offsets(series: Series) -> list[float]:
    """Return for each run how far its values are off the medians of all runs."""
    return [
        median(value - median(series.at(point)) for point, values in run.items() for value in values)
        for run in series.runs
        if run
    ]


def _scatter(series: Series, where: str) -> str:
    """Return in words that runs differ by more than SPREAD; empty if they do not."""
    offsets = _offsets(series)
    spread = -math.expm1(min(offsets) - max(offsets))
    return f"the {len(offsets)} runs{where} differ too much, by {spread:.0%}" if spread > SPREAD else ""


def _error_between_runs(new: Series, old: Series) -> float | None:
    """Return the error of d that comes from differences between whole runs; None if no document has three runs."""
    scales = [MAD_SCALE * median(map(abs, _offsets(series))) for series in (new, old) if len(series.runs) >= 3]
    return max(scales) * math.sqrt(1 / len(new.runs) + 1 / len(old.runs)) if scales else None


def _is_large(point: Point) -> bool:
    return isinstance(point, int) and point >= GATE_BYTES


def _percent(change: float) -> str:
    """Return a difference of logarithms as a change in per cent."""
    return f"{math.expm1(change):+.1%}"


def _claim(
    series: Series,
    state: SpeedState,
    reason: str,
    *,
    allow: Openness | None = None,
    old: Series | None = None,
    point: Point | None = None,
    limit: float | None = None,
) -> SpeedClaim:
    reference = None
    if old is not None and point is not None:
        before = math.exp(median(old.at(point)))
        reference = Limit(value=round(before, 3), unit=series.unit, what=f"the baseline, {old.source}")
    return SpeedClaim(
        state=state,
        reason=reason,
        allow=allow,
        measured=round(math.exp(median(series.at(point))), 3) if point is not None else None,
        size_bytes=point if isinstance(point, int) else None,
        unit=series.unit,
        reference=reference,
        tolerance=round(math.exp(limit), 4) if limit is not None else None,
    )


def _series_of(results: Results) -> dict[str, Series]:
    """Return everything that was measured, by its name."""
    series: dict[str, Series] = {}
    for run in results.runs:
        problem = "" if run.verdict == "ok" else f"its verdict is {run.verdict}"
        devices = {run.device} if run.device else set()
        for name, points in _points_of_run(run).items():
            _add(series, name, Series(run.source, "GB/s", set(devices), [points], problem))
    for test in results.tests:
        if test.unit == "GB/s":
            cells: dict[Point, list[float]] = {
                (row, column): [math.log(value)]
                for row, values in enumerate(test.matrix or () if test.status == "passed" else ())
                for column, value in enumerate(values)
                if value and value > 0
            }
            problem = "" if cells else f"the test's status is {test.status}"
            _add(series, test.subject, Series(test.source, "GB/s", runs=[cells], problem=problem))
    for table in results.tables:
        scale = GBIT_UNITS.get(table.unit or "", 0.0)
        sizes: dict[Point, list[float]] = {}
        for row in table.rows:
            if scale and row.bw_average and row.size_bytes >= WIRE_BYTES:
                sizes.setdefault(row.size_bytes, []).append(math.log(row.bw_average * scale))
        if sizes:
            problem = "" if table.verdict == "ok" else f"its verdict is {table.verdict}"
            _add(series, table.subject, Series(table.source, "Gb/s", runs=[sizes], problem=problem))
    return series


def _points_of_run(run: Run) -> dict[str, dict[Point, list[float]]]:
    """Return the values of a run by name and size: types and operations are compared apart."""
    by_name: dict[str, dict[Point, list[float]]] = {} if run.rows else {run.subject: {}}
    for row in run.rows:
        operation = f" {row.redop}" if row.redop and row.redop != "none" else ""
        points = by_name.setdefault(f"{run.subject}, {row.dtype}{operation}", {})
        values = [math.log(half.busbw_gb_s) for half in row.halves if half.busbw_gb_s]
        if row.size_bytes >= SMALLEST and values:
            points.setdefault(row.size_bytes, []).append(sum(values) / len(values))
    return by_name


def _add(series: dict[str, Series], name: str, run: Series) -> None:
    """Add one more run to a series. A run that failed does not spoil the others."""
    known = series.get(name)
    if known is None or (known.problem and not run.problem):
        series[name] = run
    elif not run.problem:
        known.runs += run.runs
        known.devices |= run.devices
