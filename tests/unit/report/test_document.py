"""What a report claims, and the exit status that follows."""

from __future__ import annotations

import json

import pytest

from imagebuild.bench import BandwidthTest, Diagnostic, Results
from imagebuild.report import Report, format_bytes, format_number, one_line, report_markdown, visible
from tests.report_samples import ABOUT, BAD, GIB, GOOD, judgement, row, run


def test_all_well_is_0() -> None:
    assert (GOOD.overall, GOOD.exit_status, GOOD.headline) == ("ok", 0, "All is well")
    assert GOOD.counts == "4 passed, 0 failed, 0 skipped"


@pytest.mark.parametrize(
    "verdict", ["wrong-data", "comm-failure", "cuda-failure", "timeout", "truncated", "no-data", "failed"]
)
def test_every_verdict_but_ok_is_1(verdict: str) -> None:
    assert Report(about=ABOUT, runs=(run(verdict=verdict),)).exit_status == 1


@pytest.mark.parametrize(
    ("outcome", "status", "state"),
    [
        ("passed", 0, "passed"),
        ("failed", 1, "failed"),
        ("measurement-error", 1, "failed"),
        ("regression", 1, "failed"),
        ("not-comparable", 0, "skipped"),
    ],
)
def test_speed_is_an_assertion_of_its_own(outcome: str, status: int, state: str) -> None:
    report = Report(about=ABOUT, runs=(run(),), judgements=(judgement("all_reduce", 470, 700, 482, outcome),))
    states = {assertion.kind: assertion.state for assertion in report.assertions}
    assert states == {"correctness": "passed", "speed": state}
    assert report.exit_status == status


def test_nothing_read_is_5_and_says_which_files() -> None:
    report = Report(about=ABOUT, nothing_in=("a.log",))
    assert (report.overall, report.exit_status) == ("nothing-read", 5)
    assert [(assertion.subject, assertion.state) for assertion in report.assertions] == [("a.log", "failed")]


def test_a_named_file_without_result_fails_beside_good_ones() -> None:
    assert GOOD.model_copy(update={"nothing_in": ("empty.log",)}).exit_status == 1


def test_only_skips_is_not_verified() -> None:
    waived = BandwidthTest(source="n", name="x", unit=None, status="waived", matrix=None, sum=None)
    report = Report(about=ABOUT, tests=(waived,))
    assert (report.overall, report.exit_status) == ("not-verified", 1)


def test_a_diagnosis_of_skips_only_is_not_verified() -> None:
    skip = Diagnostic(source="d.json", category="Stress", test="sm_stress", status="skip")
    report = Report(about=ABOUT, runs=(run(),), diagnostics=(skip,))
    assert [failure.word for failure in report.failures] == ["not-verified"]


def test_unknown_states_are_failures() -> None:
    odd = BandwidthTest(source="n", name="x", unit=None, status="exploded", matrix=None, sum=None)
    assert Report(about=ABOUT, tests=(odd,)).exit_status == 1


def test_json_has_what_was_read_at_the_top_and_null_for_unknown() -> None:
    data = json.loads(BAD.model_dump_json())
    assert set(Results.model_fields) | {"about", "judgements", "verifications", "nothing_in"} == set(data)
    first = data["runs"][0]
    assert {"source", "tool", "tool_version", "collective", "ranks", "rows", "partial_rows", "avg_busbw_gb_s",
            "out_of_bounds", "wrong_total", "verdict", "reason"} <= set(first)  # fmt: skip
    assert set(first["rows"][0]["out_of_place"]) == {"time_us", "algbw_gb_s", "busbw_gb_s", "wrong"}
    assert first["avg_busbw_gb_s"] is None
    assert Report.model_validate(data) == BAD


def measured(report: Report) -> list[tuple[float | None, ...]]:
    """For each run, what the verdicts on its speed measured."""
    return [tuple(verdict.measured for verdict in entry.speed) for entry in report.entries]


def test_verdicts_of_equal_runs_go_to_them_in_order() -> None:
    runs = (run(peak=480.0), run("all_gather"), run(peak=400.0))
    verdicts = tuple(judgement("all_reduce", speed, 700, 482) for speed in (480.0, 400.0))
    assert measured(Report(about=ABOUT, runs=runs, judgements=verdicts)) == [(480.0,), (), (400.0,)]


def test_a_verdict_with_ranks_that_the_log_does_not_tell() -> None:
    verdict = judgement("all_reduce", 480.0, 700, 482)
    assert measured(Report(about=ABOUT, runs=(run(ranks=None),), judgements=(verdict,))) == [(480.0,)]


def test_names_tell_runs_apart() -> None:
    runs = (run(), run(source="b/mpi.log"), run(source="c/mpi.log"), run("sendrecv", ranks=16, nodes=2))
    assert [entry.name for entry in Report(about=ABOUT, runs=runs).entries] == [
        "all_reduce, 8 ranks, all_reduce.log",
        "all_reduce, 8 ranks, mpi.log #1",
        "all_reduce, 8 ranks, mpi.log #2",
        "sendrecv, 16 ranks, 2 nodes",
    ]


def test_the_best_value_is_of_either_placement() -> None:
    runs = (run("a", rows=(row(GIB, 300.0, 301.25), row(2 * GIB, 300.5))), run("b", rows=(row(GIB, None),)))
    text = report_markdown(Report(about=ABOUT, runs=runs))
    assert "| a, 8 ranks | ok | 301.2 GB/s at 1 GiB |" in text
    assert "| b, 8 ranks | ok | – |" in text


def test_tests_that_were_skipped_for_the_same_reason_are_listed_once() -> None:
    waived = tuple(BandwidthTest(source="n", name=n, unit=None, status="waived", matrix=None, sum=None) for n in "aab")
    text = report_markdown(Report(about=ABOUT, tests=waived))
    assert "\n- waived: a (2 times), b: nvbandwidth gives no reason\n" in text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1000, "1000 B"),
        (1024, "1 KiB"),
        (3 << 19, "1.5 MiB"),
        (8 * GIB, "8 GiB"),
        (26549638485, "24.73 GiB"),
    ],
)
def test_sizes(size: int, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (0.0, "0"), (482.27, "482.3"), (12.345, "12.35"), (0.000457, "0.000457")]
)
def test_numbers(value: float | None, text: str) -> None:
    assert format_number(value) == text


def test_text_that_acts_on_terminals_is_harmless() -> None:
    assert (
        visible("\x1b[31mred\x1b[0m\x1b]0;title\x07\x00\r\nnext\rlast\u202e\ud800")
        == "red\ufffd\nnext\nlast\ufffd\ufffd"
    )
    assert one_line("a\n\n  b" + "c" * 400).startswith("a bccc")
    assert len(one_line("c" * 400)) == 300
