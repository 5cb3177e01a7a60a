"""Run `imagebuild build`, `bundle`, `engine` and `doctor`."""

from __future__ import annotations

import json
import os
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from imagebuild.cli.options import (
    BESIDE_MATRIX,
    BUILDS,
    DOCKERFILES,
    MATRIX,
    BaseOption,
    CaOption,
    DockerfilesOption,
    FolderOption,
    JsonOption,
    LockOption,
    MatrixOption,
    PlatformsOption,
    RegistryOption,
    SelectArgument,
    SetOption,
    VerboseOption,
    WithOption,
    WithoutOption,
    changes_of,
    command_group,
    example,
    examples,
    open_workspace,
    parse_platforms,
    print_result,
)
from imagebuild.core.console import err, format_size, out, print_table
from imagebuild.core.errors import CommandError, ConfigError, ResultError

if TYPE_CHECKING:
    from imagebuild.build.bundle import Bundle
    from imagebuild.build.private import EngineStatus


@example(
    "imagebuild build quickstart cuda=13.5 --platform local",
    "imagebuild build open --push --registry ghcr.io/acme",
    "imagebuild build open-cuda13.5-debian13-devel --source ucx=/my/ucx --stage ucx -v",
)
def build(
    select: SelectArgument = None,
    platform: PlatformsOption = None,
    load: Annotated[bool, typer.Option("--load", help="Load images into the engine's store; the default.")] = False,
    push: Annotated[
        bool, typer.Option("--push", help="Push images by digest to the staging repositories, without tags.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="Write images as OCI layouts into a folder.")
    ] = None,
    registry: RegistryOption = None,
    compression: Annotated[
        str,
        typer.Option(
            "--compression", metavar="NAME[:LEVEL]", help="Compression of layers that leave the engine: gzip or zstd."
        ),
    ] = "gzip",
    builder: Annotated[
        str | None, typer.Option("--builder", metavar="NAME", help="Builder of docker buildx to build with.")
    ] = None,
    source: Annotated[
        list[str] | None,
        typer.Option("--source", metavar="NAME=DIR", help="Take the source of a component from a folder."),
    ] = None,
    base: BaseOption = "bootstrap",
    ca: CaOption = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Run every step again.")] = False,
    cache: Annotated[
        str | None,
        typer.Option("--cache", metavar="REPOSITORY", help="Take compiled artefacts from this repository's caches."),
    ] = None,
    cache_write: Annotated[
        bool, typer.Option("--cache-write", help="With --cache: write the caches too, as CI does on the main branch.")
    ] = False,
    jobs: Annotated[
        int, typer.Option("--jobs", min=0, metavar="NUMBER", help="Targets to build at a time; 0: all.")
    ] = 0,
    stage: Annotated[
        str | None, typer.Option("--stage", metavar="NAME", help="Build only this stage of the targets.")
    ] = None,
    bundle: Annotated[
        Path | None, typer.Option("--bundle", metavar="DIR", help="Build from this bundle, without a network.")
    ] = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Use no network: build from the bundle of `imagebuild bundle use`.")
    ] = False,
    settings: SetOption = None,
    with_: WithOption = None,
    without: WithoutOption = None,
    folder: FolderOption = BUILDS,
    json_file: JsonOption = None,
    verbose: VerboseOption = False,
    matrix: MatrixOption = MATRIX,
    dockerfiles: DockerfilesOption = DOCKERFILES,
    lock: LockOption = BESIDE_MATRIX,
) -> None:
    """Build targets with BuildKit."""
    from imagebuild.build.build import BuildRequest, build_targets, layer_format_of, print_builds
    from imagebuild.project.plan import select_targets

    if sum((load, push, output is not None)) > 1:
        raise ConfigError("--load, --push and --output exclude each other")
    changes = changes_of(settings, with_, without, registry=registry)
    workspace = open_workspace(matrix, dockerfiles, lock, changes)
    request = BuildRequest(
        targets=select_targets(workspace.plan, select or ()),
        platforms=parse_platforms(platform),
        output="push" if push else str(output.resolve()) if output else "load",
        layer_format=layer_format_of(workspace.project, compression),
        builder=builder,
        sources=tuple(source or ()),
        base=base,
        ca=ca,
        no_cache=no_cache,
        cache=cache,
        cache_write=cache_write,
        jobs=jobs,
        stage=stage,
        folder=folder,
        verbose=verbose,
        changes=changes,
        bundle=_bundle_of(bundle, offline),
    )
    began = time.monotonic()
    results = build_targets(workspace.project, workspace.renderer, request)
    seconds = time.monotonic() - began
    print_result(
        json_file,
        lambda: json.dumps([result.model_dump(mode="json") for result in results], indent=1),
        lambda: print_builds(request, results, seconds),
    )


