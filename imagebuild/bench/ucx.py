"""Read the text that ucx_perftest prints since UCX 1.9, of one test.

The server prints the name of the test, the client the numbers. `Final:` marks a result; with `-f`, nothing else is
printed. With several threads, the result has totals only. What is printed as MB is 2^20 bytes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from imagebuild.bench.logs import LineReader, Parsed, excerpt, is_table_value, parse_integer, parse_number
from imagebuild.bench.models import UcxResult

_COLUMNS = (
    ("latency_us", "first"), ("latency_us", "average"), ("latency_us", "overall"),
    ("bandwidth_mib_s", "average"), ("bandwidth_mib_s", "overall"),
    ("rate_msg_s", "average"), ("rate_msg_s", "overall"),
)  # fmt: skip
"""Columns after the number of iterations. The first latency is the median, or a percentile that the header names."""
_TOTALS = tuple(column for column in _COLUMNS if column[1] == "overall")
_LEAST_TIME_US = 0.02
"""Below this, the three decimals of a time are too few to compute the rate from it."""

_ERROR = re.compile(r".{0,300}?\b(?:\w{0,20}perf\w{0,20})\.cc?:\d{1,5}\s{1,8}UCX {1,4}ERROR (?P<message>.*)")
_MARK = re.compile(r"[\s>]{0,40}(?:\|[^|]{0,40}\| # iterations|\| Test:  |Final: |\[\d.*UCX  ERROR)")
"""A line that only ucx_perftest prints."""
_HEADER = re.compile(r"\|\s*(?P<label>Stage|Test)\s*\| # iterations \|\s*(?P<first>typical|[\d.]{1,6}%ile) \|.*")
_QUANTITY = re.compile(r"\|(?:\s+\|){1,2}\s+(?P<quantity>latency|overhead) \(usec\) .*")
_FIELD = re.compile(r"\| (?P<key>Test|Message size): (?P<value>[^|]*)\|")
_ROW_LABEL = re.compile(r"\[thread (?P<thread>\d{1,6})\]|Final:")
_GROUPED = re.compile(r"(?<=\d),(?=\d{3})")
"""A comma between thousands."""


def parse_ucx_text(source: str, lines: Sequence[str]) -> Parsed[UcxResult]:
    """Read the results in cleaned lines."""
    return _UcxReader(source).read_all(lines, _MARK, longest=500)


@dataclass
class _UcxReader(LineReader[UcxResult]):
    """Read text line by line: the frame with the name of the test, the header, rows of progress, the result."""

    test: str | None = None
    size: int | None = None
    quantity: str | None = None
    """`latency` or `overhead`, which the header calls its times."""
    layout: str | None = None
    """The heading of the first column: `Stage`, or `Test` if only results are printed."""
    first: str | None = None
    """Name of the first latency in the header of the table that is read."""
    has_result: bool = False
    """Whether the result of that table came, so that a row without a label is another program's."""
    progress: dict[int | None, UcxResult] = field(default_factory=dict)
    """The last row of each thread, until the result comes."""

    def read(self, text: str) -> None:
        if match := _FIELD.match(text):
            if match["key"] == "Test":
                self.begin_run()
                self.test, self.size = match["value"].strip(), None
            else:
                self.size = parse_integer(match["value"].strip())
        elif match := _QUANTITY.fullmatch(text):
            self.begin_run()
            self.quantity = match["quantity"]
        elif match := _HEADER.fullmatch(text):
            self.layout, self.first, self.has_result = match["label"], match["first"], False
        elif match := _ERROR.fullmatch(text):
            self.read_error(excerpt(match["message"]))
        elif not text.startswith(("|", "+")):
            self.read_row(text)

    def begin_run(self) -> None:
        """Forget the last run. Keep the name of a test that has no table yet: it is that of the new run."""
        self.end()
        if self.first:
            self.test = self.size = None
        self.layout = self.first = self.quantity = None
        self.has_result = False

    def end(self) -> None:
        """Keep the progress of a run without a result."""
        self.parsed.extend(result.model_copy(update={"final": False}) for result in self.progress.values())
        self.progress.clear()

    def read_error(self, error: str) -> None:
        if self.explains_error(error):
            return
        if self.has_result:
            self.begin_run()
        self.end()
        failed = UcxResult(source=self.source, title=self.title(), size_bytes=self.size, final=False, reason=error)
        self.parsed.append(failed)

    def read_row(self, text: str) -> None:
        label = _ROW_LABEL.match(text)
        if not label and (not self.first or self.has_result):
            return
        words = _GROUPED.sub("", text[label.end() if label else 0 :]).split()
        values = _row_values(words)
        if values is None or _is_cut(values):
            if (label or values) and any(map(is_table_value, words)):
                self.parsed.append(excerpt(text))
            return
        thread = int(label["thread"]) if label and label["thread"] else None
        if (label and thread is None) or self.layout == "Test":
            self.progress.clear()
            self.parsed.append(self.result_of(values, thread))
            self.has_result = True
        else:
            self.progress[thread] = self.result_of(values, thread)

    def result_of(self, values: Sequence[str], thread: int | None) -> UcxResult:
        figures: dict[str, Any] = {quantity: {} for quantity, _ in _COLUMNS}
        percentile = (self.first or "").removesuffix("%ile")
        first = "typical" if percentile in ("50.0", "typical") else f"p{percentile.removesuffix('.0')}"
        columns = _COLUMNS if len(values) > len(_COLUMNS) else _TOTALS
        for (quantity, name), value in zip(columns, values[1:], strict=True):
            if name != "first" or self.first:
                figures[quantity][first if name == "first" else name] = parse_number(value)
        about: dict[str, Any] = {"title": self.title(), "size_bytes": self.size, "thread": thread}
        return UcxResult(source=self.source, iterations=parse_integer(values[0]), **about, **figures)

    def title(self) -> str | None:
        """Return the name of the test, unless it is another run's: of a latency above a header of an overhead."""
        is_of_another = self.test and self.quantity and ("latency" in self.test) != (self.quantity == "latency")
        return (None if is_of_another else self.test) or self.quantity


def _row_values(words: Sequence[str]) -> Sequence[str] | None:
    """Return the numbers of a row: all of them, or those of totals; None if the words are no row.

    Iterations and rates are printed without a fraction.
    """
    for columns, without_fraction in ((_COLUMNS, (0, -2, -1)), (_TOTALS, (0, -1))):
        row = words[: len(columns) + 1]
        is_whole = len(row) > len(columns) and all(map(is_table_value, row))
        if is_whole and not any("." in row[column] for column in without_fraction):
            return row
    return None


def _is_cut(values: Sequence[str]) -> bool:
    """Return whether the last number, the overall rate, has lost digits: it is the inverse of the overall time."""
    if len(values) <= len(_COLUMNS):
        return False
    time, rate = parse_number(values[3]), parse_number(values[-1])
    return time is not None and rate is not None and time > _LEAST_TIME_US and rate < 0.9 * 1e6 / time - 1
