"""JUnit, Markdown and the terminal."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import pytest

from imagebuild.report import print_report, report_junit, report_markdown
from tests.report_samples import BAD, GOOD, HOSTILE, judgement, report, run


def test_junit_has_a_case_for_each_assertion_and_counts_them() -> None:
    root = ET.fromstring(report_junit(BAD))
    cases = root.findall("testsuite/testcase")
    assert len(cases) == len(BAD.assertions) == int(root.attrib["tests"])
    assert len(root.findall(".//failure")) == int(root.attrib["failures"]) == len(BAD.problems) == 6
    skipped = [skip.attrib["message"] for skip in root.iter("skipped")]
    assert len(skipped) == int(root.attrib["skipped"]) == len(BAD.skips)
    assert "not judged: h100-sxm has no reference for 2 nodes" in skipped
    assert sum(int(suite.attrib["tests"]) for suite in root) == len(cases)


def test_junit_separates_correctness_from_speed_and_numbers_equal_cases() -> None:
    slow = judgement("all_reduce", 200, 700, 482, "too slow")
    root = ET.fromstring(report_junit(report(runs=(run(), run()), judgements=(slow,))))
    cases = [(c.attrib["name"], c.attrib["classname"], c.find("failure") is not None) for c in root.iter("testcase")]
    assert cases == [
        ("all_reduce, 8 ranks, 1 node: speed", "imagebuild.speed", True),
        ("all_reduce, 8 ranks, 1 node: data", "imagebuild.data", False),
        ("all_reduce, 8 ranks, 1 node: participation", "imagebuild.participation", False),
        ("all_reduce, 8 ranks, 1 node: data #2", "imagebuild.data", False),
        ("all_reduce, 8 ranks, 1 node: participation #2", "imagebuild.participation", False),
        ("all_reduce, 8 ranks, 1 node: speed #2", "imagebuild.speed", False),
    ]


def test_junit_survives_hostile_text() -> None:
    text = report_junit(report(runs=(run(verdict="failed", reason=HOSTILE, source=HOSTILE),)))
    failure = next(ET.fromstring(text).iter("failure"))
    assert "<script>" in failure.attrib["message"]
    assert "<script" not in text


def test_junit_keeps_the_end_of_long_output() -> None:
    (verified,) = BAD.verifications
    failed = verified.checks[1].model_copy(update={"output": "x" * 200_000 + "the end"})
    long = report(verifications=(verified.model_copy(update={"checks": (failed,)}),))
    out = next(ET.fromstring(report_junit(long)).iter("system-out")).text or ""
    assert out.endswith("the end")
    assert len(out) == 64 * 1024


def test_markdown_has_the_verdict_problems_a_row_for_each_run_and_skips() -> None:
    assert report_markdown(GOOD).startswith(f"## ✅ {GOOD.headline}\n\n{GOOD.counts}. Profile h100-sxm.")
    text = report_markdown(BAD)
    assert len(re.findall("^- ", text[text.index("### Problems") : text.index("### Collectives")], re.M)) == 6
    assert "\n| all_reduce, 8 ranks, 1 node | right | complete | fast enough | 476.7 GB/s at 8 GiB | 68% |\n" in text
    assert "\n| RDMA_Read Latency | not compared | – | – | 3.90 µs at 2 B |\n" in text
    assert "\n| example/open:13.5 | linux/amd64 | 2 | 1 | 1 |\n" in text
    assert f"<details><summary>{len(BAD.skips)} skipped</summary>" in text


def test_markdown_is_text_only() -> None:
    shown = report_markdown(report(runs=(run(verdict="failed", reason=HOSTILE + " https://x.example\n# y"),)))
    assert "<script" not in shown.replace(r"\<", "")
    assert not [part for part in ("@all", "\n# y", "https://") if part in shown]
    row = next(line for line in shown.splitlines() if line.startswith("| all"))
    assert len(re.findall(r"(?<!\\)\|", row)) == 7


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
    assert f"\n| {shown} | right |" in report_markdown(report(runs=(run(text, ranks=None, nodes=None),)))


def test_markdown_fits_a_comment() -> None:
    many = report_markdown(report(runs=[run(verdict="failed", reason="r" * 200, rows=()) for _ in range(3000)]))
    assert many.count("and 2950 more") == 2
    stars = "*" * 300
    long = run(verdict="failed", reason=stars, source=f"/{stars}", collective=stars, rows=())
    text = report_markdown(report(runs=[long.model_copy() for _ in range(99)]))
    assert len(many) < len(text) < 65_536
    assert text.endswith("The rest does not fit here.\n")


def test_terminal_shows_results_problems_skips_and_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(BAD)
    out = capsys.readouterr().out
    rows = [re.split("  +", line) for line in out.splitlines()]
    assert ["✓", "all_gather, 8 ranks, 1 node", "right", "complete", "fast enough", "359.5 GB/s at 8 GiB"] in rows
    assert ["-", "device_to_device_memcpy_read_ce", "right", "–", "not judged", "214.7 to 394.0 GB/s"] in rows
    ucx = "10531.2 MiB/s, 0.09 µs, 11.00 million messages/s at 1 MiB"
    assert ["-", "ucx_perftest overhead, thread 0", "not compared", "–", "–", ucx] in rows
    assert "✗ reduce_scatter, 8 ranks, 1 node (logs/reduce_scatter.log): too slow: 52% of the reference" in out
    assert "logs/hung.log: 2 lines look like results and could not be read, for example:" in out
    assert out.endswith(f"{BAD.headline} ({BAD.counts}; unread lines: 2)\n")
    assert not re.search("[\x1b\x00]", out)


def test_terminal_takes_brackets_for_text(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(report(runs=(run(verdict="failed", reason="[red]x[/] [bold]y[/wrong]", source="[/]"),)))
    assert "[red]x[/] [bold]y[/wrong]" in capsys.readouterr().out