def _bundle_of(folder: Path | None, offline: bool) -> Bundle | None:
    """Return the bundle that a build takes: the named one, or with --offline the one of the configuration."""
    if folder is None and not offline:
        return None
    from imagebuild.build.bundle import Bundle
    from imagebuild.core.settings import load_settings

    if folder is None:
        configured = load_settings(os.environ).bundle
        if not configured:
            raise ConfigError("--offline: no bundle is set; name one with --bundle DIR, or `imagebuild bundle use DIR`")
        folder = Path(configured).expanduser()
    return Bundle.read(folder)


bundle = command_group("Keep all that builds fetch in one folder, for machines without a network.")
BundleArgument = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the bundle.")]


@bundle.command("create", epilog=examples("imagebuild bundle create /media/usb/bundle open cuda=13.5"))
def create_bundle(
    directory: BundleArgument,
    select: SelectArgument = None,
    platform: PlatformsOption = None,
    base: BaseOption = "bootstrap",
    ca: CaOption = None,
    settings: SetOption = None,
    with_: WithOption = None,
    without: WithoutOption = None,
    verbose: VerboseOption = False,
    matrix: MatrixOption = MATRIX,
    dockerfiles: DockerfilesOption = DOCKERFILES,
    lock: LockOption = BESIDE_MATRIX,
) -> None:
    """Build targets from the beginning, and keep everything that this fetches."""
    from imagebuild.build.bake import platforms_of
    from imagebuild.build.build import BuildRequest, build_targets
    from imagebuild.build.bundle import Bundle, Recording
    from imagebuild.core.fields import Platform
    from imagebuild.project.plan import select_targets

    changes = changes_of(settings, with_, without)
    workspace = open_workspace(matrix, dockerfiles, lock, changes)
    targets = select_targets(workspace.plan, select or ())
    platforms = parse_platforms(platform)
    keys: dict[str, set[Platform]] = {}
    for target in targets:
        for key in workspace.renderer.dockerfile(target).stages.values():
            keys.setdefault(key, set()).update(platforms_of(target, platforms))
    record = Recording.start(directory, keys)
    with tempfile.TemporaryDirectory(prefix="imagebuild-") as folder:
        request = BuildRequest(
            targets=targets,
            platforms=platforms,
            output="cacheonly",
            base=base,
            ca=ca,
            no_cache=True,  # a step that is cached fetches nothing
            folder=Path(folder),
            verbose=verbose,
            changes=changes,
            record=record,
        )
        build_targets(workspace.project, workspace.renderer, request)
    files = Bundle.read(directory).manifest.files.values()
    size = format_size(sum(file.size for file in files))
    out.print(f"{directory}: {len(files)} downloads of {size}, for {len(targets)} targets", markup=False)


