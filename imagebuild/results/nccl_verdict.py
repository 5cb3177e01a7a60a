"""What a run of nccl-tests amounts to. Correctness only: speed is judged elsewhere.

The first of these that holds is the verdict:

1. `wrong-data`: elements were wrong, or checks out of bounds. Nothing else matters then, not even a missing footer.
2. `cuda-failure`, `timeout`, `comm-failure`, `failed`: the output names a failure (`nccl_failures.root` picks the one
   that explains the others), or the average is below what `NCCL_TESTS_MIN_BW` asked for.
3. `no-data`: no row could be read.
4. `truncated`: the footer is missing, the last row is cut, or the sizes end before the one asked for.
5. `ok`.

A table without the line `Out of bounds values` is `ok` only if a later line of the footer shows that the program came
that far, and the rows themselves show that all was right: `#wrong` is 0 everywhere, or validation was off. A table
without footer is never `ok`: an excerpt cannot be told from a run that was killed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from imagebuild.results.models import Row, Verdict
from imagebuild.results.nccl_failures import Cause, Failure, root

_VERDICTS: dict[Cause, Verdict] = {
    "cuda": "cuda-failure",
    "timeout": "timeout",
    "comm": "comm-failure",
    "remote": "comm-failure",
    "stopped": "failed",
    "trace": "failed",
}


@dataclass(frozen=True)
class Facts:
    """What is known about a run when it is judged."""

    rows: Sequence[Row]
    partial_rows: int = 0
    out_of_bounds: int | None = None
    out_of_bounds_failed: bool = False
    average_failed: bool = False
    concluded: bool = False
    """Something that is printed after the line about bounds was there."""
    failures: Sequence[Failure] = ()
    cut: bool = False
    """The last row is not whole."""
    missing_size: int | None = None
    """The next size that should have been there, if the last one asked for was not reached."""
    left_out: bool = False
    """Whoever copied the output left out parts, and said so with dots."""
    reduced_to: int | None = None
    """The largest size was reduced to this many bytes for lack of memory."""
    counts_wrong: bool = True
    """Whether the last column counts wrong elements; before 2.13 it was the largest error."""
    validated: bool = True
    warning: str | None = None
    """The first warning of NCCL."""


def wrong_total(rows: Sequence[Row]) -> int | None:
    """Wrong elements of all rows; None if nothing was counted."""
    counted = [
        half.wrong for row in rows for half in (row.out_of_place, row.in_place) if half and half.wrong is not None
    ]
    return sum(counted) if counted else None


def judge(facts: Facts) -> tuple[Verdict, str]:
    """The verdict and its reason."""
    wrong = wrong_total(facts.rows) or 0
    bounds = facts.out_of_bounds or 0
    if wrong or bounds or facts.out_of_bounds_failed:
        return "wrong-data", f"wrong: {wrong} wrong elements in the rows read, {bounds} checks out of bounds"
    if cause := root(facts.failures):
        return _VERDICTS[cause.cause], f"line {cause.number}: {cause.text}"
    if facts.average_failed:
        return "failed", "the average bus bandwidth is below what NCCL_TESTS_MIN_BW asks for"
    if not facts.rows:
        return "no-data", "no row of results" + _warned(facts)
    if short := _short(facts):
        return "truncated", f"truncated: {short}{_warned(facts)}"
    return "ok", "; ".join(("complete", *_remarks(facts)))


def _short(facts: Facts) -> str | None:
    if facts.cut:
        return "the last row is cut"
    if facts.out_of_bounds is None:
        if not facts.concluded:
            return "no footer"
        if facts.validated and not (facts.counts_wrong and wrong_total(facts.rows) == 0):
            return "no line `Out of bounds values`, and the rows do not say whether the data were right"
    if facts.missing_size is not None and not facts.left_out:
        return f"no row of {facts.missing_size} bytes, though it was asked for"
    return None


def _remarks(facts: Facts) -> list[str]:
    remarks = []
    if facts.reduced_to is not None:
        remarks.append(f"the largest size was reduced to {facts.reduced_to} bytes for lack of memory")
    if facts.left_out:
        remarks.append("parts are left out where the output has dots")
    if facts.partial_rows:
        remarks.append(f"{facts.partial_rows} rows could not be read")
    if not facts.validated:
        remarks.append("data were not validated")
    elif facts.out_of_bounds is None:
        remarks.append("the line `Out of bounds values` is missing")
    return remarks


def _warned(facts: Facts) -> str:
    return f"; NCCL warned: {facts.warning}" if facts.warning else ""
