"""`imagebuild build`: find the engine, prepare the base, render, run BuildKit, report."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from imagebuild.build import bake, base, buildx, change, export, private, supply
from imagebuild.build.bake import LayerFormat
from imagebuild.build.bundle import Bundle, Recording
from imagebuild.build.change import ProjectState
from imagebuild.build.inputs import NeededInputs, Trees, needed_inputs
from imagebuild.core import console, http, settings
from imagebuild.core.console import out
from imagebuild.core.errors import ConfigError
from imagebuild.core.files import cache_folder
from imagebuild.core.run import native_platform
from imagebuild.oci import engine
from imagebuild.oci.engine import has_containerd_store
from imagebuild.project import revision
from imagebuild.project.load import Project
from imagebuild.project.lockfile import check_resolved, digest_of
from imagebuild.project.matrix import Target
from imagebuild.project.plan import Changes
from imagebuild.project.records import BuildResult
from imagebuild.render.renderer import Dockerfile, Renderer


@dataclass(frozen=True)
class BuildRequest:
    """What the command line asks for."""

    targets: tuple[Target, ...]
    platforms: tuple[str, ...] = ()
    output: str = "load"
    packing: LayerFormat = field(default_factory=LayerFormat)
    builder: str | None = None
    sources: tuple[str, ...] = ()
    base: str = "bootstrap"
    ca: Path | None = None
    no_cache: bool = False
    jobs: int = 0
    stage: str | None = None
    cache: str | None = None
    """Repository of caches of compiled artefacts."""
    cache_write: bool = False
    folder: Path = Path("build")
    verbose: bool = False
    changes: Changes = field(default_factory=Changes)
    bundle: Bundle | None = None
    """Build from this, without a network."""
    record: Recording | None = None
    """Keep here what the build fetches."""

    @property
    def again(self) -> tuple[str, ...]:
        """The options that another command needs to build the same."""
        given = {"--platform": self.platforms, "--source": self.sources, "--set": self.changes.settings}
        given |= {"--with": self.changes.with_, "--without": self.changes.without}
        given |= {"--builder": (self.builder,) if self.builder else ()}
        given |= {"--bundle": (str(self.bundle.folder),) if self.bundle else ()}
        return tuple(word for option, values in given.items() for value in values for word in (option, value))


def build_targets(project: Project, renderer: Renderer, wish: BuildRequest) -> list[BuildResult]:
    """Build the targets and show progress.

    Raises ConfigError, CommandError or ResultError; what ran until then stays cached.
    """
    wish = replace(wish, platforms=tuple(native_platform() if p == "local" else p for p in wish.platforms))
    platforms: set[str] = {p for t in wish.targets for p in bake.platforms_of(t, wish.platforms)}
    check_resolved(project.lock, (s for t in wish.targets for s in renderer.recipe(t).sources()))
    dockerfiles = {t.id: renderer.dockerfile(t) for t in wish.targets}
    _check_stage(wish, dockerfiles)
    _check_bundle(wish, dockerfiles)
    wanted = {
        t.id: needed_inputs(
            renderer.recipe(t), project.lock, dockerfiles[t.id].stages, bake.platforms_of(t, wish.platforms)
        )
        for t in wish.targets
    }
    sources = buildx.replaced_sources(project, wish.targets, wish.sources)
    compiled = _compiled(project, renderer, wish)
    found = engine.find_engine(os.environ)
    if not wish.builder and found.host.startswith("unix://"):
        for name in sorted(platforms - {native_platform()}):
            private.ensure_emulation(name.removeprefix("linux/"))
    started = datetime.now(UTC)
    shown = buildx.show_progress([t.id for t in wish.targets], verbose=wish.verbose)
    origin = export.BuildOrigin(project, revision.current_revision(project.matrix.path, project.root), started, shown)
    results: list[BuildResult] = []
    with (
        shown,
        _secrets(wish) as secrets,
        _supplied(project, wish, found, wanted, ca=secrets.get("ca"), shown=shown) as supplied,
    ):
        options = bake.Options(
            context=wish.folder.resolve() / "empty",
            output=wish.output,
            platforms=wish.platforms,
            replaced={**supplied.images, **sources},
            stages=supplied.stages,
            secrets={**secrets, **supplied.secrets},
            no_cache=wish.no_cache,
            packing=wish.packing,
            cache_from=change.references(wish.cache, compiled) if wish.cache else {},
        )
        size = wish.jobs or len(wish.targets)
        for start in range(0, len(wish.targets), size):
            request = buildx.BakeRequest(
                targets=wish.targets[start : start + size],
                dockerfiles=dockerfiles,
                folder=wish.folder.resolve(),
                options=options,
                engine=found,
                builder=wish.builder,
                stage=wish.stage,
                components=frozenset(project.components),
                again=wish.again,
            )
            built = buildx.run_bake(request, shown)
            results += export.export(request, built, origin)
            if wish.cache and wish.cache_write:
                change.write_caches(request, wish.cache, compiled, built, origin)
    return results


def layer_format_of(project: Project, compression: str) -> LayerFormat:
    """How layers are written, by the environment and the lock. Raises ConfigError for another compression."""
    return LayerFormat(bake.epoch_of(os.environ, project.lock.date), *bake.parse_compression(compression))


def _compiled(project: Project, renderer: Renderer, wish: BuildRequest) -> change.CacheEntries:
    """What the targets need compiled, if there is a cache that may have it."""
    if wish.cache_write and not wish.cache:
        raise ConfigError("--cache-write: says that --cache REPOSITORY is written too, and needs it")
    if wish.cache_write and (wish.sources or wish.stage):
        raise ConfigError("--cache-write: not with --source or --stage, which build something else or nothing whole")
    if not wish.cache:
        return {}
    return change.cache_entries(
        ProjectState(project, renderer, wish.targets, wish.platforms, native_platform(), wish.base)
    )


def print_builds(request: BuildRequest, results: Sequence[BuildResult], seconds: float) -> None:
    """Print what was built, what it contains, and how long that took."""
    rows = []
    for result, target in zip(results, () if request.stage else request.targets, strict=not request.stage):
        run = [s for s in result.steps if not s.cached]
        steps = f"{len(run)} run, {len(result.steps) - len(run)} cached"
        contains = ", ".join(f"{name} {version}" for name, version in target.components.items())
        name = result.repository or result.tags[0]
        rows.append((name, console.format_size(result.size_bytes), steps, (result.digest or "")[:19], contains))
    if rows:
        console.print_table(("image", "compressed", "steps", "digest", "contains"), rows)
    for result in results:
        if result.repository:
            out.print(f"pushed {result.repository}@{result.digest}", soft_wrap=True, markup=False)
    out.print(f"built in {console.format_duration(seconds)}")


def _check_stage(wish: BuildRequest, dockerfiles: dict[str, Dockerfile]) -> None:
    known = {stage for d in dockerfiles.values() for stage in d.stages}
    if wish.stage and wish.stage not in known:
        raise ConfigError(f"--stage {wish.stage}: no selected target has it; stages: {', '.join(sorted(known))}")


def _check_bundle(wish: BuildRequest, dockerfiles: dict[str, Dockerfile]) -> None:
    """Raise ConfigError that lists the targets which the bundle cannot build."""
    if wish.bundle is None:
        return
    reasons = {
        t.id: wish.bundle.lacks(dockerfiles[t.id].stages, bake.platforms_of(t, wish.platforms)) for t in wish.targets
    }
    if listed := "\n".join(f"  {name}: {why}" for name, why in reasons.items() if why):
        raise ConfigError(f"{wish.bundle.folder}: these targets cannot be built from it:\n{listed}")


@contextmanager
def _supplied(
    project: Project, wish: BuildRequest, found: engine.Endpoint, wanted: Mapping[str, NeededInputs], *,
    ca: Path | None, shown: buildx.Progress,
) -> Iterator[supply.BuildInputs]:  # fmt: skip
    """Where the build's inputs come from: the network, mirrors or a bundle."""
    configured = settings.load_settings(os.environ)
    special = bool(wish.bundle or wish.record)
    if special and wish.builder:
        raise ConfigError("--builder: bundles are made and used with the engine on this machine")
    if (special or configured.mirrors.downloads) and not wish.builder and not has_containerd_store(found):
        raise ConfigError("mirrors and bundles need an engine with the containerd image store; enable it")
    platforms: set[str] = {p for t in wish.targets for p in bake.platforms_of(t, wish.platforms)}
    with tempfile.TemporaryDirectory(prefix="imagebuild-") as folder:
        order = supply.InputsRequest(
            needs=wanted,
            bases={} if wish.bundle else _bases(project, wish, platforms, found, shown),
            engine=found,
            settings=configured,
            ca=ca,
            trees=Trees(cache_folder("sources")),
            secrets=Path(folder),
            note=shown.note,
        )
        if wish.bundle:
            chosen = supply.inputs_from_bundle(order, wish.bundle)
        else:
            chosen = supply.inputs_into_bundle(order, wish.record) if wish.record else supply.inputs_from_mirrors(order)
        with chosen as supplied:
            yield supplied


