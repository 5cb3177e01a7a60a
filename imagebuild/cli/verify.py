"""Run `imagebuild verify`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from imagebuild.cli import options
from imagebuild.cli.options import argument, option
from imagebuild.core.errors import CommandError, ConfigError, NothingSelected

if TYPE_CHECKING:
    from imagebuild.bench.verification import VerifyResult


@options.example(
    "imagebuild verify quickstart-cuda13.5-debian13-runtime",
    "imagebuild verify ghcr.io/acme/open@sha256:… --pull --json verify.json",
    "imagebuild verify IMAGE --runner exec:'srun -N2' --hosts a,b --profile h100 --only 'nccl-tests/*'",
    "imagebuild verify --list",
)
def verify(
    project: options.ProjectFiles,
    edits: options.PlanChanges,
    image: str | None = argument("IMAGE", "A target, tag, digest, OCI layout or archive.", None, completes="targets"),
    runner: str = option("--runner docker|exec:PREFIX", "What runs commands, such as exec:'ssh node'.", "docker"),
    only: list[str] | None = option("--only COMPONENT/CHECK", "Run checks of this glob. Repeat for several.", None),
    list_checks: bool = option("--list", "List the checks with what they need, and run none.", False),
    env: list[str] | None = option("--env NAME=VALUE", "Set a variable for all checks. Repeat for several.", None),
    hosts: str | None = option("--hosts A,B,…", "With exec: nodes for checks that use more than one.", None),
    pull: bool = option("--pull", "Pull the image if the engine does not have it, and remove it afterwards.", False),
    output: Path | None = option("-o, --output DIR", "Keep results, whole outputs and facts of the host here.", None),
    profile: options.ProfileOption = None,
    profiles: options.ProfilesOption = None,
    json_file: options.JsonOption = None,
    folder: options.FolderOption = options.BUILDS,
) -> None:
    """Run the checks of an image, and say of each whether it passed.

    Exit status 1 if a check fails, 3 if all are skipped, 4 if nothing could be started in the image.
    """
    from imagebuild.verify.checks import select_checks
    from imagebuild.verify.rules import IMAGE_CHECKS
    from imagebuild.verify.subject import refuse_misspelled, target_with_id
    from imagebuild.verify.verify import VerifyRequest, verify_image

    workspace = project.open(edits.parse())
    hardware = None
    if profile:
        from imagebuild.bench.profiles import find_profile, load_profiles

        folders = options.data_folders(profiles, "profiles", project.root)
        hardware = find_profile(load_profiles(*folders), profile).model
    for setting in env or ():
        if not re.match(r"[A-Za-z_]\w*=", setting):
            raise ConfigError(f"--env {setting}: write NAME=VALUE")
    if list_checks:
        from imagebuild.core.console import print_table

        # Images of others have no checks of their own, so that nobody is asked for their names.
        target = target_with_id(workspace.plan, image) if image else None
        if image and not target:
            refuse_misspelled(workspace.plan, image)
        entries = select_checks(workspace.project, IMAGE_CHECKS, target.components if target else None, only or ())
        listed = [
            {"check": str(e), "needs": ", ".join(e.check.needs) if e.check else "", "proves": e.description}
            for e in entries
        ]
        columns = ("check", "needs", "what passing proves")
        options.print_result(json_file, listed, lambda: print_table(columns, (row.values() for row in listed)))
        return
    nodes = tuple(filter(None, (hosts or "").split(",")))
    variables = dict(setting.split("=", 1) for setting in env or ())
    request = VerifyRequest(
        image, runner, only or (), nodes, pull, folder, output, variables, hardware,
    )  # fmt: skip
    result = verify_image(workspace.project, workspace.plan, request)
    options.print_result(json_file, result, lambda: _print_results(result))
    if any(check.outcome == "failed" for check in result.checks):
        raise typer.Exit(1)
    unstarted = [check for check in result.checks if check.component != "image"]
    if unstarted and not result.surroundings:
        raise CommandError(f"no check was started: {unstarted[0].reason}; `--only image` reads the files alone")
    if {check.outcome for check in result.checks} == {"skipped"}:
        raise NothingSelected(f"no check ran, all were skipped: {result.checks[-1].reason}")


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
