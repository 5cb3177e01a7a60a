"""The request and the inputs of a build, and the file for `docker buildx bake` that describes the build.
Does no I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imagebuild.build.nodes import BuilderNode
from imagebuild.core.errors import ConfigError
from imagebuild.core.fields import Platform, YamlFile
from imagebuild.oci.layout import EPOCH
from imagebuild.oci.reference import parse_reference
from imagebuild.project.plan import Target

if TYPE_CHECKING:
    from imagebuild.oci.engine import Endpoint
    from imagebuild.oci.image import PlatformImage
    from imagebuild.project.component import Component
    from imagebuild.project.project import Project
    from imagebuild.render.stages import Dockerfile, Stage

FETCHED = "fetched-"
"""Prefix of the names of bake targets whose files were fetched by imagebuild, not by BuildKit."""
FILES = "files"
"""Name of the folder with the files of a fetched download. A Dockerfile next to the folder copies the files."""
FINAL_STAGE = "image"
"""Name of the last stage of every Dockerfile. The stage installs packages of the distribution."""


def new_layout(layout: Path) -> Path:
    """Return the folder in which BuildKit writes an OCI layout. After the build, the folder is renamed to `layout`."""
    return layout.with_name(f"{layout.name}.new")


def old_layout(layout: Path) -> Path:
    """Return the folder to which the layout of an earlier build is renamed before it is deleted."""
    return layout.with_name(f"{layout.name}.old")


@dataclass(frozen=True)
class BuildRequest:
    """The targets and options of `imagebuild build`."""

    targets: tuple[Target, ...]
    platforms: tuple[Platform, ...] = ()
    """Platforms to build. Empty: all platforms of each target."""
    output: str = "load"
    """`load` (into the engine's image store), `push`, `cacheonly`, or a folder for OCI layouts."""
    compression: str = "gzip"
    """`gzip`, `zstd` or `estargz`, for layers in layouts and registries."""
    builders: tuple[str, ...] = ()
    """Names of buildx builders that share the work. Empty: the engine's default builder."""
    sources: tuple[str, ...] = ()
    """`NAME=FOLDER` for each component that is built from a local folder."""
    base: str = "bootstrap"
    """`bootstrap`: make base images from the distribution's package archive. `registry`: pull base images."""
    ca: Path | None = None
    """File with additional CA certificates."""
    no_cache: bool = False
    rebuilt: date | None = None
    """Day of a rebuild; None if this is not a rebuild. A rebuild installs the distribution's packages again, even if
    the builder's cache contains the installed packages."""
    stage: str | None = None
    """Name of the only stage to build; None to build images. The result of the stage stays in the builder's cache."""
    cache: str | None = None
    """Repository in a registry with the caches of stages that compile software. None: use no such caches."""
    cache_write: bool = False
    folder: Path = Path("build")
    """Folder for Dockerfiles, the bake file and results."""
    verbose: bool = False
    again: tuple[str, ...] = ()
    """Command-line options of this build. If a stage fails, the error message shows the command with these options that
    repeats the stage."""
    bundle: Path | None = None
    """Folder of a bundle: all files that a build without a network needs. None: the build uses the network."""
    describe: Callable[[PlatformImage], bytes] | None = None
    """Function that returns the SBOM of a built image, or None to write no SBOM."""
    record: bool = False
    """True: fetch the inputs from the network, and write the inputs to the bundle. False: read the inputs from the
    bundle."""

    @property
    def builder(self) -> str | None:
        """The first builder, which is the only one in every part of the build. None: the engine's default builder."""
        return self.builders[0] if self.builders else None

    @property
    def built(self) -> list[Platform]:
        """All platforms that are built, in order."""
        return sorted({platform for target in self.targets for platform in platforms_of(target, self.platforms)})

    @property
    def exported(self) -> Path | None:
        """The folder for OCI layouts that the user named, if the build writes layouts."""
        return None if self.stage or self.output in ("load", "push", "cacheonly") else Path(self.output)

    @property
    def log(self) -> Path:
        """The file for the log: beside the result of a single target, or in the folder of several. The log of a bundle
        is beside the bundle."""
        if self.bundle and self.record:
            return self.bundle.with_name(f"{self.bundle.name}.log")
        return Path(self.folder, *[target.id for target in self.targets if len(self.targets) == 1], "build.log")


@dataclass(frozen=True)
class CacheEntry:
    """The cache, in a registry, of one stage that compiles software, for one platform."""

    stage: str
    platform: Platform
    key: str

    @property
    def tag(self) -> str:
        """The tag of the cache in the repository, such as `ucx-amd64-0123456789abcdef`."""
        return f"{self.stage}-{self.platform.removeprefix('linux/')}-{self.key}"


def cache_entries(
    builds: Iterable[tuple[Target, Platform, Mapping[str, Stage]]], components: Mapping[str, YamlFile[Component]]
) -> Mapping[str, Sequence[CacheEntry]]:
    """Map each target id to the caches of the stages that compile software for it, on all platforms together."""
    entries: dict[str, list[CacheEntry]] = defaultdict(list)
    for target, platform, stages in builds:
        compiling = (name for name in stages if name in components and components[name].model.compiles)
        entries[target.id] += [CacheEntry(name, platform, stages[name].key) for name in compiling]
    return entries


@dataclass(frozen=True)
class BuildInputs:
    """The inputs of a build that BuildKit gets in addition to the Dockerfiles."""

    images: Mapping[str, str] = field(default_factory=dict)
    """Maps the name of an image in `FROM`, or of a stage, to the replacement in all targets. The replacement is a
    folder, `oci-layout://…` or `docker-image://…`."""
    stages: Mapping[str, Mapping[str, Path]] = field(default_factory=dict)
    """`stages[target id][stage]` is the folder that replaces a stage which only downloads. `inputs.fetch_all` makes the
    folder and puts the downloaded files into it. If `images` also replaces the stage, the replacement in `images` is
    used."""
    secrets: Mapping[str, Path] = field(default_factory=dict)
    """Maps the id of each build secret to the file that contains it."""


@dataclass(frozen=True)
class BuildRun:
    """A build in progress: the request, rendered Dockerfiles, engine and inputs."""

    request: BuildRequest
    project: Project
    dockerfiles: Mapping[str, Dockerfile]
    """Maps the id of each target to its Dockerfile."""
    engine: Endpoint
    inputs: BuildInputs = field(default_factory=BuildInputs)
    caches: Mapping[str, Sequence[CacheEntry]] = field(default_factory=dict)
    """Maps the id of each target to the caches of the target's stages. Some of the caches may not exist in the
    registry."""
    builders: Mapping[str, Sequence[BuilderNode]] = field(default_factory=dict)
    """Maps each builder to its nodes."""
    part: str = ""
    """Name of the builder if several builders share the build; the files that describe this part contain the name."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `BuildResult` that are known when the build starts: time, commit, repository, CI run and workflow."""

    @property
    def nodes(self) -> list[BuilderNode]:
        """The nodes of the first builder that build a platform of the targets; empty for the engine."""
        own = self.builders.get(self.request.builder or "", ())
        return [node for node in own if {*node.builds}.intersection(self.request.built)]

    @property
    def epoch(self) -> int:
        """The latest timestamp of files, which replaces later ones: the day of a rebuild, or of the lock, or EPOCH."""
        day = self.request.rebuilt or self.project.lock.date
        return int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()) if day else int(EPOCH)

    @property
    def context(self) -> Path:
        """The build context: an empty folder, because the Dockerfiles copy nothing from the context."""
        return self.request.folder / "empty"

    @property
    def written(self) -> Iterator[Path]:
        """All files and folders that the build writes."""
        folder = self.request.folder
        for part in (self.request.builders[1:] and self.request.builders) or [self.part]:
            own = replace(self, part=part)
            yield from (own.own_file(f"{name}.json") for name in ("bake", "bake-caches", "bake-stages", "metadata"))
        yield self.context
        for target in self.request.targets:
            yield folder / target.id
            yield from (folder / target.id / name for name in ("Dockerfile", "result.json", "local.json"))
            yield from (self.sbom_file(target, p, local=local) for p in target.platforms for local in (False, True))
            if layout := self.layout_folder(target):
                yield from (layout, new_layout(layout), old_layout(layout))

    def own_file(self, name: str) -> Path:
        """Return the file for `name`, such as `bake.json`, in the build folder. It describes this part of the build."""
        stem, end = name.rsplit(".", 1)
        return self.request.folder / (f"{stem}-{self.part}.{end}" if self.part else name)

    def sbom_file(self, target: Target, platform: str, *, local: bool) -> Path:
        """Return the file for the SBOM of an image. `local`: the image was built after an image that was pushed."""
        several = len(platforms_of(target, self.request.platforms)) > 1
        name = f"sbom-{platform.rpartition('/')[2]}" if several else "sbom"
        return self.request.folder / target.id / f"{'local-' if local else ''}{name}.spdx.json"

    def layout_folder(self, target: Target) -> Path | None:
        """Return the folder of a target's OCI layout; None if the build does not write a layout."""
        if self.request.output == "push" and not self.request.stage:
            return self.request.folder / target.id / "layout"
        return self.request.exported / target.id if self.request.exported else None


