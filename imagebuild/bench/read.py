"""Read files that benchmarks wrote, whichever benchmarks these were.

A file may hold the output of several programs, and JSON between text. Lines that no parser knows are passed over. Those
that look like results and could not be read are counted in the file's `Source`, with examples.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from imagebuild.bench.dcgm import parse_dcgm_json
from imagebuild.bench.logs import JsonDocument, Log, LogLine, Parsed, extract_json, log_from_text, read_log
from imagebuild.bench.models import Result, Results, Source, Verdict
from imagebuild.bench.nccl import find_failure, merge_runs, parse_nccl_json, parse_nccl_text
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

_TextParser = Callable[[str, Sequence[str]], Parsed[Any]]
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
            log = read_log(file)
        except OSError as error:
            why = f"{error.strerror or error}; name logs, JSON files or folders"
            raise ConfigError(f"{file}: cannot be read: {why}") from None
        for part, items in _parse_log(log):
            everything[part] += items
    return Results(**{part: tuple(items) for part, items in everything.items()})


def read_text(source: str, text: str) -> Results:
    """Read a text that `source` printed. It may hold no output of a benchmark."""
    return _parse_log(log_from_text(source, text))


def _parse_log(log: Log) -> Results:
    parts: dict[str, list[Any]] = defaultdict(list)
    tools: dict[str, None] = {}
    unread: list[str] = []

    def add(tool: str, part: str, parsed: Parsed[Any]) -> None:
        tools.update(dict.fromkeys([tool] if parsed else ()))
        for entry in parsed:
            (unread if isinstance(entry, str) else parts[part]).append(entry)

    by_process: dict[str, list[LogLine]] = defaultdict(list)
    for line in log.lines:
        by_process[line.process].append(line)
    outside: list[LogLine] = []
    waiting = list(by_process.values())
    for lines in waiting:
        documents, others = extract_json(lines)
        outside += others
        texts = [line.text for line in others]
        for document in documents:
            # What a program printed, in the JSON of the tool that started it, as Ansible writes it.
            waiting += [log_from_text(log.path, text).lines for text in _printed_in(document.value)]
        unread += [f"line {d.number}: a JSON document that cannot be read" for d in documents if d.value is None]
        for tool, part, parse_text, parse_json in _PARSERS:
            for document in documents:
                if parse_json and (parsed := parse_json(log.path, document)) is not None:
                    cut = "the JSON document has no end"  # so its last result may not be whole
                    add(tool, part, parsed if document.is_whole else _spoiled(parsed, "truncated", cut))
                    if not document.is_whole:
                        unread.append(f"line {document.number}: a JSON document of {tool} without its end")
            if parse_text:
                add(tool, part, parse_text(log.path, texts))
    outside.sort(key=lambda line: line.number)
    json_runs = parts.pop("runs", [])
    add("nccl-tests", "runs", parse_nccl_text(replace(log, lines=outside)))
    printed, parts["runs"] = parts["runs"], list(merge_runs(parts["runs"], json_runs))
    # What launchers print belongs to the text of nccl-tests, if there is any; else to what was read last.
    if not printed and (failure := find_failure(outside)):
        kind = next((kind for kind in reversed(parts) if parts[kind]), "runs")
        parts[kind] = _spoiled(parts[kind], "failed", failure)
    source = Source(
        path=log.path,
        tools=tuple(tools),
        lines=log.line_count,
        unread=len(unread),
        examples=tuple(text[:160] for text in unread[:5]),
        is_lost=not tools and all(_ERROR.search(line.text) for line in log.lines if line.text.strip()),
    )
    return Results(sources=(source,), **{part: tuple(items) for part, items in parts.items()})


def _spoiled(parsed: Parsed[Any], verdict: Verdict, reason: str) -> Parsed[Any]:
    """Return what was read, with a verdict on its last result, unless that failed by itself."""
    for at in range(len(parsed) - 1, -1, -1):
        if isinstance(last := parsed[at], Result):
            changes = {"reason": "; ".join(filter(None, (last.reason, reason)))}
            changes |= {"verdict": verdict} if last.verdict in ("ok", "waived", "warned") else {}
            return [*parsed[:at], last.model_copy(update=changes), *parsed[at + 1 :]]
    return parsed


def _printed_in(value: object) -> Iterator[str]:
    """Yield the texts of several lines that a JSON document has as `stdout`."""
    if isinstance(value, dict) and isinstance(text := value.get("stdout"), str) and "\n" in text:
        yield text
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _printed_in(inner)
