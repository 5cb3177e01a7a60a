"""Find the line of a log that says why a benchmark failed, with the help of `causes.yaml`. Pure but for that file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from imagebuild.bench.hang import PREFIX, answers, hung_in_log
from imagebuild.bench.logs import LogLine, excerpt
from imagebuild.core.patterns import data_of

LONGEST = 2000
"""Number of characters of a line that are searched."""


class Cause(NamedTuple):
    """A line that says why something failed. Causes sort by their place in `causes.yaml`, then by line. Hanging ranks
    come first."""

    place: int
    number: int
    text: str
    means: str

    def __str__(self) -> str:
        return f"line {self.number}: {self.text} ({self.means})"


@cache
def _known() -> tuple[Sequence[tuple[re.Pattern[str], str]], re.Pattern[str]]:
    rows: Sequence[Mapping[str, str]] = data_of(__file__)
    anything = re.compile("|".join(f"(?:{row['match']})" for row in rows))
    return [(re.compile(row["match"]), row["means"]) for row in rows], anything


def find_causes(lines: Iterable[LogLine]) -> list[Cause]:
    """Return the lines that say why something failed, the nearest to the root first."""
    known, anything = _known()
    listed = [*lines]
    stated = [line for line in listed if PREFIX in line.text]
    sentences = hung_in_log(answers(line.text for line in stated))
    causes = [Cause(-1, stated[0].number, text, "NCCL states this at its RAS socket") for text in sentences]
    for line in listed:
        text = line.text[:LONGEST]
        if anything.search(text):
            place, means = next((n, means) for n, (pattern, means) in enumerate(known) if pattern.search(text))
            causes.append(Cause(place, line.number, excerpt(text.rpartition(" NCCL WARN ")[2]), means))
    return sorted(causes)
