"""Define what is to be built and how, and compute the bake file. Pure."""

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
from imagebuild.project.plan import Changes

if TYPE_CHECKING:
    from imagebuild.oci import Endpoint
    from imagebuild.project import Project
    from imagebuild.render import Dockerfile

Compression = Literal["gzip", "zstd"]
HIGHEST_LEVEL: Mapping[str, int] = {"gzip": 9, "zstd": 22}
EPOCH_VARIABLE = "SOURCE_DATE_EPOCH"
FINAL_STAGE = "image"
"""Stage of every Dockerfile that installs packages of the distribution."""


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
class BuildRequest:
    """Hold what the command line asks for."""

    targets: tuple[Target, ...]
    platforms: tuple[Platform, ...] = ()
    """Empty: the platforms of each target."""
    output: str = "load"
    """`load` into the engine's image store, `push`, `cacheonly`, or a folder for OCI layouts."""
    layer_format: LayerFormat = field(default_factory=LayerFormat)
    """Format of layouts and of what is pushed."""
    builder: str | None = None
    """Builder of docker buildx; None: the engine's own."""
    sources: tuple[str, ...] = ()
    """`NAME=FOLDER`: components whose source is a folder."""
    base: str = "bootstrap"
    """Where base images come from: `bootstrap` or `registry`."""
    ca: Path | None = None
    no_cache: bool = False
    rebuilt: date | None = None
    """Day of a rebuild: packages are installed again, even if the builder's cache has them."""
    jobs: int = 0
    """Targets to build at a time; 0: all."""
    stage: str | None = None
    """Build only this stage, into the cache."""
    cache: str | None = None
    """Repository of caches of compiled artefacts."""
    cache_write: bool = False
    folder: Path = Path("build")
    """Folder for Dockerfiles, the bake file and results."""
    verbose: bool = False
    changes: Changes = field(default_factory=Changes)
    project_options: tuple[str, ...] = ()
    """Options that name the project's files."""
    bundle: Path | None = None
    """Folder of a bundle to build from, without a network."""
    record: bool = False
    """Make the bundle instead: keep in it what the build fetches."""

    @property
    def repeat_options(self) -> tuple[str, ...]:
        """Return the options with which another command builds a stage of the same from the same."""
        # A bundle that is being made has nothing to build from. --rebuild is for whole images.
        named = {
            "--builder": self.builder,
            "--base": None if self.base == "bootstrap" else self.base,
            "--ca": self.ca,
            "--registry": self.changes.repository,
            "--bundle": None if self.record else self.bundle,
        }
        given = {"--platform": self.platforms, "--source": self.sources}
        given |= {name: (str(value),) for name, value in named.items() if value}
        words = (word for option, values in given.items() for value in values for word in (option, value))
        flags = ("--no-cache",) if self.no_cache else ()
        return (*self.project_options, *words, *flags, *self.changes.options)


@dataclass(frozen=True)
class CacheEntry:
    """Identify the cache of a compiling stage for one platform."""

    stage: str
    platform: Platform
    key: str

    @property
    def tag(self) -> str:
        """Return the tag of its cache, such as `ucx-amd64-0123456789abcdef`."""
        return f"{self.stage}-{self.platform.removeprefix('linux/')}-{self.key}"


@dataclass(frozen=True)
class BuildInputs:
    """Hold what BuildKit gets beside the Dockerfiles."""

    images: Mapping[str, str] = field(default_factory=dict)
    """Image in `FROM`, or stage, → what replaces it in all targets: a folder, `oci-layout://…` or `docker-image://…`."""
    stages: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Target → stage → context that replaces it in that target; `images` wins."""
    secrets: Mapping[str, Path] = field(default_factory=dict)


@dataclass(frozen=True)
class BuildRun:
    """Hold a build that is under way: what was asked for, and what was found and rendered for it."""

    request: BuildRequest
    project: Project
    dockerfiles: Mapping[str, Dockerfile]
    """Target → what it is built from."""
    engine: Endpoint
    inputs: BuildInputs = field(default_factory=BuildInputs)
    caches: Mapping[str, Sequence[CacheEntry]] = field(default_factory=dict)
    """Target → the compiling stages that it needs, which the caches may have."""
    revision: str | None = None
    """Commit of the project."""
    origin: Mapping[str, str] = field(default_factory=dict)
    """Repository, run and workflow, as far as they are known: fields of `BuildResult`."""
    started: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def context(self) -> Path:
        """Return the build context, an empty folder: the Dockerfiles need none."""
        return self.request.folder / "empty"

    def layout_folder(self, target: Target) -> Path | None:
        """Return the folder of a target's OCI layout, or None if none is written."""
        output = self.request.output
        if self.request.stage or output in ("load", "cacheonly"):
            return None
        return self.request.folder / target.id / "layout" if output == "push" else Path(output) / target.id


def bake_file(run: BuildRun) -> dict[str, Any]:
    """Return the bake file for targets whose Dockerfiles are `folder/<id>/Dockerfile`.

    Raises ConfigError for a platform that a target is not for.
    """
    request, inputs = run.request, run.inputs
    entries: dict[str, dict[str, Any]] = {}
    for target in request.targets:
        output = "type=docker" if request.output == "load" and not request.stage else "type=cacheonly"
        # What is pushed is a layout first: the docker driver cannot push by digest, and rewrites times in layouts only.
        if layout := run.layout_folder(target):
            output = f"type=oci,tar=false,dest={layout},{request.layer_format.attributes}"
        entry = entries[target.bake_name] = {
            "context": str(run.context),
            # Inline text would need escaping: bake expands ${…}.
            "dockerfile": str(request.folder / target.id / "Dockerfile"),
            "platforms": list(platforms_of(target, request.platforms)),
            "tags": [] if request.stage else [target.name],
            "output": [output],
        }
        if request.stage:
            entry["target"] = request.stage
        if contexts := {**inputs.stages.get(target.id, {}), **inputs.images}:
            entry["contexts"] = contexts
        if inputs.secrets:
            entry["secret"] = [f"id={name},src={path}" for name, path in sorted(inputs.secrets.items())]
        if caches := run.caches.get(target.id):
            entry["cache-from"] = [f"type=registry,ref={request.cache}:{cache.tag}" for cache in caches]
        if request.no_cache:
            entry["no-cache"] = True
        if request.rebuilt:
            entry["no-cache-filter"] = [FINAL_STAGE]
    return {"group": {"default": {"targets": sorted(entries)}}, "target": entries}


def platforms_of(target: Target, wanted: Sequence[str]) -> tuple[Platform, ...]:
    """Return the target's platforms, or those of them that are wanted. Raises ConfigError if none is left."""
    chosen = tuple(p for p in target.platforms if not wanted or p in wanted)
    if not chosen:
        raise ConfigError(f"{target.id}: is not for {', '.join(wanted)}; it is for {', '.join(target.platforms)}")
    return chosen


def replaced_contexts(replaced: Mapping[str, str]) -> dict[str, str]:
    """Return what replaces images and stages, identified by content: a digest, or `folder` if there is none.

    Contexts of single targets are left out: they hold what the lock names, only from another place.
    """
    return {
        name: f"sha256:{context.rpartition('@sha256:')[2]}" if "@sha256:" in context else "folder"
        for name, context in sorted(replaced.items())
    }
