import hashlib
import json
import tarfile
from dataclasses import replace
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path

import pytest

from imagebuild.build import (
    BakeRequest,
    BuildOrigin,
    BuildProgress,
    CacheEntry,
    buildx,
    export_images,
    write_caches,
    write_inputs,
)
from imagebuild.core import CommandError, ConfigError, ResultError
from imagebuild.oci import Endpoint, ImageSettings, add_image, blob_path, images_in, write_index
from imagebuild.project import BuildResult, Plan, Project, Target, repository_name, staged_tag
from imagebuild.render import Renderer
from tests.registry_fake import FakeRegistry

NOW = datetime(2026, 11, 21, 10, 45, tzinfo=UTC)
PLATFORMS = ("linux/amd64", "linux/arm64")


@pytest.fixture
def target(full_plan: Plan) -> Target:
    return next(t for t in full_plan.targets if t.id == "quickstart-cuda13.5-debian13-runtime")


@pytest.fixture
def request_(tmp_path: Path, target: Target, renderer: Renderer) -> BakeRequest:
    files = {target.id: renderer.dockerfile(target)}
    return BakeRequest((target,), files, tmp_path, Endpoint("unix:///x", "private"), output="push")


def origin(project: Project, registry: FakeRegistry) -> BuildOrigin:
    moved = project.in_repository("registry.test/gpu")
    return BuildOrigin(moved, "a" * 40, NOW, BuildProgress(), lambda _: registry)


def layout(request: BakeRequest) -> tuple[Path, str]:
    """What BuildKit leaves for two platforms: the folder and the digest of the index."""
    folder = request.folder / request.targets[0].id / "layout"
    tar = request.folder / "root.tar"
    manifests = []
    for platform in PLATFORMS:
        with tarfile.open(tar, "w") as archive:
            entry = tarfile.TarInfo("file")
            entry.size = len(platform)
            archive.addfile(entry, BytesIO(platform.encode()))
        manifests.append(add_image(folder, tar, platform, ImageSettings("2025-08-09T00:00:00Z")))
    return folder, write_index(folder, manifests)


def built(target: Target, digest: str | None) -> BuildResult:
    return BuildResult(
        target=target.id, digest=digest, tags=(target.name,), platforms=target.platforms, size_bytes=None, seconds=1,
        steps=(),
    )  # fmt: skip


def test_a_push_leaves_the_index_and_one_tag_in_the_staging_repository(
    request_: BakeRequest, project: Project, target: Target
) -> None:
    folder, digest = layout(request_)
    registry = FakeRegistry()
    (result,) = export_images(request_, [built(target, digest)], origin(project, registry))
    held = registry.repositories["gpu/quickstart-staging"]
    ((tag, named),) = held.tags.items()
    assert named == digest
    assert result.tags == (f"registry.test/gpu/quickstart-staging:{tag}",)
    assert result.repository == "registry.test/gpu/quickstart-staging"
    assert set(result.manifests) == set(PLATFORMS)
    assert {*result.manifests.values(), digest} == set(held.manifests)
    assert not folder.exists()
    assert result.revision == "a" * 40
    assert result.dockerfile == hashlib.sha256(request_.dockerfiles[target.id].text.encode()).hexdigest()
    assert (result.builder, result.started) == ("unix:///x", "2026-11-21T10:45:00Z")
    written = json.loads((request_.folder / target.id / "result.json").read_text())
    assert BuildResult.model_validate(written) == result


def test_a_push_that_was_interrupted_leaves_no_result_and_goes_on(
    request_: BakeRequest, project: Project, target: Target
) -> None:
    folder, digest = layout(request_)
    registry = FakeRegistry()

    def fail(what: str, repository: str, name: str) -> None:
        if what == "manifest":
            raise CommandError(f"{repository}: {what} {name}: connection lost")

    registry.before = fail
    with pytest.raises(CommandError, match="connection lost"):
        export_images(request_, [built(target, digest)], origin(project, registry))
    assert not (request_.folder / target.id / "result.json").exists()
    sent = registry.changed("blob")
    assert len(sent) == 2  # config and layer of the first platform

    registry.before = None
    assert folder.exists()
    export_images(request_, [built(target, digest)], origin(project, registry))
    assert len(registry.changed("blob")) == 4
    assert registry.changed("blob")[:2] == sent


