"""`imagebuild bundle`: all that builds fetch in one folder, for machines without a network."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from imagebuild import bake, cli, console, inputs, settings
from imagebuild import plan as planning
from imagebuild.bundle import Bundle, Recording
from imagebuild.console import err, out
from imagebuild.errors import ConfigError, ResultError
from imagebuild.fields import Platform

app = typer.Typer(no_args_is_help=True, help="All that builds fetch in one folder, for machines without a network.")

FolderArgument = Annotated[Path, typer.Argument(metavar="DIR", help="The bundle's folder.")]


@app.command()
def create(
    directory: FolderArgument,
    select: cli.SelectArgument = None,
    platform: Annotated[
        list[str] | None, typer.Option("--platform", help="Only this; `local` is this machine's.")
    ] = None,
    base: Annotated[str, typer.Option("--base", help="`bootstrap` from the archive, or `registry`.")] = "bootstrap",
    ca: Annotated[Path | None, typer.Option("--ca", metavar="FILE", help="CA bundle for downloads.")] = None,
    settings_: cli.SetOption = None,
    with_: cli.WithOption = None,
    without: cli.WithoutOption = None,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="All output of all steps.")] = False,
    matrix: cli.MatrixOption = cli.DEFAULT_MATRIX,
    dockerfiles: cli.FolderOption = cli.DEFAULT_FOLDER,
    lock: cli.LockOption = cli.BESIDE_MATRIX,
) -> None:
    """Build targets from the beginning, and keep everything that this fetches."""
    from imagebuild import build as building  # noqa: PLC0415 - starts programs; others need it not

    changes = planning.parse_changes(settings_ or (), with_ or (), without or ())
    work = cli.prepare(matrix, dockerfiles, lock, changes)
    targets = planning.select(work.plan, select or ())
    platforms = tuple(building.native_platform() if p == "local" else p for p in platform or ())
    keys: dict[str, set[Platform]] = {}
    for target in targets:
        for key in work.renderer.dockerfile(target).stages.values():
            keys.setdefault(key, set()).update(bake.platforms_of(target, platforms))
    record = Recording.start(directory, keys)
    with tempfile.TemporaryDirectory(prefix="imagebuild-") as folder:
        wish = building.Wish(
            targets=targets,
            platforms=platforms,
            output="cacheonly",
            base=base,
            ca=ca,
            no_cache=True,  # a step that is cached fetches nothing
            folder=Path(folder),
            verbose=verbose,
            changes=changes,
            record=record,
        )
        building.build(work.project, work.renderer, wish)
    files = Bundle.read(directory).manifest.files.values()
    size = sum(file.size for file in files)
    out.print(f"{directory}: {len(files)} downloads of {console.size(size)}, for {len(targets)} targets", markup=False)


@app.command()
def verify(
    directory: FolderArgument,
    settings_: cli.SetOption = None,
    with_: cli.WithOption = None,
    without: cli.WithoutOption = None,
    matrix: cli.MatrixOption = cli.DEFAULT_MATRIX,
    dockerfiles: cli.FolderOption = cli.DEFAULT_FOLDER,
    lock: cli.LockOption = cli.BESIDE_MATRIX,
) -> None:
    """Check a bundle against its manifest and the lock, and list the targets that it serves."""
    bundle = Bundle.read(directory)
    if found := bundle.damage(lambda text: err.print(text, markup=False)):
        raise ResultError("\n".join(found))
    changes = planning.parse_changes(settings_ or (), with_ or (), without or ())
    work = cli.prepare(matrix, dockerfiles, lock, changes)
    served, wrong = [], []
    for target in work.plan.targets:
        stages = work.renderer.dockerfile(target).stages
        platforms = tuple(p for p in target.platforms if not bundle.lacks(stages, [p]))
        if not platforms:
            continue
        need = inputs.needs(work.renderer.recipe(target), work.project.lock, stages, platforms)
        wrong += [f"{target.id}: the bundle has {text}" for text in bundle.contradictions(need)]
        served.append((target.id, ", ".join(p.removeprefix("linux/") for p in platforms)))
    if wrong:
        raise ResultError("\n".join(wrong))
    if not served:
        raise ConfigError(f"{directory}: whole, but of other versions than this project: it serves no target")
    console.table(("serves", "platforms"), served)
    out.print(f"{directory}: whole; made {bundle.manifest.created}", markup=False)


@app.command()
def use(directory: FolderArgument) -> None:
    """Let `imagebuild build --offline` take this bundle."""
    bundle = Bundle.read(directory)
    file = settings.remember_bundle(os.environ, bundle.folder)
    out.print(f"{file}: bundle: {bundle.folder}", markup=False)


def chosen(directory: Path | None, offline: bool) -> Bundle | None:
    """The bundle that a build shall take: the one named, or with `offline` the one of the configuration."""
    if directory is None and not offline:
        return None
    if directory is None:
        found = settings.load(os.environ).bundle
        if not found:
            raise ConfigError("--offline: no bundle is set; name one with --bundle DIR, or `imagebuild bundle use DIR`")
        directory = Path(found).expanduser()
    return Bundle.read(directory)
