import json
from pathlib import Path

from imagebuild.build import BakeOptions, CacheEntry, ProjectState, bake_file, cache_bake_file, cache_entries
from imagebuild.project import Changes, Plan, Project, select_targets, versions_with
from imagebuild.render import Renderer


def side(project: Project, full_plan: Plan, select: str, *platforms: str, base: str = "bootstrap") -> ProjectState:
    renderer = Renderer(project, versions_with(project, Changes()))
    return ProjectState(project, renderer, select_targets(full_plan, [select]), platforms, "linux/amd64", base)


def tags(found: dict[str, tuple[CacheEntry, ...]]) -> set[str]:
    return {artefact.tag for artefacts in found.values() for artefact in artefacts}


def stages(found: dict[str, tuple[CacheEntry, ...]]) -> set[str]:
    return {artefact.stage for artefacts in found.values() for artefact in artefacts}


def test_what_is_compiled_has_a_reference_for_each_platform(project: Project, full_plan: Plan) -> None:
    found = cache_entries(side(project, full_plan, "open-cuda13.5-debian13-runtime"))
    compiled = {"gdrcopy", "perftest", "nvbandwidth", "ucx", "ucc", "openmpi-git", "nccl-tests"}
    assert stages(found) == compiled
    assert len(tags(found)) == 2 * len(compiled)
    assert {a.platform for a in found["open-cuda13.5-debian13-runtime"]} == {"linux/amd64", "linux/arm64"}
    alone = cache_entries(side(project, full_plan, "open-cuda13.5-debian13-runtime", "linux/arm64"))
    assert tags(alone) < tags(found)  # one job for each platform writes and reads the same ones


def test_targets_share_references_and_bases_do_not(project: Project, full_plan: Plan) -> None:
    one = cache_entries(side(project, full_plan, "open-cuda13.5-debian13-runtime"))
    both = cache_entries(side(project, full_plan, "open-cuda13.5-*"))
    assert tags(one) == tags(both)
    assert len(both) == 2
    official = cache_entries(side(project, full_plan, "open-cuda13.5-debian13-runtime", base="registry"))
    assert not tags(official) & tags(one)


def test_an_image_of_packages_has_none(project: Project, full_plan: Plan) -> None:
    assert cache_entries(side(project, full_plan, "quickstart-cuda13.5-debian13-runtime")) == {
        "quickstart-cuda13.5-debian13-runtime": ()
    }


def test_the_bake_file_writes_a_stage_to_its_reference(project: Project, full_plan: Plan) -> None:
    chosen = side(project, full_plan, "open-cuda13.5-*", "linux/amd64")
    found = cache_entries(chosen)
    refs = {target: [f"r.test/cache:{entry.tag}" for entry in entries] for target, entries in found.items()}
    options = BakeOptions(Path("/e"), output="push", platforms=("linux/amd64",), cache_from=refs)
    content = bake_file(chosen.targets, Path("/b"), options)
    for target in chosen.targets:
        expected = [f"type=registry,ref=r.test/cache:{artefact.tag}" for artefact in found[target.id]]
        assert content["target"][target.bake_name]["cache-from"] == expected
    owners = {artefact: target for target in chosen.targets for artefact in found[target.id]}
    written = cache_bake_file(content, "r.test/cache", owners)
    assert set(written["target"]) == tags(found)
    assert written["group"]["default"]["targets"] == sorted(tags(found))
    (ucx,) = [entry for name, entry in written["target"].items() if name.startswith("ucx-amd64-")]
    assert ucx["target"] == "ucx"
    assert ucx["output"] == ["type=cacheonly"]
    assert ucx["tags"] == []
    (destination,) = ucx["cache-to"]
    assert destination.startswith("type=registry,ref=r.test/cache:ucx-amd64-")
    assert json.dumps(content).count("cache-to") == 0
