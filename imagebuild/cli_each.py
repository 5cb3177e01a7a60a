"""`imagebuild each`: arguments and help. What it does is in `each`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("each")(each_command)


def each_command(
    folder: Annotated[Path, typer.Argument(help="Results of `imagebuild build --push` are below it.")],
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="{image}, {target}, {platform}, {arch}, {folder}.")
    ],
    platform: Annotated[list[str] | None, typer.Option("--platform", help="Only images for it.")] = None,
) -> None:
    """Run a command for every image that was pushed, by its digest: verify, sbom, scan.

    A failure does not stop the others; the exit status is the worst.
    """
    from imagebuild import each  # noqa: PLC0415 - starts programs

    if status := each.run(folder, platform or (), command):
        raise typer.Exit(status)