def _bases(
    project: Project, wish: BuildRequest, platforms: set[str], found: engine.Endpoint, shown: buildx.Progress
) -> dict[str, str]:
    """Official image → its bootstrapped replacement, for every base that the targets start from."""
    if wish.base == "registry":
        return {}
    if wish.base != "bootstrap":
        raise ConfigError(f"--base {wish.base}: 'bootstrap' or 'registry'")
    result = {}
    for name in sorted({t.axes["os"] for t in wish.targets}):
        entry = project.matrix.model.bases[name]
        if not entry.release:
            continue
        shown.note(f"base {name}: bootstrapping {entry.release} where the cache has none")
        made = base.bootstrap(
            sorted(platforms | {native_platform()}), cache_folder(), release=entry.release, log=shown.note
        )
        classic = not wish.builder and not has_containerd_store(found)
        result[digest_of(project.lock, entry.image)] = base.load(made, found.environment) if classic else made.context
    return result


@contextmanager
def _secrets(wish: BuildRequest) -> Iterator[dict[str, Path]]:
    """Build secrets of this machine: its CA bundle, and the address of its Python package index if it set one."""
    with tempfile.TemporaryDirectory(prefix="imagebuild-") as folder:
        result = {}
        if ca := http.ca_bundle(wish.ca, os.environ):
            result["ca"] = ca
        if index := settings.configured_index():
            path = Path(folder) / "pip.conf"
            path.touch(mode=0o600)
            path.write_text(settings.pip_conf_text(index))
            result["pip.conf"] = path
        yield result
