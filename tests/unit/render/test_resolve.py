from dataclasses import FrozenInstanceError

import pytest

from imagebuild.core.fields import Platform
from imagebuild.project.lockfile import Archive
from imagebuild.project.plan import Plan, make_plan
from imagebuild.project.project import Project
from imagebuild.render.renderer import Renderer
from imagebuild.render.resolve import resolve_recipe
from tests.conftest import ROOT, Files


def test_a_recipe_does_not_change_and_is_the_same_alone_and_with_others(
    project: Project, renderer: Renderer, full_plan: Plan
) -> None:
    for target in full_plan.targets[::7]:
        alone, shared = resolve_recipe(project, target), renderer.recipe(target)
        assert (alone.sources, alone.lock_hash, alone.base) == (shared.sources, shared.lock_hash, shared.base)
        assert [*alone.parts] == [*shared.parts]
        with pytest.raises(FrozenInstanceError):
            alone.lock_hash = ""  # type: ignore[misc]


def test_targets_share_parts(renderer: Renderer, full_plan: Plan) -> None:
    older, newer = (target for target in full_plan.targets if target.id.startswith("open-cuda13.5-debian13-"))
    first, second = renderer.recipe(older), renderer.recipe(newer)
    assert [stage.name for stage in first.stages if stage in second.stages] == [stage.name for stage in first.stages]


@pytest.mark.parametrize(
    ("platforms", "archs"),
    [((), ["amd64", "arm64"]), (("linux/arm64",), ["arm64"]), (("linux/amd64", "linux/arm64"), ["amd64", "arm64"])],
)
def test_sources_of_some_platforms(tiny: Files, platforms: tuple[Platform, ...], archs: list[str]) -> None:
    archive = (ROOT / "tests/data/archive-component.yaml").read_text()
    tiny.component("library", archive, build="{{ archive(name, archives) }}\nFROM scratch AS library\n")
    tiny.replace("matrix.yaml", "platforms: [linux/amd64]", "platforms: [linux/amd64, linux/arm64]")
    project = tiny.load()
    recipe = resolve_recipe(project, make_plan(project).targets[0])
    found = recipe.sources_for(platforms)
    assert [owned.arch for owned in found if isinstance(owned.source, Archive)] == archs
    assert any(owned.arch is None for owned in found), "the base is for all"


def test_a_target_needs_nothing_for_a_platform_that_it_does_not_have(tiny: Files) -> None:
    project = tiny.load()
    assert resolve_recipe(project, make_plan(project).targets[0]).sources_for(["linux/arm64"]) == ()


def test_rows_with_the_same_version_stay_distinct(tiny: Files) -> None:
    rows = '[{when: {cuda: "12.9"}, version: "1.2"}, {version: "1.2"}]'
    tiny.replace("matrix.yaml", 'library: "1.2"', f"library: {rows}")
    project = tiny.load()
    renderer = Renderer(project)
    pins = project.matrix.model.versions["library"]
    for target in make_plan(project).targets:
        expected = pins[0] if target.axes["cuda"] == "12.9" else pins[1]
        assert renderer.recipe(target).parts["library"].pin is expected
