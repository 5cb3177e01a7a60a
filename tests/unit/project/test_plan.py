"""Targets of a project. Mistakes in its files, one at a time: test_refusals."""

from collections.abc import Callable

import pytest

from imagebuild.core.errors import ConfigError
from imagebuild.project.plan import Plan, make_plan, select_targets
from imagebuild.project.project import Changes
from tests.conftest import LIBRARY, Files


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
    ("options", "selector", "says"),
    [
        (Changes(with_=("rival",), without=("tool",)), "tiny", ""),
        (Changes(with_=("rival",), without=("tool",)), "other", "rival and second provide 'rival'"),
        (Changes(with_=("rival",), without=("tool",)), "*-runtime", "rival and second provide 'rival'"),
        (Changes(with_=("rare",)), "tiny-cuda13.0-*", ""),
        (Changes(with_=("rare",)), "tiny", "no version applies to tiny-cuda12.9-debian13-runtime; add `rare: VERSION`"),
        (Changes(without=("second", "library", "tool")), "tiny", ""),
        (Changes(without=("second", "library", "tool")), "other", "no value for {rival.version}"),
    ],
)
def test_options_are_judged_for_selected_targets(tiny: Files, options: Changes, selector: str, says: str) -> None:
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
    made = make_plan(tiny.load().changed(options))
    if not says:
        assert select_targets(made, [selector])
        return
    with pytest.raises(ConfigError) as error:
        select_targets(made, [selector])
    assert says in str(error.value)


def test_names_may_be_words_that_files_have_as_keys(tiny: Files) -> None:
    tiny.replace("matrix.yaml", "  tiny:", "  when:")
    assert {target.image for target in make_plan(tiny.load()).targets} == {"when"}


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


def test_a_selection_leaves_an_alias_where_it_is(tiny: Files) -> None:
    tiny.replace("matrix.yaml", "    tags:", '    aliases: ["{repository}/{image}:latest"]\n    tags:')
    made = make_plan(tiny.load())
    assert [target.aliases for target in made.targets] == [(), (), ("example/tiny:latest",)]
    assert [target.aliases for target in select_targets(made, ["cuda=12.9"])] == [()]
