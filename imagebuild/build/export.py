"""Take images out of BuildKit: weigh them in the engine, or read them as layouts and push them.

Each gets its `result.json`, in which publishing and provenance find all that they need to know about the build.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from imagebuild.build import bake, buildx
from imagebuild.build.buildx import Progress
from imagebuild.core import console
from imagebuild.core.errors import ResultError
from imagebuild.core.files import write_text
from imagebuild.oci.layout import images_in
from imagebuild.oci.reference import parse_reference
from imagebuild.oci.registry import Registry, connect_registry, push_image
from imagebuild.project import plan
from imagebuild.project.load import Project
from imagebuild.project.matrix import Target
from imagebuild.project.records import BuildResult


@dataclass(frozen=True)
class BuildOrigin:
    """What all results of a build say about where they come from."""

    project: Project
    revision: str | None
    started: datetime
    progress: Progress
    connect: Callable[[str], Registry] = connect_registry
    """Host → registry."""


def export(request: buildx.BakeRequest, results: Sequence[BuildResult], origin: BuildOrigin) -> list[BuildResult]:
    """Complete the results of targets, push what is to be pushed, and write each `result.json`.

    Raises CommandError if a registry refuses, ResultError if a layout cannot be read. What was delivered until then
    has its result.
    """
    delivered = []
    # A stage alone is built into the cache only.
    output = "cacheonly" if request.stage else request.options.output
    for target, result in zip(request.targets, results, strict=True):
        complete = _described(request, target, result, origin)
        layout = bake.layout_folder(target, request.folder, output)
        if layout:
            complete = _with_layout(complete, layout)
        if layout and output == "push":
            complete = _pushed(complete, layout, target, origin)
            shutil.rmtree(layout)
        if output == "load":
            complete = _weighed(complete, request)
        write_text(request.folder / result.target / "result.json", complete.model_dump_json(indent=1) + "\n")
        delivered.append(complete)
    return delivered


def _described(request: buildx.BakeRequest, target: Target, result: BuildResult, origin: BuildOrigin) -> BuildResult:
    text = request.dockerfiles[target.id].text
    about = {
        "revision": origin.revision,
        "dockerfile": hashlib.sha256(text.encode()).hexdigest(),
        "builder": request.builder or request.engine.host,
        "started": f"{origin.started.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}",
    }
    return result.model_copy(update=about)


def _with_layout(result: BuildResult, layout: Path) -> BuildResult:
    with tempfile.TemporaryDirectory(prefix="imagebuild-") as folder:
        images = images_in(layout, Path(folder))
    manifests = {image.platform: image.digest for image in images}
    if missing := [platform for platform in result.platforms if not manifests.get(platform)]:
        raise ResultError(f"{layout}: BuildKit wrote no image for {', '.join(missing)}")
    size = sum(layer.size for layer in images[0].layers)
    return result.model_copy(update={"manifests": manifests, "size_bytes": size})


def _pushed(result: BuildResult, layout: Path, target: Target, origin: BuildOrigin) -> BuildResult:
    name = plan.staging_of(origin.project, target)
    place = parse_reference(name)
    if not result.digest:
        raise ResultError(f"{layout}: buildx did not say what it wrote")
    origin.progress.note(f"pushing {target.id} to {place.name}")
    tag = plan.staged_tag(result.digest, datetime.now(UTC))
    moved = push_image(layout, result.digest, origin.connect(place.host), place.repository, tag)
    origin.progress.note(f"pushed {target.id}: {moved.blobs} blobs, {console.format_size(moved.bytes)}")
    return result.model_copy(update={"repository": place.name, "tags": (f"{place.name}:{tag}",)})


def _weighed(result: BuildResult, request: buildx.BakeRequest) -> BuildResult:
    from imagebuild.oci import engine  # noqa: PLC0415 - slow to import, and needed only now

    size = engine.compressed_size(engine.connect_engine(request.engine), result.tags[0])
    return result.model_copy(update={"size_bytes": size})
