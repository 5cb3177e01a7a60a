"""The README's table of images, and `imagebuild catalog` as it is called."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from imagebuild.cli import app
from imagebuild.core import ConfigError
from imagebuild.project import Plan, Project
from imagebuild.publish import (
    BEGIN,
    END,
    images_table,
    replace_table,
)
from tests.conftest import ROOT

TEXT = f"# Title\n\nbefore\n\n{BEGIN}\nold\n{END}\n\nafter\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a README, from which this project is used."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text(TEXT)
    return tmp_path


def call(*args: str) -> Result:
    return CliRunner().invoke(app, ["catalog", *args, "--project", str(ROOT)])


def test_the_readme_of_this_project_is_fresh(project: Project, full_plan: Plan) -> None:
    text = (ROOT / "README.md").read_text()
    assert text == replace_table("README.md", text, images_table(project, full_plan)), (
        "`imagebuild catalog --readme README.md`"
    )


def test_the_table_says_what_the_plan_says(project: Project, full_plan: Plan) -> None:
    lines = images_table(project, full_plan).splitlines()
    assert lines[0].startswith("| image | what it is | cuda | os | variant |")
    for name in project.matrix.model.images:
        (row,) = [line for line in lines if line.startswith(f"| `{name}` |")]
        assert f"| {sum(t.image == name for t in full_plan.targets)} |" in row
        assert row.count("|") == lines[0].count("|")
    assert f"{len(full_plan.targets)} targets, by" in lines[-1]
    assert "12.6.3 to 13.4.2 (8)" in "\n".join(lines)
    assert "at most 450 MB runtime, 770 MB devel" in "\n".join(lines)


@pytest.mark.parametrize("text", ["", BEGIN, f"{END}{BEGIN}", TEXT + BEGIN])
def test_markers_must_be_there_once(text: str) -> None:
    with pytest.raises(ConfigError, match=r"README.md: put one line <!-- images:begin --> and"):
        replace_table("README.md", text, "table\n")


def test_check(here: Path) -> None:
    assert call("--readme", "README.md", "--check").exit_code == 1
    assert (here / "README.md").read_text() == TEXT
    assert call("--readme", "README.md").exit_code == 0
    text = (here / "README.md").read_text()
    assert text.startswith("# Title\n\nbefore\n\n<!-- images:begin -->\n| image |")
    assert text.endswith("<!-- images:end -->\n\nafter\n")
    assert call("--readme", "README.md", "--check").exit_code == 0
    (here / "README.md").write_text(text.replace("hpcx", "hpcy"))
    done = call("--readme", "README.md", "--check")
    assert done.exit_code == 1
    assert "is stale; `imagebuild catalog --readme README.md` writes it anew" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ([], "give -o DIR"),
        (["--check", "-o", "x"], "needs --readme"),
        (["-o", "x"], "names no registry; give --registry"),
    ],
)
def test_mistakes(args: list[str], problem: str, here: Path) -> None:
    done = call(*args)
    assert isinstance(done.exception, ConfigError)
    assert problem in str(done.exception)
    assert not (here / "x").exists()
