"""The README's table of images, and `imagebuild catalog` as it is called."""

from __future__ import annotations

from pathlib import Path

import pytest

from imagebuild.core import ConfigError
from imagebuild.project import Plan, Project
from imagebuild.publish import BEGIN, END, images_table, replace_table
from tests.conftest import ROOT
from tests.unit.conftest import Call

TEXT = f"# Title\n\nbefore\n\n{BEGIN}\nold\n{END}\n\nafter\n"
FILES = ("--project", ROOT)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a README, from which this project is used."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text(TEXT)
    return tmp_path


def test_the_readme_of_this_project_is_fresh(project: Project, full_plan: Plan) -> None:
    text = (ROOT / "README.md").read_text()
    assert text == replace_table("README.md", text, images_table(project, full_plan)), (
        "`imagebuild catalog --readme README.md`"
    )


@pytest.mark.parametrize("text", ["", BEGIN, f"{END}{BEGIN}", TEXT + BEGIN])
def test_markers_must_be_there_once(text: str) -> None:
    with pytest.raises(ConfigError, match=r"README.md: put one line <!-- images:begin --> and"):
        replace_table("README.md", text, "table\n")


def test_the_table_is_written_between_the_markers(here: Path, command: Call) -> None:
    assert command("catalog", "--readme", "README.md", *FILES)[0] == 0
    text = (here / "README.md").read_text()
    assert text.startswith("# Title\n\nbefore\n\n<!-- images:begin -->\n| image |")
    assert text.endswith("<!-- images:end -->\n\nafter\n")


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ([], "give -o DIR"),
        (["-o", "x"], "names no registry; give --registry"),
    ],
)
def test_mistakes(args: list[str], problem: str, here: Path, command: Call) -> None:
    status, _, err = command("catalog", *args, *FILES)
    assert (status, problem in err, (here / "x").exists()) == (2, True, False)
