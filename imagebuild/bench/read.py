"""Read files with the output of any benchmark. A file may mix several benchmarks, and JSON with text."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from imagebuild.bench import logs
from imagebuild.bench.causes import Cause, find_causes
from imagebuild.bench.datapath import data_path
from imagebuild.bench.dcgm import parse_dcgm_json
from imagebuild.bench.logs import JsonDocument, Log, LogLine, Parsed, ParsedLines
from imagebuild.bench.models import BandwidthTest, Diagnostic, PerftestTable, Result, Results, Run, Source
from imagebuild.bench.nccl import parse_nccl_json, parse_nccl_text
from imagebuild.bench.nvbandwidth import parse_nvbandwidth_json, parse_nvbandwidth_text
from imagebuild.bench.paired import read_comparisons
from imagebuild.bench.tables import FORMATS, parse_all_reduce_bench, parse_perftest_json, parse_tables, parse_ucx_text
from imagebuild.core.errors import ConfigError
from imagebuild.core.patterns import data_of

_TEXT_PARSERS: Mapping[str, Callable[[str, Sequence[LogLine]], ParsedLines[Any]]] = {
    "nvbandwidth": parse_nvbandwidth_text,
    "perftest": partial(parse_tables, FORMATS["perftest"]),
    "ucx_perftest": parse_ucx_text,
    "osu": partial(parse_tables, FORMATS["osu"]),
    "nvshmem": partial(parse_tables, FORMATS["nvshmem"]),
    "all_reduce_bench": parse_all_reduce_bench,
}
"""Maps each tool to the parser of one process's lines. nccl-tests needs the lines of all processes; see
`_parse_log`."""
_JSON_PARSERS: Mapping[str, Callable[[str, JsonDocument], Parsed[Any] | None]] = {
    "nccl-tests": parse_nccl_json,
    "nvbandwidth": parse_nvbandwidth_json,
    "perftest": parse_perftest_json,
    "dcgmi": parse_dcgm_json,
}
"""Maps each tool to its parser for JSON documents. A parser returns None for a document of another tool."""
_ERROR = re.compile("|".join(data_of(__file__)["errors"]), re.IGNORECASE)
"""Words with which a shell, a launcher or a scheduler reports a failure."""


def read_files(files: Iterable[Path | str]) -> Results:
    """Return the results in files. A file without output of a benchmark adds no result.
    Raises ConfigError if a file cannot be opened, ResultError if its compressed data are damaged."""
    everything: dict[str, tuple[Any, ...]] = defaultdict(tuple)
    for file in files:
        try:
            log = logs.read_log(file)
        except OSError as error:
            why = f"{error.strerror or error}; name logs, JSON files or folders"
            raise ConfigError(f"{file}: cannot be read: {why}") from None
        for part, items in _parse_log(log):
            everything[part] += items
    return Results(**everything)


def read_text(source: str, text: str) -> Results:
    """Return the results in a text, if any. `source` is the name of the text in the results."""
    return _parse_log(logs.log_from_text(source, text))


@dataclass
class _Entry:
    """An item that a parser found: a result, or a text that could not be read."""

    line: int
    """Number of the item's first line in the log."""
    tool: str
    item: Any
    begins_program: bool = False
    """Whether the output of the program begins at this line. If not, earlier output belongs to the same program."""


def _parse_log(log: Log) -> Results:
    """Return the results in a log, and what its comparisons prove."""
    parts = {first: _read_part(part) for first, part in log.split().items()}
    entries = [entry for found, _ in parts.values() for entry in found]
    lines = [line for _, outside in parts.values() for line in outside]
    results = [entry for entry in entries if isinstance(entry.item, Result)]
    unread = [entry.item for entry in entries if isinstance(entry.item, str)]
    tools = dict.fromkeys(entry.tool for entry in entries if entry.tool)
    unknown = [] if tools else lines
    first = (f"line {line.number}: {logs.excerpt(line.text)}" for line in unknown if _ERROR.search(line.text))
    source = Source(
        path=log.path, tools=tuple(tools), lines=log.line_count, unread=len(unread),
        examples=tuple(text[:160] for text in unread[:5]), note=next(chain(map(str, find_causes(unknown)), first), ""),
        carried=None if results else data_path(log.messages),
        is_lost=not tools and all(_ERROR.search(line.text) for line in log.lines if line.text.strip()),
    )  # fmt: skip
    kinds = {"runs": Run, "tests": BandwidthTest, "tables": PerftestTable, "diagnostics": Diagnostic}
    found = {part: tuple(e.item for e in results if isinstance(e.item, kind)) for part, kind in kinds.items()}
    runs = {first: [e.item for e in found if isinstance(e.item, Run)] for first, (found, _) in parts.items()}
    return Results(sources=(source,), paired=read_comparisons(log.path, log.comparisons, runs), **found)


