"""Read the runs that nccl-tests and rccl-tests print: tables of every release since 2.10, and the JSON of `-J`.

What a process prints fills tables, one for each run: its parameters, ranks, rows and footer; so does a JSON document.
Rows are read by their shape, since headers are often missing; a header says what the shape leaves open.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from statistics import fmean, median
from typing import Any, get_args

from imagebuild.bench import logs
from imagebuild.bench.ceilings import forced_classes
from imagebuild.bench.logs import JsonDocument, Log, LogLine, Parsed, ParsedLines, excerpt, parse_number
from imagebuild.bench.models import Collective, Half, NcclRow, Run, Verdict, bus_ratio
from imagebuild.core.errors import plural

_OWN_FAILURE = re.compile("Test (?:NCCL failure|CUDA failure|failure|timeout)")
"""Messages that only these programs print."""


def parse_nccl_text(log: Log, failures: Sequence[logs.Failure]) -> ParsedLines[Run]:
    """Read the runs of a log; nothing if it is not of these programs. A command without output is one if it failed."""
    tables = sorted(_read_lines(log.lines), key=lambda table: table.begin)
    own = [failure.number for failure in failures if _OWN_FAILURE.search(failure.text)]
    if own and not tables:
        tables.append(_Table(min(own), found={"starting"}))
    parsed: ParsedLines[Run] = []
    end = 0
    for table, following in zip_longest(tables, tables[1:]):
        if not table.has_output:
            # A shell's trace of a command whose lines another process labels is no run of its own.
            is_trace = following and following.has_output and "command" not in following.found
            limit = following.begin if following else math.inf
            if is_trace or not any(table.begin <= failure.number < limit for failure in failures):
                continue
        warnings = (w.text.partition(" NCCL WARN ")[2][:200] for w in log.warnings if w.number >= table.begin)
        for number, variables in log.settings:
            if end < number <= table.end:
                table.facts = {**variables, **table.facts}
        end = table.end
        run = _run_of(log.path, table, next(warnings, ""))
        parsed += [(table.begin, item) for item in (run, *table.partial)]
    return parsed


# Lines: what a table has of them.

_COLLECTIVES = frozenset(get_args(Collective))
_STAGES = {
    **dict.fromkeys(("command", "version", "starting", "parameters", "devices", "rank", "header"), 1),
    "row": 2, "bounds": 3, "average": 3, "concluded": 4,
}  # fmt: skip
"""Kind of a line → the stage of a run in which it is printed."""
_ASIDE = frozenset(("command", "elision"))
"""What the program itself does not print."""
_PATTERNS = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("version", r"(?P<tool>nccl-tests) version (?P<version>[^\s(]{1,40})"),
        ("version", r"(?P<tool>rccl-tests): Version (?P<version>\S{1,80})"),
        ("starting", r"Collective test starting: (?P<program>\S{1,300})"),
        (
            "parameters",
            r"nThreads? \d{1,5} nGpus \d{1,5} minBytes (?P<min>\d{1,20}) maxBytes (?P<max>\d{1,20})"
            r"(?: step: (?:(?P<factor>\d{1,20})\(factor\)|(?P<bytes>\d{1,20})\(bytes\)))?"
            r"(?:.{0,200}? validation: (?P<validation>\d{1,3}))?",
        ),
        ("devices", r"Using devices"),
        (
            "rank",
            r"Rank\s{1,12}(?P<rank>\d{1,7})(?:\s{1,12}Group\s{1,12}-?\d{1,7})?(?:\s{1,12}Pid\s{1,12}\d{1,10})?"
            r"\s{1,12}on\s{1,20}(?P<host>\S{1,300})\s{1,12}device\s{1,12}\d{1,5}\s{1,12}\[(?P<bus>[^\]]{0,40})\](?P<name>.{0,200})",
        ),
        ("reduced", r"Reducing maxBytes to (?P<reduced>\d{1,20})"),
        ("header", r"size\s{1,40}count\s{1,40}type\b(?P<labels>.{0,400})"),
        ("bounds", r"Out of bounds values\s{0,20}: ?(?P<bounds>\d{1,15})\s{1,8}(?P<bounds_state>OK|FAILED)"),
        ("average", r"Avg bus bandwidth\s{0,20}: ?(?P<average>\S{1,30})(?:\s{1,8}(?P<average_state>OK|FAILED))?"),
        ("concluded", r"Collective test concluded: (?P<program>\S{1,300})"),
    )
)
"""Kind of line → its pattern, whose groups are the names of the facts."""
_ELISION = re.compile(r"[\s#|]{0,200}(?:\.{3,10}|…|\[(?:\.{3}|…)\]|<(?:snip|\.\.\.)>)\s{0,200}")
"""Dots that somebody who copied the output left for what was left out."""
_COMMAND = re.compile(
    rf"\b(?P<command>(?:{'|'.join(sorted(_COLLECTIVES, reverse=True))})_perf)(?:_mpi)?"
    r"['\"\\]{0,2}\s{1,20}-{1,2}[a-zA-Z]"
)


def _fact_of(text: str) -> tuple[str, Mapping[str, str]]:
    """Return the kind of a line and the facts in it; an empty kind for a row, a failure and other output."""
    bare = text.lstrip("# \t*>|\\")
    # After a prefix that is not known, the first # is that of the line.
    for candidate in (bare, text.partition("#")[2].lstrip("# \t")) if "#" in bare else (bare,):
        for kind, pattern in _PATTERNS:
            if match := pattern.match(candidate):
                return kind, {name: value.strip() for name, value in match.groupdict().items() if value is not None}
    if _ELISION.fullmatch(text):
        return "elision", {}
    if "_perf" in text and not text.lstrip().startswith("#") and (match := _COMMAND.search(text)):
        return "command", {**match.groupdict(), **logs.settings_in(text)}
    return "", {}


@dataclass
class _Table:
    """Collect what one run printed."""

    begin: int
    end: int = 0
    stage: int = 0
    """How far the run came, as in `_STAGES`."""
    found: set[str] = field(default_factory=set)
    """Kinds of its lines: `row`, `elision`, `command`, those of `_PATTERNS`."""
    facts: dict[str, str] = field(default_factory=dict)
    """What its lines say, by the names of the groups of `_PATTERNS` and of variables; of equal ones, the first."""
    ranks: dict[int, Mapping[str, str]] = field(default_factory=dict)
    """Rank → host, bus and name of its GPU."""
    entries: list[NcclRow | str] = field(default_factory=list)
    """Its rows, and lines that look like rows and could not be read."""

    @property
    def rows(self) -> list[NcclRow]:
        return [entry for entry in self.entries if isinstance(entry, NcclRow)]

    @property
    def partial(self) -> list[str]:
        return [entry for entry in self.entries if isinstance(entry, str)]

    @property
    def has_output(self) -> bool:
        return bool(self.found - _ASIDE)

    @property
    def is_open(self) -> bool:
        return self.stage == 2 or (self.stage == 1 and "header" in self.found)

    @property
    def labels(self) -> Sequence[str]:
        """Return the names of the columns; none without a header."""
        return self.facts.get("labels", "").replace("# wrong", "#wrong").replace("|", " ").split()

    def is_over(self, kind: str, facts: Mapping[str, str]) -> bool:
        """Return whether a line of this kind, which follows, belongs to the next run: most come once, in order."""
        is_repeated = kind in self.found - {"command", "row"}
        if kind == "rank":
            is_repeated = int(facts["rank"]) in self.ranks
        return kind in _STAGES and (is_repeated or _STAGES[kind] < self.stage)

    def add(self, kind: str, facts: Mapping[str, str], number: int) -> None:
        """Add what a line says; what is in a row is added beside this."""
        self.found.add(kind)
        self.stage, self.end = max(self.stage, _STAGES.get(kind, 0)), number
        if kind == "rank":
            self.ranks[int(facts["rank"])] = facts
        # Of several commands, the last one is that of the table.
        self.facts = {**self.facts, **facts} if kind == "command" else {**facts, **self.facts}


def _read_lines(lines: Iterable[LogLine]) -> list[_Table]:
    """Return the tables of all processes.

    Lines without a name are of the process that printed last, unless a process without a name printed something.
    """
    processes: dict[str, list[_Table]] = {}
    last_process = ""
    for line in lines:
        name = line.process or ("" if "" in processes else last_process)
        tables = processes.get(name, [])
        kind, facts = _fact_of(line.text)
        entry = None
        if not kind:
            entry = _read_row(line, tables[-1].labels if tables else ())
            if entry is None and tables and tables[-1].is_open:
                # A line may end like a row, whatever it begins with.
                end = _END_OF_ROW.search(" " + line.text[-400:])
                entry = line.text.strip() if end and "." in end[0] else None
            if entry is None:
                continue
            kind = "row"
        if not tables or tables[-1].is_over(kind, facts):
            tables.append(_Table(line.number))
        processes[name] = tables
        tables[-1].add(kind, facts, line.number)
        tables[-1].entries += [] if entry is None else [entry]
        last_process = last_process if kind in _ASIDE else name
    return [table for tables in processes.values() for table in tables]


# Lines: rows with size, count, type, operation, root, and two halves of time, algbw, busbw, wrong.

_TYPE_BYTES = {
    "int8": 1, "uint8": 1, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8, "half": 2, "float": 4, "double": 8,
    "bfloat16": 2, "f8e4m3": 1, "f8e5m2": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "char": 1, "int": 4,
}  # fmt: skip
"""Bytes of an element of each type."""
_BLANKS, _WORD_END, _NUMBER = r"[\s|]+", r"(?![^\s|])", r"\d+(?:\.\d+)?(?:e[+-]\d\d+)?"
_VALUE = rf"{_BLANKS}(?:{_NUMBER}|-?nan|-?inf|N/A|-1){_WORD_END}"
_FIGURE = rf"{_BLANKS}({_NUMBER}|-?nan|-?inf){_WORD_END}"
_HALF = rf"{_FIGURE * 3}{_BLANKS}(N/A|\d+(?:\.\d+)?e[+-]\d\d+|\d+|-?nan){_WORD_END}"
_HALVES = rf"{_HALF}(?P<iterations>(?:{_VALUE}){{4}})?{_HALF}(?(iterations)(?:{_VALUE}){{4}})"
"""With `-I`, each half has four more columns, of single iterations."""
_LEAD = re.compile(
    r"(?<![^\s|#])(?P<size>\d{1,20})[\s|]{1,40}(?P<count>\d{1,20})[\s|]{1,40}(?P<dtype>[a-z]\w{2,11})(?![^\s|])"
    rf"(?:{_BLANKS}(?P<redop>sum|prod|max|min|avg|mulsum|none){_WORD_END})?"
)
_FIGURES = re.compile(
    rf"(?:{_BLANKS}(?P<root>-1|\d{{1,7}}){_WORD_END})??{_HALVES}(?!{_VALUE}|{_BLANKS}(?:{'|'.join(_TYPE_BYTES)}){_WORD_END})"
)
"""What follows the lead. What is followed by a type has size and count of another row at its end."""
_END_OF_ROW = re.compile(rf"(?:{_HALVES}|\A{_HALF})(?:{_BLANKS}(?:\d{{4}}-\d\d-\d\d|\d\d:\d\d:\d\d)){{0,2}}[\s|]*\Z")
"""The last columns of a row, or a line of the last half alone."""


def _read_row(line: LogLine, labels: Sequence[str]) -> NcclRow | str | None:
    """Return the row in a line, its text if it cannot be read; None if there is none. `labels` are of the header."""
    lead = _LEAD.search(line.text)
    if lead is None:
        return None
    size, count, element = int(lead["size"]), int(lead["count"]), _TYPE_BYTES.get(lead["dtype"], 0)
    figures = _FIGURES.match(line.text, lead.end())
    words = [word for word in figures.groups()[1:] if word != figures["iterations"]] if figures else []
    printed = (words[:4], words[4:])
    # A size of fewer bytes than `count` elements lost its first digits.
    is_cut = figures is None or size < count * element or ("i_min" in labels and not figures["iterations"])
    if figures is None or is_cut or (line.is_joined and not _is_consistent(size, count * element, printed)):
        return line.text.strip() if element else None
    halves = []
    for half in printed:
        time, algbw, busbw, wrong = map(parse_number, half)
        wrong = None if wrong is None else round(wrong)
        halves.append(Half(time_us=time, algbw_gb_s=algbw, busbw_gb_s=busbw, wrong=wrong))
    return NcclRow(
        size_bytes=size,
        count=count,
        dtype=lead["dtype"],
        redop=lead["redop"],
        root=int(figures["root"]) if figures["root"] else None,
        out_of_place=halves[0],
        in_place=halves[1],
    )


def _is_consistent(size: int, data: int, halves: Iterable[Sequence[str]]) -> bool:
    """Return whether the size is a multiple of the elements' bytes, and algbw is size / time."""
    for time, algbw in (map(parse_number, half[:2]) for half in halves):
        if not time or algbw is None or abs(algbw - size / time / 1e3) > 0.1 * size / time / 1e3 + 0.011:
            return False
    return size % data == 0 if data else size == 0


