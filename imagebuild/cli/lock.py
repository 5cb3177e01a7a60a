"""Run `imagebuild lock` and `imagebuild bump`."""

from __future__ import annotations

import sys
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from imagebuild.cli import options
from imagebuild.cli.options import argument, option
from imagebuild.core.errors import CommandError, ConfigError

if TYPE_CHECKING:
    from imagebuild.lock.resolve import LockCheck, LockFile, Outcome
    from imagebuild.project.lockfile import Source


@options.example(
    "imagebuild lock                     # pin what the lock lacks, remove what nothing uses",
    "imagebuild lock --set nccl=2.31.2   # also pin the sources of this version",
    "imagebuild lock --show hpcx hpcx    # what is known of HPC-X's archives",
    "imagebuild lock --check --offline   # for CI",
    "imagebuild lock --check --json -    # what is not as locked, for programs",
)
def lock(
    project: options.ProjectFiles,
    edits: options.PlanChanges,
    select: options.SelectArgument = None,
    update: Annotated[
        list[str] | None, option("--update NAME", "Pin a component, pin, base or address again. Repeat for several.")
    ] = None,
    show: Annotated[
        list[str] | None,
        option(
            "--show NAME", "Only print what the lock knows of a component, pin, base or address. Repeat for several."
        ),
    ] = None,
    platform: options.PlatformsOption = None,
    check: options.CheckOption = False,
    offline: options.OfflineOption = False,
    date: Annotated[
        datetime | None,
        option(
            "--date YYYY-MM-DD",
            "Only set the date of the lock: no file of an image gets a later one.",
            formats=["%Y-%m-%d"],
        ),
    ] = None,
    json_file: options.JsonOption = None,
    ca: options.CaOption = None,
) -> None:
    """Pin every source by content: add what the lock lacks, remove what nothing uses."""
    from imagebuild.core.console import out
    from imagebuild.lock.resolve import (
        LockFile,
        check_lock,
        complete_lock,
        network_upstream,
        redate_lock,
        shown_sources,
        update_lock,
    )
    from imagebuild.project.plan import select_targets

    if offline and not check:
        raise ConfigError("--offline: needs --check; without a network nothing can be pinned")
    if json_file is not None and not check:
        raise ConfigError("--json: needs --check; without it the result is the lock, which is JSON")
    if check and update:
        raise ConfigError("--check and --update exclude each other; leave one out")
    if sum(map(bool, (date, show, check or update))) > 1:
        raise ConfigError("--date and --show: exclude --check, --update and each other; they pin nothing")
    path = project.own_paths.lock
    workspace = project.open(edits.parse(), project.paths if check or show else project.own_paths)
    whole = not (select or edits or platform)
    targets = select_targets(workspace.plan, select or ())
    file = LockFile(workspace.project, workspace.renderer, targets, path, platforms=options.parse_platforms(platform))
    if show:
        for line in shown_sources(file, show):
            out.print(line, markup=False, highlight=False, soft_wrap=True)
    elif date:
        redate_lock(file, date.date())
        out.print(
            f"{file.path}: no file of an image is younger than {date.date()} now; all digests change", markup=False
        )
    elif check:
        result = check_lock(file, None if offline else network_upstream(ca), whole=whole)
        options.print_result(json_file, result, lambda: _show_check(result))
        if result.exit_status == 4:
            problem = f"{result.unchecked} sources could not be compared with upstream; all else is as locked"
            raise CommandError(f"{file.path}: {problem}")
        raise typer.Exit(result.exit_status)
    elif update:
        _show_outcome(file, *update_lock(file, network_upstream(ca), update))
    else:
        _show_outcome(file, *complete_lock(file, network_upstream(ca), whole=whole))


def _show_check(result: LockCheck) -> None:
    """Print what is not as locked, or that all is."""
    from rich.markup import escape

    from imagebuild.core.console import out, print_table

    if result.findings:
        rows = [(finding.state, escape(finding.source), escape(finding.detail)) for finding in result.findings]
        print_table(("state", "source", "what"), rows)
    if not result.exit_status:
        compared = "" if result.upstream else "; upstream was not asked"
        out.print(f"{result.lock}: all {result.sources} sources are as locked{compared}", markup=False)


def _show_outcome(file: LockFile, sources: tuple[Source, ...], outcome: Outcome) -> None:
    """Print how many sources were pinned. Raises CommandError that lists those that could not be."""
    from imagebuild.core.console import out

    unpinned, number = file.unpinned(sources), len(sources)
    state = f"{unpinned} of {number} sources have no pin" if unpinned else f"all {number} sources are pinned"
    for line in (*outcome.changes, *(f"adapted: {line}" for line in outcome.adaptations)):
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    out.print(f"{file.path}: {len(outcome.resolved)} resolved; {state}", markup=False)
    if complaint := outcome.complaint():
        raise CommandError(complaint)


@options.example(
    "imagebuild bump",
    "imagebuild bump nccl ucx --write --relock",
    "imagebuild bump --json -   # newer versions, and why others stay, for programs",
)
def bump(
    project: options.ProjectFiles,
    names: Annotated[list[str] | None, argument("PIN", "Pins to look for newer versions of; by default all.")] = None,
    write: Annotated[bool, option("--write", "Change the files instead of printing a diff.")] = False,
    relock: Annotated[bool, option("--relock", "Pin the new versions' sources in the lock, too.")] = False,
    pre: Annotated[bool, option("--pre", "Also propose releases that are not stable.")] = False,
    json_file: options.JsonOption = None,
    ca: options.CaOption = None,
) -> None:
    """Propose newer versions of the matrix's pins, as a diff."""
    from rich.markup import escape

    from imagebuild.core.console import out, print_table
    from imagebuild.lock.bump import bump_pins, diff
    from imagebuild.lock.resolve import LockFile, network_upstream

    path = project.own_paths.lock
    workspace = project.open()
    file = LockFile(workspace.project, workspace.renderer, workspace.plan.targets, path)
    result, texts = bump_pins(file, network_upstream(ca), names or (), write=write, relock=relock, pre=pre)

    def show() -> None:
        if result.kept:
            rows = [tuple(map(escape, (kept.pin, kept.version, kept.reason))) for kept in result.kept]
            print_table(("pin", "version", "stays, because it"), rows)
        if not texts:
            out.print("no newer version", markup=False)
        for path, text in texts.items():
            if write:
                out.print(f"{path}: written", markup=False)
            else:
                sys.stdout.write(diff(path, text))

    options.print_result(json_file, result, show)
    if result.unresolved:
        raise CommandError(result.unresolved)
