"""Targets of a project. Mistakes in its files, one at a time: test_refusals."""

from collections.abc import Callable

from imagebuild.project.plan import Plan, make_plan
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


def test_names_may_be_words_that_files_have_as_keys(tiny: Files) -> None:
    tiny.replace("matrix.yaml", "  tiny:", "  when:")
    assert {target.image for target in make_plan(tiny.load()).targets} == {"when"}