# What a table says: who took part, which sizes, and whether its figures fit each other.


def _run_of(source: str, table: _Table, warning: str = "") -> Run:
    compared_rows = _compared_rows(table)
    facts = Run(
        source=source,
        tool=table.facts.get("tool", "nccl-tests"),
        tool_version=table.facts.get("version") or None,
        collective=_collective_of(table.facts.get("program", ""))
        or _infer_collective(table.rows, table.labels)
        or _collective_of(table.facts.get("command", "")),
        **_participants(table),
        algorithms=forced_classes(table.facts),
        rows=tuple(table.rows),
        partial_rows=len(table.partial),
        avg_busbw_gb_s=parse_number(table.facts.get("average", "")),
        compared=compared_rows == len(table.rows),
    )
    verdict, reason = next(_verdicts(table, facts, compared_rows, warning))
    return facts.model_copy(update={"verdict": verdict, "reason": reason})


def _collective_of(program: str) -> str | None:
    """Return `all_reduce` for `./build/all_reduce_perf_mpi`; None for a program that is not of nccl-tests."""
    name = program.rpartition("/")[2].strip("'\"").partition("_perf")[0]
    return name if name in _COLLECTIVES else None


def _infer_collective(rows: Sequence[NcclRow], labels: Sequence[str]) -> str | None:
    """Return the only collective that the columns of the rows, and the ratios between them, leave possible.

    `busbw / algbw` is 2(n-1)/n for all_reduce, and at most 1 for others. A size is that of `count` elements, or n times
    that for collectives that divide the data among ranks. With one rank, bandwidths are 0.
    """
    operations, roots = {row.redop for row in rows}, {row.root for row in rows}
    if operations == {None} and "root" not in labels and not {"redop", "op"}.isdisjoint(labels):
        return "alltoall"  # before 2.13, it alone has a column for the operation and leaves it blank
    is_reducing, is_rooted = operations.isdisjoint((None, "none")), roots.isdisjoint((None, -1))
    ratio = bus_ratio(rows, least=2)  # below, its digits are too few
    data = [(row.size_bytes, row.count * _TYPE_BYTES.get(row.dtype, 0)) for row in rows]
    is_divided = {size > elements for size, elements in data if size and elements}
    if ratio is None or len(is_divided) != 1 or (is_divided == {False} and ratio <= 0.99):
        return None
    names: dict[tuple[bool, ...], str] = {
        (True, True, False): "reduce_scatter", (False, True, False): "all_reduce", (False, True, True): "reduce",
        (False, False, True): "broadcast",
    }  # fmt: skip
    return names.get((*is_divided, is_reducing, is_rooted))


