"""Split a log into JSON documents and the lines of each process, and read the numbers in these parts.

This module removes launcher prefixes, colours and debug output, so that a parser sees only the output of its program.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import re
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO, TypeVar, cast

import yaml

from imagebuild.bench.alternation import ComparisonReader
from imagebuild.bench.messages import Message, MessageReader
from imagebuild.bench.models import Verdict
from imagebuild.core.errors import ResultError
from imagebuild.core.files import open_file
from imagebuild.core.patterns import DataFile


class LogLine(NamedTuple):
    """A line of a log that may belong to a result."""

    text: str
    process: str
    """The process that wrote the line, from the prefix of the line: names of pods, hosts or programs, then `rank` and
    the label that a launcher gave to the process. Empty without such a prefix."""
    number: int
    is_joined: bool = False
    """Whether the line was joined from two pieces that debug output had separated."""


@dataclass
class Log:
    """A log without debug output."""

    path: str
    lines: list[LogLine] = field(default_factory=list)
    line_count: int = 0
    warnings: list[LogLine] = field(default_factory=list)
    """The first warnings of NCCL, which are not in `lines`. They may explain why a run failed."""
    settings: list[tuple[int, Mapping[str, str]]] = field(default_factory=list)
    """Facts that NCCL printed. Each item has the number of the line and values by name: environment variables that
    select algorithms, `NCCL_ALGO` also for the algorithm of messages of 1 GiB or more, and `clique`."""
    messages: list[Message] = field(default_factory=list)
    """Messages of libraries about the way of the data."""
    comparisons: ComparisonReader = field(default_factory=ComparisonReader)
    """Comparisons in the log, and the lines at which their runs begin and end."""

    def split(self) -> dict[int, Log]:
        """Return the parts of the log, by their first line: the output of each run of a comparison, and the output
        between these runs. A log without a comparison is one part."""
        cuts = self.comparisons.cuts
        if not cuts:
            return {0: self}
        ends = [*(cut - 1 for cut in cuts), self.line_count]
        parts = [Log(self.path, line_count=end) for end in ends]
        for name in ("lines", "warnings", "settings", "messages"):
            for item in getattr(self, name):
                number = item[0] if name == "settings" else item.number
                getattr(parts[bisect_right(cuts, number)], name).append(item)
        return dict(zip((0, *cuts), parts, strict=True))


Item = TypeVar("Item")
Parsed = list[Item | str]
"""The results that a parser found, and the shortened text of lines or JSON that look like results but could not be
read."""
ParsedLines = list[tuple[int, Item | str]]
"""`Parsed` for text output: pairs of an item and, before it, the number of the item's first line in the log."""


def lines_of(tool: re.Pattern[str], lines: Sequence[LogLine], longest: int) -> Iterator[tuple[int, str]]:
    """Yield the number and stripped text of each line, if at least one line matches `tool`.
    Lines longer than `longest` characters are left out."""
    if any(tool.match(line.text) for line in lines):
        for line in lines:
            if len(line.text) <= longest and (text := line.text.strip().removeprefix("> ")):
                yield line.number, text


@dataclass(frozen=True)
class JsonDocument:
    """A JSON document, or the readable part of a broken one."""

    value: object
    is_whole: bool
    number: int
    """Number of the document's first line in the log."""


# Reading a file: encodings, line ends, colours, debug output


_DATA = DataFile(__file__)
_RE, _ALGORITHMS, _MOST = _DATA.patterns, _DATA["algorithms"], _DATA["limits"]


@contextmanager
def open_log(path: Path) -> Iterator[BinaryIO]:
    """Open a file, which may be compressed with gzip. The path `-` stands for the standard input.

    Raises OSError if the file cannot be opened. Raises ResultError in the `with` block if compressed data are damaged.
    """
    with open_file(path) as content:
        is_compressed = content.read(2) == b"\x1f\x8b"
        content.seek(0)
        try:
            yield cast(BinaryIO, gzip.GzipFile(fileobj=content)) if is_compressed else content
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            problem = f"the compressed data in the file are cut or damaged: {error}; copy the file again"
            raise ResultError(f"{path}: {problem}") from None


def read_log(path: Path | str) -> Log:
    """Read a log file. Raises OSError if it cannot be opened, ResultError if its compressed data are damaged."""
    log = Log(str(path))
    with open_log(Path(path)) as content:
        encoding = "utf-16" if content.read(2) in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
        content.seek(0)
        with io.TextIOWrapper(content, encoding, errors="replace", newline="\n") as file:
            _read(log, file)
    return log


def log_from_text(name: str, text: str) -> Log:
    text = text.removeprefix("\ufeff").encode(errors="replace").decode()
    log = Log(name)
    _read(log, io.StringIO(text, newline="\n"))
    return log


