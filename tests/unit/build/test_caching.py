"""Caches of what is compiled: which tags they have, and how they are written."""

from __future__ import annotations

from imagebuild.build import (
    BuildRequest,
    BuildRun,
    CacheEntry,
    ProjectState,
    bake_file,
    cache_bake_file,
    cache_entries,
)
from imagebuild.oci import Endpoint
from imagebuild.project import Plan, Project, select_targets
from imagebuild.render import Renderer

RUNTIME = "open-cuda13.5-debian13-runtime"
COMPILED = {"gdrcopy", "perftest", "nvbandwidth", "ucx", "ucc", "openmpi-git", "nccl-tests"}


def entries(renderer: Renderer, full_plan: Plan, select: str, base: str = "bootstrap") -> dict[str, list[CacheEntry]]:
    targets = select_targets(full_plan, [select])
    state = ProjectState(renderer.project, targets, {t.id: renderer.dockerfile(t).text for t in targets}, base=base)
    return {t.id: [entry for p in t.platforms for entry in cache_entries(state, t, p)] for t in targets}


def tags(found: dict[str, list[CacheEntry]]) -> set[str]:
    return {entry.tag for of_target in found.values() for entry in of_target}


def test_what_is_compiled_has_a_tag_for_each_platform(renderer: Renderer, full_plan: Plan) -> None:
    found = entries(renderer, full_plan, RUNTIME)
    places = {tag.rpartition("-")[0] for tag in tags(found)}
    assert places == {f"{stage}-{arch}" for stage in COMPILED for arch in ("amd64", "arm64")}
    assert len(tags(found)) == len(found[RUNTIME]) == len(places)


def test_targets_share_tags_and_bases_do_not(renderer: Renderer, full_plan: Plan) -> None:
    one = tags(entries(renderer, full_plan, RUNTIME))
    assert one == tags(entries(renderer, full_plan, "open-cuda13.5-*"))
    assert not one & tags(entries(renderer, full_plan, RUNTIME, base="registry"))
    assert not tags(entries(renderer, full_plan, "quickstart"))  # of packages


def test_what_compiles_is_marked(project: Project) -> None:
    """`compiles` is where a compiler runs on what upstream wrote."""
    compiling = {name for name, document in project.components.items() if document.model.compiles}
    assert compiling == {*COMPILED, "nccl-git", "nccl-rdma-sharp-plugin", "openmpi"}
    assert all(project.components[name].model.git for name in compiling - {"openmpi"})  # HPC-X has its source


def test_the_bake_file_writes_a_stage_to_its_tag(renderer: Renderer, full_plan: Plan) -> None:
    targets = select_targets(full_plan, ["open-cuda13.5-*"])
    found = entries(renderer, full_plan, "open-cuda13.5-*")
    request = BuildRequest(targets, output="push", cache="r.test/cache")
    run = BuildRun(request, renderer.project, {}, Endpoint("unix:///x", "private"), caches=found)
    written = cache_bake_file(
        bake_file(run), "r.test/cache", {e: target for target in targets for e in found[target.id]}
    )
    assert set(written["target"]) == tags(found)
    assert written["group"]["default"]["targets"] == sorted(tags(found))
    (tag,) = [name for name in written["target"] if name.startswith("ucx-amd64-")]
    ucx = written["target"][tag]
    assert (ucx["target"], ucx["platforms"], ucx["output"], ucx["tags"]) == (
        "ucx", ["linux/amd64"], ["type=cacheonly"], [],
    )  # fmt: skip
    assert ucx["cache-to"][0].startswith(f"type=registry,ref=r.test/cache:{tag},")
    assert f"type=registry,ref=r.test/cache:{tag}" in ucx["cache-from"]
