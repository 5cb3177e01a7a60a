"""Split a log into JSON documents and the lines of each process, and read the numbers in these parts.

This module removes launcher prefixes, colours and debug output, so that a parser sees only the output of its program.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import re
import sys
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO, TypeVar, cast

import yaml

from imagebuild.bench.models import Verdict
from imagebuild.core.errors import ResultError
from imagebuild.core.files import open_file


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
    select algorithms, `NCCL_ALGO` also for the algorithm of messages of 1 GiB or more, `clique` and `network`."""


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

_LONGEST_LINE = 64 << 20
"""Largest number of characters in a line. Longer lines are split, so that a file without line ends does not fill the
memory."""

_ESCAPES = re.compile(r"\x1b(?:\[[0-9;:?]{0,40}[ -/]{0,4}[@-~]|\][^\x07\x1b]{0,300}(?:\x07|\x1b\\)|[@-Z\\-_])")
_DEBUG = re.compile(
    # Messages of NCCL: `node1:123:456 [0] NCCL INFO …`. A time stamp may precede the host name. File and function may
    # precede `NCCL`. The end of a row may precede the message without a blank: `0.00      0node1:…`, `N/Anode1:…`,
    # `1e+05node1:…`.
    r"(?:\[[\d :.,TZ/+-]{8,40}\] ?)?(?:(?<!N/)(?!e[+-]\d)[A-Za-z][\w.-]{0,254}|\d{1,3}(?:\.\d{1,3}){3})"
    r":\d{1,10}:\d{1,10}(?: \[-?\d{1,4}\])?(?: [^\s\[]{1,200}){0,3}?"
    r" NCCL (?P<level>INFO|WARN|TRACE|CALL|ABORT)(?=\s|$)"
    # Messages of UCX: `[1734567.123456] [node1:77:0]     ucp_context.c:2119 UCX  INFO …`
    r"|\[\d{1,12}\.\d{1,9}\] \[[^\]\s]{1,300}\]\s{1,12}[^\s:]{1,100}:\d{1,6}\s{0,8}"
    r" UCX  (?:DEBUG|TRACE|INFO|REQ|DATA|ASYNC|FUNC|POLL) "
)
_DIGITS_OF_HOST = re.compile(r"[\da-f]{1,12}")
"""The leading digits of a host name, which `_DEBUG` does not match: a container may be called `3f2a9c0d11e4`."""
_SETTING = re.compile(
    r"\b(?P<name>NCCL_(?:ALGO|NVLS_ENABLE))(?: set by environment to |[\"']?[= ][\"']?)(?P<value>\^?\w[\w,;:^-]*)"
    r"|\b\d{10,15} Bytes -> Algo (?P<algo>\w{1,20})"
    r"|\bcliqueSize (?P<clique>\d{1,6})\b|(?:\bUsing network |\bvia NET/)(?P<network>[A-Za-z][\w ]{0,40}\w)"
)
_SETTING_MARKS = ("NCCL_", "-> Algo ", "cliqueSize ", "Using network ", "via NET/")
"""Every text that `_SETTING` matches contains one of these marks."""
_ALGORITHMS = {
    "0": "tree", "1": "ring", "2": "collnetdirect", "3": "collnetchain", "4": "nvls", "5": "nvlstree", "6": "pat",
}  # fmt: skip
"""Maps the numbers of algorithms, which older releases of NCCL print, to their names."""
_HEAD_WINDOW = 700
"""Number of characters before ` NCCL ` or ` UCX  ` that are searched for the beginning of a debug message."""
_OUTPUT_TAG = re.compile(r"[ \t]*\[[^\]\s]{1,300}\]<std\w{2,4}>: ?\Z")
_CUT_ROW = re.compile(r"[\s|]*(?:\d{1,20}(?:[\s|]|$)|#)")


@contextmanager
def open_log(path: Path) -> Iterator[BinaryIO]:
    """Open a file, which may be compressed with gzip. The path `-` stands for the standard input.

    Raises OSError if the file cannot be opened. Raises ResultError in the `with` block if compressed data are damaged.
    """
    with io.BytesIO(_standard_input(sys.stdin)) if str(path) == "-" else open_file(path) as content:
        is_compressed = content.read(2) == b"\x1f\x8b"
        content.seek(0)
        try:
            yield cast(BinaryIO, gzip.GzipFile(fileobj=content)) if is_compressed else content
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise ResultError(
                f"{path}: the compressed data in the file are cut or damaged: {error}; copy the file again"
            ) from None


