"""`imagebuild report`: arguments and help. What it does is in the package `report`."""

from __future__ import annotations

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
    ranks: Annotated[
        int | None, typer.Option("--ranks", min=1, help="Ranks of runs whose output does not say it.")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", min=1, help="Hosts of runs whose output does not say it.")
    ] = None,
    algorithm: Annotated[
        str | None, typer.Option("--algorithm", metavar="NAME", help="Class that NCCL was made to use, such as ring.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="OUT", help="Write the report as JSON.")] = None,
    junit: Annotated[Path | None, typer.Option("--junit", metavar="OUT", help="Write JUnit XML, for CI.")] = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="OUT", help="Write a page with charts.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown, for a pull request.")] = False,
) -> None:
    """Say what benchmarks and checks found, and whether it is right and as fast as the hardware.

    Exit status 0: all is well; 1: something is not; 2: the input is wrong; 5: nothing could be read.
    """
    from imagebuild.judge import Known  # noqa: PLC0415 - as below
    from imagebuild.report import command  # noqa: PLC0415 - other commands need no parsers

    known = Known(ranks=ranks, nodes=nodes, algorithm=algorithm)
    report = command.run(
        command.Wish(tuple(named), profile, profiles, baseline, known, json_file, junit, html, markdown)
    )
    if report.exit_status:
        raise typer.Exit(report.exit_status)
