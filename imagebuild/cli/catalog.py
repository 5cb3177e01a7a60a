"""Run `imagebuild catalog` and `diff`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from imagebuild.cli import options
from imagebuild.cli.options import argument, option
from imagebuild.core.console import err, out
from imagebuild.core.errors import ConfigError


@options.example(
    "imagebuild catalog --registry ghcr.io/acme -o site",
    "imagebuild catalog --readme README.md --check",
)
def catalog(
    project: options.ProjectFiles,
    registry: options.RegistryOption = None,
    output: Annotated[Path | None, option("-o, --output DIR", "Write the page and images.json into a folder.")] = None,
    readme: Annotated[Path | None, option("--readme FILE", "Write the table of images between its markers.")] = None,
    check: options.CheckOption = False,
    json_file: options.JsonOption = None,
) -> None:
    """Make a page of all published images, and the table in the README."""
    from rich.markup import escape

    from imagebuild.core.files import read_text, write_text
    from imagebuild.publish.catalog import (
        ProjectFacts,
        catalog_from_registry,
        images_table,
        replace_table,
    )
    from imagebuild.publish.site import write_site

    if output is None and readme is None and json_file is None:
        raise ConfigError("catalog: give -o DIR for the page, --readme FILE for the table of images, or --json FILE")
    if check and readme is None:
        raise ConfigError("--check: needs --readme FILE")
    workspace = project.open(options.PlanChanges().parse(registry))
    provides = {name: document.model.provides for name, document in workspace.project.components.items()}
    facts = ProjectFacts(workspace.project.matrix.model, workspace.plan, provides)
    if output or json_file:
        made = catalog_from_registry(facts)
        for problem in made.problems:
            err.print(f"[yellow]warning:[/] {escape(problem)}")
        options.print_result(json_file, made, lambda: None)
        if output:
            count = len(made.images)
            out.print(f"{count} image{'s' * (count != 1)} in {write_site(made, output)}", markup=False)
    if readme:
        old = read_text(readme)
        new = replace_table(str(readme), old, images_table(facts))
        if not check:
            write_text(readme, new)
        elif old != new:
            out.print(f"{readme}: its table of images is stale; `imagebuild catalog --readme {readme}` writes it anew")
            raise typer.Exit(1)


@options.example(
    "imagebuild diff ghcr.io/acme/open:old ghcr.io/acme/open:new",
    "imagebuild diff old.tar new.tar --results old-results new-results",
)
def diff(
    project: options.ProjectFiles,
    a: options.ImageArgument,
    b: Annotated[str, argument("OTHER", "The image that the first one is compared with.")],
    platform: options.PlatformOption = None,
    results: Annotated[
        tuple[Path, Path] | None, option("--results A B", "Results of verify or benchmarks of both; files or folders.")
    ] = None,
    json_file: options.JsonOption = None,
    exit_code: Annotated[bool, option("--exit-code", "End with exit status 1 if anything differs.")] = False,
    offline: options.OfflineOption = False,
    folder: options.FolderOption = options.BUILDS,
) -> None:
    """Say what differs between two images: components, packages, settings, layers, checks and bandwidth."""
    from imagebuild.publish.diff import DiffRequest, compare_images, print_comparison
    from imagebuild.verify.subject import NO_PLAN, ImageFinder

    workspace = project.open_if_there()
    finder = ImageFinder(workspace.plan if workspace else NO_PLAN, folder, offline)
    comparison = compare_images(DiffRequest(a, b, platform, results), finder)

    options.print_result(json_file, comparison, lambda: print_comparison(comparison))
    if exit_code and comparison.differs:
        raise typer.Exit(1)
