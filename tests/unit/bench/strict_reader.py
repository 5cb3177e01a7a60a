"""A reader of nccl-tests that shares nothing with the package: regular expressions over whole lines of current tables.

`python -m tests.unit.bench.strict_reader FOLDER…` compares it with the package on every file of folders of logs.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from imagebuild.bench import Results, read_text

Row = tuple[int | str | float | None, ...]
_NUMBER = r"\s+(\d+(?:\.\d+)?(?:e[+-]\d+)?)"
_ROW = re.compile(
    rf"^(?:\s*\d+:|\[1,0\]<stdout>:)?\s*(\d+)\s+\d+\s+([a-z]\w+)\s+\w+\s+-?\d+{_NUMBER * 3}\s+(?:\d\S*|N/A){_NUMBER * 3}\s+(?:\d\S*|N/A)\s*$",
    re.MULTILINE,
)


def strict_rows(text: str) -> list[Row]:
    """Size, type, and time, algbw, busbw of both halves of each row."""
    found = [match.groups() for match in _ROW.finditer(text)]
    return [(int(size), dtype, *map(float, figures)) for size, dtype, *figures in found]


def package_rows(results: Results) -> list[Row]:
    """The same, as the package reads it."""
    return [
        (
            row.size_bytes, row.dtype, row.out_of_place.time_us, row.out_of_place.algbw_gb_s, row.out_of_place.busbw_gb_s,
            row.in_place.time_us, row.in_place.algbw_gb_s, row.in_place.busbw_gb_s,
        )
        for run in results.runs for row in run.rows if row.in_place
    ]  # fmt: skip


def main(folders: list[str]) -> int:
    files = [file for folder in folders for file in sorted(Path(folder).rglob("*")) if file.is_file()]
    differing = 0
    for file in files:
        text = file.read_text(errors="replace")
        strict, ours = sorted(strict_rows(text)), sorted(package_rows(read_text(str(file), text)))
        if strict != ours:
            differing += 1
            sys.stdout.write(f"{file}: {len(strict)} rows, and {len(ours)} by the package\n")
    sys.stdout.write(f"{len(files)} files, {differing} of them read otherwise\n")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
