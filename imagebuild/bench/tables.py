"""Read plain tables: the OSU micro-benchmarks, those of NVSHMEM, and all_reduce_bench.py of ml-engineering."""

from __future__ import annotations

import re
from collections.abc import Sequence

from imagebuild.bench.logs import ParsedOutput, excerpt, parse_integer, parse_number
from imagebuild.bench.models import Half, NcclRow, PerftestTable, Run, TableRow

# OSU: `# OSU MPI-CUDA Bandwidth Test v7.4`, `# Size      Bandwidth (MB/s)`, rows; MB are 10^6 bytes.

_OSU_TITLE = re.compile(r"#\s*(?P<test>OSU [\w+ /()-]{1,100}?) Test(?: v(?P<version>[\w.]{1,20}))?")
_OSU_HEADER = re.compile(r"#\s*(?:Size|Message size)\b.*", re.IGNORECASE)
_OSU_COLUMN = re.compile(
    r"(?P<bw>Bandwidth \(MB/s\)|(?<!\()MB/s)|(?P<rate>Messages/s)"
    r"|(?:(?P<kind>Avg|Min|Max) )?(?P<lat>Lat(?:ency)? ?\(us\))|(?P<valid>Validation)|(?P<other>Iterations)",
    re.IGNORECASE,
)


def parse_osu_text(source: str, lines: Sequence[str]) -> ParsedOutput[PerftestTable]:
    """Read the tables of OSU micro-benchmarks in cleaned lines; a row whose data were wrong makes a table fail."""
    tables: list[PerftestTable] = []
    unread: list[str] = []
    columns: list[str] = []
    for line in lines:
        text = line.strip()
        if title := _OSU_TITLE.match(text):
            table = PerftestTable(source=source, tool="osu", test=title["test"], unit=None, verdict="no-data",
                                  reason="no result was printed")  # fmt: skip
            tables.append(table)
            columns = []
        elif tables and _OSU_HEADER.fullmatch(text):
            found = _OSU_COLUMN.finditer(text)
            columns = [
                f"lat {(match['kind'] or 'avg').lower()}" if match["lat"] else str(match.lastgroup) for match in found
            ]
            unit = "MB/s" if "bw" in columns else "usec"
            facts = {"unit": unit, "compared": "valid" in columns, "verdict": "truncated", "reason": "no row"}
            tables[-1] = tables[-1].model_copy(update=facts)
        elif columns and text and not text.startswith("#"):
            words = text.split()
            if parse_integer(words[0]) is None:
                continue
            numbers = [parse_number(word) for word in words[1:]]
            is_whole = len(words) == len(columns) + 1
            if not is_whole or any(n is None for n, column in zip(numbers, columns, strict=True) if column != "valid"):
                unread.append(excerpt(text))
                tables[-1] = tables[-1].model_copy(update={"verdict": "truncated", "reason": "a row could not be read"})
                continue
            tables[-1] = _with_osu_row(tables[-1], words, dict(zip(columns, numbers, strict=True)))
    return ParsedOutput(tuple(tables), tuple(unread))


def _with_osu_row(table: PerftestTable, words: Sequence[str], values: dict[str, float | None]) -> PerftestTable:
    names = {"lat avg": "average", "lat min": "min", "lat max": "max"}
    rate = values.get("rate")
    row = TableRow(
        size_bytes=int(words[0]),
        bw_average=values.get("bw"),
        msg_rate=rate / 1e6 if rate is not None else None,
        latency_us={ours: v for key, ours in names.items() if (v := values.get(key)) is not None} or None,
    )
    verdict, reason = table.verdict, table.reason
    if "fail" in "".join(words).lower():
        verdict, reason = "failed", f"the data of {words[0]} bytes were wrong"
    elif not table.rows:
        verdict, reason = "ok", ""
    return table.model_copy(update={"rows": (*table.rows, row), "verdict": verdict, "reason": reason})


# NVSHMEM: `#shmem_put_bw_uni`, `size(B)  scope  BW (GB/sec)`, rows. The programs that come with NVSHMEM compare no
# data; nvshmem-perf of our images does, and says so in the end.

_NVSHMEM_TITLE = re.compile(r"#\s*(?P<test>[a-z][a-z0-9_]{1,60})")
_NVSHMEM_HEADER = re.compile(r"size\(B\)\s.*")
_NVSHMEM_COLUMNS = {"BW(GB/sec)": "bw", "MMPs": "rate", "MMPs(M)": "rate", "latency(us)": "average",
                    "min_lat(us)": "min", "max_lat(us)": "max"}  # fmt: skip
