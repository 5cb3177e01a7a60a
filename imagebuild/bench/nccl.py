"""Read the runs that nccl-tests and rccl-tests print: tables of every release since 2.0, and the JSON of `-J`.

All that is read becomes events: the parameters, a rank of the device list, a row, a line of the footer, … A line of
text is an event, a failure or other output; the events of a process are split into runs. A JSON document has the events
of one run under other names. The events of a run, and the failures after its beginning, become a `Run` with a verdict.
A run that was both printed as text and written as JSON is merged.

Rows are read by their shape, since headers are often missing; a header says what the shape leaves open.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import zip_longest
from statistics import fmean, median
from types import MappingProxyType
from typing import NamedTuple, get_args

from imagebuild.bench import logs
from imagebuild.bench.ceilings import forced_classes
from imagebuild.bench.logs import JsonDocument, Log, LogLine, Parsed, Setting, excerpt, parse_number
from imagebuild.bench.models import Collective, Half, NcclRow, Run, RunVerdict, bus_ratio
from imagebuild.core.errors import plural


def parse_nccl_text(log: Log) -> Parsed[Run]:
    """Read the runs of a log, in the order in which they begin; nothing if the log is not of these programs."""
    events_by_process, printed_failures = _read_lines(log.lines)
    runs = [run for name, events in events_by_process.items() for run in _split_runs(name, events)]
    runs.sort(key=lambda run: run.begin)
    if not any(run.has_output for run in runs) and any(_OWN_FAILURE.search(f.text) for f in printed_failures):
        runs.append(_RunEvents("", [_Event("starting", 0)]))
    # A shell's trace of a command whose lines another process labels is no run of its own.
    runs = [
        run
        for run, following in zip_longest(runs, runs[1:])
        if run.has_output or following is None or not following.has_output or following.first("command")
    ]
    failures = _failures_by_run(runs, printed_failures)
    parsed: Parsed[Run] = []
    for index, (run, settings) in enumerate(zip(runs, _settings_of(runs, log.settings), strict=True)):
        # A command without output counts as a run if it failed.
        if run.has_output or (failures[index] and run.first("command")):
            warnings = (w.text.partition(" NCCL WARN ")[2][:200] for w in log.warnings if w.number >= run.begin)
            parsed += [_run_of(log.path, run, failures[index], settings, next(warnings, "")), *run.unread]
    return parsed


# Lines: events.

_COLLECTIVES = frozenset(get_args(Collective))
_OPENINGS = frozenset(("version", "starting", "parameters", "devices", "header"))
"""Each comes once, before the rows: a second one belongs to another run."""
_FOOTERS = frozenset(("bounds", "average", "concluded"))
_ASIDE = frozenset(("command", "elision"))
"""What the program itself does not print."""
_BODY = frozenset(("row", "partial", *_FOOTERS))
_AFTER: Mapping[str, Set[str]] = {
    **{kind: {kind, *_BODY} for kind in _OPENINGS},
    **{kind: {kind, "concluded"} for kind in _FOOTERS},
    **dict.fromkeys(("rank", "command"), _BODY),
    **dict.fromkeys(("row", "partial"), _FOOTERS),
}
"""Kind of event → the kinds after which it belongs to the next run."""
_PATTERNS = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("version", r"(?P<tool>nccl-tests) version (?P<version>[^\s(]{1,40})"),
        ("version", r"(?P<tool>rccl-tests): Version (?P<version>\S{1,80})"),
        ("starting", r"Collective test starting: (?P<program>\S{1,300})"),
        (
            "parameters",
            r"nThreads? \d{1,5} nGpus \d{1,5} minBytes (?P<min>\d{1,20}) maxBytes (?P<max>\d{1,20})"
            r"(?: step: (?:(?P<factor>\d{1,20})\(factor\)|(?P<bytes>\d{1,20})\(bytes\)))?"
            r"(?:.{0,200}? validation: (?P<validation>\d{1,3}))?",
        ),
        ("devices", r"Using devices"),
        (
            "rank",
            r"Rank\s{1,12}(?P<rank>\d{1,7})(?:\s{1,12}Group\s{1,12}(?P<group>-?\d{1,7}))?(?:\s{1,12}Pid\s{1,12}\d{1,10})?"
            r"\s{1,12}on\s{1,20}(?P<host>\S{1,300})\s{1,12}device\s{1,12}(?P<device>\d{1,5})\s{1,12}\[(?P<bus>[^\]]{0,40})\](?P<name>.{0,200})",
        ),
        ("reduced", r"Reducing maxBytes to (?P<max>\d{1,20})"),
        ("header", r"size\s{1,40}count\s{1,40}type\b(?P<labels>.{0,400})"),
        ("bounds", r"Out of bounds values\s{0,20}: ?(?P<count>\d{1,15})\s{1,8}(?P<state>OK|FAILED)"),
        ("average", r"Avg bus bandwidth\s{0,20}: ?(?P<value>\S{1,30})(?:\s{1,8}(?P<state>OK|FAILED))?"),
        ("concluded", r"Collective test concluded: (?P<program>\S{1,300})"),
    )
)
_ELISION = re.compile(r"[\s#|]{0,200}(?:\.{3,10}|…|\[(?:\.{3}|…)\]|<(?:snip|\.\.\.)>)\s{0,200}")
"""Dots that somebody who copied the output left for what was left out."""
_COMMAND = re.compile(
    rf"\b(?P<program>(?:{'|'.join(sorted(_COLLECTIVES, reverse=True))})_perf)(?:_mpi)?"
    r"['\"\\]{0,2}\s{1,20}-{1,2}[a-zA-Z]"
)


class _Event(NamedTuple):
    """Hold what a line, or a part of a JSON document, says about a run."""

    kind: str
    """`row`, `partial` (a row that cannot be read), `elision`, `command`, or one of `_PATTERNS`."""
    number: int
    """The line's number."""
    values: Mapping[str, str] = MappingProxyType({})
    """What it says by name, empty where the line leaves it out."""
    row: NcclRow | None = None
    text: str = ""
    """Of a row, also a partial one."""

    @property
    def labels(self) -> Sequence[str]:
        """Return the names of a header's columns; none for other events."""
        return self.values.get("labels", "").replace("# wrong", "#wrong").replace("|", " ").split()


