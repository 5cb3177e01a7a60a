"""Split a log into lines of single processes and JSON documents, and read the numbers in them.

A log may come from any launcher, terminal or copy: prefixes, colours and debug output of NCCL and UCX are removed here,
so that parsers see what their program printed.
"""

from __future__ import annotations

import codecs
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple


class LogLine(NamedTuple):
    """A line that may hold a result."""

    text: str
    """Without prefixes and line end. Blanks are kept: they tell where a broken row goes on."""
    process: str
    """The process that wrote the line, as its prefix names it; empty if it has no such prefix."""
    number: int
    """Line number in the file, from 1."""


@dataclass
class Log:
    """A log without the lines that cannot hold results."""

    path: str
    lines: list[LogLine] = field(default_factory=list)
    line_count: int = 0
    """Number of lines in the file, including those left out."""
    debug_lines: int = 0
    """Number of lines of debug output of NCCL and UCX that were left out."""
    warnings: list[LogLine] = field(default_factory=list)
    """The first of the left-out lines that are warnings of NCCL: they may explain why a run failed."""


@dataclass(frozen=True)
class JsonDocument:
    """A JSON document, or as much of one as there is."""

    value: object
    is_whole: bool
    """False if the end is missing: what was open was closed after the last whole value."""
    number: int
    """The line of the log where it begins."""


# Reading a file: encodings, line ends, colours, debug output.

_PIECE = 1 << 20
_LONGEST_LINE = 64 << 20
"""A longer line is cut here, so that a file without line ends does not fill the memory."""
_MOST_WARNINGS = 20
_MOST_HEADS = 20_000
"""Heads of debug messages, and hosts, that are remembered."""
_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)

_ESCAPES = re.compile(r"\x1b(?:\[[0-9;:?]{0,40}[ -/]{0,4}[@-~]|\][^\x07\x1b]{0,300}(?:\x07|\x1b\\)|[@-Z\\-_])")
_DEBUG = re.compile(
    rb"(?: NCCL (INFO|WARN|TRACE|CALL|ABORT)(?: |\r?\Z)| UCX  (DEBUG|TRACE|INFO|REQ|DATA|ASYNC|FUNC|POLL) )"
)
_NCCL_HEAD = re.compile(
    rb"(?:\[[\d :.,TZ/+-]{8,40}\] ?)?(?P<host>[\w.-]{1,255}):\d{1,10}:\d{1,10}"
    rb"(?: \[-?\d{1,4}\])?(?: [^\s\[]{1,200}){0,3}\Z"
)
"""`node1:123:456 [0]`, which stands before ` NCCL INFO `."""
_UCX_HEAD = re.compile(rb"\[\d{1,12}\.\d{1,9}\] \[[^\]\s]{1,300}\]\s{1,12}[^\s:]{1,100}:\d{1,6}\s{0,8}\Z")
_HEAD_WINDOW = 700
"""Bytes before ` NCCL INFO ` in which its head is searched."""
_STAMPS = re.compile(
    rb"(?:[ \t]{0,8}(?:\[pod/[^\]\s]{1,300}\]|\[?\d{4}-\d\d-\d\d[T ][\d:.,]{8,20}[Z\d:+-]{0,6}\]?)[ \t]{1,4}){1,3}"
)
"""Prefixes that differ from line to line of one process."""
_OUTPUT_TAG = re.compile(rb"[ \t]*\[[^\]\s]{1,300}\]<std\w{2,4}>: ?\Z")
_GLUED_NUMBER = re.compile(rb"-?\d[\d.]*(?:e[+-]\d\d)?(?=[A-Za-z])|-(?=[A-Za-z])")


def read_log(path: Path | str) -> Log:
    """Read a file. Raises OSError."""
    with Path(path).open("rb") as file:
        return _read(str(path), _utf8_pieces(file))


def log_from_text(name: str, text: str) -> Log:
    """Read a text that is in memory."""
    return _read(name, _utf8_pieces(io.BytesIO(text.encode(errors="surrogatepass"))))


