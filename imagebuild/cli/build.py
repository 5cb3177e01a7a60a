"""Run `imagebuild build`, `bundle`, `engine` and `doctor`."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import typer

from imagebuild.cli import options
from imagebuild.cli.options import DAY, argument, option
from imagebuild.core.console import err, format_size, out
from imagebuild.core.errors import CommandError, ConfigError, ResultError

EXCLUSIVE = (
    ("--load", "--push", "--output"),
    # A bundle is of the engine on this machine, and has the packages of its day.
    *(pair for other in ("--bundle", "--offline") for pair in (("--builder", other), ("--rebuild", other))),
    ("--rebuild", "--stage"),
    # Caches are of whole targets, and of the code that the lock names.
    ("--cache-write", "--source"),
    ("--cache-write", "--stage"),
)
"""Options of `build` of which only one can be given."""


@options.example(
    "imagebuild build quickstart cuda=13.5 --platform local",
    "imagebuild build open --push --registry ghcr.io/acme",
    "imagebuild build open-cuda13.5-debian13-devel --source ucx=/my/ucx --stage ucx -v",
)
def build(
    project: options.ProjectFiles,
    edits: options.ImageChanges,
    select: options.SelectArgument = None,
    platform: options.PlatformsOption = None,
    load: bool = option("--load", "Load images into the engine's store; the default.", False),
    push: bool = option("--push", "Push images by digest to the staging repositories, without tags.", False),
    output: Path | None = option("-o, --output DIR", "Write images as OCI layouts into a folder.", None),
    registry: options.RegistryOption = None,
    compression: Literal["gzip", "zstd"] = option("--compression gzip|zstd", "Compression of exported layers.", "gzip"),
    builder: str | None = option("--builder NAME", "Builder of docker buildx to build with.", None),
    source: list[str] | None = option("--source NAME=DIR", "Take the source of a component from a folder.", None),
    base: options.BaseOption = "bootstrap",
    ca: options.CaOption = None,
    no_cache: bool = option("--no-cache", "Run every step again.", False),
    rebuild: datetime | None = option(
        "--rebuild YYYY-MM-DD", "Install the distribution's packages again; tags name this day.", None, formats=DAY
    ),
    cache: str | None = option("--cache REPOSITORY", "Take compiled artefacts from this repository's caches.", None),
    cache_write: bool = option("--cache-write", "With --cache: write the caches too, as CI does.", False),
    stage: str | None = option("--stage NAME", "Build only this stage of the targets.", None),
    bundle: Path | None = option("--bundle DIR", "Build from this bundle, without a network.", None),
    offline: bool = option("--offline", "Use no network: build from the bundle of `imagebuild bundle use`.", False),
    folder: options.FolderOption = options.BUILDS,
    json_file: options.JsonOption = None,
    verbose: options.VerboseOption = False,
) -> None:
    """Build targets with BuildKit."""
    from imagebuild.build.bake import BuildRequest
    from imagebuild.build.build import build_targets, print_builds
    from imagebuild.project.changes import check_repository
    from imagebuild.project.select import select_targets

    check_repository("--cache", cache)
    given = {
        "--load": load, "--push": push, "--output": output is not None, "--builder": builder, "--source": source,
        "--rebuild": rebuild, "--cache": cache, "--cache-write": cache_write, "--stage": stage,
        "--bundle": bundle, "--offline": offline,
    }  # fmt: skip
    options.check_combination(given, {"--cache-write": ("--cache",)}, EXCLUSIVE)
    changes = edits.parse(registry)
    workspace = project.open(changes)
    targets = select_targets(workspace.plan, select or ())
    edits.check_base(targets, pinned=True)
    if offline and not bundle:
        from imagebuild.core.settings import offline_bundle

        if not (link := offline_bundle(os.environ)).exists():
            raise ConfigError("--offline: no bundle is set; name one with --bundle DIR, or `imagebuild bundle use DIR`")
        bundle = link.resolve()
    request = BuildRequest(
        targets=targets,
        platforms=options.parse_platforms(platform),
        output="push" if push else str(output.resolve()) if output else "load",
        compression=compression,
        builder=builder,
        sources=tuple(source or ()),
        base=base,
        ca=ca,
        no_cache=no_cache,
        rebuilt=rebuild.date() if rebuild else None,
        cache=cache,
        cache_write=cache_write,
        stage=stage,
        folder=folder,
        verbose=verbose,
        again=(*project.words, *_repeated("--platform", platform), *_repeated("--source", source), *changes.options),
        bundle=bundle,
    )
    began = time.monotonic()
    results = build_targets(workspace.project, workspace.renderer, request)
    seconds = time.monotonic() - began
    options.print_result(json_file, results, lambda: print_builds(request, results, seconds))


def _repeated(name: str, values: Sequence[str] | None) -> Iterator[str]:
    """Yield an option that can be given several times, as words of a command line."""
    return (word for value in values or () for word in (name, value))


bundle = options.command_group("Keep all that builds fetch in one folder, for machines without a network.")
BundleArgument = Annotated[Path, argument("DIR", "Folder of the bundle.")]


@options.subcommand(bundle, "create", "imagebuild bundle create /media/usb/bundle open cuda=13.5")
def create_bundle(
    project: options.ProjectFiles,
    edits: options.PlanChanges,
    directory: BundleArgument,
    select: options.SelectArgument = None,
    platform: options.PlatformsOption = None,
    base: options.BaseOption = "bootstrap",
    ca: options.CaOption = None,
    verbose: options.VerboseOption = False,
) -> None:
    """Build targets without a cache, and keep everything that this downloads."""
    from imagebuild.build.bake import BuildRequest
    from imagebuild.build.build import build_targets
    from imagebuild.project.select import select_targets

    changes = edits.parse()
    workspace = project.open(changes)
    targets = select_targets(workspace.plan, select or ())
    with tempfile.TemporaryDirectory(prefix="imagebuild-") as folder:
        request = BuildRequest(
            targets=targets,
            platforms=options.parse_platforms(platform),
            output="cacheonly",
            base=base,
            ca=ca,
            no_cache=True,  # a step that is cached fetches nothing
            folder=Path(folder),
            verbose=verbose,
            again=(*project.words, *_repeated("--platform", platform), *changes.options),
            bundle=directory,
            record=True,
        )
        build_targets(workspace.project, workspace.renderer, request)
    size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    out.print(f"{directory}: {format_size(size)}, for {len(targets)} targets", markup=False)


@options.subcommand(bundle, "verify", "imagebuild bundle verify /media/usb/bundle")
def verify_bundle(directory: BundleArgument, json_file: options.JsonOption = None) -> None:
    """Compare a bundle with its hashes, and list the targets that it was made for."""
    from imagebuild.build.bundle import Bundle

    bundle = Bundle.read(directory)
    if damage := bundle.find_damage():
        raise ResultError("\n".join(damage))
    made = bundle.manifest
    text = "\n".join([*made.targets, f"{directory}: undamaged; made {made.created} for these targets"])
    content = {"created": made.created, "targets": made.targets}
    options.print_result(json_file, content, lambda: out.print(text, markup=False))


@options.subcommand(bundle, "use", "imagebuild bundle use /media/usb/bundle && imagebuild build --offline")
def use_bundle(directory: BundleArgument) -> None:
    """Let `imagebuild build --offline` take this bundle."""
    from imagebuild.build.bundle import Bundle
    from imagebuild.core.run import os_errors_as_command_errors
    from imagebuild.core.settings import offline_bundle

    folder, link = Bundle.read(directory).folder, offline_bundle(os.environ)
    with os_errors_as_command_errors():
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(folder)
    out.print(f"{link}: leads to {folder} now", markup=False)


engine = options.command_group("Start and stop a private Docker Engine, for machines that have none.")


@options.subcommand(engine, "up", "sudo imagebuild engine up")
def start() -> None:
    """Start the private engine; install it first if this machine has no usable engine."""
    from imagebuild.build.private import start_engine
    from imagebuild.oci.engine import find_engine

    try:
        existing = find_engine(os.environ)
        out.print(f"An engine answers at {existing.host} ({existing.origin}); nothing to do.", markup=False)
    except CommandError as error:
        err.print(f"Starting a private engine: {str(error).partition(';')[0]}", markup=False)
        paths = start_engine()
        out.print(f"The private engine answers at {paths.host}; its data are in {paths.data}.", markup=False)


@options.subcommand(engine, "down", "sudo imagebuild engine down --purge")
def stop(
    purge: bool = option("--purge", "Delete the engine's images and build cache, too.", False),
) -> None:
    """Stop the private engine."""
    from imagebuild.build.private import stop_engine

    stop_engine(purge=purge)
    out.print("The private engine is down" + (" and its data is deleted." if purge else "."))


@options.example(
    "imagebuild doctor",
    "imagebuild doctor --json -",
    "imagebuild doctor --upstream hpcx-cuda13.2.1-ubuntu24.04-devel --json report.json   # for a bug report",
)
def doctor(
    project: options.ProjectFiles,
    edits: options.PlanChanges,
    select: options.SelectArgument = None,
    upstream: bool = option("--upstream", "Ask servers instead whether they have every source of the targets.", False),
    platform: options.PlatformsOption = None,
    json_file: options.JsonOption = None,
    ca: options.CaOption = None,
) -> None:
    """Say what this machine has for building and checking, and how to get what it lacks.

    Exit status 1 if something is missing that building or checking needs; with --upstream also 4 if a server does not
    answer.
    """
    from rich.markup import escape

    from imagebuild.build.doctor import examine_machine

    if upstream:
        from imagebuild.lock.resolve import LockFile, check_lock, network_upstream, show_report
        from imagebuild.project.select import select_targets

        workspace = project.open(edits.parse())
        targets = select_targets(workspace.plan, select or ())
        platforms = options.parse_platforms(platform)
        file = LockFile(workspace.project, workspace.renderer, targets, platforms=platforms)
        report = check_lock(file, network_upstream(ca))
        options.print_result(json_file, report, lambda: show_report(report, every=True))
        raise typer.Exit(report.exit_status)
    if select or edits or platform:
        raise ConfigError("targets, platforms and changes of the plan: need --upstream; add it, or leave these out")
    findings = examine_machine()
    marks = {True: "[green]ok[/]      ", False: "[red]missing[/] ", None: "[yellow]optional[/]"}

    def show() -> None:
        # Not a table: what people copy from here is long, and would be cut.
        for finding in findings:
            out.print(f"{marks[finding.ok]}  {finding.name}: {escape(finding.detail)}")
            if finding.fix:
                out.print(f"{'':8}  → {escape(finding.fix)}")

    options.print_result(json_file, findings, show)
    if any(finding.ok is False for finding in findings):
        raise typer.Exit(1)
