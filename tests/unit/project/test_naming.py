"""What targets are called: names in the engine's store, tags that never move, aliases that do."""

from __future__ import annotations

from imagebuild.project import make_plan, select_targets
from tests.conftest import Files

TAGS = '    tags: ["{repository}/{image}:{cuda}-{os}-{variant}"]\n'


def named(tiny: Files, tags: str, *aliases: str) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Target → its tags and aliases, without the repository."""
    listed = "".join(f"      - {alias}\n" for alias in aliases)
    tiny.replace("matrix.yaml", TAGS, f'    tags: ["{tags}"]\n' + (f"    aliases:\n{listed}" if aliases else ""))
    made = make_plan(tiny.load())
    short = [
        [tuple(t.removeprefix("example/tiny:") for t in names) for names in (t.tags, t.aliases)] for t in made.targets
    ]
    return {t.id.removeprefix("tiny-cuda"): (names[0], names[1]) for t, names in zip(made.targets, short, strict=True)}


def test_the_commit_is_filled_in_when_it_is_published(tiny: Files) -> None:
    found = named(tiny, "{repository}/{image}:{cuda}-lib{library.version}-{variant}-{revision}")
    assert found["13.0-debian13-devel"] == (("13.0-lib1.2-devel-{revision}",), ())


def test_of_targets_with_the_same_alias_the_last_has_it(tiny: Files) -> None:
    major = '"{repository}/{image}:{cuda-major}-{os}"'
    latest = '{tag: "{repository}/{image}:latest", when: {variant: runtime}}'
    found = named(
        tiny, "{repository}/{image}:{cuda}-{os}-{variant}", major, latest, '"{repository}/{image}:{cuda-minor}"'
    )
    assert {target: aliases for target, (_, aliases) in found.items()} == {
        "12.9-debian13-runtime": ("12-debian13", "12.9"),
        "13.0-debian13-runtime": ("latest",),
        "13.0-debian13-devel": ("13-debian13", "13.0"),
    }


def test_a_selection_leaves_an_alias_where_it_is(tiny: Files) -> None:
    found = named(tiny, "{repository}/{image}:{cuda}-{os}-{variant}", '"{repository}/{image}:latest"')
    chosen = select_targets(make_plan(tiny.load()), ["cuda=12.9"])
    assert [target.aliases for target in chosen] == [()]
    assert found["13.0-debian13-devel"][1] == ("latest",)
