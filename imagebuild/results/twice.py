"""Runs that were printed twice: as text, and as the JSON that nccl-tests writes beside it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from imagebuild.results.models import Half, Row, Run

_ROUNDED = 0.05
"""Largest relative difference that rounding explains: the text has two digits of a large time, more of others."""
_TINY = 0.006
"""µs and GB/s that the two decimals of the text do not show."""


def once(printed: Sequence[Run], written: Iterable[Run]) -> tuple[Run, ...]:
    """Runs of the documents that are not in the text, then those of the text.

    Where both are the same run, it has the numbers of the document, which are not rounded, and what only the text
    says: version, hosts and GPUs. Two that disagree in a size, a number or the verdict stay two.
    """
    result = list(printed)
    free = list(range(len(result)))
    others = []
    for run in written:
        twin = next((place for place in free if _same(result[place], run)), None)
        if twin is None:
            others.append(run)
            continue
        free.remove(twin)
        result[twin] = result[twin].model_copy(update={"rows": run.rows, "avg_busbw_gb_s": run.avg_busbw_gb_s})
    return (*others, *result)


def _same(one: Run, other: Run) -> bool:
    return (
        (one.collective, one.ranks, one.verdict, one.wrong_total, len(one.rows))
        == (other.collective, other.ranks, other.verdict, other.wrong_total, len(other.rows))
        and bool(one.rows)
        and all(_same_row(*rows) for rows in zip(one.rows, other.rows, strict=True))
    )


def _same_row(one: Row, other: Row) -> bool:
    named = (one.size_bytes, one.count, one.dtype, one.redop, one.root)
    if named != (other.size_bytes, other.count, other.dtype, other.redop, other.root):
        return False
    halves = ((one.out_of_place, other.out_of_place), (one.in_place, other.in_place))
    return all(_same_half(*pair) for pair in halves)


def _same_half(one: Half | None, other: Half | None) -> bool:
    if one is None or other is None:
        return one is other
    pairs = ((one.time_us, other.time_us), (one.busbw_gb_s, other.busbw_gb_s))
    return one.wrong == other.wrong and all(
        a == b or (a is not None and b is not None and math.isclose(a, b, rel_tol=_ROUNDED, abs_tol=_TINY))
        for a, b in pairs
    )
