"""Read the runs that nccl-tests and rccl-tests print: tables of every release since 1.0, and the JSON of `-J`.

Text becomes runs in five steps, in the order of this file:

1. A line is an event (the parameters, a rank of the device list, a header, a line of the footer, …), a failure, a row
   of the table, a piece of a row, or other output.
2. Rows are read by their shape, since headers are often missing. Other output may stand before, after and inside them.
3. The lines of each process become its events, where rows that other output broke are put together again.
4. The events of a process are split into runs: several one after the other, or several at once whose lines are mixed.
5. The events of a run, and the failures after its beginning, become a `Run` with a verdict.

JSON needs only the verdict. A run that was both printed as text and written as JSON is merged.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal, NamedTuple

from imagebuild.bench.logs import JsonDocument, Log, LogLine, json_list, json_number, json_object, parse_number
from imagebuild.bench.models import Half, NcclRow, ParsedOutput, Run, RunVerdict


def parse_nccl_text(log: Log) -> ParsedOutput[Run]:
    """Read the runs of a log, in the order in which they begin; nothing if the log is not of these programs."""
    reader = _LogReader()
    for line in log.lines:
        reader.read(line)
    events = {name: process.end() for name, process in reader.processes.items()}
    runs = [_RunEvents(name, run) for name, printed in events.items() for run in _split_runs(printed)]
    runs.sort(key=lambda run: run.begin)
    if not any(run.has_output for run in runs) and any(
        message in failure.text for failure in reader.failures for message in _OWN_FAILURES
    ):
        runs.append(_RunEvents("", [_Event("starting", 0)]))
    failures = _failures_by_run(runs, reader.failures)
    results = tuple(
        _run_of(log, run, failures[index])
        for index, run in enumerate(runs)
        # A command without output counts as a run if it failed.
        if run.has_output or (failures[index] and run.first("command"))
    )
    partial = (event.text for printed in events.values() for event in printed if event.kind == "partial")
    # In a log without a run, what resembles a broken row may be anything.
    return ParsedOutput(results, tuple(partial) if results else ())


def parse_nccl_json(source: str, document: JsonDocument) -> ParsedOutput[Run] | None:
    """Read the run of a JSON document; None if it is not of nccl-tests or a fork of it."""
    value = document.value
    if isinstance(value, dict) and ("nccl_version" in value or "minimum_bytes" in json_object(value.get("config"))):
        return _parse_official_json(source, document, value)
    if isinstance(value, dict) and str(value.get("identifier", "")).startswith("nccl-tests"):
        groups = value.get("benchmark")
        return _parse_json_by_size(source, document, groups) if isinstance(groups, list) else None
    if isinstance(value, list) and value and {"busBw", "inPlace"} <= json_object(value[0]).keys():
        return _parse_flat_json(source, document, value)
    return None


def merge_runs(printed: Sequence[Run], written: Iterable[Run]) -> tuple[Run, ...]:
    """Return the runs `written` as JSON that are not in the text, then those `printed` as text.

    Where both are the same run, it has the numbers of the JSON, which are not rounded, and what only the text says:
    version, hosts and GPUs. Two that disagree in a size, a number or the verdict stay two.
    """
    merged = list(printed)
    unmatched = list(range(len(merged)))
    others = []
    for run in written:
        same = next((index for index in unmatched if _is_same_run(merged[index], run)), None)
        if same is None:
            others.append(run)
            continue
        unmatched.remove(same)
        merged[same] = merged[same].model_copy(update={"rows": run.rows, "avg_busbw_gb_s": run.avg_busbw_gb_s})
    return (*others, *merged)


# 1. Lines: events.

_Kind = Literal[
    "command", "version", "starting", "parameters", "devices", "rank", "header", "reduced", "row", "partial",
    "elision", "bounds", "average", "concluded",
]  # fmt: skip
_OPENINGS: frozenset[_Kind] = frozenset(("version", "starting", "parameters", "devices", "header"))
"""Each comes once, before the rows: a second one belongs to another run."""
_FOOTERS: frozenset[_Kind] = frozenset(("bounds", "average", "concluded"))
_BODY: frozenset[_Kind] = frozenset(("row", "partial", *_FOOTERS))
_ONCE: tuple[_Kind, ...] = ("starting", "parameters", "header", "bounds", "average")
"""Each comes exactly once in the output of a run of any release that has it."""

_COLLECTIVES = frozenset((
    "all_reduce", "all_gather", "reduce_scatter", "alltoall", "alltoallv", "broadcast", "reduce", "sendrecv",
    "gather", "scatter", "hypercube",
))  # fmt: skip


@dataclass(frozen=True)
class _TableHeader:
    """What the line with the names of the columns says."""

    has_redop: bool
    has_root: bool
    halves: int
    counts_wrong: bool
    """Whether the last column of a half is `#wrong`, a count; before 2.13 it was the largest error."""
    per_iteration: bool
    """Whether the columns of `-I` are there."""
    in_milliseconds: bool
    """Whether times are in ms, as in release 1."""


@dataclass(frozen=True)
class _Event:
    """Something that a line says about a run."""

    kind: _Kind
    number: int
    """The line's number."""
    values: Mapping[str, str] = field(default_factory=dict)
    header: _TableHeader | None = None
    row: _PrintedRow | None = None
    """Of a row; of a partial row, its first half if that is whole."""
    text: str = ""
    """Of a partial row."""