def bake_file(run: BuildRun) -> dict[str, Any]:
    """Return the content of the bake file.
    The file refers to the Dockerfile of each target, `<folder>/<id>/Dockerfile`."""
    request, inputs = run.request, run.inputs
    # Only the exporter gets the timestamp: a build argument would be part of every step's cache key.
    layers = f"compression={request.compression},force-compression=true"
    layers += f",rewrite-timestamp=true,source-date-epoch={run.epoch}"
    entries: dict[str, dict[str, Any]] = {}
    fetched: set[Path] = set()
    for target in request.targets:
        # The cache can contain zstd layers, which containerd cannot unpack with Docker's media types.
        loaded = "type=docker,compression=gzip,force-compression=true"
        output = loaded if request.output == "load" and not request.stage else "type=cacheonly"
        # To push an image, BuildKit first writes an OCI layout: buildx's driver `docker` cannot push by digest, and
        # rewrites timestamps only in layouts.
        if layout := run.layout_folder(target):
            output = f"type=oci,tar=false,dest={new_layout(layout)},{layers}"
        entry = entries[target.bake_name] = {
            "context": str(run.context),
            # The path of the Dockerfile, not the text: bake would expand ${…} in the text.
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
    # A bake target that copies the downloaded files has the same cache key as the ADD in the replaced stage. If the
    # folder of the files were used as a context directly, the key would differ.
    platforms = sorted({platform for entry in entries.values() for platform in entry["platforms"]})
    for folder in fetched:
        entries[f"{FETCHED}{folder.name}"] = {
            "context": str(folder / FILES),
            "dockerfile": str(folder / "Dockerfile"),
            "platforms": platforms,
            "output": ["type=cacheonly"],
        }
    return {"group": {"default": {"targets": sorted(entries)}}, "target": entries}


def bake_file_of_caches(run: BuildRun, chosen: Mapping[CacheEntry, Target]) -> dict[str, Any]:
    """Return the content of a bake file that builds stages and writes their caches. `chosen` maps each cache to a
    target that needs the stage."""
    place, content = parse_reference(run.request.cache or "").name, bake_file(run)
    # Keep the other bake targets in the bake file, as the new ones refer to the bake targets of downloads.
    content["target"] |= {
        entry.tag: {
            **content["target"][target.bake_name],
            "target": entry.stage,
            "platforms": [entry.platform],
            "tags": [],
            "output": ["type=cacheonly"],
            # Write the cache as an image manifest: some registries refuse the index that BuildKit writes by default.
            "cache-to": [f"type=registry,ref={place}:{entry.tag},mode=min,image-manifest=true,oci-mediatypes=true"],
        }
        for entry, target in chosen.items()
    }
    content["group"]["default"]["targets"] = sorted(entry.tag for entry in chosen)
    return content


def platforms_of(target: Target, wanted: Sequence[str]) -> tuple[Platform, ...]:
    """Return the target's platforms that are also in `wanted`. Empty `wanted`: all platforms of the target."""
    return tuple(platform for platform in target.platforms if not wanted or platform in wanted)


def check_platforms(targets: Sequence[Target], wanted: Sequence[str]) -> None:
    """Raise ConfigError if a target is for none of the wanted platforms, or a wanted platform is for no target."""
    for target in targets:
        if not platforms_of(target, wanted):
            names = ", ".join(target.platforms)
            raise ConfigError(f"{target.id}: the target is not for {', '.join(wanted)}; choose from {names}")
    check_each_used(targets, wanted)


def check_each_used(targets: Sequence[Target], wanted: Sequence[str]) -> None:
    """Raise ConfigError if a wanted platform is for no target."""
    for platform in wanted:
        if not any(platform in target.platforms for target in targets):
            raise ConfigError(f"--platform {platform}: no selected target is for this platform; remove it")


def replaced_contexts(replaced: Mapping[str, str]) -> dict[str, str]:
    """Return a mapping of each replaced image or stage to the digest of the replacement.

    The value is `folder` if the replacement has no digest. `replaced` does not contain downloads from mirrors or a
    bundle, as the lock already contains the hashes of downloads."""
    return {
        name: f"sha256:{context.rpartition('@sha256:')[2]}" if "@sha256:" in context else "folder"
        for name, context in sorted(replaced.items())
    }