_BUS = re.compile(r"[\da-f]{4,8}:[\da-f]{2}:[\da-f]{2}(?:\.\d)?|0x(?!0?[01]$)[\da-f]{1,2}", re.IGNORECASE)


def _participants(table: _Table) -> dict[str, Any]:
    """Return what the list of devices says of ranks, hosts and GPUs, by the names that `Run` has; hosts if it is whole.

    Before 2.15 a bus has no domain, so buses 0 and 1, which machines have in every domain, do not tell GPUs apart. The
    list of a JSON document has one device for `each` so many ranks.
    """
    listed = [table.ranks[rank] for rank in sorted(table.ranks)]
    ranks = max(table.ranks, default=-1) + 1
    names = Counter(device["name"] for device in listed if device["name"])
    facts: dict[str, Any] = {"ranks": ranks or None, "devices": tuple(name for name, _ in names.most_common())}
    if listed and len(listed) == ranks:
        hosts = tuple(dict.fromkeys(device["host"] for device in listed))
        places = {(device["host"], device["bus"]) for device in listed}
        gpus = len(places) if all(_BUS.fullmatch(bus) for _, bus in places) else None
        ranks *= int(listed[-1].get("each", 1))
        facts |= {"ranks": ranks or None, "nodes": len(hosts), "hosts": hosts, "gpus": gpus}
    return facts