_GAP = r"\s{1,12}"
_PATTERNS: Mapping[str, tuple[tuple[_Kind, re.Pattern[str]], ...]] = {
    "n": (
        ("version", re.compile(r"(?P<tool>nccl-tests) version (?P<version>[^\s(]{1,40})")),
        (
            "parameters",
            re.compile(
                r"nThreads? \d{1,5} nGpus \d{1,5} minBytes \d{1,20} maxBytes (?P<max>\d{1,20})"
                r"(?: step: (?P<step>\d{1,20})\((?P<by>factor|bytes)\))?"
                r"(?:.{0,200}? validation: (?P<validation>\d{1,3}))?"
            ),
        ),
    ),
    "r": (("version", re.compile(r"(?P<tool>rccl-tests): Version (?P<version>\S{1,80})")),),
    "N": (("version", re.compile(r"NCCL Tests compiled with NCCL \S")),),
    "C": (
        ("starting", re.compile(r"Collective test starting: (?P<program>\S{1,300})")),
        ("concluded", re.compile(r"Collective test concluded: (?P<program>\S{1,300})")),
    ),
    "U": (("devices", re.compile(r"Using devices")),),
    "R": (
        (
            "rank",
            re.compile(
                rf"Rank{_GAP}(?P<rank>\d{{1,7}})(?:{_GAP}Group{_GAP}(?P<group>-?\d{{1,7}}))?"
                rf"(?:{_GAP}Pid{_GAP}\d{{1,10}})?{_GAP}on\s{{1,20}}(?P<host>\S{{1,300}})"
                rf"{_GAP}device{_GAP}\d{{1,5}}{_GAP}\[[^\]]{{0,40}}\](?P<name>[^\n]{{0,200}})"
            ),
        ),
        ("reduced", re.compile(r"Reducing maxBytes to (?P<max>\d{1,20})")),
    ),
    "O": (("bounds", re.compile(r"Out of bounds values\s{0,20}: ?(?P<count>\d{1,15})\s{1,8}(?P<state>OK|FAILED)")),),
    "A": (
        (
            "average",
            re.compile(r"Avg bus bandwidth\s{0,20}: ?(?P<value>\S{1,30})(?:\s{1,8}(?P<state>OK|FAILED))?"),
        ),
    ),
}
"""Patterns of events, by the first letter after the marks of a comment."""
_HEADER = re.compile(r"(?:size|bytes)\s{1,40}(?:count|N)\s{1,40}type\b(?P<labels>[^\n]{0,400})")
_ELISION = re.compile(r"[\s#|]{0,200}(?:\.{3,10}|…|\[(?:\.{3}|…)\]|<(?:snip|\.\.\.)>)\s{0,200}")
"""Dots that somebody who copied the output left for what was left out."""
_NAMES = "|".join(sorted(_COLLECTIVES, reverse=True))
_COMMAND = re.compile(rf"\b(?P<collective>{_NAMES})_perf(?:_mpi)?['\"\\]{{0,2}}\s{{1,20}}-{{1,2}}[a-zA-Z]")


def _event_of(text: str, number: int) -> _Event | None:
    """Return the event that a line is; None for a row, a failure and other output."""
    bare = text.lstrip("# \t*>|\\")
    for kind, pattern in _PATTERNS.get(bare[:1], ()):
        if match := pattern.match(bare):
            values = {name: value.strip() for name, value in match.groupdict().items() if value is not None}
            return _Event(kind, number, values)
    if bare.startswith(("size", "bytes")) and (match := _HEADER.match(bare)):
        labels = match["labels"].replace("# wrong", "#wrong").replace("|", " ").split()
        header = _TableHeader(
            has_redop="redop" in labels or "op" in labels,
            has_root="root" in labels,
            halves=1 if labels.count("time") + labels.count("cputime") == 1 else 2,
            counts_wrong="#wrong" in labels or "wrong" in labels,
            per_iteration="i_min" in labels,
            in_milliseconds="res" in labels,
        )
        return _Event("header", number, header=header)
    if _ELISION.fullmatch(text):
        return _Event("elision", number)
    if "_perf" in text and (match := _COMMAND.search(text)):
        return _Event("command", number, {"program": match["collective"] + "_perf"})
    return None


def _collective_of(program: str) -> str | None:
    """Return `all_reduce` for `./build/all_reduce_perf_mpi`; None for a program that is not of nccl-tests."""
    name = program.rpartition("/")[2].strip("'\"")
    for suffix in ("_mpi", ".exe", "_perf"):
        name = name.removesuffix(suffix)
    return name if name in _COLLECTIVES else None


# 1. Lines: failures.

_Cause = Literal["cuda", "timeout", "remote", "comm", "trace", "stopped"]


@dataclass(frozen=True)
class _Failure:
    """A line that reports a failure."""

    cause: _Cause
    text: str
    number: int
    """The line's number."""
    process: str


_FAILURES: tuple[tuple[_Cause, re.Pattern[str]], ...] = (
    # A message names the cause after who reports it, `Test NCCL failure … 'unhandled cuda error'`: the first counts.
    (
        "cuda",
        re.compile(
            r"unhandled cuda error|Test CUDA failure|\b[Cc]uda failure\b|CUDA failure \S|\bCUDA error\b",
        ),
    ),
    (
        "timeout",
        re.compile(
            r"Test timeout \(|DUE TO (?:\w+ )?TIME LIMIT|time limit for job execution has been|APPLICATION TIMED OUT"
            r"|DeadlineExceeded|timeout: (?:sending signal|the monitored command)"
            r"|[Ee]xit(?:ed)?(?: with)?(?: exit)? (?:code|status):? 124\b"
            r"|[Ww]alltime \S{1,20} exceeded|[Cc]ommand timed out"
        ),
    ),
    ("remote", re.compile(r"remote process exited or there was a network error")),
    (
        "comm",
        re.compile(
            r"Test NCCL failure|\bNCCL failure\b|unhandled system error|nccl(?:System|Internal|Remote)Error"
            r"|\bNCCL error\b"
        ),
    ),
    ("trace", re.compile(r"\bTest failure\b")),
    (
        "stopped",
        re.compile(
            r"non-zero (?:exit )?(?:status|code)|exited on signal|[Ee]xited with (?:exit )?(?:code|status):? [1-9]"
            r"|terminated with exit code [1-9]|BAD TERMINATION OF|Segmentation fault|Process received signal"
            r"|CANCELLED AT|\boom[-_ ]?kill|OOMKilled|MPI_ABORT was invoked|error while loading shared libraries"
            r"|Invalid number of GPUs|not enough slots available|was unable to (?:launch|find|start)"
            r"|driver version is insufficient|is not supported by this test|\bKilled\s{0,4}$"
        ),
    ),
)
_FAILURE_HINTS = (
    "uda error", "CUDA ", "failure", "TIME", "time limit", "timeout", "DeadlineExceeded", "xit", "alltime", "timed out",
    "network error", "system error", "nccl", "NCCL error", "non-zero", "signal", "TERMINATION", "egmentation fault",
    "CANCELLED", "oom", "OOMKilled", "MPI_ABORT", "shared libraries", "Invalid number", "slots", "was unable to",
    "insufficient", "supported by this", "Killed",
)  # fmt: skip
"""Every message of `_FAILURES` contains one of these; most lines need no closer look."""
_OWN_FAILURES = ("Test NCCL failure", "Test CUDA failure", "Test failure", "Test timeout")
"""Messages that only these programs print."""


def _failure_of(text: str, number: int, process: str) -> _Failure | None:
    """Return the failure that a line reports.

    Nothing as short as `timeout` is searched: MPICH ends every output with "0 network timeouts". `# error:` is the last
    message of the library, which a run that ends well may have too.
    """
    if not any(hint in text for hint in _FAILURE_HINTS) or text.lstrip("# ").startswith("error:"):
        return None
    for cause, pattern in _FAILURES:
        if pattern.search(text[:2000]):
            return _Failure(cause, " ".join(text[:2000].split())[:240], number, process)
    return None


