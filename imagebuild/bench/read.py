"""Read files that benchmarks wrote, whichever benchmarks these were.

A file may hold the output of several programs, and JSON between text. Lines that no parser knows are passed over. Those
that look like results and could not be read are counted in the file's `Source`, with examples.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from imagebuild.bench.dcgm import parse_dcgm_json, parse_dcgm_text
from imagebuild.bench.logs import JsonDocument, Log, LogLine, extract_json, log_from_text, read_log
from imagebuild.bench.models import ParsedOutput, Results, Source
from imagebuild.bench.nccl import merge_runs, parse_nccl_json, parse_nccl_text
from imagebuild.bench.nvbandwidth import parse_nvbandwidth_json, parse_nvbandwidth_text, parse_p2p_text
from imagebuild.bench.perftest import parse_perftest_json, parse_perftest_text
from imagebuild.bench.ucx import parse_ucx_text
from imagebuild.core.errors import ResultError

_TEXT_PARSERS: tuple[tuple[str, str, Callable[[str, Sequence[str]], ParsedOutput[Any]]], ...] = (
    ("nvbandwidth", "tests", parse_nvbandwidth_text),
    ("p2pBandwidthLatencyTest", "tests", parse_p2p_text),
    ("perftest", "tables", parse_perftest_text),
    ("ucx_perftest", "ucx", parse_ucx_text),
    ("dcgmi", "diagnostics", parse_dcgm_text),
)
"""Tool, field of `Results` that its items go to, and the function that reads the lines of one process.

nccl-tests is not one of them: its reader needs the lines of all processes, since failures are printed by others.
"""
_JSON_PARSERS: tuple[tuple[str, str, Callable[[str, JsonDocument], ParsedOutput[Any] | None]], ...] = (
    ("nccl-tests", "runs", parse_nccl_json),
    ("nvbandwidth", "tests", parse_nvbandwidth_json),
    ("perftest", "tables", parse_perftest_json),
    ("dcgmi", "diagnostics", parse_dcgm_json),
)
"""Tool, field of `Results`, and the function that returns None for a document of another tool."""

_MOST_EXAMPLES = 5
_LONGEST_EXAMPLE = 160


def read_files(paths: Iterable[Path | str]) -> Results:
    """Read these files, and the files of these directories.

    Raises ResultError if a file cannot be opened, or if none of them holds the output of a known benchmark.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            files += sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
        else:
            files.append(path)
    outputs = []
    for file in files:
        try:
            log = read_log(file)
        except OSError as error:
            raise ResultError(f"{file}: {error.strerror or error}; give a file that can be read") from None
        outputs.append(_parse_log(log))
    if not any(output.tools for output in outputs):
        names = ", ".join(map(str, files[:3])) + (" …" if len(files) > 3 else "")
        raise ResultError(
            f"{names or 'no file'}: no output of a known benchmark; give files that hold what one printed"
        )
    return _results_of(outputs)


def read_text(source: str, text: str) -> Results:
    """Read a text that `source` printed. It may hold no output of a benchmark."""
    return _results_of([_parse_log(log_from_text(source, text))])


@dataclass
class _FileOutput:
    """What was read from one file."""

    log: Log
    items: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    """By field of `Results`."""
    tools: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def add(self, tool: str, part: str, parsed: ParsedOutput[Any]) -> None:
        if not parsed.is_empty and tool not in self.tools:
            self.tools.append(tool)
        self.items[part].extend(parsed.items)
        self.unread.extend(parsed.unread)

    def add_json(self, document: JsonDocument) -> None:
        for tool, part, parse in _JSON_PARSERS:
            parsed = parse(self.log.path, document)
            if parsed is None:
                continue
            self.add(tool, part, parsed)
            if tool == "nccl-tests":
                return  # the reason of a run says that a document has no end
            if not document.is_whole:
                self.unread.append(f"line {document.number}: a JSON document of {tool} without its end")


def _parse_log(log: Log) -> _FileOutput:
    output = _FileOutput(log)
    by_process: dict[str, list[LogLine]] = defaultdict(list)
    for line in log.lines:
        by_process[line.process].append(line)
    outside: list[LogLine] = []
    for lines in by_process.values():
        documents, others = extract_json(lines)
        for document in documents:
            output.add_json(document)
        texts = [line.text for line in others]
        for tool, part, parse in _TEXT_PARSERS:
            output.add(tool, part, parse(log.path, texts))
        outside += others
    outside.sort(key=lambda line: line.number)
    json_runs = output.items.pop("runs", [])
    printed = parse_nccl_text(Log(log.path, outside, warnings=log.warnings))
    output.add("nccl-tests", "runs", printed)
    output.items["runs"] = list(merge_runs(printed.items, json_runs))
    return output


def _results_of(outputs: Sequence[_FileOutput]) -> Results:
    items: dict[str, list[Any]] = defaultdict(list)
    for output in outputs:
        for part, values in output.items.items():
            items[part] += values
    sources = tuple(
        Source(
            path=output.log.path,
            tools=tuple(output.tools),
            lines=output.log.line_count,
            unread=len(output.unread),
            examples=tuple(text[:_LONGEST_EXAMPLE] for text in output.unread[:_MOST_EXAMPLES]),
        )
        for output in outputs
    )
    return Results(
        runs=tuple(items["runs"]),
        tests=tuple(items["tests"]),
        tables=tuple(items["tables"]),
        ucx=tuple(items["ucx"]),
        diagnostics=tuple(items["diagnostics"]),
        sources=sources,
    )
