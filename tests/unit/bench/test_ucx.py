"""ucx_perftest: logs of a real one in tests/data/ucx-logs."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from imagebuild.bench import UcxResult
from tests.unit.bench.outputs import read_part

LOGS = Path(__file__).parents[2] / "data" / "ucx-logs"


def log(name: str) -> str:
    return (LOGS / f"{name}.txt").read_text()


parse = partial(read_part, "ucx")


def only(text: str) -> UcxResult:
    ((result,), unread) = parse(text)
    assert unread == ()
    assert isinstance(result, UcxResult)
    return result


def test_latency() -> None:
    assert only(log("latency")) == UcxResult(
        source="log",
        title="tag match latency",
        size_bytes=8,
        iterations=20000,
        latency_us={"typical": 0.160, "average": 15.054, "overall": 88.106},
        bandwidth_mib_s={"average": 0.51, "overall": 0.09},
        rate_msg_s={"average": 66427.0, "overall": 11350.0},
    )


@pytest.mark.parametrize(
    ("name", "title", "size", "overall"),
    [
        ("bandwidth", "tag match bandwidth", 1048576, 2970.24),
        ("final-only", "tag match bandwidth", 4096, 76.21),
        ("percentile", "tag match latency", 8, 13.51),
        ("threads", "tag match latency", 8, 1.52),
        ("transport", "active message latency", 8, 0.01),
        ("mpi", "overhead", None, 582.28),
    ],
)
def test_real_logs(name: str, title: str, size: int | None, overall: float) -> None:
    result = only(log(name))
    assert (result.title, result.size_bytes, result.bandwidth_mib_s["overall"], result.final) == (
        title,
        size,
        overall,
        True,
    )


def test_another_percentile_and_totals_of_several_threads() -> None:
    assert only(log("percentile")).latency_us == {"p99": 0.186, "average": 0.565, "overall": 0.565}
    result = only(log("threads"))
    assert (result.latency_us, result.rate_msg_s) == ({"overall": 10.050}, {"overall": 199129.0})


def test_thousands_may_be_grouped() -> None:
    grouped = log("bandwidth").replace(" 20000 ", "20,000 ").replace("   2331 ", "  2,331 ")
    assert only(grouped) == only(log("bandwidth"))


def test_progress_without_a_result_is_not_final() -> None:
    text = log("bandwidth")
    result = only(text[: text.index("Final:")])
    assert (result.final, result.thread, result.iterations, result.bandwidth_mib_s["overall"]) == (
        False,
        0,
        18326,
        3046.50,
    )
    assert only(text[: text.index("Final:")].replace("[thread 0]", " " * 10)).final is False


def test_a_row_for_each_thread() -> None:
    """As versions without a total print it."""
    text = (
        log("latency")
        .replace("Final:  ", "[thread 1]")
        .replace("[thread 0]              2693", "[thread 1]              2693")
    )
    output = parse(text)
    assert [(result.thread, result.iterations) for result in output.items] == [(0, 1652), (1, 20000)]


def test_log_lines_between_header_and_rows() -> None:
    noise = (
        "[1795246298.055023] [node1:178  :0]    ucp_context.c:1979 UCX  WARN  network device 'eth9' is not available\n"
    )
    text = log("latency").replace("[thread 0]               786", noise + "[thread 0]               786")
    assert only(text) == only(log("latency"))


def test_a_failure_has_its_reason() -> None:
    result = only(log("refused"))
    assert (result.title, result.final, result.latency_us) == (None, False, {})
    assert (
        result.reason
        == "client failed. connect() failed: Connection refused; failed to setup RTE transport: Input/output error"
    )
    assert [result.reason != "" for result in parse(log("latency") + log("refused")).items] == [False, True]


def test_the_name_of_another_run_is_not_taken() -> None:
    """The client of one run, then the server of the next."""
    assert only(log("mpi") + log("latency").partition("+--------------+")[0]).title == "overhead"
    assert only(log("latency").partition("+--------------+")[0] + log("mpi")).title == "overhead"


def test_runs_after_each_other() -> None:
    output = parse("".join(log(name) for name in ("latency", "bandwidth", "mpi", "latency")))
    assert [result.title for result in output.items] == [
        "tag match latency", "tag match bandwidth", "overhead", "tag match latency",
    ]  # fmt: skip


def test_rows_that_are_cut_are_counted() -> None:
    text = log("latency")
    output = parse(text[: text.index(" 66427")])
    assert output.unread == ("Final:                 20000      0.160    15.054    88.106        0.51       0.09",)
    assert [result.final for result in output.items] == [False]


@pytest.mark.parametrize("name", ["latency", "bandwidth", "final-only", "percentile", "transport", "mpi"])
def test_a_rate_that_is_cut_is_no_rate(name: str) -> None:
    text, whole = log(name).rstrip(), only(log(name))
    last = whole.rate_msg_s["overall"]
    for lost in range(1, len(str(int(last or 0)))):
        output = parse(text[:-lost])
        assert [result for result in output.items if result.final] == []
        assert len(output.unread) == 1


def test_a_matrix_after_a_result_is_no_row() -> None:
    matrix = "Running a_b.\n 0     1.00      2.00      3.00      4.00  5.00  6 7\n"
    assert only(log("latency") + matrix) == only(log("latency"))
