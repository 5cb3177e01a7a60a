"""Files that benchmarks wrote, whichever benchmarks those were, into numbers.

A file may hold the output of several programs, and JSON between text. What no parser knows is passed over; what looks
like a result and could not be read is counted, with examples, in the entry of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from imagebuild.errors import ResultError
from imagebuild.results import (
    dcgm,
    dcgm_json,
    documents,
    lines,
    nccl_json,
    nccl_text,
    nvbandwidth,
    p2p,
    perftest,
    perftest_json,
    ucx,
)
from imagebuild.results.documents import Document
from imagebuild.results.lines import Line, Lines
from imagebuild.results.models import Results, Source
from imagebuild.results.parsed import Parsed

_EXAMPLES = 5
_SHOWN = 160


@dataclass(frozen=True)
class _Text:
    """A parser of text. `part` is the field of `Results` that its items go to."""

    tool: str
    part: str
    parse: Callable[[str, Sequence[str]], Parsed[Any]]


@dataclass(frozen=True)
class _Json:
    """A parser of JSON documents."""

    tool: str
    part: str
    looks_like: Callable[[object], bool]
    parse: Callable[[str, object], Parsed[Any]]


_TEXTS = (
    _Text("nvbandwidth", "tests", nvbandwidth.parse),
    _Text("p2pBandwidthLatencyTest", "tests", p2p.parse),
    _Text("perftest", "tables", perftest.parse),
    _Text("ucx_perftest", "ucx", ucx.parse),
    _Text("dcgmi", "diagnostics", dcgm.parse),
)
_JSONS = (
    _Json("nvbandwidth", "tests", nvbandwidth.looks_like, nvbandwidth.parse_json),
    _Json("perftest", "tables", perftest_json.looks_like, perftest_json.parse_json),
    _Json("dcgmi", "diagnostics", dcgm_json.looks_like, dcgm_json.parse_json),
)


def read(paths: Iterable[Path | str]) -> Results:
    """Everything in these files, and in the files of these directories.

    Raises ResultError if a file cannot be opened, or if nothing was found in any of them.
    """
    files = [file for path in paths for file in _files(Path(path))]
    found = [_parsed(_opened(file)) for file in files]
    results = _merged(found)
    if not any(source.tools for source in results.sources):
        names = ", ".join(map(str, files[:3])) + (" …" if len(files) > 3 else "")
        raise ResultError(
            f"{names or 'no file'}: no output of a known benchmark; give files that hold what one printed"
        )
    return results


def read_text(source: str, text: str) -> Results:
    """Everything in a text that `source` printed. Finding nothing is no error here."""
    return _merged([_parsed(lines.from_text(source, text))])


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
    return [path]


def _opened(path: Path) -> Lines:
    try:
        return lines.read(path)
    except OSError as error:
        raise ResultError(f"{path}: {error.strerror or error}; give a file that can be read") from None


@dataclass
class _Found:
    """What one file gave."""

    log: Lines
    parts: dict[str, list[Any]] = field(default_factory=dict)
    tools: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def add(self, tool: str, part: str, parsed: Parsed[Any]) -> None:
        if parsed.found and tool not in self.tools:
            self.tools.append(tool)
        self.parts.setdefault(part, []).extend(parsed.items)
        self.unread.extend(parsed.unread)

    @property
    def source(self) -> Source:
        return Source(
            path=self.log.path,
            tools=tuple(self.tools),
            lines=self.log.count,
            unread=len(self.unread),
            examples=tuple(text[:_SHOWN] for text in self.unread[:_EXAMPLES]),
        )


def _parsed(log: Lines) -> _Found:
    found = _Found(log)
    rest: list[Line] = []
    for said in _by_process(log.items).values():
        inside, outside = documents.extract(said)
        for document in inside:
            _add_json(found, log.path, document)
        rest += outside
        _add_text(found, log.path, [line.text for line in outside])
    rest.sort(key=lambda line: line.number)
    found.add("nccl-tests", "runs", nccl_text.parse(Lines(log.path, rest, log.count, warnings=log.warnings)))
    return found


def _by_process(items: Sequence[Line]) -> Mapping[str, Sequence[Line]]:
    processes: dict[str, list[Line]] = {}
    for stream, said in groupby(items, key=lambda line: line.stream):
        processes.setdefault(stream, []).extend(said)
    return processes


def _add_text(found: _Found, source: str, texts: Sequence[str]) -> None:
    for parser in _TEXTS:
        found.add(parser.tool, parser.part, parser.parse(source, texts))
    found.add("perftest", "tables", perftest_json.parse_broken_json(source, "\n".join(texts)))


def _add_json(found: _Found, source: str, document: Document) -> None:
    if nccl_json.looks_like(document.value):
        found.add("nccl-tests", "runs", nccl_json.parse_json(source, document))
        return
    for parser in _JSONS:
        if parser.looks_like(document.value):
            found.add(parser.tool, parser.part, parser.parse(source, document.value))
            if not document.whole:
                found.unread.append(f"line {document.number}: a JSON document of {parser.tool} without its end")


def _merged(found: Sequence[_Found]) -> Results:
    def of(part: str) -> tuple[Any, ...]:
        return tuple(item for one in found for item in one.parts.get(part, ()))

    return Results(
        runs=of("runs"),
        tests=of("tests"),
        tables=of("tables"),
        ucx=of("ucx"),
        diagnostics=of("diagnostics"),
        sources=tuple(one.source for one in found),
    )
