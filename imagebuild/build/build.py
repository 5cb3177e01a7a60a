"""Build targets: render them, find an engine, collect what the build needs, run BuildKit, write the results."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from imagebuild.build import bake, buildx, private
from imagebuild.build.bake import BakeRequest, BuildInputs, LayerFormat
from imagebuild.core import console, settings
from imagebuild.core.console import out
from imagebuild.core.errors import ConfigError
from imagebuild.core.files import cache_folder
from imagebuild.core.run import native_platform
from imagebuild.oci import engine
from imagebuild.oci.engine import Endpoint
from imagebuild.project import revision
from imagebuild.project.load import Project
from imagebuild.project.lockfile import check_resolved, digest_of
from imagebuild.project.matrix import Target
from imagebuild.project.plan import Changes
from imagebuild.project.records import BuildResult
from imagebuild.render.renderer import Dockerfile, Renderer

if TYPE_CHECKING:
    from imagebuild.build.bundle import Bundle, Recording
    from imagebuild.build.change import CacheEntries


@dataclass(frozen=True)
class BuildRequest:
    """Hold what the command line asks for."""

    targets: tuple[Target, ...]
    platforms: tuple[str, ...] = ()
    """Empty: the platforms of each target."""
    output: str = "load"
    """As in BakeRequest."""
    layer_format: LayerFormat = field(default_factory=LayerFormat)
    builder: str | None = None
    """Builder of docker buildx; None: the engine's own."""
    sources: tuple[str, ...] = ()
    """`NAME=FOLDER`: components whose source is a folder."""
    base: str = "bootstrap"
    """Where base images come from: `bootstrap` or `registry`."""
    ca: Path | None = None
    no_cache: bool = False
    jobs: int = 0
    """Targets to build at a time; 0: all."""
    stage: str | None = None
    """Build only this stage."""
    cache: str | None = None
    """Repository of caches of compiled artefacts."""
    cache_write: bool = False
    folder: Path = Path("build")
    verbose: bool = False
    changes: Changes = field(default_factory=Changes)
    bundle: Bundle | None = None
    """Build from this bundle, without a network."""
    record: Recording | None = None
    """Keep here what the build fetches."""

    @property
    def platforms_of_targets(self) -> frozenset[str]:
        """Return all platforms that are built. Raises ConfigError for a target that has none of them."""
        return frozenset(p for target in self.targets for p in bake.platforms_of(target, self.platforms))

    @property
    def repeat_options(self) -> tuple[str, ...]:
        """Return the options with which another command builds the same."""
        given = {"--platform": self.platforms, "--source": self.sources}
        given |= {"--builder": (self.builder,) if self.builder else ()}
        given |= {"--bundle": (str(self.bundle.folder),) if self.bundle else ()}
        words = (word for option, values in given.items() for value in values for word in (option, value))
        return (*words, *self.changes.options)


