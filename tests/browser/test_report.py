"""The page of a report as people use it: drawn, hovered, on a phone, in the dark, printed, and by keyboard."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import Open, until
from tests.report_samples import BAD

pytestmark = [pytest.mark.browser, pytest.mark.programs]

CHART = "#bandwidth-1"
TEXTS = ("h1", "h2", ".kicker", ".counts", "nav a", ".card .why", ".card .source", ".badge.passed", ".badge.failed",
         ".badge.skipped", ".legend button", ".legend .failed", ".limits li", "summary", "thead th", "footer")  # fmt: skip


def rgb(text: str) -> tuple[float, float, float, float]:
    """The colour that `getComputedStyle` gives."""
    parts = [float(part) for part in re.findall(r"[0-9.]+", text)]
    return parts[0], parts[1], parts[2], parts[3] if len(parts) > 3 else 1.0


def luminance(colour: tuple[float, ...]) -> float:
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (part / 255 for part in colour[:3])]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """As WCAG 2 defines it."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def background(page: Page, selector: str) -> tuple[float, float, float, float]:
    """The nearest background that is not transparent."""
    text = page.locator(selector).first.evaluate(
        """element => {
            for (let e = element; e; e = e.parentElement) {
                const colour = getComputedStyle(e).backgroundColor;
                if (!/, 0\\)$/.test(colour)) { return colour; }
            }
            return 'rgb(255, 255, 255)';
        }"""
    )
    return rgb(text)


def test_nothing_is_loaded_and_nothing_goes_wrong(open_page: Open) -> None:
    opened = open_page()
    opened.page.wait_for_timeout(300)
    assert opened.messages == []
    assert [url for url in opened.requests if not url.startswith(("file:", "data:", "blob:"))] == []
    assert len([url for url in opened.requests if url.startswith("file:")]) == 1


def test_what_was_read_is_not_run(open_page: Open) -> None:
    page = open_page().page
    assert page.title() == "6 of 26 assertions failed – Everything at once"
    assert page.locator("img").count() == 0


def test_a_line_for_each_run(open_page: Open) -> None:
    page = open_page().page
    expect(page.locator(f"{CHART} .scatterlayer .trace")).to_have_count(sum(r.ranks == 8 for r in BAD.runs))
    expect(page.locator("#bandwidth-2 .scatterlayer .trace")).to_have_count(1)
    assert page.locator(f"{CHART} .shapelayer path").count() == 6
    assert page.locator("#matrix-1 .hm image, #matrix-1 .heatmaplayer image").count() == 1


def test_hover_shows_the_value(open_page: Open) -> None:
    page = open_page().page
    page.locator(CHART).scroll_into_view_if_needed()
    point = page.locator(f"{CHART} .scatterlayer .trace").nth(3).locator(".point").last.bounding_box()
    assert point
    page.mouse.move(point["x"] + point["width"] / 2, point["y"] + point["height"] / 2)
    shown = page.locator(f"{CHART} .hoverlayer .hovertext").first
    expect(shown).to_contain_text("reduce_scatter")
    expect(shown).to_contain_text("8 GiB: 188.7")
    expect(shown).to_contain_text("0 wrong")


def test_a_line_can_be_hidden_by_keyboard(open_page: Open) -> None:
    page = open_page().page
    button = page.get_by_role("button", name="all_gather")
    button.focus()
    page.keyboard.press("Enter")
    expect(button).to_have_attribute("aria-pressed", "false")
    expect(page.locator(f"{CHART} .scatterlayer .trace")).to_have_count(4)
    page.keyboard.press("Space")
    expect(page.locator(f"{CHART} .scatterlayer .trace")).to_have_count(5)


def test_scales(open_page: Open) -> None:
    page = open_page().page
    assert page.locator(f"{CHART} .ytick text").all_text_contents() == ["0.01", "0.1", "1", "10", "100", "1000"]
    page.get_by_role("button", name="Linear scale").first.click()
    until(page, f"document.querySelector('{CHART} .ytick text').textContent.startsWith('0')")
    steps = [float(text) for text in page.locator(f"{CHART} .ytick text").all_text_contents()]
    assert len({round(b - a) for a, b in pairwise(steps)}) == 1
    page.get_by_role("button", name="Linear scale").first.click()
    expect(page.locator(f"{CHART} .ytick text").last).to_have_text("1000")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(open_page: Open, scheme: str) -> None:
    page = open_page(scheme=scheme).page
    for selector in TEXTS:
        colour = rgb(page.locator(selector).first.evaluate("e => getComputedStyle(e).color"))
        assert contrast(colour, background(page, selector)) >= 4.5, selector
    for selector in (f"{CHART} .xtick text", f"{CHART} .ytick text", f"{CHART} .shape-label text"):
        colour = rgb(page.locator(selector).first.evaluate("e => getComputedStyle(e).fill"))
        assert contrast(colour, background(page, ".panel")) >= 4.5, selector
    for line in page.locator(f"{CHART} .scatterlayer .trace .js-line").all():
        colour = rgb(line.evaluate("e => getComputedStyle(e).stroke"))
        assert contrast(colour, background(page, ".panel")) >= 3