def _root_cause(failures: Iterable[_Failure]) -> _Failure | None:
    """Return the failure that explains the others.

    A CUDA error is nobody's consequence; of communication errors and timeouts the first leads to the others; "remote
    process exited" is what every other rank says; launchers and traces say only that something happened.
    """
    ordered = sorted(failures, key=lambda failure: failure.number)
    for causes in (("cuda",), ("timeout", "comm"), ("remote",), ("stopped",), ("trace",)):
        if first := next((failure for failure in ordered if failure.cause in causes), None):
            return first
    return None


# 2. Rows: size, count, type, operation, root, and two halves of time, algbw, busbw, wrong.

_TYPE_BYTES = {
    "int8": 1, "uint8": 1, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8, "half": 2, "float": 4, "double": 8,
    "bfloat16": 2, "f8e4m3": 1, "f8e5m2": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "char": 1, "int": 4,
}  # fmt: skip
"""Bytes of an element of each type."""
_REDOPS = frozenset(("sum", "prod", "max", "min", "avg", "mulsum", "none"))

_FIRST_COLUMNS = re.compile(r"(?<![^\s|#])\d{1,20}[ \t|]{1,40}\d{1,20}[ \t|]{1,40}(?P<dtype>[a-z]\w{2,11})(?![^\s|])")
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]\d\d+)?|-?nan|-?inf")
_WRONG = re.compile(r"N/A|\d+(?:\.\d+)?e[+-]\d\d+|\d+|-?nan")
_GLUED = re.compile(r"(?:N/A|\d+(?:\.\d+)?(?:e[+-]\d\d+)?)(?=[^\d.\se+-])")
"""A number, and a character of other output right after it."""
_ROOT = re.compile(r"-1|\d{1,7}")
_DATE_OR_CLOCK = re.compile(r"\d{4}-\d\d-\d\d|\d\d:\d\d:\d\d")
_CUT_WORD = re.compile(r"[a-z]\w{0,11}|N/?A?|-|\d+\.|\d[\d.]*e[+-]?")
_LARGEST_ERROR = re.compile(r"\d(?:\.\d+)?e(?:-\d+|\+00)")
"""A largest error, which the last column had before 2.13: no count is printed like that."""


class _PrintedHalf(NamedTuple):
    """The values of one half of a row as they were printed."""

    time: str
    algbw: str
    busbw: str
    wrong: str


@dataclass(frozen=True)
class _PrintedRow:
    """The values of a row as they were printed."""

    size: int
    count: int
    dtype: str
    redop: str | None
    root: int | None
    halves: tuple[_PrintedHalf, ...]
    """One half if the row has, or was cut before, the second one."""
    per_iteration: bool
    """Whether it has the columns of `-I`."""

    def to_row(self, *, counts_wrong: bool, in_milliseconds: bool) -> NcclRow:
        """Return the row as numbers; without `counts_wrong`, the last column is the largest error."""
        halves = []
        for half in self.halves:
            time, wrong = parse_number(half.time), parse_number(half.wrong) if counts_wrong else None
            halves.append(
                Half(
                    time_us=time * 1000 if time is not None and in_milliseconds else time,
                    algbw_gb_s=parse_number(half.algbw),
                    busbw_gb_s=parse_number(half.busbw),
                    wrong=None if wrong is None else round(wrong),
                )
            )
        return NcclRow(
            size_bytes=self.size,
            count=self.count,
            dtype=self.dtype,
            redop=self.redop,
            root=self.root,
            out_of_place=halves[0],
            in_place=halves[1] if len(halves) > 1 else None,
        )


def _row_starts(text: str) -> list[int]:
    """Return where rows begin in a line, as far as their first three columns tell."""
    return [
        match.start()
        for match in _FIRST_COLUMNS.finditer(text)
        if match["dtype"] in _TYPE_BYTES or _whole_row(text[match.start() : match.start() + 1000])
    ]


def _could_be_cut_row(text: str) -> bool:
    """Return whether the text is the beginning of a row, and nothing else."""
    words = text.replace("|", " ").split(maxsplit=26)
    if not 0 < len(words) <= 25:
        return False
    *whole, last = words
    if any(not _fits_column(word, column) for column, word in enumerate(whole)):
        return False
    return _fits_column(last, len(whole)) or (len(whole) >= 2 and _CUT_WORD.fullmatch(last) is not None)


def _fits_column(word: str, column: int) -> bool:
    if column < 2:
        return word.isdecimal() and len(word) <= 20
    if column == 2:
        return word in _TYPE_BYTES
    return _NUMBER.fullmatch(word) is not None or word in ("N/A", "-1") or (column == 3 and word in _REDOPS)


def _ends_like_row(text: str) -> bool:
    """Return whether a line ends as a row does; its beginning may be something else."""
    words = text.replace("|", " ").split(maxsplit=26)
    while words and _DATE_OR_CLOCK.fullmatch(words[-1]):
        words.pop()
    return "." in "".join(words[-8:]) and any(
        len(words) >= width and bool(_halves(_leading_values(words[-width:]))) for width in (8, 16)
    )


def _whole_row(text: str, *, per_iteration: bool = False) -> _PrintedRow | None:
    """Return the row that begins where the text does, or None if it lacks values. Other output may follow it.

    With `per_iteration`, a row without the columns of `-I` lacks values.
    """
    row = _parse_row(text)
    if row is None or len(row.halves) != 2 or row.size < row.count * _TYPE_BYTES.get(row.dtype, 0):
        # A size of fewer bytes than `count` elements lost its first digits.
        return None
    return row if row.per_iteration or not per_iteration else None


def _parse_row(text: str) -> _PrintedRow | None:
    """Return the row, of one half or two, with which the text begins."""
    words = text.replace("|", " ").split(maxsplit=40)
    if len(words) < 7 or not (words[0].isdecimal() and words[1].isdecimal()):
        return None
    size, count, dtype, *rest = words
    redop = rest.pop(0) if rest[0] in _REDOPS else None
    root = None
    values = _leading_values(rest)
    # A half has four columns, so a value more than that is the root.
    if len(values) % 4 == 1 and _ROOT.fullmatch(values[0]):
        root = int(values.pop(0))
    halves = _halves(values)
    if not halves or len(size) > 20 or len(count) > 20:
        return None
    return _PrintedRow(int(size), int(count), dtype, redop, root, halves, per_iteration=len(values) == 16)


