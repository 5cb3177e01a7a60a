"""Run `imagebuild catalog` and `diff`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from imagebuild.cli.options import (
    BESIDE_MATRIX,
    BUILDS,
    DOCKERFILES,
    MATRIX,
    PROFILES,
    CheckOption,
    DockerfilesOption,
    FolderOption,
    ImageArgument,
    JsonOption,
    LockOption,
    MarkdownOption,
    MatrixOption,
    OfflineOption,
    PlatformOption,
    ProfilesOption,
    RegistryOption,
    changes_of,
    example,
    open_if_there,
    open_workspace,
    print_result,
)
from imagebuild.core.console import err, out
from imagebuild.core.errors import ConfigError


@example(
    "imagebuild catalog --registry ghcr.io/acme -o site",
    "imagebuild catalog --readme README.md --check",
)
def catalog(
    registry: RegistryOption = None,
    from_file: Annotated[
        Path | None, typer.Option("--catalog", metavar="FILE", help="Read this images.json instead of the registry.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="Write the page and images.json into a folder.")
    ] = None,
    readme: Annotated[
        Path | None, typer.Option("--readme", metavar="FILE", help="Write the table of images between its markers.")
    ] = None,
    check: CheckOption = False,
    json_file: JsonOption = None,
    profiles: ProfilesOption = PROFILES,
    matrix: MatrixOption = MATRIX,
    dockerfiles: DockerfilesOption = DOCKERFILES,
    lock: LockOption = BESIDE_MATRIX,
) -> None:
    """Make a page of all published images, and the table in the README."""
    from rich.markup import escape

    from imagebuild.core.files import read_text, write_text
    from imagebuild.publish.catalog import (
        ProjectFacts,
        catalog_from_registry,
        images_table,
        is_stale,
        read_catalog,
        replace_table,
    )
    from imagebuild.publish.site import write_site

    if output is None and readme is None and json_file is None:
        raise ConfigError("catalog: give -o DIR for the page, --readme FILE for the table of images, or --json FILE")
    if check and readme is None:
        raise ConfigError("--check: needs --readme FILE")
    if from_file and registry:
        raise ConfigError("--catalog and --registry exclude each other")
    workspace = open_workspace(matrix, dockerfiles, lock, changes_of(registry=registry))
    provides = {name: document.model.provides for name, document in workspace.project.components.items()}
    facts = ProjectFacts(workspace.project.matrix.model, workspace.plan, provides)
    published = None
    if from_file:
        published = read_catalog(from_file)
    elif output or registry or json_file:
        published = catalog_from_registry(facts, profiles)
    if published:
        made = published
        for problem in made.problems:
            err.print(f"[yellow]warning:[/] {escape(problem)}")
        print_result(json_file, lambda: made.model_dump_json(indent=1), lambda: None)
        if output:
            count = len(made.images)
            out.print(f"{count} image{'s' * (count != 1)} in {write_site(made, output)}", markup=False)
    if readme:
        old = read_text(readme)
        new = replace_table(str(readme), old, images_table(facts, published))
        if not check:
            write_text(readme, new)
        elif is_stale(old, new):
            out.print(f"{readme}: its table of images is stale; `imagebuild catalog --readme {readme}` writes it anew")
            raise typer.Exit(1)


@example(
    "imagebuild diff ghcr.io/acme/open:old ghcr.io/acme/open:new",
    "imagebuild diff old.tar new.tar --results old-results new-results --markdown",
)
def diff(
    a: ImageArgument,
    b: Annotated[str, typer.Argument(metavar="OTHER", help="The image that the first one is compared with.")],
    platform: PlatformOption = None,
    results: Annotated[
        tuple[Path, Path] | None,
        typer.Option("--results", metavar="A B", help="Results of verify or benchmarks of both; files or folders."),
    ] = None,
    json_file: JsonOption = None,
    markdown: MarkdownOption = False,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="End with exit status 1 if anything differs.")] = False,
    offline: OfflineOption = False,
    folder: FolderOption = BUILDS,
    matrix: MatrixOption = MATRIX,
    dockerfiles: DockerfilesOption = DOCKERFILES,
    lock: LockOption = BESIDE_MATRIX,
) -> None:
    """Say what differs between two images: components, packages, settings, layers, checks and bandwidth."""
    from imagebuild.publish.diff import DiffRequest, compare_images, comparison_markdown, print_comparison
    from imagebuild.verify.subject import NO_PLAN, ImageFinder

    workspace = open_if_there(matrix, dockerfiles, lock)
    finder = ImageFinder(workspace.plan if workspace else NO_PLAN, folder, offline)
    comparison = compare_images(DiffRequest(a, b, platform, results), finder)

    def show() -> None:
        if markdown:
            out.file.write(comparison_markdown(comparison))
        else:
            print_comparison(comparison)

    print_result(json_file, lambda: comparison.model_dump_json(indent=1), show)
    if exit_code and comparison.differs:
        raise typer.Exit(1)
