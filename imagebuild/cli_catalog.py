"""`imagebuild catalog`: arguments and printing. What it does is in the package `catalog`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from imagebuild import cli, files
from imagebuild import plan as planning
from imagebuild.cli_limits import DEFAULT_PROFILES, ProfilesOption
from imagebuild.console import err, out
from imagebuild.errors import ConfigError


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("catalog")(catalog_command)


def catalog_command(
    registry: cli.RegistryOption = None,
    from_: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="An images.json, instead of reading the registry.")
    ] = None,
    earlier: Annotated[
        Path | None, typer.Option("--known", metavar="FILE", help="An earlier images.json; only what is new is read.")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="DIR", help="Write the site here.")] = None,
    readme: Annotated[
        Path | None, typer.Option("--readme", metavar="FILE", help="Write the table of images between its markers.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="With --readme: only say whether it is stale; exit status 1 if so.")
    ] = False,
    profiles: ProfilesOption = DEFAULT_PROFILES,
    matrix: cli.MatrixOption = cli.DEFAULT_MATRIX,
    dockerfiles: cli.FolderOption = cli.DEFAULT_FOLDER,
    lock: cli.LockOption = cli.BESIDE_MATRIX,
) -> None:
    """Make a site of all published images, and the table in the README."""
    from imagebuild.catalog import readme as tables  # noqa: PLC0415 - others need it not
    from imagebuild.catalog import write  # noqa: PLC0415 - as above
    from imagebuild.catalog.describe import Ours  # noqa: PLC0415 - as above

    if output is None and readme is None:
        raise ConfigError("catalog: say -o DIR for the site, or --readme FILE for the table of images")
    if check and readme is None:
        raise ConfigError("--check: say also --readme FILE")
    if from_ and registry:
        raise ConfigError("--from and --registry exclude each other")
    work = cli.prepare(matrix, dockerfiles, lock, planning.parse_changes((), repository=registry))
    provides = {name: document.model.provides for name, document in work.project.components.items()}
    ours = Ours(work.project.matrix.model, work.plan, provides)
    reading = None
    if from_:
        reading = write.load(from_)
    elif output or registry:
        reading = write.from_registry(ours, profiles, earlier)
    if reading:
        for problem in reading.catalog.problems:
            err.print(f"[yellow]warning:[/] {escape(problem)}")
    if output and reading:
        written = write.write(reading, output)
        count = len(reading.catalog.images)
        out.print(f"{count} image{'s' * (count != 1)} in {output / 'index.html'}, {written} files", markup=False)
    if readme:
        old = files.read_text(readme)
        new = tables.replaced(str(readme), old, tables.table(ours, reading.catalog if reading else None))
        if not check:
            files.write_text(readme, new)
        elif tables.stale(old, new):
            out.print(f"{readme}: its table of images is stale; `imagebuild catalog --readme {readme}` writes it anew")
            raise typer.Exit(1)
