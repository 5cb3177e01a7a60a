"""Comparison with a baseline: noise is seldom a regression, a real drop always."""

import math
import random
from collections.abc import Callable

import pytest

from imagebuild.bench.baseline import compare_with_baseline
from imagebuild.bench.models import Results, Run, SpeedClaim
from tests.conftest import data
from tests.unit.bench.speed_fakes import GIB, matrix, run, table

SIZES = [2**e for e in range(10, 35)]
Factor = Callable[[int], float] | float


def sweep(rng: random.Random, noise: float, factor: Factor = 1.0, **changes: object) -> Run:
    """Return a run in which each value deviates by a normally distributed fraction."""

    def value(size: int) -> float:
        by = factor(size) if callable(factor) else factor
        return float(480 / (1 + 2**22 / size) * by * math.exp(rng.gauss(0, noise)))

    return run(*((size, value(size), value(size)) for size in SIZES), **changes)


def results(rng: random.Random, noise: float, runs: int = 1, factor: Factor = 1.0) -> Results:
    return Results(runs=tuple(sweep(rng, noise, factor) for _ in range(runs)))


def verdict_of(new: Results, old: Results) -> SpeedClaim:
    (judgement,) = compare_with_baseline(new, old)
    return judgement.speed


def flagged(rng: random.Random, noise: float, runs: int, factor: Factor = 1.0) -> float:
    """Return the fraction of 30 comparisons that find a regression."""
    verdicts = [verdict_of(results(rng, noise, runs, factor), results(rng, noise, runs)) for _ in range(30)]
    return sum(verdict.state == "too slow" for verdict in verdicts) / len(verdicts)


@pytest.mark.parametrize("noise", [0.0, 0.005, 0.01, 0.02])
@pytest.mark.parametrize("runs", [1, 3])
def test_noise_alone_is_seldom_flagged_and_a_drop_of_8_percent_is(noise: float, runs: int) -> None:
    rng = random.Random(f"{noise} {runs}")
    assert flagged(rng, noise, runs) <= 0.05
    assert flagged(rng, noise, runs, 0.92) >= 0.95
    assert flagged(rng, noise, runs, lambda size: 0.92 if size >= GIB else 1.0) >= 0.95


@pytest.mark.parametrize(
    ("factor", "state", "size", "reason"),
    [
        (0.9, "too slow", SIZES[-1], "median change -10.0% over 5 values (limit -5%); worst change -10.0% at "),
        (lambda size: 0.8 if size == 2**26 else 1.0, "too slow", 2**26,
         "median change +0.0% over 5 values (limit -5%); worst change -20.0% at 67108864 bytes (limit -15%)"),
        (0.96, "fast enough", SIZES[-1], "(limit -15%)"),
        (lambda size: 0.1 if size < 2**20 else 1.0, "fast enough", SIZES[-1], ""),  # small sizes show latency
    ],
)  # fmt: skip
def test_one_run_each(factor: Factor, state: str, size: int, reason: str) -> None:
    rng = random.Random(1)
    claim = verdict_of(results(rng, 0.0, factor=factor), results(rng, 0.0))
    assert (claim.state, claim.size_bytes, reason in claim.reason) == (state, size, True), claim.reason
    assert claim.reference
    assert claim.reference.what == "the baseline, a.log"
    by = factor(size) if callable(factor) else factor
    assert claim.measured == pytest.approx(claim.reference.value * by, rel=0.001)


@pytest.mark.parametrize("factors", [(1.0, 0.7, 0.6), (1.0, 0.7), (1.0, 1.0, 1.0, 0.5)])
def test_runs_that_differ_too_much_are_no_pass(factors: tuple[float, ...]) -> None:
    runs = tuple(sweep(random.Random(6), 0.001, by) for by in factors)
    steady = results(random.Random(7), 0.001)
    claim = verdict_of(steady, Results(runs=runs))
    assert (claim.state, claim.allow) == ("not judged", "unjudged")
    assert claim.reason.startswith(f"the {len(factors)} runs of the baseline differ too much, by ")
    assert verdict_of(Results(runs=runs), steady).state in ("too slow", "not judged")


