"""The origin of each value of a target."""

from pathlib import Path

import pytest

from imagebuild.project.explain import explain
from imagebuild.project.load import load_project
from imagebuild.project.plan import make_plan
from imagebuild.project.project import Changes
from imagebuild.project.select import select_one
from tests.conftest import ROOT, data

CASES = data("cases/project/explain")

SHIPPED = ROOT / "matrix.yaml"
OWN: str = CASES["own"]


@pytest.fixture
def origins(tmp_path: Path) -> dict[str, tuple[str, str]]:
    (tmp_path / "matrix.yaml").write_text(OWN)
    changes = Changes({"ucx": "1.21.0"}, ("aws-ofi-nccl",), ("sshd",), base_image="debian:13.1-slim")
    project = load_project(tmp_path).changed(changes)
    rows = explain(project, select_one(make_plan(project), "debug*"))
    return {name: (value, origin.replace(f"{tmp_path}/", "")) for name, value, origin in rows}


def line(text: str) -> int:
    return SHIPPED.read_text().partition(text)[0].count("\n") + 1


def test_each_value_names_its_origin(origins: dict[str, tuple[str, str]]) -> None:
    assert {name: origins[name] for name in ("axis: cuda", "env: TEAM", "base", "component: gdrcopy")} == {
        "axis: cuda": ("13.5", "matrix.yaml:7"),
        "env: TEAM": ("net", "matrix.yaml:8"),
        "base": ("debian:13.1-slim", "--base-image"),
        "component: gdrcopy": ("2.5", "matrix.yaml:3"),
    }
    assert origins["component: ucx"] == ("1.21.0", "--set ucx")
    assert origins["component: sshd"] == ("removed", "--without")
    assert origins["component: ucc"] == ("1.8.0", f"{SHIPPED}:{line('  ucc:')}")
    assert origins["build-on"] == ("debian12", f"{SHIPPED}:{line('    build-on: debian12')}")
    assert origins["component: aws-ofi-nccl"][1] == f"--with; version: {SHIPPED}:{line('  aws-ofi-nccl:')}"


def test_each_package_names_the_image_that_adds_it(tmp_path: Path) -> None:
    (tmp_path / "matrix.yaml").write_text(CASES["packages"])
    project = load_project(tmp_path)
    rows = [*explain(project, select_one(make_plan(project), "mine*"))]
    found = {
        row[:2]: row[2].rpartition(":")[2] for row in rows if row[0].startswith(("packages", "python", "size", "desc"))
    }
    assert found == {
        ("packages: apt", "htop"): "7", ("packages: apt", "jq"): "13", ("python: transformers", "5.1.0"): "8",
        ("python: numpy", "2.3.0"): "14", ("description", "Mine"): "12", ("size-limit-mb", "1000"): "9",
    }  # fmt: skip
