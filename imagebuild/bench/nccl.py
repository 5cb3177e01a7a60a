"""Read the runs that nccl-tests and rccl-tests print: tables of every release since 2.0, and the JSON of `-J`.

Text becomes runs in three steps, in the order of this file: a line is an event (the parameters, a rank of the device
list, a row, a line of the footer, …), a failure or other output; the events of a process are split into runs; the
events of a run, and the failures after its beginning, become a `Run` with a verdict. JSON needs the last step only. A
run that was both printed as text and written as JSON is merged.

Rows are read by their shape, since headers are often missing; a header says what the shape leaves open.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import takewhile, zip_longest
from statistics import fmean, median
from typing import Any, NamedTuple, get_args

from imagebuild.bench.ceilings import forced_classes
from imagebuild.bench.logs import (
    JsonDocument,
    Log,
    LogLine,
    ParsedOutput,
    Setting,
    excerpt,
    json_list,
    json_number,
    json_object,
    parse_number,
)
from imagebuild.bench.models import Collective, Half, NcclRow, Run, RunVerdict, bus_ratio
from imagebuild.core.errors import plural


def parse_nccl_text(log: Log) -> ParsedOutput[Run]:
    """Read the runs of a log, in the order in which they begin; nothing if the log is not of these programs."""
    processes, printed_failures = _read_lines(log.lines)
    runs = [run for name, process in processes.items() for run in _split_runs(name, process.events)]
    runs.sort(key=lambda run: run.begin)
    if not any(run.has_output for run in runs) and any(_OWN_FAILURE.search(f.text) for f in printed_failures):
        runs.append(_RunEvents("", [_Event("starting", 0)]))
    # A shell's trace of a command whose lines another process labels is no run of its own.
    is_trace = [
        not run.has_output and following is not None and following.has_output and not following.first("command")
        for run, following in zip_longest(runs, runs[1:])
    ]
    runs = [run for run, trace in zip(runs, is_trace, strict=True) if not trace]
    failures = _failures_by_run(runs, printed_failures)
    settings = _settings_of(runs, log.settings)
    # A command without output counts as a run if it failed.
    runs_and_failures = [
        (run, failures[index], settings[index])
        for index, run in enumerate(runs)
        if run.has_output or (failures[index] and run.first("command"))
    ]
    return ParsedOutput(
        tuple(_run_of(log, run, failed, forced) for run, failed, forced in runs_and_failures),
        tuple(event.text for run, _, _ in runs_and_failures for event in run.unread),
    )


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


# Lines: events.

_COLLECTIVES = frozenset(get_args(Collective))
_OPENINGS = frozenset(("version", "starting", "parameters", "devices", "header"))
"""Each comes once, before the rows: a second one belongs to another run."""
_FOOTERS = frozenset(("bounds", "average", "concluded"))
_BODY = frozenset(("row", "partial", *_FOOTERS))
_AFTER: Mapping[str, Set[str]] = {
    **{kind: {kind, *_BODY} for kind in _OPENINGS},
    **{kind: {kind, "concluded"} for kind in _FOOTERS},
    **dict.fromkeys(("rank", "command"), _BODY),
    **dict.fromkeys(("row", "partial"), _FOOTERS),
}
"""What must have come before an event of each kind for it to be of the next run."""
_PATTERNS = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("version", r"(?P<tool>nccl-tests) version (?P<version>[^\s(]{1,40})"),
        ("version", r"(?P<tool>rccl-tests): Version (?P<version>\S{1,80})"),
        ("starting", r"Collective test starting: (?P<program>\S{1,300})"),
        (
            "parameters",
            r"nThreads? \d{1,5} nGpus \d{1,5} minBytes (?P<min>\d{1,20}) maxBytes (?P<max>\d{1,20})"
            r"(?: step: (?P<step>\d{1,20})\((?P<by>factor|bytes)\))?"
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
_MOST_SIZES = 100_000
_ELISION = re.compile(r"[\s#|]{0,200}(?:\.{3,10}|…|\[(?:\.{3}|…)\]|<(?:snip|\.\.\.)>)\s{0,200}")
"""Dots that somebody who copied the output left for what was left out."""
_COMMAND = re.compile(
    rf"\b(?P<program>(?:{'|'.join(sorted(_COLLECTIVES, reverse=True))})_perf)(?:_mpi)?"
    r"['\"\\]{0,2}\s{1,20}-{1,2}[a-zA-Z]"
)


@dataclass(frozen=True)
class _Event:
    """Hold what a line says about a run."""

    kind: str
    """`row`, `partial`, `elision`, `command`, or one of `_PATTERNS`."""
    number: int
    """The line's number."""
    values: Mapping[str, str] = field(default_factory=dict)
    row: NcclRow | None = None
    text: str = ""
    """Of a row, also a partial one."""


