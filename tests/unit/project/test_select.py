import pytest

from imagebuild.project.plan import make_plan
from imagebuild.project.select import select_targets
from tests.conftest import Files


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