def _leading_values(words: Sequence[str]) -> list[str]:
    """Return the numbers with which the words begin: a date and other output may follow them."""
    values: list[str] = []
    for word in words:
        if _NUMBER.fullmatch(word) or word in ("N/A", "-1"):
            values.append(word)
            continue
        if not _DATE_OR_CLOCK.fullmatch(word) and (glued := _GLUED.match(word)):
            values.append(glued[0])
        break
    return values


def _halves(values: Sequence[str]) -> tuple[_PrintedHalf, ...]:
    """Return the halves that the values of a row are; none if their number or their kinds are not those of halves."""
    width = {4: 4, 8: 4, 16: 8}.get(len(values))
    if width is None:
        return ()
    halves = tuple(_PrintedHalf(*values[begin : begin + 4]) for begin in range(0, len(values), width))
    plausible = all(_WRONG.fullmatch(half.wrong) and not {"N/A", "-1"} & set(half[:3]) for half in halves)
    return halves if plausible else ()


def _soundness(row: _PrintedRow | None) -> int:
    """Return -1 without a row, else 2 if the size is a multiple of the data of `count` elements, and 1 more if
    bandwidth, size and time agree.
    """
    if row is None:
        return -1
    data = row.count * _TYPE_BYTES.get(row.dtype, 0)
    return 2 * (data > 0 and row.size % data == 0) + _is_consistent(row)


def _is_consistent(row: _PrintedRow) -> bool:
    """Return whether algbw is size by time, in µs or ms, as far as the printed digits tell."""
    for half in row.halves:
        time, algbw = parse_number(half.time), parse_number(half.algbw)
        if not time or algbw is None:
            return False
        expected = row.size / time / 1e3
        if not any(abs(algbw - value) <= 0.02 * value + 0.011 for value in (expected, expected / 1e3)):
            return False
    return True


# 3. Processes.


@dataclass
class _ProcessReader:
    """Collect the events of one process."""

    events: list[_Event] = field(default_factory=list)
    header: _TableHeader | None = None
    in_table: bool = False
    pending: str = ""
    """A row that is not whole yet."""
    pending_number: int = 0
    """The line where it begins."""
    pending_footer: str = ""
    """A line of the footer that is not whole yet."""

    @property
    def per_iteration(self) -> bool:
        return self.header is not None and self.header.per_iteration

    def read_event(self, event: _Event) -> None:
        if event.kind in _OPENINGS or event.kind in _FOOTERS or event.kind == "rank":
            self.end_pending()
            self.in_table = event.kind == "header"
        elif event.kind == "command":
            self.in_table = False
        if event.kind in _OPENINGS:
            self.header = event.header
        self.events.append(event)

    def begin_row(self, text: str, number: int) -> None:
        """Read a text that begins like a row. It may be the rest of the pending row all the same."""
        self.in_table = True
        alone = _whole_row(text, per_iteration=self.per_iteration)
        joined = _whole_row(self.pending + text) if self.pending else None
        # A size that was cut leaves its last digits here: count, bandwidth and time show whose they are.
        if joined and _soundness(joined) > _soundness(alone):
            self.events.append(_Event("row", self.pending_number, row=joined))
            self.pending = ""
            return
        if len(self.pending.split()) == 1:
            # One number in a table is no row, unless the output ends with it.
            self.pending = ""
        self.end_pending()
        if alone:
            self.events.append(_Event("row", number, row=alone))
        else:
            self.pending, self.pending_number = text, number

    def continue_row(self, text: str) -> bool:
        """Add the text to the pending row if it fits there; return whether it does.

        A row may be cut anywhere, and copies often lack the blanks at the ends of lines, so a number may be in both
        pieces or end with the first one: the row whose numbers agree is taken.
        """
        if not self.pending:
            return False
        texts = (self.pending + text, f"{self.pending} {text}")
        rows = [row for joined in texts if (row := _whole_row(joined, per_iteration=self.per_iteration))]
        if rows:
            row = next(filter(_is_consistent, rows), rows[0])
            self.events.append(_Event("row", self.pending_number, row=row))
            self.pending = ""
            return True
        if _could_be_cut_row(texts[0]):
            self.pending = texts[0]
            return True
        return False

    def end_pending(self) -> None:
        """Keep the pending row, which stays incomplete: as a row if the table has one half, else as a partial one."""
        if self.pending:
            row = _parse_row(self.pending)
            one_half = row if row and len(row.halves) == 1 else None
            if one_half and self.header and self.header.halves == 1:
                self.events.append(_Event("row", self.pending_number, row=one_half))
            else:
                self.events.append(_Event("partial", self.pending_number, row=one_half, text=self.pending.strip()))
        self.pending = ""

    def end(self) -> list[_Event]:
        """Return all events of the process."""
        self.end_pending()
        return self.events


@dataclass
class _LogReader:
    """Hand each line of a log to the reader of its process, and collect failures."""

    processes: dict[str, _ProcessReader] = field(default_factory=lambda: defaultdict(_ProcessReader))
    failures: list[_Failure] = field(default_factory=list)
    table_process: str = ""
    """The process whose table came last. Lines without a name are its, unless a process without a name has a table."""

    def read(self, line: LogLine) -> None:
        text = line.text
        if not text or text.isspace():
            return
        name = line.process
        if not name and self.table_process and "" not in self.processes:
            name = self.table_process
        if event := _event_of(text, line.number):
            self.read_event(name, event)
            return
        if failure := _failure_of(text, line.number, name):
            self.failures.append(failure)
        if starts := _row_starts(text):
            process = self.processes[name]
            self.table_process = name
            if before := text[: starts[0]].strip(" \t#|>"):
                process.continue_row(before)
            for begin, end in zip(starts, (*starts[1:], len(text)), strict=True):
                process.begin_row(text[begin:end], line.number)
        elif name in self.processes:
            self.read_piece(name, text, line.number)

    def read_event(self, name: str, event: _Event) -> None:
        self.processes[name].read_event(event)
        if event.kind not in ("command", "elision"):
            self.table_process = name

    def read_piece(self, name: str, text: str, number: int) -> None:
        """Read a line that may be a piece of a row or of the footer."""
        process = self.processes[name]
        if process.continue_row(text):
            return
        if process.in_table and not process.pending and _could_be_cut_row(text):
            process.pending, process.pending_number = text, number
        elif process.pending_footer and (event := _event_of(process.pending_footer + text, number)):
            process.pending_footer = ""
            self.read_event(name, event)
        elif text.lstrip(" #").startswith(("Out", "Avg")):
            process.pending_footer = text
        elif process.in_table and _ends_like_row(text):
            process.events.append(_Event("partial", number, text=text.strip()))


# 4. Runs.