def _event_of(text: str, number: int) -> _Event | None:
    """Return the event that a line is; None for a row, a failure and other output."""
    bare = text.lstrip("# \t*>|\\")
    # After a prefix that is not known, the first # is that of the line.
    for candidate in (bare, text.partition("#")[2].lstrip("# \t")) if "#" in bare else (bare,):
        for kind, pattern in _PATTERNS:
            if match := pattern.match(candidate):
                values = {name: value.strip() for name, value in match.groupdict().items() if value is not None}
                return _Event(kind, number, values)
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
        r"|not enough slots available|was unable to (?:launch|find|start)|driver version is insufficient"
        r"|is not supported by this test|\bKilled\s{0,4}$",
    ),
)  # fmt: skip
"""Distance of a message from the cause, verdict, pattern of the message. Of several that a line has, the first counts:
`Test NCCL failure … 'unhandled cuda error'` is an error of CUDA.

A CUDA error is nobody's consequence; of communication errors and timeouts the first leads to the others; "remote
process exited" is what every other rank says; launchers and traces say only that something happened.
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

    Nothing as short as `timeout` is searched: MPICH ends every output with "0 network timeouts". `# error:` is the last
    message of the library, which a run that ends well may have too.
    """
    text = text[:2000]
    if not _ANY_FAILURE.search(text) or text.lstrip("# ").startswith("error:"):
        return None
    distance, verdict = next(
        (distance, verdict) for distance, verdict, message in _FAILURES if re.search(message, text)
    )
    return _Failure(distance, number, verdict, " ".join(text.split())[:240], process)


# Lines: rows with size, count, type, operation, root, and two halves of time, algbw, busbw, wrong.

_TYPE_BYTES = {
    "int8": 1, "uint8": 1, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8, "half": 2, "float": 4, "double": 8,
    "bfloat16": 2, "f8e4m3": 1, "f8e5m2": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "char": 1, "int": 4,
}  # fmt: skip
"""Bytes of an element of each type."""
_REDOPS = frozenset(("sum", "prod", "max", "min", "avg", "mulsum", "none"))
_ROW = re.compile(
    r"(?<![^\s|#])(?P<size>\d{1,20})[\s|]{1,40}(?P<count>\d{1,20})[\s|]{1,40}(?P<dtype>[a-z]\w{2,11})(?![^\s|])(?P<rest>.*)"
)
_VALUE = re.compile(r"\d+(?:\.\d+)?(?:e[+-]\d\d+)?|-?nan|-?inf|N/A|-1")
_WRONG = re.compile(r"N/A|\d+(?:\.\d+)?e[+-]\d\d+|\d+|-?nan")
_LARGEST_ERROR = re.compile(r"\d(?:\.\d+)?e(?:-\d+|\+00)")
"""A largest error, which the last column had before 2.13: no count is printed like that."""
_DATE_OR_CLOCK = re.compile(r"\d{4}-\d\d-\d\d|\d\d:\d\d:\d\d")


