"""Results of benchmarks in checks: whether they are good, and what is said about their speed."""

from pathlib import Path

import pytest

from imagebuild.bench import PerftestTable, Results, Run
from imagebuild.project import Check, CheckResult
from imagebuild.verify import correctness_problem, judged_speed, read_results
from tests.unit.bench import speed_fakes
from tests.unit.bench.speed_fakes import shipped


def copy(verdict: str) -> Results:
    test = {"source": "s", "name": "copy", "unit": "GB/s", "verdict": verdict, "matrix": None, "sum": 1}
    return Results.model_validate({"tests": [test]})


def memory(verdict: str) -> Results:
    return Results.model_validate(
        {"diagnostics": [{"source": "s", "category": None, "test": "memory", "verdict": verdict}]}
    )


PUT = PerftestTable(source="s", tool="ucx_perftest", test="put", unit="MiB/sec")


CHECK = Check(name="all-reduce", description="d", run="x", results="nccl-tests")


def run(busbw: float = 300.0, **changes: object) -> Run:
    return speed_fakes.run((1 << 33, busbw, busbw), **{"device": "NVIDIA H100 80GB HBM3", **changes})


def result(*runs: Run, outcome: str = "passed") -> CheckResult:
    return CheckResult.model_validate(
        {"component": "nccl-tests", "check": "all-reduce", "outcome": outcome, "results": Results(runs=runs)}
    )


@pytest.mark.parametrize(
    ("tool", "results", "message"),
    [
        ("nccl-tests", Results(runs=(run(),)), ""),
        ("nccl-tests", Results(runs=(run(), run(verdict="wrong-data", reason="3 wrong"))), "wrong-data: 3 wrong"),
        ("nccl-tests", Results(), "no result of nccl-tests in the output"),
        ("nvbandwidth", copy("ok"), ""),
        ("nvbandwidth", copy("failed"), "copy: failed"),
        ("nvbandwidth", copy("waived"), "no result of nvbandwidth"),
        ("dcgmi", memory("ok"), ""),
        ("dcgmi", memory("warned"), ""),
        ("dcgmi", memory("failed"), "memory: failed"),
        ("dcgmi", memory("waived"), "no result of dcgmi"),
        ("ucx_perftest", Results(tables=(PUT,)), ""),
        ("ucx_perftest", Results(tables=(PUT.model_copy(update={"verdict": "truncated"}),)), "put: truncated"),
        ("perftest", Results(tables=(PUT,)), "no result of perftest"),
    ],
)
def test_what_makes_results_bad(tool: str, results: Results, message: str) -> None:
    assert message in correctness_problem(results, tool)
    assert bool(correctness_problem(results, tool)) is bool(message)


def test_a_log_is_read_under_the_check_s_name(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("nothing that a benchmark prints\n")
    assert read_results(log, "nccl-tests/all-reduce") == Results()
    log.write_text(
        "#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong\n"
        "  8589934592    2147483648     float     sum      -1    41090  209.05  365.84      0    41085  209.08  365.88      0\n"
        "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 365.86\n"
    )
    found = read_results(log, "nccl-tests/all-reduce")
    assert [r.source for r in found.runs] == ["nccl-tests/all-reduce"]
    assert [s.path for s in found.sources] == ["nccl-tests/all-reduce"]


SEVERAL = CHECK.model_copy(update={"needs": ("gpus>=2", "nodes>=2")})


@pytest.mark.parametrize(
    ("checked", "check", "outcome", "message"),
    [
        (result(run(480.0)), CHECK, "passed", ""),
        (result(run(100.0)), CHECK, "failed", "all_reduce, 8 ranks, 1 node: too slow"),
        (result(run(2000.0)), CHECK, "failed", "impossible"),
        (result(run(device="NVIDIA A40")), CHECK, "failed", "it ran on NVIDIA A40"),
        (result(run(360.0, ranks=4)), CHECK, "passed", ""),
        (result(run(), outcome="failed"), CHECK, "skipped", "its data are not right"),
        (result(run(30.0, nodes=2)), SEVERAL, "skipped", "its nodes are containers of one host"),
    ],
)
def test_speed_is_a_result_of_its_own(checked: CheckResult, check: Check, outcome: str, message: str) -> None:
    (speed,) = judged_speed(checked, check, shipped("h100"), {}, one_host=True)
    assert (speed.check, speed.outcome, message in speed.reason) == ("all-reduce-speed", outcome, True)


def test_what_was_not_measured_has_no_speed() -> None:
    assert not list(judged_speed(result(run(), outcome="skipped"), CHECK, shipped("h100"), {}))
    assert not list(judged_speed(result(run()), Check(name="x", description="d", run="x"), shipped("h100"), {}))
