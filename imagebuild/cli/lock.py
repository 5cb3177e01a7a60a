"""The commands `imagebuild lock` and `imagebuild bump`."""

import sys
from datetime import datetime
from pathlib import Path

from imagebuild.cli import options
from imagebuild.core.console import err, out, print_table


@options.command()
def lock(
    project: options.ProjectFiles, edits: options.PlanChanges, select: tuple[str, ...], update: tuple[str, ...],
    show: tuple[str, ...], platforms: tuple[str, ...], check: bool, offline: bool, date: datetime | None,
    no_isolation: bool, json_file: str | None, ca: Path | None, folder: Path,
) -> None:  # fmt: skip
    from imagebuild.lock.resolve import LockFile, check_lock, network_upstream, show_report
    from imagebuild.project.select import select_targets

    read = project.open if check or show or select or update else project.open_own
    workspace = read(edits.parse(), select=select if edits else None)
    whole = not (select or edits or platforms)
    targets = select_targets(workspace.plan, select)
    chosen = options.parse_platforms(platforms)
    file = LockFile(workspace.project, workspace.renderer, targets, platforms=chosen)
    if not show and not date:
        options.name_advisories(targets)
    if show:
        out.print(file.shown(show), end="")
    elif date:
        file.write(file.lock.model_copy(update={"date": date.date()}))
        out.print(f"{file.path}: dated {date.date()}; the digests of all images change")
    elif check:
        report = check_lock(file, None if offline else network_upstream(ca), whole=whole)
        options.print_result(json_file, report, lambda: show_report(report), report.exit_status)
    else:
        file.bring_up_to_date(network_upstream(ca, isolated=not no_isolation), folder, update, whole=whole)


@options.command()
def bump(project: options.ProjectFiles, names: tuple[str, ...], write: bool, ca: Path | None) -> None:
    from difflib import unified_diff

    from imagebuild.core.files import read_text, write_text
    from imagebuild.lock.bump import bump_pins, edited
    from imagebuild.lock.resolve import LockFile, network_upstream

    workspace = project.open_own()
    file = LockFile(workspace.project, workspace.renderer, workspace.plan.targets)
    result = bump_pins(file, network_upstream(ca), names)
    if result.kept:
        print_table(("pin", "version", "stays, because"), result.kept)
    for fault in result.faults:
        err.print(fault)
    if not result.changes:
        out.print("no newer version")
        return
    matrix = workspace.project.matrix
    text = edited(matrix, result.changes)
    if write:
        write_text(matrix.path, text)
        out.print(f"{matrix.path}: written; `imagebuild lock` pins the new versions")
    else:
        before, after = (lines.splitlines(keepends=True) for lines in (read_text(matrix.path), text))
        sys.stdout.writelines(unified_diff(before, after, f"a/{matrix.path}", f"b/{matrix.path}"))
