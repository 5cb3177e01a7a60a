"""The text of perftest's programs: ib_{send,write,read,atomic}_{bw,lat} and raw_ethernet_*.

A log may hold a client and a server, or several processes line by line, so a header opens a table and its rows may come
after another header. Numbers stay in the unit of their header; a peak of 0.00 is what a run for a duration prints.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from imagebuild.results.models import Table, TableRow
from imagebuild.results.parsed import Parsed
from imagebuild.results.perftest_json import looks_like, parse_broken_json, parse_json
from imagebuild.results.tokens import decimals, integer, is_value, number, shown

__all__ = ["looks_like", "parse", "parse_broken_json", "parse_json"]

_WORDS = re.compile(
    r"#bytes|#flows|#sl|#iterations|BW (?P<bw>peak|average) ?\[(?P<unit>[^\]\s]{1,12})\]|MsgRate\["
    r"|(?:BW|MsgRate) Port\d|t_(?P<lat>min|max|typical|avg|stdev)\[|(?P<p>99(?:\.9)?)%{1,2} percentile|tps average"
    r"|CPU_Util|fs_\w{1,9}_time|fps\["
)
_BANDWIDTH = ("#bytes", "#iterations", "peak", "average", "MsgRate[")
_TITLE = (
    r"(?P<test>(?:Send|RDMA_Write|RDMA_Read|Atomic)(?:_imm)?(?: [A-Za-z_]{1,20}){0,5} (?:BW|Latency)"
    r"(?: [a-zA-Z]{1,20}){0,2}) Test"
)
_FATAL = (
    r"(?P<early>Couldn't (?:connect to \S{1,255}:\d|listen to port|get context for the device|allocate context)"
    r"|Unable to (?:open file descriptor for socket|init the socket connection|find the Infiniband|create RDMA_CM)"
    r"|IB device \S{1,80} not found)|Couldn't create IB resources|Unable to (?:Connect the HCA|set up socket conn)"
    r"|Completion with error at (?:client|server)|Failed status \d{1,3}: |Failed to (?:modify QP \d|negotiate p"
    r"|exchange data between server and client)|Port number \d{1,3} state is|Problems with warm up"
    r"|(?:ethernet_read_keys: )?Couldn't (?:read|send|parse) (?:remote|local|line)"
)
"""Errors of perftest alone; early ones come before the name of the test is printed."""
_ERROR = re.compile(
    r"(?:Couldn't|Unable to|Failed|ERROR|Error\b|Completion with|Function \w{1,60} failed|Can't produce|Bad wc)"
)
_IS_TITLE, _IS_FATAL = re.compile(_TITLE), re.compile(_FATAL)
_MARK = re.compile(
    rf"[\s>*]{{0,80}}(?=[#bA-Ze])(?:#?bytes\s{{1,40}}#|#flows|Waiting for client to connect|{_TITLE}|{_FATAL})"
)
_RULE = re.compile(r"-{20,}")
_BARE = re.compile(r"\d{1,12}\.\d{6}", re.ASCII)
_HEADLESS = re.compile(r"\d{1,18}\s+\d{1,18}\s+\d+\.\d{2,6}\s+\d+\.\d{2,6}\s+\d+\.\d{6}", re.ASCII)
_DECIMALS, _RATE_DECIMALS = 2, 6
"""Digits after the point, of every number and of message rates."""
_LONGEST = 4000
_SHORT_LOG = 20


@dataclass
class _Open:
    """A table whose rows are still to come, or coming."""

    columns: tuple[str, ...]
    unit: str | None
    test: str | None
    rows: list[TableRow] = field(default_factory=list)
    error: str = ""
    cut: bool = False
    last: str = ""
    """The last line of a row."""

    def ends_in_a_number(self) -> bool:
        """Whether the last row ends before all digits of its last number."""
        complete = _RATE_DECIMALS if self.columns[-1:] == ("MsgRate[",) else _DECIMALS
        words = self.last.split()
        return len(words) == len(self.columns) and decimals(words[-1]) < complete

    def fail(self, reason: str) -> None:
        if reason not in self.error:
            self.error = f"{self.error}; {reason}".removeprefix("; ")[:1000]

    def verdict(self) -> tuple[Literal["ok", "failed", "truncated"], str]:
        if self.error:
            return "failed", self.error
        if not self.rows:
            return "truncated", "the output ends before the first row"
        if self.cut:
            return "truncated", "a row could not be read"
        for row in self.rows:
            values = (row.bw_peak, row.bw_average, row.msg_rate, *(row.latency_us or {}).values())
            if any(value is not None and value < 0 for value in values):
                return "failed", f"a measurement with {row.size_bytes} bytes is negative"
        return "ok", ""


def _header(text: str) -> tuple[tuple[str, ...], str | None] | None:
    """Columns and unit of a header row; `None` if the line is none."""
    if not text.startswith(("#bytes", "#flows", "bytes ")):
        return None
    columns, unit = [], None
    for found in _WORDS.finditer("#" + text.removeprefix("#")):
        if found["bw"]:
            unit = found["unit"]
            columns.append(found["bw"])
        elif found["lat"]:
            unit = "usec"
            columns.append("lat " + ("average" if found["lat"] == "avg" else found["lat"]))
        else:
            columns.append(f"lat p{found['p']}" if found["p"] else found[0])
    return (tuple(columns), unit) if len(columns) > 2 else None


def _row(columns: tuple[str, ...], words: list[str]) -> TableRow | None:
    """A row of numbers under these columns; that of CPU usage may be missing."""
    if not columns or columns[0] != "#bytes" or not 0 <= len(columns) - len(words) <= ("CPU_Util" in columns):
        return None
    pairs = list(zip(columns, words, strict=False))
    if any(integer(word) is None for name, word in pairs if name.startswith("#")):
        return None
    cells = {name: number(word) for name, word in pairs}
    latency = {name[4:]: value for name, value in cells.items() if name.startswith("lat ") and value is not None}
    return TableRow(
        size_bytes=int(words[0]),
        bw_peak=cells.get("peak"),
        bw_average=cells.get("average"),
        msg_rate=cells.get("MsgRate["),
        latency_us=latency or None,
    )


@dataclass
class _Reader:
    source: str
    titles: list[str] = field(default_factory=list)
    """Tests that were announced and have no table yet."""
    test: str | None = None
    """The last that was announced."""
    waiting: bool = False
    """A server waits for its client, and announced no test since."""
    open: list[_Open] = field(default_factory=list)
    last: _Open | None = None
    """The last table that ended, while nothing but rows followed: they are another process' rows."""
    failed: _Open | None = None
    """A program that failed before its table, while more errors may follow."""
    doubts: str = ""
    """An error that may not have ended the program."""
    known: bool = False
    after_row: str = ""
    """The line before, if it was a row."""
    tables: list[Table] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def line(self, text: str) -> None:
        if not text:
            return
        self.after_row = text if self.row(text) else ""
        if self.after_row:
            return
        if found := _header(text):
            self.begin()
            self.open.append(_Open(*found, self.titles.pop() if self.titles else self.test))
        elif _RULE.fullmatch(text):
            # A line of dashes ends the first table that has rows.
            if table := next((one for one in self.open if one.rows or one.cut), None):
                self.close(table)
            return
        elif title := _IS_TITLE.fullmatch(text):
            self.begin()
            self.test = title["test"]
            self.titles.append(self.test)
        elif text.startswith("* Waiting for client to connect"):
            self.begin()
            self.waiting = True
        elif fatal := _IS_FATAL.match(text):
            self.fail(shown(text), early=bool(fatal["early"]))
        elif self.known and _ERROR.match(text):
            self.doubt(shown(text))
        self.last = None

    def begin(self) -> None:
        """Something of the next program came."""
        if self.failed:
            self.close(self.failed)
        self.known, self.waiting, self.doubts = True, False, ""

    def close(self, table: _Open) -> None:
        if table is self.failed:
            self.failed = None
        else:
            self.open.remove(table)
            self.last = table
        verdict, reason = table.verdict()
        rows = tuple(table.rows)
        self.tables.append(
            Table(source=self.source, test=table.test, unit=table.unit, rows=rows, verdict=verdict, reason=reason)
        )

    def row(self, text: str) -> bool:
        """Whether the line is a row, kept then, or looks like one and is noted as unread."""
        words = text.split()
        if len(words) < 2 or integer(words[0]) is None or not is_value(words[1]) or not self.known:
            return False
        if not self.open:
            if self.last and _row(self.last.columns, words):
                self.open.append(_Open(self.last.columns, self.last.unit, self.last.test))
            elif self.titles and _HEADLESS.fullmatch(text):
                self.open.append(_Open(_BANDWIDTH, None, self.titles.pop()))
            else:
                return False
        # Of several processes, a table takes the sizes that come next for it.
        size = int(words[0])
        table = next((one for one in self.open if not one.rows or one.rows[-1].size_bytes < size), self.open[-1])
        if row := _row(table.columns, words) if all(map(is_value, words)) else None:
            table.rows.append(row)
            table.last = text
        elif integer(words[1]) is None:
            return False
        else:
            table.cut = True
            self.unread.append(shown(text))
        return True

    def fail(self, reason: str, *, early: bool) -> None:
        """An error that ends a program: before its table, in it, or, where nothing is open, after it."""
        self.known = True
        if self.failed or (self.open and not early):
            (self.failed or self.open[-1]).fail(reason)
        elif early or self.titles or not self.tables:
            self.failed = _Open((), None, self.titles.pop() if self.titles and not early else None, error=reason)
            self.waiting = False
        else:
            self.doubt(reason)

    def doubt(self, reason: str) -> None:
        """An error that may not end a program: it counts unless its table comes."""
        if self.failed or self.open:
            (self.failed or self.open[-1]).fail(reason)
        elif self.titles or self.waiting:
            self.doubts = self.doubts or reason
        elif self.tables:
            last = self.tables.pop()
            more = f"{last.reason}; {reason}".removeprefix("; ")[:1000]
            self.tables.append(last.model_copy(update={"verdict": "failed", "reason": more}))

    def end(self) -> None:
        for table in (*self.open, *((self.failed,) if self.failed else ())):
            if table.rows and table.last == self.after_row and table.ends_in_a_number():
                table.rows.pop()
                table.cut = True
                self.unread.append(shown(table.last))
            self.close(table)
        names: list[str | None] = [*self.titles, *([None] if self.waiting else [])]
        reason = self.doubts or ("the server waits for its client" if self.waiting else "no result was printed")
        verdict: Literal["failed", "no-data"] = "failed" if self.doubts else "no-data"
        for name in names:
            self.tables.append(Table(source=self.source, test=name, unit=None, verdict=verdict, reason=reason))


def parse(source: str, lines: Sequence[str]) -> Parsed[Table]:
    """The tables in cleaned lines; empty where nothing of perftest is in them.

    With `--output=…`, a program prints one number without its unit or size: that is noted as unread.
    """
    if not any(map(_MARK.match, lines)):
        return _bare(lines)
    reader = _Reader(source)
    for line in lines:
        if len(line) <= _LONGEST:
            reader.line(line.strip().removeprefix("> "))
    reader.end()
    return Parsed(tuple(reader.tables), tuple(reader.unread))


def _bare(lines: Sequence[str]) -> Parsed[Table]:
    texts = [line.strip() for line in lines[:_SHORT_LOG] if line.strip() and "BW peak won't be measured" not in line]
    if not texts or len(lines) > _SHORT_LOG or not all(map(_BARE.fullmatch, texts)):
        return Parsed()
    return Parsed((), tuple(texts))
