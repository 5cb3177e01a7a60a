"""Which collective a table without a name is of: said only where no other fits."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from imagebuild.results.models import Row
from imagebuild.results.nccl_events import Header
from imagebuild.results.nccl_rows import DTYPES


def collective(rows: Sequence[Row], header: Header | None) -> str | None:
    """The collective that the columns and their ratios leave.

    `busbw / algbw` is 2(n-1)/n for all_reduce, (n-1)/n for those that divide the data among ranks, 1 for the rest. With
    one rank all is 0 and nothing can be said.
    """
    if not rows:
        return None
    ratio, share = _ratio(rows), _share(rows)
    if ratio is None or share is None:
        return _by_blank_column(rows, header)
    redops = {row.redop for row in rows}
    roots = {row.root for row in rows}
    reducing = bool(redops) and not redops & {None, "none"}
    rooted = bool(roots) and not roots & {None, -1}
    if reducing:
        return _reducing(rooted=rooted, ratio=ratio, share=share)
    if rooted:
        return "broadcast" if share == 1 and ratio > 0.99 else None
    return _by_blank_column(rows, header) or _without_columns(rows, header, ratio, share)


def _reducing(*, rooted: bool, ratio: float, share: int) -> str | None:
    if rooted:
        return "reduce"
    if share > 1:
        return "reduce_scatter"
    return "all_reduce" if ratio > 0.99 else None


def _by_blank_column(rows: Sequence[Row], header: Header | None) -> str | None:
    """Before 2.13, only alltoall names a column for the operation and leaves it blank."""
    if header and header.redop and not header.root and all(row.redop is None and row.root is None for row in rows):
        return "alltoall"
    return None


def _without_columns(rows: Sequence[Row], header: Header | None, ratio: float, share: int) -> str | None:
    """Before 2.13, neither operation nor root: all_gather, sendrecv, hypercube."""
    if header is None or header.redop or header.root or any(row.redop or row.root is not None for row in rows):
        return None
    if share > 1 and abs(ratio - (share - 1) / share) < 0.01:
        return "all_gather"
    return "sendrecv" if share == 1 and ratio > 0.99 else None


def _ratio(rows: Sequence[Row]) -> float | None:
    """`busbw / algbw`, from rows whose digits tell it."""
    ratios = [
        half.busbw_gb_s / half.algbw_gb_s
        for row in rows
        for half in (row.out_of_place, row.in_place)
        if half and half.algbw_gb_s and half.busbw_gb_s and half.algbw_gb_s >= 2
    ]
    return median(ratios) if ratios else None


def _share(rows: Sequence[Row]) -> int | None:
    """Among how many the data of a row are divided: size by `count` elements, the same in all rows."""
    shares = {
        row.size_bytes / (row.count * DTYPES[row.dtype])
        for row in rows
        if row.count > 0 and row.size_bytes > 0 and row.dtype in DTYPES
    }
    share = shares.pop() if len(shares) == 1 else None
    return int(share) if share and share == int(share) else None