def build_targets(project: Project, renderer: Renderer, request: BuildRequest) -> list[BuildResult]:
    """Build the targets and show progress.

    Raises ConfigError, CommandError or ResultError; steps that ran until then stay cached.
    """
    request = replace(request, platforms=tuple(native_platform() if p == "local" else p for p in request.platforms))
    platforms = request.platforms_of_targets
    check_resolved(project.lock, (s for t in request.targets for s in renderer.recipe(t).sources()))
    dockerfiles = {target.id: renderer.dockerfile(target) for target in request.targets}
    check_request(request, dockerfiles)
    sources = buildx.replaced_sources(project, request.targets, request.sources)
    caches = caches_of(project, request, dockerfiles)
    endpoint = engine.find_engine(os.environ)
    if not request.builder and endpoint.host.startswith("unix://"):
        for name in sorted(platforms - {native_platform()}):
            private.ensure_emulation(name.removeprefix("linux/"))
    started = datetime.now(UTC)
    progress = buildx.BuildProgress([target.id for target in request.targets], verbose=request.verbose)
    commit = revision.current_revision(project.matrix.path, project.root)
    origin = buildx.BuildOrigin(project, commit, started, progress)
    results: list[BuildResult] = []
    with (
        progress,
        machine_secrets(request) as secrets,
        build_inputs(renderer, request, endpoint, secrets.get("ca"), progress) as inputs,
    ):
        size = request.jobs or len(request.targets)
        for start in range(0, len(request.targets), size):
            batch = BakeRequest(
                targets=request.targets[start : start + size],
                dockerfiles=dockerfiles,
                folder=request.folder.resolve(),
                engine=endpoint,
                builder=request.builder,
                output=request.output,
                stage=request.stage,
                layer_format=request.layer_format,
                platforms=request.platforms,
                replaced={**inputs.images, **sources},
                stages=inputs.stages,
                secrets={**secrets, **inputs.secrets},
                no_cache=request.no_cache,
                cache_from={target: [f"{request.cache}:{e.tag}" for e in found] for target, found in caches.items()},
                components=frozenset(project.components),
                repeat_options=request.repeat_options,
            )
            built = buildx.run_bake(batch, progress)
            results += buildx.export_images(batch, built, origin)
            if request.cache and request.cache_write:
                from imagebuild.build.change import write_caches

                write_caches(batch, request.cache, caches, built, origin)
    return results


def check_request(request: BuildRequest, dockerfiles: Mapping[str, Dockerfile]) -> None:
    """Raise ConfigError for options that exclude each other, an unknown stage, or a bundle that lacks something."""
    if request.base not in ("bootstrap", "registry"):
        raise ConfigError(f"--base {request.base}: use bootstrap or registry")
    if request.cache_write and not request.cache:
        raise ConfigError("--cache-write: needs --cache REPOSITORY, the repository to write to")
    if request.cache_write and (request.sources or request.stage):
        raise ConfigError(
            "--cache-write: cannot be used with --source or --stage, which build only parts or other code"
        )
    if (request.bundle or request.record) and request.builder:
        raise ConfigError("--builder: bundles are made and used with the engine on this machine; leave the option out")
    if request.stage:
        stages = {stage for dockerfile in dockerfiles.values() for stage in dockerfile.stages}
        if request.stage not in stages:
            names = ", ".join(sorted(stages))
            raise ConfigError(f"--stage {request.stage}: no selected target has such a stage; stages: {names}")
    if request.bundle:
        problems = {
            target.id: request.bundle.problem(
                dockerfiles[target.id].stages, bake.platforms_of(target, request.platforms)
            )
            for target in request.targets
        }
        if listed := "\n".join(f"  {name}: {problem}" for name, problem in problems.items() if problem):
            raise ConfigError(f"{request.bundle.folder}: these targets cannot be built from it:\n{listed}")


def caches_of(project: Project, request: BuildRequest, dockerfiles: Mapping[str, Dockerfile]) -> CacheEntries:
    """Return what each target needs compiled; nothing without --cache."""
    if not request.cache:
        return {}
    from imagebuild.build.change import ProjectState, cache_entries

    texts = {target.id: dockerfiles[target.id].text for target in request.targets}
    state = ProjectState(project, request.targets, texts, request.platforms, request.base)
    return {t.id: [e for p in state.platforms_of(t) for e in cache_entries(state, t, p)] for t in request.targets}


@contextmanager
def machine_secrets(request: BuildRequest) -> Iterator[dict[str, Path]]:
    """Provide this machine's build secrets: its CA bundle, and its Python package index if it has one configured."""
    with tempfile.TemporaryDirectory(prefix="imagebuild-") as folder:
        secrets = {}
        if ca := settings.ca_bundle(request.ca, os.environ):
            secrets["ca"] = ca
        if index := settings.configured_index():
            path = Path(folder) / "pip.conf"
            path.touch(mode=0o600)
            path.write_text(settings.pip_conf_text(index))
            secrets["pip.conf"] = path
        yield secrets


