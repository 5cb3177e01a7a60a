"""The names of the caches of compiled stages."""

from __future__ import annotations

from imagebuild.build.caches import cache_entries
from imagebuild.build.state import ProjectState
from imagebuild.project.plan import Plan
from imagebuild.project.select import select_targets
from imagebuild.render.renderer import Renderer


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
