import json
from pathlib import Path

from imagebuild import bake, caching
from imagebuild import plan as planning
from imagebuild.config import Project
from imagebuild.cost import Side
from imagebuild.models import Plan
from imagebuild.render import Renderer


def side(project: Project, full_plan: Plan, select: str, *platforms: str, base: str = "bootstrap") -> Side:
    renderer = Renderer(project, planning.versions_with(project, planning.Changes()))
    return Side(project, renderer, planning.select(full_plan, [select]), platforms, "linux/amd64", base)


def tags(found: dict[str, tuple[caching.Artefact, ...]]) -> set[str]:
    return {artefact.tag for artefacts in found.values() for artefact in artefacts}


def stages(found: dict[str, tuple[caching.Artefact, ...]]) -> set[str]:
    return {artefact.stage for artefacts in found.values() for artefact in artefacts}


def test_what_is_compiled_has_a_reference_for_each_platform(project: Project, full_plan: Plan) -> None:
    found = caching.artefacts(side(project, full_plan, "open-cuda13.5-debian13-runtime"))
    compiled = {"gdrcopy", "perftest", "nvbandwidth", "ucx", "ucc", "openmpi-git", "nccl-tests"}
    assert stages(found) == compiled
    assert len(tags(found)) == 2 * len(compiled)
    assert {a.platform for a in found["open-cuda13.5-debian13-runtime"]} == {"linux/amd64", "linux/arm64"}
    alone = caching.artefacts(side(project, full_plan, "open-cuda13.5-debian13-runtime", "linux/arm64"))
    assert tags(alone) < tags(found)  # one job for each platform writes and reads the same ones


def test_targets_share_references_and_bases_do_not(project: Project, full_plan: Plan) -> None:
    one = caching.artefacts(side(project, full_plan, "open-cuda13.5-debian13-runtime"))
    both = caching.artefacts(side(project, full_plan, "open-cuda13.5-*"))
    assert tags(one) == tags(both)
    assert len(both) == 2
    official = caching.artefacts(side(project, full_plan, "open-cuda13.5-debian13-runtime", base="registry"))
    assert not tags(official) & tags(one)


def test_an_image_of_packages_has_none(project: Project, full_plan: Plan) -> None:
    assert caching.artefacts(side(project, full_plan, "quickstart-cuda13.5-debian13-runtime")) == {
        "quickstart-cuda13.5-debian13-runtime": ()
    }


def test_the_bake_file_writes_a_stage_to_its_reference(project: Project, full_plan: Plan) -> None:
    chosen = side(project, full_plan, "open-cuda13.5-*", "linux/amd64")
    found = caching.artefacts(chosen)
    refs = caching.references("r.test/cache", found)
    options = bake.Options(Path("/e"), output="push", platforms=("linux/amd64",), cache_from=refs)
    content = bake.bake_file(chosen.targets, Path("/b"), options)
    for target in chosen.targets:
        expected = [f"type=registry,ref=r.test/cache:{artefact.tag}" for artefact in found[target.id]]
        assert content["target"][target.bake_name]["cache-from"] == expected
    owners = {artefact: target for target in chosen.targets for artefact in found[target.id]}
    written = caching.bake_file(content, "r.test/cache", owners)
    assert set(written["target"]) == tags(found)
    assert written["group"]["default"]["targets"] == sorted(tags(found))
    (ucx,) = [entry for name, entry in written["target"].items() if name.startswith("ucx-amd64-")]
    assert ucx["target"] == "ucx"
    assert ucx["output"] == ["type=cacheonly"]
    assert ucx["tags"] == []
    (destination,) = ucx["cache-to"]
    assert destination.startswith("type=registry,ref=r.test/cache:ucx-amd64-")
    assert json.dumps(content).count("cache-to") == 0
