"""Text from logs, made harmless to look at. Escaping for HTML, XML or Markdown is done where those are written."""

from __future__ import annotations

import re

COLOURS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
"""Sequences for terminals: they colour text, move the cursor, set titles."""

INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
"""Control characters, those that turn the direction of text round, and those that XML forbids."""


def visible(text: str) -> str:
    """The text with nothing in it that acts on what shows it; line ends are those of Unix."""
    text = COLOURS.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return INVISIBLE.sub("\ufffd", text)


def one_line(text: str, limit: int = 300) -> str:
    """For a cell of a table: no line ends, and not longer than `limit`."""
    text = " ".join(visible(text).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"
