"""Logs and JSON documents that went wrong in many ways, the same on each run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

_ODD = (
    "", "-", "|", "0", "99999999999999999999999999", "-1", "1e999", "nan", "N/A",
    "\N{ARABIC-INDIC DIGIT THREE}", "\x00",
    "x" * 5000, "9" * 5000, "Waived:", "Running a_b.", "Final:", "#bytes #iterations", "-" * 27, "0 1 2", "Error: no",
    "{", "}", "\n\n",
)  # fmt: skip
_VALUES: tuple[Any, ...] = (None, True, 0, -1, 10**30, float("nan"), "", "x", [], {}, [[]], [None], {"name": 1})


def broken(text: str, count: int, seed: int = 0) -> Iterator[str]:
    """The text cut, and with words and lines lost, doubled, swapped or replaced."""
    chance = random.Random(seed)
    for at in range(0, len(text), max(1, len(text) // 20)):
        yield text[at:]
    for _ in range(count):
        rows = text.split("\n")
        for _ in range(chance.randint(1, 8)):
            at, other = chance.randrange(len(rows)), chance.randrange(len(rows))
            words = rows[at].split(" ")
            words[chance.randrange(len(words))] = chance.choice(_ODD)
            ways = (
                rows[at][: chance.randint(0, len(rows[at]))],
                rows[at] + rows[other],
                rows[other],
                " ".join(words),
                chance.choice(_ODD),
            )
            rows[at] = chance.choice(ways)
        yield "\n".join(rows)


def spoiled(node: Any, chance: random.Random) -> Any:
    """The document with parts replaced by values of other kinds, or gone."""
    if chance.random() < 0.08:
        return chance.choice(_VALUES)
    if isinstance(node, dict):
        return {key: spoiled(value, chance) for key, value in node.items() if chance.random() > 0.03}
    return [spoiled(value, chance) for value in node] if isinstance(node, list) else node
