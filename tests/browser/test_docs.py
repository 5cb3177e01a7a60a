"""The documentation site at the width of a laptop."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.conftest import ROOT, ran

TOO_WIDE = """() => [...document.querySelectorAll("pre > code")]
    .filter(code => code.scrollWidth > code.clientWidth)
    .map(code => code.textContent.slice(0, 200))"""


@pytest.mark.browser
@pytest.mark.programs
def test_no_block_of_code_has_to_be_scrolled(browser: Browser, tmp_path: Path) -> None:
    done = ran(sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    page = browser.new_context(viewport={"width": 1280, "height": 800}, offline=True).new_page()
    pages = sorted(tmp_path.glob("*.html"))
    assert len(pages) > 15
    for file in pages:
        page.goto(file.as_uri())
        assert page.evaluate(TOO_WIDE) == [], file.name
