"""`imagebuild publish`: arguments, help and exit status. What it does is in `publish`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from imagebuild import cli, files
from imagebuild import plan as planning
from imagebuild.errors import ConfigError
from imagebuild.fields import Platform

BUILD = Path("build")
"""Where builds leave their results unless they are told otherwise."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("publish")(publish_command)


def publish_command(
    select: cli.SelectArgument = None,
    registry: cli.RegistryOption = None,
    from_: Annotated[
        list[Path] | None,
        typer.Option("--from", metavar="FOLDER", help="Results of build, verify, … (build)."),
    ] = None,
    platform: Annotated[
        list[str] | None, typer.Option("--platform", help="An index of only these, on purpose.")
    ] = None,
    allow_dirty: Annotated[bool, typer.Option("--allow-dirty", help="Builds of no commit; their tags say so.")] = False,
    sign: Annotated[bool, typer.Option("--sign", help="With cosign, before tags are given; keyless in CI.")] = False,
    key: Annotated[str | None, typer.Option("--key", metavar="FILE", help="With --sign: by this key.")] = None,
    no_tlog: Annotated[bool, typer.Option("--no-tlog", help="With --sign: not into the transparency log.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done.")] = False,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Targets at a time.")] = 4,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write what was done.")] = None,
    settings: cli.SetOption = None,
    with_: cli.WithOption = None,
    without: cli.WithoutOption = None,
    matrix: cli.MatrixOption = cli.DEFAULT_MATRIX,
    dockerfiles: cli.FolderOption = cli.DEFAULT_FOLDER,
    lock: cli.LockOption = cli.BESIDE_MATRIX,
) -> None:
    """Give tags to images whose checks passed, and to nothing else.

    Exit status 0: all is published; 1: something was refused; 4: a registry failed.
    """
    from imagebuild import origins, signing  # noqa: PLC0415 - as below
    from imagebuild import publish as publishing  # noqa: PLC0415 - imports the docker SDK
    from imagebuild.publication import Tools  # noqa: PLC0415 - as above
    from imagebuild.registry import client  # noqa: PLC0415 - as above

    changes = planning.parse_changes(settings or (), with_ or (), without or (), repository=registry)
    work = cli.prepare(matrix, dockerfiles, lock, changes)
    wish = publishing.Wish(
        select=select or (), folders=from_ or (BUILD,), platforms=_platforms(platform or ()), jobs=jobs,
        allow_dirty=allow_dirty, dry_run=dry_run,
    )  # fmt: skip
    if (key or no_tlog) and not sign:
        raise ConfigError("--key and --no-tlog: they say how to --sign")
    connected: dict[str, client.Client] = {}
    tools = Tools(
        registry=lambda host: connected.get(host) or connected.setdefault(host, client.connect(host)),
        provenance=origins.provenance_with(work.renderer, allow_dirty=allow_dirty),
        sign=origins.signature_by(signing.Signer(key, log=not no_tlog)) if sign and not dry_run else None,
    )
    result = publishing.publish(work.project, work.plan, wish, tools)
    counts = sum((registry.wire.counts for registry in connected.values()), Counter[str]())
    result = result.model_copy(update={"requests": dict(sorted(counts.items()))})
    if json_file:
        files.write_text(json_file, result.model_dump_json(indent=1) + "\n")
    publishing.show(result, work.plan)
    if result.exit_status:
        raise typer.Exit(result.exit_status)


def _platforms(named: list[str] | tuple[str, ...]) -> tuple[Platform, ...]:
    known = get_args(Platform)
    for name in named:
        if name not in known:
            raise ConfigError(f"--platform {name}: is none; known: {', '.join(known)}")
    return tuple(cast(Platform, name) for name in named)
