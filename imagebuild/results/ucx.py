"""ucx_perftest's text, from UCX 1.3 on, and its CSV.

The server prints the name of the test, the client the numbers. `Final:` marks a result; before UCX 1.9 nothing does,
and the last row is it. Several threads have totals only. MB are of 2^20 bytes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from imagebuild.results.models import UcxResult
from imagebuild.results.parsed import Parsed
from imagebuild.results.tokens import integer, is_value, number, shown

_CSV = re.compile(r"(?:[^,\s]{1,80},){0,8}iterations,(?P<first>[\w.]{1,40})_lat,avg_lat,overall_lat,avg_bw,.*")
_ERROR = re.compile(r".{0,300}?\b(?:\w{0,20}perf\w{0,20})\.cc?:\d{1,5}\s{1,8}UCX {1,4}ERROR (?P<why>.*)")
_MARK = re.compile(
    r"[\s>]{0,40}(?:\|[^|]{0,40}\| # iterations|\| # iterations|\| Test:  |Final: |\[\d.*UCX  ERROR)|" + _CSV.pattern
)
_COLUMNS = re.compile(r"\|(?:\s*(?P<stage>Stage|Test)\s*\|)? # iterations \|\s*(?P<first>typical|[\d.]{1,6}%ile) \|.*")
_KIND = re.compile(r"\|(?:\s+\|){1,2}\s+(?P<kind>latency|overhead) \(usec\) .*")
_FIELD = re.compile(r"\| (?P<key>Test|Message size): (?P<value>[^|]*)\|")
_BATCH = re.compile(r"\+(?P<name>[^+\-\s][^+\s]{0,200}?)-*\+-+\+.*")
_LABEL = re.compile(r"\[thread (?P<thread>\d{1,6})\]|Final:")
_GROUPED = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?", re.ASCII)
_LONGEST = 500
_LEAST_TIME_US = 0.02
"""Below it, the three printed digits of a time are too few to tell the rate from it."""
_ALL = (
    "latency first",
    "latency average",
    "latency overall",
    "bw average",
    "bw overall",
    "rate average",
    "rate overall",
)
_TOTALS = ("latency overall", "bw overall", "rate overall")


def _first(printed: str) -> str:
    """The key of the first latency: `typical` is the median, whatever the version calls it."""
    name = printed.removesuffix("%ile").removesuffix("_percentile")
    return "typical" if name in ("50.0", "typical") else f"p{name.removesuffix('.0')}"


def _values(words: Sequence[str]) -> list[str] | None:
    """The numbers of a row, all eight or the four of totals; counts and rates are printed without a fraction."""
    plain = [word.replace(",", "") if _GROUPED.fullmatch(word) else word for word in words[: len(_ALL) + 1]]
    for places, whole in ((_ALL, (0, -2, -1)), (_TOTALS, (0, -1))):
        row = plain[: len(places) + 1]
        if len(row) == len(places) + 1 and all(map(is_value, row)) and not any("." in row[at] for at in whole):
            return row
    return None


def _cut(values: Sequence[str]) -> bool:
    """Whether the last number, the rate, has lost digits: it is the inverse of the overall time."""
    time, rate = (number(values[3]), number(values[-1])) if len(values) > len(_ALL) else (None, None)
    return time is not None and rate is not None and time > _LEAST_TIME_US and rate < 0.9 * 1e6 / time - 1


@dataclass
class _Reader:
    source: str
    test: str | None = None
    size: int | None = None
    kind: str | None = None
    table: re.Match[str] | None = None
    """The header of the table that is read."""
    done: bool = False
    """Its result came, so a row without a label is somebody else's."""
    batch: str | None = None
    open: dict[int | None, UcxResult] = field(default_factory=dict)
    """The last progress row of each thread, while no result came."""
    failing: bool = False
    results: list[UcxResult] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def line(self, text: str) -> None:
        failing, self.failing = self.failing, False
        if text.startswith(("|", "+")):
            self.frame(text)
        elif found := _CSV.fullmatch(text):
            self.begin()
            self.table = found
        elif error := _ERROR.fullmatch(text):
            self.fail(shown(error["why"]), again=failing)
        elif self.table and self.table.re is _CSV:
            self.comma_row(text)
        else:
            self.row(text)

    def frame(self, text: str) -> None:
        if found := _FIELD.match(text):
            value = found["value"].strip()
            if found["key"] == "Test":
                self.begin()
                self.test, self.size = value, None
            else:
                self.size = integer(value)
        elif found := _KIND.fullmatch(text):
            self.begin()
            self.kind = found["kind"]
        elif found := _COLUMNS.fullmatch(text):
            self.table, self.done = found, False
        elif found := _BATCH.fullmatch(text):
            self.flush()
            self.batch, self.done = found["name"], False

    def begin(self) -> None:
        """A new run begins. The name of the last one is its own, unless no table came for it yet."""
        self.flush()
        if self.table:
            self.test = self.size = None
        self.table = self.kind = self.batch = None
        self.done = False

    def flush(self) -> None:
        """Progress of a run without a result is all that is known of it; in the oldest layout it is the result."""
        marked = self.table is not None and self.table.groupdict().get("stage") is not None
        self.results.extend(result.model_copy(update={"final": not marked}) for result in self.open.values())
        self.open.clear()

    def fail(self, reason: str, *, again: bool) -> None:
        self.failing = True
        if again:
            last = self.results.pop()
            self.results.append(last.model_copy(update={"reason": f"{last.reason}; {reason}"[:1000]}))
            return
        if self.done:
            self.begin()
        self.flush()
        self.results.append(
            UcxResult(source=self.source, title=self.title(), size_bytes=self.size, final=False, reason=reason)
        )

    def title(self) -> str | None:
        """The test's name. One whose kind of time differs from the table's is another run's.

        The oldest layout calls every time a latency.
        """
        if self.batch:
            return self.batch
        if self.test and self.kind and self.column() and (self.kind == "latency") != ("latency" in self.test):
            return self.kind
        return self.test or self.kind

    def comma_row(self, text: str) -> None:
        words = text.split(",")
        at = next((at for at, word in enumerate(words) if is_value(word.strip())), len(words))
        values = _values([word.strip() for word in words[at:]])
        if values and not _cut(values):
            self.batch = "/".join(words[:at])[:200] or None
            self.results.append(self.result(values, None))
        elif len(words) > len(_TOTALS) and at < len(words):
            self.unread.append(shown(text))

    def row(self, text: str) -> None:
        label = _LABEL.match(text)
        if not label and (not self.table or self.done):
            return
        words = text[label.end() if label else 0 :].split()
        named = not label and len(words) > len(_TOTALS) and not is_value(words[0]) and self.column() == "Test"
        values = _values(words[1:] if named else words)
        if values is None or _cut(values):
            if (label or values) and any(map(is_value, words)):
                self.unread.append(shown(text))
            return
        if named:
            self.batch = words[0][:200]
        thread = int(label["thread"]) if label and label["thread"] else None
        if (label and thread is None) or self.column() == "Test":
            self.open.clear()
            self.results.append(self.result(values, thread))
            self.done = not named
        else:
            self.open[thread] = self.result(values, thread)

    def column(self) -> str | None:
        """The heading of the first column: `Stage`, or `Test` where only results are printed."""
        return self.table["stage"] if self.table else None

    def result(self, values: list[str], thread: int | None) -> UcxResult:
        places = _ALL if len(values) > len(_ALL) else _TOTALS
        groups: dict[str, dict[str, float | None]] = {"latency": {}, "bw": {}, "rate": {}}
        for place, value in zip(places, values[1:], strict=True):
            group, _, key = place.partition(" ")
            if key != "first":
                groups[group][key] = number(value)
            elif self.table:
                groups[group][_first(self.table["first"])] = number(value)
        return UcxResult(
            source=self.source,
            title=self.title(),
            size_bytes=None if self.batch else self.size,
            thread=thread,
            iterations=integer(values[0]),
            latency_us=groups["latency"],
            bandwidth_mib_s=groups["bw"],
            rate_msg_s=groups["rate"],
        )


def parse(source: str, lines: Sequence[str]) -> Parsed[UcxResult]:
    """The results in cleaned lines; empty where nothing of ucx_perftest is in them."""
    if not any(map(_MARK.match, lines)):
        return Parsed()
    reader = _Reader(source)
    for line in lines:
        if len(line) <= _LONGEST and (text := line.strip()):
            reader.line(text)
    reader.flush()
    return Parsed(tuple(reader.results), tuple(reader.unread))
