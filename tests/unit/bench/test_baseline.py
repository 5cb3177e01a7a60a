"""Comparison with an earlier measurement: noise is seldom flagged, a real drop always."""

import math
import random

import pytest

from imagebuild.bench import Results, Run, SpeedClaim, compare_with_baseline
from tests.unit.bench.speed_fakes import GIB, matrix, run, table

SIZES = [2**e for e in range(10, 35)]


def sweep(rng: random.Random, noise: float, **changes: object) -> Run:
    """A run whose every value is off by a normally distributed fraction."""
    factor = changes.pop("factor", lambda size: 1.0)
    assert callable(factor)

    def value(size: int) -> float:
        return float(480 / (1 + 2**22 / size) * factor(size) * math.exp(rng.gauss(0, noise)))

    return run(*((size, value(size), value(size)) for size in SIZES), **changes)


def results(rng: random.Random, noise: float, runs: int = 1, **changes: object) -> Results:
    return Results(runs=tuple(sweep(rng, noise, **changes) for _ in range(runs)))


def verdict_of(new: Results, old: Results) -> SpeedClaim:
    (judgement,) = compare_with_baseline(new, old)
    return judgement.speed


def flagged(rng: random.Random, noise: float, runs: int, **changes: object) -> float:
    """Share of 30 comparisons that are a regression."""
    verdicts = [verdict_of(results(rng, noise, runs, **changes), results(rng, noise, runs)) for _ in range(30)]
    return sum(verdict.state == "too slow" for verdict in verdicts) / len(verdicts)


@pytest.mark.parametrize("noise", [0.0, 0.005, 0.01, 0.02, 0.03])
@pytest.mark.parametrize("runs", [1, 3])
def test_noise_alone_is_seldom_flagged_and_a_drop_of_8_percent_is(noise: float, runs: int) -> None:
    rng = random.Random(f"{noise} {runs}")
    assert flagged(rng, noise, runs) <= 0.05
    assert flagged(rng, noise, runs, factor=lambda size: 0.92) >= 0.95


@pytest.mark.parametrize("noise", [0.005, 0.02])
def test_a_drop_of_large_sizes_only(noise: float) -> None:
    rng = random.Random(noise)
    assert flagged(rng, noise, 1, factor=lambda size: 0.92 if size >= 2**30 else 1.0) >= 0.95


def test_a_drop_at_one_size_is_named() -> None:
    rng = random.Random(1)
    verdict = verdict_of(results(rng, 0.01, factor=lambda size: 0.8 if size == 2**26 else 1.0), results(rng, 0.01))
    assert (verdict.state, verdict.size_bytes) == ("too slow", 2**26)
    assert verdict.reason.startswith("67108864 bytes: -19.4%; the limit is -9.8%;")


def test_a_regression_names_both_values() -> None:
    rng = random.Random(2)
    verdict = verdict_of(results(rng, 0.01, factor=lambda size: 0.9), results(rng, 0.01, source="old.log"))
    assert "-10" in verdict.reason
    assert verdict.reference
    assert verdict.reference.what == "the baseline, old.log"
    assert verdict.measured
    assert verdict.measured / verdict.reference.value == pytest.approx(0.9, abs=0.04)
    assert verdict.tolerance == pytest.approx(0.95, abs=0.001)


def test_faster_passes() -> None:
    rng = random.Random(3)
    assert verdict_of(results(rng, 0.01, factor=lambda size: 1.2), results(rng, 0.01)).state == "fast enough"


def test_noisy_runs_need_a_larger_drop() -> None:
    rng = random.Random(4)
    verdict = verdict_of(results(rng, 0.15, factor=lambda size: 0.95), results(rng, 0.15))
    assert verdict.state == "fast enough"


def test_runs_that_differ_as_a_whole_raise_the_limit() -> None:
    def offset(by: float) -> Run:
        return sweep(random.Random(5), 0.001, factor=lambda size: by)

    scattered = Results(runs=tuple(map(offset, (0.9, 1.0, 1.1))))
    steady = Results(runs=tuple(map(offset, (1.0, 1.0, 1.0))))
    low = Results(runs=tuple(map(offset, (0.92, 0.92, 0.92))))
    assert verdict_of(low, scattered).state == "fast enough"
    assert verdict_of(low, steady).state == "too slow"


@pytest.mark.parametrize("factors", [(1.0, 0.7, 0.6), (1.0, 0.7), (1.0, 1.0, 1.0, 0.5)])
def test_runs_that_differ_too_much_are_no_pass(factors: tuple[float, ...]) -> None:
    runs = tuple(sweep(random.Random(6), 0.001, factor=lambda size, by=by: by) for by in factors)
    steady = results(random.Random(7), 0.001)
    for new, old, where in ((Results(runs=runs), steady, ""), (steady, Results(runs=runs), " of the baseline")):
        verdict = verdict_of(new, old)
        if verdict.state != "too slow":
            assert (verdict.state, verdict.allow) == ("not judged", "unjudged")
            assert verdict.reason.startswith(f"the {len(factors)} runs{where} differ too much, by ")
    assert verdict_of(steady, Results(runs=runs)).state == "not judged"


