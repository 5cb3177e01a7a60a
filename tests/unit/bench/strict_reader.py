"""A reader of nccl-tests that shares nothing with the package: regular expressions over whole lines of tables since 2.0.

`python -m tests.unit.bench.strict_reader PROFILE:FOLDER…` compares it with the package on every file of folders of
logs, and says how many of the runs get a verdict on their speed by the profile of their hardware.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

from imagebuild.bench import Profile, Results, judge_results, read_text
from tests.unit.bench.speed_fakes import shipped

Row = tuple[int | str | float | None, ...]
_NUMBER = r"\s+(\d+(?:\.\d+)?(?:e[+-]\d+)?)"
_ROW = re.compile(
    rf"^(?:\s*\d+:)?\s*(\d+)\s+\d+\s+([a-z]\w+)(?:\s+[a-z]+)?(?:\s+-?\d+)??{_NUMBER * 3}\s+(?:\d\S*|N/A){_NUMBER * 3}\s+(?:\d\S*|N/A)\s*$",
    re.MULTILINE,
)


def strict_rows(text: str) -> list[Row]:
    """Size, type, and time, algbw, busbw of both halves of each row."""
    # Open MPI tags each piece of a row.
    found = [match.groups() for match in _ROW.finditer(re.sub(r"\[1,0\]<stdout>: ?", " ", text))]
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


def verdicts(results: Results, profile: Profile) -> Counter[str]:
    """Counts of runs, of whole ones with several ranks and right data that name their GPU, and of their verdicts."""
    whole = [run for run in results.runs if run.verdict == "ok" and (run.ranks or 0) > 1 and run.device]
    judged = judge_results(Results(runs=tuple(whole)), profile)
    return Counter({"runs": len(results.runs), "whole": len(whole)}) + Counter(j.speed.state for j in judged)


def main(arguments: list[str]) -> int:
    differing = 0
    for argument in arguments:
        name, _, folder = argument.partition(":")
        counts: Counter[str] = Counter()
        for file in sorted(file for file in Path(folder).rglob("*") if file.is_file()):
            text = file.read_text(errors="replace")
            results = read_text(str(file), text)
            counts += Counter(files=1) + verdicts(results, shipped(name))
            strict, ours = sorted(strict_rows(text)), sorted(package_rows(results))
            counts["rows"] += len(ours)
            if strict != ours:
                differing += 1
                sys.stdout.write(f"{file}: {len(strict)} rows, and {len(ours)} by the package\n")
        sys.stdout.write(f"{argument}: {', '.join(f'{count} {word}' for word, count in counts.items())}\n")
    sys.stdout.write(f"{differing} files are read otherwise\n")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
