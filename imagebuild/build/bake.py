"""Write the bake file of a plan. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from imagebuild import oci
from imagebuild.core.errors import ConfigError
from imagebuild.core.fields import Platform
from imagebuild.project.matrix import Target

if TYPE_CHECKING:
    from imagebuild.oci import Endpoint
    from imagebuild.render import Dockerfile

Compression = Literal["gzip", "zstd"]
HIGHEST_LEVEL: Mapping[str, int] = {"gzip": 9, "zstd": 22}
EPOCH_VARIABLE = "SOURCE_DATE_EPOCH"


@dataclass(frozen=True)
class LayerFormat:
    """Say how layers that leave the engine are written."""

    epoch: int = field(default_factory=lambda: int(oci.EPOCH))
    """Latest time of a file, in seconds since 1970."""
    compression: Compression = "gzip"
    level: int | None = None
    """None: BuildKit's default."""

    @property
    def attributes(self) -> str:
        """Return the attributes of BuildKit's exporter of OCI layouts."""
        level = "" if self.level is None else f",compression-level={self.level}"
        # The epoch is given to the exporter alone: a build argument would be part of every step's cache key.
        return (
            f"compression={self.compression}{level},force-compression=true,"
            f"rewrite-timestamp=true,source-date-epoch={self.epoch}"
        )


def parse_compression(text: str) -> tuple[Compression, int | None]:
    """Split `zstd:19` into name and level. Raises ConfigError for an unknown compression or level."""
    name, colon, level = text.partition(":")
    for known in get_args(Compression):
        if name == known and not colon:
            return known, None
        if name == known and level.isdigit() and int(level) <= HIGHEST_LEVEL[known]:
            return known, int(level)
    raise ConfigError(f"--compression {text}: use gzip or zstd, with a level if you want: gzip:9, zstd:19")


def epoch_of(environ: Mapping[str, str], locked: date | None) -> int:
    """Return the epoch of the environment, else the date of the lock, else the release day of the oldest base image.

    Raises ConfigError if the environment's value is not a number.
    """
    if given := environ.get(EPOCH_VARIABLE):
        if not given.isdigit():
            raise ConfigError(
                f"{EPOCH_VARIABLE}={given}: must be seconds since 1970, for example from `git log -1 --format=%ct`"
            )
        return int(given)
    if locked is None:
        return int(oci.EPOCH)
    return int(datetime(locked.year, locked.month, locked.day, tzinfo=UTC).timestamp())


@dataclass(frozen=True)
class BuildInputs:
    """Hold what BuildKit gets beside the Dockerfiles."""

    images: Mapping[str, str] = field(default_factory=dict)
    """Image in `FROM` → context that replaces it."""
    stages: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Target → stage → context that replaces it."""
    secrets: Mapping[str, Path] = field(default_factory=dict)


@dataclass(frozen=True)
class BakeRequest:
    """Say what to build at once and how; paths are on this machine."""

    targets: tuple[Target, ...]
    dockerfiles: Mapping[str, Dockerfile]
    """Target → what it is built from."""
    folder: Path
    """Folder for Dockerfiles, the bake file and results."""
    engine: Endpoint
    builder: str | None = None
    output: str = "load"
    """`load` into the engine's image store, `push`, `cacheonly`, or a folder for OCI layouts."""
    stage: str | None = None
    """Build only this stage, into the cache."""
    layer_format: LayerFormat = field(default_factory=LayerFormat)
    """Format of layouts and of what is pushed."""
    platforms: tuple[str, ...] = ()
    """Empty: the platforms of each target."""
    replaced: Mapping[str, str] = field(default_factory=dict)
    """Stage or image → what replaces it in all targets: a folder, `oci-layout://…` or `docker-image://…`."""
    stages: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Target → stage → what replaces it in that target; `replaced` wins."""
    secrets: Mapping[str, Path] = field(default_factory=dict)
    no_cache: bool = False
    cache_from: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Target → references of caches in registries."""
    components: frozenset[str] = frozenset()
    """Names of all components of the project."""
    repeat_options: tuple[str, ...] = ()
    """Options with which a command repeats a step of this build."""

    @property
    def context(self) -> Path:
        """Return the build context, an empty folder: the Dockerfiles need none."""
        return self.folder / "empty"

    def layout_folder(self, target: Target) -> Path | None:
        """Return the folder of a target's OCI layout, or None if none is written."""
        if self.stage or self.output in ("load", "cacheonly"):
            return None
        return self.folder / target.id / "layout" if self.output == "push" else Path(self.output) / target.id


def bake_file(request: BakeRequest) -> dict[str, Any]:
    """Return the bake file for targets whose Dockerfiles are `folder/<id>/Dockerfile`.

    Raises ConfigError for a platform that a target is not for.
    """
    entries: dict[str, dict[str, Any]] = {}
    for target in request.targets:
        output = "type=docker" if request.output == "load" and not request.stage else "type=cacheonly"
        # What is pushed is a layout first: the docker driver cannot push by digest, and rewrites times in layouts only.
        if layout := request.layout_folder(target):
            output = f"type=oci,tar=false,dest={layout},{request.layer_format.attributes}"
        entry = entries[target.bake_name] = {
            "context": str(request.context),
            # Inline text would need escaping: bake expands ${…}.
            "dockerfile": str(request.folder / target.id / "Dockerfile"),
            "platforms": list(platforms_of(target, request.platforms)),
            "tags": [] if request.stage else [target.name],
            "output": [output],
        }
        if request.stage:
            entry["target"] = request.stage
        if contexts := {**request.stages.get(target.id, {}), **request.replaced}:
            entry["contexts"] = contexts
        if request.secrets:
            entry["secret"] = [f"id={name},src={path}" for name, path in sorted(request.secrets.items())]
        if caches := request.cache_from.get(target.id):
            entry["cache-from"] = [f"type=registry,ref={reference}" for reference in caches]
        if request.no_cache:
            entry["no-cache"] = True
    return {"group": {"default": {"targets": sorted(entries)}}, "target": entries}


def platforms_of(target: Target, wanted: Sequence[str]) -> tuple[Platform, ...]:
    """Return the target's platforms, or those of them that are wanted. Raises ConfigError if none is left."""
    chosen = tuple(p for p in target.platforms if not wanted or p in wanted)
    if not chosen:
        raise ConfigError(f"{target.id}: is not for {', '.join(wanted)}; it is for {', '.join(target.platforms)}")
    return chosen


def replaced_contexts(replaced: Mapping[str, str]) -> dict[str, str]:
    """Return what replaces images and stages, identified by content: a digest, or `folder` if there is none.

    Contexts of single targets are none of these: they hold what the lock names, only from another place.
    """
    return {
        name: f"sha256:{context.rpartition('@sha256:')[2]}" if "@sha256:" in context else "folder"
        for name, context in sorted(replaced.items())
    }