def _event_of(text: str, number: int) -> _Event | None:
    """Return the event that a line is; None for a row, a failure and other output."""
    bare = text.lstrip("# \t*>|\\")
    # After a prefix that is not known, the first # is that of the line.
    for candidate in (bare, text.partition("#")[2].lstrip("# \t")) if "#" in bare else (bare,):
        for kind, pattern in _PATTERNS:
            if match := pattern.match(candidate):
                return _Event(kind, number, {name: value.strip() for name, value in match.groupdict("").items()})
    if _ELISION.fullmatch(text):
        return _Event("elision", number)
    if "_perf" in text and (match := _COMMAND.search(text)):
        return _Event("command", number, match.groupdict())
    return None


def _collective_of(program: str) -> str | None:
    """Return `all_reduce` for `./build/all_reduce_perf_mpi`; None for a program that is not of nccl-tests."""
    name = program.rpartition("/")[2].strip("'\"")
    for suffix in ("_mpi", ".exe", "_perf"):
        name = name.removesuffix(suffix)
    return name if name in _COLLECTIVES else None


# Lines: failures.

_FAILURES: tuple[tuple[int, RunVerdict, str], ...] = (
    (0, "cuda-failure", r"unhandled cuda error|Test CUDA failure|\b[Cc]uda failure\b|CUDA failure \S|\bCUDA error\b"),
    (
        1, "timeout",
        r"Test timeout \(|DUE TO (?:\w+ )?TIME LIMIT|time limit for job execution has been|APPLICATION TIMED OUT"
        r"|DeadlineExceeded|timeout: (?:sending signal|the monitored command)|[Cc]ommand timed out"
        r"|[Ee]xit(?:ed)?(?: with)?(?: exit)? (?:code|status):? 124\b|[Ww]alltime \S{1,20} exceeded",
    ),
    (2, "comm-failure", r"remote process exited or there was a network error"),
    (
        1, "comm-failure",
        r"Test NCCL failure|\bNCCL (?:failure|error)\b|unhandled system error|nccl(?:System|Internal|Remote)Error",
    ),
    (4, "failed", r"\bTest failure\b|^imagebuild: FAILED"),
    (
        3, "failed",
        r"non-zero (?:exit )?(?:status|code)|exited on signal|[Ee]xited with (?:exit )?(?:code|status):? [1-9]"
        r"|terminated with exit code [1-9]|BAD TERMINATION OF|Segmentation fault|Process received signal|CANCELLED AT"
        r"|\boom[-_ ]?kill|OOMKilled|MPI_ABORT was invoked|error while loading shared libraries|Invalid number of GPUs"
        r"|not enough slots available|(?<!PMIx )was unable to (?:launch|find|start)|driver version is insufficient"
        r"|is not supported by this test|\bKilled\s{0,4}$",
    ),
)  # fmt: skip
"""Distance of a message from the cause, verdict, pattern of the message. Of several that a line has, the first counts:
`Test NCCL failure … 'unhandled cuda error'` is an error of CUDA.

No other error causes a CUDA error. The first communication error or timeout causes the others. "remote process exited"
is what all other ranks say. Launchers and traces say only that something happened. Nothing as short as `timeout` is
searched: MPICH ends every output with "0 network timeouts". PMIx, which "was unable to find a usable compression
library", goes on without one.
"""
_ANY_FAILURE = re.compile("|".join(message for _, _, message in _FAILURES))
_OWN_FAILURE = re.compile("Test (?:NCCL failure|CUDA failure|failure|timeout)")
"""Messages that only these programs print."""


class _Failure(NamedTuple):
    """Hold a line that reports a failure. Of several, the least (by distance, then line) is the cause of the others."""

    distance: int
    number: int
    """The line's number."""
    verdict: RunVerdict
    text: str
    process: str = ""


