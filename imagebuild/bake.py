"""A plan to a bake file. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from imagebuild.errors import ConfigError
from imagebuild.fields import Platform
from imagebuild.models import Target
from imagebuild.packing import Packing


@dataclass(frozen=True)
class Options:
    """How to build, beside what."""

    context: Path
    """An empty folder: the Dockerfiles need no build context."""
    output: str = "load"
    """`load` into the engine's image store, `push`, `cacheonly`, or a folder for OCI layouts."""
    packing: Packing = field(default_factory=Packing)
    """Of layouts and of what is pushed."""
    platforms: tuple[str, ...] = ()
    """Empty: the platforms of each target."""
    replaced: Mapping[str, str] | None = None
    """Stage or image → what replaces it: a folder, `oci-layout://…` or `docker-image://…`."""
    stages: Mapping[str, Mapping[str, str]] | None = None
    """Target → stage → what replaces it there; what is in `replaced` counts more."""
    secrets: Mapping[str, Path] | None = None
    no_cache: bool = False
    cache_from: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Target → references of caches in registries."""


def bake_file(targets: Iterable[Target], folder: Path, options: Options) -> dict[str, Any]:
    """The bake file for targets whose Dockerfiles are `folder/<id>/Dockerfile`.

    Raises ConfigError for a platform that a target is not for.
    """
    bake = {t.bake_name: _target(t, folder, options) for t in targets}
    return {"group": {"default": {"targets": sorted(bake)}}, "target": bake}


def _target(target: Target, folder: Path, options: Options) -> dict[str, Any]:
    result: dict[str, Any] = {
        "context": str(options.context),
        "dockerfile": str(folder / target.id / "Dockerfile"),  # as text it would have to be escaped: bake expands ${…}
        "platforms": list(platforms_of(target, options.platforms)),
        "tags": [target.name],
        "output": [_output(target, folder, options)],
    }
    contexts = {**(options.stages or {}).get(target.id, {}), **(options.replaced or {})}
    if contexts:
        result["contexts"] = contexts
    if options.secrets:
        result["secret"] = [f"id={name},src={path}" for name, path in sorted(options.secrets.items())]
    if caches := options.cache_from.get(target.id):
        result["cache-from"] = [f"type=registry,ref={reference}" for reference in caches]
    if options.no_cache:
        result["no-cache"] = True
    return result


def platforms_of(target: Target, wanted: Sequence[str]) -> tuple[Platform, ...]:
    """The target's platforms, or of those the wanted ones. Raises ConfigError if none is left."""
    chosen = tuple(p for p in target.platforms if not wanted or p in wanted)
    if not chosen:
        raise ConfigError(f"{target.id}: is not for {', '.join(wanted)}; it is for {', '.join(target.platforms)}")
    return chosen


def replacements(options: Options) -> dict[str, str]:
    """What replaces images and stages, told by content: a digest, or `folder` where there is none.

    Not what `stages` has: that is what the lock names, from elsewhere.
    """
    return {
        name: f"sha256:{context.rpartition('@sha256:')[2]}" if "@sha256:" in context else "folder"
        for name, context in sorted((options.replaced or {}).items())
    }


def layout_of(target: Target, folder: Path, output: str) -> Path | None:
    """Where the OCI layout of a target is written, None for an output that writes none."""
    if output in ("load", "cacheonly"):
        return None
    return folder / target.id / "layout" if output == "push" else Path(output) / target.id


def _output(target: Target, folder: Path, options: Options) -> str:
    layout = layout_of(target, folder, options.output)
    if layout is None:
        return "type=docker" if options.output == "load" else "type=cacheonly"
    # What is pushed is a layout first: the docker driver pushes nothing by digest, and rewrites times in layouts only.
    return f"type=oci,tar=false,dest={layout},{options.packing.attributes}"