def _read(log: Log, file: TextIO) -> None:
    """Add the lines of a file to the log, without debug output.
    NCCL may print a message in the middle of a row. The next line of that process is then the rest of the row."""
    cut: dict[str, str] = {}
    reader = MessageReader()
    log.messages = reader.messages
    while row := file.readline(_MOST["line"]):
        log.line_count += 1
        reader.read(row, log.line_count)
        log.comparisons.read(row, log.line_count)
        message = None
        if (at := row.find(" NCCL ")) >= 0 or (at := row.find(" UCX  ")) >= 0:
            message = _RE["debug"].search(row, max(0, at - _MOST["head"]))
        before = row[: message.start()] if message else ""
        if message is None or '"' in before:
            for line in _clean(row, log.line_count):
                piece = cut.pop(line.process, "")
                log.lines.append(line._replace(text=piece + line.text, is_joined=bool(piece)))
            continue
        if said := settings_in(row):
            log.settings.append((log.line_count, said))
        if message["level"] == "WARN" and len(log.warnings) < 20:
            log.warnings.extend(_clean(row[:2000], log.line_count))
        if not before or _RE["digits_of_host"].fullmatch(before):
            continue
        process, before = split_prefix(before)
        if not before.strip() or _RE["digits_of_host"].fullmatch(before):
            continue
        piece = cut.pop(process, "") + _RE["output_tag"].sub("", before)
        if _RE["cut_row"].match(piece) and len(piece) <= 2000:
            cut[process] = piece
        else:
            log.lines.append(LogLine(piece, process, log.line_count))
    log.lines.extend(LogLine(text, process, log.line_count) for process, text in cut.items())


def settings_in(text: str) -> Mapping[str, str]:
    """Return the facts in a command or a message of NCCL, by name, as in `Log.settings`."""
    found: dict[str, str] = {}
    is_marked = any(mark in text for mark in _DATA["setting_marks"])
    for match in _RE["setting"].finditer(text[:20_000]) if is_marked else ():
        if match["clique"]:
            found["clique"] = match["clique"]
        else:
            found[match["name"] or "NCCL_ALGO"] = match["value"] or _ALGORITHMS.get(match["algo"], match["algo"])
    return found


def _clean(text: str, number: int) -> Iterator[LogLine]:
    """Yield the line without colours, NUL characters and prefixes.
    A line with carriage returns yields several lines, a Markdown fence yields none."""
    if text.startswith('{"log":"'):  # written by Docker's json-file logging driver
        try:
            wrapped = json.loads(text)["log"]
        except (ValueError, LookupError, RecursionError):
            wrapped = None
        text = wrapped if isinstance(wrapped, str) else text
    elif quoted := _RE["quoted"].fullmatch(text):
        text = quoted[1].replace('\\"', '"')
    if "\x1b" in text:
        text = _RE["escapes"].sub("", text)
    for part in text.replace("\0", "").rstrip("\r\n").split("\r"):
        process, rest = split_prefix(part)
        tag = part[: len(part) - len(rest)].strip()
        if tag.startswith("[") and tag in rest:
            rest = rest.replace(tag, " ")  # a row that was printed in pieces has several tags
        if not rest.startswith("```"):
            yield LogLine(rest, process, number)


_PREFIXES = [_DATA.pattern(rf"[ \t]*{text}") for text in _DATA["prefixes"]]
_RANK = "rank "
"""The text in the name of a process before the label that its launcher gave to it."""


def split_prefix(text: str) -> tuple[str, str]:
    """Return the name of the process in the prefix of a line, and the rest. Without a prefix, the name is empty."""
    names = []
    for _ in range(4):  # launchers may be nested
        prefix = next(filter(None, (pattern.match(text) for pattern in _PREFIXES)), None)
        if prefix is None:
            break
        groups = prefix.groupdict()
        names.append(f"{_RANK}{groups['rank']}" if groups.get("rank") else groups.get("process"))
        text = text[prefix.end() :]
    return " ".join(filter(None, names)), text


def launch_of(process: str) -> str | None:
    """Return a name of the launch that started a process, or None if the prefix of the process has no rank.

    Names of pods and hosts stand for separate launches, as do jobs of Open MPI: `1` in `[1,0]<stdout>:`."""
    programs, mark, rank = process.partition(_RANK)
    return f"{programs}{rank.rpartition(',')[0]}" if mark else None


# Failures that programs and launchers report

_FAILURES = [(row["verdict"], _DATA.pattern(row["patterns"])) for row in _DATA["failures"]]
"""The verdict and pattern of each kind of message. Kinds nearer to the root cause come first."""
_ANY_FAILURE = re.compile("|".join(pattern.pattern for _, pattern in _FAILURES))


class Failure(NamedTuple):
    """A line that reports a failure. Failures sort by pattern, then by line, so that the root cause comes first."""

    pattern: int
    """Index in `_FAILURES`."""
    number: int
    verdict: Verdict
    text: str


