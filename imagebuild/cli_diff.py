"""`imagebuild diff`: arguments, help and exit status. What it does is in the package `compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from imagebuild import cli, files
from imagebuild.cli_scan import plan_of
from imagebuild.console import out


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("diff")(diff_command)


def diff_command(
    a: Annotated[
        str,
        typer.Argument(help="A target's id, a tag or digest in the engine or a registry, an OCI layout or archive."),
    ],
    b: Annotated[str, typer.Argument(help="The same, of what it is compared with.")],
    platform: Annotated[str | None, typer.Option("--platform", help="Of several, this one.")] = None,
    results: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            "--results", metavar="A B", help="Results of verify or benchmarks, of A and of B; files or folders."
        ),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all of it as JSON.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown, for a pull request.")] = False,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit status 1 if anything differs.")] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Ask no registry.")] = False,
    folder: Annotated[Path, typer.Option("--folder", help="Where builds leave layouts of targets.")] = Path("build"),
    matrix: cli.MatrixOption = cli.DEFAULT_MATRIX,
    dockerfiles: cli.FolderOption = cli.DEFAULT_FOLDER,
    lock: cli.LockOption = cli.BESIDE_MATRIX,
) -> None:
    """Say what differs between two images: components, packages, settings, layers, checks and bandwidth."""
    from imagebuild.compare import reading, text  # noqa: PLC0415 - imports the docker SDK
    from imagebuild.locating.resolve import NO_PLAN, Places  # noqa: PLC0415 - as above

    places = Places(plan_of(matrix, dockerfiles, lock) or NO_PLAN, folder, offline)
    made = reading.compare(reading.Wish(a, b, platform, results), places)
    if json_file:
        files.write_text(json_file, made.model_dump_json(indent=1) + "\n")
    if markdown:
        out.file.write(text.markdown(made))
    else:
        text.show(made)
    if exit_code and made.differs:
        raise typer.Exit(1)
