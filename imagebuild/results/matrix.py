"""Matrices between devices, as nvbandwidth and p2pBandwidthLatencyTest print them: column numbers, then rows."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from imagebuild.results.tokens import decimals, integer, is_value, number, shown

_LABEL = re.compile(r"\d{1,6}(?:\s*->\s*\d{1,6})?", re.ASCII)
_LARGEST = 4096
"""Columns: more than any machine has, so that a stray line of numbers is no header."""

Cells = tuple[tuple[float | None, ...], ...]


def columns(words: list[str]) -> int | None:
    """The number of columns that a header row names, which counts from 0; `None` if it is no header row."""
    if not words or len(words) > _LARGEST or any(integer(word) != at for at, word in enumerate(words)):
        return None
    return len(words)


@dataclass
class Matrix:
    """Rows of one matrix while they are read."""

    columns: int | None = None
    """`None` until the header row, or a first row without one, was read."""
    rows: list[tuple[float | None, ...]] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    """Lines that begin as a row does and are none: cut, or broken by other output."""
    short: bool = False
    """The last cell that was read has fewer digits than the others of its row, as one has that was cut."""

    def header(self, words: list[str]) -> bool:
        """Whether this is the header row; it is kept then."""
        if self.columns is None and (count := columns(words)):
            self.columns = count
            return True
        return False

    def take(self, line: str) -> bool:
        """Whether this line is a row, kept then, or is what was left of one and is noted as unread.

        Rows come in order. A row that is cut has the next number, and one after a gap has all its columns; with
        neither, the line is another program's.
        """
        words = line.split()
        if len(words) < 2 or integer(words[0].split("->")[0]) is None:
            return False
        count = self.columns if self.columns is not None else len(words) - 1
        label, values = " ".join(words[:-count]), words[-count:]
        next_one = int(words[0].split("->")[0]) == len(self.rows)
        as_long = bool(_LABEL.fullmatch(label)) and all(map(is_value, values))
        if next_one and as_long:
            self.columns = count
            self.rows.append(tuple(number(word) for word in values))
            self.short = number(values[-1]) is not None and decimals(values[-1]) < max(map(decimals, values))
            return True
        if as_long or (next_one and any(map(is_value, words[1:]))):
            self.unread.append(shown(line))
            return True
        return False

    def cells(self) -> Cells | None:
        """What was read; `None` without a row."""
        return tuple(self.rows) or None