_MOST_TABLES = 1000
"""Tables at once that are told apart."""


def _split_runs(events: Iterable[_Event]) -> list[list[_Event]]:
    """Split the events of one process into runs, also of several that printed at the same time.

    Runs that follow each other begin with an opening and end with a footer. Footers or devices alone, after an opening
    that had none yet, show that the lines of several are mixed, as those of a program without MPI under mpirun.
    """
    runs: list[list[_Event]] = []
    unfinished: list[list[_Event]] = []
    counts: Counter[_Kind] = Counter()
    pieces = _cut_at_repetitions(events)
    for piece, following in zip(pieces, (*pieces[1:], None), strict=True):
        unfinished.append(piece)
        counts.update(event.kind for event in piece)
        tables = max(counts[kind] for kind in _ONCE)
        footers = max(counts["bounds"], counts["average"])
        is_finished = footers >= tables and (tables > 0 or not _OPENINGS & counts.keys())
        if following and (_begins_amid(following) or not is_finished):
            continue
        runs += _unmixed(unfinished, tables) if _is_mixed(unfinished, tables) else unfinished
        unfinished, counts = [], Counter()
    return runs


def _cut_at_repetitions(events: Iterable[_Event]) -> list[list[_Event]]:
    """Cut where an event comes again that a run has once, or where a table begins after a footer."""
    pieces: list[list[_Event]] = [[]]
    kinds: set[_Kind] = set()
    ranks: set[str] = set()
    for event in events:
        kind = event.kind
        if kind in _OPENINGS:
            is_next = kind in kinds or bool(kinds & _BODY)
        elif kind == "rank":
            is_next = event.values["rank"] in ranks or bool(kinds & _BODY)
        elif kind == "command":
            is_next = bool(kinds & _BODY)
        elif kind in ("row", "partial"):
            is_next = bool(kinds & _FOOTERS)
        else:
            is_next = kind in _FOOTERS and (kind in kinds or "concluded" in kinds)
        if is_next:
            pieces.append([])
            kinds, ranks = set(), set()
        pieces[-1].append(event)
        kinds.add(kind)
        if kind == "rank":
            ranks.add(event.values["rank"])
    return [piece for piece in pieces if piece]


def _begins_amid(piece: Sequence[_Event]) -> bool:
    """Return whether a piece begins with an event that is never the first of a run."""
    return piece[0].kind in ("rank", "devices", *_FOOTERS)


def _is_mixed(pieces: Sequence[Sequence[_Event]], tables: int) -> bool:
    """Return whether the pieces are of runs that printed at the same time."""
    kinds = [{event.kind for event in piece} for piece in pieces]
    opened = [piece for piece in kinds if piece & _OPENINGS]
    if len(opened) < 2:
        return False
    amid = [at for at, piece in enumerate(pieces) if at > 0 and _begins_amid(piece)]
    if len(amid) > 1 or any(kinds[at] & _FOOTERS for at in amid):
        return True
    # Openings without a row between them, after which each size comes as often as there are tables.
    rows = [event.row for piece in pieces for event in piece if event.kind == "row" and event.row][:tables]
    keys = {(row.size, row.dtype, row.redop, row.root) for row in rows}
    return not any(piece & _BODY for piece in opened[:-1]) and len(rows) == tables and len(keys) == 1


def _unmixed(pieces: Sequence[Sequence[_Event]], tables: int) -> list[list[_Event]]:
    """Return the events of each of the runs that printed at the same time.

    The n-th event of a kind is of the n-th run. A row is of the run whose last size is the nearest smaller one.
    """
    runs: list[list[_Event]] = [[] for _ in range(min(max(1, tables), _MOST_TABLES))]
    counts: Counter[tuple[_Kind, str]] = Counter()
    last_sizes: list[int | None] = [None] * len(runs)
    for event in sorted((event for piece in pieces for event in piece), key=lambda event: event.number):
        if event.kind == "row" and event.row:
            size = event.row.size
            smaller = [(last, -run) for run, last in enumerate(last_sizes) if last is not None and last < size]
            if smaller:
                run = -max(smaller)[1]
            elif None in last_sizes:
                run = last_sizes.index(None)
            else:
                run = last_sizes.index(size) if size in last_sizes else 0
            last_sizes[run] = size
        else:
            key = (event.kind, event.values.get("rank", ""))
            run = min(counts[key], len(runs) - 1)
            counts[key] += 1
        runs[run].append(event)
    return [run for run in runs if run]


# 5. The figures of a run.


@dataclass(frozen=True)
class _RunEvents:
    """The events of one run."""

    process: str
    events: Sequence[_Event]

    @property
    def begin(self) -> int:
        """Line where it begins."""
        return self.events[0].number

    @property
    def has_output(self) -> bool:
        """Return whether the program itself printed something, rather than its command alone."""
        return any(event.kind not in ("command", "elision", "partial") or event.row for event in self.events)

    def first(self, kind: _Kind) -> _Event | None:
        return next((event for event in self.events if event.kind == kind), None)

    def last(self, kind: _Kind) -> _Event | None:
        return next((event for event in reversed(self.events) if event.kind == kind), None)

    def collective(self, rows: Sequence[NcclRow], header: _TableHeader | None) -> str | None:
        """Return the collective that the program says it ran, else the one of the columns, else that of the command."""
        for event in (self.first("starting"), self.first("concluded")):
            if event and (name := _collective_of(event.values.get("program", ""))):
                return name
        command = self.last("command")
        return _infer_collective(rows, header) or (_collective_of(command.values["program"]) if command else None)

    def devices(self) -> tuple[int | None, int | None, str | None]:
        """Return the number of ranks and of nodes and the name of the GPUs, as the list of devices says."""
        listed = {int(event.values["rank"]): event for event in self.events if event.kind == "rank"}
        if not listed:
            return None, None, None
        ranks: int | None = max(listed) + 1
        is_complete = len(listed) == ranks
        last = max(event.number for event in listed.values())
        table = next((event.number for event in self.events if event.kind in ("header", "row")), last)
        if is_complete and any(event.kind == "elision" and last < event.number < table for event in self.events):
            # More ranks may have been left out.
            ranks, is_complete = None, False
        groups = Counter(event.values.get("group") for event in listed.values())
        if is_complete and len(groups) > 1 and len(set(groups.values())) == 1:
            # Each group is a communicator of its own.
            ranks = next(iter(groups.values()))
        hosts = {event.values["host"] for event in listed.values()}
        names = {event.values["name"] for event in listed.values()}
        return ranks, len(hosts) if is_complete else None, names.pop() or None if len(names) == 1 else None


