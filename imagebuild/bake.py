"""A plan to a bake file. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imagebuild.errors import ConfigError
from imagebuild.fields import Platform
from imagebuild.models import Target


@dataclass(frozen=True)
class Options:
    """How to build, beside what."""

    context: Path
    """An empty folder: the Dockerfiles need no build context."""
    output: str = "load"
    """`load` into the engine's image store, `push`, `cacheonly`, or a folder for OCI layouts."""
    platforms: tuple[str, ...] = ()
    """Empty: the platforms of each target."""
    replaced: Mapping[str, str] | None = None
    """Stage or image → what replaces it: a folder, `oci-layout://…` or `docker-image://…`."""
    stages: Mapping[str, Mapping[str, str]] | None = None
    """Target → stage → what replaces it there; what is in `replaced` counts more."""
    secrets: Mapping[str, Path] | None = None
    no_cache: bool = False


def bake_file(targets: Iterable[Target], folder: Path, options: Options) -> dict[str, Any]:
    """The bake file for targets whose Dockerfiles are `folder/<id>/Dockerfile`.

    Raises ConfigError for a platform that a target is not for.
    """
    bake = {t.bake_name: _target(t, folder / t.id / "Dockerfile", options) for t in targets}
    return {"group": {"default": {"targets": sorted(bake)}}, "target": bake}


def _target(target: Target, dockerfile: Path, options: Options) -> dict[str, Any]:
    result: dict[str, Any] = {
        "context": str(options.context),
        "dockerfile": str(dockerfile),  # as text it would have to be escaped: bake expands ${…}
        "platforms": list(platforms_of(target, options.platforms)),
        "tags": [target.name],
        "output": [_output(target, options.output)],
    }
    contexts = {**(options.stages or {}).get(target.id, {}), **(options.replaced or {})}
    if contexts:
        result["contexts"] = contexts
    if options.secrets:
        result["secret"] = [f"id={name},src={path}" for name, path in sorted(options.secrets.items())]
    if options.no_cache:
        result["no-cache"] = True
    return result


def platforms_of(target: Target, wanted: Sequence[str]) -> tuple[Platform, ...]:
    """The target's platforms, or of those the wanted ones. Raises ConfigError if none is left."""
    chosen = tuple(p for p in target.platforms if not wanted or p in wanted)
    if not chosen:
        raise ConfigError(f"{target.id}: is not for {', '.join(wanted)}; it is for {', '.join(target.platforms)}")
    return chosen


def _output(target: Target, output: str) -> str:
    if output == "load":
        return "type=docker"
    if output == "cacheonly":
        return "type=cacheonly"
    if output == "push":
        return "type=registry"
    return f"type=oci,tar=false,dest={Path(output) / target.id}"
