"""Run `imagebuild verify`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from imagebuild.cli.options import (
    BESIDE_MATRIX,
    DOCKERFILES,
    MATRIX,
    PROFILES,
    DockerfilesOption,
    JsonOption,
    LockOption,
    MatrixOption,
    ProfileOption,
    ProfilesOption,
    SetOption,
    WithOption,
    WithoutOption,
    changes_of,
    example,
    open_workspace,
    print_result,
)
from imagebuild.core.errors import ConfigError

if TYPE_CHECKING:
    from imagebuild.project.records import VerifyResult


@example(
    "imagebuild verify quickstart-cuda13.5-debian13-runtime",
    "imagebuild verify ghcr.io/acme/open@sha256:… --pull --json verify.json",
    "imagebuild verify IMAGE --runner exec:'srun -N2' --hosts a,b --profile h100 --only 'nccl-tests/*'",
    "imagebuild verify --list",
)
def verify(
    image: Annotated[
        str | None,
        typer.Argument(metavar="IMAGE", help="A target's id, a tag, a digest, an OCI layout or an archive."),
    ] = None,
    runner: Annotated[
        str,
        typer.Option(
            "--runner", metavar="docker|exec:PREFIX", help="What runs commands in the image, such as exec:'ssh node'."
        ),
    ] = "docker",
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only", metavar="COMPONENT/CHECK", help="Run only checks that fit this glob. Repeat for several."
        ),
    ] = None,
    list_checks_: Annotated[
        bool, typer.Option("--list", help="List the checks with what they need, and run none.")
    ] = False,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", metavar="NAME=VALUE", help="Set a variable for all checks. Repeat for several."),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option("--hosts", metavar="A,B,…", help="With exec: nodes for checks that use more than one."),
    ] = None,
    layout: Annotated[
        Path | None,
        typer.Option("--layout", metavar="DIR", help="With exec: OCI layout of the image, for checks that read it."),
    ] = None,
    pull: Annotated[bool, typer.Option("--pull", help="Pull the image if the engine does not have it.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="DIR", help="Keep results, whole outputs and facts of the host here."),
    ] = None,
    profile: ProfileOption = None,
    profiles: ProfilesOption = PROFILES,
    json_file: JsonOption = None,
    settings: SetOption = None,
    with_: WithOption = None,
    without: WithoutOption = None,
    matrix: MatrixOption = MATRIX,
    dockerfiles: DockerfilesOption = DOCKERFILES,
    lock: LockOption = BESIDE_MATRIX,
) -> None:
    """Run the checks of an image, and say of each whether it passed.

    Exit status 1 if a check fails.
    """
    from imagebuild.verify.verify import VerifyRequest, list_checks, verify_image

    workspace = open_workspace(matrix, dockerfiles, lock, changes_of(settings, with_, without))
    if list_checks_:
        from imagebuild.core.console import print_table

        rows = [
            (entry.name, ", ".join(entry.check.needs) if entry.check else "", entry.description)
            for entry in list_checks(workspace.project, workspace.plan, image, only or ())
        ]
        columns = ("check", "needs", "what passing proves")
        print_result(
            json_file,
            lambda: json.dumps([dict(zip(("check", "needs", "proves"), row, strict=True)) for row in rows], indent=1),
            lambda: print_table(columns, rows),
        )
        return
    hardware = None
    if profile:
        from imagebuild.bench.profiles import find_profile, load_profiles

        hardware = find_profile(load_profiles(profiles), profile).model
    request = VerifyRequest(
        image, runner, tuple(only or ()), tuple(filter(None, (hosts or "").split(","))), layout, pull, output,
        _variables(env or ()), hardware,
    )  # fmt: skip
    result = verify_image(workspace.project, workspace.plan, workspace.versions, request)
    print_result(json_file, lambda: result.model_dump_json(indent=1), lambda: _print_results(result))
    if any(check.outcome == "failed" for check in result.checks):
        raise typer.Exit(1)


def _print_results(result: VerifyResult) -> None:
    """Print a table of the checks, the output of those that failed, and how many had which outcome."""
    from rich.markup import escape

    from imagebuild.core.console import MARKS, out, print_table

    rows = [(c.component, c.check, MARKS[c.outcome], c.reason, f"{c.seconds:.1f} s") for c in result.checks]
    print_table(("component", "check", "outcome", "why", "time"), rows)
    for check in result.checks:
        if check.outcome == "failed":
            out.print(f"\n[bold]{check.component} {check.check}[/]: {escape(check.reason)}")
            out.print(check.output.rstrip() or "(no output)", markup=False)
    counts = (f"{sum(check.outcome == outcome for check in result.checks)} {outcome}" for outcome in MARKS)
    out.print(f"{result.image}, {result.platform}: {', '.join(counts)}")


def _variables(settings: Sequence[str]) -> dict[str, str]:
    """Return the variables of --env. Raises ConfigError for what is not NAME=VALUE."""
    for setting in settings:
        if not re.match(r"[A-Za-z_]\w*=", setting):
            raise ConfigError(f"--env {setting}: write NAME=VALUE")
    return dict(setting.split("=", 1) for setting in settings)