def _failure_of(text: str, number: int, process: str) -> _Failure | None:
    """Return the failure that a line reports.

    `# error:` is the last message of the library, which a run that ends well may have too.
    """
    text = text[:2000]
    if not _ANY_FAILURE.search(text) or text.lstrip("# ").startswith("error:"):
        return None
    found = ((distance, verdict) for distance, verdict, message in _FAILURES if re.search(message, text))
    distance, verdict = next(found)
    return _Failure(distance, number, verdict, " ".join(text.split())[:240], process)


# Lines: rows with size, count, type, operation, root, and two halves of time, algbw, busbw, wrong.

_TYPE_BYTES = {
    "int8": 1, "uint8": 1, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8, "half": 2, "float": 4, "double": 8,
    "bfloat16": 2, "f8e4m3": 1, "f8e5m2": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "char": 1, "int": 4,
}  # fmt: skip
"""Bytes of an element of each type."""
_BLANKS, _WORD_END, _NUMBER = r"[\s|]+", r"(?![^\s|])", r"\d+(?:\.\d+)?(?:e[+-]\d\d+)?"
_VALUE = rf"{_BLANKS}(?:{_NUMBER}|-?nan|-?inf|N/A|-1){_WORD_END}"
_FIGURE = rf"{_BLANKS}({_NUMBER}|-?nan|-?inf){_WORD_END}"
_HALF = rf"{_FIGURE * 3}{_BLANKS}(N/A|\d+(?:\.\d+)?e[+-]\d\d+|\d+|-?nan){_WORD_END}"
_HALVES = rf"{_HALF}(?P<iterations>(?:{_VALUE}){{4}})?{_HALF}(?(iterations)(?:{_VALUE}){{4}})"
"""With `-I`, each half has four more columns, of single iterations."""
_LEAD = re.compile(
    r"(?<![^\s|#])(?P<size>\d{1,20})[\s|]{1,40}(?P<count>\d{1,20})[\s|]{1,40}(?P<dtype>[a-z]\w{2,11})(?![^\s|])"
    rf"(?:{_BLANKS}(?P<redop>sum|prod|max|min|avg|mulsum|none){_WORD_END})?"
)
_FIGURES = re.compile(
    rf"(?:{_BLANKS}(?P<root>-1|\d{{1,7}}){_WORD_END})??{_HALVES}(?!{_VALUE}|{_BLANKS}(?:{'|'.join(_TYPE_BYTES)}){_WORD_END})"
)
"""What follows the lead. What is followed by a type has size and count of another row at its end."""
_END_OF_ROW = re.compile(rf"(?:{_HALVES}|\A{_HALF})(?:{_BLANKS}(?:\d{{4}}-\d\d-\d\d|\d\d:\d\d:\d\d)){{0,2}}[\s|]*\Z")
"""The last columns of a row, or a line of the last half alone."""
_LARGEST_ERROR = re.compile(r"\d(?:\.\d+)?e(?:-\d+|\+00)")
"""A largest error, which the last column had before 2.13: no count is printed like that."""


def _row_event(line: LogLine, labels: Sequence[str]) -> _Event | None:
    """Return the row in a line, whole or partial; None if there is none.

    `labels` are those of the header, if there was one.
    """
    lead = _LEAD.search(line.text)
    if lead is None:
        return None
    size, count, element = int(lead["size"]), int(lead["count"]), _TYPE_BYTES.get(lead["dtype"], 0)
    figures = _FIGURES.match(line.text, lead.end())
    words = [word for word in figures.groups()[1:] if word != figures["iterations"]] if figures else []
    printed = (words[:4], words[4:])
    # A size of fewer bytes than `count` elements lost its first digits.
    is_cut = figures is None or size < count * element or ("i_min" in labels and not figures["iterations"])
    if figures is None or is_cut or (line.is_joined and not _is_consistent(size, count * element, printed)):
        return _Event("partial", line.number, text=line.text.strip()) if element else None
    counted = [(*figures, wrong if _counts_wrong(wrong, labels) else "") for *figures, wrong in printed]
    halves = [_half(*map(parse_number, half)) for half in counted]
    row = NcclRow(
        size_bytes=size,
        count=count,
        dtype=lead["dtype"],
        redop=lead["redop"],
        root=int(figures["root"]) if figures["root"] else None,
        out_of_place=halves[0],
        in_place=halves[1],
    )
    return _Event("row", line.number, {"wrong": " ".join(half[3] for half in printed)}, row, line.text.strip())


def _half(time: float | None, algbw: float | None, busbw: float | None, wrong: float | None) -> Half:
    return Half(time_us=time, algbw_gb_s=algbw, busbw_gb_s=busbw, wrong=None if wrong is None else round(wrong))


def _is_consistent(size: int, data: int, halves: Iterable[Sequence[str]]) -> bool:
    """Return whether the size is a multiple of the elements' bytes, and algbw is size / time."""
    for time, algbw in (map(parse_number, half[:2]) for half in halves):
        if not time or algbw is None or abs(algbw - size / time / 1e3) > 0.1 * size / time / 1e3 + 0.011:
            return False
    return size % data == 0 if data else size == 0


def _counts_wrong(wrong: str, labels: Sequence[str]) -> bool:
    """Return whether the last column counts wrong elements; before 2.13 it was the largest error."""
    if {"#wrong", "wrong", "error"}.isdisjoint(labels):
        return not _LARGEST_ERROR.search(wrong)
    return not {"#wrong", "wrong"}.isdisjoint(labels)


