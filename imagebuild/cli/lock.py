"""Run `imagebuild lock` and `imagebuild bump`."""

from __future__ import annotations

import sys
from datetime import datetime

import typer

from imagebuild.cli import options
from imagebuild.cli.options import DAY, argument, option
from imagebuild.core.errors import CommandError


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
    update: list[str] | None = option("--update NAME", "Pin a component, pin, base or address again.", None),
    show: list[str] | None = option("--show NAME", "Only print what the lock knows of such a name.", None),
    platform: options.PlatformsOption = None,
    check: options.CheckOption = False,
    offline: options.OfflineOption = False,
    date: datetime | None = option(
        "--date YYYY-MM-DD", "Only set the date of the lock: no file of an image gets a later one.", None, formats=DAY
    ),
    json_file: options.JsonOption = None,
    ca: options.CaOption = None,
) -> None:
    """Pin every source by content: add what the lock lacks, remove what nothing uses."""
    from imagebuild.core.console import out
    from imagebuild.lock.resolve import LockFile, check_lock, complaint, network_upstream, show_report
    from imagebuild.project.select import select_targets

    given = {"--check": check, "--update": update, "--date": date, "--show": show, "--offline": offline,
             "--json": json_file is not None}  # fmt: skip
    needs = {"--offline": ("--check",), "--json": ("--check",)}
    options.check_combination(given, needs, [("--check", "--update", "--date", "--show")])
    workspace = project.open_own(edits.parse())
    whole = not (select or edits or platform)
    targets = select_targets(workspace.plan, select or ())
    file = LockFile(workspace.project, workspace.renderer, targets, platforms=options.parse_platforms(platform))
    if show:
        out.print(file.shown(show), markup=False, end="")
    elif date:
        file.write(file.lock.model_copy(update={"date": date.date()}))
        out.print(
            f"{file.path}: no file of an image is younger than {date.date()} now; all digests change", markup=False
        )
    elif check:
        report = check_lock(file, None if offline else network_upstream(ca), whole=whole)
        options.print_result(json_file, report, lambda: show_report(report, every=False))
        raise typer.Exit(report.exit_status)
    else:
        upstream = network_upstream(ca)
        failures = file.update(upstream, update) if update else file.complete(upstream, whole=whole)
        unpinned, number = len(file.unpinned), len(file.sources)
        state = f"sources without a pin: {unpinned} of {number}" if unpinned else f"all {number} sources are pinned"
        out.print(f"{file.path}: {state}", markup=False)
        if text := complaint(failures):
            raise CommandError(text)


@options.example(
    "imagebuild bump                             # a diff of matrix.yaml",
    "imagebuild bump nccl ucx --write && imagebuild lock",
)
def bump(
    project: options.ProjectFiles,
    names: list[str] | None = argument("PIN", "Pins to look for newer versions of; by default all.", None),
    write: bool = option("--write", "Change the matrix instead of printing a diff.", False),
    ca: options.CaOption = None,
) -> None:
    """Propose newer versions of the matrix's pins, as a diff."""
    from difflib import unified_diff

    from rich.markup import escape

    from imagebuild.core.console import out, print_table
    from imagebuild.core.files import read_text, write_text
    from imagebuild.lock.bump import bump_pins, edited
    from imagebuild.lock.resolve import LockFile, network_upstream

    workspace = project.open_own()
    file = LockFile(workspace.project, workspace.renderer, workspace.plan.targets)
    result = bump_pins(file, network_upstream(ca), names or ())
    if result.kept:
        print_table(("pin", "version", "stays, because"), [tuple(map(escape, row)) for row in result.kept])
    if not result.changes:
        out.print("no newer version", markup=False)
        return
    matrix = workspace.project.matrix
    text = edited(matrix, result.changes)
    if write:
        write_text(matrix.path, text)
        out.print(f"{matrix.path}: written; `imagebuild lock` pins the new versions", markup=False)
    else:
        before, after = (lines.splitlines(keepends=True) for lines in (read_text(matrix.path), text))
        sys.stdout.writelines(unified_diff(before, after, f"a/{matrix.path}", f"b/{matrix.path}"))
