"""Compare results with an earlier measurement, the baseline (`report --baseline OLD.json`). Pure.

docs/report.md has the rules. The change at a size or cell is new value / old value - 1. The limits are choices: on a
healthy machine, single runs deviated by 2 %, and single sizes by 5 %."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean, median

from imagebuild.bench import models
from imagebuild.bench.ceilings import GB_UNITS
from imagebuild.bench.judge import GATE_BYTES, NO_PARTICIPATION, WIRE_BYTES
from imagebuild.bench.models import BandwidthTest, Claim, Judgement, Limit, Measurement, Results, Run, SpeedClaim
from imagebuild.core.errors import plural

MEDIAN, POINT, SPREAD = 0.05, 0.15, 0.20
"""Limits for the median change, for the change at one size or cell, and for the difference between runs."""
NO_DATA = Claim(state="not applicable", reason="the comparison with the baseline does not check data")

Point = int | tuple[int, int]
"""A size in bytes, or the row and column of a cell in a matrix."""


@dataclass
class Series:
    """The measured values of one quantity, from one or more runs."""

    source: str
    problem: str
    """Why the values cannot be compared; empty if the values can be compared."""
    devices: set[str]
    runs: list[dict[Point, float]]
    """One mapping for each run: from each point (size or cell) to the value at this point."""

    @property
    def medians(self) -> dict[Point, float]:
        """Maps each point (size or cell) to the median of all runs."""
        points = {point for run in self.runs for point in run}
        return {point: median(run[point] for run in self.runs if point in run) for point in points}

    @property
    def spread(self) -> float:
        """The difference between the fastest and the slowest run, as a fraction of the fastest."""
        medians = self.medians
        speeds = [median(value / medians[point] for point, value in run.items()) for run in self.runs if run]
        return 1 - min(speeds) / max(speeds)


def compare_with_baseline(new: Results, old: Results) -> tuple[Judgement, ...]:
    """Return a judgement (three claims) for each series in either report. One that is only in the baseline fails."""
    new_series, old_series = _series_of(new), _series_of(old)
    judgements = []
    for name in dict.fromkeys((*new_series, *old_series)):
        now, before, vanished = new_series.get(name), old_series.get(name), ""
        if now and before:
            speed, vanished = _compare(now, before), _vanished(now, before)
        else:
            vanished = "" if now else "the baseline contains this result, but the new measurement does not"
            speed = SpeedClaim(state="not judged", reason=vanished or "the baseline does not contain this result")
        participation = Claim(state="incomplete", reason=vanished) if vanished else NO_PARTICIPATION
        claims = {"data": NO_DATA, "participation": participation, "speed": speed}
        judgements.append(Judgement(source=(now or old_series[name]).source, subject=name, **claims))
    return tuple(judgements)


def _vanished(new: Series, old: Series) -> str:
    """Return a sentence about the cells and larger sizes that are in the baseline, but not in the new measurement.
    Return an empty text if there are none."""
    largest = max((point for point in new.medians if isinstance(point, int)), default=0)
    lost = sorted(p for p in old.medians.keys() - new.medians.keys() if not isinstance(p, int) or p > largest)
    if not lost:
        return ""
    pairs, sizes = f"{plural(len(lost), 'pair')} of devices", f"sizes of {lost[0]} to {lost[-1]} bytes"
    return f"not measured this time, but in the baseline: {sizes if isinstance(lost[0], int) else pairs}"


def _compare(new: Series, old: Series) -> SpeedClaim:
    """Return the claim about the speed of one series, by the rules in docs/report.md."""
    now, before = new.medians, old.medians
    changes = {point: now[point] / before[point] - 1 for point in now.keys() & before.keys()}
    problem = new.problem or (old.problem and f"in the baseline, {old.problem}")
    if new.devices and old.devices and new.devices != old.devices:
        names = (", ".join(sorted(series.devices)) for series in (new, old))
        problem = problem or "the GPU is {}, but the GPU of the baseline is {}".format(*names)
    if not changes or problem:
        problem = problem or "no size of 1 MiB or more is in both measurements"
        return SpeedClaim(state="not judged", reason=problem, allow="unjudged")
    large = [change for point, change in changes.items() if isinstance(point, int) and point >= GATE_BYTES]
    centre = median(large or changes.values())
    best, worst = max(changes, key=before.__getitem__), min(changes, key=changes.__getitem__)
    is_slow = centre < -MEDIAN or changes[worst] < -POINT
    point, limit = (worst, POINT) if is_slow and centre >= -MEDIAN else (best, MEDIAN)
    where = f"{worst} bytes" if isinstance(worst, int) else f"row {worst[0]}, column {worst[1]}"
    reason = f"median change {centre:+.1%} over {len(large or changes)} values (limit {-MEDIAN:+.0%})"
    reason += f"; worst change {changes[worst]:+.1%} at {where} (limit {-POINT:+.0%})"
    scattered = None if is_slow else next((series for series in (new, old) if series.spread > SPREAD), None)
    if scattered:
        whose = "" if scattered is new else " of the baseline"
        reason = f"the {len(scattered.runs)} runs{whose} differ too much, by {scattered.spread:.0%}; {reason}"
    reference = Limit(value=round(before[point], 3), what=f"the baseline, {old.source}")
    return SpeedClaim(
        state="too slow" if is_slow else "not judged" if scattered else "fast enough", reason=reason,
        allow="unjudged" if scattered else None, measured=round(now[point], 3), reference=reference,
        size_bytes=point if isinstance(point, int) else None, tolerance=1 - limit,
    )  # fmt: skip


def _series_of(results: Results) -> dict[str, Series]:
    """Return the series in the results, by name. A failed run is used only if its series has no successful run."""
    series: dict[str, Series] = {}
    for result in sorted(results.measured, key=lambda result: result.verdict != "ok"):
        problem = "" if result.verdict == "ok" else f"the verdict of the result is {result.verdict}"
        devices = set(result.devices[:1]) if isinstance(result, Run) else set()
        for name, values in _values_of(result).items():
            if name not in series:
                series[name] = Series(result.source, problem, devices, [values])
            elif not problem:
                series[name].runs.append(values)
                series[name].devices |= devices
    return series


def _values_of(result: Measurement) -> dict[str, dict[Point, float]]:
    """Return the values of a result by the name of their series. Each data type and operation has a separate series."""
    values: defaultdict[str, dict[Point, float]] = defaultdict(dict)
    match result:
        case Run():
            for line in result.rows:
                operation = f" {line.redop}" if line.redop and line.redop != "none" else ""
                speeds = [half.busbw_gb_s for half in line.halves if half.busbw_gb_s]
                if line.size_bytes >= 2**20 and speeds:
                    values[f"{result.subject}, {line.dtype}{operation}"][line.size_bytes] = fmean(speeds)
            return values or {result.subject: {}}
        case BandwidthTest() if result.unit == "GB/s":
            for number, cells in enumerate(result.matrix or ()):
                values[result.subject] |= {(number, at): cell for at, cell in enumerate(cells) if cell and cell > 0}
        case models.PerftestTable() if scale := GB_UNITS.get(result.unit or ""):
            for row in result.rows:
                if row.bw_average and (row.size_bytes or 0) >= WIRE_BYTES:
                    values[result.subject][row.size_bytes or 0] = row.bw_average * scale
    return values
