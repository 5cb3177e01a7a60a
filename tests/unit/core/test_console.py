import io

import pytest
from rich.console import Console

from imagebuild.core import console, markdown_table


def test_a_markdown_table_keeps_its_cells_apart() -> None:
    rows = [("a|b", "two\nlines"), (r"has\|one", r"ends in \\|"), ("", "")]
    assert markdown_table(("x", "y|z"), rows).splitlines() == [
        r"| x | y\|z |",
        "| --- | --- |",
        r"| a\|b | two lines |",
        r"| has\|one | ends in \\\| |",
        "|  |  |",
    ]


@pytest.mark.parametrize(("width", "titles"), [(110, 3), (100, 2), (46, 2), (30, 1)])
def test_what_people_copy_stays_whole_in_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, width: int, titles: int
) -> None:
    file = io.StringIO()
    monkeypatch.setattr(console, "out", Console(file=file, force_terminal=True, width=width, color_system=None))
    identity = "quickstart-cuda13.5-debian13-runtime"[:30]
    console.print_table(("target", "platforms", "image"), [(identity, "amd64, arm64", "x" * 60)], whole=["image"])
    assert identity in file.getvalue()
    assert "…" not in file.getvalue()
    assert sum(title in file.getvalue() for title in ("target", "platforms", "image")) == titles
