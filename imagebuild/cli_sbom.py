"""`imagebuild sbom`: arguments and help. What it does is in the package `sbom`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from imagebuild import cli, files
from imagebuild.console import err
from imagebuild.errors import ConfigError
from imagebuild.models import Target


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("sbom")(sbom_command)


def sbom_command(
    image: Annotated[
        str,
        typer.Argument(help="A target's id, a tag or digest in the engine or a registry, an OCI layout or archive."),
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write to a file, such as sbom.spdx.json.")
    ] = None,
    platform: Annotated[str | None, typer.Option("--platform", help="Of several, this one.")] = None,
    folder: Annotated[Path, typer.Option("--folder", help="Where builds leave layouts of targets.")] = Path("build"),
    matrix: cli.MatrixOption = cli.DEFAULT_MATRIX,
    dockerfiles: cli.FolderOption = cli.DEFAULT_FOLDER,
    lock: cli.LockOption = cli.BESIDE_MATRIX,
) -> None:
    """List all that is in an image, as SPDX: packages, components, and what those were made from."""
    from imagebuild.locating.resolve import NO_PLAN, Places  # noqa: PLC0415 - imports the docker SDK
    from imagebuild.sbom import command, spdx  # noqa: PLC0415 - as above

    work = None
    if matrix != cli.DEFAULT_MATRIX or matrix.exists():
        work = cli.prepare(matrix, dockerfiles, lock)
    with Places(work.plan if work else NO_PLAN, folder).find(image) as found:
        if isinstance(found, Target):
            raise ConfigError(f"{image}: is not built, or has other versions than the plan; build it first")
        document = command.of(found.image(platform), work.plan if work else NO_PLAN, work.renderer if work else None)
    if "comment" in document:
        err.print(document["comment"], markup=False)
    text = spdx.encode(document).decode()
    if output:
        files.write_text(output, text)
    else:
        sys.stdout.write(text)
