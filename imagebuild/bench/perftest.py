"""Read the text and the JSON of perftest: ib_{send,write,read,atomic}_{bw,lat} and raw_ethernet_*."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from imagebuild.bench import logs
from imagebuild.bench.logs import excerpt, json_object, parse_integer
from imagebuild.bench.models import PerftestTable
from imagebuild.bench.tables import TableBuilder


def parse_perftest_text(source: str, lines: Sequence[str]) -> logs.Parsed[PerftestTable]:
    """Read the tables in cleaned lines, of one program or of several whose lines are mixed."""
    reader = _PerftestReader()
    for text in logs.lines_of(_MARK, lines, longest=4000):
        reader.read(text)
    return [*reader.unread, *(program.table(source) for program in reader.programs)]


_COLUMN = re.compile(
    r"(?P<figure>BW (?:peak|average)|t_(?:min|max|typical|avg|stdev)|99(?:\.9)?%{1,2} percentile)"
    r" ?\[(?P<unit>[^\]\s]{1,12})\]|(?P<rate>MsgRate)\["
    r"|#bytes|#flows|#sl|#iterations|(?:BW|MsgRate) Port\d|tps average|CPU_Util|fs_\w{1,9}_time|fps\["
)
_FIGURES = {
    "BW_peak": "bw_peak", "BW_average": "bw_average", "MsgRate": "msg_rate", "t_min": "lat min", "t_max": "lat max",
    "t_typical": "lat typical", "t_avg": "lat average", "t_stdev": "lat stdev", "percentile_99": "lat p99",
    "percentile_99.9": "lat p99.9", "99%_percentile": "lat p99", "99.9%_percentile": "lat p99.9",
}  # fmt: skip
"""Names of figures in JSON, and in text with underscores for blanks → those in a table."""
_TITLE_TEXT = (
    r"(?P<test>(?:Send|RDMA_Write|RDMA_Read|Atomic)(?:_imm)?(?: [A-Za-z_]{1,20}){0,5} (?:BW|Latency)"
    r"(?: [a-zA-Z]{1,20}){0,2}) Test"
)
_FATAL_TEXT = (
    r"(?:Couldn't (?:connect to \S{1,255}:\d|listen to port|get context for the device|allocate context)"
    r"|Unable to (?:open file descriptor for socket|init the socket connection|find the Infiniband|create RDMA_CM)"
    r"|IB device \S{1,80} not found)|Couldn't create IB resources|Unable to (?:Connect the HCA|set up socket conn)"
    r"|Completion with error at (?:client|server)|Failed status \d{1,3}: |Failed to (?:modify QP \d|negotiate p"
    r"|exchange data between server and client)|Port number \d{1,3} state is|Problems with warm up"
    r"|(?:ethernet_read_keys: )?Couldn't (?:read|send|parse) (?:remote|local|line)|Error: BW result is below"
)
"""Errors that only perftest prints."""
_TITLE, _FATAL = re.compile(_TITLE_TEXT), re.compile(_FATAL_TEXT)
_ERROR = re.compile(
    r"(?:Couldn't|Unable to|Failed|ERROR|Error\b|Completion with|Function \w{1,60} failed|Can't produce|Bad wc)"
)
"""Errors that other programs print as well."""
_MARK = re.compile(
    r"[\s>*]{0,80}(?=[#bA-Ze])"
    rf"(?:#?bytes\s{{1,40}}#|#flows|{_TITLE_TEXT}|{_FATAL_TEXT})"
)
"""A line that only perftest prints."""
_DASHES = re.compile(r"-{20,}")
_BANDWIDTH_COLUMNS = ("#bytes", "#iterations", "bw_peak", "bw_average", "msg_rate")
_ROW_WITHOUT_HEADER = re.compile(r"\d{1,18}\s+\d{1,18}\s+\d+\.\d{2,6}\s+\d+\.\d{2,6}\s+\d+\.\d{6}", re.ASCII)
_WHOLE, _WHOLE_RATE = re.compile(r".*\.\d{2,}"), re.compile(r".*\.\d{6,}")
"""What the last number of a row looks like, and a message rate: one with fewer digits after the point was cut."""


def _values_of(columns: Sequence[str], words: Sequence[str]) -> dict[str, float | None] | None:
    """Return the values of a row by column, of which only that of CPU usage may be missing; None if it is no row."""
    missing = len(columns) - len(words)
    if columns[:1] != ("#bytes",) or not 0 <= missing <= ("CPU_Util" in columns):
        return None
    pairs = list(zip(columns, words, strict=False))
    for name, word in pairs:
        if parse_integer(word) is None if name.startswith("#") else not logs.is_table_value(word):
            return None
    is_whole = (_WHOLE_RATE if pairs[-1][0] == "msg_rate" else _WHOLE).fullmatch(words[-1])
    return {name: logs.parse_number(word) for name, word in pairs} if is_whole else None


@dataclass
class _PerftestReader:
    """Read text line by line: titles, headers, rows, errors."""

    programs: list[TableBuilder] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

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
            self.add(TableBuilder(title["test"]))
        elif _FATAL.match(text):
            (running[-1] if running else self.add(TableBuilder())).errors.append(excerpt(text))
        elif running and _ERROR.match(text):
            running[-1].errors.append(excerpt(text))

    def add(self, program: TableBuilder) -> TableBuilder:
        for failed in self.programs:
            # What begins now is another program than one that failed before its table.
            failed.is_closed = failed.is_closed or (bool(failed.errors) and not failed.columns)
        self.programs.append(program)
        return program

    def read_header(self, text: str, announced: Sequence[TableBuilder]) -> None:
        found = list(_COLUMN.finditer("#" + text.removeprefix("#")))
        if len(found) <= 2:
            return
        names = [(column["figure"] or column["rate"] or column[0]).replace(" ", "_") for column in found]
        test = self.programs[-1].test if self.programs else None
        program = announced[-1] if announced else self.add(TableBuilder(test))
        program.columns = tuple(_FIGURES.get(name.replace("%%", "%"), name) for name in names)
        program.unit = next(filter(None, (column["unit"] for column in found)), None)
        program.errors.clear()  # before its table, an error counts only if the table never comes

    def read_row(self, text: str) -> bool:
        """Keep the line if it is a row, or note it as unread if it looks like one; return whether it was either."""
        words = text.split()
        if len(words) < 2 or parse_integer(words[0]) is None or not logs.is_table_value(words[1]):
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
        program = next((p for p in tables if not p.rows or (p.rows[-1].size_bytes or 0) < size), tables[-1])
        if program.rows and size < (program.rows[-1].size_bytes or 0):
            return False  # another program's
        if values := _values_of(program.columns, words):
            program.add_row(size, values)
        elif parse_integer(words[1]) is None:
            return False
        else:
            program.has_unread_row = True
            self.unread.append(excerpt(text))
        return True


# JSON: one row

_JSON_KEYS = frozenset(("MsgSize", "BW_average", "MsgRate", "bw_avg", "msgRate_avg", "avg_lat", "t_avg"))
"""One of these is in every object with results."""
_WORD_OF_TITLE = re.compile(
    r"_(?=(?:Bidirectional|Post_List|BW|Latency|forwarding|Multicast|CMP_AND_SWAP|FETCH_AND_ADD)(?:_|$))"
)
"""The underscores of a test's name in JSON that are blanks in text."""


def parse_perftest_json(source: str, document: logs.JsonDocument) -> logs.Parsed[PerftestTable] | None:
    """Read the table of a JSON document; None if it is not of perftest."""
    top = json_object(document.value)
    results = top.get("results")
    if not isinstance(results, dict) or ("test_info" not in top and _JSON_KEYS.isdisjoint(results)):
        return None
    values = {key: logs.json_number(value) for key, value in results.items()}
    size = values.get("MsgSize")
    if size is None or size < 0:
        printed = ", ".join(f"{key}: {value}" for key, value in results.items())
        return [excerpt(f"results without a message size: {printed}")]
    figures = {ours: values[key] for key, ours in _FIGURES.items() if key in values}
    columns = tuple(name for name in figures if name != "bw_peak")
    # `RDMA_Write_BW_Test` is `RDMA_Write BW` in text.
    name = (logs.json_text(json_object(top.get("test_info")).get("test")) or "").removesuffix("_Test").removesuffix("_")
    name = _WORD_OF_TITLE.sub(" ", name).replace("Post_List", "Post List")
    table = TableBuilder(name or None, columns=columns, has_unread_row=not columns)
    table.add_row(int(size), figures)
    table.unit = "usec" if table.rows[0].latency_us else None
    return [table.table(source)]