@dataclass
class _Process:
    """Hold the events of one process."""

    events: list[_Event] = field(default_factory=list)
    labels: Sequence[str] = ()
    """Of the header of the table that is read."""
    in_table: bool = False


def _read_lines(lines: Iterable[LogLine]) -> tuple[Mapping[str, Sequence[_Event]], Sequence[_Failure]]:
    """Return the events of each process, by its name, and the failures.

    Lines without a name are of the process whose event came last, unless a process without a name has events.
    """
    processes: dict[str, _Process] = {}
    failures = []
    last_process = ""
    for line in lines:
        name = line.process or ("" if "" in processes else last_process)
        process = processes.get(name) or _Process()
        event = _event_of(line.text, line.number)
        if event is None:
            if failure := _failure_of(line.text, line.number, name):
                failures.append(failure)
            event = _row_event(line, process.labels)
        if event is None and process.in_table and (end := _END_OF_ROW.search(" " + line.text[-400:])) and "." in end[0]:
            # It ends like a row, whatever it begins with.
            event = _Event("partial", line.number, text=line.text.strip())
        if event is None:
            continue
        processes[name] = process
        process.events.append(event)
        if event.kind not in _ASIDE:
            last_process = name
            process.in_table = event.kind in ("header", "row", "partial")
        if event.kind in _OPENINGS:
            process.labels = event.labels
    return {name: process.events for name, process in processes.items()}, failures


# Runs.


@dataclass(frozen=True)
class _RunEvents:
    """Hold the events of one run, or of several that printed at the same time."""

    process: str
    events: Sequence[_Event]
    tables: int = 1
    """Number of tables whose rows cannot be told apart."""

    @property
    def begin(self) -> int:
        """Return the line where it begins."""
        return self.events[0].number

    @property
    def has_output(self) -> bool:
        """Return whether the program itself printed something, rather than its command alone."""
        return any(event.kind not in _ASIDE for event in self.events)

    @property
    def unread(self) -> Sequence[str]:
        """Return what looks like rows and could not be read."""
        return [event.text for event in self.events if event.kind == "partial" or (self.tables > 1 and event.row)]

    @property
    def rows(self) -> Sequence[NcclRow]:
        """Return the rows, also those of several tables."""
        return [event.row for event in self.events if event.row]

    @property
    def labels(self) -> Sequence[str]:
        """Return the names of the columns."""
        header = self.first("header")
        return header.labels if header else ()

    def first(self, *kinds: str) -> _Event | None:
        """Return the first event of these kinds."""
        return next((event for event in self.events if event.kind in kinds), None)

    def value(self, kind: str, name: str) -> str:
        """Return what the first event of a kind says; empty if there is none, or if it does not say it."""
        event = self.first(kind)
        return event.values.get(name, "") if event else ""

    def number(self, kind: str, name: str) -> int:
        """Return a count or size of the first event of a kind, 0 if there is none."""
        return int(self.value(kind, name) or 0)


def _split_runs(process: str, events: Iterable[_Event]) -> list[_RunEvents]:
    """Split the events of one process into runs.

    If a run has no footer when the next one opens, and a footer or devices belong to no opening, then several programs
    printed at the same time, as programs without MPI do under mpirun.
    """
    pieces = _cut_at_repetitions(events)
    kinds = [{event.kind for event in piece} for piece in pieces]
    unfinished = [at for at, found in enumerate(kinds) if found & _OPENINGS and not found & _FOOTERS]
    loose = [at for at, found in enumerate(kinds) if not found & _OPENINGS and found & {"rank", *_FOOTERS}]
    begin = end = len(pieces)
    if unfinished and loose and loose[-1] > unfinished[0]:
        begin, end = unfinished[0], loose[-1] + 1
    runs = [_RunEvents(process, piece) for piece in (*pieces[:begin], *pieces[end:])]
    if mixed := [event for piece in pieces[begin:end] for event in piece]:
        counts = Counter(event.kind for event in mixed)
        runs.append(_RunEvents(process, mixed, max(2, *(counts[kind] for kind in ("parameters", "header", "bounds")))))
    return runs


def _cut_at_repetitions(events: Iterable[_Event]) -> list[list[_Event]]:
    """Cut where an event comes again that a run has once, or where a table begins after a footer."""
    pieces: list[list[_Event]] = []
    found: set[str] = set()
    for event in events:
        name = f"rank {event.values['rank']}" if event.kind == "rank" else event.kind
        if not pieces or found & _AFTER.get(event.kind, set()) or (event.kind == "rank" and name in found):
            pieces.append([])
            found = set()
        pieces[-1].append(event)
        found.add(name)
    return pieces