def _failures_by_run(runs: Sequence[_RunEvents], failures: Iterable[_Failure]) -> Mapping[int, list[_Failure]]:
    """Return the failures of each run, by index: those after its beginning, of the same process if that has a run."""
    by_run: dict[int, list[_Failure]] = defaultdict(list)
    begins = [run.begin for run in runs]
    of_process: dict[str, list[int]] = defaultdict(list)
    for index, run in enumerate(runs):
        of_process[run.process].append(index)
    for failure in failures:
        own = of_process.get(failure.process, [])
        if begun := bisect_right(own, failure.number, key=lambda index: begins[index]):
            by_run[own[begun - 1]].append(failure)
        elif begun := bisect_right(begins, failure.number):
            by_run[begun - 1].append(failure)
        elif runs and failure.cause not in ("stopped", "trace") and not runs[0].first("bounds"):
            by_run[0].append(failure)
    return by_run


def _run_of(log: Log, run: _RunEvents, failures: Sequence[_Failure]) -> Run:
    """Return the figures of a run and its verdict."""
    header = next((event.header for event in run.events if event.header), None)
    printed = [event.row for event in run.events if event.kind == "row" and event.row]
    partial = [event for event in run.events if event.kind == "partial"]
    if not printed and header is None and len(partial) > 1 and all(event.row for event in partial):
        # A table of one half whose header was not copied.
        printed, partial = [event.row for event in partial if event.row], []
    halves = [half for row in printed for half in row.halves]
    counts_wrong = header.counts_wrong if header else not any(_LARGEST_ERROR.fullmatch(half.wrong) for half in halves)
    in_milliseconds = _is_in_milliseconds(printed, header)
    rows = tuple(row.to_row(counts_wrong=counts_wrong, in_milliseconds=in_milliseconds) for row in printed)
    collective = run.collective(rows, header)
    version = next((event for event in run.events if event.kind == "version" and "tool" in event.values), None)
    parameters, reduced = run.first("parameters"), run.first("reduced")
    bounds, average = run.first("bounds"), run.first("average")
    missing_size = None
    if parameters and "step" in parameters.values and collective != "alltoallv":
        largest, step = int((reduced or parameters).values["max"]), int(parameters.values["step"])
        factor, increment = (None, step) if parameters.values["by"] == "bytes" else (step, None)
        missing_size = _missing_size(rows, largest, factor, increment)
    facts = _RunFacts(
        rows=rows,
        partial_rows=len(partial),
        out_of_bounds=int(bounds.values["count"]) if bounds else None,
        out_of_bounds_failed=bounds is not None and bounds.values["state"] == "FAILED",
        average_failed=average is not None and average.values.get("state") == "FAILED",
        concluded=average is not None or run.first("concluded") is not None,
        failures=failures,
        is_cut=bool(partial) and partial[-1].number > max((e.number for e in run.events if e.kind == "row"), default=0),
        missing_size=missing_size,
        left_out=run.first("elision") is not None,
        reduced_to=int(reduced.values["max"]) if reduced else None,
        counts_wrong=counts_wrong,
        validated=not (parameters and parameters.values.get("validation") == "0")
        and not (halves and all(half.wrong == "N/A" for half in halves)),
        warning=next((w.text.partition(" NCCL WARN ")[2][:200] for w in log.warnings if w.number >= run.begin), None),
    )
    verdict, reason = _verdict_of(facts)
    ranks, nodes, device = run.devices()
    return Run(
        source=log.path,
        tool=version.values["tool"] if version else "nccl-tests",
        tool_version=version.values["version"] if version else None,
        collective=collective,
        ranks=ranks,
        nodes=nodes,
        device=device,
        rows=rows,
        partial_rows=len(partial),
        avg_busbw_gb_s=parse_number(average.values["value"]) if average else None,
        out_of_bounds=facts.out_of_bounds,
        wrong_total=_wrong_total(rows),
        verdict=verdict,
        reason=reason,
    )


def _is_in_milliseconds(rows: Sequence[_PrintedRow], header: _TableHeader | None) -> bool:
    """Return whether times are in ms, as the header says or, without a header, size, time and bandwidth of the rows."""
    if header:
        return header.in_milliseconds
    votes: Counter[bool] = Counter()
    for row in rows:
        for half in row.halves:
            time, algbw = parse_number(half.time), parse_number(half.algbw)
            if time and algbw and algbw >= 0.1:
                votes[row.size / time / 1e3 / algbw > 30] += 1
    return votes[True] > votes[False]


def _infer_collective(rows: Sequence[NcclRow], header: _TableHeader | None) -> str | None:
    """Return the only collective that the columns of the rows, and the ratios between them, leave possible.

    `busbw / algbw` is 2(n-1)/n for all_reduce, (n-1)/n for collectives that divide the data among ranks, and 1 for the
    rest. `size / (count * bytes of the type)` is n for those that divide the data, and 1 for the rest. With one rank
    bandwidths are 0, which says nothing.
    """
    if not rows:
        return None
    redops, roots = {row.redop for row in rows}, {row.root for row in rows}
    is_reducing, is_rooted = not redops & {None, "none"}, not roots & {None, -1}
    has_no_values = redops == {None} and roots == {None}
    # Before 2.13, alltoall alone has a column for the operation and leaves it blank; all_gather, sendrecv and hypercube
    # have neither an operation nor a root.
    is_alltoall = header is not None and header.has_redop and not header.has_root and has_no_values
    lacks_columns = header is not None and not header.has_redop and not header.has_root and has_no_values
    ratios = [
        half.busbw_gb_s / half.algbw_gb_s
        for row in rows
        for half in (row.out_of_place, row.in_place)
        if half and half.algbw_gb_s and half.busbw_gb_s and half.algbw_gb_s >= 2  # below, digits are too few
    ]
    shares = {
        row.size_bytes / (row.count * _TYPE_BYTES[row.dtype])
        for row in rows
        if row.count > 0 and row.size_bytes > 0 and row.dtype in _TYPE_BYTES
    }
    share = shares.pop() if len(shares) == 1 else 0.0
    if not ratios or share < 1 or share != int(share):
        return "alltoall" if is_alltoall else None
    ratio = median(ratios)
    cases = (
        ("reduce", is_reducing and is_rooted),
        ("reduce_scatter", is_reducing and share > 1),
        ("all_reduce", is_reducing and ratio > 0.99),
        ("broadcast", is_rooted and share == 1 and ratio > 0.99),
        ("alltoall", is_alltoall),
        ("all_gather", lacks_columns and share > 1 and abs(ratio - (share - 1) / share) < 0.01),
        ("sendrecv", lacks_columns and share == 1 and ratio > 0.99),
    )
    return next((collective for collective, holds in cases if holds), None)