def test_three_runs_see_four_percent_and_one_does_not() -> None:
    rng = random.Random(6)
    assert verdict_of(results(rng, 0.002, 3, factor=lambda size: 0.96), results(rng, 0.002, 3)).state == "too slow"
    assert verdict_of(results(rng, 0.002, 1, factor=lambda size: 0.96), results(rng, 0.002, 1)).state == "fast enough"


def test_small_sizes_do_not_count() -> None:
    rng = random.Random(7)
    verdict = verdict_of(results(rng, 0.01, factor=lambda size: 0.1 if size < 2**20 else 1.0), results(rng, 0.01))
    assert verdict.state == "fast enough"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "NVIDIA B200"}, "the GPU is NVIDIA B200, in the baseline it is NVIDIA H200"),
        ({"verdict": "wrong-data"}, "its verdict is wrong-data"),
    ],
)
def test_results_that_cannot_be_compared(changes: dict[str, object], reason: str) -> None:
    rng = random.Random(8)
    claim = verdict_of(results(rng, 0.01, 1, **changes), results(rng, 0.01))
    assert (claim.state, claim.reason, claim.allow) == ("not judged", reason, "unjudged")


def test_what_vanished_fails_and_what_is_new_does_not() -> None:
    rng = random.Random(8)
    new, vanished = compare_with_baseline(results(rng, 0.01, 1, ranks=4), results(rng, 0.01))
    assert (new.worst().standing(), new.speed.reason) == ("unasked", "the baseline does not have it")
    assert (vanished.worst().standing(), vanished.worst().state) == ("failed", "incomplete")
    assert vanished.worst().reason == "the baseline has it, but it was not measured this time"


PAIR = matrix("device_to_device_memcpy_read_ce", (None, 390.0), (390.0, None))
LONE = matrix("device_to_device_memcpy_read_ce", (None, 390.0), (None, None))


@pytest.mark.parametrize(
    ("new", "old", "reason"),
    [
        (run((GIB, 480.0, 480.0)), run((GIB, 480.0, 480.0), (2 * GIB, 480.0, 480.0), (4 * GIB, 480.0, 480.0)),
         f"not measured this time: sizes of {2 * GIB} to {4 * GIB} bytes, which the baseline has"),
        # Steps may be wider, and sizes new.
        (run((GIB, 480.0, 480.0), (4 * GIB, 480.0, 480.0)), run((GIB, 480.0, 480.0), (2 * GIB, 480.0, 480.0)), ""),
        (LONE, PAIR, "not measured this time: pairs of devices (1), which the baseline has"),
        (PAIR, LONE, ""),
    ],
)  # fmt: skip
def test_sizes_and_pairs_that_vanished(new: object, old: object, reason: str) -> None:
    kind = "runs" if isinstance(new, Run) else "tests"
    found, before = (Results.model_validate({kind: (item,)}) for item in (new, old))
    claim = compare_with_baseline(found, before)[0].participation
    assert (claim.state, claim.reason) == (("incomplete", reason) if reason else ("not applicable", claim.reason))


def test_a_failed_baseline_is_none_and_a_failed_run_does_not_spoil_others() -> None:
    rng = random.Random(9)
    good, bad = sweep(rng, 0.01), sweep(rng, 0.01, verdict="timeout", factor=lambda size: 0.1)
    assert verdict_of(Results(runs=(good,)), Results(runs=(bad,))).reason == "in the baseline, its verdict is timeout"
    assert verdict_of(Results(runs=(bad, good)), Results(runs=(good,))).state == "fast enough"


def test_types_and_operations_are_compared_apart() -> None:
    rng = random.Random(10)
    base = sweep(rng, 0.0)
    halves = base.model_copy(update={"rows": tuple(r.model_copy(update={"dtype": "half"}) for r in base.rows)})
    slow = sweep(rng, 0.0, factor=lambda size: 0.5)
    verdicts = compare_with_baseline(Results(runs=(slow, halves)), Results(runs=(base, halves)))
    assert {verdict.subject.split(", ")[-1]: verdict.speed.state for verdict in verdicts} == {
        "float sum": "too slow",
        "half sum": "fast enough",
    }


def test_matrices_and_tables() -> None:
    before = matrix("device_to_device_memcpy_read_ce", (None, 390.0, 391.0), (392.0, None, 390.0), (391.0, 390.0, None))
    slow = matrix("device_to_device_memcpy_read_ce", (None, 390.0, 391.0), (392.0, None, 200.0), (391.0, 390.0, None))
    verdicts = compare_with_baseline(
        Results(tests=(slow,), tables=(table(350.0, "Gb/sec"),)),
        Results(tests=(before,), tables=(table(46500, "MB/sec"),)),
    )
    assert [(verdict.subject, verdict.speed.state, verdict.speed.unit) for verdict in verdicts] == [
        ("device_to_device_memcpy_read_ce", "too slow", "GB/s"), ("RDMA_Write BW", "too slow", "Gb/s"),
    ]  # fmt: skip
    assert "row 1, column 2: -48.7%" in verdicts[0].speed.reason
    assert verdict_of(Results(tests=(before,)), Results(tests=(before,))).state == "fast enough"


def test_latency_matrices_and_empty_documents() -> None:
    latency = matrix("device_to_device_latency_sm", (None, 700.0), unit="ns")
    assert compare_with_baseline(Results(tests=(latency,)), Results()) == ()
    assert compare_with_baseline(Results(), Results()) == ()