def _utf8_pieces(file: BinaryIO) -> Iterator[bytes]:
    """Yield the file in pieces, as UTF-8 if its byte order mark says that it is UTF-16, else as it is."""
    first = file.read(_PIECE)
    mark, encoding = next((known for known in _BYTE_ORDER_MARKS if first.startswith(known[0])), (b"", "utf-8"))
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


def _whole_lines(pieces: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Yield the lines that end in each piece."""
    unfinished: list[bytes] = []
    size = 0
    for piece in pieces:
        *lines, rest = piece.split(b"\n")
        if lines:
            lines[0] = b"".join((*unfinished, lines[0]))
            yield lines
            unfinished, size = [], 0
        unfinished.append(rest)
        size += len(rest)
        if size >= _LONGEST_LINE:
            yield [b"".join(unfinished)]
            unfinished, size = [], 0
    if size:
        yield [b"".join(unfinished)]


def _read(path: str, pieces: Iterable[bytes]) -> Log:
    log = Log(path)
    debug = _DebugOutput()
    heads = debug.heads
    number = 0
    for rows in _whole_lines(pieces):
        for row in rows:
            number += 1
            # The search for ` NCCL INFO ` alone takes a tenth of the time of a regular expression.
            if (at := row.find(b" NCCL INFO ")) > 0 and (
                row[:at] in heads or ((stamps := _STAMPS.match(row)) and row[stamps.end() : at] in heads)
            ):
                log.debug_lines += 1
                continue
            rest = row
            if b" NCCL " in row or b" UCX  " in row:
                rest = debug.remove(row)
                if rest is not row:
                    log.debug_lines += 1
                    if b" NCCL WARN " in row and len(log.warnings) < _MOST_WARNINGS:
                        log.warnings.extend(_clean(row[:2000], number))
                    if not rest:
                        continue
            log.lines.extend(_clean(rest, number))
    log.line_count = number
    return log


@dataclass
class _DebugOutput:
    """Remove debug messages of NCCL and UCX from lines, also where one broke into a row of a table."""

    heads: set[bytes] = field(default_factory=set)
    """What stood before ` NCCL INFO ` in lines of debug output, without time stamps. Such lines need no closer look."""
    hosts: set[bytes] = field(default_factory=set)

    def remove(self, row: bytes) -> bytes:
        """Return what stands before the debug message: empty for most lines, a piece of a row if the message broke
        into one. Return `row` itself if it holds no debug message.
        """
        message = _DEBUG.search(row)
        if not message:
            return row
        window_start = max(0, message.start() - _HEAD_WINDOW)
        head = (_NCCL_HEAD if message[1] else _UCX_HEAD).search(row[window_start : message.start()])
        if not head or b'"' in row[: window_start + head.start()]:
            return row
        before = row[: window_start + head.start()]
        if message[1]:
            glued = self.row_end(before, head["host"]) if _without_prefix(before) else b""
            before += glued
            if not glued and len(self.hosts) < _MOST_HEADS:
                self.hosts.add(head["host"])
        before = _OUTPUT_TAG.sub(b"", before)
        if _without_prefix(before).strip():
            return before
        if message[1] == b"INFO":
            if len(self.heads) >= _MOST_HEADS:
                self.heads.clear()
            stamps = _STAMPS.match(row)
            self.heads.add(row[stamps.end() if stamps else 0 : message.start()])
        return b""

    def row_end(self, before: bytes, host: bytes) -> bytes:
        """Return the part of `host` that belongs to the row before it: `0` in `0.00      0node1:123:123 [0] NCCL`."""
        if host in self.hosts:
            return b""
        for at in range(1, len(host)):
            if host[at:] in self.hosts:
                return host[:at]
        if before.endswith(b"N/") and host[:1] == b"A":
            return b"A"
        if before[-1:].strip():
            return b""
        glued = _GLUED_NUMBER.match(host)
        return glued[0] if glued else b""


def _without_prefix(text: bytes) -> str:
    return split_prefix(text.decode(errors="replace"))[1] if text else ""


def _clean(row: bytes, number: int) -> Iterator[LogLine]:
    """Yield a line without colours, NUL characters and prefixes; several lines if it has carriage returns.

    Markdown fences are left out.
    """
    text = row.decode(errors="replace")
    if text.startswith('{"log":"'):  # as Docker's json-file driver wraps a line
        try:
            wrapped = json.loads(text)["log"]
        except (ValueError, LookupError, RecursionError):
            wrapped = None
        if isinstance(wrapped, str):
            text = wrapped.rstrip("\r\n")
    if "\x1b" in text:
        text = _ESCAPES.sub("", text)
    if "\0" in text:
        text = text.replace("\0", "")
    if "\r" in text:
        text = text.rstrip("\r")
    for part in text.split("\r") if "\r" in text else (text,):
        process, rest = split_prefix(part)
        if not rest.startswith("```"):
            yield LogLine(rest.rstrip("\n"), process, number)


# Prefixes of launchers.

_STAMP = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?: ?(?:Z|UTC|[+-]\d\d:?\d\d))?"
_CTIME = r"[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4}"

_PREFIXES: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str]], ...] = (
    # Open MPI: `[1,0]<stdout>:`; PMIx writes a blank after it, may add `[host:pid]`, drop the job, and stamp the time.
    (
        re.compile(
            rf"[ \t]*(?:\[?{_CTIME}\]?)?(?:\[(?P<rank>[\w@.-]*,?\d+)\](?:\[[^\]\s]{{1,300}}\])?)?"
            r"<std(?:out|err|diag)>: ?"
        ),
        lambda prefix: (prefix["rank"] or "").rpartition("@")[2],
    ),
    # The same as XML.
    (
        re.compile(r'[ \t]*<std(?:out|err|diag)(?P<tags>(?: \w+="[^"<>]*"){1,4})>'),
        lambda prefix: ",".join(re.findall(r'(?:jobid|nspace|rank)="([^"]*)"', prefix["tags"])),
    ),
    # kubectl logs --prefix
    (re.compile(r"[ \t]*\[(?P<pod>pod/[^\]\s]{1,500})\] ?"), lambda prefix: prefix["pod"]),
    # kubectl and docker --timestamps, files of a container runtime, workflow logs
    (re.compile(rf"[ \t]*\[?{_STAMP}\]?(?:[ \t]+std(?:out|err) [FP])?(?:[ \t]|$)"), lambda _: ""),
    # srun --label
    (re.compile(r"[ \t]*(?P<task>\d{1,7}):(?: |$)"), lambda prefix: prefix["task"]),
    # Intel MPI and MPICH -prepend-rank, torchrun
    (re.compile(r"[ \t]*\[(?:rank|default)?(?P<rank>\d{1,7})\](?:: ?|[ \t]|$)"), lambda prefix: prefix["rank"]),
    # Markdown quotations
    (re.compile(r"[ \t]{0,3}>(?=[ \t#]|$) ?"), lambda _: ""),
)
"""Pattern of a prefix, and the name of the process that it gives."""

_HOST = re.compile(
    r"(?P<host>[A-Za-z][\w.-]{0,200}): (?=[ \t]*(?:#|\d+[ \t]+\d+[ \t]+[a-z]|nThread |Out of bounds |Avg bus ))"
)
"""pdsh and clush. Messages of nccl-tests begin with `host: ` too, so only in front of what is no such message."""

_FIRST_CHARACTERS = frozenset(" \t[<>0123456789") | frozenset("MTWFS")
"""All that a prefix can begin with; most lines need no closer look."""
_MOST_PREFIXES = 4


def split_prefix(text: str) -> tuple[str, str]:
    """Split a line into the name of the process that wrote it (empty if nothing says it) and the line itself."""
    names: list[str] = []
    for _ in range(_MOST_PREFIXES):
        if not text or text[0] not in _FIRST_CHARACTERS:
            break
        for pattern, name_of in _PREFIXES:
            if prefix := pattern.match(text):
                names.append(name_of(prefix))
                text = text[prefix.end() :]
                break
        else:
            break
    if prefix := _HOST.match(text):
        names.append(prefix["host"])
        text = text[prefix.end() :]
    return " ".join(name for name in names if name), text


# JSON documents between lines, also those with mistakes or without an end.

_DECODER = json.JSONDecoder(strict=False)
_TOKEN = re.compile(
    r'"(?:[^"\\]|\\.){0,1000000}"|[{}\[\]:,]|[+-]?(?i:infinity|inf|nan)\b|-?\d[\d.eE+-]{0,400}|true|false|null|\S',
    re.DOTALL,
)
_BARE_KEY = re.compile(r"[A-Za-z_]\w{0,60}(?=\s{0,8}:)")
"""A key without quotes, as perftest writes one in documents that are sound otherwise."""
_BEFORE_DOCUMENT = re.compile(r"\s*(?=\{|\[\s*(?:\{|\Z))")
"""Blanks before the bracket of a document, which is an object or a list of objects."""
_NEXT_DOCUMENT = re.compile(r'\n\s{0,8}\{\s{0,40}"(?:version|nvbandwidth|identifier)"')
_PYTHON_NUMBERS = {
    "nan": "NaN", "-nan": "NaN",
    "inf": "Infinity", "infinity": "Infinity", "-inf": "-Infinity", "-infinity": "-Infinity",
}  # fmt: skip
_BEFORE_VALUE = ("", "{", "[", ",", ":")
_KNOWN_KEYS = re.compile(r'"(?:results|benchmark|testcases|nvbandwidth|busBw|bus_bw|test_categories)"')
_KEYS_WITHIN = 100_000
"""Characters after its beginning in which a document that is worth mending has one of `_KNOWN_KEYS`."""
_MOST_ATTEMPTS = 200
"""Places of one process's output where a document may begin but does not: text with more of them is no JSON."""
_MENDING_COST = 50
"""Attempts that one failure to mend a document counts for, since it reads all that follows."""


def extract_json(lines: Sequence[LogLine]) -> tuple[list[JsonDocument], list[LogLine]]:
    """Return the JSON documents in the lines of one process, and the lines outside of them."""
    lines = list(lines)
    if not any(line.text.lstrip().startswith(("{", "[")) for line in lines):
        return [], lines
    text = "\n".join(line.text for line in lines)
    starts = []
    position = 0
    for line in lines:
        starts.append(position)
        position += len(line.text) + 1
    documents: list[JsonDocument] = []
    outside: list[LogLine] = []
    attempts = index = 0
    while index < len(lines):
        document = None
        end = 0
        line = lines[index]
        indent = _BEFORE_DOCUMENT.match(line.text)
        if indent and attempts < _MOST_ATTEMPTS:
            begin = starts[index] + indent.end()
            try:
                value, end = _DECODER.raw_decode(text, begin)
                document = JsonDocument(value, is_whole=True, number=line.number)
            except (ValueError, RecursionError):
                attempts += 1
                if _KNOWN_KEYS.search(text, begin, begin + _KEYS_WITHIN):
                    document, end = _mended(text, begin, line.number)
                    attempts += 0 if document else _MENDING_COST
        if document is None:
            outside.append(line)
            index += 1
            continue
        documents.append(document)
        while index < len(lines) and starts[index] < end:
            index += 1
        tail = text[end : starts[index] - 1 if index < len(lines) else len(text)]
        if tail.strip():
            # Another document, or other output, begins on the line where this document ends.
            index -= 1
            lines[index] = lines[index]._replace(text=tail)
            starts[index] = end
    return documents, outside


def _mended(text: str, begin: int, number: int) -> tuple[JsonDocument | None, int]:
    """Return a document that is cut or has mistakes, and where it ends; None if nothing can be made of it."""
    following = _NEXT_DOCUMENT.search(text, begin + 1)
    text = text[: following.start()] if following else text
    repaired, end, is_whole = _repaired(text, begin, bare_keys=True)
    if not is_whole:
        repaired, end, is_whole = _repaired(text, begin)
    try:
        value = json.loads(repaired, strict=False)
    except (ValueError, RecursionError):
        return None, 0
    return (JsonDocument(value, is_whole=is_whole, number=number), end) if value else (None, 0)


def _repaired(text: str, begin: int, *, bare_keys: bool = False) -> tuple[str, int, bool]:
    """Return the sound beginning of a document with what is open closed, where it ends, and whether it is whole.

    The text after the last sound value is other output, unless the text ends there. `inf` and `nan`, which JSON does
    not have, get the names by which Python reads them; `bare_keys` get quotes.
    """
    closing: list[str] = []
    pieces: list[str] = []
    sound, end = 0, begin
    previous = ""
    at = begin
    while token := _TOKEN.search(text, at):
        word = _PYTHON_NUMBERS.get(token[0].lower().lstrip("+"), token[0])
        if previous not in _BEFORE_VALUE and word not in (",", ":", "}", "]"):
            # Other output begins where a comma should be.
            break
        if bare_keys and previous in ("{", ",") and (key := _BARE_KEY.match(text, token.start())):
            token, word = key, f'"{key[0]}"'
        at = token.end()
        pieces.append(word)
        is_value = len(word) > 1 or word.isdigit()
        if word in ("{", "["):
            closing.append("}" if word == "{" else "]")
        elif word in ("}", "]"):
            if not closing or closing[-1] != word:
                break
            closing.pop()
            if not closing:
                return "".join(pieces), token.end(), True
        elif word not in (":", ",") and (not is_value or token.end() == len(text)):
            # A number at the very end may lack digits.
            end = len(text) if token.end() == len(text) else end
            break
        is_key = bool(closing) and closing[-1] == "}" and previous != ":" and word[0] == '"'
        if word not in (":", ",") and not is_key:
            sound, end = len(pieces), token.end()
        previous = word
    else:
        end = len(text)
    return "".join((*pieces[:sound], *reversed(closing))), end, False


# Words of tables, and values of JSON documents.

_INTEGER = re.compile(r"\d{1,18}", re.ASCII)
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,4})?", re.ASCII)
_NO_NUMBER = frozenset(("n/a", "nan", "-nan", "+nan", "inf", "-inf", "+inf"))
_LONGEST_NUMBER = 64
_LONGEST_EXCERPT = 200


