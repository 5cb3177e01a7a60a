"""The three claims about a result: data, participation and speed."""

import pytest

from imagebuild.bench import (
    Diagnostic,
    Expected,
    Judgement,
    Openness,
    Results,
    Run,
    TableRow,
    forced_classes,
    judge_results,
)
from imagebuild.core import ConfigError
from tests.unit.bench.speed_fakes import GIB, matrix, run, shipped, table

H100 = "NVIDIA H100 80GB HBM3"
WRITE, READ = "device_to_device_memcpy_write_ce", "device_to_device_memcpy_read_ce"
BOTH = "device_to_device_bidirectional_memcpy_write_ce"
TOTAL, WAY = ((None, 783.0), (782.0, None)), ((None, 392.0), (391.0, None))


def judged(profile: str | None = "h200", expected: Expected | None = None, **results: object) -> Judgement:
    """Return the judgement on the only result."""
    (judgement,) = judge_results(Results.model_validate(results), shipped(profile) if profile else None, expected)
    return judgement


def judge(run: Run, profile: str | None = "h200", **expected: object) -> Judgement:
    return judged(profile, Expected(**expected), runs=(run,))  # type: ignore[arg-type]


def test_the_best_large_row_counts_and_not_the_average() -> None:
    judgement = judge(run((2**20, 20.0, 21.0), (GIB, 470.0, 471.0), (8 * GIB, 481.0, 482.0), (16 * GIB, 479.0, 478.0)))
    speed = judgement.speed
    assert [claim.state for claim in judgement.claims] == ["right", "complete", "fast enough"]
    assert (speed.measured, speed.size_bytes) == (482.0, 8 * GIB)
    assert speed.ceiling
    assert (speed.ceiling.value, speed.ceiling.what) == (700, "nvls all_reduce ceiling: link * 2(n-1)/(n+1)")
    assert speed.reference
    assert speed.reference.value == 482.26
    assert "ml-engineering" in speed.reference.what
    assert speed.reason == "99.9% of the reference, at least the 90% that pass; 69% of the ceiling"


@pytest.mark.parametrize(
    ("changes", "expected", "profile", "state", "reason", "allow"),
    [
        ({}, {}, "h200", "complete", "8 ranks, 1 node", None),
        ({}, {}, None, "not known", "neither a profile nor --ranks says how many there should be", None),
        ({}, {"ranks": 8}, None, "complete", "8 ranks, 1 node", None),
        # A GPU of the node is missing.
        ({"ranks": 7}, {}, "h200", "incomplete", "7 of 8 GPUs took part", "partial"),
        ({"ranks": 1}, {}, "h200", "incomplete", "1 of 8 GPUs took part", "partial"),
        # What the caller asserts.
        ({"ranks": 4}, {"ranks": 4}, "h200", "complete", "4 ranks", None),
        ({"ranks": 4}, {"ranks": 8, "nodes": 1}, "h200", "incomplete", "4 of 8 ranks took part", None),
        ({}, {"ranks": 16, "nodes": 2}, None, "incomplete", "8 of 16 ranks took part; 1 of 2 nodes took part", None),
        # The figures are of 8 ranks, whatever the caller says.
        ({"ranks": None, "nodes": None}, {"ranks": 4, "nodes": 1}, "h200", "incomplete", "busbw is 1.7500 * algbw, which does not fit 4 ranks", None),
        ({"ranks": None, "nodes": None}, {"ranks": 1, "nodes": 1}, None, "incomplete", "which does not fit 1 rank", None),
        # What the output does not list.
        ({"ranks": None, "nodes": None}, {}, "h200", "not known", "list of devices is incomplete; say how many with --ranks and --nodes", "partial"),
        ({"ranks": None, "nodes": None, "devices": ()}, {}, "h200", "not known", "does not list the ranks and nodes; say how many with --ranks and --nodes", "partial"),
        ({"ranks": None, "nodes": None}, {"ranks": 8, "nodes": 1}, "h200", "complete", "8 ranks", None),
        # Devices.
        ({"devices": (H100,)}, {}, "h200", "incomplete", f"it ran on {H100}, but h200 describes NVIDIA H200", None),
        ({"devices": (f"{H100} MIG 3g.40gb",)}, {}, "h100", "incomplete", "it ran on NVIDIA H100 80GB HBM3 MIG 3g.40gb", None),
        ({"devices": ("NVIDIA H20",)}, {}, "h100", "incomplete", "it ran on NVIDIA H20", None),
        ({"devices": ("NVIDIA H200", "NVIDIA GeForce RTX 5090",)}, {}, "h200", "incomplete", "RTX 5090", None),
        ({"devices": ("NVIDIA Graphics Device",)}, {}, "h200", "complete", "8 ranks", None),
        # Ranks that share a GPU.
        ({"gpus": 8}, {}, "h200", "complete", "8 ranks, 1 node", None),
        ({"gpus": 1}, {}, "h200", "incomplete", "8 ranks share 1 GPU; if these are hosts of the same name, say with --nodes how many", None),
        ({"gpus": 8, "ranks": 16}, {"nodes": 2}, "h200", "complete", "16 ranks, 2 nodes", None),
        ({"gpus": 8, "ranks": 16}, {"nodes": 4}, "h200", "incomplete", "1 of 4 nodes took part", None),
        ({"gpus": 15, "ranks": 16, "nodes": 2}, {"ranks": 16}, None, "incomplete", "16 ranks share 15 GPUs", None),
    ],
)  # fmt: skip
def test_participation(
    changes: dict[str, object], expected: dict[str, object], profile: str | None, state: str, reason: str,
    allow: Openness | None,
) -> None:  # fmt: skip
    claim = judge(run((GIB, 480.0, 480.0), **changes), profile, **expected).participation
    assert (claim.state, claim.allow) == (state, allow)
    assert reason in claim.reason


