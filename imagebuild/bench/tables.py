"""Read plain tables: the OSU micro-benchmarks, those of NVSHMEM, and all_reduce_bench.py of ml-engineering."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from imagebuild.bench import logs
from imagebuild.bench.logs import excerpt, parse_number
from imagebuild.bench.models import Half, NcclRow, PerftestTable, Run, TableRow, Verdict


@dataclass
class TableBuilder:
    """Collect what one program prints of a table; at the end of the output, give it a verdict."""

    test: str | None = None
    tool: str = "perftest"
    columns: Sequence[str] = ()
    """Of its table, by the names that `add_row` knows; empty before the header."""
    unit: str | None = None
    rows: list[TableRow] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    compared: bool = False
    has_unread_row: bool = False
    not_measured: list[int] = field(default_factory=list)
    """Sizes of rows with a figure that is no number."""
    negative: list[int] = field(default_factory=list)
    """Sizes of rows with a figure below zero."""
    is_closed: bool = False
    """Whether the line came that ends the table."""
    last_word: re.Pattern[str] | None = None
    """What the last word of a row looks like if it is not cut."""

    def add_row(self, size: int, values: Mapping[str, float | None]) -> None:
        """Add a row of values by name: `bw_peak`, `bw_average`, `msg_rate`, latencies such as `lat min`, and others."""
        latency = {name[4:]: value for name, value in values.items() if name.startswith("lat ") and value is not None}
        rates = {name: values.get(name) for name in ("bw_peak", "bw_average", "msg_rate")}
        self.rows.append(TableRow(size_bytes=size, latency_us=latency or None, **rates))
        self.not_measured += [size] if None in values.values() else []
        self.negative += [size] if any(value < 0 for value in (*rates.values(), *latency.values()) if value) else []

    def table(self, source: str) -> PerftestTable:
        """Return the table with its verdict."""
        verdict, reason = next(self._verdicts())
        return PerftestTable(
            source=source, tool=self.tool, test=self.test, unit=self.unit, rows=tuple(self.rows),
            compared=self.compared, verdict=verdict, reason=reason,
        )  # fmt: skip

    def _verdicts(self) -> Iterator[tuple[Verdict, str]]:
        """Yield the verdicts that the table deserves, the worst first, `ok` last."""
        if self.errors:
            yield "failed", "; ".join(dict.fromkeys(self.errors))[:1000]
        if self.has_unread_row:
            yield "truncated", "a row could not be read"
        if not self.columns:
            yield "no-data", "no result was printed"
        if not self.rows:
            yield "truncated", "the output ends before the first row"
        if self.negative:
            yield "failed", f"a measurement with {min(self.negative)} bytes is negative"
        if self.not_measured:
            yield "failed", f"a figure with {min(self.not_measured)} bytes is no number"
        yield "ok", ""


# OSU: `# OSU MPI-CUDA Bandwidth Test v7.4`, `# Size      Bandwidth (MB/s)`, rows; MB are 10^6 bytes.

_OSU_TITLE = re.compile(r"#\s*(?P<test>OSU [\w+ /()-]{1,100}?) Test\b.*")
_OSU_HEADER = re.compile(r"#\s*(?:Message )?Size\b.*", re.IGNORECASE)

# NVSHMEM: `#shmem_put_bw_uni`, `size(B)  scope  BW (GB/sec)`, rows. The programs that come with NVSHMEM compare no
# data; nvshmem-perf of our images does, and says so in the end.

_NVSHMEM_TITLE = re.compile(r"#\s*(?P<test>[a-z][a-z0-9_]{1,60})")
_NVSHMEM_HEADER = re.compile(r"size\(B\)\s.*")
_NVSHMEM_WRONG = re.compile(r"# (?P<wrong>\d{1,18}) words of 4 bytes were wrong")

_COLUMN = re.compile(
    r"#|(?P<size>size\(B\)|(?:Message )?Size\b)|(?P<bw_average>Bandwidth ?\(MB/s\)|MB/s|BW ?\(GB/sec\))"
    r"|(?P<messages>Messages/s)|(?P<msg_rate>MMPs\S*)|(?P<min>min[_ ]lat\w* ?\(us\))|(?P<max>max[_ ]lat\w* ?\(us\))"
    r"|(?P<average>(?:avg )?lat(?:ency)? ?\(us\))|(?P<valid>Validation)|(?:P\d+ Tail )?[^\s#]+",
    re.IGNORECASE,
)
_FIGURES = {"bw_average": "bw_average", "msg_rate": "msg_rate", "messages": "messages",
            **{name: f"lat {name}" for name in ("average", "min", "max")}}  # fmt: skip
"""Group of `_COLUMN` → name of its figure; other columns are passed over."""


_LAST_WORDS = {
    "valid": re.compile("pass|fail", re.IGNORECASE), "osu": re.compile(r".*\.\d{2}"),
    "nvshmem": re.compile(r".*\.\d{6}"), "": None,
}  # fmt: skip
"""Kind of the last column of a row → what its word looks like if nothing was cut."""


def parse_osu_text(source: str, lines: Sequence[str]) -> logs.Parsed[PerftestTable]:
    """Read the tables of OSU micro-benchmarks in cleaned lines; a row whose data were wrong makes a table fail."""
    return _read_tables("osu", source, lines, _OSU_TITLE, _OSU_HEADER)


def parse_nvshmem_text(source: str, lines: Sequence[str]) -> logs.Parsed[PerftestTable]:
    """Read the tables of NVSHMEM's tests, and of nvshmem-perf, in cleaned lines."""
    output = _read_tables("nvshmem", source, lines, _NVSHMEM_TITLE, _NVSHMEM_HEADER)
    # Any comment of one word looks like a title.
    return [table for table in output if isinstance(table, str) or table.verdict != "no-data"]


