"""Pages in the distribution's Chromium, without a network."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from imagebuild.report import LogText, report_html
from tests.report_samples import BAD, HOSTILE


@dataclass
class Opened:
    """A page, and what it said while it was open."""

    page: Page
    messages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


Open = Callable[..., Opened]


def until(page: Page, expression: str, seconds: float = 15) -> None:
    """Wait until a JavaScript expression is true. (Playwright's own function needs `eval`, which the page forbids.)"""
    end = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < end, f"never true: {expression}"
        page.wait_for_timeout(50)


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
def bad_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a report that has one of everything."""
    log = "\n".join(f"node1:100:{n} NCCL INFO Channel {n % 16:02}/16 : 0 1 2 3" for n in range(2000)) + HOSTILE
    path = tmp_path_factory.mktemp("pages") / "bad.html"
    path.write_text(report_html(BAD, (LogText("logs/hung.log", log, 50_000_000, 49_900_000),)), encoding="utf-8")
    return path


@pytest.fixture
def open_page(browser: Browser, bad_file: Path) -> Iterator[Open]:
    contexts = []

    def open_it(
        width: int = 1280, height: int = 900, scheme: Literal["light", "dark"] = "light", **options: Any
    ) -> Opened:
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, offline=True, **options
        )
        contexts.append(context)
        opened = Opened(context.new_page())
        opened.page.on("console", lambda message: opened.messages.append(f"{message.type}: {message.text}"))
        opened.page.on("pageerror", lambda error: opened.messages.append(str(error)))
        opened.page.on("request", lambda request: opened.requests.append(request.url))
        opened.page.goto(bad_file.as_uri())
        if options.get("java_script_enabled", True):
            until(opened.page, "document.querySelectorAll('.chart .main-svg').length >= 5")
        return opened

    yield open_it
    for context in contexts:
        context.close()
