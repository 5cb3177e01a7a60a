"""Read the text and the JSON of perftest: ib_{send,write,read,atomic}_{bw,lat} and raw_ethernet_*."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from imagebuild.bench.logs import (
    JsonDocument,
    count_decimals,
    excerpt,
    is_table_value,
    json_number,
    json_object,
    parse_integer,
    parse_number,
)
from imagebuild.bench.models import ParsedOutput, PerftestTable, TableRow, TableVerdict

_LONGEST_LINE = 4000
_LONGEST_REASON = 1000
_SHORT_LOG = 20
_NO_PEAK = "BW peak won't be measured"


def parse_perftest_text(source: str, lines: Sequence[str]) -> ParsedOutput[PerftestTable]:
    """Read the tables in cleaned lines.

    With `--output=…`, a program prints one number without its unit and size: that is noted as unread.
    """
    if not any(map(_MARK.match, lines)):
        texts = [line.strip() for line in lines[:_SHORT_LOG] if line.strip() and _NO_PEAK not in line]
        is_bare_number = len(lines) <= _SHORT_LOG and all(map(_BARE_NUMBER.fullmatch, texts))
        return ParsedOutput((), tuple(texts) if is_bare_number else ())
    reader = _PerftestReader(source)
    for line in lines:
        if len(line) <= _LONGEST_LINE:
            reader.read(line.strip().removeprefix("> "))
    reader.end()
    return ParsedOutput(tuple(reader.tables), tuple(reader.unread))


def parse_perftest_json(source: str, document: JsonDocument) -> ParsedOutput[PerftestTable] | None:
    """Read the table of a JSON document; None if it is not of perftest."""
    top = json_object(document.value)
    results = top.get("results")
    if not isinstance(results, dict) or ("test_info" not in top and _JSON_KEYS.isdisjoint(results)):
        return None
    name = json_object(top.get("test_info")).get("test")
    return _json_table(source, name if isinstance(name, str) else None, results)


def parse_perftest_broken_json(source: str, lines: Sequence[str]) -> ParsedOutput[PerftestTable]:
    """Read the tables of what perftest wrote as JSON before 2024, without quotes and with commas too many."""
    text = "\n".join(lines)
    parts = []
    end = 0
    for results in _BROKEN_RESULTS.finditer(text):
        names = _BROKEN_TEST.findall(text[max(end, results.start() - _BROKEN_WINDOW) : results.start()])
        body = text[results.end() : results.end() + _BROKEN_WINDOW].partition("}")[0]
        end = results.end()
        values: dict[str, object] = dict(_BROKEN_PAIR.findall(body))
        if not _JSON_KEYS.isdisjoint(values):
            parts.append(_json_table(source, names[-1] if names else None, values))
    return ParsedOutput.joined(parts)


# Text

_COLUMN = re.compile(
    r"#bytes|#flows|#sl|#iterations|BW (?P<bw>peak|average) ?\[(?P<unit>[^\]\s]{1,12})\]|MsgRate\["
    r"|(?:BW|MsgRate) Port\d|t_(?P<lat>min|max|typical|avg|stdev)\[|(?P<p>99(?:\.9)?)%{1,2} percentile|tps average"
    r"|CPU_Util|fs_\w{1,9}_time|fps\["
)
_BANDWIDTH_COLUMNS = ("#bytes", "#iterations", "peak", "average", "MsgRate[")
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
_BARE_NUMBER = re.compile(r"\d{1,12}\.\d{6}", re.ASCII)
_ROW_WITHOUT_HEADER = re.compile(r"\d{1,18}\s+\d{1,18}\s+\d+\.\d{2,6}\s+\d+\.\d{2,6}\s+\d+\.\d{6}", re.ASCII)
_DECIMALS, _RATE_DECIMALS = 2, 6
"""Digits after the point of every number, and of message rates."""


@dataclass
class _OpenTable:
    """A table whose rows are still to come, or coming."""

    columns: tuple[str, ...]
    unit: str | None
    test: str | None
    rows: list[TableRow] = field(default_factory=list)
    error: str = ""
    has_unread_row: bool = False
    last_line: str = ""
    """The line of the last row."""

    @property
    def has_begun(self) -> bool:
        return bool(self.rows) or self.has_unread_row

    def row_of(self, words: Sequence[str]) -> TableRow | None:
        """Return the row that the words are under these columns, of which only that of CPU usage may be missing."""
        missing = len(self.columns) - len(words)
        if self.columns[:1] != ("#bytes",) or not 0 <= missing <= ("CPU_Util" in self.columns):
            return None
        pairs = list(zip(self.columns, words, strict=False))
        if any(parse_integer(word) is None for name, word in pairs if name.startswith("#")):
            return None
        values = {name: parse_number(word) for name, word in pairs}
        latency = {name[4:]: value for name, value in values.items() if name.startswith("lat ") and value is not None}
        return TableRow(
            size_bytes=int(words[0]),
            bw_peak=values.get("peak"),
            bw_average=values.get("average"),
            msg_rate=values.get("MsgRate["),
            latency_us=latency or None,
        )

    def ends_short(self) -> bool:
        """Return whether the last number of the last row lacks digits, as a number that was cut does."""
        decimals = _RATE_DECIMALS if self.columns[-1:] == ("MsgRate[",) else _DECIMALS
        words = self.last_line.split()
        return len(words) == len(self.columns) and count_decimals(words[-1]) < decimals

    def add_error(self, error: str) -> None:
        if error not in self.error:
            self.error = _joined(self.error, error)

    def verdict(self) -> tuple[TableVerdict, str]:
        """Return the verdict and its reason."""
        if self.error:
            return "failed", self.error
        if not self.rows:
            return "truncated", "the output ends before the first row"
        if self.has_unread_row:
            return "truncated", "a row could not be read"
        for row in self.rows:
            values = (row.bw_peak, row.bw_average, row.msg_rate, *(row.latency_us or {}).values())
            if any(value is not None and value < 0 for value in values):
                return "failed", f"a measurement with {row.size_bytes} bytes is negative"
        return "ok", ""


@dataclass
class _PerftestReader:
    """Read text line by line, of one program or of several whose lines are mixed: titles, headers, rows, errors."""

    source: str
    announced: list[str] = field(default_factory=list)
    """Tests whose title came, and whose table did not yet."""
    test: str | None = None
    """The test whose title came last."""
    is_waiting: bool = False
    """Whether a server waits for its client, and no title came since."""
    open: list[_OpenTable] = field(default_factory=list)
    ended: _OpenTable | None = None
    """The table that ended last, if nothing but rows came since: these are of another process."""
    failed: _OpenTable | None = None
    """A program that failed before its table; more of its errors may follow."""
    possible_error: str = ""
    """An error that may not have ended the program."""
    has_begun: bool = False
    """Whether something of perftest came, so that lines which other programs print as well are its own."""
    last_row: str = ""
    """The last line, if it was a row."""
    tables: list[PerftestTable] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def read(self, text: str) -> None:
        if not text:
            return
        self.last_row = text if self.read_row(text) else ""
        if self.last_row:
            return
        if _DASHES.fullmatch(text):
            # A line of dashes ends the first table that has rows.
            if table := next((table for table in self.open if table.has_begun), None):
                self.close(table)
            return
        self.ended = None
        if self.read_header(text):
            return
        if title := _TITLE.fullmatch(text):
            self.begin_program()
            self.test = title["test"]
            self.announced.append(self.test)
        elif text.startswith("* Waiting for client to connect"):
            self.begin_program()
            self.is_waiting = True
        elif fatal := _FATAL.match(text):
            self.read_fatal_error(excerpt(text), is_early=bool(fatal["early"]))
        elif self.has_begun and _ERROR.match(text):
            self.read_error(excerpt(text))

    def begin_program(self) -> None:
        """Note that something of the next program came."""
        if self.failed:
            self.close(self.failed)
        self.has_begun, self.is_waiting, self.possible_error = True, False, ""

    def read_header(self, text: str) -> bool:
        """Open a table if the line is the header of one; return whether it is."""
        if not text.startswith(("#bytes", "#flows", "bytes ")):
            return False
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
            return False
        self.begin_program()
        test = self.announced.pop() if self.announced else self.test
        self.open.append(_OpenTable(tuple(columns), unit, test))
        return True

    def read_row(self, text: str) -> bool:
        """Keep the line if it is a row, or note it as unread if it looks like one; return whether it was either."""
        words = text.split()
        if not self.has_begun or len(words) < 2 or parse_integer(words[0]) is None or not is_table_value(words[1]):
            return False
        if not self.open:
            if self.ended and self.ended.row_of(words):
                self.open.append(_OpenTable(self.ended.columns, self.ended.unit, self.ended.test))
            elif self.announced and _ROW_WITHOUT_HEADER.fullmatch(text):
                self.open.append(_OpenTable(_BANDWIDTH_COLUMNS, None, self.announced.pop()))
            else:
                return False
        # Of the tables of several processes, the first whose next size this can be.
        size = int(words[0])
        table = next((t for t in self.open if not t.rows or t.rows[-1].size_bytes < size), self.open[-1])
        if row := table.row_of(words) if all(map(is_table_value, words)) else None:
            table.rows.append(row)
            table.last_line = text
        elif parse_integer(words[1]) is None:
            return False
        else:
            table.has_unread_row = True
            self.unread.append(excerpt(text))
        return True

    def read_fatal_error(self, error: str, *, is_early: bool) -> None:
        """Read an error that ends a program: before its table, in it or, if no table is open, after it."""
        self.has_begun = True
        if self.failed or (self.open and not is_early):
            (self.failed or self.open[-1]).add_error(error)
        elif is_early or self.announced or not self.tables:
            test = self.announced.pop() if self.announced and not is_early else None
            self.failed = _OpenTable((), None, test, error=error)
            self.is_waiting = False
        else:
            self.read_error(error)

    def read_error(self, error: str) -> None:
        """Read an error that may not end a program: before its table, it counts only if the table never comes."""
        if self.failed or self.open:
            (self.failed or self.open[-1]).add_error(error)
        elif self.announced or self.is_waiting:
            self.possible_error = self.possible_error or error
        elif self.tables:
            last = self.tables.pop()
            reason = _joined(last.reason, error)
            self.tables.append(last.model_copy(update={"verdict": "failed", "reason": reason}))

    def close(self, table: _OpenTable) -> None:
        if table is self.failed:
            self.failed = None
        else:
            self.open.remove(table)
            self.ended = table
        verdict, reason = table.verdict()
        self.add(table.test, verdict, reason, table.unit, table.rows)

    def end(self) -> None:
        """Close the tables that are open, and add one without rows for each program that printed no table."""
        for table in (*self.open, *((self.failed,) if self.failed else ())):
            if table.rows and table.last_line == self.last_row and table.ends_short():
                table.rows.pop()
                table.has_unread_row = True
                self.unread.append(excerpt(table.last_line))
            self.close(table)
        reason = "the server waits for its client" if self.is_waiting else "no result was printed"
        for name in (*self.announced, *((None,) if self.is_waiting else ())):
            self.add(name, "failed" if self.possible_error else "no-data", self.possible_error or reason)

    def add(
        self,
        test: str | None,
        verdict: TableVerdict,
        reason: str,
        unit: str | None = None,
        rows: Sequence[TableRow] = (),
    ) -> None:
        self.tables.append(
            PerftestTable(source=self.source, test=test, unit=unit, rows=tuple(rows), verdict=verdict, reason=reason)
        )


def _joined(reason: str, error: str) -> str:
    return f"{reason}; {error}".removeprefix("; ")[:_LONGEST_REASON]


# JSON

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
_BROKEN_RESULTS = re.compile(r"""["']?results["']?\s{0,8}:\s{0,8}\{""")
_BROKEN_TEST = re.compile(r"""(?:^|[\s{,])["']?test["']?\s{0,8}:\s{0,8}["']?(\w{1,80})""", re.ASCII)
_BROKEN_PAIR = re.compile(r"""(?:^|[\s{,])["']?([\w.]{1,40})["']?\s{0,8}:\s{0,8}([^\s,}]{1,40})""", re.ASCII)
_BROKEN_WINDOW = 2000
"""Characters before `results` in which the name of the test is searched, and those after it that are read."""


def _json_table(source: str, name: str | None, results: Mapping[str, object]) -> ParsedOutput[PerftestTable]:
    """Return the table of an object `results`, which is one row."""
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
    is_measured = bool(latency) or row.bw_average is not None or row.msg_rate is not None
    if name:
        # `RDMA_Write_BW_Test` is `RDMA_Write BW` in text.
        name = _WORD_OF_TITLE.sub(" ", name.removesuffix("_Test").removesuffix("_")).replace("Post_List", "Post List")
    table = PerftestTable(
        source=source,
        test=name or None,
        unit="usec" if latency else None,
        rows=(row,),
        verdict="ok" if is_measured else "truncated",
        reason="" if is_measured else "a row without a measurement",
    )
    return ParsedOutput((table,))