def _missing_size(
    rows: Sequence[NcclRow], largest: int | None, factor: int | None, increment: int | None
) -> int | None:
    """Return the size that had to follow the last row; None if there is none, or nothing tells it."""
    if not rows or largest is None or not (factor or increment):
        return None
    last = rows[-1].size_bytes
    following = last * factor if factor else last + (increment or 0)
    return following if last < following <= largest else None


# 5. The verdict of a run.

_VERDICTS: dict[_Cause, RunVerdict] = {
    "cuda": "cuda-failure",
    "timeout": "timeout",
    "comm": "comm-failure",
    "remote": "comm-failure",
    "stopped": "failed",
    "trace": "failed",
}


@dataclass(frozen=True)
class _RunFacts:
    """What decides the verdict of a run."""

    rows: Sequence[NcclRow]
    partial_rows: int = 0
    out_of_bounds: int | None = None
    out_of_bounds_failed: bool = False
    average_failed: bool = False
    concluded: bool = False
    """Whether something came that is printed after the line about bounds."""
    failures: Sequence[_Failure] = ()
    is_cut: bool = False
    """Whether the last row is not whole."""
    missing_size: int | None = None
    """The size that had to follow the last row, if that was not the last size."""
    left_out: bool = False
    """Whether somebody who copied the output left out parts, and marked them with dots."""
    reduced_to: int | None = None
    """The largest size, if the program reduced it for lack of memory."""
    counts_wrong: bool = True
    """Whether the last column counts wrong elements; before 2.13 it was the largest error."""
    validated: bool = True
    warning: str | None = None
    """The first warning of NCCL."""


def _wrong_total(rows: Iterable[NcclRow]) -> int | None:
    """Return the wrong elements of all rows; None if nothing was counted."""
    halves = (half for row in rows for half in (row.out_of_place, row.in_place) if half)
    counted = [half.wrong for half in halves if half.wrong is not None]
    return sum(counted) if counted else None


def _verdict_of(facts: _RunFacts) -> tuple[RunVerdict, str]:
    """Return the verdict and its reason."""
    wrong, bounds = _wrong_total(facts.rows) or 0, facts.out_of_bounds or 0
    if wrong or bounds or facts.out_of_bounds_failed:
        return "wrong-data", f"wrong: {wrong} wrong elements in the rows read, {bounds} checks out of bounds"
    if failure := _root_cause(facts.failures):
        return _VERDICTS[failure.cause], f"line {failure.number}: {failure.text}"
    if facts.average_failed:
        return "failed", "the average bus bandwidth is below what NCCL_TESTS_MIN_BW asks for"
    warning = f"; NCCL warned: {facts.warning}" if facts.warning else ""
    if not facts.rows:
        return "no-data", f"no row of results{warning}"
    if missing := _missing_part(facts):
        return "truncated", f"truncated: {missing}{warning}"
    reason = ["complete"]
    if facts.reduced_to is not None:
        reason.append(f"the largest size was reduced to {facts.reduced_to} bytes for lack of memory")
    if facts.left_out:
        reason.append("parts are left out where the output has dots")
    if facts.partial_rows:
        reason.append(f"{facts.partial_rows} row{'s' if facts.partial_rows > 1 else ''} could not be read")
    if not facts.validated:
        reason.append("data were not validated")
    elif facts.out_of_bounds is None:
        reason.append("the line `Out of bounds values` is missing")
    return "ok", "; ".join(reason)


def _missing_part(facts: _RunFacts) -> str:
    """Return what shows that the output is not whole; nothing if it is."""
    if facts.is_cut:
        return "the last row is cut"
    if facts.out_of_bounds is None:
        if not facts.concluded:
            return "no footer"
        if facts.validated and not (facts.counts_wrong and _wrong_total(facts.rows) == 0):
            return "no line `Out of bounds values`, and the rows do not say whether the data were right"
    if facts.missing_size is not None and not facts.left_out:
        return f"no row of {facts.missing_size} bytes, though it was asked for"
    return ""


# JSON: of `-J`, and of two forks.

_AVERAGES = (("average_bus_bandwidth", "bandwidth"), ("average_bus_bandwidith", "bandwidith"))
"""The second has the typing error of the first releases with JSON."""
_TIMES = ("time", "cpu_time", "timeUsec")
_WRONG_COUNTS = ("nwrong", "wrong", "#wrong", "wrongElts", "numWrong", "errors")
_LONGEST_EXCERPT = 200


def _parse_official_json(source: str, document: JsonDocument, top: Mapping[str, object]) -> ParsedOutput[Run]:
    """Read the document of nccl-tests."""
    config = json_object(top.get("config"))
    rows: list[NcclRow] = []
    unread = []
    is_cut = False
    for value in json_list(top.get("results")):
        entry = json_object(value)
        size, count = _json_integer(entry.get("size")), _json_integer(entry.get("count"))
        halves = (entry.get("out_of_place"), entry.get("in_place"))
        is_cut = (
            size is None
            or count is None
            or not {"out_of_place", "in_place"} <= entry.keys()
            or any(isinstance(half, dict) and not {"bus_bw", "nwrong"} <= half.keys() for half in halves)
        )
        if size is None or count is None or is_cut:
            unread.append(f"results: {value!r}"[:_LONGEST_EXCERPT])
            continue
        out_of_place, in_place = (_json_half(json_object(half), "alg_bw", "bus_bw") for half in halves)
        rows.append(_json_row(size, count, entry, out_of_place, in_place if halves[1] else None))
    bounds = json_object(top.get("out_of_bounds"))
    out_of_bounds = _json_integer(bounds.get("count"))
    average = next((json_object(top[key]) for key, _ in _AVERAGES if key in top), {})
    arguments = json_list(top.get("args"))
    collective = (_collective_of(str(arguments[0])) if arguments else None) or _infer_collective(rows, None)
    failures = []
    if out_of_bounds is None:
        # The run did not come to its end: the last errors of the library are the cause.
        errors = [str(error) for error in json_list(top.get("errors")) if str(error).strip()]
        number = document.number
        failures = [_failure_of(e, number, "") or _Failure("comm", e[:240], number, "") for e in errors]
    missing_size = None
    if collective != "alltoallv":
        limits = (_json_integer(config.get(key)) for key in ("maximum_bytes", "step_factor", "step_bytes"))
        missing_size = _missing_size(rows, *limits)
    facts = _RunFacts(
        rows=rows,
        partial_rows=len(unread),
        out_of_bounds=out_of_bounds,
        out_of_bounds_failed=str(bounds.get("okay", "")).lower() == "false",
        average_failed=str(average.get("okay", "")).lower() == "false",
        concluded=bool(average),
        failures=failures,
        is_cut=is_cut,
        missing_size=missing_size,
        validated=_json_integer(config.get("validation")) != 0,
    )
    verdict, reason = _verdict_of(facts)
    # The list of devices has one device of each process.
    devices = [json_object(device) for device in json_list(config.get("devices"))]
    threads, gpus = _json_integer(config.get("nthreads")), _json_integer(config.get("ngpus"))
    names = {str(device["device_info"]) for device in devices if device.get("device_info")}
    run = Run(
        source=source,
        collective=collective,
        ranks=len(devices) * threads * gpus if devices and threads and gpus else None,
        nodes=len({device.get("hostname") for device in devices}) or None,
        device=names.pop() if len(names) == 1 else None,
        rows=tuple(rows),
        partial_rows=len(unread),
        avg_busbw_gb_s=next((json_number(average[key]) for _, key in _AVERAGES if key in average), None),
        out_of_bounds=out_of_bounds,
        wrong_total=_wrong_total(rows),
        verdict=verdict,
        reason=reason if document.is_whole else f"{reason}; the document has no end",
    )
    return ParsedOutput((run,), tuple(unread))


