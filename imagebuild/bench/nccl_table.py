"""Collect what each run of nccl-tests printed: from the lines of a log, or from the JSON that option `-J` writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from imagebuild.bench import logs
from imagebuild.bench.arithmetic import checks_in_place
from imagebuild.bench.logs import JsonDocument, LogLine, excerpt
from imagebuild.bench.models import NcclRow
from imagebuild.bench.nccl_lines import ends_like_row, read_facts, read_row
from imagebuild.core.patterns import data_of

_DATA = data_of(__file__)
_STAGES: Mapping[str, int] = {kind: stage for stage, kinds in _DATA["stages"].items() for kind in kinds}
_NOT_OUTPUT = frozenset(_DATA["not_output"])


@dataclass
class Table:
    """The output of one run."""

    begin: int
    """Number of the first line."""
    end: int = 0
    """Number of the last line."""
    stage: int = 0
    """The last stage that the run reached, as in `_STAGES`."""
    first: str = ""
    """Kind of the first line."""
    found: Counter[str] = field(default_factory=Counter)
    """Kinds of lines that were found: `row`, and the kinds that `read_facts` returns. The number of a kind is that of
    the tables with such a line: 1, or more if tables are mixed."""
    printers: int = 1
    """Number of processes of the launch that printed a table. More than 1: the processes were not joined."""
    facts: dict[str, str] = field(default_factory=dict)
    """Values that were read from lines, and environment variables of the run, by name. If a name occurs several times,
    the first value counts."""
    ranks: dict[tuple[int, int], Mapping[str, str]] = field(default_factory=dict)
    """Maps each listed rank, and the number of its group, to its host, and the number, bus and name of its GPU."""
    entries: list[NcclRow | str] = field(default_factory=list)
    """Rows, and the text of lines that look like rows but could not be read."""

    @property
    def rows(self) -> list[NcclRow]:
        return [entry for entry in self.entries if isinstance(entry, NcclRow)]

    @property
    def partial(self) -> list[str]:
        """Lines that look like rows but could not be read."""
        return [entry for entry in self.entries if isinstance(entry, str)]

    @property
    def labels(self) -> Sequence[str]:
        """The column names after size, count and type; empty without a header."""
        return self.facts.get("labels", "").replace("# wrong", "#wrong").replace("|", " ").split()

    @property
    def has_output(self) -> bool:
        """Whether the program printed anything."""
        return not _NOT_OUTPUT.issuperset(self.found)

    @property
    def heads(self) -> int:
        """Number of tables whose beginning was found."""
        return max(self.found[kind] for kind in _DATA["heads"]) or self.found["header"]

    @property
    def tables(self) -> int:
        """Number of tables, according to the lines that a table has once."""
        return max(self.heads, *(self.found[kind] for kind in ("header", "bounds", "average")))

    @property
    def is_mixed(self) -> bool:
        """Whether these are the lines of several processes, mixed with each other."""
        return self.tables > 1

    @property
    def has_footer(self) -> bool:
        return self.stage > _STAGES["row"]

    @property
    def is_elided(self) -> bool:
        """Whether someone replaced lines by dots."""
        return "elision" in self.found

    def compared_rows(self, collective: str | None) -> int:
        """Return the number of rows whose data the program validated out of place and, if the program of this
        collective ever does so, in place."""
        if self.facts.get("validation") == "0":
            return 0
        rows = [[half.wrong is not None or half.error is not None for half in row.halves] for row in self.rows]
        is_checked = checks_in_place(collective) or any(all(row[1:]) for row in rows if len(row) > 1)
        return sum(row[0] and (all(row) or not is_checked) for row in rows)

    def is_over(self, kind: str, facts: Mapping[str, str]) -> bool:
        """Return whether the next line starts another run.

        It does if this run already contains a line of the same kind, or if such lines come earlier in a run than
        the last line that was read."""
        is_repeated = kind in self.found and kind not in ("command", "row")
        if kind == "rank":
            is_repeated = _rank_of(facts) in self.ranks
        return kind in _STAGES and (is_repeated or _STAGES[kind] < self.stage)

    def add(self, kind: str, facts: Mapping[str, str], number: int) -> None:
        """Add the values that were read from a line. The caller adds the figures of a row to `entries`."""
        self.first = self.first or kind
        self.found[kind] = 1
        self.stage, self.end = max(self.stage, _STAGES.get(kind, 0)), number
        if kind == "rank":
            self.ranks[_rank_of(facts)] = facts
        # If several commands precede a table, the last command started the run.
        self.facts = {**self.facts, **facts} if kind == "command" else {**facts, **self.facts}


def _rank_of(facts: Mapping[str, str]) -> tuple[int, int]:
    return int(facts["rank"]), int(facts.get("group", 0))


def _mix(tables: Sequence[Table]) -> Table:
    """Return one table with the lines of several."""
    mixed = tables[0]
    for other in tables[1:]:
        mixed.found += other.found
        mixed.end, mixed.stage = max(mixed.end, other.end), max(mixed.stage, other.stage)
        mixed.ranks, mixed.facts = other.ranks | mixed.ranks, other.facts | mixed.facts
        mixed.entries += other.entries
    mixed.printers = mixed.tables
    return mixed


def tables_in_lines(lines: Iterable[LogLine]) -> list[Table]:
    """Return the tables of all processes, sorted by their first line.

    A line without the name of a process belongs to the process that printed last, unless there is a process without a
    name."""
    processes: dict[str, list[Table]] = {}
    last_process = ""
    for line in lines:
        name = line.process or ("" if "" in processes else last_process)
        tables = processes.get(name, [])
        row: NcclRow | str | None = None
        kind, facts = read_facts(line.text)
        if not kind:
            row = read_row(line, tables[-1].labels if tables else ())
            awaits_row = tables and (tables[-1].stage == 2 or (tables[-1].stage == 1 and "header" in tables[-1].found))
            if row is None and awaits_row and ends_like_row(line.text):
                row = line.text.strip()
            if row is None:
                continue
            kind = "row"
        if kind == "library" and not (tables and tables[-1].has_output):
            continue
        if not tables or tables[-1].is_over(kind, facts):
            tables.append(Table(line.number))
        tables[-1].add(kind, facts, line.number)
        if row is not None:
            tables[-1].entries.append(row)
        processes[name] = tables
        if kind not in _NOT_OUTPUT:
            last_process = name
    launches: Counter[str | None] = Counter()
    for name, tables in processes.items():
        processes[name] = _mixed(tables)
        launches[logs.launch_of(name)] += any(table.found["header"] or table.found["row"] for table in processes[name])
    for name, tables in processes.items():
        for table in tables if (launch := logs.launch_of(name)) is not None else ():
            table.printers = max(table.printers, launches[launch])
    return sorted((table for tables in processes.values() for table in tables), key=lambda table: table.begin)


def _mixed(tables: Iterable[Table]) -> list[Table]:
    """Return the tables of one process, or of lines without labels. Tables that are mixed become a single one.

    If a part begins in the middle of a table, such as with a footer, it belongs to an earlier table that lacks a
    footer. Another table began in between, so several processes printed these tables at the same time."""
    found: list[Table] = []
    for table in tables:
        found.append(table)
        heads = same = later = 0
        for at in range(len(found) - 2, max(-1, len(found) - 66), -1) if table.first not in _NOT_OUTPUT else ():
            heads, same = heads + found[at].heads, same + found[at].found[table.first]
            later += found[at].found[_DATA["next"].get(table.first, table.first)]
            if heads > 1 and heads > min(same, later):
                found[at:] = [_mix(found[at:])]
            if heads > same:
                break
    for at in range(len(found) - 1, 0, -1):
        # The first part may be the beginning of a table whose other lines are in the mixed part.
        if found[at].tables > found[at].heads and found[at - 1].heads and not found[at - 1].has_footer:
            found[at - 1 :] = [_mix(found[at - 1 : at + 1]), *found[at + 1 :]]
    return found


def table_in_json(document: JsonDocument) -> Table | None:
    """Return the table of a JSON document, or None if nccl-tests did not write the document."""
    top = logs.json_object(document.value)
    config = logs.json_object(top.get("config"))
    if "nccl_version" not in top and "minimum_bytes" not in config:
        return None
    variables = (text.partition("=") for text in map(str, logs.json_list(top.get("env"))))
    table = Table(document.number, facts={name: value for name, _, value in variables if name.startswith("NCCL_")})
    table.facts |= {name: _integer_text(config.get(key)) for name, key in _DATA["json_parameters"].items()}
    table.facts["program"] = "".join(map(str, logs.json_list(top.get("args"))[:1]))
    # The document lists one device for each process.
    threads, gpus = (int(_integer_text(config.get(key)) or 0) for key in ("nthreads", "ngpus"))
    for rank, device in enumerate(map(logs.json_object, logs.json_list(config.get("devices")))):
        host, name = str(device.get("hostname")), str(device.get("device_info") or "")
        table.ranks[rank, 0] = {"each": f"{threads * gpus}", "host": host, "name": name, "bus": ""}
    for entry in map(logs.json_object, logs.json_list(top.get("results"))):
        if "cpu_time" in logs.json_object(entry.get("out_of_place")):
            table.facts["labels"] = "root cputime"
        row = read_row(LogLine(_row_text(entry), "", document.number), ())
        table.entries.append(row if isinstance(row, NcclRow) else excerpt(f"results: {entry!r}"))
    for kind, outer, key in _DATA["json_footer"]:
        footer = logs.json_object(top.get(outer))
        value, has_failed = logs.json_number(footer.get(key)), str(footer.get("okay")).lower() == "false"
        if value is not None or has_failed:
            facts = {kind: f"{value}", f"{kind}_state": "FAILED" if has_failed else "OK"}
            table.add(kind, facts, document.number)
    return table


def _row_text(entry: Mapping[str, object]) -> str:
    """Return an entry of `results` as the program would print it. An incomplete entry yields fewer words."""
    words = [_integer_text(entry.get("size")), _integer_text(entry.get("count")), str(entry.get("type"))]
    words += [str(entry.get("redop") or ""), _integer_text(entry.get("root"))]
    for half in (logs.json_object(entry.get(name)) for name in ("out_of_place", "in_place")):
        figures = [logs.json_number(half[key]) for key in ("time", "cpu_time", "alg_bw", "bus_bw") if key in half]
        words += ["nan" if figure is None else f"{figure}" for figure in figures]
        words += [_integer_text(half["nwrong"]) or "N/A"] if "nwrong" in half else []
    return " ".join(words)


def _integer_text(value: object) -> str:
    """Return an integer of a JSON document as the program would print it, or an empty text for any other value."""
    number = logs.json_number(value)
    return "" if number is None else f"{round(number)}"
