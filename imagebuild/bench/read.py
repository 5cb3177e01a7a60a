"""Read files that benchmarks wrote, whichever benchmarks these were.

A file may hold the output of several programs, and JSON between text. Lines that no parser knows are passed over. Those
that look like results and could not be read are counted in the file's `Source`, with examples.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from imagebuild.bench.dcgm import parse_dcgm_json, parse_dcgm_text
from imagebuild.bench.logs import JsonDocument, Log, LogLine, extract_json, log_from_text, read_log
from imagebuild.bench.models import ParsedOutput, Results, Source
from imagebuild.bench.nccl import merge_runs, parse_nccl_json, parse_nccl_text
from imagebuild.bench.nvbandwidth import parse_nvbandwidth_json, parse_nvbandwidth_text
from imagebuild.bench.perftest import parse_perftest_json, parse_perftest_text
from imagebuild.bench.tables import parse_all_reduce_bench, parse_osu_text
from imagebuild.bench.ucx import parse_ucx_text
from imagebuild.core.errors import ResultError

_TextParser = Callable[[str, Sequence[str]], ParsedOutput[Any]]
_JsonParser = Callable[[str, JsonDocument], ParsedOutput[Any] | None]
_PARSERS: tuple[tuple[str, str, _TextParser | None, _JsonParser | None], ...] = (
    ("nccl-tests", "runs", None, parse_nccl_json),
    ("nvbandwidth", "tests", parse_nvbandwidth_text, parse_nvbandwidth_json),
    ("perftest", "tables", parse_perftest_text, parse_perftest_json),
    ("ucx_perftest", "ucx", parse_ucx_text, None),
    ("osu", "tables", parse_osu_text, None),
    ("all_reduce_bench", "runs", parse_all_reduce_bench, None),
    ("dcgmi", "diagnostics", parse_dcgm_text, parse_dcgm_json),
)
"""Tool; field of `Results` that its items go to; the function that reads the lines of one process; the function that
reads a JSON document, and returns None for one of another tool.

The text of nccl-tests needs the lines of all processes, since failures are printed by others.
"""
_P2P = re.compile(r"[\s>]{0,40}(?:P2P Connectivity Matrix|(?:Uni|Bi)directional P2P=)")
_P2P_IS_NOT_READ = "the output of p2pBandwidthLatencyTest is not read; use nvbandwidth, which measures the same"
_MOST_EXAMPLES = 5
_LONGEST_EXAMPLE = 160


def read_files(files: Iterable[Path | str]) -> Results:
    """Read files, which may hold no output of a benchmark. Raises ResultError if one cannot be read."""
    outputs = []
    for file in files:
        try:
            log = read_log(file)
        except OSError as error:
            raise ResultError(f"{file}: {error.strerror or error}; give a file that can be read") from None
        outputs.append(_parse_log(log))
    return _results_of(outputs)


def read_text(source: str, text: str) -> Results:
    """Read a text that `source` printed. It may hold no output of a benchmark."""
    return _results_of([_parse_log(log_from_text(source, text))])


@dataclass
class _FileOutput:
    """Hold what was read from one file."""

    log: Log
    items: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    """By field of `Results`."""
    tools: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def add(self, tool: str, part: str, parsed: ParsedOutput[Any]) -> None:
        if (parsed.items or parsed.unread) and tool not in self.tools:
            self.tools.append(tool)
        self.items[part].extend(parsed.items)
        self.unread.extend(parsed.unread)


def _parse_log(log: Log) -> _FileOutput:
    output = _FileOutput(log)
    by_process: dict[str, list[LogLine]] = defaultdict(list)
    for line in log.lines:
        by_process[line.process].append(line)
    outside: list[LogLine] = []
    waiting = list(by_process.values())
    for lines in waiting:
        documents, others = extract_json(lines)
        texts = [line.text for line in others]
        # What a program printed, in the JSON of the tool that started it, as Ansible writes it.
        printed_texts = [text for document in documents for text in _printed_in(document.value)]
        waiting += [log_from_text(log.path, text).lines for text in printed_texts]
        for tool, part, parse_text, parse_json in _PARSERS:
            for document in documents if parse_json else ():
                parsed = parse_json(log.path, document) if parse_json else None
                if parsed is None:
                    continue
                output.add(tool, part, parsed)
                if not document.is_whole and tool != "nccl-tests":  # the reason of a run says it
                    output.unread.append(f"line {document.number}: a JSON document of {tool} without its end")
            if parse_text:
                output.add(tool, part, parse_text(log.path, texts))
        outside += others
    if any(_P2P.match(line.text) for line in outside):
        output.unread.append(_P2P_IS_NOT_READ)
    outside.sort(key=lambda line: line.number)
    json_runs = output.items.pop("runs", [])
    printed = parse_nccl_text(Log(log.path, outside, warnings=log.warnings, settings=log.settings))
    output.add("nccl-tests", "runs", printed)
    output.items["runs"] = list(merge_runs(printed.items, json_runs))
    return output


def _printed_in(value: object) -> Iterator[str]:
    """Yield the texts of several lines that a JSON document has as `stdout`."""
    if isinstance(value, dict):
        text = value.get("stdout")
        if isinstance(text, str) and "\n" in text:
            yield text
        else:
            for inner in value.values():
                yield from _printed_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _printed_in(inner)


def _results_of(outputs: Sequence[_FileOutput]) -> Results:
    items: dict[str, list[Any]] = defaultdict(list)
    for output in outputs:
        for part, values in output.items.items():
            items[part] += values
        items["sources"].append(
            Source(
                path=output.log.path,
                tools=tuple(output.tools),
                lines=output.log.line_count,
                unread=len(output.unread),
                examples=tuple(text[:_LONGEST_EXAMPLE] for text in output.unread[:_MOST_EXAMPLES]),
            )
        )
    return Results(**{part: tuple(values) for part, values in items.items()})
