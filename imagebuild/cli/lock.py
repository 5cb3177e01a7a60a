"""Run `imagebuild lock` and `imagebuild bump`."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import typer

from imagebuild.cli.options import (
    BESIDE_MATRIX,
    DOCKERFILES,
    MATRIX,
    CaOption,
    CheckOption,
    DockerfilesOption,
    LockOption,
    MatrixOption,
    OfflineOption,
    SelectArgument,
    SetOption,
    WithOption,
    WithoutOption,
    changes_of,
    example,
    lock_path,
    open_workspace,
)
from imagebuild.core.errors import ConfigError


@example(
    "imagebuild lock                     # pin what the lock lacks, remove what nothing uses",
    "imagebuild lock --set nccl=2.31.2   # also pin the sources of this version",
    "imagebuild lock --check --offline   # for CI",
)
def lock(
    select: SelectArgument = None,
    update: Annotated[
        list[str] | None,
        typer.Option(
            "--update", metavar="NAME", help="Pin a component, pin, base or address again. Repeat for several."
        ),
    ] = None,
    check: CheckOption = False,
    offline: OfflineOption = False,
    date: Annotated[
        datetime | None,
        typer.Option(
            "--date",
            metavar="YYYY-MM-DD",
            formats=["%Y-%m-%d"],
            help="Only set the date of the lock, than which no file of an image is younger.",
        ),
    ] = None,
    ca: CaOption = None,
    settings: SetOption = None,
    with_: WithOption = None,
    without: WithoutOption = None,
    matrix: MatrixOption = MATRIX,
    dockerfiles: DockerfilesOption = DOCKERFILES,
    lock: LockOption = BESIDE_MATRIX,
) -> None:
    """Pin every source by content: add what the lock lacks, remove what nothing uses."""
    from imagebuild.lock.lock import LockRun, check_lock, complete_lock, network_upstream, redate_lock, update_lock
    from imagebuild.project.plan import select_targets

    if offline and not check:
        raise ConfigError("--offline: needs --check; without a network nothing can be pinned")
    if check and update:
        raise ConfigError("--check and --update exclude each other")
    if date and (check or update):
        raise ConfigError("--date: excludes --check and --update; it changes nothing else in the lock")
    workspace = open_workspace(matrix, dockerfiles, lock, changes_of(settings, with_, without))
    whole = not (select or settings or with_ or without)
    targets = select_targets(workspace.plan, select or ())
    run = LockRun(workspace.project, workspace.renderer, targets, lock_path(matrix, lock))
    if date:
        redate_lock(run, date.date())
    elif check:
        if not check_lock(run, None if offline else network_upstream(ca), whole=whole):
            raise typer.Exit(1)
    elif update:
        update_lock(run, network_upstream(ca), update)
    else:
        complete_lock(run, network_upstream(ca), whole=whole)


@example("imagebuild bump", "imagebuild bump nccl ucx --write --relock")
def bump(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="PIN", help="Pins to look for newer versions of; by default all.")
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="Change the files instead of printing a diff.")] = False,
    relock: Annotated[bool, typer.Option("--relock", help="Pin the new versions' sources in the lock, too.")] = False,
    pre: Annotated[bool, typer.Option("--pre", help="Also propose releases that are not stable.")] = False,
    ca: CaOption = None,
    matrix: MatrixOption = MATRIX,
    dockerfiles: DockerfilesOption = DOCKERFILES,
    lock: LockOption = BESIDE_MATRIX,
) -> None:
    """Propose newer versions of the matrix's pins, as a diff."""
    from imagebuild.lock.lock import LockRun, bump_pins, network_upstream

    workspace = open_workspace(matrix, dockerfiles, lock)
    run = LockRun(workspace.project, workspace.renderer, workspace.plan.targets, lock_path(matrix, lock))
    bump_pins(run, network_upstream(ca), names or (), write=write, with_lock=relock, pre=pre)
