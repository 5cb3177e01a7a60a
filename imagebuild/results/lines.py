"""Lines of a log, whatever wrote and copied it: decoded, without launcher prefixes and without debug output.

A log is read in pieces, because one with NCCL_DEBUG=INFO may be much larger than the table in it. Nothing here raises
for what a file holds; `OSError` comes from the file itself.
"""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

from imagebuild.results import prefixes

_PIECE = 1 << 20
_LONGEST = 64 << 20
"""A line longer than this is cut, so that a file without line ends cannot fill the memory."""
_HEAD = 4096
_WARNINGS = 20
_HEADS = 20000
_BOMS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))

_ESCAPES = re.compile(r"\x1b(?:\[[0-9;:?]{0,40}[ -/]{0,4}[@-~]|\][^\x07\x1b]{0,300}(?:\x07|\x1b\\)|[@-Z\\-_])")
_DEBUG = re.compile(
    rb"(?: NCCL (INFO|WARN|TRACE|CALL|ABORT)(?: |\r?\Z)| UCX  (DEBUG|TRACE|INFO|REQ|DATA|ASYNC|FUNC|POLL) )"
)
_NCCL_HEAD = re.compile(
    rb"(?:\[[\d :.,TZ/+-]{8,40}\] ?)?(?P<host>[\w.-]{1,255}):\d{1,10}:\d{1,10}"
    rb"(?: \[-?\d{1,4}\])?(?: [^\s\[]{1,200}){0,3}\Z"
)
_UCX_HEAD = re.compile(rb"\[\d{1,12}\.\d{1,9}\] \[[^\]\s]{1,300}\]\s{1,12}[^\s:]{1,100}:\d{1,6}\s{0,8}\Z")
_WINDOW = 700
"""Bytes before ` NCCL INFO ` in which the head of such a line is looked for."""
_STAMPS = re.compile(
    rb"(?:[ \t]{0,8}(?:\[pod/[^\]\s]{1,300}\]|\[?\d{4}-\d\d-\d\d[T ][\d:.,]{8,20}[Z\d:+-]{0,6}\]?)[ \t]{1,4}){1,3}"
)
"""What differs from line to line before the same process: what follows it is looked up."""
_TAG = re.compile(rb"[ \t]*\[[^\]\s]{1,300}\]<std\w{2,4}>: ?\Z")
_GLUED = re.compile(rb"-?\d[\d.]*(?:e[+-]\d\d)?(?=[A-Za-z])|-(?=[A-Za-z])")


class Line(NamedTuple):
    """A line that may matter."""

    text: str
    """Without prefixes and line end; blanks are kept, since they tell where a broken row goes on."""
    stream: str
    """The process that wrote it, as its prefix names it; empty if nothing says it."""
    number: int
    """In the file, from 1."""


@dataclass
class Lines:
    """A log without what cannot matter."""

    path: str
    items: list[Line] = field(default_factory=list)
    count: int = 0
    """Lines in the file, those left out too."""
    noise: int = 0
    """Lines of NCCL's and UCX's debug output that were left out."""
    warnings: list[Line] = field(default_factory=list)
    """The first lines left out that NCCL wrote as warnings: evidence where a run failed, never part of a table."""
    head: str = ""
    """How the text begins, up to some thousand characters."""

    def texts(self) -> list[str]:
        return [item.text for item in self.items]


def read(path: Path | str) -> Lines:
    """Read a file. Raises OSError."""
    with Path(path).open("rb") as file:
        return _read(str(path), _pieces(file))


def from_text(name: str, text: str) -> Lines:
    """Read what is in memory already."""
    return _read(name, _pieces(io.BytesIO(text.encode(errors="surrogatepass"))))


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    """The file in UTF-8 or whatever it has."""
    first = file.read(_PIECE)
    mark, encoding = next((bom for bom in _BOMS if first.startswith(bom[0])), (b"", "utf-8"))
    first = first[len(mark) :]
    if encoding == "utf-8":
        yield first
        while piece := file.read(_PIECE):
            yield piece
        return
    decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
    yield decoder.decode(first).encode(errors="replace")
    while piece := file.read(_PIECE):
        yield decoder.decode(piece).encode(errors="replace")


