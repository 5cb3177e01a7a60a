"""Newer versions of pins: questions to upstream, proposals, and edits of the matrix."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from imagebuild.core.debian import Offers
from imagebuild.core.errors import ConfigError
from imagebuild.lock.bump import BumpResult, bump_pins, edited, inquiries, newer
from imagebuild.lock.resolve import LockFile
from imagebuild.project.lockfile import GitRef, PackageSource, WheelSet
from imagebuild.project.plan import Plan, make_plan
from imagebuild.project.project import Project
from imagebuild.render.renderer import Renderer
from tests.conftest import LIBRARY, Files, data
from tests.unit.lock.lock_fakes import KEY, Fake

CASES = data("cases/lock/bump")

GIT = "https://example.org/tool.git"
URL = "https://example.org/repository/"
REPOSITORY = f"repository: {{name: r, url: '{URL}', key: k}}\n"


@pytest.mark.parametrize(("current", "versions", "found"), CASES["newer-ones"])
def test_newer_ones(current: str, versions: list[str], found: list[str]) -> None:
    assert newer(current, versions) == found


def test_who_is_asked_about_this_projects_pins(project: Project, full_plan: Plan, renderer: Renderer) -> None:
    found = inquiries(renderer.project, (renderer.recipe(t) for t in full_plan.targets))
    kinds: dict[str, set[type]] = {name: set() for name, _ in found}
    for (name, _), questions in found.items():
        kinds[name] |= {type(listing) for listing, _ in questions}
    assert kinds["ucx"] == {GitRef}
    assert kinds["nccl"] == {PackageSource, WheelSet, GitRef}
    assert kinds["cudnn"] == {PackageSource}
    assert [name for name in ("hpcx", "doca-ofed", "nvcc", "rdma-core") if kinds[name]] == []
    # Every pin of the matrix has a reason, except the one whose server answers: it lists nothing newer.
    upstream = Fake(wheel_lists={"nvidia-nccl-cu13": (), "torch": ()})
    result = bump_pins(LockFile(project, renderer, full_plan.targets), upstream, ())
    assert {name for name, _, _ in result.kept} == set(project.matrix.model.versions) - {"torch"}


@pytest.mark.parametrize(
    ("newest", "changes", "said"),
    [
        ("v5.0.11", {("pmix-git", 0): "5.0.11"}, "pmix-git 5.0.11 fixes pmix-5.0.11-opa (if the network is omni-path)"),
        ("v5.0.0", {}, "pmix-5.0.1-cve-2023-41915"),
        ("v4.2.9", {("pmix-git", 0): "4.2.9"}, "known fault of pmix-git 4.2.9: pmix-5.0.10-loopback: "),
    ],
)
def test_known_faults_of_versions(project: Project, newest: str, changes: object, said: str) -> None:
    old = "5.0.10" if newest == "v5.0.11" else "4.2.0"
    rows = (project.matrix.model.versions["pmix-git"][0].model_copy(update={"version": old}),)
    model = project.matrix.model.model_copy(update={"versions": {**project.matrix.model.versions, "pmix-git": rows}})
    changed = replace(project, matrix=replace(project.matrix, model=model))
    renderer = Renderer(changed)
    lock = LockFile(changed, renderer, tuple(t for t in make_plan(changed).targets if t.image == "slim"))
    tags = {"https://github.com/openpmix/openpmix.git": {newest: "0" * 40}}
    result = bump_pins(lock, Fake(git_tags=tags), ["pmix-git"])
    assert result.changes == changes
    assert said in " ".join([*result.faults, *(why for _, _, why in result.kept)])


@pytest.fixture
def files(tiny: Files) -> Files:
    tiny.component("library", f"{LIBRARY}{REPOSITORY}packages: {{runtime: ['lib={{version}}-1+{{build}}']}}\n"
                   "facts: [{when: {version: '<3'}, values: {build: cuda13}}]\n")  # fmt: skip
    tiny.component(
        "tool", f"{LIBRARY}requires: [library]\ngit: {GIT}\ntag: v{{version}}\n", build="FROM scratch AS tool\n"
    )
    return tiny


def proposals(files: Files, upstream: Fake, *names: str) -> BumpResult:
    project = files.load()
    renderer = Renderer(project)
    return bump_pins(LockFile(project, renderer, make_plan(project).targets), upstream, names)


def upstream(*versions: str, tags: tuple[str, ...] = ("v3.4",)) -> Fake:
    return Fake(
        indexes={URL: Offers({"lib": list(versions)}, signed_by=(KEY,))}, git_tags={GIT: dict.fromkeys(tags, "1" * 40)}
    )


def test_only_the_version_changes_in_a_package(files: Files) -> None:
    fake = upstream("1.2-1+cuda13", "1.3-1+cuda13", "1.9-1+cuda14", "1.4-2+cuda13", "1.1-1+cuda13")
    found = proposals(files, fake)
    assert found.changes == {("library", 0): "1.3"}
    assert [a for a in fake.asked if a[0] == "index"] == [("index", URL, "lib")]  # once for both variants


def test_a_version_that_the_component_does_not_know_how_to_install(files: Files) -> None:
    found = proposals(files, upstream("1.3-1+cuda13", "3.0-1+cuda13"))
    assert found.changes == {("library", 0): "1.3"}
    ((pin, version, why),) = found.kept
    assert (pin, version) == ("library", "1.2")
    assert why.startswith("3.0 exists, but cannot be used: ")
    assert "no row sets 'build'" in why


def test_a_version_that_is_not_everywhere_yet(files: Files) -> None:
    files.component(
        "library-wheel", f"{LIBRARY}pin: library\nwheels: ['lib-wheel=={{version}}']\n", build="FROM scratch AS y\n"
    )
    files.replace("matrix.yaml", "[tool, library]", "[tool, library, library-wheel]")
    fake = upstream("1.3-1+cuda13", "1.4-1+cuda13")
    fake.wheel_lists = {"lib-wheel": ("1.2", "1.3")}
    assert proposals(files, fake).changes == {("library", 0): "1.3"}


@pytest.mark.parametrize(("pin", "why"), CASES["pins-that-stay"])
def test_pins_that_stay(files: Files, pin: str, why: str) -> None:
    files.replace("matrix.yaml", 'tool: "3.4"', f"tool: {pin}")
    found = proposals(files, upstream(tags=("v3.5",)))
    assert found.changes == {}
    assert why in {r[2] for r in found.kept}


def test_versions_that_fit_alone_but_not_together(files: Files) -> None:
    """With the same version for both, one tag would name two targets."""
    files.replace("matrix.yaml", 'tool: "3.4"', 'tool: [{when: {cuda: ">=13"}, version: "3.4"}, "3.3"]')
    files.replace("matrix.yaml", "{cuda}-{os}", "{tool.version}-{os}")
    found = proposals(files, upstream(tags=("v3.3", "v3.4", "v3.5")), "tool")
    assert found.changes == {("tool", 0): "3.5", ("tool", 1): "3.4"}
    ((*_, why),) = found.kept
    assert "tag example/tiny:3.5-debian13-runtime names both" in why


def test_a_source_that_does_not_answer(files: Files) -> None:
    found = proposals(files, Fake(git_tags={GIT: {"v3.5": "1" * 40}}))
    assert found.changes == {("tool", 0): "3.5"}
    assert found.kept == [("library", "1.2", f"cannot be compared: {URL}: down")]


MATRIX_PINS: str = CASES["matrix-pins"]


@pytest.mark.parametrize(("row", "old", "new"), CASES["only-the-version-changes-in-the-matrix"])
def test_only_the_version_changes_in_the_matrix(files: Files, row: list[Any], old: str, new: str) -> None:
    files.replace("matrix.yaml", '  library: "1.2"\n  tool: "3.4"\n', MATRIX_PINS)
    text = (files.root / "matrix.yaml").read_text()
    assert edited(files.load().matrix, {(row[0], row[1]): "9"}) == text.replace(old, new, 1)


def test_a_version_that_does_not_stand_by_itself(files: Files) -> None:
    files.replace("matrix.yaml", '  library: "1.2"\n  tool: "3.4"\n', '  library: &v "1.2"\n  tool: *v\n')
    with pytest.raises(
        ConfigError, match=r"matrix.yaml:\d+: 1.2 is not written here as a plain value; change it to 9 by hand"
    ):
        edited(files.load().matrix, {("library", 0): "9"})
