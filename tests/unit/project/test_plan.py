"""Targets of a project. Mistakes in its files, one at a time: test_refusals."""

from collections.abc import Callable

import pytest

from imagebuild.core.errors import ConfigError
from imagebuild.project.plan import Plan, make_plan
from imagebuild.project.project import Changes
from imagebuild.project.select import select_targets
from tests.conftest import LIBRARY, Files, data

CASES = data("cases/project/plan")


def test_the_plan_of_this_project(full_plan: Plan, golden: Callable[[str, str], None]) -> None:
    golden("tests/golden/plan.json", full_plan.model_dump_json(indent=1) + "\n")


def test_requirements_come_first_are_added_and_may_be_provided(tiny: Files) -> None:
    tiny.replace("matrix.yaml", "components: [tool, library]", "components: [tool]")
    assert list(make_plan(tiny.load()).targets[0].components) == ["library", "tool"]
    tiny.component("other", LIBRARY + "provides: [library]\n")
    tiny.replace("matrix.yaml", "components: [tool]", "components: [tool, other]")
    tiny.replace("matrix.yaml", 'library: "1.2"', 'other: "1.2"')
    assert list(make_plan(tiny.load()).targets[0].components) == ["other", "tool"]


@pytest.mark.parametrize(("with_", "without", "selector", "says"), CASES["options-are-judged-for-selected-targets"])
def test_options_are_judged_for_selected_targets(
    tiny: Files, with_: list[str], without: list[str], selector: str, says: str
) -> None:
    for name, more in {"rival": "", "second": "provides: [rival]\n", "rare": ""}.items():
        tiny.component(name, f"{LIBRARY}{more}")
    versions = '  rival: "1"\n  second: "1"\n  rare: {when: {cuda: "13.0"}, version: "1"}\n'
    tiny.replace("matrix.yaml", "images:\n", f"{versions}images:\n")
    image = (tiny.root / "matrix.yaml").read_text().partition("images:\n")[2].partition("rules:")[0]
    other = (
        image.replace("tiny:", "other:")
        .replace("[tool, library]", "[second]")
        .replace(":{cuda}", ":{rival.version}-{cuda}")
    )
    tiny.replace("matrix.yaml", "rules:", f"{other}rules:")
    made = make_plan(tiny.load().changed(Changes(with_=tuple(with_), without=tuple(without))))
    if not says:
        assert select_targets(made, [selector])
        return
    with pytest.raises(ConfigError) as error:
        select_targets(made, [selector])
    assert says in str(error.value)


def test_tags_and_other_images_stop_only_a_plan_of_everything(tiny: Files) -> None:
    tiny.replace("matrix.yaml", ":{cuda}-", ":{gone.version}-")
    image = (tiny.root / "matrix.yaml").read_text().partition("images:\n")[2].partition("rules:")[0]
    tiny.replace("matrix.yaml", "rules:", image.replace("tiny:", "other:").replace("library]", "nobody]") + "rules:")
    tiny.append("matrix.yaml", "  - {name: unused, when: {image: gone}, reason: x}\n")
    with pytest.raises(ConfigError, match="unknown component 'nobody'"):
        make_plan(tiny.load())
    made = make_plan(tiny.load(), ["tiny-cuda13.0-*"])
    assert {(target.image, target.tags) for target in made.targets} == {("tiny", ())}


def test_a_base_without_versions_is_one_mistake(tiny: Files) -> None:
    tiny.replace("matrix.yaml", '"1.2"', '{when: {os: debian13}, version: "1.2"}')
    tiny.replace("matrix.yaml", "versions:", "  corp: {image: corp.example/debian}\nversions:")
    tiny.replace("matrix.yaml", "[debian13]", "[corp]")
    with pytest.raises(ConfigError) as error:
        make_plan(tiny.load())
    assert "bases.corp: no versions are known for this base: library; give this image the name" in str(error.value)
    assert "such as debian13: see docs/tutorial.md" in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_names_may_be_words_that_files_have_as_keys(tiny: Files) -> None:
    tiny.replace("matrix.yaml", "  tiny:", "  when:")
    assert {target.image for target in make_plan(tiny.load()).targets} == {"when"}


@pytest.mark.parametrize(("selectors", "number"), CASES["select"])
def test_select(tiny: Files, selectors: list[str], number: int) -> None:
    assert len(select_targets(make_plan(tiny.load()), selectors)) == number


def test_a_selection_leaves_an_alias_where_it_is(tiny: Files) -> None:
    tiny.replace("matrix.yaml", "    tags:", '    aliases: ["{repository}/{image}:latest"]\n    tags:')
    made = make_plan(tiny.load())
    assert [target.aliases for target in made.targets] == [(), (), ("example/tiny:latest",)]
    assert [target.aliases for target in select_targets(made, ["cuda=12.9"])] == [()]
