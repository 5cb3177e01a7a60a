"""Build targets: render Dockerfiles, find an engine, collect the inputs, run BuildKit, and write the results."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import UTC, date, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from imagebuild.build import bake, buildx, private
from imagebuild.build.bake import BuildInputs, BuildRequest, BuildRun, CacheEntry
from imagebuild.build.folder import BuildLog, held_folders
from imagebuild.build.nodes import (
    BuilderNode,
    check_clocks,
    check_nodes,
    current_nodes,
    nodes_of,
    unreached,
    with_clocks,
)
from imagebuild.core import console, settings
from imagebuild.core.advisory import known_bad, shortened
from imagebuild.core.console import err, out
from imagebuild.core.errors import ConfigError
from imagebuild.core.files import cache_folder, refuse_links
from imagebuild.core.run import native_platform
from imagebuild.oci import engine
from imagebuild.project import revision
from imagebuild.project.lockfile import check_pinned, digest_of
from imagebuild.project.project import Project
from imagebuild.render.image import adaptations
from imagebuild.render.renderer import Renderer
from imagebuild.render.stages import Dockerfile, needed_stages, stages_of

if TYPE_CHECKING:
    from imagebuild.build.inputs import Provide
    from imagebuild.core.fields import Platform
    from imagebuild.project.plan import Target
    from imagebuild.project.records import BuildResult
    from imagebuild.render.stages import Stage


def build_targets(project: Project, renderer: Renderer, request: BuildRequest) -> list[BuildResult]:
    """Build the targets, show the progress, and return the results.

    If a step fails, the steps before it stay in the builder's cache, and the whole output is in `request.log`. Raises
    ConfigError if the request cannot be fulfilled, CommandError if a program, engine or registry fails, ResultError if
    BuildKit's output cannot be read."""
    if not request.folder.is_absolute():
        refuse_links([request.folder])
    request = replace(request, folder=request.folder.resolve())
    bake.check_platforms(request.targets, request.platforms)
    recipes = [renderer.recipe(target) for target in request.targets]
    needed = (owned.source for recipe in recipes for owned in recipe.sources_for(request.platforms))
    # If the lock lacks sources, the error message proposes a command. Name only a few targets in this command.
    names = [target.id for target in request.targets] if len(request.targets) < 4 else []
    platforms = (word for platform in request.platforms for word in ("--platform", platform))
    check_pinned(project.lock, needed, project.changes.lock_command(*names, *platforms))
    # Render Dockerfiles for all platforms of a target, even if the lock lacks entries for platforms that are not built.
    dockerfiles = {target.id: renderer.dockerfile(target) for target in request.targets}
    lines = [f"adapted: {line}" for line in dict.fromkeys(line for recipe in recipes for line in adaptations(recipe))]
    for line in lines:
        out.print(line)
    stages = {stage for dockerfile in dockerfiles.values() for stage in dockerfile.stages}
    check_request(request, stages, project.lock.date)
    progress = buildx.BuildProgress(bars_of(request, dockerfiles), verbose=request.verbose)
    with (
        progress, held_folders({request.folder, request.exported or request.folder}, progress.note),
        BuildLog(request.log) as progress.log,
    ):  # fmt: skip
        for line in lines:
            progress.log.write(line)
        provide = provider_of(request, dockerfiles)
        if request.output == "push":
            # Check before the build, which can take an hour, that the images can be stored.
            for target in {target.image: target for target in request.targets}.values():
                buildx.staging_repository(project, target).check_writable()
        if request.cache_write:
            buildx.repository_at(request.cache or "").check_writable()
        sources = buildx.replaced_sources(project, stages, request.sources)
        endpoint = engine.find_engine(os.environ)
        nodes = examine_builders(request, endpoint, progress)
        if not request.builder and endpoint.host.startswith("unix://"):
            for name in sorted({*request.built} - {native_platform()}):
                private.ensure_emulation(name.removeprefix("linux/"))
        caches: Mapping[str, Sequence[CacheEntry]] = {}
        builds: list[tuple[Target, Platform, dict[str, Stage]]] = []
        if request.cache:
            from imagebuild.build.impact import ProjectState

            builds = [*ProjectState(renderer, request.targets, request.platforms, request.base).builds()]
            caches = bake.cache_entries(builds, project.components)
            buildx.name_lost_caches(request.cache, caches, progress)
        about = {
            "started": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
            "revision": revision.current_revision(project.root),
            **revision.origin_of_build(project.root, os.environ),
        }
        run = BuildRun(request, project, dockerfiles, endpoint, caches=caches, builders=nodes, about=about)
        check_clocks(nodes, run.epoch)
        refuse_links(run.written)
        with build_inputs(run, provide, progress) as provided:
            run = replace(run, inputs=replace(provided, images={**provided.images, **sources}))
            if len(request.builders) > 1:
                from imagebuild.build.builders import build_on_all

                return build_on_all(run, builds, progress)
            began = time.monotonic()
            built = buildx.run_bake(run, progress)
            results = buildx.export_images(run, *built, time.monotonic() - began, progress)
        if request.cache_write:
            buildx.write_caches(run, results, progress)
        return results


