"""One row of an nccl-tests table: recognised by its values, since columns differ by release, collective and option.

A row is `size count type [redop] [root]`, then one or two halves of `time algbw busbw wrong`, each with four more
columns under `-I`, then date and time under `-S`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

DTYPES = {
    "int8": 1, "uint8": 1, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8, "half": 2, "float": 4, "double": 8,
    "bfloat16": 2, "f8e4m3": 1, "f8e5m2": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "char": 1, "int": 4,
}  # fmt: skip
"""Bytes of an element."""
REDOPS = frozenset(("sum", "prod", "max", "min", "avg", "mulsum", "none"))

_LEAD = re.compile(r"(?<![^\s|#])\d{1,20}[ \t|]{1,40}\d{1,20}[ \t|]{1,40}(?P<dtype>[a-z]\w{2,11})(?![^\s|])")
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]\d\d+)?|-?nan|-?inf")
_WRONG = re.compile(r"N/A|\d+(?:\.\d+)?e[+-]\d\d+|\d+|-?nan")
_GLUED = re.compile(r"(?:N/A|\d+(?:\.\d+)?(?:e[+-]\d\d+)?)(?=[^\d.\se+-])")
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_CLOCK = re.compile(r"\d\d:\d\d:\d\d")
_CUT = re.compile(r"[a-z]\w{0,11}|N/?A?|-|\d+\.|\d[\d.]*e[+-]?")
"""What the last word can be if it is not whole."""


@dataclass(frozen=True)
class Cells:
    """The values of a row as they were printed."""

    size: int
    count: int
    dtype: str
    redop: str | None
    root: int | None
    halves: tuple[tuple[str, str, str, str], ...]
    """Time, algbw, busbw and wrong; one half where the row has or had no second one."""
    per_iteration: bool
    """Whether the columns of `-I` are there."""


def leads(text: str) -> list[int]:
    """Where in a line rows begin, as far as their first three columns tell."""
    return [
        found.start()
        for found in _LEAD.finditer(text)
        if found["dtype"] in DTYPES or complete(text[found.start() : found.start() + 1000])
    ]


def could_go_on(text: str) -> bool:
    """Whether the text is the beginning of a row and nothing else: what is left if it was cut there."""
    tokens = text.replace("|", " ").split(maxsplit=26)
    if not 0 < len(tokens) <= 25:
        return False
    *whole, last = tokens
    if any(not _fits(token, place) for place, token in enumerate(whole)):
        return False
    return _fits(last, len(whole)) or (len(whole) >= 2 and _CUT.fullmatch(last) is not None)


def resembles(text: str) -> bool:
    """Whether a line ends as a row does, though it does not begin like one."""
    words = text.replace("|", " ").split(maxsplit=26)
    while words and (_DATE.fullmatch(words[-1]) or _CLOCK.fullmatch(words[-1])):
        words.pop()
    return "." in "".join(words[-8:]) and any(
        len(words) >= width and bool(_halves(_values(words[-width:]))) for width in (8, 16)
    )


def _fits(token: str, place: int) -> bool:
    if place < 2:
        return token.isdecimal() and len(token) <= 20
    if place == 2:
        return token in DTYPES
    return _NUMBER.fullmatch(token) is not None or token in ("N/A", "-1") or (place == 3 and token in REDOPS)


def complete(text: str, *, per_iteration: bool | None = None) -> Cells | None:
    """The row that begins where the text does, or None if it lacks values. Other text may follow it."""
    cells = _cells(text)
    if cells is None or len(cells.halves) != 2 or cells.size < cells.count * DTYPES.get(cells.dtype, 0):
        # Fewer bytes than elements: the first digits of the size are elsewhere.
        return None
    return cells if cells.per_iteration or not per_iteration else None


def half(text: str) -> Cells | None:
    """The row, if it has one half only."""
    cells = _cells(text)
    return cells if cells and len(cells.halves) == 1 else None


def _cells(text: str) -> Cells | None:
    tokens = text.replace("|", " ").split(maxsplit=40)
    if len(tokens) < 7 or not (tokens[0].isdecimal() and tokens[1].isdecimal()):
        return None
    size, count, dtype, *rest = tokens
    redop = rest.pop(0) if rest[0] in REDOPS else None
    root: int | None = None
    values = _values(rest)
    # Four columns a half, so a value more than that is the root, which is an integer.
    if len(values) % 4 == 1 and re.fullmatch(r"-1|\d{1,7}", values[0]):
        root = int(values.pop(0))
    halves = _halves(values)
    if not halves or len(size) > 20 or len(count) > 20:
        return None
    return Cells(int(size), int(count), dtype, redop, root, halves, len(values) == 16)


def _values(tokens: Sequence[str]) -> list[str]:
    """The numbers of a row: the date and what other output follows are left out."""
    values: list[str] = []
    for token in tokens:
        if _NUMBER.fullmatch(token) or token in ("N/A", "-1"):
            values.append(token)
            continue
        if not _DATE.fullmatch(token) and not _CLOCK.fullmatch(token) and (glued := _GLUED.match(token)):
            values.append(glued[0])
        break
    return values


def _halves(values: Sequence[str]) -> tuple[tuple[str, str, str, str], ...]:
    step = {4: 4, 8: 4, 16: 8}.get(len(values))
    if step is None:
        return ()
    halves = tuple((values[i], values[i + 1], values[i + 2], values[i + 3]) for i in range(0, len(values), step))
    plausible = all(_WRONG.fullmatch(part[3]) and "N/A" not in part[:3] and "-1" not in part[:3] for part in halves)
    return halves if plausible else ()


def consistent(cells: Cells) -> bool:
    """Whether bandwidth is size by time, in µs or ms, as far as the digits printed tell."""
    for time, algbw, _, _ in cells.halves:
        taken, rate = number(time), number(algbw)
        if not taken or rate is None:
            return False
        expected = cells.size / taken / 1e3
        if not any(abs(rate - value) <= 0.02 * value + 0.011 for value in (expected, expected / 1e3)):
            return False
    return True


def joined(first: str, second: str, per_iteration: bool | None = None) -> tuple[str, Cells | None]:
    """Two pieces of a row as one text, and the row if that completes it.

    A row may be cut anywhere, and those who copy logs strip blanks at the ends of lines, so a number may be in both
    pieces or end with the first: what agrees with itself is taken.
    """
    texts = (first + second, f"{first} {second}")
    rows = [(text, cells) for text in texts if (cells := complete(text, per_iteration=per_iteration))]
    for text, cells in rows:
        if consistent(cells):
            return text, cells
    return rows[0] if rows else (texts[0], None)


def continued(first: str, second: str) -> Cells | None:
    """The row, if the second text, which looks like the beginning of one, is the rest of the first.

    A size that was cut leaves its last digits on the next line: count, bandwidth and time show whose they are.
    """
    cells, alone = complete(first + second), complete(second)
    return cells if cells and _soundness(cells) > (_soundness(alone) if alone else -1) else None


def _soundness(cells: Cells) -> int:
    data = cells.count * DTYPES.get(cells.dtype, 0)
    return 2 * (data > 0 and cells.size % data == 0) + consistent(cells)


def number(text: str) -> float | None:
    """A number as printed; None for `N/A`, nan and infinity."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) < float("inf") else None
