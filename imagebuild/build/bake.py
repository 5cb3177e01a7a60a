"""Write the bake file of a plan. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from imagebuild.core.errors import ConfigError
from imagebuild.core.fields import Platform
from imagebuild.oci.layout import EPOCH
from imagebuild.project.matrix import Target

Compression = Literal["gzip", "zstd"]
MOST: Mapping[str, int] = {"gzip": 9, "zstd": 22}
"""Highest level of each compression."""
VARIABLE = "SOURCE_DATE_EPOCH"


@dataclass(frozen=True)
class LayerFormat:
    """Compression, and the epoch in seconds since 1970."""

    epoch: int = int(EPOCH)
    compression: Compression = "gzip"
    level: int | None = None
    """None: BuildKit's default."""

    @property
    def attributes(self) -> str:
        """What an exporter of BuildKit takes."""
        level = "" if self.level is None else f",compression-level={self.level}"
        # The epoch is the exporter's alone: as an argument of the build it would be a part of what steps depend on.
        return (
            f"compression={self.compression}{level},force-compression=true,"
            f"rewrite-timestamp=true,source-date-epoch={self.epoch}"
        )


def parse_compression(text: str) -> tuple[Compression, int | None]:
    """`zstd:19` to its parts. Raises ConfigError."""
    name, colon, level = text.partition(":")
    for known in get_args(Compression):
        if name == known and not colon:
            return known, None
        if name == known and level.isdigit() and int(level) <= MOST[known]:
            return known, int(level)
    raise ConfigError(f"--compression {text}: gzip or zstd, with a level if you want: gzip:9, zstd:19")


def epoch_of(environ: Mapping[str, str], locked: date | None) -> int:
    """The epoch that the environment sets, else the day in the lock, else when the oldest base image came out.

    Raises ConfigError if the environment's is no number.
    """
    if given := environ.get(VARIABLE):
        if not given.isdigit():
            raise ConfigError(f"{VARIABLE}={given}: seconds since 1970, for example from `git log -1 --format=%ct`")
        return int(given)
    if locked is None:
        return int(EPOCH)
    return int(datetime(locked.year, locked.month, locked.day, tzinfo=UTC).timestamp())


@dataclass(frozen=True)
class Options:
    """How to build, beside what."""

    context: Path
    """An empty folder: the Dockerfiles need no build context."""
    output: str = "load"
    """`load` into the engine's image store, `push`, `cacheonly`, or a folder for OCI layouts."""
    packing: LayerFormat = field(default_factory=LayerFormat)
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


def replaced_contexts(options: Options) -> dict[str, str]:
    """What replaces images and stages, told by content: a digest, or `folder` where there is none.

    Not what `stages` has: that is what the lock names, from elsewhere.
    """
    return {
        name: f"sha256:{context.rpartition('@sha256:')[2]}" if "@sha256:" in context else "folder"
        for name, context in sorted((options.replaced or {}).items())
    }


def layout_folder(target: Target, folder: Path, output: str) -> Path | None:
    """Where the OCI layout of a target is written, None for an output that writes none."""
    if output in ("load", "cacheonly"):
        return None
    return folder / target.id / "layout" if output == "push" else Path(output) / target.id


def _output(target: Target, folder: Path, options: Options) -> str:
    layout = layout_folder(target, folder, options.output)
    if layout is None:
        return "type=docker" if options.output == "load" else "type=cacheonly"
    # What is pushed is a layout first: the docker driver pushes nothing by digest, and rewrites times in layouts only.
    return f"type=oci,tar=false,dest={layout},{options.packing.attributes}"
