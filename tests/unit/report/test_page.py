"""The page as text; tests/browser opens it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from imagebuild.bench import BandwidthTest
from imagebuild.core import ConfigError
from imagebuild.report import LogText, Report, lay_out, plotly_js, read_logs, report_html
from tests.report_samples import ABOUT, BAD, GIB, GOOD, HOSTILE, judgement, row, run


class Elements(HTMLParser):
    """Tags with their attributes, and the text of the page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[str | None, str]] = []
        self.inside: dict[str, str | None] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = dict(attrs) if tag == "script" else None

    def handle_data(self, data: str) -> None:
        if self.inside is not None:
            self.scripts.append((self.inside.get("type"), data))
            self.inside = None


def parsed(text: str) -> Elements:
    elements = Elements()
    elements.feed(text)
    return elements


@pytest.fixture(scope="module")
def bad_page() -> str:
    return report_html(BAD, (LogText("logs/hung.log", HOSTILE, 50_000_000, 49_900_000),))


def test_what_was_read_is_text(bad_page: str) -> None:
    elements = parsed(bad_page)
    assert [kind for kind, _ in elements.scripts] == ["application/json", None, None]
    assert not [attributes for tag, attributes in elements.tags if tag == "img"]
    assert not [name for _, attributes in elements.tags for name in attributes if name.startswith("on")]
    assert "&lt;script&gt;document.title" in bad_page
    assert "{{ 7*7 }}" in bad_page
    assert not re.search("[\x00\x1b\u202e]", bad_page.replace(plotly_js(), ""))


def test_hostile_names_are_text_in_charts_too() -> None:
    text = report_html(Report(about=ABOUT, runs=(run(HOSTILE), run("</script><b>"))))
    figures = next(data for kind, data in parsed(text).scripts if kind)
    names = [trace["name"] for trace in json.loads(figures)["bandwidth-1"]["data"]]
    assert names[1] == "&lt;/script&gt;&lt;b&gt;"


def test_the_page_loads_nothing_and_runs_only_its_own_scripts(bad_page: str) -> None:
    elements = parsed(bad_page)
    assert not [a for _, a in elements.tags if {"src", "srcset", "data", "poster", "background"} & set(a)]
    assert all((a.get("href") or "#").startswith("#") for _, a in elements.tags)
    policy = next(a["content"] for tag, a in elements.tags if tag == "meta" and "http-equiv" in a) or ""
    assert "default-src 'none'" in policy
    for kind, script in elements.scripts:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert (f"'sha256-{digest}'" in policy) == (kind is None)


def test_one_plotly_and_none_where_nothing_is_drawn(bad_page: str) -> None:
    assert bad_page.count(plotly_js()) == 1
    empty = report_html(Report(about=ABOUT, nothing_in=("x",)))
    assert len(empty) < 40_000
    assert "<script" not in empty


def test_without_plotly_the_fix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.split(".")[0] == "plotly"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(ConfigError, match=re.escape("pip install plotly")):
        report_html(GOOD)


def test_verdict_first(bad_page: str) -> None:
    assert bad_page.index("6 of 26 assertions failed</h1>") < bad_page.index("Collectives</h2>")


def test_every_section_that_is_linked_is_there(bad_page: str) -> None:
    elements = parsed(bad_page)
    ids = [a["id"] for _, a in elements.tags if "id" in a]
    linked = {(a["href"] or "")[1:] for tag, a in elements.tags if tag == "a"}
    assert linked <= set(ids)
    assert len(ids) == len(set(ids))
    assert {"runs", "bandwidth", "copies", "messages", "diagnostics", "image-1", "skipped", "origin", "logs"} <= linked


def test_evidence_of_what_failed_is_unfolded(bad_page: str) -> None:
    folds = [attributes for tag, attributes in parsed(bad_page).tags if attributes.get("class") == "check"]
    assert ["open" in attributes for attributes in folds] == [True, False]


def test_a_log_that_was_cut_says_so(bad_page: str) -> None:
    assert "The first 49.9 MB are left out" in bad_page


def figure(report: Report, number: int = 0) -> dict[str, Any]:
    return lay_out(report).drawings[number].figure


def test_a_chart_for_each_scale_with_a_line_for_each_run() -> None:
    drawn = lay_out(BAD).charts
    assert [(drawing.title, len(drawing.figure["data"])) for drawing in drawn] == [
        ("8 ranks, 1 node", 5),
        ("16 ranks, 2 nodes", 1),
    ]
    assert [len(numbers.rows) for numbers in drawn[0].tables] == [24] * 5


