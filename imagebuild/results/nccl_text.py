"""The tables of nccl-tests and rccl-tests in a log, of every release since 1.0.

Rows are put together again where other output broke into them (`nccl_rows`), events are sorted into runs
(`nccl_split`), and each run is judged (`nccl_verdict`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from imagebuild.results import nccl_events, nccl_rows, nccl_runs, nccl_split
from imagebuild.results.lines import Line, Lines
from imagebuild.results.models import Run
from imagebuild.results.nccl_events import OPENINGS, Event, Header
from imagebuild.results.nccl_failures import Failure, failure
from imagebuild.results.parsed import Parsed

_OWN = ("Test NCCL failure", "Test CUDA failure", "Test failure", "Test timeout")
"""Messages that only these programs print."""


def parse(log: Lines) -> Parsed[Run]:
    """All runs of a log, in the order in which they begin; empty if the log is not of these programs."""
    reader = _Reader()
    for line in log.items:
        reader.feed(line)
    events = {stream: process.closed() for stream, process in reader.processes.items()}
    pieces = [
        nccl_runs.Piece(stream, tuple(piece)) for stream, said in events.items() for piece in nccl_split.runs(said)
    ]
    pieces.sort(key=lambda piece: piece.events[0].number)
    if not any(piece.is_run for piece in pieces) and any(
        sign in item.text for item in reader.failures for sign in _OWN
    ):
        pieces.append(nccl_runs.Piece("", (Event("starting", 0),)))
    runs = nccl_runs.build(log, pieces, reader.failures)
    unread = [event.text for said in events.values() for event in said if event.kind == "partial"]
    return Parsed(items=runs, unread=tuple(_unread(unread, runs)))


def _unread(texts: Sequence[str], runs: Sequence[Run]) -> Sequence[str]:
    """Broken rows; in a log without a table they may be anything."""
    return texts if runs else ()


@dataclass
class _Process:
    """What one process has printed so far."""

    events: list[Event] = field(default_factory=list)
    header: Header | None = None
    in_table: bool = False
    pending: str = ""
    """A row that is not whole."""
    since: int = 0
    broken: str = ""
    """A line of the footer that is not whole."""

    def closed(self) -> list[Event]:
        self.flush()
        return self.events

    def flush(self) -> None:
        """The pending row will not become whole."""
        if self.pending:
            half = nccl_rows.half(self.pending)
            if half and self.header and self.header.halves == 1:
                self.events.append(Event("row", self.since, payload=half))
            else:
                self.events.append(Event("partial", self.since, text=self.pending.strip(), payload=half))
        self.pending = ""

    def begin(self, text: str, number: int) -> None:
        """A row begins here, or the rest of one that looks like a row."""
        self.in_table = True
        if self.pending and (rest := nccl_rows.continued(self.pending, text)):
            self.events.append(Event("row", self.since, payload=rest))
            self.pending = ""
            return
        if len(self.pending.split()) == 1:
            # One number in a table is no row, unless the output ends with it.
            self.pending = ""
        self.flush()
        if cells := nccl_rows.complete(text, per_iteration=self.header.per_iteration if self.header else None):
            self.events.append(Event("row", number, payload=cells))
        else:
            self.pending, self.since = text, number

    def go_on(self, text: str) -> bool:
        """Whether the text is more of the pending row."""
        if not self.pending:
            return False
        whole, cells = nccl_rows.joined(self.pending, text, self.header.per_iteration if self.header else None)
        if cells:
            self.events.append(Event("row", self.since, payload=cells))
            self.pending = ""
            return True
        if nccl_rows.could_go_on(whole):
            self.pending = whole
            return True
        return False

    def say(self, event: Event) -> None:
        if event.kind in OPENINGS or event.kind in ("oob", "average", "concluded", "rank"):
            self.flush()
            self.in_table = event.kind == "header"
        elif event.kind == "command":
            self.in_table = False
        if isinstance(event.payload, Header):
            self.header = event.payload
        elif event.kind in OPENINGS:
            self.header = None
        self.events.append(event)


@dataclass
class _Reader:
    processes: dict[str, _Process] = field(default_factory=lambda: defaultdict(_Process))
    failures: list[Failure] = field(default_factory=list)
    table: str = ""
    """The process whose table was the last seen: lines without a name are its, where it has one."""

    def feed(self, line: Line) -> None:
        text = line.text
        if not text or text.isspace():
            return
        stream = line.stream
        if not stream and self.table and "" not in self.processes:
            stream = self.table
        if event := nccl_events.event(text, line.number):
            self._say(stream, event)
            return
        if found := failure(text, line.number, stream):
            self.failures.append(found)
        places = nccl_rows.leads(text)
        if places:
            process = self.processes[stream]
            self.table = stream
            if before := text[: places[0]].strip(" \t#|>"):
                process.go_on(before)
            for begin, end in zip(places, (*places[1:], len(text)), strict=True):
                process.begin(text[begin:end], line.number)
            return
        process_ = self.processes.get(stream)
        if process_ is None or process_.go_on(text):
            return
        if process_.in_table and not process_.pending and nccl_rows.could_go_on(text):
            process_.pending, process_.since = text, line.number
        elif process_.broken and (event := nccl_events.event(process_.broken + text, line.number)):
            process_.broken = ""
            self._say(stream, event)
        elif text.lstrip(" #").startswith(("Out", "Avg")):
            process_.broken = text
        elif process_.in_table and nccl_rows.resembles(text):
            process_.events.append(Event("partial", line.number, text=text.strip()))

    def _say(self, stream: str, event: Event) -> None:
        process = self.processes[stream]
        process.say(event)
        if event.kind not in ("command", "elision"):
            self.table = stream