@cache
def _standard_input(stream: TextIO) -> bytes:
    """Return the whole standard input, also on a second call."""
    return stream.buffer.read()


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
    while row := file.readline(_LONGEST_LINE):
        log.line_count += 1
        message = None
        if (at := row.find(" NCCL ")) >= 0 or (at := row.find(" UCX  ")) >= 0:
            message = _DEBUG.search(row, max(0, at - _HEAD_WINDOW))
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
        if not before or _DIGITS_OF_HOST.fullmatch(before):
            continue
        process, before = split_prefix(before)
        if not before.strip() or _DIGITS_OF_HOST.fullmatch(before):
            continue
        piece = cut.pop(process, "") + _OUTPUT_TAG.sub("", before)
        if _CUT_ROW.match(piece) and len(piece) <= 2000:
            cut[process] = piece
        else:
            log.lines.append(LogLine(piece, process, log.line_count))
    log.lines.extend(LogLine(text, process, log.line_count) for process, text in cut.items())


def settings_in(text: str) -> Mapping[str, str]:
    """Return the facts in a command or a message of NCCL, by name, as in `Log.settings`."""
    found: dict[str, str] = {}
    for match in _SETTING.finditer(text[:20_000]) if any(mark in text for mark in _SETTING_MARKS) else ():
        if match["clique"] or match["network"]:
            found |= {name: match[name] for name in ("clique", "network") if match[name]}
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
    elif quoted := _QUOTED.fullmatch(text):
        text = quoted[1].replace('\\"', '"')
    if "\x1b" in text:
        text = _ESCAPES.sub("", text)
    for part in text.replace("\0", "").rstrip("\r\n").split("\r"):
        process, rest = split_prefix(part)
        tag = part[: len(part) - len(rest)].strip()
        if tag.startswith("[") and tag in rest:
            rest = rest.replace(tag, " ")  # a row that was printed in pieces has several tags
        if not rest.startswith("```"):
            yield LogLine(rest, process, number)


# Launcher prefixes

