"""Texts of a project as they are read, and all mistakes in them at once; single ones: test_refusals."""

from pathlib import Path
from unittest.mock import Mock

import pytest

from imagebuild.core import ConfigError
from imagebuild.project import make_plan
from imagebuild.render import Renderer
from tests.conftest import TOOL, Files


@pytest.mark.parametrize("home", ["/proc", None])
def test_nothing_can_be_cached(tiny: Files, monkeypatch: pytest.MonkeyPatch, home: str | None) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if home:
        monkeypatch.setenv("HOME", home)
    else:
        monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("Could not determine home directory.")))
    tiny.replace("matrix.yaml", 'library: "1.2"', "library: 1.10")
    project = tiny.load()
    assert project.matrix.model.versions["library"][0].version == "1.10"  # versions stay text
    target = make_plan(project).targets[0]
    assert "FROM debian" in Renderer(project).dockerfile(target).text


def test_all_mistakes_at_once(tiny: Files) -> None:
    tiny.replace("matrix.yaml", "description: A small", "descripton: A small")
    tiny.replace("matrix.yaml", "platforms: [linux/amd64]", "platforms: []")
    tiny.component("tool", TOOL + "cheks: []\n")
    with pytest.raises(ConfigError) as caught:
        make_plan(tiny.load())
    lines = str(caught.value).splitlines()
    assert len(lines) == 4
    assert any("cheks: unknown key; did you mean 'checks'?" in line for line in lines)
