"""Define what is to be built and how, and compute the bake file. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imagebuild.core.errors import ConfigError
from imagebuild.core.fields import Platform
from imagebuild.oci.layout import EPOCH
from imagebuild.project.plan import Target

if TYPE_CHECKING:
    from imagebuild.oci.engine import Endpoint
    from imagebuild.project.project import Project
    from imagebuild.render.dockerfile import Dockerfile

FETCHED = "fetched-"
"""Beginning of the names of targets that hold what imagebuild fetched instead of BuildKit."""
FILES = "files"
"""Folder beside the Dockerfile of such a target."""
FINAL_STAGE = "image"
"""Stage of every Dockerfile that installs packages of the distribution."""


def layer_attributes(compression: str, day: date | None) -> str:
    """Return attributes for exporting layouts: compression, and the latest time of a file, `day` or a fixed one."""
    epoch = int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()) if day else EPOCH
    # The epoch is given to the exporter alone: a build argument would be part of every step's cache key.
    return f"compression={compression},force-compression=true,rewrite-timestamp=true,source-date-epoch={epoch}"


def new_layout(layout: Path) -> Path:
    """Return where BuildKit writes a layout before it replaces the one of an earlier build."""
    return layout.with_name(f"{layout.name}.new")


@dataclass(frozen=True)
class BuildRequest:
    """Hold what the command line asks for."""

    targets: tuple[Target, ...]
    platforms: tuple[Platform, ...] = ()
    """Empty: the platforms of each target."""
    output: str = "load"
    """`load` into the engine's image store, `push`, `cacheonly`, or a folder for OCI layouts."""
    compression: str = "gzip"
    """`gzip` or `zstd`, of layers that leave the engine."""
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
    stage: str | None = None
    """Build only this stage, into the cache."""
    cache: str | None = None
    """Repository of caches of compiled artefacts."""
    cache_write: bool = False
    folder: Path = Path("build")
    """Folder for Dockerfiles, the bake file and results."""
    verbose: bool = False
    again: tuple[str, ...] = ()
    """Options with which another command builds a stage of the same."""
    bundle: Path | None = None
    """Folder of a bundle to build from, without a network."""
    record: bool = False
    """Make the bundle instead: keep in it what the build fetches."""


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
    """Image in `FROM`, or stage, → what replaces it everywhere: a folder, `oci-layout://…` or `docker-image://…`."""
    stages: Mapping[str, Mapping[str, Path]] = field(default_factory=dict)
    """Target → stage → folder with what the stage downloads, as `inputs.fetch_all` makes it; `images` wins."""
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
    about: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `BuildResult` that are known at the start: time, commit, repository, run and workflow."""

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
    """Return the bake file for targets whose Dockerfiles are `folder/<id>/Dockerfile`."""
    request, inputs = run.request, run.inputs
    layers = layer_attributes(request.compression, request.rebuilt or run.project.lock.date)
    entries: dict[str, dict[str, Any]] = {}
    fetched: set[Path] = set()
    for target in request.targets:
        output = "type=docker" if request.output == "load" and not request.stage else "type=cacheonly"
        # What is pushed is a layout first: the docker driver cannot push by digest, and rewrites times in layouts only.
        if layout := run.layout_folder(target):
            output = f"type=oci,tar=false,dest={new_layout(layout)},{layers}"
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
        folders = inputs.stages.get(target.id, {})
        fetched |= set(folders.values())
        replaced = {stage: f"target:{FETCHED}{folder.name}" for stage, folder in folders.items()}
        if contexts := {**replaced, **inputs.images}:
            entry["contexts"] = contexts
        if inputs.secrets:
            entry["secret"] = [f"id={name},src={path}" for name, path in sorted(inputs.secrets.items())]
        if caches := run.caches.get(target.id):
            entry["cache-from"] = [f"type=registry,ref={request.cache}:{cache.tag}" for cache in caches]
        if request.no_cache:
            entry["no-cache"] = True
        if request.rebuilt:
            entry["no-cache-filter"] = [FINAL_STAGE]
    # A folder as a context would have another key in the cache than what ADD makes; a stage made from it has the same.
    platforms = sorted({platform for entry in entries.values() for platform in entry["platforms"]})
    for folder in fetched:
        entries[f"{FETCHED}{folder.name}"] = {
            "context": str(folder / FILES),
            "dockerfile": str(folder / "Dockerfile"),
            "platforms": platforms,
            "output": ["type=cacheonly"],
        }
    return {"group": {"default": {"targets": sorted(entries)}}, "target": entries}


def platforms_of(target: Target, wanted: Sequence[str]) -> tuple[Platform, ...]:
    """Return the target's platforms, or those of them that are wanted."""
    return tuple(platform for platform in target.platforms if not wanted or platform in wanted)


def check_platforms(targets: Sequence[Target], wanted: Sequence[str]) -> None:
    """Raise ConfigError for a target that is for none of the wanted platforms."""
    for target in targets:
        if not platforms_of(target, wanted):
            raise ConfigError(f"{target.id}: is not for {', '.join(wanted)}; it is for {', '.join(target.platforms)}")


def replaced_contexts(replaced: Mapping[str, str]) -> dict[str, str]:
    """Return what replaces images and stages, identified by content: a digest, or `folder` if there is none.

    Contexts of single targets are left out: they hold what the lock names, only from another place.
    """
    return {
        name: f"sha256:{context.rpartition('@sha256:')[2]}" if "@sha256:" in context else "folder"
        for name, context in sorted(replaced.items())
    }
