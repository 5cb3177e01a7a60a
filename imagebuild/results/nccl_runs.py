"""A run from its events: rows with units, ranks, hosts, the name of the collective, and the verdict."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from imagebuild.results import nccl_events, nccl_infer, nccl_rows, nccl_verdict
from imagebuild.results.lines import Line, Lines
from imagebuild.results.models import Half, Row, Run
from imagebuild.results.nccl_events import Event, Header, Kind
from imagebuild.results.nccl_failures import Failure
from imagebuild.results.nccl_rows import Cells
from imagebuild.results.nccl_verdict import Facts

_ERROR = re.compile(r"\d(?:\.\d+)?e(?:-\d+|\+00)")
"""A largest error, which the column had before 2.13: no count is printed like that."""


@dataclass(frozen=True)
class Piece:
    """Events of one run, printed by one process."""

    stream: str
    events: tuple[Event, ...]

    @property
    def is_run(self) -> bool:
        """Whether the program itself was heard, not only called."""
        return any(
            event.kind not in ("command", "elision", "partial") or event.payload is not None for event in self.events
        )

    def first(self, kind: Kind) -> Event | None:
        return next((event for event in self.events if event.kind == kind), None)

    def last(self, kind: Kind) -> Event | None:
        return next((event for event in reversed(self.events) if event.kind == kind), None)


def build(log: Lines, pieces: Sequence[Piece], failures: Iterable[Failure]) -> tuple[Run, ...]:
    """The runs; a command counts as one if it failed before the program said anything."""
    failed = _attributed(pieces, failures)
    return tuple(
        _run(log, piece, failed[at]) for at, piece in enumerate(pieces) if piece.is_run or (
            failed[at] and piece.first("command")
        )
    )  # fmt: skip


def _attributed(pieces: Sequence[Piece], failures: Iterable[Failure]) -> Mapping[int, list[Failure]]:
    """Failures belong to the run that began last before them, of the same process if it has any."""
    found: dict[int, list[Failure]] = defaultdict(list)
    begins = [piece.events[0].number for piece in pieces]
    of_stream: dict[str, list[int]] = defaultdict(list)
    for at, piece in enumerate(pieces):
        of_stream[piece.stream].append(at)
    for failure in failures:
        own = of_stream.get(failure.stream, [])
        same = bisect_right(own, failure.number, key=lambda at: begins[at])
        if same:
            found[own[same - 1]].append(failure)
        elif before := bisect_right(begins, failure.number):
            found[before - 1].append(failure)
        elif pieces and failure.cause not in ("stopped", "trace") and not pieces[0].first("oob"):
            found[0].append(failure)
    return found


def _run(log: Lines, piece: Piece, failures: Sequence[Failure]) -> Run:
    header = next((event.payload for event in piece.events if isinstance(event.payload, Header)), None)
    cells = [event.payload for event in piece.events if event.kind == "row" and isinstance(event.payload, Cells)]
    partial = [event for event in piece.events if event.kind == "partial"]
    if not cells and header is None and len(partial) > 1 and all(isinstance(event.payload, Cells) for event in partial):
        # A table of one half whose header was not copied.
        cells, partial = [event.payload for event in partial if isinstance(event.payload, Cells)], []
    counts = _counts_wrong(header, cells)
    scale = 1000.0 if _in_milliseconds(header, cells) else 1.0
    rows = tuple(_row(item, counts=counts, scale=scale) for item in cells)
    name = _collective(piece, rows, header)
    out_of_bounds, average = piece.first("oob"), piece.first("average")
    version = next((event for event in piece.events if event.kind == "version" and "tool" in event.values), None)
    parameters = piece.first("parameters")
    facts = Facts(
        rows=rows,
        partial_rows=len(partial),
        out_of_bounds=int(out_of_bounds.values["count"]) if out_of_bounds else None,
        out_of_bounds_failed=_failed(out_of_bounds),
        average_failed=_failed(average),
        concluded=average is not None or piece.first("concluded") is not None,
        failures=failures,
        cut=bool(partial) and partial[-1].number > max((e.number for e in piece.events if e.kind == "row"), default=0),
        missing_size=None if name == "alltoallv" else _missing(piece, rows),
        left_out=piece.first("elision") is not None,
        reduced_to=int(reduced.values["max"]) if (reduced := piece.first("reduced")) else None,
        counts_wrong=counts,
        validated=not (parameters is not None and parameters.values.get("validation") == "0")
        and not (bool(cells) and all(half[3] == "N/A" for item in cells for half in item.halves)),
        warning=_warning(log.warnings, piece),
    )
    verdict, reason = nccl_verdict.judge(facts)
    devices = _Devices.of(piece.events)
    return Run(
        source=log.path,
        tool=version.values["tool"] if version else "nccl-tests",
        tool_version=version.values["version"] if version else None,
        collective=name,
        ranks=devices.ranks,
        nodes=devices.nodes,
        device=devices.name,
        rows=rows,
        partial_rows=len(partial),
        avg_busbw_gb_s=nccl_rows.number(average.values["value"]) if average else None,
        out_of_bounds=facts.out_of_bounds,
        wrong_total=nccl_verdict.wrong_total(rows),
        verdict=verdict,
        reason=reason,
    )


def _failed(event: Event | None) -> bool:
    return event is not None and event.values.get("state") == "FAILED"


def _warning(warnings: Sequence[Line], piece: Piece) -> str | None:
    start = piece.events[0].number
    return next((line.text.partition(" NCCL WARN ")[2][:200] for line in warnings if line.number >= start), None)


def _row(cells: Cells, *, counts: bool, scale: float) -> Row:
    halves = [_half(half, counts=counts, scale=scale) for half in cells.halves]
    return Row(
        size_bytes=cells.size,
        count=cells.count,
        dtype=cells.dtype,
        redop=cells.redop,
        root=cells.root,
        out_of_place=halves[0],
        in_place=halves[1] if len(halves) > 1 else None,
    )


def _half(values: tuple[str, str, str, str], *, counts: bool, scale: float) -> Half:
    time, algbw, busbw = (nccl_rows.number(value) for value in values[:3])
    wrong = nccl_rows.number(values[3]) if counts else None
    return Half(
        time_us=None if time is None else time * scale,
        algbw_gb_s=algbw,
        busbw_gb_s=busbw,
        wrong=None if wrong is None else round(wrong),
    )


def _counts_wrong(header: Header | None, cells: Sequence[Cells]) -> bool:
    if header:
        return header.counts_wrong
    return not any(_ERROR.fullmatch(half[3]) for item in cells for half in item.halves)


def _in_milliseconds(header: Header | None, cells: Sequence[Cells]) -> bool:
    """Release 1 printed ms. Without a header, size, time and bandwidth of the rows tell."""
    if header:
        return header.milliseconds
    votes: Counter[bool] = Counter()
    for item in cells:
        for half in item.halves:
            time, algbw = nccl_rows.number(half[0]), nccl_rows.number(half[1])
            if time and algbw and algbw >= 0.1:
                votes[item.size / time / 1e3 / algbw > 30] += 1
    return votes[True] > votes[False]


def _collective(piece: Piece, rows: Sequence[Row], header: Header | None) -> str | None:
    for kind in ("starting", "concluded"):
        said = piece.first(kind)
        if said and (name := nccl_events.collective(said.values.get("program", ""))):
            return name
    guess = nccl_infer.collective(rows, header)
    called = piece.last("command")
    name = nccl_events.collective(called.values["program"]) if called else None
    return guess if name is None or (guess is not None and guess != name) else name


def _missing(piece: Piece, rows: Sequence[Row]) -> int | None:
    """The next size that was asked for and has no row."""
    parameters, reduced = piece.first("parameters"), piece.first("reduced")
    if not rows or parameters is None or "step" not in parameters.values:
        return None
    largest = int((reduced or parameters).values["max"])
    step, last = int(parameters.values["step"]), rows[-1].size_bytes
    following = last + step if parameters.values["by"] == "bytes" else last * step
    return following if last < following <= largest else None


@dataclass(frozen=True)
class _Devices:
    """What the list of devices says."""

    ranks: int | None
    nodes: int | None
    name: str | None

    @classmethod
    def of(cls, events: Sequence[Event]) -> _Devices:
        listed = {int(event.values["rank"]): event for event in events if event.kind == "rank"}
        if not listed:
            return cls(None, None, None)
        ranks: int | None = max(listed) + 1
        whole = len(listed) == ranks
        last = max(event.number for event in listed.values())
        header = next((event.number for event in events if event.kind in ("header", "row")), last)
        if whole and any(event.kind == "elision" and last < event.number < header for event in events):
            # What was left out may be more ranks.
            ranks, whole = None, False
        groups = Counter(event.values.get("group") for event in listed.values())
        if whole and len(groups) > 1 and len(set(groups.values())) == 1:
            # Each group is a communicator of its own.
            ranks = next(iter(groups.values()))
        hosts = {event.values["host"] for event in listed.values()}
        names = {event.values["name"] for event in listed.values()}
        name = names.pop() if len(names) == 1 else ""
        return cls(ranks, len(hosts) if whole else None, name or None)