def _row_event(line: LogLine, labels: Sequence[str]) -> _Event | None:
    """Return the row in a line, whole or partial; None if there is none.

    `labels` are those of the header, if there was one.
    """
    match = _ROW.search(line.text)
    if match is None:
        return None
    size, count, words = int(match["size"]), int(match["count"]), match["rest"].replace("|", " ").split(maxsplit=20)
    redop = words.pop(0) if words and words[0] in _REDOPS else None
    values = list(takewhile(_VALUE.fullmatch, words))
    following = "".join(words[len(values) : len(values) + 1]).split()
    # A half has four columns, or eight with `-I`, so a value more than that is the root.
    root = int(values.pop(0)) if len(values) % 4 == 1 and re.fullmatch(r"-1|\d{1,7}", values[0]) else None
    halves = _halves(values)
    is_cut = len(halves) != 2 or ("i_min" in labels and len(values) != 16)
    # What is followed by a type has size and count of another row at its end.
    is_cut = is_cut or not _TYPE_BYTES.keys().isdisjoint(following[:1])
    # A size of fewer bytes than `count` elements lost its first digits.
    data = count * _TYPE_BYTES.get(match["dtype"], 0)
    if is_cut or size < data or (line.is_joined and not _is_consistent(size, data, halves)):
        return _Event("partial", line.number, text=line.text.strip()) if match["dtype"] in _TYPE_BYTES else None
    out_of_place, in_place = (
        _half(*map(parse_number, (time, algbw, busbw, wrong if _counts_wrong(wrong, labels) else "N/A")))
        for time, algbw, busbw, wrong in halves
    )
    row = NcclRow(
        size_bytes=size,
        count=count,
        dtype=match["dtype"],
        redop=redop,
        root=root,
        out_of_place=out_of_place,
        in_place=in_place,
    )
    return _Event("row", line.number, {"wrong": " ".join(half[3] for half in halves)}, row, line.text.strip())


def _half(time: float | None, algbw: float | None, busbw: float | None, wrong: float | None) -> Half:
    return Half(time_us=time, algbw_gb_s=algbw, busbw_gb_s=busbw, wrong=None if wrong is None else round(wrong))


def _halves(values: Sequence[str]) -> list[Sequence[str]]:
    """Return time, algbw, busbw and wrong of each half of a row; nothing if the values are not those of halves."""
    width = {4: 4, 8: 4, 16: 8}.get(len(values))
    halves = [values[begin : begin + 4] for begin in range(0, len(values), width)] if width else []
    is_plausible = all(_WRONG.fullmatch(half[3]) and not {"N/A", "-1"} & set(half[:3]) for half in halves)
    return halves if is_plausible else []


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


def _ends_like_row(text: str) -> bool:
    """Return whether a line ends like a row, whatever it begins with."""
    words = [word for word in text.replace("|", " ").split()[-20:] if not _DATE_OR_CLOCK.fullmatch(word)]
    ends = (words[-width:] for width in (8, 16))
    return any("." in "".join(end) and all(map(_VALUE.fullmatch, end)) and _halves(end) for end in ends)


@dataclass
class _Process:
    """Hold the events of one process."""

    events: list[_Event] = field(default_factory=list)
    labels: Sequence[str] = ()
    """Of the header of the table that is read."""
    in_table: bool = False


def _read_lines(lines: Iterable[LogLine]) -> tuple[Mapping[str, _Process], list[_Failure]]:
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
            if event is None and process.in_table and _ends_like_row(line.text):
                event = _Event("partial", line.number, text=line.text.strip())
            if event is None:
                continue
        processes[name] = process
        process.events.append(event)
        if event.kind not in ("command", "elision"):
            last_process = name
            process.in_table = event.kind in ("header", "row", "partial")
        if event.kind in _OPENINGS:
            process.labels = _labels(event)
    return processes, failures


