"""Read the text that ucx_perftest prints since UCX 1.9, of one test.

The server prints the name of the test, the client the numbers. `Final:` marks a result; with `-f`, nothing else is
printed. Of each number, the one over the whole test counts (`overall`). What is printed as MB is 2^20 bytes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from imagebuild.bench.logs import Parsed, excerpt, is_table_value, lines_of, parse_integer, parse_number
from imagebuild.bench.models import PerftestTable, TableRow, Verdict

_ERROR = re.compile(r".{0,300}?\b(?:\w{0,20}perf\w{0,20})\.cc?:\d{1,5}\s{1,8}UCX {1,4}ERROR (?P<message>.*)")
_MARK = re.compile(r"[\s>]{0,40}(?:\|[^|]{0,40}\| # iterations|\| Test:  |Final: |\[\d.*UCX  ERROR)")
"""A line that only ucx_perftest prints."""
_HEADER = re.compile(r"\|\s*(?P<label>Stage|Test)\s*\| # iterations \|.*")
_QUANTITY = re.compile(r"\|(?:\s+\|){1,2}\s+(?P<quantity>latency|overhead) \(usec\) .*")
_FIELD = re.compile(r"\| (?P<key>Test|Message size): (?P<value>[^|]*)\|")
_COLUMNS = (8, 4)
"""Numbers of a row: iterations, three latencies, two bandwidths, two rates; of threads the overall ones alone."""
_LEAST_TIME_US = 0.02
"""Below this, the three decimals of a time are too few to compute the rate from it."""


def parse_ucx_text(source: str, lines: Sequence[str]) -> Parsed[PerftestTable]:
    """Read the results in cleaned lines."""
    reader = _UcxReader(source)
    for text in lines_of(_MARK, lines, longest=500):
        reader.read(text)
    reader.end()
    return reader.parsed


@dataclass
class _UcxReader:
    """Read text line by line: the frame with the name of the test, the header, the result."""

    source: str
    parsed: Parsed[PerftestTable] = field(default_factory=list)
    test: str | None = None
    size: int | None = None
    quantity: str | None = None
    """`latency` or `overhead`, which the header calls its times."""
    is_open: bool = False
    """Whether a header came, and no result yet."""
    is_bare: bool = False
    """Whether the row after the header is the result, without a label."""
    has_failed: bool = False

    def read(self, text: str) -> None:
        if match := _FIELD.match(text):
            if match["key"] == "Test":
                self.begin_run()
                self.test = match["value"].strip()
            else:
                self.size = parse_integer(match["value"].strip())
        elif match := _QUANTITY.fullmatch(text):
            if self.quantity:
                self.begin_run()
            self.quantity = match["quantity"]
        elif match := _HEADER.fullmatch(text):
            self.is_open, self.is_bare = True, match["label"] == "Test"
        elif (match := _ERROR.fullmatch(text)) and not self.has_failed:
            self.is_open, self.has_failed = False, True  # of several errors, the first is the cause
            self.add(None, "failed", excerpt(match["message"]))
        elif text.startswith("Final:") or (self.is_open and self.is_bare):
            self.read_result(text)

    def begin_run(self) -> None:
        self.end()
        self.test = self.size = self.quantity = None
        self.has_failed = False

    def end(self) -> None:
        if self.is_open:
            self.add(None, "truncated", "no final result was printed")
        self.is_open = False

    def read_result(self, text: str) -> None:
        words = text.removeprefix("Final:").split()
        if len(words) not in _COLUMNS or not all(map(is_table_value, words)) or _is_cut(words):
            self.parsed += [excerpt(text)] if text.startswith("Final:") and any(map(is_table_value, words)) else []
            return
        numbers = [parse_number(word) for word in words]
        # Of four numbers, each is the overall one; of eight, the last of its kind.
        time, bandwidth, rate = numbers[3::2] if len(numbers) == 8 else numbers[1:]
        if "latency" in (self.title() or ""):
            figures = {"average": time} | ({"typical": numbers[1]} if len(numbers) == 8 else {})
            row = TableRow(size_bytes=self.size, latency_us={k: v for k, v in figures.items() if v is not None})
        else:
            row = TableRow(size_bytes=self.size, bw_average=bandwidth, msg_rate=(rate or 0) / 1e6)
        self.is_open = False
        self.add(row)

    def add(self, row: TableRow | None, verdict: Verdict = "ok", reason: str = "") -> None:
        unit = None if row is None else "usec" if row.latency_us else "MiB/sec"
        self.parsed.append(
            PerftestTable(
                source=self.source, tool="ucx_perftest", test=self.title(), unit=unit, rows=(row,) if row else (),
                verdict=verdict, reason=reason,
            )
        )  # fmt: skip

    def title(self) -> str | None:
        """Return the name of the test, unless it is another run's: of a latency above a header of an overhead."""
        is_of_another = self.test and self.quantity and ("latency" in self.test) != (self.quantity == "latency")
        return (None if is_of_another else self.test) or self.quantity


def _is_cut(words: Sequence[str]) -> bool:
    """Return whether the last number, the overall rate, has lost digits: it is the inverse of the overall time.

    Rates and iterations are printed without a fraction.
    """
    time, rate = parse_number(words[len(words) // 2 - 1]), parse_number(words[-1])
    if time is None or rate is None or "." in words[0] or "." in words[-1]:
        return True
    return time > _LEAST_TIME_US and rate < 0.9 * 1e6 / time - 1
