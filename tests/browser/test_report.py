"""The charts of a report in a browser: hovering, on a phone, printed, and by keyboard."""

from __future__ import annotations

from itertools import pairwise

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Visit, until
from tests.report_samples import BAD

pytestmark = [pytest.mark.browser, pytest.mark.programs]

CHART = "#bandwidth-1"


def test_a_line_for_each_run_and_nothing_of_what_was_read_is_run(visit: Visit) -> None:
    page = visit("report").page
    assert page.title() == f"{BAD.headline} – Everything at once"
    expect(page.locator(f"{CHART} .scatterlayer .trace")).to_have_count(sum(r.ranks == 8 for r in BAD.runs) + 6)
    expect(page.locator(f"{CHART} .legendtext").last).to_have_text("reference 367 GB/s")
    expect(page.locator(f"{CHART} .textpoint").first).to_have_text("ceiling 700 GB/s")
    assert page.locator("#matrix-1 .hm image, #matrix-1 .heatmaplayer image").count() == 1


def test_hover_shows_the_value(visit: Visit) -> None:
    page = visit("report").page
    page.locator(CHART).scroll_into_view_if_needed()
    point = page.locator(f"{CHART} .scatterlayer .trace").nth(3).locator(".point").last.bounding_box()
    assert point
    page.mouse.move(point["x"] + point["width"] / 2, point["y"] + point["height"] / 2)
    shown = page.locator(f"{CHART} .hoverlayer .hovertext").first
    expect(shown).to_contain_text("reduce_scatter")
    expect(shown).to_contain_text("8 GiB: 188.7")
    expect(shown).to_contain_text("0 wrong")


@pytest.mark.parametrize("width", [320, 768])
def test_charts_fit_a_phone(visit: Visit, width: int) -> None:
    page = visit("report", width=width).page
    chart = page.locator(f"{CHART} .main-svg").first.bounding_box()
    assert chart
    assert 0.8 * width - 40 < chart["width"] <= width
    labels = [box for t in page.locator(f"{CHART} .xtick text").all() if (box := t.bounding_box())]
    assert len(labels) >= 3
    assert all(a["x"] + a["width"] < b["x"] for a, b in pairwise(sorted(labels, key=lambda box: box["x"])))


def test_everything_is_reached_by_keyboard(visit: Visit) -> None:
    page = visit("report").page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the results"
    reached = []
    for _ in range(150):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate("document.activeElement.tagName + ' ' + document.activeElement.textContent.trim()")
        )
        if reached[-1].startswith("SUMMARY logs/hung.log"):
            break
    assert {"A Bandwidth", "SUMMARY Numbers of this chart"} <= set(reached)
    log = page.locator("#logs details")
    assert not log.evaluate("e => e.open")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    assert log.evaluate("e => e.open")
    expect(log.locator("pre")).to_be_visible()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.tagName") == "PRE"


def test_charts_fit_the_paper(visit: Visit) -> None:
    page = visit("report").page
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    width = f"document.querySelector('{CHART} .main-svg').clientWidth"
    until(page, f"{width} === 660")
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    until(page, f"{width} > 900")


def test_the_runs_of_a_sweep_are_sorted_and_filtered(visit: Visit) -> None:
    page = visit("sweep").page
    assert page.locator(".problems li").first.inner_text().startswith("n2 ")
    assert page.locator("#sweep-1 .heatmaplayer image, #sweep-1 .hm image").count() == 1
    runs = page.locator("#sweeps details.raw")
    runs.locator("summary").click()
    rows = runs.locator("tbody tr")
    expect(rows.first).to_contain_text("n2")  # the slowest first
    runs.get_by_role("button", name="GB/s").click()
    runs.get_by_role("button", name="GB/s").click()
    expect(runs.locator("thead th").nth(1)).to_have_attribute("aria-sort", "descending")
    expect(rows.first).not_to_contain_text("n2")
    runs.get_by_role("searchbox").fill("n2 n5")
    expect(runs.locator("tbody tr:visible")).to_have_count(1)
    expect(runs.get_by_role("status")).to_have_text("1 of 28")
