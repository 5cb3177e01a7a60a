"""Matrices between devices, as nvbandwidth and p2pBandwidthLatencyTest print them: column numbers, then rows."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from imagebuild.results.tokens import integer, is_value, number, shown

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

    def header(self, words: list[str]) -> bool:
        """Whether this is the header row; it is kept then."""
        if self.columns is None and (count := columns(words)):
            self.columns = count
            return True
        return False

    def take(self, line: str) -> bool:
        """Whether this line is a row, kept then or noted as unread. Rows come in order, so a gap is noted as well."""
        words = line.split()
        if not words or integer(words[0].split("->")[0] or words[0]) is None:
            return False
        values = self._values(words)
        if values is None:
            if len(words) > 1 and not any(is_value(word) for word in words[1:]):
                return False
            self.unread.append(shown(line))
            return True
        self.columns = len(values)
        self.rows.append(tuple(number(word) for word in values))
        return True

    def _values(self, words: list[str]) -> list[str] | None:
        count = self.columns if self.columns is not None else len(words) - 1
        values = words[len(words) - count :] if 0 < count < len(words) else []
        label = " ".join(words[: len(words) - count])
        if not values or not _LABEL.fullmatch(label) or not all(is_value(word) for word in values):
            return None
        return values if int(label.split("->")[0]) == len(self.rows) else None

    def cells(self) -> Cells | None:
        """What was read; `None` without a row."""
        return tuple(self.rows) or None