_STAMP = r"\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?: ?(?:Z|UTC|[+-]\d\d:?\d\d))?"
_CTIME = r"[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4}"
_TABLE_LINE = r"(?=[ \t]*(?:#|\d+[ \t]+\d+[ \t]+[a-z]|nThread |Out of bounds |Avg bus ))"
_PREFIXES = tuple(
    re.compile(r"[ \t]*" + pattern)
    for pattern in (
        # Open MPI: `[1,0]<stdout>:`. PMIx adds a blank, and may add `[host:pid]` or a time stamp, or leave out the job.
        rf"(?:\[?{_CTIME}\]?)?(?:\[(?:[\w.-]*@)?(?P<rank>[\w,.-]*\d)\](?:\[[^\]\s]{{1,300}}\])?)?"
        r"<std(?:out|err|diag)>: ?",
        # kubectl logs --prefix
        r"\[(?P<process>pod/[^\]\s]{1,500})\] ?",
        # --timestamps of kubectl and docker, log files of container runtimes, logs of CI workflows
        rf"\[?{_STAMP}\]?(?:[ \t]+std(?:out|err) [FP])?(?:[ \t]|$)",
        rf"\[?\d\d:\d\d:\d\d(?:[.,]\d{{1,9}})?\]?[ \t]+{_TABLE_LINE}",
        # srun --label
        r"(?P<rank>\d{1,7}):(?: |$)",
        # Intel MPI and MPICH -prepend-rank, torchrun
        r"\[(?:rank ?|default)?(?P<rank>\d{1,7})\](?:: ?|[ \t]|$)",
        # labels with a host and a rank; errors of Open MPI begin with a host and a process id
        rf"[\[(<]?(?P<rank>[A-Za-z][\w.-]{{0,200}}[:@]\d{{1,7}})[\])>]?:?[ \t]*{_TABLE_LINE}",
        rf"[\[(<]?(?:[Rr]ank|[Tt]ask|[Pp]roc(?:ess)?)[ _:-]?(?P<rank>\d{{1,7}})[\])>]?:?[ \t|]*{_TABLE_LINE}",
        # journald and syslog
        r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d (?P<process>\S{1,200} [^\s\[:]{1,200})(?:\[\d{1,10}\])?: ?",
        # docker compose; then stern, but only before text that looks like part of a table
        r"(?P<process>[A-Za-z][\w.-]{0,200}) {1,60}\| ?",
        r"(?P<process>[a-z][a-z0-9.-]{2,250} [a-z][a-z0-9-]{1,62}) (?=[ \t]*(?:#|\d+[ \t]+\d|\[\d))",
        # Markdown quotations
        r">(?=[ \t#]|$) ?",
        # pdsh and clush. Messages of nccl-tests also begin with `host: `, so only prefixes of table lines count.
        rf"(?P<process>[A-Za-z][\w.-]{{0,200}}): {_TABLE_LINE}",
    )
)
_RANK = "rank "
"""The text in the name of a process before the label that its launcher gave to it."""
_QUOTED = re.compile(r'[ \t]*"((?=#|[ \t]*\d+[ \t]+\d)(?:[^"\\]|\\["t/])*)",?\r?\n?')
"""A quoted line in a list, as Ansible prints it, that looks like part of a table."""


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

_FAILURES: tuple[tuple[Verdict, str], ...] = (
    ("cuda-failure", r"unhandled cuda error|Test CUDA failure|\b[Cc]uda failure\b|CUDA failure \S|\bCUDA error\b"),
    (
        "comm-failure",
        r"^(?!.*remote process exited).*?(?:Test NCCL failure|\bNCCL (?:failure|error)\b|unhandled system error"
        r"|nccl(?:System|Internal|Remote)Error)",
    ),
    (
        "timeout",
        r"Test timeout \(|DUE TO (?:\w+ )?TIME LIMIT|time limit for job execution has been|APPLICATION TIMED OUT"
        r"|DeadlineExceeded|timeout: (?:sending signal|the monitored command)|[Cc]ommand timed out"
        r"|[Ee]xit(?:ed)?(?: with)?(?: exit)? (?:code|status):? 124\b|[Ww]alltime \S{1,20} exceeded",
    ),
    ("comm-failure", r"remote process exited or there was a network error"),
    (
        "failed",
        r"non-zero (?:exit )?(?:status|code)|exited on signal|[Ee]xited with (?:exit )?(?:code|status):? [1-9]"
        r"|terminated with exit code [1-9]|BAD TERMINATION OF|Segmentation fault|Process received signal|CANCELLED AT"
        r"|\boom[-_ ]?kill|OOMKilled|MPI_ABORT was invoked|error while loading shared libraries|Invalid number of GPUs"
        r"|not enough slots available|(?<!PMIx )was unable to (?:launch|find|start)|driver version is insufficient"
        r"|is not supported by this test|\bKilled\s{0,4}$|\bXid \(PCI|GPU has fallen off the bus",
    ),
    ("failed", r"\bTest failure\b|^imagebuild: FAILED|\(core dumped\)|^terminate called after throwing"),
)
"""The verdict and pattern of each kind of message. Kinds nearer to the root cause come first.

* A CUDA error is never a consequence of another error.
* A communication error may lead to a timeout.
* "remote process exited" is the message of all ranks but the one that failed.
* Launchers and stack traces say only that something failed.

The word `timeout` is not a pattern, because MPICH ends all output with "0 network timeouts". The message "was unable to
find a usable compression library" of PMIx is not a failure."""
_ANY_FAILURE = re.compile("|".join(pattern for _, pattern in _FAILURES))


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
    place = next(place for place, (_, pattern) in enumerate(_FAILURES) if re.search(pattern, text))
    return Failure(place, number, _FAILURES[place][0], " ".join(text.split())[:240])


# JSON documents between other lines, also invalid and incomplete ones

_DECODER = json.JSONDecoder(strict=False)
_BEGIN = re.compile(r"(?:^|(?<=\}))[ \t]*(?=\{)", re.MULTILINE)
_TOKEN = re.compile(r'\s*([{}\[\]:,]|"(?:[^"\\]|\\.)*"|[^\s"{}\[\]:,]+)', re.DOTALL)
_KNOWN_KEYS = re.compile(r'"?(?:results|testcases|nvbandwidth|bus_bw|test_categories)"?\s{0,8}:')
_KEYS_WITHIN = 100_000
"""Number of characters of a broken document that are searched for one of `_KNOWN_KEYS`."""
_NEXT_DOCUMENT = re.compile(r'\n\s{0,8}\{\s{0,40}"?(?:version|nvbandwidth|test_info)\b')
_MOST_ATTEMPTS = 200
"""Number of failed attempts to read a JSON document. After this number, the remaining output of the process is text."""
_BROKEN_COST = 50
"""Number of failed attempts for which a broken document counts, because to read it may mean to read all the remaining
output."""
_YAML = getattr(yaml, "CBaseLoader", yaml.BaseLoader)


def extract_json(lines: Sequence[LogLine]) -> tuple[list[JsonDocument], list[LogLine]]:
    """Return the JSON documents in the output of one process, and the lines outside of the documents."""
    text = "\n".join(line.text for line in lines)
    ends = list(accumulate(len(line.text) + 1 for line in lines))
    documents: list[JsonDocument] = []
    outside = []
    at = attempts = 0
    while attempts < _MOST_ATTEMPTS and (start := _BEGIN.search(text, at)):
        begin = start.end()
        number = lines[bisect_right(ends, begin)].number
        value: Any = {}
        end, is_whole = begin + 1, True
        try:
            value, end = _DECODER.raw_decode(text, begin)
        except (ValueError, RecursionError):
            attempts += 1
            if _KNOWN_KEYS.search(text, begin, begin + _KEYS_WITHIN):
                value, end, is_whole = _read_broken_json(text, begin)
                attempts += 0 if value else _BROKEN_COST
        if value or value is None:
            documents.append(JsonDocument(value, is_whole=is_whole, number=number))
        outside += [text[at:begin], "\n" * text.count("\n", begin, end)] if value else [text[at:end]]
        at = end
    rest = "".join((*outside, text[at:])).split("\n")
    return documents, [line._replace(text=left) for line, left in zip(lines, rest, strict=False)]


def _read_broken_json(text: str, begin: int) -> tuple[Any, int, bool]:
    """Return the readable part of an invalid or incomplete document, its end in the text, and whether it is complete.

    The document may have an extra comma, or keys and values without quotes. It is therefore read as YAML, with all
    values as texts. A value is used only if a comma or bracket follows, because the last number may have lost digits.
    Two values without a comma between them mark the beginning of other output."""
    following = _NEXT_DOCUMENT.search(text, begin + 1)
    limit = min(following.start() if following else len(text), begin + (1 << 20))
    tokens: list[str] = []
    kept, closers, kept_closers = 0, "", ""
    end = at = begin
    is_word = was_word = False
    while (token := _TOKEN.match(text, at, limit)) and len(closers) <= 100:
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

_INTEGER = re.compile(r"\d{1,18}", re.ASCII)
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,4})?", re.ASCII)
_NO_NUMBER = re.compile(r"n/a|[+-]?(?:nan|inf)", re.IGNORECASE)
_LONGEST_EXCERPT = 200


def parse_integer(word: str) -> int | None:
    """Return the value of a word that is a count or size, or None for any other word."""
    return int(word) if _INTEGER.fullmatch(word) else None


def parse_number(word: str) -> float | None:
    """Return the value of a word that is a finite number, or None for any other word, such as N/A and nan."""
    value = float(word) if _NUMBER.fullmatch(word) else math.inf
    return value if math.isfinite(value) else None


def is_table_value(word: str) -> bool:
    """Return whether the word may occur in a column of numbers: a number, N/A, nan or infinity."""
    return bool(_NUMBER.fullmatch(word) or _NO_NUMBER.fullmatch(word))


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
    text = line[: 2 * _LONGEST_EXCERPT].strip()
    return text if len(text) <= _LONGEST_EXCERPT else text[: _LONGEST_EXCERPT - 1] + "…"
