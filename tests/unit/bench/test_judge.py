"""The three claims about a result: data, participation and speed."""

from typing import Any

import pytest

from imagebuild.bench.judge import Expected, judge_results
from imagebuild.bench.models import BandwidthTest, Diagnostic, Judgement, Results, Run, TableRow
from imagebuild.core.errors import ConfigError
from tests.conftest import data
from tests.unit.bench.speed_fakes import GIB, matrix, run, shipped, table

WRITE = "device_to_device_memcpy_write_ce"
EIGHT = tuple(tuple(None if row == column else 396.0 for column in range(8)) for row in range(8))


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


CLAIMS = data("bench/claims")


CHECKED = {
    "participation": ["allow"],
    "sizes": ["allow"],
    "pairs": ["allow"],
    "matrices": ["measured"],
    "tables": ["measured"],
}


@pytest.mark.parametrize(("kind", "row"), [(kind, row) for kind, rows in CLAIMS.items() for row in rows], ids=str)
def test_claims(kind: str, row: dict[str, Any]) -> None:
    expected, changes = row.get("expected", {}), row.get("changes", {})
    results: dict[str, object] = {}
    if "cells" in row:
        results["tests"] = (matrix(row["name"], *row["cells"]),)
        expected = {"ranks": len(row["cells"][0])} if kind == "pairs" else expected
    elif "average" in row:
        changes = {name: row[name] for name in ("tool", "devices") if name in row}
        if "sizes" in row:
            changes["rows"] = tuple(TableRow(size_bytes=size, bw_average=rate) for size, rate in row["sizes"].items())
        results["tables"] = (table(row["average"], row["unit"], row["test"], **changes),)
    else:
        rows = row.get("rows") or [[4096, *row["rates"]] if "rates" in row else [1024, 480.0, 480.0]]
        results["runs"] = (run(*((int(size * 2**20), *rates) for size, *rates in rows), **changes),)
    judgement = judged(row.get("profile", "h200"), Expected(**expected), **results)
    claim = judgement.participation if kind in ("participation", "pairs") else judgement.speed
    names = ["state", *CHECKED.get(kind, ())]
    assert {name: getattr(claim, name) for name in names} == pytest.approx({name: row.get(name) for name in names})
    assert row.get("reason", "") in claim.reason


@pytest.mark.parametrize(
    ("files", "profile", "ranks", "standing", "reason"), data("bench/cases")["ranks-that-were-not-joined"]
)
def test_ranks_that_were_not_joined(
    files: int, profile: str | None, ranks: int | None, standing: str, reason: str
) -> None:
    """Programs without MPI print a table with one rank each, to one file or to separate files."""
    alone = tuple(run((GIB, 0.0, 0.0), ranks=1, source=f"{n % files}.log") for n in range(8))
    judgements = judge_results(Results(runs=alone), shipped(profile) if profile else None, Expected(ranks))
    assert {j.worst().standing() for j in judgements} == {standing}
    assert reason in judgements[0].participation.reason


@pytest.mark.parametrize(("changes", "state", "reason", "standing"), data("bench/cases")["data"])
def test_data(changes: dict[str, object], state: str, reason: str, standing: str) -> None:
    judgement = judge(run((GIB, 480.0, 480.0), **changes))
    assert (judgement.data.state, judgement.data.reason) == (state, reason)
    assert judgement.worst().standing() == standing
    if standing == "failed":
        assert judgement.speed.reason == "its data failed, so its speed is not judged"


def test_what_only_the_caller_knows() -> None:
    listed = run((8 * GIB, 386.56, 385.56), ranks=96, nodes=12, devices=())
    bare = listed.model_copy(update={"ranks": None, "nodes": None})
    assert judge(bare, "coreweave-h100").worst().standing() == "open"
    judgement = judge(bare, "coreweave-h100", ranks=96, nodes=12)
    assert (judgement.worst().standing(), judgement.subject) == ("passed", "all_reduce, 96 ranks, 12 nodes")
    assert (
        "the output does not name the GPU; imagebuild assumes that it is the GPU of coreweave-h100"
        in judgement.speed.reason
    )
    ring = judge(run((4 * GIB, 365.7, 365.5)), algorithms=("ring",)).speed
    assert ring.reference
    assert (ring.state, ring.reference.value) == ("fast enough", 367.61)
    with pytest.raises(ConfigError, match="--algorithm rings: unknown class of algorithms; use one of ring, nvls"):
        judge(run((GIB, 1.0, 1.0)), algorithms=("rings",))


@pytest.mark.parametrize(("changes", "states"), data("bench/cases")["matrices"])
def test_matrices(changes: dict[str, object], states: list[str]) -> None:
    cells = EIGHT if changes.pop("eight", False) else ((None, 396.0), (395.0, None))
    made = BandwidthTest.model_validate(matrix(WRITE, *cells).model_dump() | changes)
    assert [claim.state for claim in judged(tests=(made,)).claims] == states


def test_perftest_that_failed_and_latencies() -> None:
    failed = judged(tables=(table(390.0, "Gb/sec", verdict="failed", reason="no route"),))
    assert (failed.data.state, failed.data.reason) == ("unfinished", "failed: no route")
    assert failed.speed.standing() == "skipped"  # a failure is reported once
    times = table(1.0, "Gb/sec", rows=(TableRow(size_bytes=2, latency_us={"min": 1.0}),))
    assert judged(tables=(times,)).worst().standing() == "skipped"
    small = judged(tables=(table(1.0, "Gb/sec", rows=(TableRow(size_bytes=2, bw_average=9.0),)),))
    assert (small.speed.allow, small.worst().standing()) == ("unjudged", "open")
    assert small.speed.reason.startswith("the largest size is 2 bytes; speed is judged at 65536 bytes or more")


def test_tools_that_never_compare_data_say_so() -> None:
    """This is not a failure, because nobody can turn validation on, and the data do not pass."""
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


@pytest.mark.parametrize(("verdicts", "state", "standing"), data("bench/cases")["diagnostics"])
def test_diagnostics(verdicts: tuple[str, ...], state: str, standing: str) -> None:
    """Software tests, which pass in all cases, are not tests of the hardware."""
    software = Diagnostic(source="d", category="Deployment", test="software")
    found = [
        Diagnostic.model_validate(
            {"source": "d", "category": "Hardware", "test": "memory", "entity": f"GPU {n}", "verdict": verdict}
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


@pytest.mark.parametrize(
    ("rate", "subject"), [(360.0, "all_gather, 16 ranks, 2 nodes"), (45.0, "unknown collective, 16 ranks, 2 nodes")]
)
def test_a_collective_that_cannot_be_so_fast_is_left_out(rate: float, subject: str) -> None:
    result = run((4 * GIB, rate, rate), ranks=16, nodes=2, collective=None, candidates=("all_gather", "alltoall"))
    assert judge(result).subject == subject
    assert judge(result, None).subject.startswith("unknown")
