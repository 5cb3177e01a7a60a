from collections.abc import Callable

import pytest

from imagebuild.project import Plan, make_plan, parse_changes, select_targets
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
