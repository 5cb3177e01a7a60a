from pathlib import Path
from unittest.mock import Mock

import pytest

from imagebuild.project.plan import make_plan
from imagebuild.render.renderer import Renderer
from tests.conftest import Files


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