def _labels(header: _Event | None) -> Sequence[str]:
    """Return the names of the columns."""
    return header.values.get("labels", "").replace("# wrong", "#wrong").replace("|", " ").split() if header else ()


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
        return any(event.kind not in ("command", "elision") for event in self.events)

    @property
    def unread(self) -> list[_Event]:
        """Return what looks like rows and could not be read."""
        return [event for event in self.events if event.kind == "partial" or (self.tables > 1 and event.row)]

    def first(self, *kinds: str) -> _Event | None:
        return next((event for event in self.events if event.kind in kinds), None)


def _split_runs(process: str, events: Iterable[_Event]) -> list[_RunEvents]:
    """Split the events of one process into runs.

    A run that has no footer yet when another one opens, and a footer or devices that belong to no opening: these are
    the lines of several programs that printed at the same time, as those of a build without MPI under mpirun do.
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
        is_rank = event.kind == "rank"
        name = f"rank {event.values['rank']}" if is_rank else event.kind
        if not pieces or found & _AFTER.get(event.kind, set()) or (is_rank and name in found):
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

    What is set before a command without settings of its own holds for the runs that follow, too, until it is unset.
    """
    found: list[Mapping[str, str]] = []
    begin = 0
    for run in runs:
        end = run.events[-1].number
        own = {setting.name: setting.value for setting in settings if begin < setting.number <= end}
        found.append(own or ({} if run.first("command") or not found else found[-1]))
        begin = end
    return found


# The figures of a run, and its verdict.


def _run_of(log: Log, run: _RunEvents, failures: Sequence[_Failure], settings: Mapping[str, str]) -> Run:
    """Return a run that was printed."""
    parameters, reduced = run.first("parameters"), run.first("reduced")
    bounds, average = run.first("bounds"), run.first("average")
    version = next((event for event in run.events if event.kind == "version" and event.values), None)
    named = run.first("starting", "concluded")
    command = next((event for event in reversed(run.events) if event.kind == "command"), None)
    labels = _labels(run.first("header"))
    rows = [event.row for event in run.events if event.row]
    collective = (
        _collective_of(named.values.get("program", "") if named else "")
        or _infer_collective(rows, labels)
        or (_collective_of(command.values["program"]) if command else None)
    )
    wrong = [[word != "N/A" for word in event.values["wrong"].split()] for event in run.events if event.row]
    asked = parameters.values if parameters else {}
    step, is_factor = int(asked.get("step", 0)), asked.get("by") == "factor"
    last = next((event for event in reversed(run.events) if event.kind in ("row", "partial")), None)
    ranks, hosts, gpus, devices = _devices(run)
    facts = {
        "source": log.path,
        "tool": version.values["tool"] if version else "nccl-tests",
        "tool_version": version.values["version"] if version else None,
        "collective": collective,
        "ranks": ranks,
        "nodes": len(hosts) or None,
        "hosts": hosts,
        "gpus": gpus,
        "device": devices[0] if devices else None,
        "other_devices": devices[1:],
        "algorithms": forced_classes(settings),
        "partial_rows": len(run.unread),
        "avg_busbw_gb_s": parse_number(average.values["value"]) if average else None,
        "out_of_bounds": int(bounds.values["count"]) if bounds else None,
    }
    return _with_verdict(
        facts,
        rows,
        out_of_bounds_failed=bounds is not None and bounds.values["state"] == "FAILED",
        average_failed=average is not None and average.values.get("state") == "FAILED",
        concluded=run.first("average", "concluded") is not None,
        failures=failures,
        tables=run.tables,
        is_cut=last is not None and last.kind == "partial",
        sizes=_sizes_between(
            int(asked.get("min", 0)),
            int((reduced.values if reduced else asked).get("max", 0)),
            step if is_factor else 0,
            0 if is_factor else step,
        ),
        has_other_times="cputime" in labels,
        left_out=run.first("elision") is not None,
        reduced_to=int(reduced.values["max"]) if reduced else 0,
        compared_rows=0 if asked.get("validation") == "0" else _compared_rows(wrong),
        warning=next((w.text.partition(" NCCL WARN ")[2][:200] for w in log.warnings if w.number >= run.begin), ""),
    )