def parse_integer(word: str) -> int | None:
    """Return the count or size that the word is; None for every other word."""
    return int(word) if _INTEGER.fullmatch(word) else None


def parse_number(word: str) -> float | None:
    """Return the finite number that the word is; None for every other word, also for N/A and nan."""
    if len(word) > _LONGEST_NUMBER or not _NUMBER.fullmatch(word):
        return None
    value = float(word)
    return value if math.isfinite(value) else None


def is_table_value(word: str) -> bool:
    """Return whether a column of numbers can hold this word: a number, N/A, nan or infinity."""
    return len(word) <= _LONGEST_NUMBER and (_NUMBER.fullmatch(word) is not None or word.lower() in _NO_NUMBER)


def count_decimals(word: str) -> int:
    """Count the digits after the point. Programs print a fixed number of them, so a word with fewer was cut."""
    return len(word.rpartition(".")[2]) if "." in word else 0


def json_number(value: object) -> float | None:
    """Return a finite number of a JSON document, where programs also write numbers as strings; None for the rest."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        return parse_number(value.strip())
    if isinstance(value, int):
        return float(value) if abs(value) < 10**18 else None
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return None


def json_object(value: object) -> Mapping[str, object]:
    """Return an object of a JSON document; an empty one for every other value."""
    return value if isinstance(value, Mapping) else {}


def json_list(value: object) -> Sequence[object]:
    """Return a list of a JSON document; an empty one for every other value."""
    return value if isinstance(value, list) else ()


def json_text(value: object) -> str | None:
    """Return a string of a JSON document; None if it is empty, and for every other value."""
    return value if isinstance(value, str) and value else None


def excerpt(line: str) -> str:
    """Return a line as a report shows it: without blanks around it, and cut to a readable length."""
    text = line[: 2 * _LONGEST_EXCERPT].strip()
    return text if len(text) <= _LONGEST_EXCERPT else text[: _LONGEST_EXCERPT - 1] + "…"