def _read_tables(
    tool: str, source: str, lines: Sequence[str], title: re.Pattern[str], header: re.Pattern[str]
) -> logs.Parsed[PerftestTable]:
    """Read tables that begin with a title and a header."""
    builders: list[TableBuilder] = []
    unread: list[str] = []
    for text in map(str.strip, lines):
        words = text.split()
        table = builders[-1] if builders else TableBuilder(None, tool)
        if match := title.fullmatch(text):
            builders.append(TableBuilder(match["test"], tool))
        elif table.test and header.fullmatch(text):
            if table.columns:
                builders.append(table := TableBuilder(table.test, tool))
            names = [match.lastgroup or "" for match in _COLUMN.finditer(text) if match[0] != "#"]
            table.columns, table.compared = tuple(_FIGURES.get(name, "") for name in names), "valid" in names
            table.last_word = _LAST_WORDS[
                "valid" if names[-1:] == ["valid"] else tool if table.columns[-1:] != ("",) else ""
            ]
            table.unit = "usec" if "bw_average" not in names else "GB/s" if tool == "nvshmem" else "MB/s"
        elif table.columns and (match := _NVSHMEM_WRONG.fullmatch(text)):
            table.compared = True
            table.errors += [text.removeprefix("# ")] if int(match["wrong"]) else []
        elif table.columns and words and (size := logs.parse_integer(words[0])) is not None:
            if len(words) > len(table.columns) or (table.rows and size <= (table.rows[-1].size_bytes or 0)):
                continue  # another program's
            values = {name: parse_number(word) for name, word in zip(table.columns, words, strict=False) if name}
            is_cut = table.last_word and not table.last_word.fullmatch(words[-1])
            if len(words) != len(table.columns) or not values or None in values.values() or is_cut:
                table.has_unread_row = True
                unread.append(excerpt(text))
                continue
            if "messages" in values:
                values["msg_rate"] = (values.pop("messages") or 0) / 1e6
            table.add_row(size, values)
            table.errors += [f"the data of {size} bytes were wrong"] if "fail" in text.lower() else []
    return [*(builder.table(source) for builder in builders), *unread]


# all_reduce_bench.py: a Markdown table of payload, busbw and algbw, as it prints since 2024.

_ARB_TITLE = re.compile(r"The average bandwidth of all_reduce over (?P<ranks>\d+) ranks.*")
_ARB_ROW = re.compile(
    r"\|\s*(?P<size>[\d.]+)(?P<unit>[KMGT]?)i?B\s*\|\s*(?P<busbw>[\d.]+)GBps\s*\|\s*(?P<algbw>[\d.]+)GBps\s*\|"
)
_ARB_DEVICE = re.compile(r"- hardware: .{0,100}?name='(?P<device>[^']{1,200})'.*")


def parse_all_reduce_bench(source: str, lines: Sequence[str]) -> logs.Parsed[Run]:
    """Read the runs of all_reduce_bench.py in cleaned lines. It does not compare data, and does not say the nodes."""
    runs: list[Run] = []
    devices: tuple[str, ...] = ()
    for text in map(str.strip, lines):
        if match := _ARB_DEVICE.fullmatch(text):
            devices = (match["device"],)
        elif match := _ARB_TITLE.fullmatch(text):
            runs.append(
                Run(source=source, tool="all_reduce_bench", collective="all_reduce", ranks=int(match["ranks"]),
                    devices=devices, compared=False, verdict="no-data", reason="no row of results")
            )  # fmt: skip
        elif runs and (match := _ARB_ROW.fullmatch(text)):
            size = round(float(match["size"]) * 1024 ** " KMGT".index(match["unit"] or " "))
            algbw = float(match["algbw"])
            time = size / algbw / 1e3 if algbw else None
            half = Half(time_us=time, algbw_gb_s=algbw, busbw_gb_s=float(match["busbw"]), wrong=None)
            row = NcclRow(size_bytes=size, count=size // 4, dtype="float", redop="sum", root=None, out_of_place=half,
                          in_place=None)  # fmt: skip
            update = {"rows": (*runs[-1].rows, row), "verdict": "ok", "reason": "complete; data were not validated"}
            runs[-1] = runs[-1].model_copy(update=update)
    return [*runs]
