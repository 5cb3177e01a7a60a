"""Bandwidths of two sets of results, side by side: by benchmark and class of message sizes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import NamedTuple

from imagebuild.compare.models import Speed
from imagebuild.judge import pairs
from imagebuild.report import words
from imagebuild.results.models import Results

CLASSES = ((1 << 16, "up to 64 KiB"), (1 << 20, "64 KiB to 1 MiB"), (1 << 30, "1 MiB to 1 GiB"))
LARGEST = "1 GiB and more"
EVERY_PAIR = "all pairs"


class Key(NamedTuple):
    """What was measured, at sizes of one class."""

    name: str
    sizes: str
    unit: str


Points = dict[object, list[float]]
"""Size, or cell of a matrix → what was measured there."""


def speeds(a: Results, b: Results) -> Iterator[Speed]:
    """Every benchmark that both have, at the sizes that both have."""
    ours, theirs = _series(a), _series(b)
    for key, points in ours.items():
        others = theirs.get(key, {})
        shared = [point for point in points if point in others]
        if not shared:
            continue
        pairs_of = [(median(points[point]), median(others[point])) for point in shared]
        yield Speed(
            name=key.name, sizes=key.sizes, unit=key.unit,
            a=round(median(old for old, _ in pairs_of), 3), b=round(median(new for _, new in pairs_of), 3),
            ratio=round(median(new / old for old, new in pairs_of), 4), points=len(shared),
        )  # fmt: skip


def in_one_only(a: Results, b: Results) -> tuple[str, ...]:
    """Benchmarks that cannot be compared, as only one has them or at other sizes."""
    ours, theirs = ({key.name for key in _series(results)} for results in (a, b))
    return tuple(sorted(ours ^ theirs))


def size_class(size: int) -> str:
    """`1 MiB to 1 GiB`: the least size is in it, the greatest is not."""
    return next((name for limit, name in CLASSES if size < limit), LARGEST)


def _series(results: Results) -> Mapping[Key, Points]:
    found: dict[Key, Points] = {}

    def add(key: Key, point: object, value: float | None) -> None:
        if value is not None and value > 0:
            found.setdefault(key, {}).setdefault(point, []).append(value)

    for run in results.runs:
        # What computed wrong data may be as fast as it likes.
        for row in run.rows if run.verdict == "ok" else ():
            name = ", ".join(filter(None, (words.run_name(run), row.dtype, run.device)))
            add(Key(name, size_class(row.size_bytes), "GB/s"), row.size_bytes, words.busbw(row))
    for test in results.tests:
        for cell, value in enumerate(pairs(test) if test.status == "passed" else ()):
            add(Key(test.name or "unnamed test", EVERY_PAIR, test.unit or "?"), cell, value)
    for table in results.tables:
        for line in table.rows if table.verdict == "ok" else ():
            name, group = table.test or "perftest", size_class(line.size_bytes)
            add(Key(name, group, table.unit or "?"), line.size_bytes, line.bw_average)
            add(Key(name, group, "µs"), line.size_bytes, words.latency(line.latency_us))
    return found