@bundle.command("verify", epilog=examples("imagebuild bundle verify /media/usb/bundle"))
def verify_bundle(
    directory: BundleArgument,
    settings: SetOption = None,
    with_: WithOption = None,
    without: WithoutOption = None,
    json_file: JsonOption = None,
    matrix: MatrixOption = MATRIX,
    dockerfiles: DockerfilesOption = DOCKERFILES,
    lock: LockOption = BESIDE_MATRIX,
) -> None:
    """Compare a bundle with its manifest and the lock, and list the targets that can be built from it."""
    from imagebuild.build.bundle import Bundle
    from imagebuild.build.inputs import needed_inputs

    bundle = Bundle.read(directory)
    if damage := bundle.find_damage(lambda text: err.print(text, markup=False)):
        raise ResultError("\n".join(damage))
    workspace = open_workspace(matrix, dockerfiles, lock, changes_of(settings, with_, without))
    served, wrong = {}, []
    for target in workspace.plan.targets:
        stages = workspace.renderer.dockerfile(target).stages
        platforms = tuple(p for p in target.platforms if not bundle.problem(stages, [p]))
        if not platforms:
            continue
        needed = needed_inputs(workspace.renderer.recipe(target), workspace.project.lock, stages, platforms)
        wrong += [f"{target.id}: the bundle has {text}" for text in bundle.missing_inputs(needed)]
        served[target.id] = platforms
    if wrong:
        raise ResultError("\n".join(wrong))
    if not served:
        raise ConfigError(
            f"{directory}: the bundle is whole, but of other versions than this project; it serves no target"
        )

    def show() -> None:
        rows = [(name, ", ".join(p.removeprefix("linux/") for p in platforms)) for name, platforms in served.items()]
        print_table(("serves", "platforms"), rows)
        out.print(f"{directory}: whole; made {bundle.manifest.created}", markup=False)

    print_result(json_file, lambda: json.dumps({"created": bundle.manifest.created, "serves": served}, indent=1), show)


@bundle.command("use", epilog=examples("imagebuild bundle use /media/usb/bundle && imagebuild build --offline"))
def use_bundle(directory: BundleArgument) -> None:
    """Let `imagebuild build --offline` take this bundle."""
    from imagebuild.build.bundle import Bundle
    from imagebuild.core.settings import remember_bundle

    bundle = Bundle.read(directory)
    file = remember_bundle(os.environ, bundle.folder)
    out.print(f"{file}: bundle: {bundle.folder}", markup=False)


engine = command_group("Start, show and stop a private Docker Engine, for machines that have none.")


@engine.command("up", epilog=examples("sudo imagebuild engine up"))
def start(json_file: JsonOption = None) -> None:
    """Start the private engine; install it first where no usable engine is."""
    from imagebuild.build.private import start_engine
    from imagebuild.oci.engine import find_engine

    try:
        found = find_engine(os.environ)
        if found.origin != "private":
            out.print(f"An engine answers at {found.host} ({found.origin}); nothing to do.")
            return
    except CommandError as error:
        reason = str(error).partition(";")[0]
        err.print(f"Starting a private engine: {reason}", markup=False)
    _show_engine(start_engine(), json_file)


@engine.command("status", epilog=examples("imagebuild engine status --json -"))
def status(json_file: JsonOption = None) -> None:
    """Show whether the private engine runs, and where it keeps its things."""
    from imagebuild.build.private import engine_status

    _show_engine(engine_status(), json_file)


@engine.command("down", epilog=examples("sudo imagebuild engine down --purge"))
def stop(
    purge: Annotated[bool, typer.Option("--purge", help="Delete the engine's images and build cache, too.")] = False,
) -> None:
    """Stop the private engine."""
    from imagebuild.build.private import stop_engine

    stop_engine(purge=purge)
    out.print("The private engine is down" + (" and its data is deleted." if purge else "."))


def _show_engine(status: EngineStatus, json_file: str | None) -> None:
    values = {name: value for name, value in asdict(status).items() if value is not None}
    rows = [(name.replace("_", " "), str(value)) for name, value in values.items()]
    print_result(json_file, lambda: json.dumps(values, indent=1), lambda: print_table(("private engine", ""), rows))


@example("imagebuild doctor", "imagebuild doctor --json -")
def doctor(json_file: JsonOption = None) -> None:
    """Say what this machine has for building and checking, and how to get what it lacks.

    Exit status 1 if something is missing that building or checking needs.
    """
    from rich.markup import escape

    from imagebuild.build.doctor import examine_machine

    findings = examine_machine()
    marks = {True: "[green]ok[/]", False: "[red]missing[/]", None: "[yellow]optional[/]"}
    rows = [(marks[f.ok], *map(escape, (f.name, f.detail, f.fix))) for f in findings]
    print_result(
        json_file,
        lambda: json.dumps([asdict(finding) for finding in findings], indent=1),
        lambda: print_table(("", "what", "found", "fix"), rows),
    )
    if any(finding.ok is False for finding in findings):
        raise typer.Exit(1)