@pytest.mark.parametrize(
    ("files", "profile", "ranks", "standing", "reason"),
    [
        (1, None, None, "failed", "8 tables of one rank each: the ranks were not joined"),
        (1, "h200", None, "failed", "8 tables of one rank each: the ranks were not joined"),
        (8, "h200", None, "failed", "8 files with a table of one rank each: the ranks were not joined"),
        (8, None, 8, "failed", "8 files with a table of one rank each: the ranks were not joined"),
        (8, None, None, "skipped", "1 rank, 1 node; neither a profile nor --ranks"),
        (8, None, 1, "passed", "1 rank, 1 node"),
    ],
)
def test_ranks_that_were_not_joined(
    files: int, profile: str | None, ranks: int | None, standing: str, reason: str
) -> None:
    """Programs built without MPI print a table of one rank each, into one file or into one each."""
    alone = tuple(run((GIB, 0.0, 0.0), ranks=1, source=f"{n % files}.log") for n in range(8))
    judgements = judge_results(Results(runs=alone), shipped(profile) if profile else None, Expected(ranks))
    assert {j.worst().standing() for j in judgements} == {standing}
    assert reason in judgements[0].participation.reason


@pytest.mark.parametrize(
    ("changes", "state", "reason", "standing"),
    [
        ({}, "right", "complete", "passed"),
        ({"compared": False}, "not compared", "complete", "open"),
        ({"verdict": "wrong-data", "reason": "4 wrong"}, "wrong", "wrong-data: 4 wrong", "failed"),
        ({"verdict": "truncated", "reason": "no footer"}, "unfinished", "truncated: no footer", "failed"),
    ],
)
def test_data(changes: dict[str, object], state: str, reason: str, standing: str) -> None:
    judgement = judge(run((GIB, 480.0, 480.0), **changes))
    assert (judgement.data.state, judgement.data.reason) == (state, reason)
    assert judgement.worst().standing() == standing
    if standing == "failed":
        assert judgement.speed.reason == "its data failed, so its speed is not judged"