def _compared_rows(table: _Table) -> int:
    """Return in how many rows the data were compared, out of place and in place.

    Where no row says it of one of them, as of alltoall in place, nobody meant to compare that.
    """
    if table.facts.get("validation") == "0":
        return 0
    rows = [[half.wrong is not None for half in row.halves] for row in table.rows]
    asked = {place for row in rows for place, is_compared in enumerate(row) if is_compared}
    return sum(bool(asked) and all(row[place] for place in asked if place < len(row)) for row in rows)


def _sizes_of(table: _Table) -> Sequence[int]:
    """Return the sizes that a run was asked for, before they are rounded to elements; none if they are not known."""
    smallest, factor, increment = (int(table.facts.get(name) or 0) for name in ("min", "factor", "bytes"))
    largest = int(table.facts.get("reduced") or table.facts.get("max") or 0)
    if increment and (largest - smallest) // increment < 100_000:
        return range(smallest, largest + 1, increment)
    sizes = []
    while factor > 1 and 0 < smallest <= largest:
        sizes.append(smallest)
        smallest *= factor
    return sizes


def _size_problem(table: _Table) -> tuple[Verdict, str] | None:
    """Return that a size which was asked for has no row, or that a row has another size than the one asked for there.

    Rows of all sizes may come several times, and for several types and operations. A size is rounded down by less than
    half, or to 0. Where rows that could not be read fill the gap, none is missing.
    """
    asked = _sizes_of(table)
    if not asked or (table.partial and (len(table.rows) + len(table.partial)) % len(asked) == 0):
        return None
    sizes: dict[object, list[int]] = defaultdict(list)
    for row in table.rows:
        sizes[row.dtype, row.redop, row.root].append(row.size_bytes)
    for found in sizes.values():
        wanted = [*asked] * max(1, round(len(found) / len(asked)))
        for want, size in zip_longest(wanted, found):
            if want is not None and size is not None and (size == 0 or want / 2 < size <= want):
                continue
            if len(found) < len(wanted):
                return "truncated", f"no row of {want} bytes, though it was asked for"
            return "damaged", f"a row of {size} bytes, where {want or 'none'} were asked for"
    return None


