"""Read files that benchmarks wrote, whichever benchmarks these were.

A file may hold the output of several programs, and JSON between text. Lines that no parser knows are passed over. Those
that look like results and could not be read are counted in the file's `Source`, with examples.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from imagebuild.bench import logs
from imagebuild.bench.dcgm import parse_dcgm_json
from imagebuild.bench.logs import JsonDocument, Log, LogLine, Parsed, ParsedLines
from imagebuild.bench.models import Result, Results, Run, Source
from imagebuild.bench.nccl import parse_nccl_json, parse_nccl_text
from imagebuild.bench.nvbandwidth import parse_nvbandwidth_json, parse_nvbandwidth_text
from imagebuild.bench.tables import (
    NVSHMEM,
    OSU,
    PERFTEST,
    parse_all_reduce_bench,
    parse_perftest_json,
    parse_tables,
    parse_ucx_text,
)
from imagebuild.core.errors import ConfigError

_TextParser = Callable[[str, Sequence[LogLine]], ParsedLines[Any]]
_JsonParser = Callable[[str, JsonDocument], Parsed[Any] | None]
_PARSERS: tuple[tuple[str, str, _TextParser | None, _JsonParser | None], ...] = (
    ("nccl-tests", "runs", None, parse_nccl_json),
    ("nvbandwidth", "tests", parse_nvbandwidth_text, parse_nvbandwidth_json),
    ("perftest", "tables", partial(parse_tables, PERFTEST), parse_perftest_json),
    ("ucx_perftest", "tables", parse_ucx_text, None),
    ("osu", "tables", partial(parse_tables, OSU), None),
    ("nvshmem", "tables", partial(parse_tables, NVSHMEM), None),
    ("all_reduce_bench", "runs", parse_all_reduce_bench, None),
    ("dcgmi", "diagnostics", None, parse_dcgm_json),
)
"""Tool; field of `Results` that its items go to; the function that reads the lines of one process; the function that
reads a JSON document, and returns None for one of another tool.

The text of nccl-tests needs the lines of all processes, since failures are printed by others.
"""
_ERROR = re.compile(
    r"\b(?:error|failed|failure|fatal|killed|cancelled|refused|denied|timed out|unreachable|cannot|could not)\b"
    r"|^ssh: |\bunable to\b|\bno (?:route|such)\b|not found|\bexit(?:ed)? (?:with )?(?:code|status)",
    re.IGNORECASE,
)
"""Words by which a shell, a launcher or a scheduler says that something failed."""


def read_files(files: Iterable[Path | str]) -> Results:
    """Read files, which may hold no output of a benchmark.

    Raises ConfigError if one cannot be opened, ResultError if its compressed data are damaged.
    """
    everything: dict[str, list[Any]] = defaultdict(list)
    for file in files:
        try:
            log = logs.read_log(file)
        except OSError as error:
            why = f"{error.strerror or error}; name logs, JSON files or folders"
            raise ConfigError(f"{file}: cannot be read: {why}") from None
        for part, items in _parse_log(log):
            everything[part] += items
    return Results(**{part: tuple(items) for part, items in everything.items()})


def read_text(source: str, text: str) -> Results:
    """Read a text that `source` printed. It may hold no output of a benchmark."""
    return _parse_log(logs.log_from_text(source, text))


@dataclass
class _Entry:
    """Hold what a parser read, or a text that it could not read."""

    line: int
    """Where it begins."""
    tool: str
    part: str
    item: Any


def _parse_log(log: Log) -> Results:
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
            # What a program printed, in the JSON of the tool that started it, as Ansible writes it.
            texts = (logs.log_from_text(log.path, text).lines for text in _printed_in(document.value))
            waiting += [[line._replace(number=document.number) for line in text] for text in texts]
        for tool, part, parse_text, _ in _PARSERS:
            if parse_text:
                entries += [_Entry(number, tool, part, item) for number, item in parse_text(log.path, others)]
    outside.sort(key=lambda line: line.number)
    failures = sorted(failure for line in outside if (failure := logs.failure_of(line.text, line.number)))
    runs = parse_nccl_text(replace(log, lines=outside), failures)
    entries = [*_unprinted(entries, runs), *(_Entry(number, "nccl-tests", "runs", item) for number, item in runs)]
    entries.sort(key=lambda entry: entry.line)
    _place_failures([entry for entry in entries if isinstance(entry.item, Result)], failures)
    parts: dict[str, list[Any]] = defaultdict(list)
    for entry in entries:
        parts["unread" if isinstance(entry.item, str) else entry.part].append(entry.item)
    unread, tools = parts.pop("unread", []), dict.fromkeys(entry.tool for entry in entries if entry.tool)
    source = Source(
        path=log.path,
        tools=tuple(tools),
        lines=log.line_count,
        unread=len(unread),
        examples=tuple(text[:160] for text in unread[:5]),
        is_lost=not tools and all(_ERROR.search(line.text) for line in log.lines if line.text.strip()),
    )
    return Results(sources=(source,), **{part: tuple(items) for part, items in parts.items()})


def _read_document(path: str, document: JsonDocument) -> Iterator[_Entry]:
    """Yield what the tools read of a JSON document. If it has no end, the last result may not be whole."""
    if document.value is None:
        yield _Entry(document.number, "", "", f"line {document.number}: a JSON document that cannot be read")
    for tool, part, _, parse_json in _PARSERS:
        parsed: list[Any] | None = parse_json(path, document) if parse_json else None
        if parsed is not None and not document.is_whole:
            cut = "the JSON document has no end"
            for at in [at for at, item in enumerate(parsed) if isinstance(item, Result)][-1:]:
                parsed[at] = parsed[at].spoiled("truncated", cut)
            yield _Entry(document.number, "", "", f"line {document.number}: a JSON document of {tool} without its end")
        for item in parsed or ():
            yield _Entry(document.number, tool, part, item)


def _unprinted(entries: Iterable[_Entry], printed: ParsedLines[Run]) -> Iterator[_Entry]:
    """Yield the entries but for runs of nccl-tests, written as JSON, that were `printed` as text, too.

    Two are the same if all but their figures agree: figures of the JSON have more digits, and the text says more of the
    rest. A run that is broken in one of the forms alone stays.
    """

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
    """Give each failure's verdict to the result that began last before it; of several, the first is the cause.

    Before a run of nccl-tests, whose first line begins it, a launcher or a trace speaks of something else, and so do
    all if that run is whole. Other programs begin before their first result.
    """
    begins = [entry.line for entry in entries]
    causes: dict[int, logs.Failure] = {}
    for failure in failures if entries else ():
        at, first = bisect_right(begins, failure.number) - 1, entries[0].item
        if at >= 0 or not isinstance(first, Run) or (failure.verdict != "failed" and first.verdict != "ok"):
            causes.setdefault(max(at, 0), failure)
    for at, cause in causes.items():
        entries[at].item = entries[at].item.spoiled(cause.verdict, f"line {cause.number}: {cause.text}")


def _printed_in(value: object) -> Iterator[str]:
    """Yield the texts of several lines that a JSON document has as `stdout`."""
    if isinstance(value, dict) and isinstance(text := value.get("stdout"), str) and "\n" in text:
        yield text
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _printed_in(inner)
