"""The report of `imagebuild lock`."""

from __future__ import annotations

from pathlib import Path

from imagebuild.lock.facts import Contents
from imagebuild.lock.report import REPORT, write_report


def test_the_report_has_no_passwords_and_follows_no_link(tmp_path: Path) -> None:
    own, folder = tmp_path / "own", tmp_path / "build"
    own.write_text("mine")
    folder.mkdir()
    (folder / REPORT).symlink_to(own)
    url = "https://me:hunter2@example.org/x.tar?token=hunter2"
    archives = {url: Contents(output=f"+ TOKEN=hunter2\ncurl {url}")}
    path = write_report(folder, [("wrong", "x", url)], [f"GET {url}: 200"], archives, [])
    assert path == folder / REPORT
    assert own.read_text() == "mine"
    assert "example.org/x.tar" in path.read_text()
    assert "hunter2" not in path.read_text()