_ROUNDED = 0.06
"""Largest difference that rounding explains, relative to a figure: a large time has two digits."""
_ONE_DIGIT_FROM = 950_000
"""GB/s from which nccl-tests prints one digit, such as `1e+06`: what one GPU reaches that has nothing to send."""


def _contradiction(table: _Table, collective: str | None) -> str:
    """Return which row has figures that are not numbers, or that do not fit each other as in most rows.

    algbw is size / time, unless time is that of the CPU, and busbw is algbw times the same factor in all rows. Both are
    compared where rounding leaves enough digits.
    """
    figures: list[tuple[int, float, float, float]] = []
    for size, half in ((row.size_bytes, half) for row in table.rows for half in row.halves if row.size_bytes):
        if half.time_us is None or half.algbw_gb_s is None or half.busbw_gb_s is None:
            return f"the row of {size} bytes has figures that are not numbers"
        if half.time_us >= 1 and 1 <= half.algbw_gb_s < _ONE_DIGIT_FROM:
            figures.append((size, half.time_us, half.algbw_gb_s, half.busbw_gb_s))
    checks = []
    if figures and "cputime" not in table.labels:
        checks.append((_ROUNDED, [algbw * time / size for size, time, algbw, _ in figures], "time and algbw"))
    if figures and collective != "alltoallv":
        checks.append((0.02, [busbw / algbw for _, _, algbw, busbw in figures], "algbw and busbw"))
    for tolerance, ratios, names in checks:
        usual = median(ratios)
        for (size, *_), ratio in zip(figures, ratios, strict=True):
            if usual and abs(ratio / usual - 1) > tolerance:
                return f"{names} of the row of {size} bytes do not fit each other"
    return ""