def examine_builders(
    request: BuildRequest, endpoint: engine.Endpoint, progress: buildx.BuildProgress
) -> dict[str, list[BuilderNode]]:
    """Return the nodes of each builder. Print the known faults of BuildKit, and the mirrors that a node does not reach.
    Raises ConfigError if a node cannot build, or if the images of several nodes would be loaded."""
    nodes = {name: nodes_of(name, endpoint) for name in request.builders}
    name_known_faults([node for own in nodes.values() for node in own] or current_nodes(endpoint))
    mirrors = settings.load_settings(os.environ).mirrors
    addresses = {*mirrors.downloads.values(), *([mirrors.python_index] if mirrors.python_index else [])}
    for name in request.builders:
        check_nodes(name, nodes[name], request.built)
        nodes[name] = with_clocks(name, nodes[name], request.built, endpoint)
        for problem in unreached(name, nodes[name], addresses, endpoint):
            progress.note(problem)
        number = sum(bool(node.builds) for node in nodes[name])
        if number > 1 and request.output == "load" and not request.stage:
            problem = f"--builder {name}: {number} nodes build an image of several platforms, which cannot be loaded"
            raise ConfigError(f"{problem}; use --output DIR or --push, or build one with --platform local")
    return nodes


def name_known_faults(nodes: Iterable[BuilderNode]) -> None:
    """Print the advisories about the versions of BuildKit."""
    for version in sorted({node.buildkit for node in nodes if not node.buildkit.startswith("v0.0.0")}):
        if faults := shortened(known_bad({"buildkit": version})):
            err.print(f"known faults of BuildKit {version}: {faults}; `imagebuild doctor` names the fixed version")


def bars_of(request: BuildRequest, dockerfiles: Mapping[str, Dockerfile]) -> Mapping[str, buildx.TargetBar]:
    """Return the progress bar of each target, by the name of its bake target."""
    bars = {}
    for target in request.targets:
        dockerfile = dockerfiles[target.id]
        total = 0
        for platform in bake.platforms_of(target, request.platforms):
            stages = stages_of(dockerfile.text, platform)
            wanted = {request.stage, *stages[request.stage].needs} if request.stage in stages else needed_stages(stages)
            total += sum(len(stages[name].steps) for name in wanted if name)
        bars[target.bake_name] = buildx.TargetBar(target.id, dockerfile.stages, total)
    return bars


def check_request(request: BuildRequest, stages: Collection[str], locked: date | None) -> None:
    """Raise ConfigError if the stage is unknown, or if the rebuild's day is before the lock's date or in the future."""
    day, today = request.rebuilt, datetime.now(UTC).date()
    if day and not (locked or day) <= day <= today:
        possible = f"from the lock's date, {locked}, to today, {today}" if locked else f"until today, {today}"
        raise ConfigError(f"--rebuild {day}: choose a day {possible}")
    for name in request.builders:
        if not re.fullmatch(r"\w[\w.+-]*", name):
            address = name if ":" in name else "ADDRESS"
            remedy = f"make one with `docker buildx create --name NAME --driver remote {address}`"
            problem = "is not the name of a builder; `docker buildx ls` lists them"
            raise ConfigError(f"--builder {name!r}: {problem}, or {remedy}")
    if len(request.builders) > len({*request.builders}):
        raise ConfigError(f"--builder {request.builders[-1]}: name each builder once")
    if len(request.builders) > 1 and (request.stage or not request.cache_write):
        problem = "several builders build whole targets, and exchange stages through a registry"
        remedy = "remove --stage" if request.stage else "add --cache REPOSITORY --cache-write"
        raise ConfigError(f"--builder {' --builder '.join(request.builders)}: {problem}; {remedy}")
    if request.stage and request.stage not in stages:
        names = ", ".join(sorted(stages))
        raise ConfigError(f"--stage {request.stage}: no selected target has this stage; choose from {names}")


