"""Verdicts on speed: by ceiling and reference, and when there can be none."""

import pytest

from imagebuild.bench import (
    BandwidthTest,
    PerftestTable,
    Results,
    Run,
    RunContext,
    SpeedVerdict,
    TableRow,
    judge_results,
)
from imagebuild.core import ConfigError
from tests.unit.bench.speed_fakes import GIB, matrix, run, shipped, table


def judge_run(run: Run, profile: str = "h200", **context: object) -> SpeedVerdict:
    (verdict,) = judge_results(Results(runs=(run,)), shipped(profile), RunContext(**context))  # type: ignore[arg-type]
    return verdict


def test_the_best_large_row_counts_and_not_the_average() -> None:
    verdict = judge_run(
        run((2**20, 20.0, 21.0), (GIB, 470.0, 471.0), (8 * GIB, 481.0, 482.0), (16 * GIB, 479.0, 478.0))
    )
    assert (verdict.outcome, verdict.measured, verdict.size_bytes) == ("passed", 482.0, 8 * GIB)
    assert verdict.ceiling
    assert verdict.ceiling.value == 700
    assert verdict.ceiling.what == "nvls all_reduce ceiling: link * 2(n-1)/(n+1)"
    assert verdict.reference
    assert verdict.reference.value == 482.26
    assert "ml-engineering" in verdict.reference.what
    assert "2026-08-04" in verdict.reference.what
    assert verdict.reason == "99.9% of the reference, at least the 90% that pass; 69% of the ceiling"


def test_below_tolerance_fails() -> None:
    verdict = judge_run(run((GIB, 433.0, 430.0)))
    assert (verdict.outcome, verdict.tolerance) == ("failed", 0.9)
    assert "89.8% of the reference, below the 90% that pass" in verdict.reason
    assert judge_run(run((GIB, 435.0, 430.0))).outcome == "passed"


def test_a_ring_is_not_held_against_nvls() -> None:
    ring = run((4 * GIB, 365.7, 365.5))
    assert judge_run(ring).outcome == "failed"
    assert "99% of the reference with ring: was the library made to use it?" in judge_run(ring).reason
    verdict = judge_run(ring, algorithm="ring")
    assert verdict.outcome == "passed"
    assert verdict.reference
    assert verdict.ceiling
    assert (verdict.reference.value, verdict.ceiling.value) == (367.61, 450)
    assert judge_run(run((GIB, 480.0, None)), algorithm="ring").outcome == "measurement-error"


def test_a_class_that_a_collective_has_not_is_ignored() -> None:
    verdict = judge_run(
        run((8 * GIB, 348.0, 347.0), collective="alltoall", device="NVIDIA H100 80GB HBM3"), "h100", algorithm="ring"
    )
    assert verdict.outcome == "passed"


def test_a_class_that_the_hardware_has_not() -> None:
    verdict = judge_run(run((GIB, 230.0, 231.0), device="NVIDIA A100-SXM4-80GB"), "a100-sxm", algorithm="nvls")
    assert verdict.outcome == "not-comparable"
    assert "cannot run" in verdict.reason
    with pytest.raises(ConfigError, match="--algorithm rings: unknown class of algorithms; use one of ring, nvls"):
        judge_run(run((GIB, 1.0, 1.0)), algorithm="rings")


@pytest.mark.parametrize("size", [2**20, GIB])
def test_above_the_ceiling_is_a_mistake_at_every_size(size: int) -> None:
    verdict = judge_run(run((size, 720.0, 100.0)))
    assert verdict.outcome == "measurement-error"
    assert "103% of the ceiling" in verdict.reason
    assert judge_run(run((GIB, 713.0, 100.0))).outcome == "passed"  # within the margin of 2 %


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "NVIDIA H100 80GB HBM3"}, "it ran on NVIDIA H100 80GB HBM3, and h200 has *NVIDIA H200"),
        ({"verdict": "wrong-data", "reason": "4 wrong"}, "its verdict is wrong-data (4 wrong), so its speed is not judged"),
        ({"ranks": 1}, "one rank moves nothing between GPUs: not applicable"),
        ({"ranks": None}, "the output does not say the number of ranks"),
        ({"ranks": None, "nodes": None}, "the output does not say the number of ranks and the number of nodes"),
        ({"collective": None}, "the output does not say the collective"),
        ({"ranks": 3}, "h200 has no reference for all_reduce, 3 ranks, 1 node"),
        ({"ranks": 16}, "16 ranks on 1 node do not fit h200, which has 8 GPUs a node"),
        ({"collective": "alltoallv"}, "h200 has no reference for alltoallv, 8 ranks, 1 node"),
        ({"rows": ()}, "no bus bandwidth was read"),
    ],
)  # fmt: skip
def test_results_that_cannot_be_compared(changes: dict[str, object], reason: str) -> None:
    verdict = judge_run(run((GIB, 300.0, 300.0), **changes))
    assert verdict.outcome == "not-comparable"
    assert verdict.reason.startswith(reason)