def _split(pieces: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Whole lines, a piece's at a time."""
    open_line: list[bytes] = []
    size = 0
    for piece in pieces:
        rows = piece.split(b"\n")
        if len(rows) == 1 and size < _LONGEST:
            open_line.append(piece)
            size += len(piece)
            continue
        rows[0] = b"".join((*open_line, rows[0]))
        last = rows.pop()
        open_line, size = [last], len(last)
        yield rows
    if size:
        yield [b"".join(open_line)]


def _read(path: str, pieces: Iterable[bytes]) -> Lines:
    lines = Lines(path)
    head: list[str] = []
    heads: set[bytes] = set()
    hosts: set[bytes] = set()
    number = 0
    for rows in _split(pieces):
        for row in rows:
            number += 1
            # The search for ` NCCL INFO ` alone takes a tenth of the time of a regular expression.
            if (at := row.find(b" NCCL INFO ")) > 0 and (
                row[:at] in heads or ((stamps := _STAMPS.match(row)) and row[stamps.end() : at] in heads)
            ):
                lines.noise += 1
                continue
            if b" NCCL " in row or b" UCX  " in row:
                rest = _before_debug(row, heads, hosts)
                if rest is not row:
                    lines.noise += 1
                    if b" NCCL WARN " in row and len(lines.warnings) < _WARNINGS:
                        lines.warnings.extend(_lines(row[:2000], number))
                    if not rest:
                        continue
                row = rest  # noqa: PLW2901
            for line in _lines(row, number):
                lines.items.append(line)
                if len(head) < _HEAD:
                    head.append(line.text[:_HEAD])
    lines.count = number
    lines.head = "\n".join(head)[:_HEAD]
    return lines


def _before_debug(row: bytes, heads: set[bytes], hosts: set[bytes]) -> bytes:
    """What stands in a line before a debug message: empty for most, a piece of a row if the message broke into one.

    The line itself is returned if it holds no debug message.
    """
    debug = _DEBUG.search(row)
    if not debug:
        return row
    start = max(0, debug.start() - _WINDOW)
    window = row[start : debug.start()]
    found = (_NCCL_HEAD if debug[1] else _UCX_HEAD).search(window)
    if not found or b'"' in row[: start + found.start()]:
        return row
    before = row[: start + found.start()]
    if debug[1]:
        host = found["host"]
        part = _part_of_row(before, host, hosts) if _unprefixed(before) else b""
        before += part
        if not part and len(hosts) < _HEADS:
            hosts.add(host)
    before = _TAG.sub(b"", before)
    if not _unprefixed(before).strip():
        if debug[1] == b"INFO":
            if len(heads) >= _HEADS:
                heads.clear()
            stamps = _STAMPS.match(row)
            heads.add(row[stamps.end() if stamps else 0 : debug.start()])
        return b""
    return before


def _unprefixed(before: bytes) -> str:
    return prefixes.split(before.decode(errors="replace"))[1] if before else ""


def _part_of_row(before: bytes, host: bytes, hosts: set[bytes]) -> bytes:
    """What of `host` is the end of the row that the message broke into, as in `0.00      0node1:123:123 [0] NCCL`."""
    if host in hosts:
        return b""
    for at in range(1, len(host)):
        if host[at:] in hosts:
            return host[:at]
    if before.endswith(b"N/") and host[:1] == b"A":
        return b"A"
    if before[-1:].strip():
        return b""
    found = _GLUED.match(host)
    return found[0] if found else b""


def _logged(text: str) -> str:
    """A line that Docker's json-file driver wrapped."""
    try:
        wrapped = json.loads(text)["log"]
    except (ValueError, LookupError, RecursionError):
        return text
    return wrapped.rstrip("\r\n") if isinstance(wrapped, str) else text


def _lines(row: bytes, number: int) -> Iterator[Line]:
    text = row.decode(errors="replace")
    if text.startswith('{"log":"'):
        text = _logged(text)
    if "\x1b" in text:
        text = _ESCAPES.sub("", text)
    if "\0" in text:
        text = text.replace("\0", "")
    if "\r" in text:
        text = text.rstrip("\r")
    for part in text.split("\r") if "\r" in text else (text,):
        stream, rest = prefixes.split(part)
        if rest.startswith("```"):
            continue
        yield Line(rest.rstrip("\n"), stream, number)
