"""A reader of nccl-tests that shares no code with the package: regular expressions for whole lines of tables."""

from __future__ import annotations

import re

from imagebuild.bench.models import Results

Row = tuple[int | str | float | None, ...]
_NUMBER = r"\s+(\d+(?:\.\d+)?(?:e[+-]\d+)?)"
_ROW = re.compile(
    rf"^(?:\s*\d+:)?\s*(\d+)\s+\d+\s+([a-z]\w+)(?:\s+[a-z]+)?(?:\s+-?\d+)??{_NUMBER * 3}\s+(?:\d\S*|N/A){_NUMBER * 3}\s+(?:\d\S*|N/A)\s*$",
    re.MULTILINE,
)


def strict_rows(text: str) -> list[Row]:
    """Return size, type, and time, algbw and busbw of both halves of each row."""
    # Open MPI tags each piece of a row.
    found = [match.groups() for match in _ROW.finditer(re.sub(r"\[1,0\]<stdout>: ?", " ", text))]
    return [(int(size), dtype, *map(float, figures)) for size, dtype, *figures in found]


def package_rows(results: Results) -> list[Row]:
    """Return the same facts as read by the package."""
    return [
        (row.size_bytes, row.dtype,
         *(value for half in row.halves for value in (half.time_us, half.algbw_gb_s, half.busbw_gb_s)))
        for run in results.runs for row in run.rows if row.in_place
    ]  # fmt: skip
