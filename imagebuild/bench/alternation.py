"""The runs of a paired comparison, as the lines of its script in a log describe them. Pure.

A *side* is one version, image or value of a variable. A *block* contains one run of each side. The order of a block is
random, and the next block has the reverse order (ABBA), so that a steady drift cancels out."""

from __future__ import annotations

from dataclasses import dataclass, field

from imagebuild.core.patterns import DataFile

MARK = "imagebuild-compare"
"""Word that begins each line by which the script of a comparison describes the log."""
_RE = DataFile(__file__, mark=MARK).patterns
ERROR_RATE, MOST_ERROR = 0.01, 0.05
"""Probability that at least one verdict of a comparison of equal sides claims a difference, and the largest probability
that a log can state."""

MOST_BLOCKS = 2000
"""Maximum number of blocks of a comparison; `compare` makes at most 1,000."""


@dataclass
class Section:
    """A run in the log of a comparison."""

    side: int
    block: int
    begin: int
    """Number of the line with which the run begins."""
    status: int | None = None
    """Exit status of the run. None: the log does not contain its end."""
    versions: set[str] = field(default_factory=set)
    """Versions of NCCL that the run reported."""
    variables: set[tuple[str, str]] = field(default_factory=set)
    """Variables and values that NCCL says it used."""
    gpus: set[tuple[int, str]] = field(default_factory=set)
    """Each rank with its host and GPU. The list is printed for each collective."""


@dataclass
class Alternation:
    """The runs of a comparison, as a log describes them."""

    sides: tuple[str, ...]
    order: tuple[tuple[int, ...], ...]
    """The sides of the runs of each block. The first block contains the warm-up runs."""
    error_rate: float
    sections: dict[int, Section] = field(default_factory=dict)
    """Maps the number of each run to the run. A run that was repeated replaces the earlier one."""

    @property
    def places(self) -> list[tuple[int, int]]:
        """The block and the side of each planned run."""
        return [(block, side) for block, runs in enumerate(self.order) for side in runs]

    @property
    def blocks(self) -> int:
        """The number of complete blocks, up to the first block that is not complete, without the warm-up."""
        ended = [n in self.sections and self.sections[n].status is not None for n in range(len(self.places))]
        whole = len(self.places) if all(ended) else ended.index(False)
        return sum(sum(map(len, self.order[: block + 1])) <= whole for block in range(1, len(self.order)))


class ComparisonReader:
    """A reader of the lines by which the script of a comparison describes a log.

    A log may contain several comparisons. A comparison goes on if its sides are named again, with its order of runs or
    an order that begins like it."""

    def __init__(self) -> None:
        self.found: list[Alternation] = []
        self.cuts: list[int] = []
        """Numbers of the lines at which the output of a run begins or ends."""
        self.is_marked = False
        """Whether the log has a line of a comparison."""
        self._sides: tuple[str, ...] = ()
        self._error_rate = ERROR_RATE
        self._last: Alternation | None = None
        self._current: Section | None = None

    def read(self, row: str, number: int) -> None:
        """Read a line of the log."""
        if MARK in row and (found := _RE["line"].search(row)):
            self.is_marked = True
            self._read_mark(found[1], found[2].strip(), number)
        elif self._current and ("NCCL" in row or "nccl-library" in row):
            self._current.versions |= loaded_versions(row)
            self._current.variables |= set(_RE["variable"].findall(row.rstrip()))
        elif self._current and " device " in row and (gpu := _RE["gpu"].search(row)):
            host = "a container" if _RE["container"].fullmatch(gpu[2]) else gpu[2]
            self._current.gpus.add((int(gpu[1]), f"{host}, {' '.join(gpu[3].split())}"))

    def _read_mark(self, kind: str, rest: str, number: int) -> None:
        if kind == "sides":
            self._sides, self._last, self._error_rate = tuple(rest.split(" | ")), None, ERROR_RATE
        elif kind == "error" and (rate := _RE["rate"].fullmatch(rest)):
            self._error_rate = min(float(rate[0]), MOST_ERROR)
        elif kind == "order" and _RE["order"].fullmatch(rest):
            order = tuple(tuple(int(digit, 16) for digit in word) for word in rest.split())
            sides = set(range(len(self._sides)))
            if len(order) <= MOST_BLOCKS and all({*block} == sides for block in order):
                self._begin(order)
        elif (
            kind == "begin"
            and self._last
            and _RE["count"].fullmatch(rest)
            and int(rest) < len(places := self._last.places)
        ):
            block, side = places[int(rest)]
            self._current = self._last.sections[int(rest)] = Section(side, block, number)
            self.cuts.append(number)
        elif kind == "end" and self._current:
            self._current.status = int(rest) if _RE["count"].fullmatch(rest) else None
            self._current = None
            self.cuts.append(number)

    def _begin(self, order: tuple[tuple[int, ...], ...]) -> None:
        known = (a for a in self.found if a.sides == self._sides and a.order == order[: len(a.order)])
        self._last = next(known, None)
        if self._last is None:
            self._last = Alternation(self._sides, order, self._error_rate)
            self.found.append(self._last)
        self._last.order, self._last.error_rate = order, self._error_rate


def loaded_versions(text: str) -> set[str]:
    """Return the versions of NCCL that the output of a run reports."""
    found = set()
    for plain, number in _RE["version"].findall(text):
        code = int(number or 0)
        # NCCL_VERSION_CODE: 23007 is 2.30.7; before 2.9, 2804 was 2.8.4.
        found.add(plain or f"{code // 10000}.{code // 100 % 100}.{code % 100}")
    return found
