"""Logs and JSON documents that went wrong in every way we can think of, the same on each run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

_ODD = (
    "", " ", "\t", "-", "|", "0", "99999999999999999999999999", "-1", "1e999", "nan", "-nan", "N/A", "\N{ARABIC-INDIC DIGIT THREE}", "½",
    "\x00", "\ufffd", "ﬁ", "%", "[", "->", "x" * 5000, "9" * 5000, "Waived:", "Running a_b.", "Final:", "SUM a_b 1", "#bytes #iterations",
    "---------------------------", "+---+---+", "| | |", "D\\D 0 1", "GPU 0", "0 1 2", "Error: no", "{", "}", "\n", "\n\n",
)  # fmt: skip


def broken(text: str, count: int = 300, seed: int = 0) -> Iterator[str]:
    """The text cut, and with words and lines lost, doubled, swapped or replaced."""
    chance = random.Random(seed)
    for at in range(0, len(text), max(1, len(text) // 60)):
        yield text[:at]
        yield text[at:]
    for _ in range(count):
        rows = text.split("\n")
        for _ in range(chance.randint(1, 8)):
            at = chance.randrange(len(rows))
            words = rows[at].split(" ")
            match chance.randrange(6):
                case 0:
                    rows[at] = rows[at][: chance.randint(0, len(rows[at]))]
                case 1:
                    rows.insert(at, rows[chance.randrange(len(rows))])
                case 2:
                    rows[at] = rows[at] + rows[chance.randrange(len(rows))]
                case 3:
                    rows[at], rows[-1] = rows[-1], rows[at]
                case 4:
                    words[chance.randrange(len(words))] = chance.choice(_ODD)
                    rows[at] = " ".join(words)
                case _:
                    rows[at] = chance.choice(_ODD)
        yield "\n".join(rows)


_VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 10**30, 1.5, float("nan"), float("inf"), "", "x", "N/A", [], {}, [[]], [None], {"name": 1}, [{"x": []}],
)  # fmt: skip


def spoiled(document: Any, count: int = 400, seed: int = 0) -> Iterator[Any]:
    """The document with parts replaced by values of other kinds, or gone."""
    chance = random.Random(seed)
    yield from _VALUES
    for _ in range(count):
        yield _spoil(document, chance)


def _spoil(node: Any, chance: random.Random) -> Any:
    if chance.random() < 0.08:
        return chance.choice(_VALUES)
    if isinstance(node, dict):
        return {key: _spoil(value, chance) for key, value in node.items() if chance.random() > 0.03}
    if isinstance(node, list):
        return [_spoil(value, chance) for value in node]
    return node
