"""The caches of compiled stages in a registry: their names, and how a build writes them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from imagebuild.build import bake, buildx
from imagebuild.build.bake import CacheEntry
from imagebuild.build.buildx import BuildProgress
from imagebuild.core.fields import Platform, YamlFile
from imagebuild.oci.reference import parse_reference
from imagebuild.oci.registry import connect_registry
from imagebuild.project.component import Component
from imagebuild.project.plan import Target
from imagebuild.project.records import BuildResult
from imagebuild.render.stages import Stage


def cache_entries(
    builds: Iterable[tuple[Target, Platform, Mapping[str, Stage]]], components: Mapping[str, YamlFile[Component]]
) -> Mapping[str, Sequence[CacheEntry]]:
    """Map each target id to the caches of the stages that compile software for it, on all platforms together."""
    entries: dict[str, list[CacheEntry]] = defaultdict(list)
    for target, platform, stages in builds:
        compiling = (name for name in stages if name in components and components[name].model.compiles)
        entries[target.id] += [CacheEntry(name, platform, stages[name].key) for name in compiling]
    return entries


def write_caches(run: bake.BuildRun, built: Sequence[BuildResult], progress: BuildProgress) -> None:
    """Write caches of stages to the registry. The content comes from the builder's own cache.
    A cache is written if this build compiled the stage, or if the registry lacks the cache."""
    location = parse_reference(run.request.cache or "")
    place = connect_registry(location.host).at(location.repository)
    executed = {(result.target, step.stage) for result in built for step in result.steps if not step.cached}
    owners = {entry: target for target in run.request.targets for entry in run.caches[target.id]}
    content = bake.bake_file(run)
    chosen: dict[str, Any] = {
        entry.tag: {
            **content["target"][target.bake_name],
            "target": entry.stage,
            "platforms": [entry.platform],
            "tags": [],
            "output": ["type=cacheonly"],
            # Write the cache as an image manifest: some registries refuse the index that BuildKit writes by default.
            "cache-to": [
                f"type=registry,ref={location.name}:{entry.tag},mode=min,image-manifest=true,oci-mediatypes=true"
            ],
        }
        for entry, target in owners.items()
        if (target.id, entry.stage) in executed or place.digest(entry.tag) is None
    }
    if chosen:
        progress.note(f"writing {len(chosen)} of {len(owners)} caches to {location.name}")
        # Keep the other bake targets in the bake file, as the new ones refer to the bake targets of downloads.
        content["target"] |= chosen
        content["group"]["default"]["targets"] = sorted(chosen)
        buildx.execute_bake(run, content, progress, "bake-caches.json")
