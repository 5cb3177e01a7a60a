"""Read the matrices of nvbandwidth (text and JSON since 0.1) and of p2pBandwidthLatencyTest of the CUDA samples."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from imagebuild.bench.logs import (
    JsonDocument,
    count_decimals,
    excerpt,
    is_table_value,
    json_list,
    json_number,
    json_object,
    json_text,
    parse_integer,
    parse_number,
)
from imagebuild.bench.models import BandwidthTest, ParsedOutput

MatrixCells = tuple[tuple[float | None, ...], ...]


def parse_nvbandwidth_text(source: str, lines: Sequence[str]) -> ParsedOutput[BandwidthTest]:
    """Read the tests of nvbandwidth in cleaned lines."""
    if not any(map(_MARK.match, lines)):
        return ParsedOutput()
    reader = _NvbandwidthReader(source)
    last = max(index for index, line in enumerate(lines) if line.strip())
    for index, line in enumerate(lines):
        if len(line) <= _LONGEST_LINE:
            reader.read(line.strip().removeprefix("> "), is_last=index == last)
    reader.end_open_test()
    return ParsedOutput(tuple(reader.tests), tuple(reader.unread))


def parse_nvbandwidth_json(source: str, document: JsonDocument) -> ParsedOutput[BandwidthTest] | None:
    """Read the tests of a JSON document; None if it is not of nvbandwidth."""
    top = json_object(document.value).get("nvbandwidth")
    if not isinstance(top, dict):
        return None
    version = json_text(top.get("version")) or json_text(top.get("git_version"))
    tests: list[BandwidthTest] = []
    unread: list[str] = []
    for case in json_list(top.get("testcases")):
        if not isinstance(case, dict):
            unread.append(excerpt(f"testcases: {case!r}"))
            continue
        name, printed = json_text(case.get("name")), json_text(case.get("status")) or ""
        status, reason = _JSON_STATUS.get(printed.lower()), json_text(case.get("error")) or ""
        if status is None:
            unread.append(excerpt(f"{name}: status {printed!r}"))
            continue
        if status == "error" and tests and tests[-1].name == name and tests[-1].status == "truncated":
            # A test that fails is written a second time, and the first entry goes on saying that it runs.
            tests.pop()
        matrix, problem = _json_matrix(case.get("bandwidth_matrix"))
        if problem:
            unread.append(excerpt(f"{name}: {problem}"))
            status, reason = "truncated", reason or "its matrix could not be read"
        if status == "truncated":
            reason = reason or "the document was written while the test ran"
        unit = _UNIT.search(json_text(case.get("bandwidth_description")) or "")
        tests.append(
            BandwidthTest(
                source=source,
                tool_version=version,
                name=name,
                unit=unit[1] if unit else None,
                status=status,
                matrix=matrix,
                sum=json_number(case.get("sum")),
                reason=excerpt(reason),
            )
        )
    if error := json_text(top.get("error")):
        tests.append(
            BandwidthTest(
                source=source, tool_version=version, name=None, unit=None, status="error", matrix=None, sum=None,
                reason=excerpt(error),
            )
        )  # fmt: skip
    return ParsedOutput(tuple(tests), tuple(unread))


def parse_p2p_text(source: str, lines: Sequence[str]) -> ParsedOutput[BandwidthTest]:
    """Read the matrices of p2pBandwidthLatencyTest in cleaned lines."""
    if not any(map(_P2P_MARK.match, lines)):
        return ParsedOutput()
    reader = _P2pReader(source)
    for line in lines:
        if line and len(line) <= _LONGEST_LINE:
            reader.read(line.strip().removeprefix("> "))
    reader.end_matrix()
    return ParsedOutput(tuple(reader.tests), tuple(reader.unread))


def p2p_gains_nothing(tests: Sequence[BandwidthTest]) -> bool:
    """Return whether copies between GPUs were as fast with P2P disabled as enabled: P2P is off or does not work.

    `tests` are those of one run of p2pBandwidthLatencyTest; False if they do not say it, or there is but one GPU. Over
    PCIe alone a healthy machine may gain little bandwidth, so both must hold: no pair gains bandwidth, and no printed
    latency falls.
    """
    matrices = {test.name: test.matrix or () for test in tests if test.tool == "p2pBandwidthLatencyTest"}
    bandwidth = _pairs_of_gpus(matrices, "unidirectional_p2p_enabled", "unidirectional_p2p_disabled")
    latency = _pairs_of_gpus(matrices, "p2p_disabled_latency_gpu", "p2p_enabled_latency_gpu")
    return bool(bandwidth) and all(first <= second * _NO_GAIN for first, second in bandwidth + latency)


def _pairs_of_gpus(matrices: Mapping[str | None, MatrixCells], first: str, second: str) -> list[tuple[float, float]]:
    """Return the figures of each pair of GPUs in two matrices, side by side."""
    return [
        (cell, other)
        for row, (cells, others) in enumerate(zip(matrices.get(first, ()), matrices.get(second, ()), strict=False))
        for column, (cell, other) in enumerate(zip(cells, others, strict=False))
        if row != column and cell is not None and other is not None
    ]


_LONGEST_LINE = 100_000
_MOST_COLUMNS = 4096
"""More columns than any machine has, so that a stray line of numbers is no header."""
_ROW_LABEL = re.compile(r"\d{1,6}(?:\s*->\s*\d{1,6})?", re.ASCII)


@dataclass
class _MatrixRows:
    """The rows of one matrix while they are read."""

    columns: int | None = None
    """`None` until the header, or a first row without a header, was read."""
    rows: list[tuple[float | None, ...]] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    """Lines that begin like a row, and are cut or broken by other output."""
    ends_short: bool = False
    """Whether the last cell that was read has fewer decimals than the others of its row, as a cell that was cut has."""

    def read_header(self, words: Sequence[str]) -> bool:
        """Keep the number of columns if the words are the header, which counts from 0; return whether they are."""
        if self.columns is not None or not 0 < len(words) <= _MOST_COLUMNS:
            return False
        if any(parse_integer(word) != column for column, word in enumerate(words)):
            return False
        self.columns = len(words)
        return True

    def read_row(self, line: str) -> bool:
        """Keep the line if it is a row, or note it as unread if it is the rest of one; return whether it was either.

        Rows come in order. A row that is cut has the next number, and a row after a gap has all its columns. A line
        with neither is another program's.
        """
        words = line.split()
        if len(words) < 2 or parse_integer(words[0].split("->")[0]) is None:
            return False
        columns = self.columns if self.columns is not None else len(words) - 1
        label, values = " ".join(words[:-columns]), words[-columns:]
        is_next = int(words[0].split("->")[0]) == len(self.rows)
        is_complete = bool(_ROW_LABEL.fullmatch(label)) and all(map(is_table_value, values))
        if is_next and is_complete:
            self.columns = columns
            self.rows.append(tuple(map(parse_number, values)))
            decimals = [count_decimals(value) for value in values]
            self.ends_short = parse_number(values[-1]) is not None and decimals[-1] < max(decimals)
            return True
        if is_complete or (is_next and any(map(is_table_value, words[1:]))):
            self.unread.append(excerpt(line))
            return True
        return False

    def cells(self) -> MatrixCells | None:
        return tuple(self.rows) or None


# nvbandwidth

_MARK = re.compile(
    r"[\s>]{0,40}(?:nvbandwidth Version|[Rr]unning \w+_|SUM \w+_|&&&& PERF \w+_|Waived:|Waiving \w+_"
    r"|memcpy (?:CE|SM|TMA|local) |memory latency |Device to Device Latency |multicast SM )",
    re.ASCII,
)
"""A line that only nvbandwidth prints."""
_VERSION = re.compile(r"nvbandwidth Version: (\S{1,40})")
_RUNNING = re.compile(r"[Rr]unning (\w{1,80})\.?", re.ASCII)
_WAIVED = re.compile(r"(?:Waived: ?|Waiving (?P<name>\w{1,80})\.)(?P<reason>.*)", re.ASCII)
_SUM = re.compile(
    r"(?:SUM|&&&& PERF) (?P<name>[\w.-]{1,100}) (?P<sum>\S{1,40})(?: [+-]?(?P<unit>GB/s|ns)\b)?(?: .*)?", re.ASCII
)
_DESCRIPTION = re.compile(
    r".{0,100}(?:\((?:row|column)\)|\bGPU\b|All Gpus).{0,60}\((?:GB/s|ns|us)\)|Bisect bench.{0,60}"
)
_LONGEST_DESCRIPTION = 200
_UNIT = re.compile(r"\((GB/s|ns|us)\)")
_DIRECTION = re.compile(r"\b(read1|read2|write1|write2|total) bandwidth", re.IGNORECASE)
_ERROR = re.compile(
    r"(?:ERROR|Error)\b:? ?.*|ASSERT in expression .*|NVML_ERROR: .*|\[\w{1,60}\] .* in expression .*"
    r"|Invalid value when checking the pattern.*|Current offset.*"
    r"|You cannot specify both testcase.*|Specified list of testcase prefixes did not match.*"
)
_NOT_FOUND = re.compile(r"(?:ERROR|Error): Testcase (?:index )?(\S{1,100}) (?:not found|out of bound)!?")
_SUM_DECIMALS = 2
_JSON_STATUS = {
    "passed": "passed", "waived": "waived", "not found": "not-found", "running": "truncated", "error": "error",
}  # fmt: skip


@dataclass
class _NvbandwidthReader:
    """Read text line by line: the name of a test, the description of its matrix, the matrix, its sum with the name."""

    source: str
    version: str | None = None
    running: str | None = None
    """The test that was announced last."""
    is_announced: bool = False
    """Whether nothing came from that test yet."""
    description: str = ""
    matrix: _MatrixRows | None = None
    """The matrix that is read; `None` between tests."""
    has_begun: bool = False
    """Whether something of nvbandwidth came, so that lines which other programs print as well are its own."""
    after_error: bool = False
    """Whether the last line was an error: another one that follows at once explains it."""
    tests: list[BandwidthTest] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def read(self, text: str, *, is_last: bool) -> None:
        if not text or (self.matrix and (self.matrix.read_header(text.split()) or self.matrix.read_row(text))):
            return
        after_error, self.after_error = self.after_error, False
        if (match := _SUM.fullmatch(text)) and (total := parse_number(match["sum"])) is not None:
            if is_last and text.endswith(match["sum"]) and count_decimals(match["sum"]) < _SUM_DECIMALS:
                self.unread.append(excerpt(text))
                total = None
            self.end_test(match["name"], total, match["unit"])
        elif len(text) < _LONGEST_DESCRIPTION and "Matrix" not in text and _DESCRIPTION.fullmatch(text):
            if self.matrix:
                self.end_test()
            self.description, self.matrix, self.is_announced = text, _MatrixRows(), False
        elif (match := _RUNNING.fullmatch(text)) and "_" in match[1]:
            self.end_open_test()
            self.running, self.is_announced = match[1], True
        elif match := _VERSION.match(text):
            self.end_open_test()
            self.version, self.running = match[1], None
        elif match := _WAIVED.fullmatch(text):
            name = match["name"]
            if self.is_announced:
                name, self.is_announced = name or self.running, False
            self.end_open_test()
            self.add(name, "waived", match["reason"].strip())
            self.running = None
        elif self.has_begun and _ERROR.fullmatch(text):
            self.read_error(excerpt(text), explains_last=after_error)
        else:
            return
        self.has_begun = True

    def read_error(self, error: str, *, explains_last: bool) -> None:
        self.after_error = True
        if explains_last:
            last = self.tests.pop()
            reason = error if error in last.reason else f"{last.reason}; {error}"
            self.tests.append(last.model_copy(update={"reason": reason[:1000]}))
        elif missing := _NOT_FOUND.match(error):
            self.end_open_test()
            self.add(missing[1], "not-found", error)
        else:
            matrix, unit = self.take_matrix()
            self.add(self.running, "error", error, unit=unit, matrix=matrix.cells())
            self.running = None

    def end_open_test(self) -> None:
        """End the test that is open, since something else begins."""
        if self.matrix:
            self.end_test()
        elif self.is_announced:
            self.add(self.running, "truncated", "the output ends before its first result")

    def end_test(self, name: str | None = None, total: float | None = None, unit: str | None = None) -> None:
        """End the open test; it has a `name` if the line with its sum came."""
        direction, has_matrix = _DIRECTION.search(self.description), self.matrix is not None
        matrix, printed_unit = self.take_matrix()
        if not name:
            name = f"{self.running}_{direction[1].lower()}" if self.running and direction else self.running
        reason = ""
        if not has_matrix:
            reason = "its sum is cut" if total is None else ""
        elif not matrix.rows:
            reason = "the output ends before the first row of its matrix"
        elif total is None and matrix.ends_short:  # only a matrix without its sum can end in the middle of a number
            reason = "the last number of its matrix is cut"
        elif matrix.unread:
            reason = "rows of its matrix could not be read"
        elif "device_to_device" in (name or "") and len(matrix.rows) != matrix.columns:
            reason = f"its matrix has {len(matrix.rows)} of {matrix.columns} rows"
        status = "truncated" if reason else "passed"
        self.add(name, status, reason, unit=printed_unit or unit, matrix=matrix.cells(), total=total)

    def take_matrix(self) -> tuple[_MatrixRows, str | None]:
        """Return the open matrix and its unit, and close it."""
        matrix, unit = self.matrix or _MatrixRows(), _UNIT.search(self.description)
        self.unread.extend(matrix.unread)
        self.matrix, self.description = None, ""
        return matrix, unit[1] if unit else None

    def add(
        self,
        name: str | None,
        status: str,
        reason: str,
        *,
        unit: str | None = None,
        matrix: MatrixCells | None = None,
        total: float | None = None,
    ) -> None:
        self.tests.append(
            BandwidthTest(
                source=self.source, tool_version=self.version, name=name, unit=unit, status=status, matrix=matrix,
                sum=total, reason=reason,
            )
        )  # fmt: skip
        self.is_announced = False


def _json_matrix(rows: object) -> tuple[MatrixCells | None, str]:
    """Return the matrix of a JSON document, or the part of it that cannot be read."""
    if rows is None:
        return None, ""
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        return None, f"bandwidth_matrix {rows!r}"
    for cell in (cell for row in rows for cell in row):
        if json_number(cell) is None and not (isinstance(cell, str) and is_table_value(cell.strip())):
            return None, f"cell {cell!r}"
    return tuple(tuple(map(json_number, row)) for row in rows) or None, ""


# p2pBandwidthLatencyTest

_P2P_HEADING = re.compile(
    r"(?:(?P<way>Uni|Bi)directional )?P2P=(?P<state>Enabled|Disabled) (?P<quantity>Bandwidth|Latency) "
    r"(?:\(P2P (?P<kind>Writes?|Reads?)\) )?Matrix(?: \(P2P (?P<late_kind>Writes?|Reads?)\))? ?"
    r"\((?P<unit>GB/s|us|µs)\)"
)
_P2P_CONNECTIVITY = "P2P Connectivity Matrix"
_P2P_MARK = re.compile(r"[\s>]{0,40}(?:P2P Connectivity Matrix|(?:Uni|Bi)directional P2P=|P2P=(?:En|Dis)abled Latency)")
"""A line that only p2pBandwidthLatencyTest prints."""
_P2P_COLUMNS = re.compile(r"(?P<corner>D\\{1,2}D|GPU|CPU)(?P<columns>(?:\s+\d{1,4}){1,4096})", re.ASCII)
_P2P_FAILURE = re.compile(r"Cuda failure .*", re.IGNORECASE)
_NO_GAIN = 1.1
"""P2P gains nothing below this ratio: it is far above the spread of a run, and far below what a link adds."""


@dataclass
class _P2pReader:
    """Read text line by line: the heading of a matrix, then one matrix of devices, or one by GPU and one by CPU."""

    source: str
    name: str = ""
    unit: str | None = None
    matrix: _MatrixRows | None = None
    """The matrix that is read; `None` between two."""
    tests: list[BandwidthTest] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def read(self, text: str) -> None:
        if heading := _P2P_HEADING.fullmatch(text):
            self.end_matrix()
            way = f"{heading['way'].lower()}directional_" if heading["way"] else ""
            reads = "_reads" if (heading["kind"] or heading["late_kind"] or "").startswith("Read") else ""
            latency = "_latency" if heading["quantity"] == "Latency" else ""
            self.name = f"{way}p2p_{heading['state'].lower()}{reads}{latency}"
            self.unit = heading["unit"].replace("µ", "u")
            self.matrix = _MatrixRows()
        elif text == _P2P_CONNECTIVITY:
            self.end_matrix()
            self.name, self.unit, self.matrix = "p2p_connectivity", None, _MatrixRows()
        elif header := _P2P_COLUMNS.fullmatch(text):
            if self.name:
                self.read_columns(header["corner"], header["columns"].split())
        elif _P2P_FAILURE.fullmatch(text):
            self.end_matrix(failure=excerpt(text))
        elif self.matrix and self.matrix.columns and len(self.matrix.rows) < self.matrix.columns:
            self.matrix.read_row(text)

    def read_columns(self, corner: str, columns: Sequence[str]) -> None:
        """Begin the matrix of a latency by GPU or by CPU, which the corner of its header names."""
        if corner in ("GPU", "CPU"):
            if self.matrix and self.matrix.columns:
                self.end_matrix()
                self.name = self.name.removesuffix("_gpu").removesuffix("_cpu")
            self.name = f"{self.name}_{corner.lower()}"
            self.matrix = _MatrixRows()
        if self.matrix:
            self.matrix.read_header(columns)

    def end_matrix(self, failure: str = "") -> None:
        """End the open matrix. A failure of the program is a test of its own if no matrix is open."""
        if self.matrix is None and not failure:
            return
        matrix = self.matrix or _MatrixRows()
        reason = failure
        if not reason and matrix.ends_short:
            reason = "the last number of its matrix is cut"
        if not reason and (not matrix.rows or len(matrix.rows) != matrix.columns):
            reason = f"its matrix has {len(matrix.rows)} of {matrix.columns or 'unknown'} rows"
        self.unread.extend(matrix.unread)
        self.tests.append(
            BandwidthTest(
                source=self.source,
                tool="p2pBandwidthLatencyTest",
                name=self.name or None,
                unit=self.unit,
                status="error" if failure else "truncated" if reason else "passed",
                matrix=matrix.cells(),
                sum=None,
                reason=reason,
            )
        )
        self.matrix = None