_BUS = re.compile(r"[\da-f]{4,8}:[\da-f]{2}:[\da-f]{2}(?:\.\d)?|0x(?!0?[01]$)[\da-f]{1,2}", re.IGNORECASE)


def _devices(run: _RunEvents) -> tuple[int | None, tuple[str, ...], int | None, tuple[str, ...]]:
    """Return what the list of devices says: ranks, all hosts in the order of ranks, number and names of GPUs.

    The name that most GPUs have comes first. Before 2.15 a bus has no domain, so buses 0 and 1, which machines have in
    every domain, do not tell GPUs apart.
    """
    listed = {int(event.values["rank"]): event for event in run.events if event.kind == "rank"}
    if not listed:
        return None, (), None, ()
    ranks: int | None = max(listed) + 1
    is_complete = len(listed) == ranks
    last = max(event.number for event in listed.values())
    table = run.first("header", "row")
    if is_complete and table and any(e.kind == "elision" and last < e.number < table.number for e in run.events):
        # More ranks may have been left out.
        ranks, is_complete = None, False
    groups = Counter(event.values.get("group") for event in listed.values())
    if is_complete and len(groups) > 1 and len(set(groups.values())) == 1:
        # Each group is a communicator of its own.
        ranks = next(iter(groups.values()))
    hosts = tuple(dict.fromkeys(listed[rank].values["host"] for rank in sorted(listed)))
    names = Counter(name for event in listed.values() if (name := event.values.get("name")))
    places = {(event.values["host"], event.values["bus"]) for event in listed.values()}
    gpus = len(places) if is_complete and all(_BUS.fullmatch(bus) for _, bus in places) else None
    return ranks, hosts if is_complete else (), gpus, tuple(name for name, _ in names.most_common())


def _compared_rows(rows: Sequence[Sequence[bool]]) -> int:
    """Return in how many rows the data were compared; each row says it for the results out of place and in place.

    Where no row says it of one of them, as of alltoall in place, nobody meant to compare that.
    """
    asked = {place for row in rows for place, compared in enumerate(row) if compared}
    return sum(bool(asked) and all(compared or at not in asked for at, compared in enumerate(row)) for row in rows)


def _sizes_between(smallest: int, largest: int, factor: int, increment: int) -> Sequence[int]:
    """Return the sizes that a run was asked for, before they are rounded to elements; none if they are not known."""
    if increment and (largest - smallest) // increment < _MOST_SIZES:
        return range(smallest, largest + 1, increment)
    sizes = []
    while factor > 1 and 0 < smallest <= largest:
        sizes.append(smallest)
        smallest *= factor
    return sizes