def provider_of(request: BuildRequest, dockerfiles: Mapping[str, Dockerfile]) -> Provide | None:
    """Return the function that provides inputs of a build from mirrors or from a bundle.

    Return None if the build uses neither mirrors nor a bundle: BuildKit then fetches all inputs. Raises ConfigError if
    a target cannot be built from the bundle."""
    if not request.bundle:
        if settings.load_settings(os.environ).mirrors == settings.Mirrors():
            return None
        from imagebuild.build.inputs import from_mirrors

        return from_mirrors
    from imagebuild.build.bundle import Bundle, new_bundle_folder, record_bundle

    if request.record:
        return partial(record_bundle, new_bundle_folder(request.bundle))
    bundle = Bundle.read(request.bundle)
    for target in request.targets:
        if problem := bundle.problem(dockerfiles[target.id].stages, bake.platforms_of(target, request.platforms)):
            raise ConfigError(f"{bundle.folder}: {target.id} cannot be built from this bundle: {problem}")
    return bundle.provide


@contextmanager
def build_inputs(run: BuildRun, provide: Provide | None, progress: buildx.BuildProgress) -> Iterator[BuildInputs]:
    """Yield the inputs of a build: secrets, bootstrapped base images, and downloads from mirrors or a bundle.

    The secrets are the CA bundle of this machine, and the configuration of the machine's Python package index, if any.
    BuildKit fetches all other inputs. Raises ConfigError if the engine cannot use bundles."""
    request = run.request
    if request.bundle and not engine.has_containerd_store(run.engine):
        raise ConfigError("bundles need an engine with the containerd image store; enable this store in the engine")
    offline = request.bundle and not request.record
    run = replace(run, inputs=BuildInputs({} if offline else bootstrapped_bases(run, progress)))
    with (
        provide(run, progress.note) if provide else nullcontext(({}, {}, {})) as (images, stages, more),
        tempfile.TemporaryDirectory(prefix="imagebuild-") as folder,
    ):
        index, ca = settings.configured_index(), settings.ca_bundle(request.ca, os.environ)
        secrets = {"ca": ca} if ca else {}
        for name, text in {**({"pip.conf": settings.pip_conf_text(index)} if index else {}), **more}.items():
            secrets[name] = Path(folder, name)
            secrets[name].write_text(text)
        yield BuildInputs({**run.inputs.images, **images}, stages, secrets)


def bootstrapped_bases(run: BuildRun, progress: buildx.BuildProgress) -> dict[str, str]:
    """Bootstrap all base images that targets start from or are compiled on.
    Return a mapping of each official image to the address of the bootstrapped image that replaces it."""
    request, matrix = run.request, run.project.matrix.model
    if request.base == "registry":
        return {}
    if not request.builder and not engine.has_containerd_store(run.engine):
        progress.note(
            "the engine's classic image store cannot use bootstrapped base images; pulling them as with --base registry"
        )
        return {}
    from imagebuild.build import base

    names: set[str] = set()
    for target in request.targets:
        name = target.axes["os"]
        names |= {name, matrix.images[target.image].build_on or matrix.bases[name].build_on or name}
    contexts = {}
    for name in sorted(names):
        entry = matrix.bases[name]
        if entry.release:
            progress.note(f"base {name}: {entry.release}, from the cache or from the distribution's archive")
            contexts[digest_of(run.project.lock, entry.image)] = base.bootstrap(
                sorted({*request.built, native_platform()}), cache_folder(), release=entry.release, log=progress.note
            )
    return contexts


def print_builds(request: BuildRequest, results: Sequence[BuildResult], seconds: float) -> None:
    """Print the built images, their components, and the duration of the build."""
    rows, pushed = [], [result for result in results if result.repository]
    # The size of the compressed layers is not known for images that BuildKit loads into the engine's store.
    compressed = ["compressed"] if any(result.size_bytes is not None for result in results) else []
    for result, target in zip(results, request.targets, strict=True):
        cached = sum(step.cached for step in result.steps)
        steps = f"{len(result.steps) - cached} run, {cached} cached"
        contains = ", ".join(f"{name} {version}" for name, version in target.components.items())
        name = target.id if result.repository else result.tags[0]
        size = [console.format_size(result.size_bytes) for _ in compressed]
        rows.append((name, *size, steps, (result.digest or "")[:19], contains))
    if not request.stage:
        console.print_table(("target" if pushed else "image", *compressed, "steps", "digest", "contains"), rows)
    for result in pushed:
        out.print(f"pushed {result.repository}@{result.digest}")
    out.print(f"built in {console.format_duration(seconds)}")