@pytest.mark.parametrize(("changes", "reason"), data("bench/cases")["results-that-cannot-be-compared"])
def test_results_that_cannot_be_compared(changes: dict[str, object], reason: str) -> None:
    old, new = sweep(random.Random(8), 0.0), sweep(random.Random(8), 0.0).model_copy(update=changes)
    claim = verdict_of(Results(runs=(new,)), Results(runs=(old,)))
    assert (claim.state, claim.allow, claim.reason) == ("not judged", "unjudged", reason)


def test_a_failed_baseline_is_none_and_a_failed_run_does_not_spoil_others() -> None:
    good, bad = sweep(random.Random(9), 0.01), sweep(random.Random(9), 0.01, 0.1, verdict="timeout")
    assert (
        verdict_of(Results(runs=(good,)), Results(runs=(bad,))).reason
        == "in the baseline, the verdict of the result is timeout"
    )
    assert verdict_of(Results(runs=(bad, good)), Results(runs=(good,))).state == "fast enough"


def test_what_vanished_fails_and_what_is_new_does_not() -> None:
    one, other = sweep(random.Random(8), 0.0), sweep(random.Random(8), 0.0, collective="all_gather")
    vanished, new = compare_with_baseline(Results(runs=(one,)), Results(runs=(other,)))[::-1]
    assert (vanished.subject, vanished.worst().standing()) == ("all_gather, 8 ranks, 1 node, float sum", "failed")
    assert vanished.participation.reason == "the baseline contains this result, but the new measurement does not"
    assert (new.worst().standing(), new.speed.reason) == ("skipped", "the baseline does not contain this result")


LONE = matrix("device_to_device_memcpy_read_ce", (None, 390.0), (None, None))
PAIR = matrix("device_to_device_memcpy_read_ce", (None, 390.0), (391.0, None))


@pytest.mark.parametrize(
    ("new", "old", "reason"),
    [
        (run((GIB, 480.0, 480.0)), run((GIB, 480.0, 480.0), (2 * GIB, 480.0, 480.0), (4 * GIB, 480.0, 480.0)),
         f"not measured this time, but in the baseline: sizes of {2 * GIB} to {4 * GIB} bytes"),
        # The new run may have larger steps or more sizes.
        (run((GIB, 480.0, 480.0), (4 * GIB, 480.0, 480.0)), run((GIB, 480.0, 480.0), (2 * GIB, 480.0, 480.0)), ""),
        (LONE, PAIR, "not measured this time, but in the baseline: 1 pair of devices"),
        (PAIR, LONE, ""),
    ],
)  # fmt: skip
def test_sizes_and_pairs_that_vanished(new: object, old: object, reason: str) -> None:
    kind = "runs" if isinstance(new, Run) else "tests"
    found, before = (Results.model_validate({kind: (item,)}) for item in (new, old))
    claim = compare_with_baseline(found, before)[0].participation
    assert (claim.state, claim.reason) == (("incomplete", reason) if reason else ("not applicable", claim.reason))


def test_types_matrices_and_tables_are_compared_apart() -> None:
    base = sweep(random.Random(10), 0.0)
    halves = base.model_copy(update={"rows": tuple(r.model_copy(update={"dtype": "half"}) for r in base.rows)})
    slow = matrix("device_to_device_memcpy_read_ce", (None, 390.0), (200.0, None))
    latency = matrix("device_to_device_latency_sm", (None, 700.0), unit="ns")
    judged = compare_with_baseline(
        Results(
            runs=(sweep(random.Random(10), 0.0, 0.5), halves),
            tests=(slow,),
            tables=(table(350.0, "Gb/sec"),),
        ),
        Results(runs=(base, halves), tests=(PAIR, latency), tables=(table(46500, "MB/sec"),)),
    )
    assert [(j.subject.split(", ")[-1], j.speed.state) for j in judged] == [
        ("float sum", "too slow"), ("half sum", "fast enough"),
        ("device_to_device_memcpy_read_ce", "too slow"), ("RDMA_Write BW", "too slow"),
    ]  # fmt: skip
    assert "worst change -48.8% at row 1, column 0" in judged[2].speed.reason
