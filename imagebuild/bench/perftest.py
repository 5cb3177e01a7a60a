"""Read the text and the JSON of perftest: ib_{send,write,read,atomic}_{bw,lat} and raw_ethernet_*."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from imagebuild.bench.logs import (
    JsonDocument,
    LineReader,
    count_decimals,
    excerpt,
    is_table_value,
    json_number,
    json_object,
    json_text,
    parse_integer,
    parse_number,
)
from imagebuild.bench.models import ParsedOutput, PerftestTable, TableRow, TableVerdict

_LONGEST_REASON = 1000
_SHORT_LOG = 20
_NO_PEAK = "BW peak won't be measured"


def parse_perftest_text(source: str, lines: Sequence[str]) -> ParsedOutput[PerftestTable]:
    """Read the tables in cleaned lines, of one program or of several whose lines are mixed.

    With `--output=…`, a program prints one number without its unit and size: that is noted as unread.
    """
    texts = [line.strip() for line in lines[:_SHORT_LOG] if line.strip() and _NO_PEAK not in line]
    if len(lines) <= _SHORT_LOG and all(map(_BARE_NUMBER.fullmatch, texts)):
        return ParsedOutput((), tuple(texts))
    return _PerftestReader(source).read_all(lines, _MARK, longest=4000)


_COLUMN = re.compile(
    r"#bytes|#flows|#sl|#iterations|BW (?P<bw>peak|average) ?\[(?P<unit>[^\]\s]{1,12})\]|MsgRate\["
    r"|(?:BW|MsgRate) Port\d|t_(?P<lat>min|max|typical|avg|stdev)\[|(?P<p>99(?:\.9)?)%{1,2} percentile|tps average"
    r"|CPU_Util|fs_\w{1,9}_time|fps\["
)
_TITLE_TEXT = (
    r"(?P<test>(?:Send|RDMA_Write|RDMA_Read|Atomic)(?:_imm)?(?: [A-Za-z_]{1,20}){0,5} (?:BW|Latency)"
    r"(?: [a-zA-Z]{1,20}){0,2}) Test"
)
_FATAL_TEXT = (
    r"(?P<early>Couldn't (?:connect to \S{1,255}:\d|listen to port|get context for the device|allocate context)"
    r"|Unable to (?:open file descriptor for socket|init the socket connection|find the Infiniband|create RDMA_CM)"
    r"|IB device \S{1,80} not found)|Couldn't create IB resources|Unable to (?:Connect the HCA|set up socket conn)"
    r"|Completion with error at (?:client|server)|Failed status \d{1,3}: |Failed to (?:modify QP \d|negotiate p"
    r"|exchange data between server and client)|Port number \d{1,3} state is|Problems with warm up"
    r"|(?:ethernet_read_keys: )?Couldn't (?:read|send|parse) (?:remote|local|line)"
)
"""Errors that only perftest prints; `early` ones come before the name of the test."""
_TITLE, _FATAL = re.compile(_TITLE_TEXT), re.compile(_FATAL_TEXT)
_ERROR = re.compile(
    r"(?:Couldn't|Unable to|Failed|ERROR|Error\b|Completion with|Function \w{1,60} failed|Can't produce|Bad wc)"
)
"""Errors that other programs print as well."""
_MARK = re.compile(
    r"[\s>*]{0,80}(?=[#bA-Ze])"
    rf"(?:#?bytes\s{{1,40}}#|#flows|Waiting for client to connect|{_TITLE_TEXT}|{_FATAL_TEXT})"
)
"""A line that only perftest prints."""
_DASHES = re.compile(r"-{20,}")
_BANDWIDTH_COLUMNS = ("#bytes", "#iterations", "peak", "average", "MsgRate[")
_ROW_WITHOUT_HEADER = re.compile(r"\d{1,18}\s+\d{1,18}\s+\d+\.\d{2,6}\s+\d+\.\d{2,6}\s+\d+\.\d{6}", re.ASCII)
_BARE_NUMBER = re.compile(r"\d{1,12}\.\d{6}", re.ASCII)
_DECIMALS, _RATE_DECIMALS = 2, 6
"""Digits after the point of every number, and of message rates."""


@dataclass
class _Program:
    """Hold what one program printed."""

    test: str | None = None
    columns: Sequence[str] = ()
    """Of its table; empty before the header."""
    unit: str | None = None
    rows: list[TableRow] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    waits: bool = False
    """Whether it is a server that waits for its client."""
    has_unread_row: bool = False
    not_measured: list[int] = field(default_factory=list)
    """Sizes of rows with a figure that is no number."""
    is_closed: bool = False
    """Whether the line of dashes after the table came."""

    def row_of(self, words: Sequence[str]) -> TableRow | None:
        """Return the row that the words are under these columns, of which only that of CPU usage may be missing."""
        missing = len(self.columns) - len(words)
        if self.columns[:1] != ("#bytes",) or not 0 <= missing <= ("CPU_Util" in self.columns):
            return None
        pairs = list(zip(self.columns, words, strict=False))
        if any(
            parse_integer(word) is None if name.startswith("#") else not is_table_value(word) for name, word in pairs
        ):
            return None
        if count_decimals(words[-1]) < (_RATE_DECIMALS if pairs[-1][0] == "MsgRate[" else _DECIMALS):
            return None  # the last number is cut
        values = {name: parse_number(word) for name, word in pairs}
        if None in values.values():
            self.not_measured.append(int(words[0]))
        latency = {name[4:]: value for name, value in values.items() if name.startswith("lat ") and value is not None}
        return TableRow(
            size_bytes=int(words[0]),
            bw_peak=values.get("peak"),
            bw_average=values.get("average"),
            msg_rate=values.get("MsgRate["),
            latency_us=latency or None,
        )

    def table(self, source: str) -> PerftestTable:
        """Return the table with its verdict."""
        negative = [
            row.size_bytes
            for row in self.rows
            for value in (row.bw_peak, row.bw_average, row.msg_rate, *(row.latency_us or {}).values())
            if value is not None and value < 0
        ]
        verdicts: tuple[tuple[object, TableVerdict, str], ...] = (
            (self.errors, "failed", "; ".join(dict.fromkeys(self.errors))[:_LONGEST_REASON]),
            (self.has_unread_row, "truncated", "a row could not be read"),
            (not self.columns and self.waits, "no-data", "the server waits for its client"),
            (not self.columns, "no-data", "no result was printed"),
            (not self.rows, "truncated", "the output ends before the first row"),
            (negative, "failed", f"a measurement with {min(negative, default=0)} bytes is negative"),
            (self.not_measured, "failed", f"a figure with {min(self.not_measured, default=0)} bytes is no number"),
            (True, "ok", ""),
        )
        verdict, reason = next((verdict, reason) for holds, verdict, reason in verdicts if holds)
        return PerftestTable(
            source=source, test=self.test, unit=self.unit, rows=tuple(self.rows), verdict=verdict, reason=reason
        )


@dataclass
class _PerftestReader(LineReader[PerftestTable]):
    """Read text line by line: titles, headers, rows, errors."""

    programs: list[_Program] = field(default_factory=list)

    def end(self) -> None:
        self.items += [program.table(self.source) for program in self.programs]

    def read(self, text: str) -> None:
        if self.read_row(text):
            return
        running = [program for program in self.programs if not program.is_closed]
        announced = [program for program in running if not program.columns]
        if _DASHES.fullmatch(text):
            # A line of dashes ends the first table that has rows.
            for program in [program for program in running if program.rows or program.has_unread_row][:1]:
                program.is_closed = True
        elif text.startswith(("#bytes", "#flows", "bytes ")):
            self.read_header(text, announced)
        elif title := _TITLE.fullmatch(text):
            waiting = [program for program in announced if program.waits and program.test is None]
            program = waiting[0] if waiting else self.add(_Program())
            program.test, program.waits = title["test"], False
        elif text.startswith("* Waiting for client to connect"):
            self.add(_Program(waits=True))
        elif fatal := _FATAL.match(text):
            self.read_error(excerpt(text), running, is_early=bool(fatal["early"]))
        elif self.programs and _ERROR.match(text):
            (running or self.programs)[-1].errors.append(excerpt(text))

    def add(self, program: _Program) -> _Program:
        for failed in self.programs:
            # What begins now is another program than one that failed before its table.
            failed.is_closed = failed.is_closed or (bool(failed.errors) and not failed.columns)
        self.programs.append(program)
        return program

    def read_header(self, text: str, announced: Sequence[_Program]) -> None:
        columns: list[str] = []
        unit = None
        for column in _COLUMN.finditer("#" + text.removeprefix("#")):
            if column["bw"]:
                unit = column["unit"]
                columns.append(column["bw"])
            elif column["lat"]:
                unit = "usec"
                columns.append("lat " + ("average" if column["lat"] == "avg" else column["lat"]))
            else:
                columns.append(f"lat p{column['p']}" if column["p"] else column[0])
        if len(columns) <= 2:
            return
        test = self.programs[-1].test if self.programs else None
        program = announced[-1] if announced else self.add(_Program(test))
        program.columns, program.unit, program.waits = tuple(columns), unit, False
        program.errors.clear()  # before its table, an error counts only if the table never comes

    def read_row(self, text: str) -> bool:
        """Keep the line if it is a row, or note it as unread if it looks like one; return whether it was either."""
        words = text.split()
        if len(words) < 2 or parse_integer(words[0]) is None or not is_table_value(words[1]):
            return False
        running = [program for program in self.programs if not program.is_closed and (program.columns or program.test)]
        tables = [program for program in running if program.columns]
        if running and not tables and _ROW_WITHOUT_HEADER.fullmatch(text):
            running[-1].columns = _BANDWIDTH_COLUMNS
            tables = running[-1:]
        if not tables:
            return False
        # Of the tables of several processes, the first whose next size this can be.
        size = int(words[0])
        program = next((p for p in tables if not p.rows or p.rows[-1].size_bytes < size), tables[-1])
        row = program.row_of(words)
        if row:
            program.rows.append(row)
        elif parse_integer(words[1]) is None:
            return False
        else:
            program.has_unread_row = True
            self.unread.append(excerpt(text))
        return True

    def read_error(self, error: str, running: Sequence[_Program], *, is_early: bool) -> None:
        """Read an error that ends a program: before its title, before its table, in it or after it."""
        untitled = [program for program in running if program.errors and not program.test]
        if is_early and not untitled:
            self.add(_Program(errors=[error]))
        elif running or self.programs:
            (untitled or running or self.programs)[-1].errors.append(error)
        else:
            self.add(_Program(errors=[error]))


# JSON: one row

_JSON_KEYS = frozenset(("MsgSize", "BW_average", "MsgRate", "bw_avg", "msgRate_avg", "avg_lat", "t_avg"))
"""One of these is in every object with results."""
_JSON_LATENCIES = {
    "t_min": "min", "t_max": "max", "t_typical": "typical", "t_avg": "average", "t_stdev": "stdev",
    "percentile_99": "p99", "percentile_99.9": "p99.9",
}  # fmt: skip
_WORD_OF_TITLE = re.compile(
    r"_(?=(?:Bidirectional|Post_List|BW|Latency|forwarding|Multicast|CMP_AND_SWAP|FETCH_AND_ADD)(?:_|$))"
)
"""The underscores of a test's name in JSON that are blanks in text."""


