"""JSON documents in a log: alone in a file, several in a row, between other output, or cut off."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from imagebuild.results.lines import Line

_DECODER = json.JSONDecoder(strict=False)
_TOKEN = re.compile(
    r'"(?:[^"\\]|\\.){0,1000000}"|[{}\[\]:,]|[+-]?(?i:infinity|inf|nan)\b|-?\d[\d.eE+-]{0,400}|true|false|null|\S',
    re.DOTALL,
)
_BARE_KEY = re.compile(r"[A-Za-z_]\w{0,60}(?=\s{0,8}:)")
"""As perftest writes one, whose documents are sound but for that."""
_NEXT = re.compile(r'\n\s{0,8}\{\s{0,40}"(?:version|nvbandwidth|identifier)"')
"""Where another document begins, so that this one ends before it."""
_BEFORE_VALUE = ("", "{", "[", ",", ":")
_KEYS = re.compile(r'"(?:results|benchmark|testcases|nvbandwidth|busBw|bus_bw|test_categories)"')
_ATTEMPTS = 200
"""Places of one stream where a document may begin but does not: text with more of them is no JSON."""
_COST = 50
"""As how many attempts counts one to mend a document, which reads all that follows."""
_NEAR = 100_000
"""Characters after its beginning in which a document that is worth mending has a key that we know."""


@dataclass(frozen=True)
class Document:
    """A JSON document, with as much of it as there is."""

    value: object
    whole: bool
    """Whether it has its end; else what is open was closed after the last value that is there."""
    number: int
    """The line of the log where it begins."""


def extract(said: Sequence[Line]) -> tuple[list[Document], list[Line]]:
    """The documents in lines of one process, and the lines that are in none."""
    lines = list(said)
    if not any(line.text.lstrip().startswith(("{", "[")) for line in lines):
        return [], lines
    text = "\n".join(line.text for line in lines)
    starts = []
    at = 0
    for line in lines:
        starts.append(at)
        at += len(line.text) + 1
    documents: list[Document] = []
    rest: list[Line] = []
    attempts = index = 0
    while index < len(lines):
        found = None
        if attempts < _ATTEMPTS and (begin := _begin(lines[index].text)) is not None:
            place, number = starts[index] + begin, lines[index].number
            found = _decoded(text, place, number)
            attempts += found is None
            if found is None and _KEYS.search(text, place, place + _NEAR):
                found = _mended(text, place, number)
                attempts += _COST if found is None else 0
        if found is None:
            rest.append(lines[index])
            index += 1
            continue
        document, end = found
        documents.append(document)
        while index < len(lines) and starts[index] < end:
            index += 1
        tail = text[end : starts[index] - 1 if index < len(lines) else len(text)]
        if tail.strip():
            # Another document, or the beginning of other output, on the line where this one ends.
            index -= 1
            lines[index] = lines[index]._replace(text=tail)
            starts[index] = end
    return documents, rest


def _begin(text: str) -> int | None:
    stripped = text.lstrip()
    if stripped.startswith("{") or (stripped.startswith("[") and stripped[1:].lstrip()[:1] in ("{", "")):
        return len(text) - len(stripped)
    return None


def _decoded(text: str, begin: int, number: int) -> tuple[Document, int] | None:
    """The document that begins here, and where it ends; None if it is no sound JSON."""
    try:
        value, end = _DECODER.raw_decode(text, begin)
    except (ValueError, RecursionError):
        return None
    return Document(value, whole=True, number=number), end


def _mended(text: str, begin: int, number: int) -> tuple[Document, int] | None:
    """The same for a document with mistakes; None if nothing can be made of it."""
    following = _NEXT.search(text, begin + 1)
    text = text[: following.start()] if following else text
    repaired, end, whole = _repaired(text, begin, bare_keys=True)
    if not whole:
        repaired, end, whole = _repaired(text, begin)
    try:
        value = json.loads(repaired, strict=False)
    except (ValueError, RecursionError):
        return None
    return (Document(value, whole=whole, number=number), end) if value else None


def _repaired(text: str, begin: int, *, bare_keys: bool = False) -> tuple[str, int, bool]:
    """As much of a document as is sound, with what is open closed; where that ends; and whether it was whole.

    What follows the last sound value is left to others, unless the text ends there.
    Numbers that JSON does not have, `inf` and `nan`, get the names by which Python reads them, and `bare_keys` quotes.
    """
    stack: list[str] = []
    pieces: list[str] = []
    sound, end = 0, begin
    before = ""
    at = begin
    while found := _TOKEN.search(text, at):
        word = _named(found[0])
        if before not in _BEFORE_VALUE and word not in (",", ":", "}", "]"):
            # Something begins where a comma should be: other output.
            break
        if bare_keys and before in ("{", ",") and (key := _BARE_KEY.match(text, found.start())):
            found, word = key, f'"{key[0]}"'
        at = found.end()
        pieces.append(word)
        if word in ("{", "["):
            stack.append("}" if word == "{" else "]")
        elif word in ("}", "]"):
            if not stack or stack[-1] != word:
                break
            stack.pop()
            if not stack:
                return "".join(pieces), found.end(), True
        elif word not in (":", ",") and (not _is_value(word) or found.end() == len(text)):
            # A number at the very end may lack digits.
            end = len(text) if found.end() == len(text) else end
            break
        is_key = bool(stack) and stack[-1] == "}" and before != ":" and word[0] == '"'
        if word not in (":", ",") and not is_key:
            sound, end = len(pieces), found.end()
        before = word
    else:
        end = len(text)
    return "".join((*pieces[:sound], *reversed(stack))), end, False


def _named(word: str) -> str:
    bare = word.lower().lstrip("+-")
    if bare == "nan":
        return "NaN"
    return f"{'-' if word[0] == '-' else ''}Infinity" if bare.startswith("inf") else word


def _is_value(word: str) -> bool:
    if word[0] == '"':
        return len(word) > 1 and word[-1] == '"'
    return word[0].isdigit() or len(word) > 1
