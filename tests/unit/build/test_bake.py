"""The bake file of this project, the effect of each option on it, and the names of the caches of compiled stages."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from imagebuild.build.bake import (
    BuildInputs,
    BuildRequest,
    BuildRun,
    CacheEntry,
    bake_file,
    cache_entries,
    check_platforms,
)
from imagebuild.build.impact import ProjectState
from imagebuild.core.errors import ConfigError
from imagebuild.oci.engine import Endpoint
from imagebuild.oci.layout import EPOCH
from imagebuild.project.plan import Plan, Target
from imagebuild.project.project import Project
from imagebuild.project.select import select_targets
from imagebuild.render.renderer import Renderer
from tests.conftest import data

CASES = data("cases/build/bake")

CA = BuildInputs(secrets={"ca": Path("/etc/ca.crt")})


@pytest.fixture
def run(project: Project, full_plan: Plan) -> BuildRun:
    targets = tuple(t for t in full_plan.targets if t.axes["cuda"] == "13.5")
    request = BuildRequest(targets, output="push", folder=Path("/build"))
    undated = replace(project, lock=project.lock.model_copy(update={"date": None}))
    return BuildRun(request, undated, {}, Endpoint("unix:///x", "private"))


def entry(run: BuildRun, target: Target, **asked: Any) -> dict[str, Any]:
    found: dict[str, Any] = bake_file(replace(run, request=replace(run.request, **asked)))["target"][target.bake_name]
    return found


def test_the_bake_file_of_this_project(run: BuildRun, golden: Callable[[str, str], None]) -> None:
    images = {"ucx-source": "/src/ucx", "debian:13-slim": "oci-layout:///cache@sha256:0"}
    file = bake_file(replace(run, inputs=replace(CA, images=images)))
    golden("tests/golden/bake.json", json.dumps(file, indent=1) + "\n")
    assert not any("." in name for name in file["target"])


def test_a_rebuild_installs_packages_again_and_compiles_nothing_again(run: BuildRun) -> None:
    target = run.request.targets[0]
    assert entry(run, target, rebuilt=date(2026, 11, 26))["no-cache-filter"] == ["image"]
    assert "no-cache-filter" not in entry(run, target)
    assert run.epoch == int(EPOCH)  # the oldest base's day


@pytest.mark.parametrize(("output", "written"), CASES["outputs"])
def test_outputs(run: BuildRun, output: str, written: str) -> None:
    target = run.request.targets[0]
    assert entry(run, target, output=output, compression="zstd", rebuilt=date(2025, 11, 21))["output"] == [
        written.format(id=target.id)
    ]
    staged = entry(run, target, output=output, stage="ucx")
    assert (staged["output"], staged["tags"], staged["target"]) == (["type=cacheonly"], [], "ucx")


def test_contexts_and_caches_of_one_target(run: BuildRun) -> None:
    first, second = run.request.targets[:2]
    inputs = BuildInputs(images={"x": "/mine"}, stages={first.id: {"x": Path("/kept/a"), "y": Path("/kept/b")}})
    caches = {first.id: [CacheEntry("ucx", "linux/amd64", "0123")]}
    run = replace(run, inputs=inputs, caches=caches)
    item, other = (entry(run, target, cache="r.test/cache") for target in (first, second))
    assert item["contexts"] == {"x": "/mine", "y": "target:fetched-b"}
    assert bake_file(run)["target"]["fetched-b"] == {
        "context": "/kept/b/files", "dockerfile": "/kept/b/Dockerfile", "platforms": ["linux/amd64", "linux/arm64"],
        "output": ["type=cacheonly"],
    }  # fmt: skip
    assert other["contexts"] == {"x": "/mine"}
    assert item["cache-from"] == ["type=registry,ref=r.test/cache:ucx-amd64-0123"]
    assert "cache-from" not in other


def test_a_platform_that_the_target_is_not_for(full_plan: Plan) -> None:
    with pytest.raises(ConfigError, match="choose from linux/amd64, linux/arm64"):
        check_platforms(full_plan.targets, ["linux/riscv64"])


def tags(renderer: Renderer, full_plan: Plan, select: str, base: str = "bootstrap") -> set[str]:
    state = ProjectState(renderer, select_targets(full_plan, [select]), base=base)
    found = cache_entries(state.builds(), renderer.project.components)
    return {entry.tag for of_target in found.values() for entry in of_target}


def test_what_is_compiled_has_a_tag_for_each_platform(renderer: Renderer, full_plan: Plan) -> None:
    runtime = "open-cuda13.5-debian13-runtime"
    found = tags(renderer, full_plan, runtime)
    compiled = {
        "gdrcopy", "perftest", "nvbandwidth", "ucx", "ucc", "openmpi-git", "nccl-tests", "pmix-git", "rdma-core-git",
    }  # fmt: skip
    assert {tag.rpartition("-")[0] for tag in found} == {
        f"{stage}-{a}" for stage in compiled for a in ("amd64", "arm64")
    }
    assert len(found) == 2 * len(compiled)
    assert found == tags(renderer, full_plan, "open-cuda13.5-*")
    assert not found & tags(renderer, full_plan, runtime, base="registry")
    assert not tags(renderer, full_plan, "quickstart")  # of packages
