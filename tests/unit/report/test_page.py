"""The page as text. tests/browser opens it in a browser."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from imagebuild.bench.models import BandwidthTest
from imagebuild.report.document import gather_files
from imagebuild.report.page import LogText, lay_out, plotly_js, read_logs, report_html
from tests.page_outline import outline
from tests.report_samples import BAD, GIB, HOSTILE, report, row, run
from tests.unit.bench.test_paired import log_of, slower


@pytest.fixture(scope="module")
def bad_page() -> str:
    return report_html(BAD, (LogText("logs/hung.log", HOSTILE, 50_000_000, 49_900_000),))


def test_what_was_read_is_text(bad_page: str) -> None:
    found = outline(bad_page)
    found.runs_only_its_own_scripts()
    assert [kind for kind, _ in found.scripts] == [None, "application/json", None]
    assert not found.named("img")
    assert not [name for _, attributes in found.elements for name in attributes if name.startswith("on")]
    assert all(str(a["href"]).startswith("#") for a in found.named("a"))
    assert "<script>document.title" in found.text
    assert "{{ 7*7 }}" in bad_page
    assert not re.search("[\x00\x1b\u202e]", bad_page.replace(plotly_js(), ""))
    text = report_html(report(runs=(run("</script><b>"),)))
    figures = next(data for kind, data in outline(text).scripts if kind)
    assert json.loads(figures)["bandwidth-1"]["data"][0]["name"] == "&lt;/script&gt;&lt;b&gt;"


def test_one_plotly_and_none_where_nothing_is_drawn(bad_page: str) -> None:
    assert bad_page.count(plotly_js()) == 1
    empty = report_html(report(nothing_in=("x",)))
    assert (len(empty) < 40_000, "<script" in empty) == (True, False)


def test_sections_come_after_the_verdict_and_are_linked(bad_page: str) -> None:
    assert bad_page.index(f"{BAD.headline}</h1>") < bad_page.index("Results</h2>")
    found = outline(bad_page)
    ids = [a["id"] for _, a in found.elements if "id" in a]
    linked = {str(a["href"])[1:] for a in found.named("a")}
    assert linked <= set(ids)
    assert len(ids) == len(set(ids))
    assert {"results", "bandwidth", "copies", "diagnostics", "image-1", "skipped", "origin", "logs"} <= linked
    folds = [attributes for attributes in found.named("details") if attributes.get("class") == "check"]
    assert ["open" in attributes for attributes in folds] == [True, False]  # the failed check is unfolded
    assert "The first 49.9 MB are left out" in bad_page
    assert "reference 482 GB/s: 8x H100, measured somewhere, 2026-05" in bad_page


# Charts


def matrix(unit: str, *rows: tuple[float | None, ...]) -> BandwidthTest:
    name = "device_to_device_memcpy_read_ce"
    return BandwidthTest(source="n", name=name, unit=unit, matrix=rows, sum=None)


def test_a_chart_for_each_scale_with_a_line_for_each_run_and_limits_drawn_once() -> None:
    drawn = lay_out(BAD).charts
    lines = [(drawing.title, len(drawing.figure["data"])) for drawing in drawn]
    assert lines == [("8 ranks, 1 node", 5 + 6), ("16 ranks, 2 nodes", 2)]  # with ceilings and references
    assert [len(numbers.rows) for numbers in drawn[0].tables] == [24] * 5
    limits = {trace["name"]: (trace["y"], trace["line"]["dash"]) for trace in drawn[0].figure["data"][5:]}
    labels = [trace["text"][0] for trace in drawn[0].figure["data"][5:]]
    assert list(filter(None, labels)) == ["ceiling 700 GB/s", "ceiling 450 GB/s"]
    assert limits["ceiling 700 GB/s"] == ([700.0, 700.0], "dash")
    assert limits["reference 482 GB/s"] == ([482.0, 482.0], "dot")
    assert (len(limits), "ceiling 700 GB/s: all_reduce ceiling: link * 1" in drawn[0].notes) == (6, True)
    many = lay_out(report(runs=tuple(run(f"collective_{number}") for number in range(32)))).charts[0].figure["data"]
    assert len({(line["line"]["color"], line["marker"]["symbol"]) for line in many}) == 32


def test_lines_have_the_better_placement_sorted_by_size_without_what_cannot_be_drawn() -> None:
    inf, nan = float("inf"), float("nan")
    rows = (row(2 * GIB, 300.0, 310.0), row(0, 0.0), row(GIB, 250.0), row(GIB // 2, None), row(GIB, inf), row(1, nan))
    trace = lay_out(report(runs=(run(rows=rows),))).charts[0].figure["data"][0]
    assert list(zip(trace["x"], trace["y"], strict=True)) == [(GIB, 250.0), (2 * GIB, 310.0)]
    best = BAD.tables[0].rows[0].model_copy(update={"bw_average": inf})
    table = BAD.tables[0].model_copy(update={"rows": (best,) * 2})
    assert "<h1" in report_html(report(tests=(matrix("GB/s", (inf, 1.0), (nan, -inf)),), tables=(table,)))


def test_heat_maps() -> None:
    """Slow pairs have warm colours, also for latencies."""
    tests = (matrix("GB/s", (None, 390.0), (214.7, None)), matrix("ns", (1.0, 2.0), (3.0, 4.0)))
    speeds, times = lay_out(report(tests=tests)).matrices
    trace = speeds.figure["data"][0]
    assert (trace["z"], trace["zmax"], trace["reversescale"]) == ([[None, 390.0], [214.7, None]], 390.0, False)
    assert speeds.notes[0].startswith("214.7 to 390 GB/s")
    assert list(speeds.tables[0].rows[1]) == ["1", "214.7", "–"]
    assert times.figure["data"][0]["reversescale"]


def test_the_end_of_a_large_log_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"\xff first\n" + b"line\n" * 100_000 + b"last\n")
    (log,) = read_logs([path, tmp_path / "gone"], kept=1000)
    assert (log.text[:5], log.text[-5:]) == ("line\n", "last\n")
    assert log.dropped_bytes + len(log.text) == log.total_bytes == path.stat().st_size


def test_a_comparison_is_drawn_as_a_curve_with_a_band(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(log_of(slower(1)))
    made, _, _ = gather_files([tmp_path / "a.log"])
    page = lay_out(made)
    (drawing,) = page.comparisons
    band, line = drawing.figure["data"]
    low, high = ([getattr(item, name) for item in made.paired[0].differences] for name in ("low", "high"))
    assert (band["x"], band["y"]) == ([1 << 20, 1 << 30, 1 << 30, 1 << 20], [*high, *reversed(low)])
    assert [round(value) for value in line["y"]] == [-1, -1]
    assert (line["name"], band["showlegend"]) == ("nccl=2.32.3", False)
    assert drawing.tables[0].rows[1][:3] == ("1 GiB", str(1 << 30), "nccl=2.32.3")
    assert page.charts == [], "the runs are in the picture of the comparison"
    assert "compared with nccl=2.30.7" in report_html(made)
