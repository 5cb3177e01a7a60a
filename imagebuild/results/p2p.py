"""p2pBandwidthLatencyTest of the CUDA samples: one matrix between GPUs a heading, two for latencies.

The diagonal of a bandwidth matrix is a copy inside a GPU's own memory, and that of a latency matrix no transfer at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from imagebuild.results.matrix import Matrix
from imagebuild.results.models import BandwidthTest
from imagebuild.results.parsed import Parsed
from imagebuild.results.tokens import shown

_HEADING = re.compile(
    r"(?:(?P<way>Uni|Bi)directional )?P2P=(?P<state>Enabled|Disabled) (?P<what>Bandwidth|Latency) "
    r"(?:\(P2P (?P<kind>Writes?|Reads?)\) )?Matrix(?: \(P2P (?P<late>Writes?|Reads?)\))? ?\((?P<unit>GB/s|us|µs)\)"
)
_CONNECTIVITY = "P2P Connectivity Matrix"
_MARK = re.compile(r"[\s>]{0,40}(?:P2P Connectivity Matrix|(?:Uni|Bi)directional P2P=|P2P=(?:En|Dis)abled Latency)")
_COLUMNS = re.compile(r"(?P<block>D\\{1,2}D|GPU|CPU)(?P<rest>(?:\s+\d{1,4}){1,4096})", re.ASCII)
_FAILURE = re.compile(r"Cuda failure .*", re.IGNORECASE)
_LONGEST = 100_000
_ALIKE = 1.1
"""Enabling P2P changes nothing below this ratio: it is far above the spread of a run and far below what a link adds."""


@dataclass
class _Reader:
    source: str
    name: str = ""
    unit: str | None = None
    matrix: Matrix | None = None
    tests: list[BandwidthTest] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def line(self, text: str) -> None:
        if found := _HEADING.fullmatch(text):
            self.close()
            kind = "_reads" if (found["kind"] or found["late"] or "").startswith("Read") else ""
            way = f"{found['way'].lower()}directional_" if found["way"] else ""
            latency = "_latency" if found["what"] == "Latency" else ""
            self.name, self.unit = f"{way}p2p_{found['state'].lower()}{kind}{latency}", found["unit"].replace("µ", "u")
            self.matrix = Matrix()
        elif text == _CONNECTIVITY:
            self.close()
            self.name, self.unit, self.matrix = "p2p_connectivity", None, Matrix()
        elif found := _COLUMNS.fullmatch(text):
            self.columns(found["block"], found["rest"].split())
        elif _FAILURE.fullmatch(text):
            self.close(failure=shown(text))
        elif self.matrix and self.matrix.columns and len(self.matrix.rows) < self.matrix.columns:
            self.matrix.take(text)

    def columns(self, block: str, words: list[str]) -> None:
        if not self.name:
            return
        if block in ("GPU", "CPU"):
            if self.matrix and self.matrix.columns:
                self.close()
                self.name = self.name.removesuffix("_gpu").removesuffix("_cpu")
            self.name = f"{self.name}_{block.lower()}"
            self.matrix = Matrix()
        if self.matrix and not self.matrix.columns:
            self.matrix.header(words)

    def close(self, failure: str = "") -> None:
        """End the open matrix; a failure of the program is a test of its own where none is open."""
        if self.matrix is None and not failure:
            return
        matrix = self.matrix or Matrix()
        missing = f"its matrix has {len(matrix.rows)} of {matrix.columns or 'unknown'} rows"
        whole = bool(matrix.rows) and len(matrix.rows) == matrix.columns
        reason = failure or ("the last number of its matrix is cut" if matrix.short else "" if whole else missing)
        self.unread.extend(matrix.unread)
        self.tests.append(
            BandwidthTest(
                source=self.source,
                tool="p2pBandwidthLatencyTest",
                name=self.name or None,
                unit=self.unit,
                status="error" if failure else "truncated" if reason else "passed",
                matrix=matrix.cells(),
                sum=None,
                reason=reason,
            )
        )
        self.matrix = None


def parse(source: str, lines: Sequence[str]) -> Parsed[BandwidthTest]:
    """The matrices in cleaned lines; empty where nothing of p2pBandwidthLatencyTest is in them."""
    if not any(map(_MARK.match, lines)):
        return Parsed()
    reader = _Reader(source)
    for line in lines:
        if line and len(line) <= _LONGEST:
            reader.line(line.strip().removeprefix("> "))
    reader.close()
    return Parsed(tuple(reader.tests), tuple(reader.unread))


def enabling_changes_nothing(tests: Sequence[BandwidthTest]) -> bool | None:
    """Whether transfers between GPUs run as fast without P2P as with it, so that P2P is off or does not work.

    `tests` are those of one run. `None` where both matrices were not read, or there is but one GPU. Over PCIe alone a
    healthy machine may gain little bandwidth, so it counts only if no pair gains and, where printed, no latency falls.
    """
    by_name = {test.name: test for test in tests if test.tool == "p2pBandwidthLatencyTest"}
    bandwidth = list(_pairs(by_name, "unidirectional_p2p_enabled", "unidirectional_p2p_disabled"))
    if not bandwidth:
        return None
    latency = _pairs(by_name, "p2p_disabled_latency_gpu", "p2p_enabled_latency_gpu")
    return all(first <= second * _ALIKE for first, second in (*bandwidth, *latency))


def _pairs(tests: dict[str | None, BandwidthTest], first: str, second: str) -> Iterator[tuple[float, float]]:
    """The cells of two matrices off the diagonal, side by side."""
    one, other = tests.get(first), tests.get(second)
    if not one or not other or one.matrix is None or other.matrix is None:
        return
    for at, (left, right) in enumerate(zip(one.matrix, other.matrix, strict=False)):
        for peer, (cell, against) in enumerate(zip(left, right, strict=False)):
            if peer != at and cell is not None and against is not None:
                yield cell, against