def failure_of(text: str, number: int) -> Failure | None:
    """Return the failure that a line reports, or None. `# error:` is not a failure: successful runs print it, too."""
    text = text[:2000]
    if not _ANY_FAILURE.search(text) or text.lstrip("# ").startswith("error:"):
        return None
    place = next(place for place, (_, pattern) in enumerate(_FAILURES) if pattern.search(text))
    return Failure(place, number, _FAILURES[place][0], " ".join(text.split())[:240])


# JSON documents between other lines, also invalid and incomplete ones

_DECODER = json.JSONDecoder(strict=False)
_YAML = getattr(yaml, "CBaseLoader", yaml.BaseLoader)


def extract_json(lines: Sequence[LogLine]) -> tuple[list[JsonDocument], list[LogLine]]:
    """Return the JSON documents in the output of one process, and the lines outside of the documents."""
    text = "\n".join(line.text for line in lines)
    ends = list(accumulate(len(line.text) + 1 for line in lines))
    documents: list[JsonDocument] = []
    outside = []
    at = attempts = 0
    while attempts < _MOST["attempts"] and (start := _RE["begin"].search(text, at)):
        begin = start.end()
        number = lines[bisect_right(ends, begin)].number
        value: Any = {}
        end, is_whole = begin + 1, True
        try:
            value, end = _DECODER.raw_decode(text, begin)
        except (ValueError, RecursionError):
            attempts += 1
            if _RE["known_keys"].search(text, begin, begin + _MOST["before_key"]):
                value, end, is_whole = _read_broken_json(text, begin)
                attempts += 0 if value else _MOST["cost_of_broken"]
        if value or value is None:
            documents.append(JsonDocument(value, is_whole=is_whole, number=number))
        outside += [text[at:begin], "\n" * text.count("\n", begin, end)] if value else [text[at:end]]
        at = end
    rest = "".join((*outside, text[at:])).split("\n")
    return documents, [line._replace(text=left) for line, left in zip(lines, rest, strict=False)]


def _read_broken_json(text: str, begin: int) -> tuple[Any, int, bool]:
    """Return the readable part of an invalid or incomplete document, its end in the text, and whether it is complete.

    Extra commas, and words without quotes, are allowed as in YAML. A value is used only if a comma or bracket follows,
    because the last number may have lost digits. Two values without a comma between them begin other output."""
    following = _RE["next_document"].search(text, begin + 1)
    limit = min(following.start() if following else len(text), begin + (1 << 20))
    tokens: list[str] = []
    kept, closers, kept_closers = 0, "", ""
    end = at = begin
    is_word = was_word = False
    while (token := _RE["token"].match(text, at, limit)) and len(closers) <= 100:
        at, mark = token.end(), token[1]
        was_word, is_word = is_word, mark not in "{[}],:"
        if (is_word and was_word) or (mark in "}]" and mark != closers[:1]) or mark[0] in "&*!":
            break  # other output, or syntax that only YAML has
        tokens.append('""' if mark == "null" else mark)
        if mark in "{[":
            closers = {"{": "}", "[": "]"}[mark] + closers
        elif mark in "}]":
            closers = closers[1:]
        if mark in "{[}],":
            end, kept, kept_closers = at, len(tokens), closers
            if not closers:
                break
    try:
        return yaml.load(" ".join((*tokens[:kept], *kept_closers)), _YAML), end, not kept_closers  # noqa: S506 - no types
    except (yaml.YAMLError, RecursionError):
        return None, end, False


# Words in tables, and values in JSON documents


def parse_integer(word: str) -> int | None:
    """Return the value of a word that is a count or size, or None for any other word."""
    return int(word) if _RE["integer"].fullmatch(word) else None


def parse_number(word: str) -> float | None:
    """Return the value of a word that is a finite number, or None for any other word, such as N/A and nan."""
    value = float(word) if _RE["number"].fullmatch(word) else math.inf
    return value if math.isfinite(value) else None


def is_table_value(word: str) -> bool:
    """Return whether the word may occur in a column of numbers: a number, N/A, nan or infinity."""
    return bool(_RE["number"].fullmatch(word) or _RE["no_number"].fullmatch(word))


def json_number(value: object) -> float | None:
    """Return the value if it is a finite number, or a string with such a number; else None."""
    if isinstance(value, str):
        return parse_number(value.strip())
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 10**18 else None


def json_object(value: object) -> Mapping[str, object]:
    """Return the value if it is an object, else an empty object."""
    return value if isinstance(value, Mapping) else {}


def json_list(value: object) -> Sequence[object]:
    """Return the value if it is a list, else an empty list."""
    return value if isinstance(value, list) else ()


def json_text(value: object) -> str | None:
    """Return the value if it is a string that is not empty, else None."""
    return value if isinstance(value, str) and value else None


def excerpt(line: str) -> str:
    """Return a line as a report shows it: stripped, and shortened to a readable length."""
    text = line[:400].strip()
    return text if len(text) <= 200 else text[:199] + "…"
