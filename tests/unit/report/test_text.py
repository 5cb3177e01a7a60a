"""JUnit, Markdown and the terminal: whole reports in tests/golden/report, and malicious text."""

from __future__ import annotations

import re
from collections.abc import Callable
from xml.etree import ElementTree as ET

import pytest

from imagebuild.report.document import Report
from imagebuild.report.text import print_report, report_junit, report_markdown
from tests.report_samples import BAD, GOOD, HOSTILE, pairs, report, run

SWEEP = report(runs=pairs({("n2",): 8.0, ("n1", "n4"): 8.4}))


@pytest.mark.parametrize(("name", "made"), [("good", GOOD), ("bad", BAD), ("sweep", SWEEP)])
def test_all_forms(
    name: str, made: Report, golden: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """All formats have the same claims and counts."""
    print_report(made)
    out = capsys.readouterr().out
    root = ET.fromstring(report_junit(made))
    golden(f"tests/golden/report/{name}.txt", out)
    golden(f"tests/golden/report/{name}.md", report_markdown(made))
    if made is not SWEEP:
        golden(f"tests/golden/report/{name}.xml", report_junit(made))
    assert not re.search("[\x1b\x00]", out)
    cases = root.findall("testsuite/testcase")
    assert len(cases) == len(made.assertions) == int(root.attrib["tests"])
    assert len(root.findall(".//failure")) == int(root.attrib["failures"]) == len(made.problems)
    assert len(root.findall(".//skipped")) == int(root.attrib["skipped"]) == len(made.skips)


def test_equal_cases_have_numbers() -> None:
    cases = ET.fromstring(report_junit(report(runs=(run(), run())))).iter("testcase")
    assert len({case.attrib["name"] for case in cases}) == 6


def test_hostile_text_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    text = report_junit(report(runs=(run(verdict="failed", reason=HOSTILE, source=HOSTILE),)))
    assert "<script>" in next(ET.fromstring(text).iter("failure")).attrib["message"]
    assert "<script" not in text
    shown = report_markdown(report(runs=(run(verdict="failed", reason=HOSTILE + " https://x.example\n# y"),)))
    assert "<script" not in shown.replace(r"\<", "")
    assert not [part for part in ("@all", "\n# y", "https://") if part in shown]
    print_report(report(runs=(run(verdict="failed", reason="[red]x[/] [bold]y[/wrong]", source="[/]"),)))
    assert "[red]x[/] [bold]y[/wrong]" in capsys.readouterr().out


def test_the_end_of_long_output_is_kept() -> None:
    (verified,) = BAD.verifications
    failed = verified.checks[1].model_copy(update={"output": "x" * 200_000 + "the end"})
    long = report(verifications=(verified.model_copy(update={"checks": (failed,)}),))
    out = next(ET.fromstring(report_junit(long)).iter("system-out")).text or ""
    assert (out[-7:], len(out)) == ("the end", 64 * 1024)


def test_markdown_cells() -> None:
    """Characters are escaped only where they would be markup."""
    texts = ("all_reduce", "_x_ y", "a * b", "<b>", "&lt;", "a|b")
    markdown = report_markdown(report(runs=[run(text, ranks=None, nodes=None) for text in texts]))
    for shown in ("all_reduce", r"\_x\_ y", r"a \* b", r"\<b\>", "&amp;lt;", r"a\|b"):
        assert f"\n| {shown} | right |" in markdown


def test_markdown_fits_a_comment() -> None:
    many = report_markdown(report(runs=[run(verdict="failed", reason=f"{n}{'r' * 200}", rows=()) for n in range(300)]))
    assert many.count("and 250 more") == 2
    alike = report_markdown(report(runs=[run(verdict="failed", reason="the same", rows=()) for _ in range(34)]))
    assert alike.count("failed: the same") == 1
    assert "(34 times)" in alike
    stars = "*" * 300
    long = run(verdict="failed", reason=stars, source=f"/{stars}", collective=stars, rows=())
    text = report_markdown(report(runs=[long.model_copy(update={"reason": f"{n}{stars}"}) for n in range(99)]))
    assert len(many) < len(text) < 65_536
    assert text.endswith("The rest does not fit here.\n")
