"""The command `imagebuild verify`."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from imagebuild.cli import options
from imagebuild.core.advisory import Place, known_bad
from imagebuild.core.console import MARKS, err, out, print_table, redacted_text, styled
from imagebuild.core.errors import CommandError, ConfigError, NothingSelected, ResultError
from imagebuild.core.files import read_bytes, refuse_links, write_text
from imagebuild.core.yaml import read_written

if TYPE_CHECKING:
    from collections.abc import Sequence

    from imagebuild.bench.models import Openness
    from imagebuild.bench.profiles import Profile
    from imagebuild.bench.verification import CheckResult, VerifyResult
    from imagebuild.project.plan import Plan, Target


@options.command()
def verify(
    project: options.ProjectFiles, edits: options.PlanChanges, image: str | None, runner: str, only: tuple[str, ...],
    list_checks: bool, env: tuple[str, ...], hosts: str | None, pull: bool, output: Path | None, profile: str | None,
    profiles: Path | None, nodes: int | None, gpus: int | None, domains: int | None, allow: tuple[str, ...],
    json_file: str | None, folder: Path, lock: bool, reuse: bool,
) -> None:  # fmt: skip
    from imagebuild.bench.models import Launch
    from imagebuild.project.lockfile import check_pinned, lacks
    from imagebuild.verify.subject import path_of_image, target_with_id
    from imagebuild.verify.verify import VerifyRequest, verify_image

    workspace = project.open(edits.parse())
    hardware = None
    told = {"--gpus": gpus, "--domains": domains, "--allow": allow, "--profiles": profiles}
    if not profile and (option := next((option for option, value in told.items() if value), None)):
        raise ConfigError(f"{option}: has no effect without a profile; name a profile with --profile")
    allowed: tuple[Openness, ...] = ()
    if profile:
        from imagebuild.bench.judge import accepted_kinds
        from imagebuild.bench.profiles import find_profile, load_profiles

        allowed = accepted_kinds(allow)
        folders = options.data_folders(profiles, "profiles", project.root)
        hardware = find_profile(load_profiles(*folders), profile).model
    for setting in env:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*=[^\x00-\x1f\x7f]*", setting):
            # The value may be a secret.
            raise ConfigError(f"--env {setting.partition('=')[0]!r}: write NAME=VALUE, with a value of one line")
    target = target_with_id(workspace.plan, image) if image and not path_of_image(image) else None
    if list_checks:
        print_checks(workspace, target, image, only, json_file)
        return
    if target:
        workspace = workspace.locked([target], wanted=lock, folder=folder)
        locked, recipe = workspace.project.lock, workspace.renderer.recipe(target)
        sources = [[owned.source for owned in recipe.sources_for((platform,))] for platform in target.platforms]
        if all(any(lacks(locked, source) for source in needed) for needed in sources):
            check_pinned(locked, chain.from_iterable(sources), workspace.project.changes.lock_command(target.id))
    if reuse and output:
        raise ConfigError(
            "--reuse: the folder of --output gets the outputs of all checks; leave out one of the options"
        )
    names = tuple(filter(None, (hosts or "").split(",")))
    variables = dict(setting.split("=", 1) for setting in env)
    request = VerifyRequest(
        image, runner, only, names, pull, folder, output, variables, hardware,
        Launch(nodes=nodes, gpus=gpus, domains=domains), allowed, earlier_result(target, folder) if reuse else None,
    )  # fmt: skip
    result = verify_image(workspace.project, workspace.plan, request)
    name_known_faults(result, workspace.plan, hardware)
    keep_log(result, workspace.plan, folder)
    options.print_result(json_file, result, lambda: _print_results(result))
    if any(check.outcome == "failed" for check in result.checks):
        sys.exit(1)
    unstarted = [check for check in result.checks if check.component != "image"]
    if unstarted and not result.surroundings:
        remedy = "use `--only image` to check only the files of the image"
        raise CommandError(f"no check was started: {unstarted[0].reason}; {remedy}")
    if all(check.outcome == "skipped" for check in result.checks):
        reason = f", all were skipped: {result.checks[-1].reason}" if result.checks else ""
        raise NothingSelected(f"no check ran{reason}")


def print_checks(
    workspace: options.Workspace, target: Target | None, image: str | None, only: Sequence[str], json_file: str | None
) -> None:
    """Print the checks of a target or of all components, with their needs."""
    from imagebuild.verify.checks import select_checks
    from imagebuild.verify.rules import IMAGE_CHECKS
    from imagebuild.verify.subject import refuse_misspelled

    # A name that is not a target can be a foreign image, unless it looks like a misspelled target.
    if image and not target:
        refuse_misspelled(workspace.plan, image)
    entries = select_checks(workspace.project, IMAGE_CHECKS, target.components if target else None, only)
    listed = [
        {"check": str(e), "needs": ", ".join(e.check.needs) if e.check else "", "proves": e.description}
        for e in entries
    ]
    columns = ("check", "needs", "what passing proves")
    options.print_result(json_file, listed, lambda: print_table(columns, (row.values() for row in listed)))


def name_known_faults(result: VerifyResult, plan: Plan, hardware: Profile | None) -> None:
    """Print the advisories about an image of the plan, and about the drivers of the node."""
    target = next((target for target in plan.targets if target.id == result.target), None)
    place = hardware.place if hardware else target.place if target else Place()
    if arch := (result.platform or "").partition("/")[2]:
        place = replace(place, archs=(arch,))
    versions = {**(target.components if target else {}), **(result.surroundings.drivers if result.surroundings else {})}
    for advisory in known_bad(versions, place):
        err.print(f"known fault of {target.id if target else result.image}: {advisory}")


def earlier_result(target: Target | None, folder: Path) -> VerifyResult | None:
    """Return the last result that `keep_log` wrote for a target. Raises ConfigError if IMAGE is not a target."""
    from imagebuild.bench.verification import VerifyResult

    if not target:
        raise ConfigError(
            "--reuse: the build folder has results of targets only; leave the option out, or name a target"
        )
    path = folder / target.id / "verify.log"
    if not path.exists():
        return None
    try:
        return read_written(VerifyResult, read_bytes(path), str(path))
    except ResultError:
        err.print(f"{path}: was not written by this version of imagebuild, so all checks run")
        return None


def keep_log(result: VerifyResult, plan: Plan, folder: Path) -> None:
    """Write the result beside the build of the target, if there is one, for `imagebuild bug-report`."""
    for target in plan.targets:
        if target.id == result.target and (folder / target.id).is_dir():
            path = folder / target.id / "verify.log"
            refuse_links([path.parent, path])
            write_text(path, redacted_text(result.model_dump_json(indent=1)) + "\n")


def _print_results(result: VerifyResult) -> None:
    """Print a table of the checks, the output of failed checks, and the number of checks for each outcome."""
    from imagebuild.oci.image import index_explained

    rows = [(c.component, c.check, MARKS[c.outcome], c.reason, f"{c.seconds:.1f} s") for c in result.checks]
    print_table(("component", "check", "outcome", "why", "time"), rows)
    failed: dict[str, list[CheckResult]] = {}
    for check in result.checks:
        if check.outcome == "failed":
            # One cause may make many judgements fail. The output of a judgement only repeats its claims.
            failed.setdefault(check.reason if check.judgements else check.name, []).append(check)
    for checks in failed.values():
        names = ", ".join(f"{check.component} {check.check}" for check in checks)
        out.print(styled((f"\n{names}", "bold"), f": {checks[0].reason}"))
        if len(checks) == 1:
            out.print(checks[0].output.rstrip() or "(no output)")
    counts = (f"{sum(check.outcome == outcome for check in result.checks)} {outcome}" for outcome in MARKS)
    images = {result.platform: result.digest} if result.digest else {}
    if images and (sentence := index_explained(result.image.partition("@")[2], images)):
        out.print(sentence)
    out.print(f"{result.image}, {result.platform}: {', '.join(counts)}")
