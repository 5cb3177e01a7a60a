"""Read the matrices of nvbandwidth 0.1 and later, from text and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from imagebuild.bench import logs
from imagebuild.bench.logs import excerpt, json_text, parse_number
from imagebuild.bench.models import PAIRWISE, BandwidthTest, Verdict
from imagebuild.core.patterns import DataFile

_DATA = DataFile(__file__)
_RE = _DATA.patterns


def parse_nvbandwidth_text(source: str, lines: Sequence[logs.LogLine]) -> logs.ParsedLines[BandwidthTest]:
    """Return the tests of nvbandwidth, and the lines that could not be read."""
    reader = _NvbandwidthReader(source)
    for reader.line, text in logs.lines_of(_RE["mark"], lines, longest=100_000):
        reader.read(text)
    reader.end_test()
    return reader.parsed


@dataclass
class _OpenTest:
    """A test that is being read: its output before the line with the sum."""

    line: int
    """Number of the first line of the test."""
    description: str = ""
    columns: int | None = None
    """Number of columns of the matrix; `None` before the header."""
    rows: list[tuple[float | None, ...]] = field(default_factory=list)
    has_unread_row: bool = False


@dataclass
class _NvbandwidthReader:
    source: str
    line: int = 0
    parsed: logs.ParsedLines[BandwidthTest] = field(default_factory=list)
    version: str | None = None
    running: str | None = None
    """Name of the last announced test. One or more matrices follow."""
    test: _OpenTest | None = None
    has_failed: bool = False
    """Whether an error was read. Later errors are consequences of the first error."""
    has_waived: bool = False
    """Whether a test without a name was waived."""
    devices: list[str] = field(default_factory=list)

    def read(self, text: str) -> None:
        if self.test and self.test.description and self.read_row(self.test, text):
            return
        if match := _RE["sum"].fullmatch(text):
            is_cut = not match["more"] and not match["unit"] and not _RE["cell"].fullmatch(match["sum"])
            self.parsed += [(self.line, excerpt(text))] if is_cut else []
            self.test = self.test or _OpenTest(self.line)
            self.end_test(match["name"], None if is_cut else parse_number(match["sum"]), match["unit"])
        elif _RE["description"].fullmatch(text):
            if self.test and self.test.description:
                self.end_test()
            self.test = _OpenTest(self.line, text)
        elif match := _RE["running"].fullmatch(text):
            self.end_test()
            self.running, self.test, self.has_failed = match[1], _OpenTest(self.line), False
        elif match := _RE["version"].match(text):
            self.end_test()
            self.version, self.running, self.devices = match[1], None, []
            self.has_failed = self.has_waived = False
        elif match := _RE["device"].fullmatch(text):
            self.devices.append(match["name"])
        elif match := _RE["waived"].fullmatch(text):
            name = match["name"]
            if self.test and not self.test.description:
                name, self.test = name or self.running, None
            self.end_test()
            # All waived tests without a name in one run of nvbandwidth become a single result.
            if name or not self.has_waived:
                self.add(name, "waived", match["reason"].strip())
            self.has_waived = self.has_waived or not name
        elif any((self.parsed, self.version, self.running, self.test, self.devices)) and _RE["error"].fullmatch(text):
            if missing := _RE["not_found"].match(text):
                self.end_test()
                self.add(missing[1], "waived", excerpt(text))
            elif not self.has_failed:  # the first error is the cause; it belongs to the running test, if any
                self.add(self.running, _verdict_of(text), excerpt(text))
                self.running, self.has_failed = None, True

    def read_row(self, test: _OpenTest, text: str) -> bool:
        """Add a header or a row to the test, or a broken row to the unread lines. Return whether the line is one of
        these.

        A broken row either is cut but has the expected row number, or has all columns but follows a gap. Any other line
        belongs to another program."""
        words = text.split()
        if test.columns is None and [logs.parse_integer(word) for word in words] == list(range(len(words))):
            test.columns = len(words)
            return True
        match = _RE["row"].fullmatch(text)
        if match is None:
            return False
        values = match["values"].split()
        is_next = int(match["row"]) == len(test.rows)
        is_whole = len(values) == test.columns and all(map(_RE["cell"].fullmatch, values))
        if is_next and is_whole:
            test.rows.append(tuple(map(parse_number, values)))
        elif is_whole or (is_next and any(map(logs.is_table_value, values))):
            test.has_unread_row = True
            self.parsed.append((self.line, excerpt(text)))
        else:
            return False
        return True

    def end_test(self, name: str | None = None, total: float | None = None, unit: str | None = None) -> None:
        """End the current test, if any. `name` is the name in the line with the sum; None without such a line."""
        if not (test := self.test):
            return
        direction, has_sum, rows = _RE["direction"].search(test.description), name is not None, len(test.rows)
        name = name or (f"{self.running}_{direction[1].lower()}" if self.running and direction else self.running)
        wanted = (test.columns or 1) if PAIRWISE.search(name or "") else max(1, rows)
        lacks = {
            "the sum of the matrix is cut": has_sum and total is None,
            "rows of the matrix could not be read": test.has_unread_row,
            "the output ends before the sum of the matrix": not has_sum and bool(self.version or not rows),
            f"the matrix has {rows} of {wanted} rows": bool(test.description) and rows != wanted,
            _OTHER_SUM: "GB/s" in test.description and _is_other_sum(test.rows, total),
        }
        reason = next((reason for reason, holds in lacks.items() if holds), "")
        self.add(name, "truncated" if reason else "ok", reason, unit, total)

    def add(
        self, name: str | None, verdict: Verdict, reason: str, unit: str | None = None, total: float | None = None
    ) -> None:
        """Add a result with the matrix of the current test, and end that test."""
        test, self.test = self.test or _OpenTest(self.line), None
        result = BandwidthTest(
            source=self.source, tool_version=self.version, name=name, unit=_unit_of(test.description) or unit,
            verdict=verdict, matrix=tuple(test.rows) or None, sum=total, reason=reason, devices=tuple(self.devices),
        )  # fmt: skip
        self.parsed.append((test.line, result))


def _unit_of(description: str | None) -> str | None:
    match = _RE["unit"].search(description or "")
    return match[1] if match else None


_OTHER_SUM = "the cells of the matrix do not add up to the printed sum"


def _is_other_sum(rows: Sequence[Sequence[float | None]], total: float | None) -> bool:
    """Return whether a printed sum differs from the sum of the cells."""
    return total is not None and abs(sum(cell or 0 for row in rows for cell in row) - total) > 0.01 * abs(total) + 0.1


def parse_nvbandwidth_json(source: str, document: logs.JsonDocument) -> logs.Parsed[BandwidthTest] | None:
    """Return the tests in a JSON document, and the parts that could not be read.
    Return None if nvbandwidth did not write the document."""
    top = logs.json_object(document.value).get("nvbandwidth")
    if not isinstance(top, dict):
        return None
    listed = map(_RE["json_device"].match, map(str, logs.json_list(top.get("GPU Device list"))))
    version = json_text(top.get("version")) or json_text(top.get("git_version"))
    devices = tuple(match["name"] for match in listed if match)
    about: dict[str, Any] = {"source": source, "tool_version": version, "devices": devices}
    error = json_text(top.get("error")) or ""
    cases = [(logs.json_object(value), value) for value in logs.json_list(top.get("testcases"))]
    failed = [case.get("name") for case, _ in cases if str(case.get("status")).lower() == "error"]
    parsed: logs.Parsed[BandwidthTest] = []
    for case, value in cases:
        name, verdict = json_text(case.get("name")), _DATA["json_verdicts"].get(str(case.get("status")).lower())
        if verdict == "truncated" and name in failed:
            # A failed test has two entries. The first one still says that the test is running.
            continue
        unit, total = _unit_of(json_text(case.get("bandwidth_description"))), logs.json_number(case.get("sum"))
        matrix, problem = _json_matrix(case.get("bandwidth_matrix"))
        last = matrix[-len(matrix[0]) :] if matrix and "bidirectional" in (name or "") else matrix
        widths = sorted({*map(len, last or ())})
        if last and (len(widths) > 1 or (PAIRWISE.search(name or "") and widths != [len(last)])):
            columns = " or ".join(map(str, widths))
            problem = problem or f"the matrix is not square: its {len(last)} rows have {columns} columns"
        if last and unit == "GB/s" and _is_other_sum(last, total):
            problem = problem or _OTHER_SUM
        if verdict is None or problem:
            parsed.append(excerpt(f"{name}: {problem}" if verdict else f"testcases: {value!r}"))
        if verdict:
            reason = json_text(case.get("error")) or (error if verdict == "failed" else "")
            reason = reason or ("the document was written while the test ran" if verdict == "truncated" else problem)
            verdict = "truncated" if problem else _verdict_of(reason) if verdict == "failed" else verdict
            about |= {"name": name, "unit": unit, "verdict": verdict, "reason": excerpt(reason)}
            parsed.append(BandwidthTest(matrix=matrix, sum=total, **about))
    if error and not failed:
        about |= {"name": None, "unit": None, "verdict": _verdict_of(error), "reason": excerpt(error)}
        parsed.append(BandwidthTest(matrix=None, sum=None, **about))
    return parsed


def _verdict_of(error: str) -> Verdict:
    return "wrong-data" if "checking the pattern" in error else "failed"


def _json_matrix(rows: object) -> tuple[tuple[tuple[float | None, ...], ...] | None, str]:
    """Return the matrix in a JSON document, and the problem if the matrix cannot be read."""
    if rows is None:
        return None, ""
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        return None, f"bandwidth_matrix {rows!r} cannot be read"
    for cell in (cell for row in rows for cell in row):
        if logs.json_number(cell) is None and str(cell).strip().upper() != "N/A":
            return None, f"cell {cell!r} of the matrix cannot be read"
    return tuple(tuple(map(logs.json_number, row)) for row in rows) or None, ""
