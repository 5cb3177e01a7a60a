"""JUnit, Markdown and the terminal."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import pytest

from imagebuild.report import Report, print_report, report_junit, report_markdown
from tests.report_samples import ABOUT, BAD, GOOD, HOSTILE, judgement, run


def test_junit_has_a_case_for_each_assertion_and_counts_them() -> None:
    root = ET.fromstring(report_junit(BAD))
    cases = root.findall("testsuite/testcase")
    assert len(cases) == len(BAD.assertions) == int(root.attrib["tests"])
    assert len(root.findall(".//failure")) == int(root.attrib["failures"]) == 6
    assert len(root.findall(".//skipped")) == int(root.attrib["skipped"]) == 4
    assert sum(int(suite.attrib["tests"]) for suite in root) == len(cases)


def test_junit_separates_correctness_from_speed() -> None:
    slow = Report(about=ABOUT, runs=(run(),), judgements=(judgement("all_reduce", 200, 700, 482, "failed"),))
    cases = ET.fromstring(report_junit(slow)).iter("testcase")
    failures = {case.attrib["classname"]: case.find("failure") for case in cases}
    assert failures["imagebuild.correctness"] is None
    assert failures["imagebuild.speed"] is not None


def test_junit_not_comparable_is_skipped_with_its_reason() -> None:
    root = ET.fromstring(report_junit(BAD))
    messages = [skip.attrib["message"] for skip in root.iter("skipped")]
    assert "not-comparable: h100-sxm has no reference for 2 nodes" in messages


def test_junit_names_are_unique_in_a_suite() -> None:
    root = ET.fromstring(report_junit(Report(about=ABOUT, runs=(run(), run()))))
    names = [case.attrib["name"] for case in root.iter("testcase")]
    assert names == ["all_reduce, 8 ranks: correctness", "all_reduce, 8 ranks: correctness #2"]


def test_junit_survives_hostile_text() -> None:
    text = report_junit(Report(about=ABOUT, runs=(run(verdict="failed", reason=HOSTILE, source=HOSTILE),)))
    failure = next(ET.fromstring(text).iter("failure"))
    assert "<script>" in failure.attrib["message"]
    assert "<script" not in text


def test_junit_keeps_the_end_of_long_output() -> None:
    checks = list(BAD.verifications[0].checks)
    checks[1] = checks[1].model_copy(update={"output": "x" * 200_000 + "the end"})
    long = BAD.model_copy(
        update={"verifications": (BAD.verifications[0].model_copy(update={"checks": tuple(checks)}),)}
    )
    out = next(ET.fromstring(report_junit(long)).iter("system-out")).text or ""
    assert out.endswith("the end")
    assert len(out) == 64 * 1024


def test_markdown_begins_with_the_verdict_and_has_a_row_for_each_run() -> None:
    text = report_markdown(GOOD)
    assert text.startswith("## ✅ All is well\n\n4 passed, 0 failed, 0 skipped. Profile h100-sxm.")
    assert re.search(r"^\| all_reduce, 8 ranks \| ok \| 476\.7 GB/s at 8 GiB \| 68% \| passed \|$", text, re.M)


def test_markdown_lists_problems_and_skips() -> None:
    text = report_markdown(BAD)
    problems = text[text.index("### Problems") : text.index("### Collectives")]
    assert len(re.findall("^- ", problems, re.M)) == 6
    assert "<details><summary>4 skipped</summary>" in text


def test_markdown_is_text_only() -> None:
    shown = report_markdown(
        Report(about=ABOUT, runs=(run(verdict="failed", reason=HOSTILE + " https://x.example\n# y"),))
    )
    assert "<script" not in shown.replace(r"\<", "")
    assert "@all" not in shown
    assert "\n# y" not in shown
    assert "https://" not in shown
    row = next(line for line in shown.splitlines() if line.startswith("| all"))
    assert len(re.findall(r"(?<!\\)\|", row)) == 6


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("all_reduce", "all_reduce"),
        ("_x_ y", r"\_x\_ y"),
        ("a * b", r"a \* b"),
        ("<b>", r"\<b\>"),
        ("&lt;", "&amp;lt;"),
    ],
)
def test_markdown_cells(text: str, shown: str) -> None:
    report = Report(about=ABOUT, runs=(run(text, ranks=None),))
    assert f"\n| {shown} | ok |" in report_markdown(report)


def test_markdown_of_thousands_of_problems_fits_a_comment() -> None:
    runs = tuple(run(verdict="failed", reason="r" * 200, rows=()) for _ in range(3000))
    text = report_markdown(Report(about=ABOUT, runs=runs))
    assert text.count("and 2950 more") == 2
    assert len(text) < 65_536


def test_markdown_that_is_too_long_says_so() -> None:
    runs = tuple(
        run(verdict="failed", reason="*" * 300, source="/" + "*" * 300, collective="*" * 300, rows=())
        for _ in range(99)
    )
    text = report_markdown(Report(about=ABOUT, runs=runs))
    assert len(text) < 65_536
    assert text.endswith("The rest does not fit here.\n")


def test_terminal_shows_results_problems_skips_and_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(BAD)
    out = capsys.readouterr().out
    assert re.search(r"^all_gather, 8 ranks +ok +359\.5 GB/s at 8 GiB +passed$", out, re.M)
    assert re.search(r"^device_to_device_memcpy_read_ce +passed +214\.7 to 394\.0 GB/s", out, re.M)
    assert re.search(r"^ucx_perftest overhead, thread 0 +ok +10531\.2 MiB/s, 0\.09 µs at 1 MiB", out, re.M)
    assert re.search(r"^RDMA_Read Latency +ok +3\.90 µs at 2 B", out, re.M)
    assert "✗ reduce_scatter, 8 ranks, 1 node (logs/reduce_scatter.log): failed: 52% of the reference" in out
    assert "- waived: multinode_device_to_device_memcpy_read_ce: nvbandwidth gives no reason" in out
    assert "logs/hung.log: 2 lines look like results and could not be read, for example:" in out
    assert out.endswith("6 of 26 assertions failed (16 passed, 6 failed, 4 skipped; unread lines: 2)\n")
    assert "\x1b" not in out
    assert "\x00" not in out


def test_terminal_takes_brackets_for_text(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(Report(about=ABOUT, runs=(run(verdict="failed", reason="[red]x[/] [bold]y[/wrong]", source="[/]"),)))
    assert "[red]x[/] [bold]y[/wrong]" in capsys.readouterr().out
