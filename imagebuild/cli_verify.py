"""`imagebuild verify`: arguments, help and exit status. What it does is in `verify`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from imagebuild import cli, cli_limits, console, files, profiles
from imagebuild.errors import ConfigError


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("verify")(verify_command)


def variables(settings: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE, several times. Raises ConfigError."""
    for setting in settings:
        if not re.match(r"[A-Za-z_]\w*=", setting):
            raise ConfigError(f"--env {setting}: write NAME=VALUE")
    return dict(setting.split("=", 1) for setting in settings)


def verify_command(
    image: Annotated[str | None, typer.Argument(help="A tag, a digest, a target's id or an OCI layout.")] = None,
    runner: Annotated[
        str, typer.Option("--runner", metavar="RUNNER", help="docker, or exec:'PREFIX' such as exec:'ssh node'.")
    ] = "docker",
    check: Annotated[
        list[str] | None, typer.Option("--check", metavar="COMPONENT/CHECK", help="Only these; globs.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the checks, and what they need.")] = False,
    env: Annotated[
        list[str] | None, typer.Option("--env", metavar="NAME=VALUE", help="A variable for all checks.")
    ] = None,
    hosts: Annotated[
        str | None, typer.Option("--hosts", metavar="A,B,…", help="With exec: nodes of checks that use several.")
    ] = None,
    layout: Annotated[
        Path | None, typer.Option("--layout", metavar="DIR", help="The image's files, for checks that only read.")
    ] = None,
    pull: Annotated[bool, typer.Option("--pull", help="Pull an image that the engine does not have.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="DIR", help="Keep results, logs and what the place is like.")
    ] = None,
    profile: Annotated[
        str | None, typer.Option("--profile", metavar="NAME", help="Also judge speeds by what this hardware can do.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the results.")] = None,
    profiles_folder: cli_limits.ProfilesOption = cli_limits.DEFAULT_PROFILES,
    matrix: cli.MatrixOption = cli.DEFAULT_MATRIX,
    dockerfiles: cli.FolderOption = cli.DEFAULT_FOLDER,
    lock: cli.LockOption = cli.BESIDE_MATRIX,
) -> None:
    """Run the checks of an image, and say of each whether it passed. Exit status 1 if one fails."""
    from imagebuild import verify as verifying  # noqa: PLC0415 - imports the docker SDK

    work = cli.prepare(matrix, dockerfiles, lock)
    if list_:
        rows = [
            (entry.name, ", ".join(entry.check.needs) if entry.check else "", entry.description)
            for entry in verifying.listed(work.project, work.plan, image)
        ]
        console.table(("check", "needs", "what passing proves"), rows)
        return
    nodes = tuple(filter(None, (hosts or "").split(",")))
    hardware = profiles.find(profiles.load_profiles(profiles_folder), profile).model if profile else None
    wish = verifying.Wish(
        image, runner, tuple(check or ()), nodes, layout, pull, output, variables(env or ()), hardware
    )
    result = verifying.verify(work.project, work.plan, wish)
    if json_file:
        files.write_text(json_file, result.model_dump_json(indent=1) + "\n")
    verifying.show(result)
    if any(c.outcome == "failed" for c in result.checks):
        raise typer.Exit(1)
