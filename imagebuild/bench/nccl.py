"""Read the runs that nccl-tests and rccl-tests print, as text or as the JSON of option `-J`, and give each run a
verdict.

`nccl_lines` reads single lines, `nccl_table` collects the lines of one run, and this module makes a `Run` from these
lines."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from statistics import fmean
from typing import Any

from imagebuild.bench import logs
from imagebuild.bench.arithmetic import contradiction, fitting_collectives
from imagebuild.bench.ceilings import forced_classes
from imagebuild.bench.logs import Failure, JsonDocument, Log, Parsed, ParsedLines, parse_number
from imagebuild.bench.models import GENERIC_GPU, Run, Verdict
from imagebuild.bench.nccl_lines import COLLECTIVES, collective_in_path, mentioned_collective
from imagebuild.bench.nccl_table import Table, table_in_json, tables_in_lines
from imagebuild.core.errors import plural
from imagebuild.core.patterns import DataFile

_DATA = DataFile(__file__)
_RE = _DATA.patterns


def parse_nccl_text(log: Log, failures: Sequence[Failure]) -> ParsedLines[Run]:
    """Return the runs of nccl-tests in a log, and the rows that could not be read.

    The list is empty if the log has no output of nccl-tests. A command that printed nothing becomes a run if one of
    `failures` follows the command."""
    tables = tables_in_lines(log.lines)
    own = [failure.number for failure in failures if _RE["own_failure"].search(failure.text)]
    if own and not tables:
        tables.append(Table(min(own), found=Counter(["starting"])))
    parsed: ParsedLines[Run] = []
    mentions = [(line.number, name) for line in log.lines if (name := mentioned_collective(line.text))]
    ends, end = sorted(table.end for table in tables), 0
    for table in _started(tables, failures):
        # The text before a table, back to the end of another one, may name the program.
        before = bisect_left(ends, table.begin)
        first = ends[before - 1] if before else 0
        named = mentions[bisect_right(mentions, (first, "~")) : bisect_right(mentions, (table.end, "~"))]
        table.facts |= {"mention": named[-1][1]} if named else {}
        for number, variables in log.settings:
            if end < number <= table.end:
                table.facts = {**variables, **table.facts}
        end = table.end
        warnings = [w.text.partition(" NCCL WARN ")[2][:200] for w in log.warnings if w.number >= table.begin]
        parsed.append((table.begin, _make_run(log.path, table, warnings)))
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


def _make_run(source: str, table: Table, warnings: Sequence[str] = ()) -> Run:
    """Return the `Run` that a table describes. `warnings` are the first warnings of NCCL since the run began."""
    participants = _participants(table)
    run = Run(
        source=source, tool=table.facts.get("tool", "rccl-tests" if "library" in table.facts else "nccl-tests"),
        tool_version=table.facts.get("version") or None, **participants,
        **_collective(source, table, participants["ranks"]), notes=_notes(table, warnings),
        clique=int(table.facts.get("clique", 0)) or None, algorithms=forced_classes(table.facts),
        rows=tuple(table.rows), partial_rows=len(table.partial),
        avg_busbw_gb_s=parse_number(table.facts.get("average", "")),
    )  # fmt: skip
    run = run.model_copy(update={"compared": table.compared_rows(run.collective) == len(table.rows)})
    verdict, reason = _judge(table, run, next(iter(warnings), ""))
    return run.model_copy(update={"verdict": verdict, "reason": reason})


# The collective, and the hosts and GPUs that took part


def _collective_of(program: str) -> str | None:
    """Return `all_reduce` for `./build/all_reduce_perf_mpi`, or None if the program is not one of nccl-tests."""
    name = program.rpartition("/")[2].strip("'\"").partition("_perf")[0]
    return name if name in COLLECTIVES else None


def _collective(source: str, table: Table, ranks: int | None) -> dict[str, Any]:
    """Return the fields of `Run` about the collective: its name as the program prints it since 2.16.7, or the name in
    the command, in another line before or within the table, the only one that fits the figures, or the one in the name
    of the file, in this order. A name from outside of the table counts only if the figures fit it."""
    if printed := _collective_of(table.facts.get("program", "")):
        return {"collective": printed}
    rows = table.rows
    fitting = fitting_collectives(rows, table.labels, ranks)
    for name in (_collective_of(table.facts.get("command", "")), table.facts.get("mention")):
        if name and (not rows or name in fitting or not contradiction(rows, name, has_times=False)):
            return {"collective": name}
    name = fitting[0] if len(fitting) == 1 else collective_in_path(source)
    # One row of a slow run fits many collectives.
    is_known = name in fitting if rows else name is not None
    return {"collective": name} if is_known else {"collective": None, "candidates": fitting if rows else ()}


def _notes(table: Table, warnings: Sequence[str]) -> tuple[str, ...]:
    """Return facts in the output that may explain the result."""
    groups = len({group for _, group in table.ranks})
    notes = [f"the network between the {groups} groups of ranks was not used"] if groups > 1 else []
    return (*notes, *(f"NCCL warned: {warning}" for warning in dict.fromkeys(warnings[:3])))


def _participants(table: Table) -> dict[str, Any]:
    """Return the fields of `Run` about ranks, nodes and GPUs. The hosts are known only if every rank is listed.
    A device in a JSON document stands for as many ranks as its field `each` says."""
    groups = Counter(group for _, group in table.ranks)
    # Rank 0 prints the figures, so its communicator counts.
    own = table.ranks[min(table.ranks)].get("group", "0") if table.ranks else "0"
    listed = [table.ranks[rank, group] for rank, group in sorted(table.ranks) if group == int(own)]
    ranks = max((rank for rank, _ in table.ranks), default=-1) + 1
    is_whole = len(table.ranks) in (ranks, ranks * len(groups))
    ranks = len(listed) if len(groups) > 1 else ranks
    names = Counter(name for device in listed if (name := device["name"]) and not GENERIC_GPU.fullmatch(name))
    facts: dict[str, Any] = {"ranks": ranks or None, "devices": tuple(name for name, _ in names.most_common())}
    facts |= {"groups": max(1, len(groups)), "not_joined": _not_joined(table, ranks)}
    if listed and is_whole and not table.is_mixed:
        hosts = tuple(dict.fromkeys(device["host"] for device in listed))
        ranks *= int(listed[-1].get("each", 1))
        facts |= {"ranks": ranks or None, "nodes": len(hosts), "hosts": hosts, "gpus": _gpus(listed)}
    return facts


def _gpus(listed: Sequence[Mapping[str, str]]) -> int | None:
    """Return the number of different GPUs in the list of devices, or None if the list does not tell GPUs apart: two
    GPUs of a host may be on one bus, and buses 0 and 1 exist in every PCI domain."""
    buses = [device["bus"] for device in listed]
    if all(map(_RE["address"].fullmatch, buses)):
        return len({(device["host"], device["bus"]) for device in listed})
    if not all(map(_RE["bus"].fullmatch, buses)):
        return None
    found = len({(device["host"], device["device"], device["bus"]) for device in listed})
    return found if found == len(listed) or not any(int(bus, 16) < 2 for bus in buses) else None


def _not_joined(table: Table, ranks: int) -> str:
    """Return why the processes of a launch were not joined, and how to join them; empty if one process printed."""
    if table.printers < 2:
        return ""
    of = f" of {plural(ranks, 'rank')} each" if ranks else ""
    mixed = " and mixed their lines" if table.is_mixed else ""
    remedy = "build nccl-tests with `make MPI=1 MPI_HOME=FOLDER`"
    remedy += ", and start it with the mpirun of this MPI or `srun --mpi=pmix`"
    return f"{table.printers} processes of one launch printed tables{of}{mixed}: the ranks were not joined; {remedy}"


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
    reason = contradiction(table.rows, run.collective, has_times="cputime" not in table.labels)
    problem: Finding | None = ("damaged", reason) if reason else _missing_end(table, run, warned)
    if not problem and not table.is_mixed:
        problem = _wrong_size(table, run.collective) or _wrong_average(table, run)
    return problem or ("ok", _remarks(table, run.collective))


def _reported_failure(table: Table) -> Finding | None:
    """Return the failure that the program itself reports, or None."""
    wrong = sum(half.wrong or 0 for row in table.rows for half in row.halves)
    bounds = round(parse_number(table.facts.get("bounds", "")) or 0)
    errors = [(half.error, row) for row in table.rows for half in row.halves if half.error is not None]
    error, row = max(errors, key=lambda entry: entry[0], default=(0.0, None))
    if row and error > (0 if "int" in row.dtype or row.dtype == "char" else _DATA["largest_error"]):
        return "wrong-data", f"the largest error is {error:g}, in the row of {row.size_bytes} bytes"
    if wrong or bounds or table.facts.get("bounds_state") == "FAILED":
        return "wrong-data", f"{wrong} wrong elements in the rows, {bounds} out-of-bounds values"
    if table.facts.get("average_state") == "FAILED":
        return "failed", "the average bus bandwidth is below what NCCL_TESTS_MIN_BW asks for"
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

    The rows of all sizes may be printed several times. A size may be rounded down by less than half, or to 0. Broken
    rows count as the missing sizes if their number fits. Sizes of alltoallv and of shortened output are not
    compared."""
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
    few = _DATA["one_digit_from"]
    hidden = fmean(10 ** math.floor(math.log10(speed)) / 2 if speed >= few else 0 for speed in speeds)
    average = run.avg_busbw_gb_s or 0
    is_average = math.isclose(fmean(speeds), average, rel_tol=0.0005, abs_tol=0.01 + hidden)
    if table.is_elided or table.partial or is_average:
        return None
    printed = f"{run.avg_busbw_gb_s} GB/s, which the footer prints: a row is missing or wrong"
    return "damaged", f"the average of the rows is not {printed}"


def _remarks(table: Table, collective: str | None) -> str:
    """Return `complete` with remarks on output that is still good enough."""
    reduced, partial, rows = table.facts.get("reduced"), len(table.partial), table.rows
    compared = table.compared_rows(collective)
    remarks = (
        (True, "complete"),
        (table.is_mixed, "the lines of several processes are mixed"),
        (reduced, f"the largest size was reduced to {reduced} bytes for lack of memory"),
        (table.is_elided, "the output has dots in place of some lines"),
        (partial, f"{plural(partial, 'row')} could not be read"),
        (not compared, "data were not validated"),
        (0 < compared < len(rows), f"data were validated in only {compared} of {len(rows)} rows"),
    )
    return "; ".join(text for holds, text in remarks if holds)
