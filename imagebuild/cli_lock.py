"""`imagebuild lock` and `imagebuild bump`: arguments and help. What they do is in `locking.commands`."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from imagebuild import cli
from imagebuild import plan as planning
from imagebuild.errors import ConfigError

BESIDE_MATRIX = cli.BESIDE_MATRIX
CaOption = Annotated[Path | None, typer.Option("--ca", metavar="FILE", help="CA bundle for downloads.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("lock")(lock_command)
    app.command("bump")(bump_command)


def lock_command(
    select: cli.SelectArgument = None,
    update: Annotated[
        list[str] | None,
        typer.Option("--update", metavar="NAME", help="Resolve anew what a component, pin, base or address has."),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit status 1 if it is not right.")] = False,
    offline: Annotated[bool, typer.Option("--offline", help="With --check: do not ask upstream.")] = False,
    date: Annotated[
        datetime | None,
        typer.Option(
            "--date", formats=["%Y-%m-%d"], help="Only set the date that no file of an image is younger than."
        ),
    ] = None,
    ca: CaOption = None,
    settings: cli.SetOption = None,
    with_: cli.WithOption = None,
    without: cli.WithoutOption = None,
    matrix: cli.MatrixOption = cli.DEFAULT_MATRIX,
    dockerfiles: cli.FolderOption = cli.DEFAULT_FOLDER,
    lock: cli.LockOption = BESIDE_MATRIX,
) -> None:
    """Pin every source by content: add what the lock lacks, remove what nothing uses."""
    from imagebuild.locking import commands  # noqa: PLC0415 - others need no HTTP client

    if offline and not check:
        raise ConfigError("--offline: only with --check; without upstream nothing can be pinned")
    if check and update:
        raise ConfigError("--check and --update exclude each other")
    if date and (check or update):
        raise ConfigError("--date: alone; it changes nothing else in the lock")
    changes = planning.parse_changes(settings or (), with_ or (), without or ())
    work = cli.prepare(matrix, dockerfiles, lock, changes)
    whole = not (select or settings or with_ or without)
    job = commands.Job(
        work.project, work.renderer, planning.select(work.plan, select or ()), cli.lock_path(matrix, lock)
    )
    if date:
        commands.redate(job, date.date())
    elif check:
        if not commands.check(job, None if offline else commands.upstream(ca), whole=whole):
            raise typer.Exit(1)
    elif update:
        commands.update(job, commands.upstream(ca), update)
    else:
        commands.complete(job, commands.upstream(ca), whole=whole)


def bump_command(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Pins; by default all.")] = None,
    write: Annotated[bool, typer.Option("--write", help="Change the files instead of printing a diff.")] = False,
    with_lock: Annotated[bool, typer.Option("--lock", help="Resolve the new versions for the lock too.")] = False,
    pre: Annotated[bool, typer.Option("--pre", help="Also releases that are not stable.")] = False,
    ca: CaOption = None,
    matrix: cli.MatrixOption = cli.DEFAULT_MATRIX,
    dockerfiles: cli.FolderOption = cli.DEFAULT_FOLDER,
    lock: Annotated[
        Path, typer.Option("--lock-file", help="The lock; by default imagebuild.lock beside the matrix.")
    ] = BESIDE_MATRIX,
) -> None:
    """Propose newer versions of the matrix's pins, as a diff."""
    from imagebuild.locking import commands  # noqa: PLC0415 - others need no HTTP client

    work = cli.prepare(matrix, dockerfiles, lock)
    job = commands.Job(work.project, work.renderer, work.plan.targets, cli.lock_path(matrix, lock))
    commands.bump(job, commands.upstream(ca), names or (), write=write, with_lock=with_lock, pre=pre)