def _failures_by_run(runs: Sequence[_RunEvents], failures: Iterable[_Failure]) -> Mapping[int, list[_Failure]]:
    """Return the failures of each run, by index: those after its beginning, of the same process if that has a run."""
    by_run: dict[int, list[_Failure]] = defaultdict(list)
    last_of_process: dict[str, int] = {}
    begun = 0
    for failure in failures:
        while begun < len(runs) and runs[begun].begin <= failure.number:
            last_of_process[runs[begun].process] = begun
            begun += 1
        index = last_of_process.get(failure.process, begun - 1)
        if index >= 0:
            by_run[index].append(failure)
        elif runs and failure.verdict != "failed" and not runs[0].first("bounds"):
            by_run[0].append(failure)
    return by_run


def _settings_of(runs: Sequence[_RunEvents], settings: Sequence[Setting]) -> list[Mapping[str, str]]:
    """Return the settings of each run: those between the run before it and its own end.

    A run without settings of its own has those of the run before it, unless its command was printed.
    """
    found: list[Mapping[str, str]] = []
    begin = 0
    for run in runs:
        end = run.events[-1].number
        own = {setting.name: setting.value for setting in settings if begin < setting.number <= end}
        found.append(own or ({} if run.first("command") or not found else found[-1]))
        begin = end
    return found


# What the events of a run say: who took part, which sizes, and whether its figures fit each other.


def _run_of(
    source: str, run: _RunEvents, failures: Iterable[_Failure], settings: Mapping[str, str], warning: str = ""
) -> Run:
    """Return the run of these events, with its verdict."""
    named = run.first("starting", "concluded")
    commands = [event.values["program"] for event in run.events if event.kind == "command"]
    ranks, hosts, gpus, devices = _devices(run)
    bounds = run.value("bounds", "count")
    wrong = [half.wrong for row in run.rows for half in row.halves if half.wrong is not None]
    compared_rows = _compared_rows(run)
    facts = Run(
        source=source,
        tool=run.value("version", "tool") or "nccl-tests",
        tool_version=run.value("version", "version") or None,
        collective=_collective_of(named.values.get("program", "") if named else "")
        or _infer_collective(run.rows, run.labels)
        or (_collective_of(commands[-1]) if commands else None),
        ranks=ranks,
        nodes=len(hosts) or None,
        hosts=hosts,
        gpus=gpus,
        device=devices[0] if devices else None,
        other_devices=devices[1:],
        algorithms=forced_classes(settings),
        rows=tuple(run.rows) if run.tables == 1 else (),
        partial_rows=len(run.unread),
        avg_busbw_gb_s=parse_number(run.value("average", "value")),
        out_of_bounds=int(bounds) if bounds else None,
        wrong_total=sum(wrong) if wrong else None,
        compared=compared_rows == len(run.rows),
        verdict="ok",
        reason="",
    )
    verdict, reason = next(_verdicts(run, facts, failures, compared_rows, warning))
    return facts.model_copy(update={"verdict": verdict, "reason": reason})


_BUS = re.compile(r"[\da-f]{4,8}:[\da-f]{2}:[\da-f]{2}(?:\.\d)?|0x(?!0?[01]$)[\da-f]{1,2}", re.IGNORECASE)


def _devices(run: _RunEvents) -> tuple[int | None, tuple[str, ...], int | None, tuple[str, ...]]:
    """Return what the list of devices says: ranks, all hosts in the order of ranks, number and names of GPUs.

    The name that most GPUs have comes first. Before 2.15 a bus has no domain, so buses 0 and 1, which machines have in
    every domain, do not tell GPUs apart. The list of a JSON document has one device for `each` so many ranks.
    """
    listed = {int(event.values["rank"]): event for event in run.events if event.kind == "rank"}
    if not listed:
        return None, (), None, ()
    ranks = max(listed) + 1
    is_complete = len(listed) == ranks
    last = max(event.number for event in listed.values())
    table = run.first("header", "row")
    if is_complete and table and any(e.kind == "elision" and last < e.number < table.number for e in run.events):
        # More ranks may have been left out.
        ranks, is_complete = 0, False
    groups = Counter(event.values.get("group") for event in listed.values())
    if is_complete and len(groups) > 1 and len(set(groups.values())) == 1:
        # Each group is a communicator of its own.
        ranks = next(iter(groups.values()))
    hosts = tuple(dict.fromkeys(listed[rank].values["host"] for rank in sorted(listed)))
    names = Counter(name for event in listed.values() if (name := event.values["name"]))
    places = {(event.values["host"], event.values["bus"]) for event in listed.values()}
    gpus = len(places) if is_complete and all(_BUS.fullmatch(bus) for _, bus in places) else None
    ranks *= int(listed[max(listed)].values.get("each", 1))
    return ranks or None, hosts if is_complete else (), gpus, tuple(name for name, _ in names.most_common())


def _compared_rows(run: _RunEvents) -> int:
    """Return in how many rows the data were compared, out of place and in place.

    Where no row says it of one of them, as of alltoall in place, nobody meant to compare that.
    """
    if run.value("parameters", "validation") == "0":
        return 0
    rows = [[word != "N/A" for word in event.values["wrong"].split()] for event in run.events if event.row]
    asked = {place for row in rows for place, compared in enumerate(row) if compared}
    return sum(bool(asked) and all(compared or at not in asked for at, compared in enumerate(row)) for row in rows)


_MOST_SIZES = 100_000


