"""Targets of a project; and its texts, as they are read, with all mistakes at once. Single ones: test_refusals."""

from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from imagebuild.core.errors import ConfigError
from imagebuild.project.changes import parse_changes
from imagebuild.project.plan import Plan, make_plan
from imagebuild.project.select import select_targets
from imagebuild.render.renderer import Renderer
from tests.conftest import LIBRARY, TOOL, Files


def test_the_plan_of_this_project(full_plan: Plan, golden: Callable[[str, str], None]) -> None:
    golden("tests/golden/plan.json", full_plan.model_dump_json(indent=1) + "\n")


def test_requirements_come_first_are_added_and_may_be_provided(tiny: Files) -> None:
    tiny.replace("matrix.yaml", "components: [tool, library]", "components: [tool]")
    assert list(make_plan(tiny.load()).targets[0].components) == ["library", "tool"]
    tiny.component("other", LIBRARY + "provides: [library]\n")
    tiny.replace("matrix.yaml", "components: [tool]", "components: [tool, other]")
    tiny.replace("matrix.yaml", 'library: "1.2"', 'other: "1.2"')
    assert list(make_plan(tiny.load()).targets[0].components) == ["other", "tool"]


@pytest.mark.parametrize(
    ("selectors", "number"),
    [
        ([], 3),
        (["tiny"], 3),
        (["*-devel"], 1),
        (["cuda=13.0"], 2),
        (["cuda=13.0", "*-devel"], 1),
        (["image=tiny", "variant=r*"], 2),
    ],
)
def test_select(tiny: Files, selectors: list[str], number: int) -> None:
    assert len(select_targets(make_plan(tiny.load()), selectors)) == number


def test_names_may_be_words_that_files_have_as_keys(tiny: Files) -> None:
    tiny.replace("matrix.yaml", "  tiny:", "  when:")
    assert {target.image for target in make_plan(tiny.load()).targets} == {"when"}


def test_a_selection_leaves_an_alias_where_it_is(tiny: Files) -> None:
    tiny.replace("matrix.yaml", "    tags:", '    aliases: ["{repository}/{image}:latest"]\n    tags:')
    made = make_plan(tiny.load())
    assert [target.aliases for target in made.targets] == [(), (), ("example/tiny:latest",)]
    assert [target.aliases for target in select_targets(made, ["cuda=12.9"])] == [()]


def test_the_command_that_pins_what_changes_need() -> None:
    changes = parse_changes(["tool=4", "cuda=13.1"], with_=["extra"], repository="r.test/x")
    assert changes.lock_command("tiny") == "imagebuild lock tiny --set tool=4 --set cuda=13.1 --with extra"


def test_changes_of_the_command_line(tiny: Files) -> None:
    tiny.component("extra", LIBRARY + "version-axis: os\n")
    settings = ["cuda=13.1", "library=9", f"tool=4@{'c' * 40}"]
    made = make_plan(tiny.load().changed(parse_changes(settings, repository="r.test/x")))
    assert {t.axes["cuda"] for t in made.targets} == {"13.1"}
    assert made.targets[0].components == {"library": "9", "tool": "4"}
    assert {name.partition(":")[0] for t in made.targets for name in (t.name, *t.tags)} == {"r.test/x/tiny"}
    made = make_plan(tiny.load().changed(parse_changes([], with_=["extra"], without=["tool"])))
    assert list(made.targets[0].components) == ["extra", "library"]
    assert made.targets[0].name == "example/tiny:cuda12.9-debian13-runtime"


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