def _verdicts(table: _Table, run: Run, compared_rows: int, warning: str) -> Iterator[tuple[Verdict, str]]:
    """Yield the verdicts that a run deserves, with their reasons: the worst and the cause first, `ok` last."""
    facts, rows = table.facts, len(table.rows)
    wrong = sum(half.wrong or 0 for row in table.rows for half in row.halves)
    bounds = round(parse_number(facts.get("bounds", "")) or 0)
    if wrong or bounds or facts.get("bounds_state") == "FAILED":
        yield "wrong-data", f"{wrong} wrong elements in the rows read, {bounds} checks out of bounds"
    if facts.get("average_state") == "FAILED":
        yield "failed", "the average bus bandwidth is below what NCCL_TESTS_MIN_BW asks for"
    warned = f"; NCCL warned: {warning}" if warning else ""
    if not rows:
        yield "no-data", f"no row of results{warned}"
    if contradiction := _contradiction(table, run.collective):
        yield "damaged", contradiction
    left_out = "elision" in table.found
    if isinstance(table.entries[-1], str):
        yield "truncated", f"the last row is cut{warned}"
    if "bounds" not in table.found:
        has_footer = table.stage > _STAGES["row"]
        lack = "its footer has no line `Out of bounds values`" if has_footer else "no footer"
        yield "truncated", f"{lack}{warned}"
    if run.avg_busbw_gb_s is None:
        yield "truncated", f"its footer has no average bus bandwidth{warned}"
    if not left_out and run.collective != "alltoallv" and (wrong_size := _size_problem(table)):
        yield wrong_size
    speeds = [half.busbw_gb_s for row in table.rows for half in row.halves if half.busbw_gb_s is not None] or [0]
    # 1.4e7 is printed as 1e+07, which hides up to half of its power of ten.
    hidden = fmean(10 ** math.floor(math.log10(speed)) / 2 if speed >= _ONE_DIGIT_FROM else 0 for speed in speeds)
    average = run.avg_busbw_gb_s or 0
    is_average = math.isclose(fmean(speeds), average, rel_tol=0.0005, abs_tol=0.01 + hidden)
    if not left_out and not table.partial and not is_average:
        printed = f"{run.avg_busbw_gb_s} GB/s, as its footer says: a row is missing or wrong"
        yield "damaged", f"the average of its rows is not {printed}"
    reduced = facts.get("reduced")
    notes = (
        (True, "complete"),
        (reduced, f"the largest size was reduced to {reduced} bytes for lack of memory"),
        (left_out, "parts are left out where the output has dots"),
        (table.partial, f"{plural(len(table.partial), 'row')} could not be read"),
        (not compared_rows, "data were not validated"),
        (0 < compared_rows < rows, f"data were compared in {compared_rows} of {rows} rows only"),
    )
    yield "ok", "; ".join(text for holds, text in notes if holds)