@pytest.mark.parametrize(
    ("changes", "rates", "profile", "state", "reason"),
    [
        ({}, (435.0, 430.0), "h200", "fast enough", "90.2% of the reference, at least the 90% that pass"),
        ({}, (433.0, 430.0), "h200", "too slow", "89.8% of the reference, below the 90% that pass"),
        ({}, (713.0, 100.0), "h200", "fast enough", "of the reference"),  # within the margin of 2 %
        ({}, (720.0, 100.0), "h200", "impossible", "103% of the ceiling"),
        # A ring is not held against NVLS, if the output says that it was one.
        ({}, (366.0, 365.5), "h200", "too slow", "100% of the reference with ring: was NCCL made to use it?"),
        ({"algorithms": ("ring",)}, (366.0, 365.5), "h200", "fast enough",
         "as ring; 81% of the ceiling"),
        ({"algorithms": ("ring",)}, (480.0, None), "h200", "impossible", "107% of the ceiling"),
        ({"algorithms": ("ring",), "collective": "alltoall", "devices": (H100,)}, (348.0, 347.0), "h100", "fast enough", ""),
        ({"algorithms": ("nvls",), "devices": ("NVIDIA A100-SXM4-80GB",)}, (230.0, 231.0), "a100-sxm", "not judged",
         "a100-sxm cannot run all_reduce, 8 ranks, 1 node with nvls"),
        # Without a reference, a floor is judged.
        ({"ranks": 16, "nodes": 2}, (360.0, None), "h200", "fast enough",
         "at least the floor of 200.0 GB/s (50% of the lowest ceiling, ring: min(link, W)); h200 has no reference for "
         "all_reduce, 16 ranks, 2 nodes; 48% of the ceiling"),
        ({"ranks": 16, "nodes": 2}, (50.0, None), "h200", "too slow", "below the floor of 200.0 GB/s"),
        # What moves between nodes in sendrecv is one rank's, over one card.
        ({"ranks": 16, "nodes": 2, "collective": "sendrecv"}, (8.4, None), "h200", "too slow", "17% of the ceiling"),
        ({"ranks": 4, "collective": "sendrecv", "devices": ("NVIDIA GH200 120GB",)}, (110.0, None), "gh200", "fast enough",
         "73% of the ceiling"),
        # What cannot be judged.
        ({"collective": None}, (480.0, None), "h200", "not judged", "the output does not say the collective"),
        ({"ranks": 1}, (0.0, None), "h200", "not applicable", "one rank moves nothing between GPUs"),
        ({}, (480.0, None), None, "not judged", "no profile says how fast it should be"),
    ],
)  # fmt: skip
def test_speed(
    changes: dict[str, object], rates: tuple[float, float | None], profile: str | None, state: str, reason: str
) -> None:
    claim = judge(run((4 * GIB, *rates), **changes), profile).speed
    assert claim.state == state
    assert reason in claim.reason


