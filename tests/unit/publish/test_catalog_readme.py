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


def test_the_readme_of_this_project_is_fresh(project: Project, full_plan: Plan) -> None:
    text = (ROOT / "README.md").read_text()
    assert text == replace_table("README.md", text, images_table(project, full_plan)), (
        "`imagebuild catalog --readme README.md`"
    )


@pytest.mark.parametrize("text", ["", BEGIN, f"{END}{BEGIN}", TEXT + BEGIN])
def test_markers_must_be_there_once(text: str) -> None:
    with pytest.raises(ConfigError, match=r"README.md: put one line <!-- images:begin --> and"):
        replace_table("README.md", text, "table\n")


def test_the_table_is_written_between_the_markers(tmp_path: Path, command: Call) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(TEXT)
    assert command("catalog", "--readme", readme, "--project", ROOT)[0] == 0
    before, after = "# Title\n\nbefore\n\n<!-- images:begin -->\n| image |", "<!-- images:end -->\n\nafter\n"
    assert readme.read_text().startswith(before)
    assert readme.read_text().endswith(after)
    for args, problem in (((), "give -o DIR"), (("-o", tmp_path / "x"), "names no registry; give --registry")):
        status, _, err = command("catalog", *args, "--project", ROOT)
        assert (status, problem in err, (tmp_path / "x").exists()) == (2, True, False)
