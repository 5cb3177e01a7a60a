"""Words of a table as numbers, without what `int` and `float` allow beyond what programs print."""

from __future__ import annotations

import math
import re

_INTEGER = re.compile(r"\d{1,18}", re.ASCII)
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,4})?", re.ASCII)
_NO_VALUE = frozenset(("n/a", "nan", "-nan", "+nan", "inf", "-inf", "+inf"))
_LONGEST = 64
_SHOWN = 200


def integer(word: str) -> int | None:
    """A count or size; `None` if the word is none."""
    return int(word) if _INTEGER.fullmatch(word) else None


def is_value(word: str) -> bool:
    """Whether a table can hold this word where it holds numbers: a number, or what is printed in place of one."""
    return len(word) <= _LONGEST and (_NUMBER.fullmatch(word) is not None or word.lower() in _NO_VALUE)


def number(word: str) -> float | None:
    """A finite number; `None` for everything else, so also for N/A and nan."""
    if len(word) > _LONGEST or not _NUMBER.fullmatch(word):
        return None
    value = float(word)
    return value if math.isfinite(value) else None


def decimals(word: str) -> int:
    """Digits after the point. Programs print a fixed number of them, so a word with fewer was cut."""
    return len(word.rpartition(".")[2]) if "." in word else 0


def json_number(value: object) -> float | None:
    """A finite number of a JSON document, where programs also write numbers as strings."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        return number(value.strip())
    if isinstance(value, int):
        return float(value) if abs(value) < 10**18 else None
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return None


def shown(line: str) -> str:
    """A line as a report shows it: without blanks around, cut to a readable length."""
    text = line[: 2 * _SHOWN].strip()
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
