"""nvbandwidth's text and JSON, as every version since 0.1 prints them.

In text, a test that does not apply is a bare `Waived:`, so its name is lost, and a bidirectional test between devices
prints three matrices with a sum each. JSON has the three below each other with one sum, and writes numbers as strings.
The unit stands in the description of the matrix only: latencies look the same as bandwidths.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from imagebuild.results.matrix import Cells, Matrix
from imagebuild.results.models import BandwidthTest
from imagebuild.results.parsed import Parsed
from imagebuild.results.tokens import decimals, is_value, json_number, number, shown

_MARK = re.compile(
    r"[\s>]{0,40}(?:nvbandwidth Version|[Rr]unning \w+_|SUM \w+_|&&&& PERF \w+_|Waived:|Waiving \w+_"
    r"|memcpy (?:CE|SM|TMA|local) |memory latency |Device to Device Latency |multicast SM )",
    re.ASCII,
)
_VERSION = re.compile(r"nvbandwidth Version: (\S{1,40})")
_RUNNING = re.compile(r"[Rr]unning (\w{1,80})\.?", re.ASCII)
_WAIVED = re.compile(r"(?:Waived: ?|Waiving (?P<name>\w{1,80})\.)(?P<why>.*)", re.ASCII)
_SUM = re.compile(
    r"(?:SUM|&&&& PERF) (?P<name>[\w.-]{1,100}) (?P<sum>\S{1,40})(?: [+-]?(?P<unit>GB/s|ns)\b)?(?: .*)?", re.ASCII
)
_DESCRIPTION = re.compile(
    r".{0,100}(?:\((?:row|column)\)|\bGPU\b|All Gpus).{0,60}\((?:GB/s|ns|us)\)|Bisect bench.{0,60}"
)
_UNIT = re.compile(r"\((GB/s|ns|us)\)")
_PART = re.compile(r"\b(read1|read2|write1|write2|total) bandwidth", re.IGNORECASE)
_ERROR = re.compile(
    r"(?:ERROR|Error)\b:? ?.*|ASSERT in expression .*|NVML_ERROR: .*|\[\w{1,60}\] .* in expression .*"
    r"|Invalid value when checking the pattern.*|Current offset.*"
    r"|You cannot specify both testcase.*|Specified list of testcase prefixes did not match.*"
)
_NOT_FOUND = re.compile(r"(?:ERROR|Error): Testcase (?:index )?(\S{1,100}) (?:not found|out of bound)!?")
_LONGEST = 100_000
_DECIMALS = 2
"""Of every number in text."""
_STATUS = {"passed": "passed", "waived": "waived", "not found": "not-found", "running": "truncated", "error": "error"}


@dataclass
class _Reader:
    source: str
    version: str | None = None
    running: str | None = None
    silent: bool = False
    """A test was announced, and nothing came from it yet."""
    description: str = ""
    matrix: Matrix | None = None
    known: bool = False
    """Something of nvbandwidth came already, so a line that other programs print as well is its own."""
    failing: bool = False
    """The line before was an error: one that follows at once explains it."""
    tests: list[BandwidthTest] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def line(self, text: str, *, last: bool) -> None:
        if not text or (self.matrix and (self.matrix.header(text.split()) or self.matrix.take(text))):
            return
        failing, self.failing = self.failing, False
        if (found := _SUM.fullmatch(text)) and (total := number(found["sum"])) is not None:
            if last and text.endswith(found["sum"]) and decimals(found["sum"]) < _DECIMALS:
                self.unread.append(shown(text))
                total = None
            self.close(found["name"], total, found["unit"])
        elif len(text) < 200 and "Matrix" not in text and _DESCRIPTION.fullmatch(text):
            if self.matrix:
                self.close()
            self.description, self.matrix, self.silent = text, Matrix(), False
        elif (found := _RUNNING.fullmatch(text)) and "_" in found[1]:
            self.flush()
            self.running, self.silent = found[1], True
        elif found := _VERSION.match(text):
            self.flush()
            self.version, self.running = found[1], None
        elif found := _WAIVED.fullmatch(text):
            self.waived(found["name"], found["why"].strip())
        elif self.known and _ERROR.fullmatch(text):
            self.error(shown(text), again=failing)
        else:
            return
        self.known = True

    def add(self, name: str | None, status: str, reason: str = "", **found: object) -> None:
        test = {"source": self.source, "tool_version": self.version, "name": name, "status": status, "reason": reason}
        self.tests.append(BandwidthTest.model_validate({"unit": None, "matrix": None, "sum": None} | test | found))
        self.silent = False

    def take_matrix(self) -> tuple[Matrix, str | None]:
        """The open matrix and its unit; none is open afterwards."""
        matrix, unit = self.matrix or Matrix(), _UNIT.search(self.description)
        self.unread.extend(matrix.unread)
        self.matrix, self.description = None, ""
        return matrix, unit[1] if unit else None

    def close(self, name: str | None = None, total: float | None = None, unit: str | None = None) -> None:
        """End the test whose matrix was read; without a name, no line with its sum came."""
        part, asked = _PART.search(self.description), self.matrix is not None
        matrix, found_unit = self.take_matrix()
        name = name or (f"{self.running}_{part[1].lower()}" if self.running and part else self.running)
        reason = (
            _cut(name or "", matrix, at_end=total is None) if asked else "" if total is not None else "its sum is cut"
        )
        status = "truncated" if reason else "passed"
        self.add(name, status, reason, unit=found_unit or unit, matrix=matrix.cells(), sum=total)

    def flush(self) -> None:
        """End whatever is open, since something else begins."""
        if self.matrix:
            self.close()
        elif self.silent:
            self.add(self.running, "truncated", "the output ends before its first result")

    def waived(self, name: str | None, why: str) -> None:
        if self.silent:
            name, self.silent = name or self.running, False
        self.flush()
        self.add(name, "waived", why)
        self.running = None

    def error(self, reason: str, *, again: bool) -> None:
        self.failing = True
        if again:
            last = self.tests.pop()
            more = reason if reason in last.reason else f"{last.reason}; {reason}"
            self.tests.append(last.model_copy(update={"reason": more[:1000]}))
        elif missing := _NOT_FOUND.match(reason):
            self.flush()
            self.add(missing[1], "not-found", reason)
        else:
            matrix, unit = self.take_matrix()
            self.add(self.running, "error", reason, unit=unit, matrix=matrix.cells())
            self.running = None


def _cut(name: str, matrix: Matrix, *, at_end: bool) -> str:
    """Why a matrix is not whole, or nothing. Only one without its sum can end in the middle of a number."""
    if not matrix.rows:
        return "the output ends before the first row of its matrix"
    if at_end and matrix.short:
        return "the last number of its matrix is cut"
    if matrix.unread:
        return "rows of its matrix could not be read"
    if "device_to_device" in name and len(matrix.rows) != matrix.columns:
        return f"its matrix has {len(matrix.rows)} of {matrix.columns} rows"
    return ""


def parse(source: str, lines: Sequence[str]) -> Parsed[BandwidthTest]:
    """The tests in cleaned lines; empty where nothing of nvbandwidth is in them."""
    if not any(map(_MARK.match, lines)):
        return Parsed()
    reader = _Reader(source)
    end = max(at for at, line in enumerate(lines) if line.strip())
    for at, line in enumerate(lines):
        if len(line) <= _LONGEST:
            reader.line(line.strip().removeprefix("> "), last=at == end)
    reader.flush()
    return Parsed(tuple(reader.tests), tuple(reader.unread))


def looks_like(document: object) -> bool:
    """Whether a JSON document is one of nvbandwidth."""
    return isinstance(document, Mapping) and isinstance(document.get("nvbandwidth"), Mapping)


def parse_json(source: str, document: object) -> Parsed[BandwidthTest]:
    """The tests of a JSON document that `looks_like` accepted; empty for any other."""
    if not isinstance(document, Mapping) or not isinstance(root := document.get("nvbandwidth"), Mapping):
        return Parsed()
    version = _text(root.get("version")) or _text(root.get("git_version"))
    reader = _Reader(source, version)
    cases = root.get("testcases")
    for case in cases if isinstance(cases, list) else ():
        _case(reader, case)
    if error := _text(root.get("error")):
        reader.add(None, "error", shown(error))
    return Parsed(tuple(reader.tests), tuple(reader.unread))


def _case(reader: _Reader, case: object) -> None:
    if not isinstance(case, Mapping):
        reader.unread.append(shown(f"testcases: {case!r}"))
        return
    name, printed = _text(case.get("name")), _text(case.get("status")) or ""
    status, reason = _STATUS.get(printed.lower()), _text(case.get("error")) or ""
    if status is None:
        reader.unread.append(shown(f"{name}: status {printed!r}"))
        return
    if status == "error" and reader.tests and reader.tests[-1].name == name and reader.tests[-1].status == "truncated":
        # A test that fails is written a second time, and the first entry goes on saying that it runs.
        reader.tests.pop()
    matrix, mistake = _cells(case.get("bandwidth_matrix"))
    if mistake:
        reader.unread.append(shown(f"{name}: {mistake}"))
        status, reason = "truncated", reason or "its matrix could not be read"
    if status == "truncated":
        reason = reason or "the document was written while the test ran"
    unit = _UNIT.search(_text(case.get("bandwidth_description")) or "")
    reader.add(
        name, status, shown(reason), unit=unit[1] if unit else None, matrix=matrix, sum=json_number(case.get("sum"))
    )


def _cells(rows: object) -> tuple[Cells | None, str]:
    """A matrix, and what could not be read of it."""
    if rows is None:
        return None, ""
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        return None, f"bandwidth_matrix {rows!r}"
    for cell in (cell for row in rows for cell in row):
        if json_number(cell) is None and not (isinstance(cell, str) and is_value(cell.strip())):
            return None, f"cell {cell!r}"
    return tuple(tuple(json_number(cell) for cell in row) for row in rows) or None, ""


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def total(test: BandwidthTest) -> Cells | None:
    """The matrix to show of a test: of three below each other, both directions and their total, the total."""
    if test.matrix is None or "bidirectional" not in (test.name or "") or "device_to_device" not in (test.name or ""):
        return test.matrix
    size = len(test.matrix[0])
    return test.matrix[2 * size :] if len(test.matrix) == 3 * size else test.matrix
