"""Read the tables of perftest, OSU, NVSHMEM, ucx_perftest and all_reduce_bench.py: bandwidth or latency by message
size.

The tables of the first three tools have a title and a header. The header names the columns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from imagebuild.bench import logs
from imagebuild.bench.arithmetic import contradiction
from imagebuild.bench.ceilings import GB_UNITS
from imagebuild.bench.logs import LogLine, ParsedLines, excerpt, json_object, parse_integer, parse_number
from imagebuild.bench.models import Half, NcclRow, PerftestTable, Run, TableRow, Verdict
from imagebuild.core.patterns import DataFile


@dataclass
class _TableBuilder:
    """A table that is being read."""

    line: int
    """Number of the first line of the table."""
    tool: str
    test: str | None = None
    columns: Sequence[str] = ()
    """Names of the columns: for figures, the names that `add_row` knows; for other columns, the printed names. Empty
    before the header is read."""
    unit: str | None = None
    rows: list[TableRow] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    compared: bool = False
    has_unread_row: bool = False
    devices: list[str] = field(default_factory=list)
    about: dict[str, str] = field(default_factory=dict)
    """Parameters of perftest, as in the pattern `parameter`."""
    wrong_figure: str = ""
    """The reason why a figure is wrong: it is negative or not a number. Empty if all figures are right."""
    is_closed: bool = False
    """Whether the table ended."""

    @property
    def last_size(self) -> int:
        """The size of the last row, or -1 before the first row."""
        return (self.rows[-1].size_bytes or 0) if self.rows else -1

    def add_row(self, size: int | None, values: Mapping[str, float | None]) -> None:
        """Add a row. The names of values are `bw_peak`, `bw_average`, `msg_rate`, `messages` (a second), `lat min` …"""
        latency = {name[4:]: value for name, value in values.items() if name.startswith("lat ") and value is not None}
        rates = {name: values.get(name) for name in ("bw_peak", "bw_average", "msg_rate")}
        if "messages" in values:
            rates["msg_rate"] = (values["messages"] or 0) / 1e6
        self.rows.append(TableRow(size_bytes=size, latency_us=latency or None, **rates))
        for value in values.values():
            if value is None or value < 0:
                self.wrong_figure = f"a figure for {size} bytes is {'not a number' if value is None else 'negative'}"

    def contradiction(self) -> str:
        """Return why the figures of a row cannot all be right, or an empty text.

        The average bandwidth is at most the peak, unless the peak was not measured (0). It is the size times the
        message rate, except for raw Ethernet, whose size includes headers. Bandwidths have two decimals, message
        rates six, so they are wrong by up to half of the last digit. The average latency is between the least and the
        largest. No average is 0."""
        scale = GB_UNITS.get(self.unit or "", 0.0) if self.about.get("connection") != "RawEth" else 0.0
        half = _DATA["half_digit"]
        for row in self.rows:
            average, times, where = row.bw_average, row.latency_us or {}, f"of {row.size_bytes} bytes"
            mean = times.get("average")
            if average == 0 or mean == 0:
                return f"the average {where} is 0"
            if average and row.bw_peak and average > row.bw_peak + half:
                return f"the average bandwidth {where} is above the peak"
            if average and row.msg_rate is not None and row.size_bytes and scale:
                low, high = ((row.msg_rate + error) * row.size_bytes / 1e3 for error in (-5.1e-7, 5.1e-7))
                if not (average - half) * scale <= high or not (average + half) * scale >= low:
                    return f"average bandwidth and message rate {where} do not fit each other"
            if mean and not times.get("min", 0) - 0.01 <= mean <= times.get("max", mean) + 0.01:
                return f"the average latency {where} is not between the least and the largest"
        return ""

    def table(self, source: str) -> PerftestTable:
        """Return the table with its verdict: the first problem in order of severity."""
        verdicts: tuple[tuple[object, Verdict, str], ...] = (
            (self.errors, "failed", "; ".join(dict.fromkeys(self.errors))[:1000]),
            (self.has_unread_row, "truncated", "a row could not be read"),
            (not self.columns, "no-data", "no result was printed"),
            (not self.rows, "truncated", "the output ends before the first row"),
            (self.wrong_figure, "failed", self.wrong_figure),
            (contradiction := self.contradiction(), "damaged", contradiction),
            (True, "ok", ""),
        )
        _, verdict, reason = next(known for known in verdicts if known[0])
        return PerftestTable(
            source=source, tool=self.tool, test=self.test, unit=self.unit, rows=tuple(self.rows),
            compared=self.compared, verdict=verdict, reason=reason, devices=tuple(dict.fromkeys(self.devices)),
            queue_pairs=parse_integer(self.about.get("pairs", "")), ports=1 + (self.about.get("dual") == "ON"),
        )  # fmt: skip


@dataclass(frozen=True)
class TableFormat:
    """The form in which a tool prints tables. tables.yaml explains the fields."""

    tool: str
    lines: Mapping[str, re.Pattern[str]]
    decimals: int
    is_mixed: bool


_DATA = DataFile(__file__)
_RE = _DATA.patterns
FORMATS = {
    tool: TableFormat(tool, {kind: _DATA.pattern(text) for kind, text in form["lines"].items()}, *form["rows"])
    for tool, form in _DATA["formats"].items()
}
"""The form of the tables of each tool."""
_FIGURES: Mapping[str, str] = {column: name for name, columns in _DATA["columns"].items() for column in columns}
"""Maps the name of a column in a header or in JSON, in lower case with underscores, to a name that `add_row` knows."""


def _device_in(text: str) -> list[str]:
    return [match["device"] or match["gpu"]] if (match := _RE["device"].fullmatch(text)) else []


def parse_tables(form: TableFormat, source: str, lines: Sequence[LogLine]) -> ParsedLines[PerftestTable]:
    """Return the tables of a tool, and the rows that could not be read. A row with wrong data makes its table fail."""
    reader = _TableReader(form)
    for reader.line, text in logs.lines_of(form.lines["mark"], lines, longest=4000):
        reader.read(text)
    tables = [(table.line, table.table(source)) for table in reader.tables]
    # In the output of NVSHMEM, any comment of one word looks like a title.
    return [*reader.unread, *(entry for entry in tables if form.tool != "nvshmem" or entry[1].verdict != "no-data")]


@dataclass
class _TableReader:
    """A reader of text, line by line: titles, headers, rows and errors."""

    form: TableFormat
    line: int = 0
    tables: list[_TableBuilder] = field(default_factory=list)
    unread: list[tuple[int, str]] = field(default_factory=list)
    devices: list[str] = field(default_factory=list)
    """GPUs that were named before their table."""

    def read(self, text: str) -> None:
        running = [table for table in self.tables if not table.is_closed]
        if self.read_row(text, running):
            return
        self.devices += _device_in(text)
        if running and not running[-1].columns:
            for found in _RE["parameter"].finditer(text):
                running[-1].about |= {name: value for name, value in found.groupdict().items() if value}
        if self.form.lines["header"].fullmatch(text) and (self.tables or self.form.is_mixed):
            self.read_header(text, [table for table in running if not table.columns])
        elif title := self.form.lines["title"].fullmatch(text):
            self.begin(title["test"])
        elif self.form.lines["fatal"].match(text):
            (running[-1] if running else self.begin(None)).errors.append(excerpt(text))
        elif running and self.form.lines["error"].match(text):
            running[-1].errors.append(excerpt(text))
        elif running and (match := _RE["nvshmem_wrong"].fullmatch(text)):
            running[-1].compared = True
            running[-1].errors += [text.removeprefix("# ")] if int(match["wrong"]) else []
        elif _RE["dashes"].fullmatch(text):
            for table in [table for table in running if table.rows or table.has_unread_row][:1]:
                table.is_closed = True

    def begin(self, test: str | None) -> _TableBuilder:
        for table in self.tables:
            # A table that failed before its header belongs to a program that has ended.
            has_failed = bool(table.errors) and not table.columns
            table.is_closed = table.is_closed or not self.form.is_mixed or has_failed
        self.tables.append(_TableBuilder(self.line, self.form.tool, test, devices=self.devices))
        self.devices = []
        return self.tables[-1]

    def read_header(self, text: str, announced: Sequence[_TableBuilder]) -> None:
        table = announced[-1] if announced else self.begin(self.tables[-1].test if self.tables else None)
        found = list(_RE["column"].finditer(text))
        names = [match["name"].replace(" ", "_").replace("%%", "%") for match in found]
        table.columns = tuple(_FIGURES.get(name.lower(), name) for name in names)
        units = (match["unit"] or name for name, match in zip(names, found, strict=True) if name.lower() in _FIGURES)
        table.unit = _DATA["units"].get(next(units, ""))
        table.compared = "Validation" in table.columns
        table.errors.clear()  # an error before a table counts only if no table follows

    def read_row(self, text: str, running: Sequence[_TableBuilder]) -> bool:
        """Add the line to a table, or to `unread` if it is a broken row. Return whether it is a row."""
        words = text.split()
        if not words or (size := parse_integer(words[0])) is None:
            return False
        tables = [table for table in running if table.columns]
        # If several processes print tables, the row belongs to the first table in which its size can come next.
        table = next((table for table in tables if table.last_size < size), tables[-1] if tables else None)
        if table is None or size < table.last_size:
            return False
        if values := self.values_of(table.columns, words):
            table.add_row(size, values)
            table.errors += [f"the data of {size} bytes were wrong"] if "fail" in text.lower() else []
        elif words[1:] and parse_integer(words[1]) is None if self.form.is_mixed else len(words) > len(table.columns):
            return False  # another program printed the line
        else:
            table.has_unread_row = True
            self.unread.append((self.line, excerpt(text)))
        return True

    def values_of(self, columns: Sequence[str], words: Sequence[str]) -> dict[str, float | None]:
        """Return the figures of a row by name; empty if the row is cut. Only the CPU usage may be missing."""
        if not 0 <= len(columns) - len(words) <= ("CPU_Util" in columns):
            return {}
        pairs = list(zip(columns, words, strict=False))
        figures = {name: word for name, word in pairs if name in _FIGURES.values()}
        integers = [word for name, word in pairs if name.startswith("#")]
        if None in map(parse_integer, integers) or not all(map(logs.is_table_value, figures.values())):
            return {}
        name, last = pairs[-1]
        decimals = 6 if self.form.is_mixed and name == "msg_rate" else self.form.decimals
        is_whole = (name not in figures and not self.form.is_mixed) or len(last.partition(".")[2]) >= decimals
        if name == "Validation":
            is_whole = last.lower() in ("pass", "fail")
        return {name: parse_number(word) for name, word in figures.items()} if is_whole else {}


def parse_perftest_json(source: str, document: logs.JsonDocument) -> logs.Parsed[PerftestTable] | None:
    """Return the table in a JSON document; None if perftest did not write the document."""
    top = json_object(document.value)
    results = top.get("results")
    if not isinstance(results, dict) or ("test_info" not in top and results.keys().isdisjoint(_DATA["json_keys"])):
        return None
    values = {key: logs.json_number(value) for key, value in results.items()}
    size = values.get("MsgSize")
    if size is None or size < 0:
        return [excerpt(f"results without a message size: {results}")]
    figures = {_FIGURES[key.lower()]: value for key, value in values.items() if key.lower() in _FIGURES}
    columns = tuple(name for name in figures if name != "bw_peak")
    # The text output has `RDMA_Write BW` instead of `RDMA_Write_BW_Test`.
    name = (logs.json_text(json_object(top.get("test_info")).get("test")) or "").removesuffix("_Test").removesuffix("_")
    name = _RE["word_of_title"].sub(" ", name).replace("Post_List", "Post List")
    table = _TableBuilder(document.number, "perftest", name or None, columns=columns, has_unread_row=not columns)
    table.add_row(int(size), figures)
    table.unit = "usec" if table.rows[0].latency_us else None
    about = json_object(top.get("test_info"))
    keys = {"pairs": "Number_of_qps", "dual": "Dual_port", "connection": "Connection_type"}
    table.about = {name: f"{about[key]}" for name, key in keys.items() if key in about}
    return [table.table(source)]


def parse_ucx_text(source: str, lines: Sequence[LogLine]) -> ParsedLines[PerftestTable]:
    """Return the tables of ucx_perftest, and the rows that could not be read. ucx_perftest prints MB for 2^20 bytes."""
    tables: list[_TableBuilder] = []
    unread: ParsedLines[PerftestTable] = []
    test = quantity = size = table = None
    devices: list[str] = []

    def begin(*columns: str) -> _TableBuilder:
        nonlocal size
        # The last name and size may belong to an earlier run: a latency test before a table of overheads.
        is_of_another = test and quantity and ("latency" in test) != (quantity == "latency")
        size = None if is_of_another else size
        name = quantity if is_of_another else test or quantity
        tables.append(_TableBuilder(number, "ucx_perftest", name, columns, devices=[*devices]))
        return tables[-1]

    for number, text in logs.lines_of(_RE["ucx_mark"], lines, longest=500):
        devices += _device_in(text)
        is_result = text.startswith("Final:") or (table is not None and "Test" in table.columns and not table.rows)
        if match := _RE["ucx_field"].match(text):
            value = match["value"].strip()
            if match["key"] == "Test":
                test, quantity, size, table = value, None, None, None
            else:
                size = parse_integer(value)
        elif match := _RE["ucx_quantity"].fullmatch(text):
            test, size = (None, None) if quantity else (test, size)
            quantity, table = match["quantity"], None
        elif match := _RE["ucx_header"].fullmatch(text):
            table = begin(match["label"])
        elif match := _RE["ucx_error"].fullmatch(text):
            table = table or begin()
            table.errors += [] if table.errors else [excerpt(match["message"])]  # the first error is the cause
        elif is_result and (figures := _ucx_figures(text.removeprefix("Final:").split())):
            table = begin("Stage") if table is None or table.rows else table
            is_latency = "latency" in (table.test or "")
            table.unit = "usec" if is_latency else "MiB/sec"
            table.add_row(size, {name: v for name, v in figures.items() if name.startswith("lat ") == is_latency})
        elif text.startswith("Final:") and any(map(logs.is_table_value, text.split())):
            unread.append((number, excerpt(text)))
    return [*unread, *((table.line, table.table(source)) for table in tables)]


def _ucx_figures(words: Sequence[str]) -> dict[str, float | None]:
    """Return the overall figures of a result by name; empty if the row is incomplete.

    A row has the iterations, three times, two bandwidths and two rates; with several threads, only the iterations and
    the overall figures. The rate is the inverse of the time. A lower number has lost digits."""
    if len(words) not in (8, 4) or not all(map(logs.is_table_value, words)) or "." in words[0] or "." in words[-1]:
        return {}
    numbers = [parse_number(word) for word in words]
    time, bandwidth, rate = numbers[3::2] if len(words) == 8 else numbers[1:]
    if time is None or rate is None or (time > _DATA["least_time_us"] and rate < 0.9 * 1e6 / time - 1):
        return {}
    typical = {"lat typical": numbers[1]} if len(words) == 8 else {}
    return {"lat average": time, **typical, "bw_average": bandwidth, "messages": rate}


def parse_all_reduce_bench(source: str, lines: Sequence[LogLine]) -> ParsedLines[Run]:
    """Return the runs of all_reduce_bench.py, which neither validates data nor prints the number of nodes."""
    runs: list[tuple[int, Run]] = []
    devices: tuple[str, ...] = ()
    for line in lines:
        text = line.text.strip()
        if match := _RE["arb_device"].fullmatch(text):
            devices = (match["device"],)
        elif match := _RE["arb_title"].fullmatch(text):
            run = Run(source=source, tool="all_reduce_bench", collective="all_reduce", ranks=int(match["ranks"]),
                      devices=devices, compared=False, verdict="no-data", reason="no row of results")  # fmt: skip
            runs.append((line.number, run))
        elif runs and (match := _RE["arb_row"].fullmatch(text)):
            size = round(float(match["size"]) * 1024 ** " KMGT".index(match["unit"] or " "))
            algbw = float(match["algbw"])
            time = size / algbw / 1e3 if algbw else None
            half = Half(time_us=time, algbw_gb_s=algbw, busbw_gb_s=float(match["busbw"]), wrong=None)
            row = NcclRow(size_bytes=size, count=size // 4, dtype="float", redop="sum", root=None, out_of_place=half,
                          in_place=None)  # fmt: skip
            begin, run = runs[-1]
            update = {"rows": (*run.rows, row), "verdict": "ok", "reason": "complete; data were not validated"}
            runs[-1] = begin, run.model_copy(update=update)
    for place, (begin, run) in enumerate(runs):
        if run.rows and (reason := contradiction(run.rows, "all_reduce", has_times=False)):
            runs[place] = begin, run.model_copy(update={"verdict": "damaged", "reason": reason})
    return [*runs]
