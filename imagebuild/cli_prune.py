"""`imagebuild prune`: arguments and printing. What it does is in `prune`, why in `retention`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import cache
from typing import Annotated

import typer

from imagebuild import cli, console, retention, staging
from imagebuild import plan as planning
from imagebuild.config import suggestion
from imagebuild.console import err, out
from imagebuild.errors import ConfigError
from imagebuild.prune import Pruning
from imagebuild.registry import reference
from imagebuild.registry.base import Registry
from imagebuild.registry.copy import Place
from imagebuild.retention import Verdict

OLDER_THAN = "14d"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("prune")(prune_command)


def prune_command(
    images: Annotated[list[str] | None, typer.Argument(metavar="[IMAGE]...", help="Globs of images' names.")] = None,
    registry: cli.RegistryOption = None,
    older_than: Annotated[
        str, typer.Option("--older-than", metavar="AGE", help="What was pushed since stays: 36h, 14d, 2w.")
    ] = OLDER_THAN,
    yes: Annotated[bool, typer.Option("--yes", help="Delete; without it, only list.")] = False,
    matrix: cli.MatrixOption = cli.DEFAULT_MATRIX,
    dockerfiles: cli.FolderOption = cli.DEFAULT_FOLDER,
    lock: cli.LockOption = cli.BESIDE_MATRIX,
) -> None:
    """List what builds pushed and nobody needs any more, and delete it with --yes."""
    from imagebuild.registry import client  # noqa: PLC0415 - imports the docker SDK

    limit = retention.age(older_than)
    work = cli.prepare(matrix, dockerfiles, lock, planning.parse_changes((), repository=registry))
    connected = cache(client.connect)
    now = datetime.now(UTC)
    deletable = 0
    for image in _chosen(work, images or ()):
        pruning = Pruning(*_places(work, image, connected), limit, now)
        verdicts = retention.decide(pruning.survey(), now, limit)
        _show(pruning.staging, verdicts)
        able = [v for v in verdicts if not v.kept]
        deletable += len(able)
        if yes and able:
            gone, spared = pruning.delete(able)
            for verdict in spared:
                err.print(f"kept after all: {verdict.staged.digest} {verdict.kept}", markup=False)
            done = _count(len(able) - len(spared), "image")
            out.print(f"Deleted {done}, {_count(gone, 'manifest')} of {pruning.staging}.", markup=False)
    if deletable and not yes:
        out.print(f"{deletable} would be deleted; add --yes to delete them.")
    elif not deletable:
        out.print("Nothing to delete.")


def _chosen(work: cli.Work, globs: Iterable[str]) -> list[str]:
    known = list(work.project.matrix.model.images)
    globs = tuple(globs)
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in known):
            raise ConfigError(f"{glob}: no such image{suggestion(glob, known)}")
    return [name for name in known if not globs or any(fnmatchcase(name, glob) for glob in globs)]


def _places(work: cli.Work, image: str, connect: Callable[[str], Registry]) -> tuple[Place, tuple[Place, ...]]:
    """The staging repository of an image, and those that its tags are in."""

    def place(name: str) -> Place:
        found = reference.parse(name)
        return Place(connect(found.host), found.repository)

    model = work.project.matrix.model
    named = [f"{model.repository}/{image}"]
    for target in work.plan.targets:
        if target.image == image:
            named += [tag.rpartition(":")[0] for tag in (*target.tags, *target.aliases)]
    return place(staging.repository_name(work.project, image)), tuple(place(name) for name in dict.fromkeys(named))


def _show(where: Place, verdicts: tuple[Verdict, ...]) -> None:
    if not verdicts:
        out.print(f"{where}: nothing was pushed.", markup=False)
        return
    out.print(f"{where}: {len(verdicts)} pushed, {sum(not v.kept for v in verdicts)} to delete", markup=False)
    console.table(("digest", "pushed", "verdict"), [_row(verdict) for verdict in verdicts])


def _row(verdict: Verdict) -> tuple[str, str, str]:
    parts = (("platform", verdict.parts), ("attachment", verdict.attachments))
    taken = [_count(len(things), name) for name, things in parts if things]
    text = f"kept: {verdict.kept}" if verdict.kept else "delete" + (f", with {' and '.join(taken)}" if taken else "")
    staged = verdict.staged
    return retention.short(staged.digest), f"{staged.pushed:%Y-%m-%d %H:%M}", text


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