def _sizes_of(run: _RunEvents) -> Sequence[int]:
    """Return the sizes that a run was asked for, before they are rounded to elements; none if they are not known."""
    smallest, factor, increment = (run.number("parameters", name) for name in ("min", "factor", "bytes"))
    largest = run.number("reduced", "max") or run.number("parameters", "max")
    if increment and (largest - smallest) // increment < _MOST_SIZES:
        return range(smallest, largest + 1, increment)
    sizes = []
    while factor > 1 and 0 < smallest <= largest:
        sizes.append(smallest)
        smallest *= factor
    return sizes


def _wrong_sizes(rows: Sequence[NcclRow], sizes: Sequence[int], unread: int) -> tuple[int | None, int | None]:
    """Return a size that was asked for and has no row, not even an unread one, and a size that has a row too many.

    Rows of all sizes may come several times. Sizes are rounded down, the smallest ones to the same.
    """
    if not sizes or (unread and (len(rows) + unread) % len(sizes) == 0):
        return None, None
    by_kind: dict[object, Counter[int]] = defaultdict(Counter)
    for row in rows:
        by_kind[row.dtype, row.redop, row.root][row.size_bytes] += 1
    missing: list[int] = []
    surplus: list[int] = []
    for found in by_kind.values():
        times = max(1, round(found.total() / len(sizes)))
        # What was asked for from each size on, up to the next one, was rounded to it.
        limits = [0, *(bisect_left(sizes, size) for size in sorted(found)[1:]), len(sizes)]
        for size, begin, following in zip(sorted(found), limits, limits[1:], strict=False):
            # Rounding takes less than half away, but for what it makes 0.
            end = min(following, bisect_left(sizes, 2 * size)) if size else following
            missing += sizes[end:following][:1]
            expected = times * (end - begin)
            if found[size] < expected:
                missing.append(sizes[begin + (found[size] // times if size <= sizes[begin] else 0)])
            elif found[size] > expected > 0:
                surplus.append(size)
    return min(missing, default=None), min(surplus, default=None)


_ROUNDED, _TINY = 0.06, 0.006
"""Largest differences that rounding explains, relative to a large figure, and in µs or GB/s: a large time has two
digits, and other figures have two decimals."""
_ONE_DIGIT_FROM = 950_000
"""GB/s from which nccl-tests prints one digit, such as `1e+06`."""


def _half_of_one_digit(printed: float | None) -> float:
    """Return what rounding to one digit takes from a figure; 0 if it was printed with more."""
    return 10 ** math.floor(math.log10(printed)) / 2 if printed and printed >= _ONE_DIGIT_FROM else 0


def _contradiction(run: _RunEvents, facts: Run) -> str:
    """Return which row has figures that are not numbers, or that do not fit each other as in most rows.

    algbw is size / time, unless time is that of the CPU, and busbw is algbw times the same factor in all rows; the
    first releases had another factor in the former. Both are compared where rounding leaves enough digits: not below
    1, nor from 1e+06 on, which one GPU reaches that has nothing to send.
    """
    figures: list[tuple[int, float, float, float]] = []
    for size, half in ((row.size_bytes, half) for row in facts.rows for half in row.halves if row.size_bytes):
        if half.time_us is None or half.algbw_gb_s is None or half.busbw_gb_s is None:
            return f"the row of {size} bytes has figures that are not numbers"
        if half.time_us >= 1 and 1 <= half.algbw_gb_s < _ONE_DIGIT_FROM:
            figures.append((size, half.time_us, half.algbw_gb_s, half.busbw_gb_s))
    if not figures:
        return ""
    checks = []
    if "cputime" not in run.labels:
        checks.append((_ROUNDED, [algbw * time / size for size, time, algbw, _ in figures], "time and algbw"))
    if facts.collective != "alltoallv":
        checks.append((0.02, [busbw / algbw for _, _, algbw, busbw in figures], "algbw and busbw"))
    for tolerance, ratios, names in checks:
        usual = median(ratios)
        for (size, *_), ratio in zip(figures, ratios, strict=True):
            if usual and abs(ratio / usual - 1) > tolerance:
                return f"{names} of the row of {size} bytes do not fit each other"
    return ""


def _is_other_average(rows: Iterable[NcclRow], printed: float | None) -> bool:
    """Return whether a printed average bus bandwidth is not that of all rows and halves, but for their rounding."""
    speeds = [half.busbw_gb_s for row in rows for half in row.halves if half.busbw_gb_s is not None]
    if not speeds:
        return False
    rounded = fmean(_half_of_one_digit(speed) or 0.01 for speed in speeds)
    return not math.isclose(fmean(speeds), printed or 0, rel_tol=0.0005, abs_tol=rounded)


def _infer_collective(rows: Sequence[NcclRow], labels: Sequence[str]) -> str | None:
    """Return the only collective that the columns of the rows, and the ratios between them, leave possible.

    `busbw / algbw` is 2(n-1)/n for all_reduce, (n-1)/n for collectives that divide the data among ranks, and 1 for the
    rest. `size / (count * bytes of the type)` is n for those that divide the data, and 1 for the rest. With one rank
    bandwidths are 0, which says nothing.
    """
    if not rows:
        return None
    redops, roots = {row.redop for row in rows}, {row.root for row in rows}
    is_reducing, is_rooted = not redops & {None, "none"}, not roots & {None, -1}
    # Before 2.13, alltoall alone has a column for the operation and leaves it blank; all_gather, sendrecv and hypercube
    # have neither an operation nor a root.
    has_no_values = bool(labels) and "root" not in labels and redops == {None} and roots == {None}
    is_alltoall = has_no_values and not {"redop", "op"}.isdisjoint(labels)
    lacks_columns = has_no_values and not is_alltoall
    ratio = bus_ratio(rows, least=2)  # below, its digits are too few
    data = [(row.size_bytes, row.count * _TYPE_BYTES.get(row.dtype, 0)) for row in rows]
    shares = {size / elements for size, elements in data if size and elements}
    share = shares.pop() if len(shares) == 1 else 0.0
    if ratio is None or share < 1 or share != int(share):
        return "alltoall" if is_alltoall else None
    cases = (
        (is_reducing and is_rooted, "reduce"),
        (is_reducing and share > 1, "reduce_scatter"),
        (is_reducing and ratio > 0.99, "all_reduce"),
        (is_rooted and share == 1 and ratio > 0.99, "broadcast"),
        (is_alltoall, "alltoall"),
        (lacks_columns and share > 1 and abs(ratio - (share - 1) / share) < 0.01, "all_gather"),
        (lacks_columns and share == 1 and ratio > 0.99, "sendrecv"),
    )
    return next((collective for holds, collective in cases if holds), None)


def _verdicts(
    run: _RunEvents, facts: Run, failures: Iterable[_Failure], compared_rows: int, warning: str
) -> Iterator[tuple[RunVerdict, str]]:
    """Yield the verdicts that a run deserves, with their reasons: the worst and the cause first, `ok` last."""
    wrong, bounds = facts.wrong_total or 0, facts.out_of_bounds or 0
    if wrong or bounds or run.value("bounds", "state") == "FAILED":
        yield "wrong-data", f"wrong: {wrong} wrong elements in the rows read, {bounds} checks out of bounds"
    for failure in sorted(failures):
        yield failure.verdict, f"line {failure.number}: {failure.text}"
    if run.tables > 1:
        remedy = "build nccl-tests with MPI=1, or label lines (mpirun --tag-output, srun --label)"
        yield "failed", f"{run.tables} programs printed at the same time, and their rows cannot be told apart: {remedy}"
    if run.value("average", "state") == "FAILED":
        yield "failed", "the average bus bandwidth is below what NCCL_TESTS_MIN_BW asks for"
    warned = f"; NCCL warned: {warning}" if warning else ""
    if not run.rows:
        yield "no-data", f"no row of results{warned}"
    if contradiction := _contradiction(run, facts):
        yield "damaged", f"damaged: {contradiction}"
    left_out, reduced = run.first("elision") is not None, run.value("reduced", "max")
    absent = surplus = None
    if not left_out and facts.collective != "alltoallv":
        absent, surplus = _wrong_sizes(run.rows, _sizes_of(run), facts.partial_rows)
    for lack in _lacks(run, absent):
        yield "truncated", f"truncated: {lack}{warned}"
    if surplus is not None:
        yield "damaged", f"damaged: more rows of {surplus} bytes than of other sizes"
    average = facts.avg_busbw_gb_s
    if not left_out and not facts.partial_rows and _is_other_average(facts.rows, average):
        printed = f"{average} GB/s, as its footer says: a row is missing or wrong"
        yield "damaged", f"damaged: the average of its rows is not {printed}"
    notes = (
        (True, "complete"),
        (reduced, f"the largest size was reduced to {reduced} bytes for lack of memory"),
        (left_out, "parts are left out where the output has dots"),
        (facts.partial_rows, f"{plural(facts.partial_rows, 'row')} could not be read"),
        (not compared_rows, "data were not validated"),
        (0 < compared_rows < len(run.rows), f"data were compared in {compared_rows} of {len(run.rows)} rows only"),
    )
    yield "ok", "; ".join(text for holds, text in notes if holds)


def _lacks(run: _RunEvents, absent: int | None) -> Iterator[str]:
    """Yield what a run that came to its end would have; `absent` is a size without a row."""
    if [event.kind for event in run.events if event.kind in ("row", "partial")][-1:] == ["partial"]:
        yield "the last row is cut"
    if not run.first("bounds"):
        yield "its footer has no line `Out of bounds values`" if run.first("average", "concluded") else "no footer"
    if absent is not None:
        yield f"no row of {absent} bytes, though it was asked for"
    if parse_number(run.value("average", "value")) is None:
        yield "its footer has no average bus bandwidth"


# The JSON of `-J`.


def parse_nccl_json(source: str, document: JsonDocument) -> Parsed[Run] | None:
    """Read the run of a JSON document; None if it is not of nccl-tests."""
    top = logs.json_object(document.value)
    if "nccl_version" not in top and "minimum_bytes" not in logs.json_object(top.get("config")):
        return None
    run = _RunEvents("", list(_json_events(top, document.number)))
    failures = []
    if not run.first("bounds"):
        # The run did not come to its end: the last errors of the library are the cause.
        errors = [str(error) for error in logs.json_list(top.get("errors")) if str(error).strip()]
        number = document.number
        failures = [_failure_of(e, number, "") or _Failure(1, number, "comm-failure", e[:240]) for e in errors]
    variables = [text.partition("=") for text in map(str, logs.json_list(top.get("env")))]
    parsed = _run_of(source, run, failures, {name: value for name, _, value in variables})
    if not document.is_whole:
        parsed = parsed.model_copy(update={"reason": f"{parsed.reason}; the document has no end"})
    return [parsed, *run.unread]


def _json_events(top: Mapping[str, object], number: int) -> Iterator[_Event]:
    """Yield what a JSON document says, as the events of a run that was printed."""
    config = logs.json_object(top.get("config"))
    yield _Event("starting", number, {"program": "".join(map(str, logs.json_list(top.get("args"))[:1]))})
    asked = {name: _word(config.get(key)) for name, key in _JSON_PARAMETERS.items()}
    yield _Event("parameters", number, asked)
    # The list of devices has one device of each process.
    each = f"{int(_word(config.get('nthreads')) or 0) * int(_word(config.get('ngpus')) or 0)}"
    for rank, device in enumerate(map(logs.json_object, logs.json_list(config.get("devices")))):
        words = {"host": str(device.get("hostname")), "name": str(device.get("device_info") or ""), "bus": ""}
        yield _Event("rank", number, {"rank": f"{rank}", "each": each, **words})
    results = logs.json_list(top.get("results"))
    if any("cpu_time" in logs.json_object(logs.json_object(entry).get("out_of_place")) for entry in results):
        yield _Event("header", number, {"labels": "root cputime"})
    for entry in results:
        row = _json_row(logs.json_object(entry))
        compared = " ".join("N/A" if half.wrong is None else "0" for half in row.halves) if row else ""
        yield _Event("row" if row else "partial", number, {"wrong": compared}, row, excerpt(f"results: {entry!r}"))
    bounds = logs.json_object(top.get("out_of_bounds"))
    count, state = _word(bounds.get("count")), _json_state(bounds)
    if count or state == "FAILED":
        yield _Event("bounds", number, {"count": count, "state": state})
    # The first releases with JSON have a typing error in both keys.
    for outer, key in (("average_bus_bandwidth", "bandwidth"), ("average_bus_bandwidith", "bandwidith")):
        if average := logs.json_object(top.get(outer)):
            value = str(logs.json_number(average.get(key)))
            yield _Event("average", number, {"value": value, "state": _json_state(average)})


_JSON_PARAMETERS = {
    "min": "minimum_bytes", "max": "maximum_bytes", "factor": "step_factor", "bytes": "step_bytes",
    "validation": "validation",
}  # fmt: skip
"""Names of what a run was asked for, as the text and as a JSON document has them."""


def _json_state(footer: Mapping[str, object]) -> str:
    return "FAILED" if str(footer.get("okay", "")).lower() == "false" else "OK"


def _json_row(entry: Mapping[str, object]) -> NcclRow | None:
    """Return a row; None if it is not whole."""
    size, count, root = (_word(entry.get(key)) for key in ("size", "count", "root"))
    halves: list[Half] = []
    for name in ("out_of_place", "in_place"):
        values = entry.get(name)
        if name not in entry or (isinstance(values, dict) and not {"bus_bw", "nwrong"} <= values.keys()):
            return None
        half = logs.json_object(values)
        time = half.get("time", half.get("cpu_time"))
        halves.append(_half(*map(logs.json_number, (time, half.get("alg_bw"), half.get("bus_bw"), half.get("nwrong")))))
    if not size or not count:
        return None
    return NcclRow(
        size_bytes=int(size),
        count=int(count),
        dtype=str(entry.get("type", "")),
        redop=str(entry.get("redop") or "").strip() or None,
        root=int(root) if root else None,
        out_of_place=halves[0],
        in_place=halves[1] if entry["in_place"] else None,
    )


def _word(value: object) -> str:
    """Return an integer of a JSON document as text would have it; empty for every other value."""
    number = logs.json_number(value)
    return "" if number is None else f"{round(number)}"


# Runs that were both printed as text and written as JSON.


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


def _is_same_run(printed: Run, written: Run) -> bool:
    """Return whether the numbers of a run that was printed are those of one that was written, but for rounding."""

    def exact(run: Run) -> tuple[object, ...]:
        rows = [(row.size_bytes, row.count, row.dtype, row.redop, row.root, row.in_place is None) for row in run.rows]
        return run.collective, run.ranks, run.verdict, run.wrong_total, rows

    def figures(run: Run) -> list[float | None]:
        return [value for row in run.rows for half in row.halves for value in (half.time_us, half.busbw_gb_s)]

    def is_close(a: float | None, b: float | None) -> bool:
        if a is None or b is None:
            return a is b
        return math.isclose(a, b, rel_tol=_ROUNDED, abs_tol=_half_of_one_digit(a) or _TINY)

    is_same = bool(printed.rows) and exact(printed) == exact(written)
    return is_same and all(map(is_close, figures(printed), figures(written)))