def _parse_json_by_size(source: str, document: JsonDocument, groups: Sequence[object]) -> ParsedOutput[Run]:
    """Read a fork's document: each size is the key of an object whose names begin with `oop_` and `ip_`."""
    rows, unread = [], []
    for group in groups:
        for size, value in json_object(group).items():
            entry = json_object(value)
            count = _json_integer(entry.get("count"))
            if not size.isdecimal():
                continue
            if count is None or "ip_busbw" not in entry:
                unread.append(f"benchmark: {size}: {value!r}"[:_LONGEST_EXCERPT])
                continue
            out_of_place, in_place = (
                Half(
                    time_us=json_number(entry.get(f"{side}_time")),
                    algbw_gb_s=json_number(entry.get(f"{side}_algbw")),
                    busbw_gb_s=json_number(entry.get(f"{side}_busbw")),
                    wrong=_json_integer(entry.get(f"{side}_error")),
                )
                for side in ("oop", "ip")
            )
            rows.append(_json_row(int(size[:20]), count, entry, out_of_place, in_place))
    return _run_without_footer(source, document, rows, unread, tool="nccl-tests")


def _parse_flat_json(source: str, document: JsonDocument, entries: Sequence[object]) -> ParsedOutput[Run]:
    """Read the document of rccl-tests: a list with an entry for each half of each size."""
    rows: list[NcclRow] = []
    unread = []
    collective = None
    for value in entries:
        entry = json_object(value)
        size = _json_integer(entry.get("size"))
        if size is None or "busBw" not in entry:
            unread.append(f"{value!r}"[:_LONGEST_EXCERPT])
            continue
        collective = collective or _collective_of(str(entry.get("name", "")))
        half = _json_half(entry, "algBw", "busBw")
        is_in_place = str(entry.get("inPlace")).lower() in ("1", "true")
        if is_in_place and rows and rows[-1].in_place is None and rows[-1].size_bytes == size:
            rows[-1] = rows[-1].model_copy(update={"in_place": half})
        else:
            rows.append(_json_row(size, _json_integer(entry.get("count")) or 0, entry, half, None))
    return _run_without_footer(source, document, rows, unread, tool="rccl-tests", collective=collective)


def _run_without_footer(
    source: str,
    document: JsonDocument,
    rows: Sequence[NcclRow],
    unread: Sequence[str],
    *,
    tool: str,
    collective: str | None = None,
) -> ParsedOutput[Run]:
    """Return the run of a document without a footer: its end shows that the program came to its end."""
    wrong_total = _wrong_total(rows)
    verdict, reason = _verdict_of(
        _RunFacts(
            rows=rows,
            partial_rows=len(unread),
            concluded=document.is_whole,
            validated=wrong_total is not None,
        )
    )
    run = Run(
        source=source,
        tool=tool,
        collective=collective or _infer_collective(rows, None),
        rows=tuple(rows),
        partial_rows=len(unread),
        wrong_total=wrong_total,
        verdict=verdict,
        reason=reason,
    )
    return ParsedOutput((run,), tuple(unread))


def _json_row(size: int, count: int, entry: Mapping[str, object], out_of_place: Half, in_place: Half | None) -> NcclRow:
    return NcclRow(
        size_bytes=size,
        count=count,
        dtype=str(entry.get("type", "")),
        redop=str(entry.get("redop") or "").strip() or None,
        root=_json_integer(entry.get("root")),
        out_of_place=out_of_place,
        in_place=in_place,
    )


def _json_half(values: Mapping[str, object], algbw: str, busbw: str) -> Half:
    return Half(
        time_us=next((json_number(values[key]) for key in _TIMES if key in values), None),
        algbw_gb_s=json_number(values.get(algbw)),
        busbw_gb_s=json_number(values.get(busbw)),
        wrong=next((_json_integer(values[key]) for key in _WRONG_COUNTS if key in values), None),
    )


def _json_integer(value: object) -> int | None:
    number = json_number(value)
    return None if number is None else round(number)


# Runs that were both printed as text and written as JSON.

_ROUNDED = 0.05
"""Largest relative difference that rounding explains: the text has two digits of a large time, more of others."""
_TINY = 0.006
"""µs and GB/s that the two decimals of the text do not show."""


def _is_same_run(printed: Run, written: Run) -> bool:
    """Return whether the numbers of a run that was printed are those of one that was written, but for rounding."""
    if (printed.collective, printed.ranks, printed.verdict, printed.wrong_total, len(printed.rows)) != (
        written.collective, written.ranks, written.verdict, written.wrong_total, len(written.rows)
    ):  # fmt: skip
        return False
    for row, other in zip(printed.rows, written.rows, strict=True):
        if (row.size_bytes, row.count, row.dtype, row.redop, row.root) != (
            other.size_bytes, other.count, other.dtype, other.redop, other.root
        ):  # fmt: skip
            return False
        if not _is_same_half(row.out_of_place, other.out_of_place) or not _is_same_half(row.in_place, other.in_place):
            return False
    return bool(printed.rows)


def _is_same_half(printed: Half | None, written: Half | None) -> bool:
    if printed is None or written is None:
        return printed is written
    figures = ((printed.time_us, written.time_us), (printed.busbw_gb_s, written.busbw_gb_s))
    return printed.wrong == written.wrong and all(
        a == b or (a is not None and b is not None and math.isclose(a, b, rel_tol=_ROUNDED, abs_tol=_TINY))
        for a, b in figures
    )
