"""Paired comparison: runs of two or more versions that alternate in one log, and what they prove. Pure.

The intervals are computed from the differences inside the blocks."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from math import exp, log, sqrt
from operator import mul
from statistics import fmean, stdev

from imagebuild.bench.alternation import MARK, Alternation, ComparisonReader, Section
from imagebuild.bench.models import (
    Change,
    Claim,
    ClaimWord,
    Difference,
    Judgement,
    PairedComparison,
    Run,
    SpeedClaim,
)
from imagebuild.core.errors import plural

FEWEST_BLOCKS, RESAMPLES = 10, 4000
WIDEST = 20.0
"""Largest difference in per cent that the verdict "no difference" may leave possible. A wider interval is no proof."""
ENDED = {124: ", after the time limit", 137: ", ended by SIGKILL: the time limit, the memory limit or the launcher"}
"""Meanings of exit statuses. A launcher that ends the other ranks after a failure passes on 137, as `timeout` does."""


def read_comparisons(
    source: str, reader: ComparisonReader, runs: Mapping[int, Sequence[Run]]
) -> tuple[PairedComparison, ...]:
    """Return what the comparisons in a log prove. `runs` maps the first line of each run to its results."""
    if reader.is_marked and not reader.found:
        problem = f"the lines `# {MARK} sides` and `# {MARK} order` are missing; name the whole log"
        return (PairedComparison(source=source, sides=(), loaded={}, problems=(problem,), faults=(), differences=()),)
    return tuple(_compare(source, found, runs) for found in reader.found)


def _compare(source: str, found: Alternation, runs: Mapping[int, Sequence[Run]]) -> PairedComparison:
    sides, planned = found.sides, len(found.places)
    complete = {n for n, section in found.sections.items() if section.status is not None}
    problems = [f"{len(complete)} of {planned} runs are in the log"] if len(complete) < planned else []
    if len(found.order) - 1 < FEWEST_BLOCKS:
        problems.append(f"{plural(len(found.order) - 1, 'block')}; an interval needs {FEWEST_BLOCKS}")
    loaded: defaultdict[int, set[str]] = defaultdict(set)
    faulty: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    failed: dict[str, str] = {}
    is_proven = True
    first = {section.block: section for section in found.sections.values() if section.side == 0}
    for number, section in sorted(found.sections.items()):
        side = sides[section.side]
        loaded[section.side] |= section.versions
        if number in complete:
            failure = _failure(section, runs.get(section.begin, ()))
            unproven = _unproven(side, section) or _elsewhere(section, first.get(section.block))
            is_proven &= not unproven
            if failure:
                failed.setdefault(side, failure)
            for fault in filter(None, (failure, unproven)):
                faulty[side, fault].append(number)
    faults = tuple(
        f"{side}: run {numbers[0]} {fault}" + (f", and {plural(len(numbers) - 1, 'more run')}" if numbers[1:] else "")
        for (side, fault), numbers in faulty.items()
    )
    differences = tuple(_differences(found, {n: runs.get(found.sections[n].begin, ()) for n in complete}))
    if not differences and not problems:
        problems.append("no run printed a table")
    if differences and not any(section.gpus for section in found.sections.values()):
        problems.append("no run lists its GPUs, so the sides may have used different ones")
    if problems or faults:
        differences = tuple(item.model_copy(update={"verdict": "open"}) for item in differences)
    return PairedComparison(
        source=source, sides=sides, problems=tuple(problems), faults=faults, failed=failed, blocks=found.blocks,
        is_proven=is_proven,
        loaded={sides[side]: tuple(sorted(versions)) for side, versions in sorted(loaded.items())},
        differences=differences,
    )  # fmt: skip


def _failure(section: Section, runs: Sequence[Run]) -> str:
    """Return the reason why a run failed. Empty if it did not fail."""
    if section.status:
        return f"ended with exit status {section.status}{ENDED.get(section.status, '')}"
    bad = next((run for run in runs if run.verdict != "ok"), None)
    return f"has a bad result, {bad.verdict.replace('-', ' ')}: {bad.reason}" if bad else ""


def _unproven(side: str, section: Section) -> str:
    """Return the reason why the output of a run does not show that it was a run of its side. Empty if it does."""
    kind, _, value = side.partition("=")
    if section.status:
        return ""  # the run may have ended before NCCL printed anything
    if not section.versions:
        return "does not say which NCCL it loaded; set NCCL_DEBUG=VERSION"
    if kind == "nccl" and section.versions != {value}:
        return f"loaded NCCL {', '.join(sorted(section.versions))}"
    if kind.startswith("env:"):
        used = {other for name, other in section.variables if name == kind[4:]}
        if used - {value}:
            return f"used {kind[4:]}={', '.join(sorted(used - {value}))}"
        if value and not used:
            return f"does not say that it used {kind[4:]}; set NCCL_DEBUG=INFO"
    return ""


def _elsewhere(section: Section, first: Section | None) -> str:
    """Return how the GPUs of a run differ from those of the first side in the same block. Empty if they do not."""
    if first is None or first.status != 0 or section.status or section.gpus == first.gpus:
        return ""  # a run that was cut or failed may not have listed them
    own, others = (
        next((f"rank {rank} on {gpu}" for rank, gpu in sorted(gpus)), "no GPU")
        for gpus in (section.gpus - first.gpus, first.gpus - section.gpus)
    )
    return f"used other GPUs than the first side in its block: {own}, instead of {others}"


Key = tuple[str, int]
"""A collective with its data type, and a size in bytes."""


def _differences(found: Alternation, runs: Mapping[int, Sequence[Run]]) -> Iterator[Difference]:
    sides = found.sides
    speeds: defaultdict[Key, defaultdict[tuple[int, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    rates: defaultdict[tuple[Key, int], list[float]] = defaultdict(list)
    for number, results in runs.items():
        section = found.sections[number]
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
    headlines = {(collective, size) for collective, all_ in sizes.items() for size in (min(all_), max(all_))}
    verdicts = max(1, len(headlines) * (len(sides) - 1))
    medians = {key: sorted(values)[len(values) // 2] for key, values in rates.items()}
    for key, found_at in sorted(speeds.items()):
        for side in range(1, len(sides)):
            values = [
                fmean(found_at[block, side]) - fmean(found_at[block, 0])
                for block, planned in enumerate(found.order)
                if block and all(len(found_at[block, s]) == planned.count(s) for s in (0, side))
            ]
            if len(values) < 2:
                continue
            low, high = bootstrap_interval(tuple(values), found.error_rate / verdicts)
            centre, low, high = (100 * (exp(value) - 1) for value in (fmean(values), low, high))
            verdict: Change = "slower" if high < 0 else "faster" if low > 0 else "no difference"
            if len(values) < FEWEST_BLOCKS or (verdict == "no difference" and max(-low, high) > WIDEST):
                verdict = "open"
            yield Difference(
                side=sides[side], collective=key[0], size_bytes=key[1], percent=centre, low=low, high=high,
                blocks=len(values), is_headline=key in headlines, verdict=verdict,
                rate=medians[key, side], first_rate=medians[key, 0],
                values=tuple(round(100 * (exp(value) - 1), 4) for value in values),
            )  # fmt: skip


@lru_cache(maxsize=4096)  # a bisection reads its log after each step
def bootstrap_interval(values: tuple[float, ...], error_rate: float, seed: int = 1) -> tuple[float, float]:
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
    resamples = max(RESAMPLES, int(20 / error_rate))  # at least 10 of them in each tail
    while len(distances) < resamples:
        sample = draw.choices(scaled, k=count)
        mean = sum(sample) / count
        variance = (sum(map(mul, sample, sample)) - count * mean**2) / (count - 1)
        if variance > 1e-12:
            distances.append(mean / sqrt(variance / count))
    distances.sort()
    tail = int(resamples * error_rate / 2)
    return centre - distances[-1 - tail] * error, centre - distances[tail] * error


def judge_sides(comparison: PairedComparison, allowed_loss: float = 0) -> tuple[Judgement, ...]:
    """Return a judgement for each verdict of a comparison. A side may be slower by `allowed_loss` per cent.

    If the interval does not show whether a side is slower than allowed, the speed is not judged."""
    nothing = Claim(state="not applicable", reason="the comparison does not check data or participation")
    doubts = "; ".join((*comparison.faults, *comparison.problems))
    participation = Claim(state="incomplete", reason=doubts) if comparison.faults else nothing
    claims: list[tuple[str, SpeedClaim]] = []
    for item in (item for item in comparison.differences if item.is_headline):
        state: ClaimWord = "not judged"
        if item.verdict == "open":
            pass
        elif not doubts and item.high < -allowed_loss:
            state = "slower"
        elif item.verdict == "faster" or (item.verdict == "no difference" and not allowed_loss):
            state = item.verdict
        elif not doubts and item.low >= -allowed_loss:
            state = "no difference" if item.verdict == "no difference" else "fast enough"
        allowed = f"; up to {allowed_loss:g} % slower is allowed" if allowed_loss else ""
        reason = item.interval if state in ("slower", "faster") else item.words
        speed = SpeedClaim(
            state=state, reason=doubts or f"{reason}{allowed}",
            allow=None if state == "slower" else "unjudged", measured=round(item.rate, 3), size_bytes=item.size_bytes,
        )  # fmt: skip
        claims.append((f"{item.collective}, {item.size_bytes} bytes: {item.side}", speed))
    if not claims:
        subject = " or ".join(comparison.sides) or "a comparison"
        claims.append((subject, SpeedClaim(state="not judged", reason=doubts, allow="unjudged")))
    shared = {"source": comparison.source, "data": nothing, "participation": participation}
    return tuple(Judgement(subject=subject, speed=speed, **shared) for subject, speed in claims)
