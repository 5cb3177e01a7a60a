"""What is done with images once BuildKit has built them: weighed in the engine, or read as layouts and pushed.

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

from imagebuild import bake, buildx, caching, console, staging
from imagebuild.config import Project
from imagebuild.console import Progress
from imagebuild.errors import ResultError
from imagebuild.files import write_text
from imagebuild.inspection import layout as layouts
from imagebuild.models import Target
from imagebuild.records import BuildResult
from imagebuild.registry.base import Registry
from imagebuild.registry.client import connect
from imagebuild.registry.push import push
from imagebuild.registry.reference import parse


@dataclass(frozen=True)
class Origin:
    """What all results of a build say about where they come from."""

    project: Project
    revision: str | None
    started: datetime
    progress: Progress
    connect: Callable[[str], Registry] = connect
    """Host → registry."""


def deliver(request: buildx.Request, results: Sequence[BuildResult], origin: Origin) -> list[BuildResult]:
    """Complete the results of targets, push what is to be pushed, and write each `result.json`.

    Raises CommandError if a registry refuses, ResultError if a layout cannot be read. What was delivered until then
    has its result.
    """
    delivered = []
    # A stage alone is built into the cache only.
    output = "cacheonly" if request.stage else request.options.output
    for target, result in zip(request.targets, results, strict=True):
        complete = _described(request, target, result, origin)
        layout = bake.layout_of(target, request.folder, output)
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


def write_caches(
    request: buildx.Request, repository: str, wanted: caching.Artefacts, built: Sequence[BuildResult], origin: Origin
) -> None:
    """Write the caches of what was compiled just now, and of what has none in the registry yet.

    Raises CommandError if that fails; what was delivered before stays so.
    """
    place = parse(repository)
    asked = origin.connect(place.host)
    owners = {artefact: target for target in request.targets for artefact in wanted[target.id]}
    made = caching.made(built, wanted)
    chosen = {a: t for a, t in owners.items() if a in made or asked.digest(place.repository, a.tag) is None}
    if not chosen:
        return
    origin.progress.note(f"writing {len(chosen)} of {len(owners)} caches to {place.name}")
    content = bake.bake_file(request.targets, request.folder, request.options)
    buildx.execute(request, caching.bake_file(content, place.name, chosen), origin.progress, "bake-caches.json")


def _described(request: buildx.Request, target: Target, result: BuildResult, origin: Origin) -> BuildResult:
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
        images = layouts.images(layout, Path(folder))
    manifests = {image.platform: image.digest for image in images}
    if missing := [platform for platform in result.platforms if not manifests.get(platform)]:
        raise ResultError(f"{layout}: BuildKit wrote no image for {', '.join(missing)}")
    size = sum(layer.size for layer in images[0].layers)
    return result.model_copy(update={"manifests": manifests, "size_bytes": size})


def _pushed(result: BuildResult, layout: Path, target: Target, origin: Origin) -> BuildResult:
    name = staging.repository_of(origin.project, target)
    place = parse(name)
    if not result.digest:
        raise ResultError(f"{layout}: buildx did not say what it wrote")
    origin.progress.note(f"pushing {target.id} to {place.name}")
    tag = staging.staged_tag(result.digest, datetime.now(UTC))
    moved = push(layout, result.digest, origin.connect(place.host), place.repository, tag)
    origin.progress.note(f"pushed {target.id}: {moved.blobs} blobs, {console.size(moved.bytes)}")
    return result.model_copy(update={"repository": place.name, "tags": (f"{place.name}:{tag}",)})


def _weighed(result: BuildResult, request: buildx.Request) -> BuildResult:
    from imagebuild import docker  # noqa: PLC0415 - slow to import, and needed only now

    size = docker.compressed_size(docker.connect(request.engine), result.tags[0])
    return result.model_copy(update={"size_bytes": size})
