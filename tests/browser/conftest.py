"""Fixtures for tests of HTML pages in the distribution's Chromium, without a network."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from imagebuild.project.records import Catalog
from imagebuild.publish.site import write_site
from imagebuild.report.page import LogText, report_html
from tests import catalog_samples
from tests.report_samples import BAD, HOSTILE, pairs
from tests.report_samples import report as made


@dataclass
class Opened:
    """An open page, with its console messages and its requests."""

    page: Page
    messages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


Visit = Callable[..., Opened]
expect.set_options(timeout=60_000)  # drawing is slow on a busy machine


def until(page: Page, expression: str, seconds: float = 60) -> None:
    """Wait until a JavaScript expression is true. Playwright's own function needs `eval`, which the pages forbid."""
    end = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < end, f"never true: {expression}"
        page.wait_for_timeout(50)


def rgb(text: str) -> tuple[float, float, float, float]:
    """Parse a colour that `getComputedStyle` returns: red, green, blue and opacity."""
    parts = [float(part) for part in re.findall(r"[0-9.]+", text)]
    return parts[0], parts[1], parts[2], parts[3] if len(parts) > 3 else 1.0


def luminance(colour: tuple[float, ...]) -> float:
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (part / 255 for part in colour[:3])]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def background(page: Page, selector: str) -> tuple[float, float, float, float]:
    """Return the background colour of the nearest ancestor whose background is not transparent."""
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


def contrast(page: Page, selector: str, style: str = "color", behind: str = "") -> float:
    """Return the contrast between an element and its background, as WCAG 2 defines it."""
    colour = rgb(page.locator(selector).first.evaluate(f"e => getComputedStyle(e).{style}"))
    low, high = sorted((luminance(colour), luminance(background(page, behind or selector))))
    return (high + 0.05) / (low + 0.05)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.fail("no Chromium; `make browser` installs the distribution's, or: apt-get install chromium")
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=arguments)
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def catalog() -> Catalog:
    return catalog_samples.catalog(150)


@pytest.fixture(scope="session")
def addresses(catalog: Catalog, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the addresses of the test pages by name: two reports, the catalogue, and an image with GPU results."""
    folder = tmp_path_factory.mktemp("pages")
    log = "\n".join(f"node1:100:{n} NCCL INFO Channel {n % 16:02}/16 : 0 1 2 3" for n in range(2000)) + HOSTILE
    report = folder / "bad.html"
    report.write_text(report_html(BAD, (LogText("logs/hung.log", log, 50_000_000, 49_900_000),)), encoding="utf-8")
    sweep = folder / "sweep.html"
    runs = pairs({("n2",): 8.0}, hosts=8)
    sweep.write_text(report_html(made(runs=runs)), encoding="utf-8")
    index = write_site(catalog, folder).as_uri()
    measured = next(image for image in catalog.images if any(run.gpus for p in image.platforms for run in p.checks))
    return {
        "report": report.as_uri(),
        "sweep": sweep.as_uri(),
        "catalog": index,
        "image": f"{index}#{measured.image}:{measured.tag}",
    }


@pytest.fixture
def visit(browser: Browser, addresses: dict[str, str]) -> Iterator[Visit]:
    """Open a page by its name and an optional fragment, for example `catalog#os=debian13`."""
    contexts = []

    def open_it(name: str, width: int = 1280, scheme: Literal["light", "dark"] = "light", **options: Any) -> Opened:
        phone = width < 500
        context = browser.new_context(
            viewport={"width": width, "height": 844}, is_mobile=phone, has_touch=phone, color_scheme=scheme,
            offline=True, **options,
        )  # fmt: skip
        contexts.append(context)
        context.set_default_timeout(60_000)
        opened = Opened(context.new_page())
        opened.page.on("console", lambda message: opened.messages.append(f"{message.type}: {message.text}"))
        opened.page.on("pageerror", lambda error: opened.messages.append(str(error)))
        opened.page.on("request", lambda request: opened.requests.append(request.url))
        page, _, fragment = name.partition("#")
        opened.page.goto(addresses[page] + (f"#{fragment}" if fragment else ""))
        if options.get("java_script_enabled", True):
            drawn = {"report": 4, "sweep": 1}.get(page, 0)
            until(opened.page, f"document.querySelectorAll('.chart .main-svg').length >= {drawn}")
        return opened

    yield open_it
    for context in contexts:
        context.close()
