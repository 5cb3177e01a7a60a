"""Build targets: render them, find an engine, collect what the build needs, run BuildKit, write the results."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from imagebuild.build import bake, buildx, private
from imagebuild.build.bake import BuildInputs, BuildRequest, BuildRun, CacheEntry, LayerFormat
from imagebuild.core import console, settings
from imagebuild.core.console import format_size, out
from imagebuild.core.errors import ConfigError, ImagebuildError
from imagebuild.core.fields import Platform
from imagebuild.core.files import cache_folder
from imagebuild.core.run import native_platform
from imagebuild.oci import engine
from imagebuild.project import revision
from imagebuild.project.lockfile import check_resolved, digest_of
from imagebuild.project.plan import Project
from imagebuild.render.renderer import Dockerfile, Renderer

if TYPE_CHECKING:
    from imagebuild.build.bundle import Bundle, Recording
    from imagebuild.project.records import BuildResult


MANY = 4
"""From so many targets on, a command that people copy does not name them."""


def size_of_downloads(urls: Collection[str]) -> str:
    """Return the size of files as ` (1.2 GB)`; nothing if a server does not answer or does not tell."""
    from imagebuild.core.http import Downloads, Patience

    try:
        configured = settings.load_settings(os.environ)
        ca = settings.ca_bundle(None, os.environ)
        web = Downloads(configured.mirrors.download, ca, configured.netrc_file, patience=Patience(0))
        sizes = [web.length(url) for url in urls]
    except ImagebuildError:
        return ""
    return "" if None in sizes else f" ({format_size(sum(size or 0 for size in sizes))})"


def build_targets(project: Project, renderer: Renderer, request: BuildRequest) -> list[BuildResult]:
    """Build the targets and show progress.

    Raises ConfigError, CommandError or ResultError; steps that ran until then stay cached.
    """
    request = replace(request, folder=request.folder.resolve())
    parts = [(target, p) for target in request.targets for p in bake.platforms_of(target, request.platforms)]
    needed = (source for target, p in parts for source in renderer.recipe(target).for_platform(p).sources())
    names = [target.id for target in request.targets] if len(request.targets) < MANY else []
    command = " ".join(["imagebuild lock", *names, *(f"--platform {platform}" for platform in request.platforms)])
    check_resolved(project.lock, needed, command, size_of_downloads)
    # The text is for all platforms; of those that are not built, the lock may have nothing.
    renderer = renderer.with_unresolved(request.targets)
    project = renderer.project
    dockerfiles = {target.id: renderer.dockerfile(target) for target in request.targets}
    adaptations = (line for target in request.targets for line in renderer.recipe(target).adaptations())
    for line in dict.fromkeys(adaptations):
        out.print(f"adapted: {line}", markup=False, highlight=False, soft_wrap=True)
    check_request(request, dockerfiles)
    bundle = bundle_of(request, dockerfiles)
    if request.output == "push":
        # A build can take an hour: whether its images can be stored is seen before.
        for target in {target.image: target for target in request.targets}.values():
            buildx.staging_repository(project, target).check_writable()
    stages = {stage for dockerfile in dockerfiles.values() for stage in dockerfile.stages}
    sources = buildx.replaced_sources(project, stages, request.sources)
    endpoint = engine.find_engine(os.environ)
    if not request.builder and endpoint.host.startswith("unix://"):
        for name in sorted({platform for _, platform in parts} - {native_platform()}):
            private.ensure_emulation(name.removeprefix("linux/"))
    commit = revision.current_revision(project.matrix.path, project.roots[0])
    run = BuildRun(
        request,
        project,
        dockerfiles,
        endpoint,
        caches=caches_of(project, request, dockerfiles),
        revision=commit,
        origin=revision.origin_of_build(project.matrix.path, os.environ),
    )
    results: list[BuildResult] = []
    progress = buildx.BuildProgress([target.id for target in request.targets], verbose=request.verbose)
    with progress, build_inputs(renderer, run, bundle, progress) as provided:
        inputs = replace(provided, images={**provided.images, **sources})
        size = request.jobs or len(request.targets)
        for start in range(0, len(request.targets), size):
            batch = replace(request, targets=request.targets[start : start + size])
            part = replace(run, request=batch, inputs=inputs)
            built = buildx.run_bake(part, progress)
            results += buildx.export_images(part, built, progress)
            if request.cache_write:
                from imagebuild.build.change import write_caches

                write_caches(part, built, progress)
    return results


def check_request(request: BuildRequest, dockerfiles: Mapping[str, Dockerfile]) -> None:
    """Raise ConfigError for options that exclude each other, an unknown stage, or a bundle that lacks something."""
    if request.cache_write and not request.cache:
        raise ConfigError("--cache-write: needs --cache REPOSITORY, the repository to write to")
    if request.cache_write and (request.sources or request.stage):
        raise ConfigError(
            "--cache-write: cannot be used with --source or --stage, which build only parts or other code"
        )
    if request.rebuilt and (request.bundle or request.stage):
        raise ConfigError("--rebuild: cannot be used with --bundle or --stage: it installs today's packages")
    if request.bundle and request.builder:
        raise ConfigError("--builder: bundles are made and used with the engine on this machine; leave the option out")
    if request.stage:
        stages = {stage for dockerfile in dockerfiles.values() for stage in dockerfile.stages}
        if request.stage not in stages:
            names = ", ".join(sorted(stages))
            raise ConfigError(f"--stage {request.stage}: no selected target has such a stage; stages: {names}")


def bundle_of(request: BuildRequest, dockerfiles: Mapping[str, Dockerfile]) -> Bundle | Recording | None:
    """Return the bundle that the request names, or the one to be made.

    Raises ConfigError if there is none, if a target cannot be built from it, or if its folder has something in it.
    """
    if not request.bundle:
        return None
    from imagebuild.build.bundle import Bundle, Recording

    wanted = [(t.id, dockerfiles[t.id].stages, bake.platforms_of(t, request.platforms)) for t in request.targets]
    if request.record:
        keys: dict[str, set[Platform]] = {}
        for _, stages, platforms in wanted:
            for key in stages.values():
                keys.setdefault(key, set()).update(platforms)
        return Recording.start(request.bundle, keys)
    bundle = Bundle.read(request.bundle)
    problems = {target: bundle.problem(stages, platforms) for target, stages, platforms in wanted}
    if listed := "\n".join(f"  {name}: {problem}" for name, problem in problems.items() if problem):
        raise ConfigError(f"{bundle.folder}: these targets cannot be built from it:\n{listed}")
    return bundle


def caches_of(
    project: Project, request: BuildRequest, dockerfiles: Mapping[str, Dockerfile]
) -> dict[str, list[CacheEntry]]:
    """Return the caches of compiling stages that each target needs; none without --cache."""
    if not request.cache:
        return {}
    from imagebuild.build.change import ProjectState, cache_entries

    texts = {target.id: dockerfiles[target.id].text for target in request.targets}
    state = ProjectState(project, request.targets, texts, request.platforms, request.base)
    return {t.id: [e for p in state.platforms_of(t) for e in cache_entries(state, t, p)] for t in request.targets}


@contextmanager
def build_inputs(
    renderer: Renderer, run: BuildRun, bundle: Bundle | Recording | None, progress: buildx.BuildProgress
) -> Iterator[BuildInputs]:
    """Provide this machine's secrets, bootstrapped bases, and what comes from mirrors or a bundle.

    The secrets are its CA bundle, and its Python package index if it has one configured. BuildKit fetches everything
    else itself. Raises ConfigError for an engine that cannot use mirrors or bundles.
    """
    request, configured = run.request, settings.load_settings(os.environ)
    needs_trees = bundle or configured.mirrors.downloads
    if needs_trees and not request.builder and not engine.has_containerd_store(run.engine):
        raise ConfigError("mirrors and bundles need an engine with the containerd image store; enable it there")
    with tempfile.TemporaryDirectory(prefix="imagebuild-") as folder:
        own = {}
        if ca := settings.ca_bundle(request.ca, os.environ):
            own["ca"] = ca
        if index := settings.configured_index():
            own["pip.conf"] = Path(folder) / "pip.conf"
            own["pip.conf"].write_text(settings.pip_conf_text(index))
        offline = bundle and not request.record
        given = BuildInputs({} if offline else bootstrapped_bases(run, progress), secrets=own)
        if not bundle and configured.mirrors == settings.Mirrors():
            yield given
            return

        from imagebuild.build import inputs

        needs = {
            target.id: inputs.needed_inputs(
                renderer.recipe(target),
                run.project.lock,
                run.dockerfiles[target.id].stages,
                bake.platforms_of(target, request.platforms),
            )
            for target in request.targets
        }
        trees, secrets = inputs.Trees(cache_folder("sources")), Path(folder)
        wanted = inputs.InputsRequest(needs, given, run.engine, configured, ca, trees, secrets, progress.note)
        with bundle.provide(wanted) if bundle else inputs.inputs_from_mirrors(wanted) as provided:
            yield provided


def bootstrapped_bases(run: BuildRun, progress: buildx.BuildProgress) -> dict[str, str]:
    """Bootstrap all bases that targets start from or are compiled on; return official image → what replaces it."""
    request = run.request
    if request.base == "registry":
        return {}
    from imagebuild.build import base

    contexts, matrix = {}, run.project.matrix.model
    systems = {(target.axes["os"], matrix.images[target.image].build_on) for target in request.targets}
    oldest = (build_on or matrix.bases[name].build_on for name, build_on in systems)
    for name in sorted({*(name for name, _ in systems), *filter(None, oldest)}):
        entry = matrix.bases[name]
        if not entry.release:
            continue
        progress.note(f"base {name}: {entry.release} from the distribution's archive, or from the cache")
        platforms = {p for target in request.targets for p in bake.platforms_of(target, request.platforms)}
        image = base.bootstrap(
            sorted({*platforms, native_platform()}), cache_folder(), release=entry.release, log=progress.note
        )
        classic_store = not request.builder and not engine.has_containerd_store(run.engine)
        contexts[digest_of(run.project.lock, entry.image)] = (
            base.load_into_engine(image, run.engine.environment) if classic_store else image.context
        )
    return contexts


def layer_format_of(project: Project, compression: str, day: date | None = None) -> LayerFormat:
    """Return the format of layers; their latest time is the day of a rebuild, or as environment or lock say.

    Raises ConfigError for another compression, and for a day before the lock's or in the future.
    """
    locked, today = project.lock.date, datetime.now(UTC).date()
    if day and (day > today or (locked and day < locked)):
        raise ConfigError(f"--rebuild {day}: name a day from the lock's date, {locked or 'any'}, to today, {today}")
    epoch = bake.epoch_of({} if day else os.environ, day or project.lock.date)
    return LayerFormat(epoch, *bake.parse_compression(compression))


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