# The JSON of `-J`.


def parse_nccl_json(source: str, document: JsonDocument) -> Parsed[Run] | None:
    """Read the run of a JSON document, as a table; None if it is not of nccl-tests."""
    top = logs.json_object(document.value)
    config = logs.json_object(top.get("config"))
    if "nccl_version" not in top and "minimum_bytes" not in config:
        return None
    variables = (text.partition("=") for text in map(str, logs.json_list(top.get("env"))))
    table = _Table(document.number, facts={name: value for name, _, value in variables if name.startswith("NCCL_")})
    parameters = {
        "min": "minimum_bytes", "max": "maximum_bytes", "factor": "step_factor", "bytes": "step_bytes",
        "validation": "validation",
    }  # fmt: skip
    table.facts |= {name: _word(config.get(key)) for name, key in parameters.items()}
    table.facts["program"] = "".join(map(str, logs.json_list(top.get("args"))[:1]))
    # The list of devices has one device of each process.
    each = f"{int(_word(config.get('nthreads')) or 0) * int(_word(config.get('ngpus')) or 0)}"
    for rank, device in enumerate(map(logs.json_object, logs.json_list(config.get("devices")))):
        host, name = str(device.get("hostname")), str(device.get("device_info") or "")
        table.ranks[rank] = {"each": each, "host": host, "name": name, "bus": ""}
    for entry in map(logs.json_object, logs.json_list(top.get("results"))):
        if "cpu_time" in logs.json_object(entry.get("out_of_place")):
            table.facts["labels"] = "root cputime"
        row = _read_row(LogLine(_json_row(entry), "", document.number), ())
        table.entries.append(row if isinstance(row, NcclRow) else excerpt(f"results: {entry!r}"))
    # The first releases with JSON have a typing error in both keys of the average.
    for kind, outer, key in (
        ("bounds", "out_of_bounds", "count"),
        ("average", "average_bus_bandwidth", "bandwidth"),
        ("average", "average_bus_bandwidith", "bandwidith"),
    ):
        footer = logs.json_object(top.get(outer))
        value, has_failed = logs.json_number(footer.get(key)), str(footer.get("okay")).lower() == "false"
        if value is not None or has_failed:
            facts = {kind: f"{value}", f"{kind}_state": "FAILED" if has_failed else "OK"}
            table.add(kind, facts, document.number)
    run = _run_of(source, table)
    errors = [error for error in map(str, logs.json_list(top.get("errors"))) if error.strip()]
    if errors and "bounds" not in table.found:
        # The run did not come to its end: the last errors of the library are the cause.
        cause = min(logs.failure_of(error, 0) or logs.Failure(1, 0, "comm-failure", error[:240]) for error in errors)
        run = run.spoiled(cause.verdict, cause.text)
    return [run, *table.partial]


def _json_row(entry: Mapping[str, object]) -> str:
    """Return a row of a document as text; one that is not whole has fewer words."""
    words = [_word(entry.get("size")), _word(entry.get("count")), str(entry.get("type"))]
    words += [str(entry.get("redop") or ""), _word(entry.get("root"))]
    for half in (logs.json_object(entry.get(name)) for name in ("out_of_place", "in_place")):
        figures = [logs.json_number(half[key]) for key in ("time", "cpu_time", "alg_bw", "bus_bw") if key in half]
        words += ["nan" if figure is None else f"{figure}" for figure in figures]
        words += [_word(half["nwrong"]) or "N/A"] if "nwrong" in half else []
    return " ".join(words)


def _word(value: object) -> str:
    """Return an integer of a JSON document as text would have it; empty for every other value."""
    number = logs.json_number(value)
    return "" if number is None else f"{round(number)}"