def test_a_layout_without_a_platform_is_not_pushed(request_: BakeRequest, project: Project, target: Target) -> None:
    folder, _ = layout(request_)
    only = write_index(folder, [i.descriptor for i in images_in(folder, folder) if i.platform == "linux/amd64"])
    registry = FakeRegistry()
    with pytest.raises(ResultError, match="wrote no image for linux/arm64"):
        export_images(request_, [built(target, only)], origin(project, registry))
    assert not registry.calls


def test_an_output_keeps_its_layout(request_: BakeRequest, project: Project, target: Target) -> None:
    folder, digest = layout(request_)
    named = replace(request_, output=str(folder.parent))
    folder.rename(folder.parent / target.id)
    (result,) = export_images(named, [built(target, digest)], origin(project, FakeRegistry()))
    assert (folder.parent / target.id / "index.json").exists()
    assert set(result.manifests) == set(PLATFORMS)
    assert result.repository is None
    image = json.loads(blob_path(folder.parent / target.id, result.manifests["linux/amd64"]).read_text())
    assert result.size_bytes == image["layers"][0]["size"]


def test_a_tag_says_when_and_what() -> None:
    assert staged_tag(f"sha256:{'0123456789ab' * 5}0123", NOW) == "staged-20261121T104500Z-0123456789ab"


def test_the_staging_repository_is_the_matrixs(project: Project, target: Target) -> None:
    model = project.matrix.model
    publish = model.publish.model_copy(update={"staging": "{repository}/wait/{image}"})
    document = replace(project.matrix, model=model.model_copy(update={"publish": publish, "repository": "r.test/x"}))
    assert repository_name(replace(project, matrix=document), target.image) == "r.test/x/wait/quickstart"


def test_layouts_of_builds_before_are_removed_and_nothing_else(request_: BakeRequest) -> None:
    folder, _ = layout(request_)
    (folder / "ingest").mkdir()
    write_inputs(request_)
    assert not folder.exists()
    write_inputs(request_)
    folder.mkdir()
    (folder / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"has thesis.txt, so it is no OCI layout"):
        write_inputs(request_)
    write_inputs(replace(request_, stage="cuda"))  # which writes no layout
    assert (folder / "thesis.txt").read_text() == "mine"


def test_caches_are_written_that_are_new_or_missing(
    request_: BakeRequest, project: Project, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (CacheEntry(stage, "linux/amd64", "0" * 16) for stage in ("cuda", "nccl-wheel"))
    wanted = {target.id: (first, second)}
    step = {"name": "RUN x", "target": "", "component": None, "seconds": 1}
    ran = built(target, None).model_copy(
        update={
            "steps": BuildResult.model_validate(
                {
                    **built(target, None).model_dump(),
                    "steps": [
                        {**step, "stage": "cuda", "cached": False},
                        {**step, "stage": "nccl-wheel", "cached": True},
                    ],
                }
            ).steps
        }
    )
    written: list[list[str]] = []
    monkeypatch.setattr(buildx, "execute_bake", lambda request, content, *_: written.append(list(content["target"])))
    registry = FakeRegistry()
    for tag in (first.tag, second.tag):
        registry.put_manifest("cache", tag, b"{}", "application/vnd.oci.image.manifest.v1+json")
    write_caches(request_, "registry.test/cache", wanted, [built(target, None)], origin(project, registry))
    assert written == []
    write_caches(request_, "registry.test/cache", wanted, [ran], origin(project, registry))
    assert written.pop() == [first.tag]
    registry.repositories["cache"].tags.pop(second.tag)
    write_caches(request_, "registry.test/cache", wanted, [ran], origin(project, registry))
    assert written.pop() == [first.tag, second.tag]