def test_lines_have_the_better_placement_sorted_by_size_without_zeros() -> None:
    rows = (row(2 * GIB, 300.0, 310.0), row(0, 0.0), row(GIB, 250.0), row(GIB // 2, None))
    trace = figure(Report(about=ABOUT, runs=(run(rows=rows),)))["data"][0]
    assert list(zip(trace["x"], trace["y"], strict=True)) == [(GIB, 250.0), (2 * GIB, 310.0)]


def test_ceilings_and_references_are_drawn_once() -> None:
    shapes = figure(BAD)["layout"]["shapes"]
    assert [s["y0"] for s in shapes if s.get("xref") == "paper"] == [700.0, 450.0]
    assert [s["y0"] for s in shapes if s.get("xref") != "paper"] == [482.0, 364.0, 365.0, 367.0]
    assert [s["label"]["text"] for s in shapes if "label" in s] == ["ceiling 700 GB/s", "ceiling 450 GB/s"]


def test_a_reference_for_small_messages_is_not_drawn_at_large_ones() -> None:
    small = judgement("all_reduce", 100, 700, 120).model_copy(update={"size_bytes": 1 << 20})
    (drawing,) = lay_out(Report(about=ABOUT, runs=(run(),), judgements=(small,))).charts
    assert [drawn.kind for drawn in drawing.limits] == ["ceiling"]


def test_axes_have_labels_however_small_their_range() -> None:
    layout = figure(Report(about=ABOUT, runs=(run(rows=(row(GIB, 480.0), row(2 * GIB, 481.0))),)))["layout"]
    assert len(layout["yaxis"]["tickvals"]) >= 3
    assert layout["xaxis"]["ticktext"][:2] == ["1 GiB", "2 GiB"]


def test_many_lines_differ() -> None:
    runs = tuple(run(f"collective_{number}") for number in range(32))
    (chart,) = lay_out(Report(about=ABOUT, runs=runs)).charts
    assert len({(line.colour, line.dash) for line in chart.legend}) == 32


def test_a_matrix_of_pairs() -> None:
    test = BandwidthTest(source="p", name="device_to_device_memcpy_read_ce", unit="GB/s", status="passed",
                         matrix=((None, 390.0), (214.7, None)), sum=None)  # fmt: skip
    drawing = lay_out(Report(about=ABOUT, tests=(test,))).matrices[0]
    assert drawing.figure["data"][0]["z"] == [[None, 390.0], [214.7, None]]
    assert drawing.figure["data"][0]["zmax"] == 390.0
    assert drawing.note.startswith("214.7 to 390.0 GB/s")


def test_numbers_that_are_none_are_not_drawn() -> None:
    nan, inf = float("nan"), float("inf")
    tests = (
        BandwidthTest(source="n", name="x", unit="GB/s", status="passed", matrix=((inf, 1.0), (nan, -inf)), sum=nan),
    )
    table = BAD.tables[0].model_copy(
        update={"rows": (BAD.tables[0].rows[0].model_copy(update={"bw_average": inf}),) * 2}
    )
    runs = (run(rows=(row(GIB, inf), row(GIB, nan), row(GIB, 5.0))),)
    report = Report(about=ABOUT, runs=runs, tests=tests, tables=(table,))
    assert "<h1" in report_html(report)
    assert figure(report)["data"][0]["y"] == [5.0]


@pytest.mark.parametrize(("unit", "reversed_"), [("ns", True), ("GB/s", False)])
def test_slow_pairs_are_warm_for_times_too(unit: str, reversed_: bool) -> None:
    test = BandwidthTest(source="n", name="l", unit=unit, status="passed", matrix=((1.0, 2.0), (3.0, 4.0)), sum=None)
    assert figure(Report(about=ABOUT, tests=(test,)))["data"][0]["reversescale"] == reversed_


def test_the_meter_shows_the_share_of_the_ceiling(bad_page: str) -> None:
    cards = {card.partition("</h3>")[0]: card for card in bad_page.split("<h3>")}
    assert '<i style="width:68.2%">' in cards["all_reduce, 8 ranks"]
    assert "68% of the ceiling, 700 GB/s; the mark is the reference, 482<" in cards["all_reduce, 8 ranks"]
    assert '<i style="width:100.0%">' in cards["sendrecv, 8 ranks"]
    assert "meter" not in cards["alltoall, 8 ranks"]


def test_limits_say_where_they_come_from(bad_page: str) -> None:
    assert "reference 482 GB/s: 8x H100, measured somewhere, 2026-05" in bad_page


def test_the_end_of_a_large_log_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"\xff first\n" + b"line\n" * 100_000 + b"last\n")
    (log,) = read_logs([path, tmp_path / "gone"], kept=1000)
    assert log.text.endswith("last\n")
    assert log.text.startswith("line\n")
    assert log.dropped_bytes + len(log.text) == log.total_bytes == path.stat().st_size