_NVSHMEM_WRONG = re.compile(r"# (?P<wrong>\d{1,18}) words of 4 bytes were wrong")


def parse_nvshmem_text(source: str, lines: Sequence[str]) -> ParsedOutput[PerftestTable]:
    """Read the tables of NVSHMEM's tests, and of nvshmem-perf, in cleaned lines."""
    tables: list[PerftestTable] = []
    unread: list[str] = []
    test: str | None = None
    columns: list[str] = []
    for line in lines:
        text = line.strip()
        if title := _NVSHMEM_TITLE.fullmatch(text):
            test, columns = title["test"], []
        elif test and _NVSHMEM_HEADER.fullmatch(text):
            columns = re.sub(r"\s+\(", "(", text).split()
            unit = "GB/s" if "BW(GB/sec)" in columns else "usec"
            tables.append(PerftestTable(source=source, tool="nvshmem", test=test, unit=unit, verdict="truncated",
                                        reason="no row"))  # fmt: skip
        elif columns and (found := _NVSHMEM_WRONG.fullmatch(text)):
            wrong = int(found["wrong"])
            facts = {"verdict": "failed", "reason": f"{wrong} words of 4 bytes were wrong"} if wrong else {}
            tables[-1] = tables[-1].model_copy(update={"compared": True, **facts})
        elif columns and parse_integer(text.partition(" ")[0]) is not None:
            values = dict(zip(columns, text.split(), strict=False))
            numbers = {_NVSHMEM_COLUMNS.get(name): parse_number(word) for name, word in values.items()}
            numbers.pop(None, None)
            if len(text.split()) != len(columns) or None in numbers.values() or not numbers:
                unread.append(excerpt(text))
                tables[-1] = tables[-1].model_copy(update={"verdict": "truncated", "reason": "a row could not be read"})
                continue
            times = {name: value for name, value in numbers.items() if name in ("average", "min", "max")}
            row = TableRow(size_bytes=int(values["size(B)"]), bw_average=numbers.get("bw"),
                           msg_rate=numbers.get("rate"), latency_us=times or None)  # fmt: skip
            facts = {} if tables[-1].rows else {"verdict": "ok", "reason": ""}
            tables[-1] = tables[-1].model_copy(update={"rows": (*tables[-1].rows, row), **facts})
    return ParsedOutput(tuple(tables), tuple(unread))


# all_reduce_bench.py: a Markdown table of payload, busbw and algbw, as it prints since 2024.

_ARB_TITLE = re.compile(r"The average bandwidth of all_reduce over (?P<ranks>\d+) ranks.*")
_ARB_ROW = re.compile(
    r"\|\s*(?P<size>[\d.]+)(?P<unit>[KMGT]?)i?B\s*\|\s*(?P<busbw>[\d.]+)GBps\s*\|\s*(?P<algbw>[\d.]+)GBps\s*\|"
)
_ARB_DEVICE = re.compile(r"- hardware: .{0,100}?name='(?P<device>[^']{1,200})'.*")


def parse_all_reduce_bench(source: str, lines: Sequence[str]) -> ParsedOutput[Run]:
    """Read the runs of all_reduce_bench.py in cleaned lines. It does not compare data, and does not say the nodes."""
    runs: list[Run] = []
    device = None
    for line in lines:
        text = line.strip()
        if match := _ARB_DEVICE.fullmatch(text):
            device = match["device"]
        elif match := _ARB_TITLE.fullmatch(text):
            runs.append(
                Run(source=source, tool="all_reduce_bench", collective="all_reduce", ranks=int(match["ranks"]),
                    device=device, compared=False, verdict="no-data", reason="no row of results")
            )  # fmt: skip
        elif runs and (match := _ARB_ROW.fullmatch(text)):
            size, algbw = (
                round(float(match["size"]) * 1024 ** " KMGT".index(match["unit"] or " ")),
                float(match["algbw"]),
            )
            time = size / algbw / 1e3 if algbw else None
            half = Half(time_us=time, algbw_gb_s=algbw, busbw_gb_s=float(match["busbw"]), wrong=None)
            row = NcclRow(size_bytes=size, count=size // 4, dtype="float", redop="sum", root=None, out_of_place=half,
                          in_place=None)  # fmt: skip
            update = {"rows": (*runs[-1].rows, row), "verdict": "ok", "reason": "complete; data were not validated"}
            runs[-1] = runs[-1].model_copy(update=update)
    return ParsedOutput(tuple(runs))