@contextmanager
def build_inputs(
    renderer: Renderer, request: BuildRequest, endpoint: Endpoint, ca: Path | None, progress: buildx.BuildProgress
) -> Iterator[BuildInputs]:
    """Provide bootstrapped bases, and what comes from mirrors or a bundle; BuildKit fetches everything else itself.

    Raises ConfigError for an engine that cannot use mirrors or bundles.
    """
    configured = settings.load_settings(os.environ)
    with_bundle = request.bundle or request.record
    needs_trees = with_bundle or configured.mirrors.downloads
    if needs_trees and not request.builder and not engine.has_containerd_store(endpoint):
        raise ConfigError("mirrors and bundles need an engine with the containerd image store; enable it there")
    bases = {} if request.bundle else bootstrapped_bases(renderer.project, request, endpoint, progress)
    if not with_bundle and configured.mirrors == settings.Mirrors():
        yield BuildInputs(bases)
        return

    from imagebuild.build import inputs

    needs = {
        target.id: inputs.needed_inputs(
            renderer.recipe(target),
            renderer.project.lock,
            renderer.dockerfile(target).stages,
            bake.platforms_of(target, request.platforms),
        )
        for target in request.targets
    }
    with tempfile.TemporaryDirectory(prefix="imagebuild-") as secrets:
        wanted = inputs.InputsRequest(
            needs=needs,
            bases=bases,
            engine=endpoint,
            settings=configured,
            ca=ca,
            trees=inputs.Trees(cache_folder("sources")),
            secrets=Path(secrets),
            note=progress.note,
        )
        if with_bundle:
            from imagebuild.build import bundle

            if request.bundle:
                provided = bundle.inputs_from_bundle(wanted, request.bundle)
            else:
                assert request.record
                provided = bundle.inputs_into_bundle(wanted, request.record)
        else:
            provided = inputs.inputs_from_mirrors(wanted)
        with provided as given:
            yield given


def bootstrapped_bases(
    project: Project, request: BuildRequest, endpoint: Endpoint, progress: buildx.BuildProgress
) -> dict[str, str]:
    """Bootstrap every base that the targets start from; return official image → context that replaces it."""
    if request.base == "registry":
        return {}
    from imagebuild.build import base

    contexts = {}
    for name in sorted({target.axes["os"] for target in request.targets}):
        entry = project.matrix.model.bases[name]
        if not entry.release:
            continue
        progress.note(f"base {name}: bootstrapping {entry.release} where the cache has none")
        platforms = sorted(request.platforms_of_targets | {native_platform()})
        image = base.bootstrap(platforms, cache_folder(), release=entry.release, log=progress.note)
        classic_store = not request.builder and not engine.has_containerd_store(endpoint)
        contexts[digest_of(project.lock, entry.image)] = (
            base.load_into_engine(image, endpoint.environment) if classic_store else image.context
        )
    return contexts


def layer_format_of(project: Project, compression: str) -> LayerFormat:
    """Return the format of layers, by the environment and the lock. Raises ConfigError for another compression."""
    return LayerFormat(bake.epoch_of(os.environ, project.lock.date), *bake.parse_compression(compression))


def print_builds(request: BuildRequest, results: Sequence[BuildResult], seconds: float) -> None:
    """Print what was built, what it contains, and how long that took."""
    rows = []
    for result, target in zip(results, () if request.stage else request.targets, strict=not request.stage):
        cached = sum(step.cached for step in result.steps)
        steps = f"{len(result.steps) - cached} run, {cached} cached"
        contains = ", ".join(f"{name} {version}" for name, version in target.components.items())
        name = result.repository or result.tags[0]
        rows.append((name, console.format_size(result.size_bytes), steps, (result.digest or "")[:19], contains))
    if rows:
        console.print_table(("image", "compressed", "steps", "digest", "contains"), rows)
    for result in results:
        if result.repository:
            out.print(f"pushed {result.repository}@{result.digest}", soft_wrap=True, markup=False)
    out.print(f"built in {console.format_duration(seconds)}")