def _read_part(log: Log) -> tuple[list[_Entry], list[LogLine]]:
    """Return the items in a part of a log, and the lines outside of JSON documents. Each failure changes the verdict of
    the result that it belongs to."""
    by_process: dict[str, list[LogLine]] = defaultdict(list)
    for line in log.lines:
        by_process[line.process].append(line)
    entries: list[_Entry] = []
    outside: list[LogLine] = []
    waiting = list(by_process.values())
    for lines in waiting:
        documents, others = logs.extract_json(lines)
        outside += others
        for document in documents:
            entries += _read_document(log.path, document)
            # Tools such as Ansible write JSON that contains the output of the program that they started.
            texts = (logs.log_from_text(log.path, text).lines for text in _printed_in(document.value))
            waiting += [[line._replace(number=document.number) for line in text] for text in texts]
        for tool, parse in _TEXT_PARSERS.items():
            entries += [_Entry(number, tool, item) for number, item in parse(log.path, others)]
    outside.sort(key=lambda line: line.number)
    failures = sorted(failure for line in outside if (failure := logs.failure_of(line.text, line.number)))
    runs = parse_nccl_text(replace(log, lines=outside), failures)
    entries = [*_unprinted(entries, runs), *(_Entry(number, "nccl-tests", item, True) for number, item in runs)]
    entries.sort(key=lambda entry: entry.line)
    results = [entry for entry in entries if isinstance(entry.item, Result)]
    _place_failures(results, failures)
    lines = [*outside, *log.warnings]
    _name_causes([entry for entry in results if entry.item.verdict not in ("ok", "warned", "waived")], results, lines)
    _name_carriers(results, log)
    return entries, lines


def _read_document(path: str, document: JsonDocument) -> Iterator[_Entry]:
    """Yield the items in a JSON document. If the document is incomplete, its last result is marked as truncated."""
    where = f"line {document.number}: a JSON document"
    if document.value is None:
        yield _Entry(document.number, "", f"{where} that cannot be read")
    for tool, parse in _JSON_PARSERS.items():
        parsed = parse(path, document)
        entries = [_Entry(document.number, tool, item) for item in parsed or ()]
        if parsed is not None and not document.is_whole:
            for entry in [entry for entry in entries if isinstance(entry.item, Result)][-1:]:
                entry.item = entry.item.spoiled("truncated", "the JSON document has no end")
            yield _Entry(document.number, "", f"{where} of {tool} without its end")
        yield from entries


def _unprinted(entries: Iterable[_Entry], printed: ParsedLines[Run]) -> Iterator[_Entry]:
    """Yield the entries without those JSON runs of nccl-tests that were also `printed` as text, which says more. Two
    runs are the same if everything but their figures agrees. A JSON run stays if only one of the two forms is
    broken."""

    def shape(run: Run) -> tuple[object, ...]:
        rows = tuple((row.size_bytes, row.dtype, row.redop, row.root, len(row.halves)) for row in run.rows)
        return run.collective, run.ranks, run.verdict == "ok", rows

    known = Counter(shape(run) for _, run in printed if isinstance(run, Run) and run.rows)
    for entry in entries:
        if isinstance(entry.item, Run) and known[shape(entry.item)]:
            known[shape(entry.item)] -= 1
        else:
            yield entry


def _place_failures(entries: Sequence[_Entry], failures: Iterable[logs.Failure]) -> None:
    """Give the verdict of the first failure after each result to the result.

    A failure before the first result counts for that result, unless another program caused it: the program of the
    result began later, and a launcher reported the failure or the result is `ok`."""
    begins = [entry.line for entry in entries]
    causes: dict[int, logs.Failure] = {}
    for failure in failures if entries else ():
        at, first = bisect_right(begins, failure.number) - 1, entries[0]
        is_of_another = first.begins_program and (failure.verdict == "failed" or first.item.verdict == "ok")
        if at >= 0 or not is_of_another:
            causes.setdefault(max(at, 0), failure)
    for at, cause in causes.items():
        entries[at].item = entries[at].item.spoiled(cause.verdict, f"line {cause.number}: {cause.text}")


def _name_causes(failed: Sequence[_Entry], results: Sequence[_Entry], lines: Iterable[LogLine]) -> None:
    """Add to the reason of each failed result the line in its part of the log that is nearest to the root cause."""
    begins = [entry.line for entry in results]
    causes: dict[int, Cause] = {}
    for cause in find_causes(lines) if failed else ():
        causes.setdefault(max(bisect_right(begins, cause.number) - 1, 0), cause)
    for at, entry in enumerate(results):
        if (found := causes.get(at)) and any(entry is other for other in failed):
            reason = entry.item.reason
            is_quoted = found.text[:60] in " ".join(reason.split())
            added = f" ({found.means})" if is_quoted else f"; cause: {found}"
            entry.item = entry.item.model_copy(update={"reason": reason + added})


def _name_carriers(results: Iterable[_Entry], log: Log) -> None:
    """Add to each result what carried its data. Messages belong to the result that began before them, and messages
    before all results to the first result."""
    entries = [entry for entry in results if isinstance(entry.item, Run | PerftestTable)]
    begins = [0, *(entry.line for entry in entries[1:]), log.line_count + 1]
    numbers = [message.number for message in log.messages]
    for entry, begin, end in zip(entries, begins, begins[1:], strict=False):
        own = log.messages[bisect_left(numbers, begin) : bisect_left(numbers, end)]
        if path := data_path(own, entry.item.hosts if isinstance(entry.item, Run) else ()):
            entry.item = entry.item.model_copy(update={"carried": path})


def _printed_in(value: object) -> Iterator[str]:
    """Yield the multi-line texts under the key `stdout` in a JSON document."""
    if isinstance(value, dict) and isinstance(text := value.get("stdout"), str) and "\n" in text:
        yield text
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _printed_in(inner)
