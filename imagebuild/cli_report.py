"""`imagebuild report`: arguments and help. What it does is in the package `report`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("report")(report_command)


def report_command(
    named: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Logs or JSON of benchmarks, results of verify, reports, or folders."),
    ],
    profile: Annotated[str | None, typer.Option("--profile", metavar="NAME", help="Hardware to compare with.")] = None,
    profiles: Annotated[Path, typer.Option("--profiles", metavar="DIR", help="Folder of profiles.")] = Path("profiles"),
    baseline: Annotated[
        Path | None, typer.Option("--baseline", metavar="OLD.json", help="An earlier report; what became slower fails.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="OUT", help="Write the report as JSON.")] = None,
    junit: Annotated[Path | None, typer.Option("--junit", metavar="OUT", help="Write JUnit XML, for CI.")] = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="OUT", help="Write a page with charts.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown, for a pull request.")] = False,
) -> None:
    """Say what benchmarks and checks found, and whether it is right and as fast as the hardware.

    Exit status 0: all is well; 1: something is not; 2: the input is wrong; 5: nothing could be read.
    """
    from imagebuild.report import command  # noqa: PLC0415 - the parsers are not needed by others

    wish = command.Wish(tuple(named), profile, profiles, baseline, json_file, junit, html)
    report = command.make(wish)
    if markdown:
        sys.stdout.write(command.markdown_of(report))
    else:
        command.show(report)
    if report.exit_status:
        raise typer.Exit(report.exit_status)