def test_without_a_reference_the_share_of_the_ceiling_is_said() -> None:
    verdict = judge_run(run((GIB, 360.0, None), ranks=16, nodes=2))
    assert verdict.outcome == "not-comparable"
    assert "h200 has no reference for all_reduce, 16 ranks, 2 nodes; 48% of the ceiling" in verdict.reason
    assert judge_run(run((GIB, 780.0, None), ranks=16, nodes=2)).outcome == "measurement-error"


def test_small_sizes_are_not_judged() -> None:
    verdict = judge_run(run((GIB // 2, 480.0, 480.0)))
    assert verdict.outcome == "not-comparable"
    assert "speed is judged at 1 GiB or more" in verdict.reason


def test_a_size_that_was_rounded_down_is_large_enough() -> None:
    assert judge_run(run((GIB - GIB % (16 * 7), 459.0, 458.0), ranks=7)).outcome == "passed"


def test_nodes_that_only_the_caller_knows() -> None:
    unknown = run((16 * GIB, 486.0, 485.0), ranks=16, nodes=None, device=None)
    assert judge_run(unknown, "p5en").outcome == "not-comparable"
    verdict = judge_run(unknown, "p5en", nodes=2)
    assert verdict.outcome == "passed"
    assert "the output does not name the GPU, so it is taken for p5en" in verdict.reason


def test_ranks_that_only_the_caller_knows() -> None:
    bare = run((8 * GIB, 386.56, 385.56), ranks=None, nodes=None, device=None)
    assert judge_run(bare, "coreweave-h100").outcome == "not-comparable"
    verdict = judge_run(bare, "coreweave-h100", ranks=96, nodes=12)
    assert (verdict.outcome, verdict.subject) == ("passed", "all_reduce, 96 ranks, 12 nodes")


def test_a_gpu_without_a_name_is_none() -> None:
    early = run((8 * GIB, 834.57, 846.82), ranks=72, nodes=18, device="NVIDIA Graphics Device")
    verdict = judge_run(early, "gb200-nvl72")
    assert verdict.outcome == "passed"
    assert "the output does not name the GPU" in verdict.reason


def test_a_rack_is_not_measured_by_its_trays() -> None:
    rack = run((8 * GIB, 834.57, 846.82), ranks=72, nodes=18, device="NVIDIA GB200")
    verdict = judge_run(rack, "coreweave-gb200")
    assert verdict.outcome == "passed"
    assert verdict.ceiling
    assert verdict.ceiling.value == pytest.approx(900 * 142 / 73, abs=0.001)


def judge(item: BandwidthTest | PerftestTable, profile: str = "h200") -> SpeedVerdict:
    results = Results(tests=(item,)) if isinstance(item, BandwidthTest) else Results(tables=(item,))
    (verdict,) = judge_results(results, shipped(profile))
    return verdict


WRITE = "device_to_device_memcpy_write_ce"


BOTH = "device_to_device_bidirectional_memcpy_write_ce"
TOTAL, WAY = ((None, 783.0), (782.0, None)), ((None, 392.0), (391.0, None))


@pytest.mark.parametrize(("name", "cells", "profile", "outcome", "measured"), [
    # The worst pair counts; the diagonal, which is a copy within a GPU, does not.
    (WRITE, ((0.0, 396.0, 390.0), (395.0, 0.0, 340.0), (396.0, 396.0, 0.0)), "h200", "failed", 340.0),
    (WRITE, ((None, 396.0), (360.0, None)), "h200", "passed", 360.0),
    (WRITE, ((2500.0, 396.0), (470.0, 2500.0)), "h200", "measurement-error", 470.0),
    # Both directions may be twice the link.
    (BOTH, (*WAY, *WAY, *TOTAL), "h200", "passed", 782.0),
    (f"{BOTH}_total", TOTAL, "h200", "passed", 782.0),
    (f"{BOTH}_read1", WAY, "h200", "not-comparable", 391.0),
    (f"{BOTH}_read1", TOTAL, "h200", "measurement-error", 783.0),
    # Copies to and from hosts have no diagonal.
    ("host_to_device_memcpy_ce", ((40.0, 55.4, 55.4),), "h200", "failed", 40.0),
    ("host_to_device_memcpy_ce", ((40.0, 55.0), (55.0, 41.0)), "h200", "failed", 40.0),
    ("device_to_host_memcpy_ce", ((80.0,),), "h200", "measurement-error", 80.0),
    # Pairs without a switch.
    ("device_to_device_memcpy_read_ce", ((None, 140.0), (141.0, None)), "gh200", "not-comparable", 140.0),
    ("device_to_device_memcpy_read_ce", ((None, 160.0), (141.0, None)), "gh200", "measurement-error", 160.0),
])  # fmt: skip
def test_matrices(
    name: str, cells: tuple[tuple[float | None, ...], ...], profile: str, outcome: str, measured: float
) -> None:
    verdict = judge(matrix(name, *cells), profile)
    assert (verdict.outcome, verdict.measured) == (outcome, measured)


def test_what_a_verdict_on_a_matrix_says() -> None:
    verdict = judge(matrix(WRITE, (None, 396.0), (340.0, None)))
    assert "the worst pair" in verdict.reason
    assert verdict.ceiling
    assert verdict.ceiling.what == "NVLink 4, one way"


def test_latencies_are_not_judged_and_failed_tests_not_compared() -> None:
    latency = matrix("device_to_device_latency_sm", (None, 700.0), unit="ns")
    waived = matrix(WRITE, status="waived", matrix=None, unit=None)
    wires = table(1.0, "Gb/sec").model_copy(update={"rows": (TableRow(size_bytes=2, latency_us={"min": 1.0}),)})
    assert judge_results(Results(tests=(latency, waived), tables=(wires,)), shipped("h200")) == ()
    assert judge(matrix(WRITE, (None, 396.0), status="error")).reason == "the test's status is error"
    assert judge(matrix(WRITE)).reason == "no pair was measured"


@pytest.mark.parametrize(
    ("average", "unit", "outcome", "measured"),
    [
        (391.0, "Gb/sec", "passed", 391.0),
        (350.0, "Gb/sec", "failed", 350.0),
        (46610.0, "MB/sec", "passed", 46610 * 2**20 * 8 / 1e9),
        (46610.0, "MiB/sec", "passed", 46610 * 2**20 * 8 / 1e9),
        (42000.0, "MiB/sec", "failed", 42000 * 2**20 * 8 / 1e9),
        (49000.0, "MiB/sec", "measurement-error", 49000 * 2**20 * 8 / 1e9),
        (46610.0, None, "not-comparable", None),
    ],
)
def test_perftest_in_every_unit(average: float, unit: str | None, outcome: str, measured: float | None) -> None:
    verdict = judge(table(average, unit))
    assert verdict.outcome == outcome
    assert verdict.measured == (measured if measured is None else pytest.approx(measured))
    assert verdict.unit == "Gb/s"


def test_perftest_in_both_directions_and_without_a_reference() -> None:
    both = judge(table(760.0, "Gb/sec", "RDMA_Write Bidirectional BW"))
    assert both.outcome == "not-comparable"
    assert both.ceiling
    assert both.ceiling.value == 800
    assert judge(table(300.0, "Gb/sec"), "gh200").outcome == "measurement-error"
    assert judge(table(390.0, "Gb/sec", verdict="failed", reason="no route")).outcome == "not-comparable"


def test_a_loopback_at_line_rate_is_within_the_margin() -> None:
    assert judge(table(24056.72, "MB/sec"), "a100-sxm").outcome == "passed"
