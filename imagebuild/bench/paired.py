"""Paired comparison: runs of two or more versions that alternate in one log, and what they prove. Pure.

A *side* is one version, image or value of a variable. A *block* contains one run of each side. The order of a block is
random, and the next block has the reverse order (ABBA), so that a steady drift cancels out. The intervals are computed
from the differences inside the blocks."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log, sqrt
from statistics import fmean, stdev
from typing import Literal

from imagebuild.bench.models import Claim, ClaimWord, Judgement, Run, SpeedClaim
from imagebuild.core.errors import ConfigError, plural
from imagebuild.core.fields import Model

MARK = "imagebuild-compare"
"""Word that begins each line by which the script of a comparison describes the log."""
_LINE = re.compile(rf"# {MARK} (sides|order|begin|end) ?(.*)")
_VERSION = re.compile(r"NCCL version (\d+\.\d+\.\d+)|nccl-library=(\d{4,6})\b")
"""What NCCL prints about itself: the line of NCCL_DEBUG=VERSION, and the number that nccl-tests reads from it."""
_VARIABLE = re.compile(r"NCCL INFO (\w+) set by environment to (\S+?)\.?$", re.MULTILINE)
FEWEST_BLOCKS, RESAMPLES = 10, 4000
ERROR_RATE = 0.01
"""Probability that at least one verdict of a comparison of equal sides claims a difference."""

Change = Literal["slower", "faster", "no difference", "open"]
"""What a comparison claims about the speed of a side."""


class Difference(Model):
    """The difference in speed between a side and the first side, at one size of one collective. Positive is faster."""

    side: str
    collective: str
    size_bytes: int
    percent: float
    low: float
    high: float
    """The limits of the interval, in per cent."""
    blocks: int
    is_headline: bool
    """Whether the size has a verdict: the smallest and the largest size of the collective."""
    verdict: Change
    rate: float
    """Bus bandwidth of the side in GB/s: the median run."""

    @property
    def words(self) -> str:
        """The verdict with the numbers that support it."""
        interval = f"{self.percent:+.2f} % (from {self.low:+.2f} % to {self.high:+.2f} %, {self.blocks} blocks)"
        if self.verdict == "no difference":
            return f"no difference above {max(-self.low, self.high):.2f} %: {interval}"
        return f"{self.verdict}: {interval}"


class PairedComparison(Model):
    """The runs of a log that compare the sides with the first side."""

    source: str
    sides: tuple[str, ...]
    loaded: dict[str, tuple[str, ...]]
    """Maps each side to the versions of NCCL that its runs reported."""
    problems: tuple[str, ...]
    """Reasons why the log proves nothing yet, such as missing runs."""
    faults: tuple[str, ...]
    """Reasons why the log does not compare what it claims to compare, such as another loaded version."""
    differences: tuple[Difference, ...]


@dataclass
class _Section:
    """The output of one run."""

    side: int
    block: int
    text: list[str] = field(default_factory=list)
    status: int | None = None


def split_log(lines: Iterable[str]) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...], dict[int, _Section]]:
    """Return the sides, the sides of the runs of each block, and the output of each run by its number.

    The first block contains the warm-up runs. Raises ConfigError if the first lines of the comparison are missing."""
    sides: tuple[str, ...] = ()
    order: tuple[tuple[int, ...], ...] = ()
    places: list[tuple[int, int]] = []
    sections: dict[int, _Section] = {}
    current: _Section | None = None
    for line in lines:
        if not (found := _LINE.search(line)):
            if current:
                current.text.append(line)
            continue
        kind, rest = found[1], found[2].strip()
        if kind == "sides":
            sides = tuple(rest.split(" | "))
        elif kind == "order" and re.fullmatch(r"[0-9a-f ]+", rest):
            order = tuple(tuple(int(digit, 16) for digit in word) for word in rest.split())
            places = [(block, side) for block, runs in enumerate(order) for side in runs]
        elif kind == "begin" and rest.isdigit() and int(rest) < len(places):
            block, side = places[int(rest)]
            current = sections[int(rest)] = _Section(side, block)
        elif kind == "end" and current:
            current.status = int(rest) if rest.lstrip("-").isdigit() else None
            current = None
    if not sides or not order or max(map(max, order)) >= len(sides):
        raise ConfigError(f"the lines `# {MARK} sides` and `# {MARK} order` are missing; name the whole log")
    return sides, order, sections


def loaded_versions(text: str) -> set[str]:
    """Return the versions of NCCL that the output of a run reports."""
    found = set()
    for plain, number in _VERSION.findall(text):
        code = int(number or 0)
        # NCCL_VERSION_CODE: 23007 is 2.30.7; before 2.9, 2804 was 2.8.4.
        found.add(plain or f"{code // 10000}.{code // 100 % 100}.{code % 100}")
    return found


def compare_sides(
    source: str,
    sides: tuple[str, ...],
    order: Sequence[Sequence[int]],
    sections: Mapping[int, _Section],
    runs: Mapping[int, Sequence[Run]],
) -> PairedComparison:
    """Return what the runs of a log prove. `runs` maps the number of each section to the results in its output."""
    planned = sum(map(len, order))
    complete = {n for n, section in sections.items() if section.status is not None}
    problems = [f"{len(complete)} of {planned} runs are in the log"] if len(complete) < planned else []
    if len(order) - 1 < FEWEST_BLOCKS:
        problems.append(f"{len(order) - 1} blocks; an interval needs {FEWEST_BLOCKS}")
    loaded: defaultdict[int, set[str]] = defaultdict(set)
    faulty: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for number, section in sorted(sections.items()):
        side, text = sides[section.side], "\n".join(section.text)
        versions = loaded_versions(text)
        loaded[section.side] |= versions
        if number in complete:
            for fault in _faults(side, section, text, versions, runs.get(number, ())):
                faulty[side, fault].append(number)
    faults = tuple(
        f"{side}: run {numbers[0]} {fault}" + (f", and {plural(len(numbers) - 1, 'more run')}" if numbers[1:] else "")
        for (side, fault), numbers in faulty.items()
    )
    differences = tuple(_differences(sides, order, sections, {n: runs.get(n, ()) for n in complete}))
    if not differences and not problems:
        problems.append("no run printed a table")
    if problems or faults:
        differences = tuple(item.model_copy(update={"verdict": "open"}) for item in differences)
    return PairedComparison(
        source=source, sides=sides, problems=tuple(problems), faults=faults,
        loaded={sides[side]: tuple(sorted(found)) for side, found in sorted(loaded.items())}, differences=differences,
    )  # fmt: skip


def _faults(side: str, section: _Section, text: str, versions: set[str], runs: Sequence[Run]) -> Iterator[str]:
    """Yield the reasons why a run does not count for its side."""
    kind, _, value = side.partition("=")
    if section.status:
        yield f"ended with exit status {section.status}"
        return
    if bad := next((run for run in runs if run.verdict != "ok"), None):
        yield f"has a bad result, {bad.verdict.replace('-', ' ')}: {bad.reason}"
    if not versions:
        yield "does not say which NCCL it loaded; set NCCL_DEBUG=VERSION"
    elif kind == "nccl" and versions != {value}:
        yield f"loaded NCCL {', '.join(sorted(versions))}"
    elif kind.startswith("env:") and value and (kind[4:], value) not in _VARIABLE.findall(text):
        yield f"does not say that it used {kind[4:]}; set NCCL_DEBUG=INFO"


Key = tuple[str, int]
"""A collective with its data type, and a size in bytes."""


def _differences(
    sides: Sequence[str],
    order: Sequence[Sequence[int]],
    sections: Mapping[int, _Section],
    runs: Mapping[int, Sequence[Run]],
) -> Iterator[Difference]:
    speeds: defaultdict[Key, defaultdict[tuple[int, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    rates: defaultdict[tuple[Key, int], list[float]] = defaultdict(list)
    for number, results in runs.items():
        section = sections[number]
        for run in results if section.block else ():  # block 0 is the warm-up
            for row in run.rows:
                times = [half.time_us for half in row.halves if half.time_us]
                if run.verdict == "ok" and times and row.size_bytes:
                    key = (f"{run.subject}, {row.dtype}", row.size_bytes)
                    speeds[key][section.block, section.side].append(-fmean(map(log, times)))
                    rates[key, section.side].append(row.busbw_gb_s or 0.0)
    sizes: defaultdict[str, set[int]] = defaultdict(set)
    for collective, size in speeds:
        sizes[collective].add(size)
    headlines = {(collective, size) for collective, found in sizes.items() for size in (min(found), max(found))}
    verdicts = max(1, len(headlines) * (len(sides) - 1))
    for key, found in sorted(speeds.items()):
        for side in range(1, len(sides)):
            values = [
                fmean(found[block, side]) - fmean(found[block, 0])
                for block, planned in enumerate(order)
                if block and all(len(found[block, s]) == planned.count(s) for s in (0, side))
            ]
            if len(values) < 2:
                continue
            low, high = bootstrap_interval(values, ERROR_RATE / verdicts)
            centre, low, high = (100 * (exp(value) - 1) for value in (fmean(values), low, high))
            verdict: Change = "slower" if high < 0 else "faster" if low > 0 else "no difference"
            if len(values) < FEWEST_BLOCKS:
                verdict = "open"
            yield Difference(
                side=sides[side], collective=key[0], size_bytes=key[1], percent=centre, low=low, high=high,
                blocks=len(values), is_headline=key in headlines, verdict=verdict,
                rate=sorted(rates[key, side])[len(rates[key, side]) // 2],
            )  # fmt: skip


def bootstrap_interval(values: Sequence[float], error_rate: float, seed: int = 1) -> tuple[float, float]:
    """Return the limits between which the mean lies, except with the probability `error_rate`.

    This is the bootstrap-t interval (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 12): each
    resample gives the distance of its mean in its own standard errors. Unlike percentiles of means, it also holds for
    few values. Resamples of equal values have no standard error and are drawn again."""
    count, centre = len(values), fmean(values)
    error = stdev(values) / sqrt(count)
    if not error:
        return centre, centre
    draw = random.Random(seed)  # noqa: S311 - the same log must give the same interval
    scaled = [(value - centre) / error for value in values]
    distances: list[float] = []
    while len(distances) < RESAMPLES:
        sample = draw.choices(scaled, k=count)
        mean = sum(sample) / count
        variance = sum((value - mean) ** 2 for value in sample) / (count - 1)
        if variance > 1e-12:
            distances.append(mean / sqrt(variance / count))
    distances.sort()
    tail = int(RESAMPLES * error_rate / 2)
    return centre - distances[-1 - tail] * error, centre - distances[tail] * error


def judge_sides(comparison: PairedComparison, allowed_loss: float = 0) -> tuple[Judgement, ...]:
    """Return a judgement for each verdict of a comparison. A side may be slower by `allowed_loss` per cent.

    If the interval does not show whether a side is slower than allowed, the speed is not judged."""
    nothing = Claim(state="not applicable", reason="the comparison does not check data or participation")
    doubts = "; ".join((*comparison.faults, *comparison.problems))
    participation = Claim(state="incomplete", reason=doubts) if comparison.faults else nothing
    judgements = []
    for item in comparison.differences:
        if not item.is_headline:
            continue
        state: ClaimWord = "not judged"
        if not doubts and item.high < -allowed_loss:
            state = "slower"
        elif item.verdict == "faster" or (item.verdict == "no difference" and not allowed_loss):
            state = item.verdict
        elif not doubts and item.low >= -allowed_loss:
            state = "no difference" if item.verdict == "no difference" else "fast enough"
        allowed = f"; up to {allowed_loss:g} % slower is allowed" if allowed_loss else ""
        speed = SpeedClaim(
            state=state, reason=doubts or f"{item.words}{allowed}", allow="unjudged", measured=round(item.rate, 3),
            size_bytes=item.size_bytes,
        )  # fmt: skip
        subject = f"{item.collective}, {item.size_bytes} bytes: {item.side}"
        judged = {"data": nothing, "participation": participation, "speed": speed}
        judgements.append(Judgement(source=comparison.source, subject=subject, **judged))
    if not judgements:
        claim = SpeedClaim(state="not judged", reason=doubts, allow="unjudged")
        judged = {"data": nothing, "participation": participation, "speed": claim}
        judgements.append(Judgement(source=comparison.source, subject=" or ".join(comparison.sides), **judged))
    return tuple(judgements)