def test_sizes() -> None:
    small = judge(run((GIB // 2, 480.0, 480.0)))
    assert (small.speed.state, small.speed.allow) == ("not judged", "unjudged")
    assert "speed is judged at 1 GiB or more" in small.speed.reason
    assert judge(run((2**20, 720.0, 100.0))).speed.state == "impossible"
    rounded_down = run((GIB - GIB % (16 * 7), 459.0, 458.0), ranks=7)
    assert judge(rounded_down).speed.state == "fast enough"
    collapsed = judge(run((GIB, 480.0, 480.0), (2 * GIB, 52.0, 50.0))).speed
    assert (collapsed.state, collapsed.measured) == ("too slow", 480.0)
    assert judge(run((GIB, 52.0, 50.0), (2 * GIB, 480.0, 480.0))).speed.state == "fast enough"
    assert collapsed.reason == f"only 52 GB/s at {2 * GIB} bytes, less than half of the best"


def test_what_only_the_caller_knows() -> None:
    listed = run((8 * GIB, 386.56, 385.56), ranks=96, nodes=12, devices=())
    bare = listed.model_copy(update={"ranks": None, "nodes": None})
    assert judge(bare, "coreweave-h100").worst().standing() == "open"
    judgement = judge(bare, "coreweave-h100", ranks=96, nodes=12)
    assert (judgement.worst().standing(), judgement.subject) == ("passed", "all_reduce, 96 ranks, 12 nodes")
    assert "the output does not name the GPU, assumed to be coreweave-h100's" in judgement.speed.reason
    ring = judge(run((4 * GIB, 365.7, 365.5)), algorithms=("ring",)).speed
    assert ring.reference
    assert (ring.state, ring.reference.value) == ("fast enough", 367.61)
    with pytest.raises(ConfigError, match="--algorithm rings: unknown class of algorithms; use one of ring, nvls"):
        judge(run((GIB, 1.0, 1.0)), algorithms=("rings",))


@pytest.mark.parametrize(
    ("variables", "classes"),
    [
        ({}, ()),
        ({"NCCL_ALGO": "Ring"}, ("ring",)),
        ({"NCCL_ALGO": "allreduce:ring;allgather:pat"}, ("ring", "hierarchical")),
        ({"NCCL_ALGO": "^NVLS"}, ("ring", "hierarchical", "nvls-tree", "sharp", "pairwise")),
        ({"NCCL_NVLS_ENABLE": "0"}, ("ring", "hierarchical", "sharp", "pairwise")),
    ],
)
def test_variables_may_force_classes(variables: dict[str, str], classes: tuple[str, ...]) -> None:
    assert forced_classes(variables) == classes


@pytest.mark.parametrize(
    ("profile", "device", "rate", "state"),
    [
        ("gb200-nvl72", "NVIDIA GB200", 405.0, "fast enough"),  # the floor of its own: 0.4 * 900
        ("gb200-nvl72", "NVIDIA GB200", 300.0, "too slow"),
        ("coreweave-gb300-roce", "NVIDIA GB300", 405.0, "not judged"),
    ],
)
def test_floors_between_racks(profile: str, device: str, rate: float, state: str) -> None:
    racks = run((16 * GIB, rate, rate), ranks=720, nodes=180, devices=(device,))
    claim = judge(racks, profile).speed
    assert (claim.state, claim.allow) == (state, "unjudged" if state == "not judged" else None)


@pytest.mark.parametrize(("name", "cells", "profile", "state", "measured"), [
    # The worst pair counts; the diagonal, which is a copy within a GPU, does not.
    (WRITE, ((0.0, 396.0, 390.0), (395.0, 0.0, 340.0), (396.0, 396.0, 0.0)), "h200", "too slow", 340.0),
    (WRITE, ((None, 396.0), (360.0, None)), "h200", "fast enough", 360.0),
    (WRITE, ((2500.0, 396.0), (470.0, 2500.0)), "h200", "impossible", 470.0),
    (WRITE, (), "h200", "not judged", None),
    # Both directions may be twice the link.
    (BOTH, (*WAY, *WAY, *TOTAL), "h200", "fast enough", 782.0),
    (f"{BOTH}_total", TOTAL, "h200", "fast enough", 782.0),
    # Without a reference, a floor is judged.
    (READ, ((None, 230.0), (226.0, None)), "h200", "fast enough", 226.0),
    (READ, ((None, 394.0), (224.0, None)), "h200", "too slow", 224.0),
    (f"{BOTH}_total", ((None, 441.0), (440.0, None)), "h100", "too slow", 440.0),
    (BOTH, ((None, 440.0), (440.0, None)), "h100", "fast enough", 440.0),  # one direction, before 0.3
    ("host_to_device_memcpy_ce", ((30.0, 55.0),), "h100", "too slow", 30.0),
    ("host_to_device_bidirectional_memcpy_ce", ((30.0, 55.0),), "h100", "fast enough", 30.0),
    ("device_to_host_memcpy_ce", ((200.0,),), "gb200-nvl72", "fast enough", 200.0),
    (READ, ((None, 14.0), (14.0, None)), "a40", "not judged", 14.0),  # PCIe: no floor
    ("device_local_copy", ((1400.0, 1401.0),), "h200", "not applicable", None),
    (f"{BOTH}_read1", TOTAL, "h200", "impossible", 783.0),
    # Copies to and from hosts have no diagonal.
    ("host_to_device_memcpy_ce", ((40.0, 55.4, 55.4),), "h200", "too slow", 40.0),
    # Pairs without a switch.
    (READ, ((None, 140.0), (141.0, None)), "gh200", "fast enough", 140.0),
    (READ, ((None, 160.0), (141.0, None)), "gh200", "impossible", 160.0),
])  # fmt: skip
def test_speed_of_matrices(
    name: str, cells: tuple[tuple[float | None, ...], ...], profile: str, state: str, measured: float | None
) -> None:
    claim = judged(profile, tests=(matrix(name, *cells),)).speed
    assert (claim.state, claim.measured) == (state, measured)
    if state == "too slow" and len(cells) > 1:
        assert "the worst pair" in claim.reason
    standings = {"too slow": "failed", "impossible": "failed", "not judged": "open", "fast enough": "passed"}
    assert claim.standing() == standings.get(state)


@pytest.mark.parametrize(
    ("changes", "states"),
    [
        ({}, ("right", "incomplete", "fast enough")),
        ({"devices": ("NVIDIA H200",) * 8}, ("right", "complete", "fast enough")),
        ({"devices": ("NVIDIA H200",) * 16}, ("right", "incomplete", "fast enough")),
        ({"devices": ("NVIDIA GeForce RTX 5090",) * 2}, ("right", "incomplete", "not judged")),
        ({"verdict": "failed"}, ("unfinished", "incomplete", "not judged")),
        ({"verdict": "waived", "matrix": None, "unit": None}, ("not applicable", "not applicable", "not applicable")),
        ({"unit": "ns"}, ("right", "incomplete", "not applicable")),
    ],
)
def test_matrices(changes: dict[str, object], states: tuple[str, ...]) -> None:
    judgement = judged(tests=(matrix(WRITE, (None, 396.0), (395.0, None), **changes),))
    assert tuple(claim.state for claim in judgement.claims) == states


@pytest.mark.parametrize(
    ("name", "cells", "profile", "state", "allow"),
    [
        (WRITE, ((None, 396.0), (None, None)), "h200", "incomplete", "partial"),
        (f"{BOTH}_total", ((None, None), (780.0, None)), "h200", "incomplete", "partial"),
        (WRITE, ((None, 50.0, None), (50.0, None, None), (None, None, None)), "a100-pcie", "incomplete", "partial"),
        # Nothing says whether they should see each other.
        (WRITE, ((None, 396.0), (None, None)), None, "not known", None),
        ("device_local_copy", ((1400.0, None), (None, 1401.0)), "h200", "complete", None),
    ],
)
def test_pairs_that_were_not_measured(
    name: str, cells: tuple[tuple[float | None, ...], ...], profile: str | None, state: str, allow: Openness | None
) -> None:
    claim = judged(profile, Expected(len(cells[0])), tests=(matrix(name, *cells),)).participation
    assert (claim.state, claim.allow) == (state, allow)
    if state != "complete":
        assert "were not measured: N/A" in claim.reason


@pytest.mark.parametrize(
    ("average", "unit", "test", "profile", "state", "measured"),
    [
        (391.0, "Gb/sec", "RDMA_Write BW", "h200", "fast enough", 391.0 / 8),
        (350.0, "Gb/sec", "RDMA_Write BW", "h200", "too slow", 350.0 / 8),
        (46610.0, "MB/sec", "RDMA_Write BW", "h200", "fast enough", 46610 * 2**20 / 1e9),
        (46610.0, None, "RDMA_Write BW", "h200", "not judged", None),
        (760.0, "Gb/sec", "RDMA_Write Bidirectional BW", "h200", "fast enough", 760.0 / 8),
        (0.3, "Gb/sec", "Atomic Fetch_And_Add BW", "h200", "not applicable", 0.3 / 8),
        # A loopback at line rate is within the margin.
        (24056.72, "MB/sec", "RDMA_Write BW", "a100-sxm", "fast enough", 24056.72 * 2**20 / 1e9),
    ],
)
def test_perftest_in_every_unit(
    average: float, unit: str | None, test: str, profile: str, state: str, measured: float | None
) -> None:
    claim = judged(profile, tables=(table(average, unit, test),)).speed
    assert claim.state == state
    assert claim.measured == (measured if measured is None else pytest.approx(measured))


def test_perftest_that_failed_and_latencies() -> None:
    failed = judged(tables=(table(390.0, "Gb/sec", verdict="failed", reason="no route"),))
    assert (failed.data.state, failed.data.reason) == ("unfinished", "failed: no route")
    assert failed.speed.standing() == "skipped"  # what failed is said once
    times = table(1.0, "Gb/sec", rows=(TableRow(size_bytes=2, latency_us={"min": 1.0}),))
    assert judged(tables=(times,)).worst().standing() == "skipped"
    small = judged(tables=(table(1.0, "Gb/sec", rows=(TableRow(size_bytes=2, bw_average=9.0),)),))
    assert (small.speed.allow, small.worst().standing()) == ("unjudged", "open")
    assert small.speed.reason.startswith("the largest size is 2 bytes; speed is judged at 65536 bytes or more")


def test_tools_that_never_compare_data_say_so() -> None:
    """It is no failure, as nobody can ask them to, and no pass of data."""
    never = Results(
        tables=(
            table(390.0, "Gb/sec"),
            table(390.0, "MB/s", "OSU Bandwidth", tool="osu"),
            table(390.0, "MiB/sec", "put", tool="ucx_perftest"),
        ),
        runs=(run((GIB, 480.0, 480.0), tool="all_reduce_bench", compared=False),),
    )
    claims = {(j.data.state, j.data.standing()) for j in judge_results(never, shipped("h200"))}
    assert claims == {("not compared", "skipped")}
    validated = table(390.0, "MB/s", "OSU Bandwidth", tool="osu", compared=True)
    assert judged(tables=(validated,)).data.state == "right"


@pytest.mark.parametrize(
    ("verdicts", "state", "standing"),
    [
        (("ok", "ok"), "right", "passed"),
        (("ok", "failed"), "wrong", "failed"),
        (("ok", "warned"), "not compared", "open"),
        (("waived", "waived"), "not compared", "open"),
    ],
)
def test_diagnostics(verdicts: tuple[str, ...], state: str, standing: str) -> None:
    """The software alone, which passes in all of these, is no test of the hardware."""
    software = Diagnostic(source="d", category="Deployment", test="software")
    found = [
        Diagnostic.model_validate(
            {"source": "d", "category": "Hardware", "test": f"t{n}", "entity": f"GPU {n}", "verdict": verdict}
        )
        for n, verdict in enumerate(verdicts)
    ]
    judgement = judged(None, diagnostics=(software, *found))
    assert (judgement.data.state, judgement.worst().standing()) == (state, standing)
    assert judge_results(Results(diagnostics=(*found,)), shipped("h200"))[0].participation.allow in ("partial", None)


def test_what_is_accepted_by_name() -> None:
    part = judge(run((GIB, 459.0, 459.0), ranks=7, compared=False))
    assert [claim.standing() for claim in part.claims] == ["open", "failed", "passed"]
    assert part.worst() is part.participation
    assert part.worst(("partial",)) is part.data
    allowed = ("partial", "unvalidated")
    assert part.worst(allowed).standing(allowed) == "skipped"


@pytest.mark.parametrize("profile", ["h100", "h200", None])
@pytest.mark.parametrize("cell", [0.0, -394.1])
def test_a_copy_that_moved_nothing_is_no_pass(cell: float, profile: str | None) -> None:
    data = judged(profile, tests=(matrix(WRITE, (None, 394.1), (cell, None)),)).data
    assert data.standing() == "failed"
    assert data.reason == "1 of 2 figures are not above 0"