def _wrong_sizes(rows: Sequence[NcclRow], sizes: Sequence[int], unread: int) -> tuple[int | None, int | None]:
    """Return a size that was asked for and has no row, also none that is unread, and one that has a row too many.

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


_ONE_DIGIT_FROM = 950_000
"""GB/s from which nccl-tests prints one digit, such as `1e+06`."""


def _half_of_one_digit(printed: float | None) -> float:
    """Return what rounding to one digit takes from a figure; 0 if it was printed with more."""
    return 10 ** math.floor(math.log10(printed)) / 2 if printed and printed >= _ONE_DIGIT_FROM else 0


def _contradiction(rows: Sequence[NcclRow], collective: str | None, *, has_other_times: bool) -> str:
    """Return which row has figures that are no numbers, or that do not fit each other as those of most rows do.

    algbw is size / time, and busbw is algbw times the same factor in all rows; the first releases had another factor
    in the former. Both are compared where rounding leaves enough digits: not below 1, nor from 1e+06 on, which one GPU
    reaches that has nothing to send.
    """
    halves = [(row.size_bytes, half) for row in rows for half in row.halves if row.size_bytes]
    for size, half in halves:
        if None in (half.time_us, half.algbw_gb_s, half.busbw_gb_s):
            return f"the row of {size} bytes has figures that are no numbers"
    figures = [(size, half.time_us or 0, half.algbw_gb_s or 0, half.busbw_gb_s or 0) for size, half in halves]
    figures = [figure for figure in figures if figure[1] >= 1 and 1 <= figure[2] < _ONE_DIGIT_FROM]
    checks: tuple[tuple[bool, float, list[tuple[int, float]], str], ...] = (
        (not has_other_times, _ROUNDED, [(s, a * t / s) for s, t, a, _ in figures], "time and algbw"),
        (collective != "alltoallv", 0.02, [(s, b / a) for s, _, a, b in figures], "algbw and busbw"),
    )
    for applies, tolerance, ratios, names in checks:
        usual = median(ratio for _, ratio in ratios) if ratios and applies else 0
        for size, ratio in ratios if usual else ():
            if abs(ratio / usual - 1) > tolerance:
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
        ("reduce", is_reducing and is_rooted),
        ("reduce_scatter", is_reducing and share > 1),
        ("all_reduce", is_reducing and ratio > 0.99),
        ("broadcast", is_rooted and share == 1 and ratio > 0.99),
        ("alltoall", is_alltoall),
        ("all_gather", lacks_columns and share > 1 and abs(ratio - (share - 1) / share) < 0.01),
        ("sendrecv", lacks_columns and share == 1 and ratio > 0.99),
    )
    return next((collective for collective, holds in cases if holds), None)


def _with_verdict(
    facts: Mapping[str, Any],
    rows: Sequence[NcclRow],
    *,
    out_of_bounds_failed: bool,
    average_failed: bool,
    concluded: bool,
    failures: Iterable[_Failure],
    is_cut: bool,
    sizes: Sequence[int],
    compared_rows: int,
    has_other_times: bool,
    tables: int = 1,
    left_out: bool = False,
    reduced_to: int = 0,
    warning: str = "",
) -> Run:
    """Return the run of these facts and rows, with its verdict.

    `concluded` says whether something came that is printed after the line about bounds, `is_cut` whether the last row
    is not whole, `left_out` whether somebody who copied the output marked a gap with dots, `has_other_times` whether
    times are not those of the bandwidths. `sizes` were asked for; `reduced_to` is the largest that the memory allowed.
    `compared_rows` is the number of rows whose data were compared.
    """
    counted = [half.wrong for row in rows for half in row.halves if half.wrong is not None]
    wrong_total = sum(counted) if counted else None
    kept = tuple(rows) if tables == 1 else ()
    run = Run(rows=kept, wrong_total=wrong_total, compared=compared_rows == len(rows), verdict="ok", reason="", **facts)
    lacks_bounds = run.out_of_bounds is None
    absent = surplus = None
    if not left_out and run.collective != "alltoallv":
        absent, surplus = _wrong_sizes(rows, sizes, run.partial_rows)
    contradiction = _contradiction(kept, run.collective, has_other_times=has_other_times)
    missing = (
        (is_cut, "the last row is cut"),
        (lacks_bounds and not concluded, "no footer"),
        (lacks_bounds, "its footer has no line `Out of bounds values`"),
        (absent is not None, f"no row of {absent} bytes, though it was asked for"),
        (run.avg_busbw_gb_s is None, "its footer has no average bus bandwidth"),
    )
    damages = (
        (surplus is not None, f"more rows of {surplus} bytes than of other sizes"),
        (
            not (left_out or run.partial_rows) and _is_other_average(kept, run.avg_busbw_gb_s),
            f"the average of its rows is not {run.avg_busbw_gb_s} GB/s, as its footer says: a row is missing or wrong",
        ),
    )
    warned = f"; NCCL warned: {warning}" if warning else ""
    causes = [(True, failure.verdict, f"line {failure.number}: {failure.text}") for failure in sorted(failures)]
    notes = (
        (True, "complete"),
        (reduced_to, f"the largest size was reduced to {reduced_to} bytes for lack of memory"),
        (left_out, "parts are left out where the output has dots"),
        (run.partial_rows, f"{plural(run.partial_rows, 'row')} could not be read"),
        (not compared_rows and rows, "data were not validated"),
        (0 < compared_rows < len(rows), f"data were compared in {compared_rows} of {len(rows)} rows only"),
    )
    verdicts: tuple[tuple[object, RunVerdict, str], ...] = (
        (
            wrong_total or run.out_of_bounds or out_of_bounds_failed,
            "wrong-data",
            f"wrong: {wrong_total or 0} wrong elements in the rows read, {run.out_of_bounds or 0} checks out of bounds",
        ),
        *causes[:1],
        (
            tables > 1,
            "failed",
            f"{tables} programs printed at the same time, and their rows cannot be told apart: "
            "build nccl-tests with MPI=1, or label lines (mpirun --tag-output, srun --label)",
        ),
        (average_failed, "failed", "the average bus bandwidth is below what NCCL_TESTS_MIN_BW asks for"),
        (not rows, "no-data", f"no row of results{warned}"),
        (contradiction, "damaged", f"damaged: {contradiction}"),
        *((holds, "truncated", f"truncated: {text}{warned}") for holds, text in missing),
        *((holds, "damaged", f"damaged: {text}") for holds, text in damages),
        (True, "ok", "; ".join(text for holds, text in notes if holds)),
    )
    verdict, reason = next((verdict, reason) for holds, verdict, reason in verdicts if holds)
    return run.model_copy(update={"verdict": verdict, "reason": reason})


# The JSON of `-J`.

_SIZE_KEYS = ("minimum_bytes", "maximum_bytes", "step_factor", "step_bytes")
_CPU_TIME = re.compile(r"'cpu_time'")
_AVERAGES = (("average_bus_bandwidth", "bandwidth"), ("average_bus_bandwidith", "bandwidith"))
"""The second has the typing error of the first releases with JSON."""


def parse_nccl_json(source: str, document: JsonDocument) -> ParsedOutput[Run] | None:
    """Read the run of a JSON document; None if it is not of nccl-tests."""
    top = json_object(document.value)
    config = json_object(top.get("config"))
    if "nccl_version" not in top and "minimum_bytes" not in config:
        return None
    rows: list[NcclRow] = []
    unread = []
    is_cut = False
    for value in json_list(top.get("results")):
        row = _json_row(json_object(value))
        is_cut = row is None
        if row:
            rows.append(row)
        else:
            unread.append(excerpt(f"results: {value!r}"))
    bounds = json_object(top.get("out_of_bounds"))
    out_of_bounds = _json_integer(bounds.get("count"))
    average, average_key = next(((json_object(top[outer]), key) for outer, key in _AVERAGES if outer in top), ({}, ""))
    arguments = json_list(top.get("args"))
    collective = (_collective_of(str(arguments[0])) if arguments else None) or _infer_collective(rows, ())
    failures = []
    if out_of_bounds is None:
        # The run did not come to its end: the last errors of the library are the cause.
        errors = [str(error) for error in json_list(top.get("errors")) if str(error).strip()]
        number = document.number
        failures = [_failure_of(e, number, "") or _Failure(1, number, "comm-failure", e[:240]) for e in errors]
    # The list of devices has one device of each process.
    devices = [json_object(device) for device in json_list(config.get("devices"))]
    threads, gpus = _json_integer(config.get("nthreads")), _json_integer(config.get("ngpus"))
    hosts = tuple(dict.fromkeys(str(device.get("hostname")) for device in devices))
    names = Counter(str(device["device_info"]) for device in devices if device.get("device_info"))
    kinds = [name for name, _ in names.most_common()]
    variables = [text.partition("=") for text in map(str, json_list(top.get("env")))]
    facts = {
        "source": source,
        "collective": collective,
        "ranks": len(devices) * threads * gpus if devices and threads and gpus else None,
        "nodes": len(hosts) or None,
        "hosts": hosts,
        "device": kinds[0] if kinds else None,
        "other_devices": tuple(kinds[1:]),
        "algorithms": forced_classes({name: value for name, _, value in variables}),
        "partial_rows": len(unread),
        "avg_busbw_gb_s": json_number(average.get(average_key)),
        "out_of_bounds": out_of_bounds,
    }
    checks = [[half.wrong is not None for half in row.halves] for row in rows]
    run = _with_verdict(
        facts,
        rows,
        out_of_bounds_failed=str(bounds.get("okay", "")).lower() == "false",
        average_failed=str(average.get("okay", "")).lower() == "false",
        concluded=bool(average),
        failures=failures,
        is_cut=is_cut,
        sizes=_sizes_between(*(_json_integer(config.get(key)) or 0 for key in _SIZE_KEYS)),
        compared_rows=0 if _json_integer(config.get("validation")) == 0 else _compared_rows(checks),
        has_other_times=bool(_CPU_TIME.search(str(top.get("results"))[:500])),
    )
    if not document.is_whole:
        run = run.model_copy(update={"reason": f"{run.reason}; the document has no end"})
    return ParsedOutput((run,), tuple(unread))


def _json_row(entry: Mapping[str, object]) -> NcclRow | None:
    """Return a row; None if it is not whole."""
    size, count = _json_integer(entry.get("size")), _json_integer(entry.get("count"))
    halves: list[Half] = []
    for name in ("out_of_place", "in_place"):
        values = entry.get(name)
        if name not in entry or (isinstance(values, dict) and not {"bus_bw", "nwrong"} <= values.keys()):
            return None
        half = json_object(values)
        time = half.get("time", half.get("cpu_time"))
        halves.append(_half(*map(json_number, (time, half.get("alg_bw"), half.get("bus_bw"), half.get("nwrong")))))
    if size is None or count is None:
        return None
    return NcclRow(
        size_bytes=size,
        count=count,
        dtype=str(entry.get("type", "")),
        redop=str(entry.get("redop") or "").strip() or None,
        root=_json_integer(entry.get("root")),
        out_of_place=halves[0],
        in_place=halves[1] if entry["in_place"] else None,
    )


def _json_integer(value: object) -> int | None:
    number = json_number(value)
    return None if number is None else round(number)


# Runs that were both printed as text and written as JSON.

_ROUNDED = 0.06
"""Largest relative difference that rounding explains: the text has two digits of a large time, more of others."""
_TINY = 0.006
"""µs and GB/s that the two decimals of the text do not show."""


def _is_same_run(printed: Run, written: Run) -> bool:
    """Return whether the numbers of a run that was printed are those of one that was written, but for rounding."""

    def exact(run: Run) -> tuple[object, ...]:
        rows = [(row.size_bytes, row.count, row.dtype, row.redop, row.root, row.in_place is None) for row in run.rows]
        return run.collective, run.ranks, run.verdict, run.wrong_total, rows

    def figures(run: Run) -> list[float | None]:
        return [value for row in run.rows for half in row.halves for value in (half.time_us, half.busbw_gb_s)]

    if not printed.rows or exact(printed) != exact(written):
        return False
    return all(
        a == b
        or (
            a is not None
            and b is not None
            and math.isclose(a, b, rel_tol=_ROUNDED, abs_tol=_half_of_one_digit(a) or _TINY)
        )
        for a, b in zip(figures(printed), figures(written), strict=True)
    )
