"""Caches of compiled artefacts in a registry: one reference for each compile stage, platform and key. Pure.

The key is a digest of all that the stage depends on, so that whoever needs the artefact can compute where its cache
would be, and two branches that build different versions never overwrite each other's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from imagebuild import steps
from imagebuild.cost import Side
from imagebuild.fields import Platform
from imagebuild.models import Target
from imagebuild.records import BuildResult


@dataclass(frozen=True)
class Artefact:
    """What a compile stage makes for one platform."""

    stage: str
    platform: Platform
    key: str

    @property
    def tag(self) -> str:
        """`ucx-amd64-0123456789abcdef`."""
        return f"{self.stage}-{self.platform.removeprefix('linux/')}-{self.key}"


Artefacts = Mapping[str, tuple[Artefact, ...]]
"""Target → what it is assembled from."""


def artefacts(side: Side) -> dict[str, tuple[Artefact, ...]]:
    """All that the targets of a side need compiled."""
    compiled = {name for name, component in side.project.components.items() if component.model.compiles}
    found: dict[str, tuple[Artefact, ...]] = {}
    for target in side.targets:
        text = side.renderer.dockerfile(target).text
        of_target: list[Artefact] = []
        for setting in side.settings(target):
            keys = steps.stage_keys(text, [setting])
            needed = dict.fromkeys(step.stage for step in steps.steps_of(text, setting))
            platform = next(p for p in target.platforms if p == setting.platform)
            of_target += [Artefact(stage, platform, keys[stage]) for stage in needed if stage in compiled]
        found[target.id] = tuple(of_target)
    return found


def references(repository: str, wanted: Artefacts) -> dict[str, tuple[str, ...]]:
    """Target → references of the caches that it may take."""
    return {target: tuple(f"{repository}:{a.tag}" for a in found) for target, found in wanted.items()}


def made(results: Iterable[BuildResult], wanted: Artefacts) -> frozenset[Artefact]:
    """Artefacts that a build executed a step of, and did not take from a cache."""
    executed = {(r.target, step.stage) for r in results for step in r.steps if not step.cached}
    return frozenset(a for target, found in wanted.items() for a in found if (target, a.stage) in executed)


def bake_file(content: Mapping[str, Any], repository: str, owners: Mapping[Artefact, Target]) -> dict[str, Any]:
    """A bake file that writes caches of artefacts, from the `content` of the one that built their targets.

    All that it builds is in the builder's own cache.
    """
    entries = {
        artefact.tag: {
            **content["target"][target.bake_name],
            "target": artefact.stage,
            "platforms": [artefact.platform],
            "tags": [],
            "output": ["type=cacheonly"],
            # A manifest as images have it: not every registry takes the index that is BuildKit's own form.
            "cache-to": [
                f"type=registry,ref={repository}:{artefact.tag},mode=min,image-manifest=true,oci-mediatypes=true"
            ],
        }
        for artefact, target in owners.items()
    }
    return {"group": {"default": {"targets": sorted(entries)}}, "target": entries}
