"""What was read of one tool in a text, as tests compare it."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from imagebuild.bench import read_text


class Output(NamedTuple):
    items: tuple[Any, ...]
    unread: tuple[str, ...]
    """The first few lines that look like results and could not be read."""


def read_part(part: str, text: str) -> Output:
    """Items of one field of `Results`."""
    results = read_text("log", text)
    return Output(getattr(results, part), results.sources[0].examples)


def read_json(part: str, document: object) -> Output:
    return read_part(part, json.dumps(document))


def facts(items: tuple[Any, ...], *names: str) -> list[Any]:
    """These fields of each item: tuples, or the values themselves if it is one field."""
    rows = [tuple(getattr(item, name) for name in names) for item in items]
    return [row[0] for row in rows] if len(names) == 1 else rows
