from pathlib import Path
from typing import Any

import pytest
import yaml

from imagebuild.core.errors import ConfigError
from imagebuild.core.fields import Platform
from imagebuild.project.load import load_project
from imagebuild.project.lockfile import Archive, WheelSet
from imagebuild.project.plan import make_plan
from imagebuild.project.project import Project
from imagebuild.render.renderer import Renderer
from imagebuild.render.resolve import resolve_recipe
from tests.conftest import ROOT, Files


@pytest.mark.parametrize(
    ("platforms", "archs"),
    [((), ["amd64", "arm64"]), (("linux/arm64",), ["arm64"]), (("linux/amd64", "linux/arm64"), ["amd64", "arm64"])],
)
def test_sources_of_some_platforms(tiny: Files, platforms: tuple[Platform, ...], archs: list[str]) -> None:
    project = tiny.load()
    assert resolve_recipe(project, make_plan(project).targets[0]).sources_for(["linux/arm64"]) == ()  # only for amd64
    archive = (ROOT / "tests/data/archive-component.yaml").read_text()
    tiny.component("library", archive, build="{{ archive(name, archives) }}\nFROM scratch AS library\n")
    tiny.replace("matrix.yaml", "platforms: [linux/amd64]", "platforms: [linux/amd64, linux/arm64]")
    project = tiny.load()
    recipe = resolve_recipe(project, make_plan(project).targets[0])
    found = recipe.sources_for(platforms)
    assert [owned.arch for owned in found if isinstance(owned.source, Archive)] == archs
    assert any(owned.arch is None for owned in found), "the base is for all"


def test_rows_with_the_same_version_stay_distinct(tiny: Files) -> None:
    rows = '[{when: {cuda: "12.9"}, version: "1.2"}, {version: "1.2"}]'
    tiny.replace("matrix.yaml", 'library: "1.2"', f"library: {rows}")
    project = tiny.load()
    renderer = Renderer(project)
    pins = project.matrix.model.versions["library"]
    for target in make_plan(project).targets:
        expected = pins[0] if target.axes["cuda"] == "12.9" else pins[1]
        assert renderer.recipe(target).parts["library"].pin is expected


def python_sets(folder: Path, **changes: Any) -> dict[str, WheelSet]:
    """Maps the targets of an image that starts from `quickstart` to their Python packages."""
    image = {"from": "quickstart", "axes": {"cuda": "13.5"}, **changes}
    document = {"extends": "imagebuild", "repository": "ghcr.io/acme", "images": {"train": image}}
    (folder / "matrix.yaml").write_text(yaml.safe_dump(document))
    project = load_project(folder)
    recipes = {target.id: resolve_recipe(project, target) for target in make_plan(project).targets}
    return {
        name: source
        for name, recipe in recipes.items()
        for owner, source, _ in recipe.sources
        if owner == "python" and isinstance(source, WheelSet)
    }


def test_no_wheel_brings_a_second_copy_of_what_a_component_provides(project: Project) -> None:
    models = {name: loaded.model for name, loaded in project.components.items()}
    for name, model in models.items():
        for what in {*model.provides} & {*models}:
            assert {*models[what].instead_of_python} <= {*model.instead_of_python}, f"{name} provides {what}"


def test_python_packages_of_an_image_and_its_components(tmp_path: Path) -> None:
    brought = ("libucx-cu12", "libucx-cu13", "nvidia-cuda-runtime", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
    wanted = WheelSet("python", "3.13", ("transformers==5.1.0",), "3.13", brought)
    both = python_sets(tmp_path, python={"transformers": "5.1.0"})
    assert both == dict.fromkeys(("train-cuda13.5-debian13-runtime", "train-cuda13.5-debian13-devel"), wanted)
    assert wanted.name == f"python 3.13 transformers==5.1.0 without {' '.join(brought)}"
    found = python_sets(tmp_path, python={"vllm[audio]": "0.20.0"}, components={"add": ["torch", "nvshmem"]})
    for wheels in found.values():
        assert wheels.requirements == ("torch==2.14.1", "vllm[audio]==0.20.0")
        assert wheels.without == (*brought, "nvidia-nvshmem-cu12", "nvidia-nvshmem-cu13")
    assert python_sets(tmp_path) == {}
    with pytest.raises(ConfigError, match=r"images.train: the image has no Python package; add one"):
        python_sets(tmp_path, components={"add": ["python"]})
    with pytest.raises(ConfigError, match=r"python.nvidia_nccl_cu13: the component nccl-wheel brings this package"):
        python_sets(tmp_path, python={"nvidia_nccl_cu13": "2.32.3"})
    for package, version in (("a b", "1"), ("a", ">=1"), ("-r", "1"), ("a;b", "1"), ("a", "1 --index-url=x")):
        with pytest.raises(ConfigError, match=r"images.train.python"):
            python_sets(tmp_path, python={package: version})