def test_dark_is_dark_and_light_is_light(open_page: Open) -> None:
    light, dark = (luminance(background(open_page(scheme=scheme).page, "body")) for scheme in ("light", "dark"))
    assert light > 0.8
    assert dark < 0.02


def test_the_scheme_can_change_while_the_page_is_open(open_page: Open) -> None:
    page = open_page().page
    tick = page.locator(f"{CHART} .xtick text").first
    before = tick.evaluate("e => getComputedStyle(e).fill")
    page.emulate_media(color_scheme="dark")
    assert luminance(rgb(before)) < 0.2 < luminance(rgb(tick.evaluate("e => getComputedStyle(e).fill")))


@pytest.mark.parametrize("width", [320, 390, 768])
def test_a_phone_scrolls_one_way_only(open_page: Open, width: int) -> None:
    page = open_page(width=width, height=844, is_mobile=width < 500, has_touch=width < 500).page
    for summary in page.locator("summary").all():
        summary.evaluate("e => e.parentElement.open = true")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    chart = page.locator(f"{CHART} .main-svg").first.bounding_box()
    assert chart
    assert 0.8 * width - 40 < chart["width"] <= width
    labels = [box for t in page.locator(f"{CHART} .xtick text").all() if (box := t.bounding_box())]
    assert len(labels) >= 3
    assert all(a["x"] + a["width"] < b["x"] for a, b in pairwise(sorted(labels, key=lambda box: box["x"])))


def test_charts_follow_the_width_of_the_window(open_page: Open) -> None:
    page = open_page().page
    page.set_viewport_size({"width": 700, "height": 900})
    until(page, f"document.querySelector('{CHART} .main-svg').clientWidth < 700")
    assert page.evaluate("document.documentElement.scrollWidth") == 700


def test_everything_is_reached_by_keyboard(open_page: Open) -> None:
    page = open_page().page
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
    assert {"A Bandwidth", "BUTTON Linear scale", "SUMMARY Numbers of this chart"} <= set(reached)
    log = page.locator("#logs details")
    assert not log.evaluate("e => e.open")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    assert log.evaluate("e => e.open")
    expect(log.locator("pre")).to_be_visible()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.tagName") == "PRE"


def test_every_chart_has_its_numbers_in_a_table(open_page: Open) -> None:
    page = open_page().page
    charts = page.locator("figure")
    assert charts.count() == 5
    for chart in charts.all():
        assert chart.locator("[role=img][aria-label]").count() == 1
        chart.locator("details.data > summary").click()
        table = chart.locator("table").first
        expect(table).to_be_visible()
        assert table.locator("caption").inner_text()
        assert table.locator("thead th[scope=col]").count() > 1
        assert table.locator("tbody th[scope=row]").count() > 1


def test_without_scripts_the_verdict_and_the_numbers_are_there(open_page: Open) -> None:
    page = open_page(java_script_enabled=False).page
    assert page.locator("h1").inner_text().endswith("6 of 26 assertions failed")
    expect(page.locator("noscript p").first).to_be_visible()
    page.locator("details.data > summary").first.click()
    expect(page.locator("details.data table").first).to_be_visible()


def test_print(open_page: Open, tmp_path: Path) -> None:
    page = open_page(scheme="dark").page
    page.pdf(path=tmp_path / "page.pdf", format="A4")
    data = (tmp_path / "page.pdf").read_bytes()
    assert data.startswith(b"%PDF-")
    assert 4 <= len(re.findall(rb"/Type\s*/Page\b", data)) <= 12
    page.emulate_media(media="print")
    assert luminance(background(page, "body")) > 0.9
    expect(page.locator("nav")).to_be_hidden()
    expect(page.locator("#logs")).to_be_hidden()
    expect(page.locator(CHART)).to_be_visible()


def test_charts_fit_the_paper(open_page: Open) -> None:
    page = open_page().page
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    width = f"document.querySelector('{CHART} .main-svg').clientWidth"
    until(page, f"{width} === 660")
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    until(page, f"{width} > 900")
