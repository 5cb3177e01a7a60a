"""Read the runs that nccl-tests and rccl-tests print, as text or as the JSON of option `-J`, and give each run a
verdict.

`nccl_lines` reads single lines, `nccl_table` collects the lines of one run, and this module makes a `Run` from these
lines."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from statistics import fmean, median
from typing import Any

from imagebuild.bench import logs
from imagebuild.bench.ceilings import forced_classes
from imagebuild.bench.logs import Failure, JsonDocument, Log, Parsed, ParsedLines, parse_number
from imagebuild.bench.models import NcclRow, Run, Verdict, bus_ratio
from imagebuild.bench.nccl_lines import COLLECTIVES, TYPE_BYTES
from imagebuild.bench.nccl_table import Table, table_in_json, tables_in_lines
from imagebuild.core.errors import plural

_OWN_FAILURE = re.compile("Test (?:NCCL failure|CUDA failure|failure|timeout)")
"""Failure messages that only nccl-tests and rccl-tests print."""


def parse_nccl_text(log: Log, failures: Sequence[Failure]) -> ParsedLines[Run]:
    """Return the runs of nccl-tests in a log, and the rows that could not be read.

    The list is empty if the log has no output of nccl-tests. A command that printed nothing becomes a run if one of
    `failures` follows the command."""
    tables = tables_in_lines(log.lines)
    own = [failure.number for failure in failures if _OWN_FAILURE.search(failure.text)]
    if own and not tables:
        tables.append(Table(min(own), found={"starting"}))
    parsed: ParsedLines[Run] = []
    end = 0
    for table in _started(tables, failures):
        for number, variables in log.settings:
            if end < number <= table.end:
                table.facts = {**variables, **table.facts}
        end = table.end
        warnings = (w.text.partition(" NCCL WARN ")[2][:200] for w in log.warnings if w.number >= table.begin)
        parsed.append((table.begin, _make_run(log.path, table, next(warnings, ""))))
        parsed += [(table.begin, text) for text in table.partial]
    return parsed


def _started(tables: Sequence[Table], failures: Sequence[Failure]) -> Iterator[Table]:
    """Yield the tables with output, and the tables of commands that failed before they printed anything."""
    for table, following in zip_longest(tables, tables[1:]):
        if not table.has_output:
            # With `set -x`, the shell's process prints the command, and another process prints the table.
            is_trace = following and following.has_output and "command" not in following.found
            limit = following.begin if following else math.inf
            if is_trace or not any(table.begin <= failure.number < limit for failure in failures):
                continue
        yield table


def parse_nccl_json(source: str, document: JsonDocument) -> Parsed[Run] | None:
    """Return the run in a JSON document, and the rows that could not be read.
    Return None if another program wrote the document."""
    table = table_in_json(document)
    if table is None:
        return None
    run = _make_run(source, table)
    messages = map(str, logs.json_list(logs.json_object(document.value).get("errors")))
    errors = [message for message in messages if message.strip()]
    if errors and "bounds" not in table.found:
        # The run did not finish. The last errors of the library are the cause.
        cause = min(logs.failure_of(error, 0) or Failure(1, 0, "comm-failure", error[:240]) for error in errors)
        run = run.spoiled(cause.verdict, cause.text)
    return [run, *table.partial]


def _make_run(source: str, table: Table, warning: str = "") -> Run:
    """Return the `Run` that a table describes. `warning` is the first warning of NCCL since the run began."""
    run = Run(
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
        compared=table.compared_rows == len(table.rows),
    )
    verdict, reason = _judge(table, run, warning)
    return run.model_copy(update={"verdict": verdict, "reason": reason})


# The collective, and the hosts and GPUs that took part


def _collective_of(program: str) -> str | None:
    """Return `all_reduce` for `./build/all_reduce_perf_mpi`, or None if the program is not one of nccl-tests."""
    name = program.rpartition("/")[2].strip("'\"").partition("_perf")[0]
    return name if name in COLLECTIVES else None


def _infer_collective(rows: Sequence[NcclRow], labels: Sequence[str]) -> str | None:
    """Return the only collective that fits the columns and the ratios between them, or None if several fit.

    With n ranks, `busbw / algbw` is 2(n-1)/n for all_reduce, and at most 1 for other collectives. The size is that of
    `count` elements or, if a collective divides the data among ranks, of n times `count` elements. With one rank, all
    bandwidths are 0."""
    operations, roots = {row.redop for row in rows}, {row.root for row in rows}
    if operations == {None} and "root" not in labels and not {"redop", "op"}.isdisjoint(labels):
        return "alltoall"  # before 2.13, only alltoall left the column of the operation blank
    is_reducing, is_rooted = operations.isdisjoint((None, "none")), roots.isdisjoint((None, -1))
    ratio = bus_ratio(rows, least=2)  # lower bandwidths are printed with too few digits
    data = [(row.size_bytes, row.count * TYPE_BYTES.get(row.dtype, 0)) for row in rows]
    is_divided = {size > elements for size, elements in data if size and elements}
    if ratio is None or len(is_divided) != 1 or (is_divided == {False} and ratio <= 0.99):
        return None
    names: dict[tuple[bool, ...], str] = {
        (True, True, False): "reduce_scatter", (False, True, False): "all_reduce", (False, True, True): "reduce",
        (False, False, True): "broadcast",
    }  # fmt: skip
    return names.get((*is_divided, is_reducing, is_rooted))


_BUS = re.compile(r"[\da-f]{4,8}:[\da-f]{2}:[\da-f]{2}(?:\.\d)?|0x(?!0?[01]$)[\da-f]{1,2}", re.IGNORECASE)
"""A bus address that tells GPUs apart.
Before 2.15 the address has no PCI domain. Buses 0 and 1 exist in every domain, so they identify no GPU."""


def _participants(table: Table) -> dict[str, Any]:
    """Return the fields of `Run` about ranks, nodes and GPUs. The hosts are known only if every rank is listed.
    A device in a JSON document stands for as many ranks as its field `each` says."""
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


# The verdict: is the output complete, and do the figures fit each other?

Finding = tuple[Verdict, str]
"""A verdict and its reason."""


def _judge(table: Table, run: Run, warning: str) -> Finding:
    """Return the verdict on a run: the first problem in order of severity, or `ok` with remarks."""
    warned = f"; NCCL warned: {warning}" if warning else ""
    if failure := _reported_failure(table):
        return failure
    if not table.rows:
        return "no-data", f"no row of results{warned}"
    problem = (
        _contradiction(table, run.collective)
        or _missing_end(table, run, warned)
        or _wrong_size(table, run.collective)
        or _wrong_average(table, run)
    )
    return problem or ("ok", _remarks(table))


def _reported_failure(table: Table) -> Finding | None:
    """Return the failure that the program itself reports, or None."""
    wrong = sum(half.wrong or 0 for row in table.rows for half in row.halves)
    bounds = round(parse_number(table.facts.get("bounds", "")) or 0)
    if wrong or bounds or table.facts.get("bounds_state") == "FAILED":
        return "wrong-data", f"{wrong} wrong elements in the rows, {bounds} out-of-bounds values"
    if table.facts.get("average_state") == "FAILED":
        return "failed", "the average bus bandwidth is below what NCCL_TESTS_MIN_BW asks for"
    return None


_ROUNDED = 0.06
"""Largest relative difference between algbw * time / size in one row and the median of all rows. A smaller difference
comes from rounding: nccl-tests prints large times with only two digits."""
_ONE_DIGIT_FROM = 950_000
"""Bandwidth in GB/s from which nccl-tests prints one digit, such as `1e+06`. Only a single GPU, which sends nothing,
reaches such a bandwidth."""


def _contradiction(table: Table, collective: str | None) -> Finding | None:
    """Return the verdict if a row has a figure that is not a number, or figures that contradict each other; else None.

    algbw is size / time, unless the time is CPU time. busbw is algbw times a factor that is the same in all rows. Each
    row is compared with the median of these ratios, if its figures have enough digits."""
    figures: list[tuple[int, float, float, float]] = []
    for size, half in ((row.size_bytes, half) for row in table.rows for half in row.halves if row.size_bytes):
        if half.time_us is None or half.algbw_gb_s is None or half.busbw_gb_s is None:
            return "damaged", f"the row of {size} bytes has figures that are not numbers"
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
                return "damaged", f"{names} of the row of {size} bytes do not fit each other"
    return None


def _missing_end(table: Table, run: Run, warned: str) -> Finding | None:
    """Return the verdict if the last row or the footer is missing or incomplete, else None."""
    if isinstance(table.entries[-1], str):
        return "truncated", f"the last row is cut{warned}"
    if "bounds" not in table.found:
        lack = "the footer has no line `Out of bounds values`" if table.has_footer else "no footer"
        return "truncated", f"{lack}{warned}"
    if run.avg_busbw_gb_s is None:
        return "truncated", f"the footer has no average bus bandwidth{warned}"
    return None


def _wrong_size(table: Table, collective: str | None) -> Finding | None:
    """Return the verdict if a requested size has no row, or a row has a size that was not requested; else None.

    The program may print the rows of all sizes several times, once for each type and operation. The program rounds a
    size down by less than half, or to 0. Broken rows count as the missing sizes if their number fits. Sizes of
    alltoallv, and of output that someone shortened, are not compared."""
    asked = _requested_sizes(table)
    is_filled = table.partial and asked and (len(table.rows) + len(table.partial)) % len(asked) == 0
    if not asked or is_filled or table.is_elided or collective == "alltoallv":
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
                return "truncated", f"no row of {want} bytes, although this size was requested"
            return "damaged", f"a row of {size} bytes, where {want or 'none'} were requested"
    return None


def _requested_sizes(table: Table) -> Sequence[int]:
    """Return the sizes that the parameters request, before rounding to elements; empty if they are not known."""
    smallest, factor, increment = (int(table.facts.get(name) or 0) for name in ("min", "factor", "bytes"))
    largest = int(table.facts.get("reduced") or table.facts.get("max") or 0)
    if increment and (largest - smallest) // increment < 100_000:
        return range(smallest, largest + 1, increment)
    sizes = []
    while factor > 1 and 0 < smallest <= largest:
        sizes.append(smallest)
        smallest *= factor
    return sizes


def _wrong_average(table: Table, run: Run) -> Finding | None:
    """Return the verdict if the printed average differs from the average of the rows, else None.
    The average is not checked if rows were left out or broken."""
    speeds = [half.busbw_gb_s for row in table.rows for half in row.halves if half.busbw_gb_s is not None] or [0]
    # 1.4e7 is printed as 1e+07, which hides up to half of the power of ten.
    hidden = fmean(10 ** math.floor(math.log10(speed)) / 2 if speed >= _ONE_DIGIT_FROM else 0 for speed in speeds)
    average = run.avg_busbw_gb_s or 0
    is_average = math.isclose(fmean(speeds), average, rel_tol=0.0005, abs_tol=0.01 + hidden)
    if table.is_elided or table.partial or is_average:
        return None
    printed = f"{run.avg_busbw_gb_s} GB/s, which the footer prints: a row is missing or wrong"
    return "damaged", f"the average of the rows is not {printed}"


def _remarks(table: Table) -> str:
    """Return `complete` with remarks on output that is still good enough."""
    reduced, partial, compared, rows = table.facts.get("reduced"), len(table.partial), table.compared_rows, table.rows
    remarks = (
        (True, "complete"),
        (reduced, f"the largest size was reduced to {reduced} bytes for lack of memory"),
        (table.is_elided, "the output has dots in place of some lines"),
        (partial, f"{plural(partial, 'row')} could not be read"),
        (not compared, "data were not validated"),
        (0 < compared < len(rows), f"data were validated in only {compared} of {len(rows)} rows"),
    )
    return "; ".join(text for holds, text in remarks if holds)
