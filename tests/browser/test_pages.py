"""All pages load nothing, are accessible, and are readable on any screen, on paper, and without scripts."""

from __future__ import annotations

from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.browser.conftest import Visit, background, contrast, luminance
from tests.report_samples import BAD

pytestmark = [pytest.mark.browser, pytest.mark.programs]

PAGES = ("report", "sweep", "catalog#os=ubuntu26.04", "image")


@pytest.mark.parametrize("name", PAGES)
def test_nothing_is_loaded_and_nothing_goes_wrong(visit: Visit, name: str) -> None:
    opened = visit(name)
    opened.page.wait_for_timeout(300)
    assert opened.messages == []
    assert [url.partition(":")[0] for url in opened.requests if not url.startswith(("data:", "blob:"))] == ["file"]
    assert opened.page.locator("img").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_text_and_lines_can_be_seen(visit: Visit, name: str, scheme: str) -> None:
    page = visit(name, scheme=scheme).page
    lightness = luminance(background(page, "body"))
    assert lightness > 0.8 if scheme == "light" else lightness < 0.02
    faint = []
    if name == "report":  # axe-core does not check charts
        for part in (".xtick text", ".ytick text", ".legendtext", ".textpoint text"):
            faint += [part] if contrast(page, f".chart {part}", "fill", ".panel") < 4.5 else []
        for number in range(page.locator(".chart").first.locator(".scatterlayer .js-line").count()):
            line = f".chart .scatterlayer .trace:nth-child({number + 1}) .js-line"
            faint += [line] if contrast(page, line, "stroke", ".panel") < 3 else []
    assert faint == []
    axe_finds_nothing(page)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["catalog#os=ubuntu26.04&x=1", "image"])
def test_axe_finds_nothing_on_a_phone(visit: Visit, name: str, scheme: str) -> None:
    """The test above checks a wide screen."""
    axe_finds_nothing(visit(name, scheme=scheme, width=390).page)


def axe_finds_nothing(page: Page) -> None:
    """Assert that axe-core finds no violation of WCAG or of good practice."""
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


@pytest.mark.parametrize("width", [320, 768, 1920])
@pytest.mark.parametrize("name", PAGES)
def test_nothing_is_wider_than_the_screen(visit: Visit, name: str, width: int) -> None:
    page = visit(name, width=width).page
    page.evaluate("document.querySelectorAll('details').forEach(e => { e.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_paper(visit: Visit, tmp_path: Path) -> None:
    hidden = {"report": ["nav", "#logs"], "catalog": ["#picker", "article"], "image": ["button.copy"]}
    shown = {"report": "#bandwidth-1", "catalog": "tbody tr", "image": "article:target .versions"}
    for name, selectors in hidden.items():
        page = visit(name, scheme="dark").page
        page.emulate_media(media="print")
        assert luminance(background(page, "body")) > 0.9
        for selector in selectors:
            expect(page.locator(selector).first).to_be_hidden()
        expect(page.locator(shown[name]).first).to_be_visible()
    report = visit("report").page.pdf(path=tmp_path / "page.pdf", format="A4")
    assert 4 <= report.count(b"/Type /Page\n") <= 12


def test_without_scripts_the_verdict_and_the_numbers_are_there(visit: Visit) -> None:
    report = visit("report", java_script_enabled=False).page
    assert report.locator("h1").inner_text().endswith(BAD.headline)
    page = visit("catalog", java_script_enabled=False).page
    expect(page.locator("table.images tbody tr")).to_have_count(150)
    expect(page.locator("#picker")).to_be_hidden()
    expect(page.locator(".search")).to_be_hidden()
    expect(page.locator("button:visible")).to_have_count(0)
    page.locator("tbody a").first.click()
    expect(page.locator("article:visible")).to_have_count(1)
    expect(page.locator("article:visible code").first).to_contain_text("docker pull registry.example.org/gpu/hpcx:")
    expect(report.locator("noscript p").first).to_be_visible()
    report.locator("details.data > summary").first.click()
    expect(report.locator("details.data table").first).to_be_visible()


def test_every_chart_has_its_numbers_in_a_table(visit: Visit) -> None:
    charts = visit("report").page.locator("figure:visible")
    assert charts.count() == 4
    for chart in charts.all():
        assert chart.locator("[role=group][aria-label] .main-svg").count() >= 1
        chart.locator("details.data > summary").click()
        table = chart.locator("table").first
        expect(table).to_be_visible()
        assert table.locator("caption").inner_text()
        assert table.locator("thead th[scope=col]").count() > 1
        assert table.locator("tbody th[scope=row]").count() > 1
