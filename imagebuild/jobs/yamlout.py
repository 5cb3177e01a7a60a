"""Objects to YAML with comments: keys in the order given, one way to write each thing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./@+-]*(?::[A-Za-z0-9_./@+-]+)*|[0-9]+(?:Ki|Mi|Gi|Ti)")
WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}
"""Some reader of YAML takes these for something else than text."""


@dataclass(frozen=True)
class Noted:
    """A value with lines of comment above it."""

    comment: str
    value: Node


Node: TypeAlias = "str | int | bool | Noted | Mapping[str, Node] | Sequence[Node]"


def dump(node: Node) -> str:
    """The YAML of a document, without a `---`."""
    return "".join(f"{line}\n" if line else "\n" for line in _lines(node, 0))


def _lines(node: Node, depth: int) -> Iterator[str]:
    pad = "  " * depth
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from _entry(f"{pad}{_scalar(key)}:", value, depth, pad)
    elif isinstance(node, Sequence) and not isinstance(node, str):
        for item in node:
            yield from _item(item, depth, pad)
    else:
        raise TypeError(f"a document is a mapping or a list, not {node!r}")


def _entry(head: str, value: Node, depth: int, pad: str) -> Iterator[str]:
    if isinstance(value, Noted):
        yield from (f"{pad}# {line}" for line in value.comment.splitlines())
        value = value.value
    if isinstance(value, str) and "\n" in value:
        yield f"{head} |{'' if value.endswith(chr(10)) else '-'}"
        yield from (f"{pad}  {line}" if line else "" for line in value.rstrip("\n").split("\n"))
    elif isinstance(value, str | int):
        yield f"{head} {_scalar(value)}"
    elif not value:
        yield f"{head} {'{}' if isinstance(value, Mapping) else '[]'}"
    else:
        yield head
        yield from _lines(value, depth + 1)


def _item(item: Node, depth: int, pad: str) -> Iterator[str]:
    if isinstance(item, Noted):
        yield from (f"{pad}# {line}" for line in item.comment.splitlines())
        item = item.value
    if isinstance(item, Mapping) and item:
        lines = list(_lines(item, depth + 1))
        first = next(i for i, line in enumerate(lines) if not line.lstrip().startswith("#"))
        yield from (line[2:] for line in lines[:first])
        yield f"{pad}- {lines[first].lstrip()}"
        yield from lines[first + 1 :]
    else:
        yield from _entry(f"{pad}-", item, depth, pad)


def _scalar(value: str | int) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if PLAIN.fullmatch(value) and value.lower() not in WORDS:
        return value
    return json.dumps(value, ensure_ascii=False)
