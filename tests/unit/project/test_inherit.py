"""Images that start from other images: see tests/data/inheritance.yaml."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from imagebuild.core.errors import ConfigError
from imagebuild.project.load import load_project
from imagebuild.project.plan import make_plan
from imagebuild.project.project import Project
from tests.conftest import Files, data


def written(folder: Path, images: Any, extends: str = "imagebuild") -> Path:
    folder.mkdir(exist_ok=True)
    document = {"extends": extends, "repository": "ghcr.io/acme", "images": images}
    (folder / "matrix.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    return folder


def targets(project: Project) -> list[str]:
    return [target.id for target in make_plan(project).targets]


@pytest.mark.parametrize("row", data("inheritance"), ids=lambda row: row.get("title", row.get("error")))
def test_first_matrices(tmp_path: Path, row: dict[str, Any]) -> None:
    folder = written(tmp_path, row["images"])
    if "error" in row:
        with pytest.raises(ConfigError) as error:
            targets(load_project(folder))
        assert row["error"] in str(error.value)
        written(tmp_path, row["instead"])
    assert targets(load_project(folder)) == row["targets"]


def test_only_named_keys_change(tmp_path: Path) -> None:
    shipped = load_project(written(tmp_path, {"slim": None}))
    train = {
        "from": "slim",
        "axes": {"gpu": "90"},
        "build-with": {"sharp": "nccl-rdma-sharp-plugin"},
        "components": {"remove": ["sshd"]},
    }
    own = load_project(written(tmp_path, {"train": train})).matrix.model.images["train"]
    slim = shipped.matrix.model.images["slim"]
    assert own.components == tuple(name for name in slim.components if name != "sshd")
    assert own.axes == {**slim.axes, "gpu": ("90",)}
    assert own.build_with == {**slim.build_with, "sharp": "nccl-rdma-sharp-plugin"}
    same = {"axes", "build_with", "components_", "from_"}
    assert own.model_dump(exclude=same) == slim.model_dump(exclude=same)


def test_conditions_of_inherited_aliases_may_name_other_values(tmp_path: Path, tiny: Files) -> None:
    tiny.replace("matrix.yaml", "    tags:", '    aliases: [{tag: "x:{os}", when: {cuda: "12.9"}}]\n    tags:')
    folder = written(tmp_path / "own", {"tiny": {"axes": {"cuda": "13.0"}}}, "..")
    assert targets(load_project(folder))[0] == "tiny-cuda13.0-debian13-runtime"


def test_a_long_chain_is_refused(tmp_path: Path) -> None:
    images = {f"a{number}": {"from": f"a{number + 1}"} for number in range(3000)}
    with pytest.raises(ConfigError) as error:
        load_project(written(tmp_path, images))
    assert "starts from more than 50 images" in str(error.value)
