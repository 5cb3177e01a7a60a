"""The commands `imagebuild build`, `bundle`, `engine` and `doctor`."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from imagebuild.cli import options
from imagebuild.core.console import err, format_size, out
from imagebuild.core.errors import CommandError, ConfigError, ResultError

if TYPE_CHECKING:
    from imagebuild.oci.image import PlatformImage


@options.command()
def build(
    project: options.ProjectFiles, edits: options.ImageChanges, select: tuple[str, ...], platforms: tuple[str, ...],
    load: bool, push: bool, output: Path | None, registry: str | None, compression: Literal["gzip", "zstd", "estargz"],
    builders: tuple[str, ...], sources: tuple[str, ...], base: Literal["bootstrap", "registry"], ca: Path | None,
    no_cache: bool, rebuild: datetime | None, cache: str | None, cache_write: bool, stage: str | None,
    bundle: Path | None, offline: bool, folder: Path, json_file: str | None, verbose: bool, lock: bool,
) -> None:  # fmt: skip
    from imagebuild.build.bake import BuildRequest
    from imagebuild.build.build import build_targets, print_builds
    from imagebuild.project.project import check_repository
    from imagebuild.project.select import select_targets

    check_repository("--cache", cache)
    if output:
        check_output(str(output))
    changes = edits.parse(registry)
    workspace = project.open(changes, select=select if edits else None)
    targets = select_targets(workspace.plan, select)
    edits.check_base(targets, pinned=True)
    if offline and not bundle:
        from imagebuild.core.settings import offline_bundle

        if not (link := offline_bundle(os.environ)).exists():
            raise ConfigError("--offline: no bundle is set; name one with --bundle DIR, or `imagebuild bundle use DIR`")
        bundle = link.resolve()
    chosen = options.parse_platforms(platforms)
    workspace = workspace.locked(targets, wanted=lock, platforms=chosen, ca=ca, folder=folder)

    def describe(image: PlatformImage) -> bytes:
        from imagebuild.publish.sbom import known_sbom

        return known_sbom(image, {name: file.model for name, file in workspace.project.components.items()})

    request = BuildRequest(
        targets=targets, platforms=chosen, describe=describe,
        output="push" if push else str(output.resolve()) if output else "load", compression=compression,
        builders=builders, sources=sources, base=base, ca=ca, no_cache=no_cache,
        rebuilt=rebuild.date() if rebuild else None, cache=cache, cache_write=cache_write, stage=stage, folder=folder,
        verbose=verbose,
        again=(*project.words, *_repeated("--platform", platforms), *_repeated("--source", sources), *changes.options),
        bundle=bundle,
    )  # fmt: skip
    began = time.monotonic()
    results = build_targets(workspace.project, workspace.renderer, request)
    seconds = time.monotonic() - began
    options.print_result(json_file, results, lambda: print_builds(request, results, seconds))


def check_output(name: str) -> None:
    """Raise ConfigError if the value of --output is not the name of a folder, but an output of docker or a file."""
    if "=" in name:
        raise ConfigError(f"--output {name}: is the name of a folder for OCI layouts; to push images, use --push")
    if name.endswith((".sif", ".sqsh", ".tar", ".tar.gz", ".tgz")):
        remedy = "use -o images; then `apptainer build image.sif oci:images/TARGET` makes a file for Apptainer"
        raise ConfigError(f"--output {name}: is the name of a folder for OCI layouts, not of a file; {remedy}")


def _repeated(name: str, values: Sequence[str]) -> Iterator[str]:
    return (word for value in values for word in (name, value))


@click.group(cls=options.Group)
def bundle() -> None:
    """Collect all downloads of a build in a folder, to build without a network."""


@options.command(bundle, "create")
def create_bundle(
    project: options.ProjectFiles, edits: options.PlanChanges, directory: Path, select: tuple[str, ...],
    platforms: tuple[str, ...], base: Literal["bootstrap", "registry"], ca: Path | None, verbose: bool,
) -> None:  # fmt: skip
    from imagebuild.build.bake import BuildRequest
    from imagebuild.build.build import build_targets
    from imagebuild.project.select import select_targets

    changes = edits.parse()
    workspace = project.open(changes, select=select if edits else None)
    targets = select_targets(workspace.plan, select)
    with tempfile.TemporaryDirectory(prefix="imagebuild-") as folder:
        request = BuildRequest(
            targets=targets, platforms=options.parse_platforms(platforms), output="cacheonly", base=base, ca=ca,
            no_cache=True, folder=Path(folder), verbose=verbose,
            again=(*project.words, *_repeated("--platform", platforms), *changes.options), bundle=directory,
            record=True,
        )  # fmt: skip
        build_targets(workspace.project, workspace.renderer, request)
    size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    out.print(f"{directory}: {format_size(size)}, for {len(targets)} targets")


@options.command(bundle, "verify")
def verify_bundle(directory: Path, json_file: str | None) -> None:
    from imagebuild.build.bundle import Bundle

    bundle = Bundle.read(directory)
    if damage := bundle.find_damage():
        raise ResultError("\n".join(damage))
    made = bundle.manifest
    text = "\n".join([*made.targets, f"{directory}: undamaged; made {made.created} for the targets above"])
    content = {"created": made.created, "targets": made.targets}
    options.print_result(json_file, content, lambda: out.print(text))


@options.command(bundle, "use")
def use_bundle(directory: Path) -> None:
    from imagebuild.build.bundle import Bundle
    from imagebuild.core.run import os_errors_as_command_errors
    from imagebuild.core.settings import offline_bundle

    folder, link = Bundle.read(directory).folder, offline_bundle(os.environ)
    with os_errors_as_command_errors():
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(folder)
    out.print(f"{link}: now links to {folder}")


@click.group(cls=options.Group)
def engine() -> None:
    """Start and stop a private Docker Engine, for machines that have none."""


@options.command(engine, "up")
def start() -> None:
    from imagebuild.build.private import start_engine
    from imagebuild.oci.engine import find_engine

    try:
        existing = find_engine(os.environ)
        out.print(f"An engine answers at {existing.host} ({existing.origin}); nothing to do.")
    except CommandError as error:
        err.print(f"Starting a private engine: {str(error).partition(';')[0]}")
        paths = start_engine()
        out.print(f"The private engine answers at {paths.host}; its data is in {paths.data}.")
        out.print(f"imagebuild finds it without a setting. For other programs: export DOCKER_HOST={paths.host}")


@options.command(engine, "down")
def stop(purge: bool) -> None:
    from imagebuild.build.private import stop_engine

    stop_engine(purge=purge)
    out.print("The private engine is down" + (" and its data is deleted." if purge else "."))


@options.command()
def doctor(json_file: str | None) -> None:
    from imagebuild.build.doctor import examine_machine
    from imagebuild.core.console import styled

    findings = examine_machine()
    marks = {True: ("ok      ", "green"), False: ("missing ", "red"), None: ("optional", "yellow")}

    def show() -> None:
        # Not a table, because a table would cut long commands that people copy from here.
        for finding in findings:
            out.print(styled(marks[finding.ok], f"  {finding.name}: {finding.detail}"))
            if finding.fix:
                out.print(f"{'':8}  → {finding.fix}")

    options.print_result(json_file, findings, show, any(finding.ok is False for finding in findings))