def parse_perftest_json(source: str, document: JsonDocument) -> ParsedOutput[PerftestTable] | None:
    """Read the table of a JSON document; None if it is not of perftest."""
    top = json_object(document.value)
    results = top.get("results")
    if not isinstance(results, dict) or ("test_info" not in top and _JSON_KEYS.isdisjoint(results)):
        return None
    values = {key: json_number(value) for key, value in results.items()}
    size = values.get("MsgSize")
    if size is None or size < 0:
        printed = ", ".join(f"{key}: {value}" for key, value in results.items())
        return ParsedOutput((), (excerpt(f"results without a message size: {printed}"),))
    latency = {ours: value for key, ours in _JSON_LATENCIES.items() if (value := values.get(key)) is not None}
    row = TableRow(
        size_bytes=int(size),
        bw_peak=values.get("BW_peak"),
        bw_average=values.get("BW_average"),
        msg_rate=values.get("MsgRate"),
        latency_us=latency or None,
    )
    no_number = next((key for key in (*_JSON_LATENCIES, "BW_average", "MsgRate") if values.get(key, 0) is None), None)
    is_measured = bool(latency) or row.bw_average is not None or row.msg_rate is not None
    verdict: tuple[TableVerdict, str] = ("ok", "") if is_measured else ("truncated", "a row without a measurement")
    if no_number:
        verdict = "failed", f"{no_number} is no number"
    # `RDMA_Write_BW_Test` is `RDMA_Write BW` in text.
    name = (json_text(json_object(top.get("test_info")).get("test")) or "").removesuffix("_Test").removesuffix("_")
    table = PerftestTable(
        source=source,
        test=_WORD_OF_TITLE.sub(" ", name).replace("Post_List", "Post List") or None,
        unit="usec" if latency else None,
        rows=(row,),
        verdict=verdict[0],
        reason=verdict[1],
    )
    return ParsedOutput((table,))
