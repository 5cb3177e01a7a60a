"""How results are named, and how numbers are written, in every output alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import PurePath

from imagebuild.judge import pairs
from imagebuild.results.models import BandwidthTest, Half, Row, Run, Table, UcxResult

GIB = 1 << 30
NONE = "\u2013"
"""What is unknown, or is not there."""

Named = Run | BandwidthTest | Table | UcxResult


def bytes_text(size: int) -> str:
    """`512 B`, `1 GiB`, `1.5 MiB`: exact in binary units, else with two decimals."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.2f}".rstrip("0").rstrip(".") + f" {unit}"


def number(value: float | None, digits: int = 2) -> str:
    """A measurement: an empty dash where it is unknown, fewer decimals the larger it is."""
    if value is None:
        return NONE
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:.1f}" if value < 1e6 else f"{value:.3g}"
    return f"{value:.{digits}f}" if abs(value) >= 0.01 else f"{value:.3g}"


def run_name(run: Run) -> str:
    """`all_reduce, 8 ranks, 2 nodes`."""
    parts = [run.collective or f"{run.tool} (collective unknown)"]
    if run.ranks is not None:
        parts.append(f"{run.ranks} rank{'s' * (run.ranks != 1)}")
    if run.nodes is not None and run.nodes > 1:
        parts.append(f"{run.nodes} nodes")
    return ", ".join(parts)


def name_of(item: Named) -> str:
    """What it is, without its file."""
    match item:
        case Run():
            return run_name(item)
        case BandwidthTest():
            return item.name or "unnamed test"
        case Table():
            return item.test or "perftest"
        case UcxResult():
            return ucx_name(item)


def names_of(items: Sequence[Named]) -> tuple[str, ...]:
    """Names that tell results apart: those of one kind also say their file, and their number in it."""
    names = [name_of(item) for item in items]
    several = Counter(names)
    longer = [
        f"{name}, {PurePath(item.source).name}" if several[name] > 1 else name
        for item, name in zip(items, names, strict=True)
    ]
    return numbered(longer)


def why(run: Run) -> str:
    """The reason of a run's verdict, without the verdict."""
    return run.reason.removeprefix(f"{run.verdict}: ").removeprefix(f"{run.verdict.split('-')[0]}: ")


def numbered(names: Iterable[str]) -> tuple[str, ...]:
    """The names; of equal ones each gets its number."""
    names = tuple(names)
    total, seen, result = Counter(names), Counter[str](), []
    for name in names:
        seen[name] += 1
        result.append(f"{name} #{seen[name]}" if total[name] > 1 else name)
    return tuple(result)


@dataclass(frozen=True)
class Best:
    """The fastest row of a run."""

    busbw_gb_s: float
    size_bytes: int


def best(run: Run) -> Best | None:
    """The fastest row, whichever placement; `None` if no bus bandwidth was printed."""
    found = [Best(speed, row.size_bytes) for row in run.rows if (speed := busbw(row)) is not None]
    return max(found, key=lambda one: one.busbw_gb_s, default=None)


def busbw(row: Row) -> float | None:
    """The better of both placements."""
    speeds = [half.busbw_gb_s for half in halves(row) if half.busbw_gb_s is not None and isfinite(half.busbw_gb_s)]
    return max(speeds, default=None)


def halves(row: Row) -> tuple[Half, ...]:
    return (row.out_of_place,) if row.in_place is None else (row.out_of_place, row.in_place)


def best_text(item: Named) -> str:
    """`482.3 GB/s at 8 GiB`; for a matrix `374.0 to 395.2 GB/s`."""
    match item:
        case Run():
            found = best(item)
            return f"{number(found.busbw_gb_s)} GB/s at {bytes_text(found.size_bytes)}" if found else NONE
        case BandwidthTest():
            return test_range(item)
        case Table():
            return table_best(item)
        case UcxResult():
            return ucx_best(item)


def test_range(test: BandwidthTest) -> str:
    """The least and the most of the pairs of a matrix; its diagonal is not one of them."""
    cells = pairs(test)
    if not cells:
        return NONE
    least, most = number(min(cells)), number(max(cells))
    return f"{least if least == most else f'{least} to {most}'} {test.unit or '(unit unknown)'}"


def table_best(table: Table) -> str:
    """`392.1 Gb/sec at 64 KiB`, or of a latency test `1.92 µs at 2 B`."""
    fast = [(row.bw_average, row.size_bytes) for row in table.rows if row.bw_average is not None]
    if fast:
        value, size = max(fast)
        return f"{number(value)} {table.unit or '(unit unknown)'} at {bytes_text(size)}"
    quick = [(speed, row.size_bytes) for row in table.rows if (speed := latency(row.latency_us)) is not None]
    if quick:
        value, size = min(quick)
        return f"{number(value)} µs at {bytes_text(size)}"
    return NONE


def latency(values: Mapping[str, float | None] | None) -> float | None:
    """The typical latency, else the average, in µs."""
    known = values or {}
    return next((known[name] for name in ("typical", "average") if known.get(name) is not None), None)


def ucx_name(ucx: UcxResult) -> str:
    """`ucx_perftest overhead, thread 1`."""
    parts = ["ucx_perftest" + (f" {ucx.title}" if ucx.title else "")]
    if ucx.thread is not None:
        parts.append(f"thread {ucx.thread}")
    return ", ".join(parts)


def ucx_best(ucx: UcxResult) -> str:
    """`10531.2 MiB/s, 0.09 µs at 1 MiB`: average bandwidth, typical latency."""
    speed, time_us = ucx.bandwidth_mib_s.get("average"), latency(ucx.latency_us)
    parts = [f"{number(speed)} MiB/s"] if speed is not None else []
    parts += [f"{number(time_us)} µs"] if time_us is not None else []
    where = f" at {bytes_text(ucx.size_bytes)}" if ucx.size_bytes is not None else ""
    return (", ".join(parts) or NONE) + where
