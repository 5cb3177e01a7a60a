"""The command line: reads arguments, prints, sets exit codes. What it prints is computed elsewhere."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from imagebuild import config, console, files, listing
from imagebuild import plan as planning
from imagebuild.console import err, out
from imagebuild.errors import CommandError, ConfigError, ImagebuildError
from imagebuild.models import Plan
from imagebuild.render import Renderer
from imagebuild.revision import Places

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
engine_app = typer.Typer(no_args_is_help=True, help="A private Docker Engine, for machines that have none.")
app.add_typer(engine_app, name="engine")

MatrixOption = Annotated[Path, typer.Option("--matrix", help="The matrix to read.", envvar="IMAGEBUILD_MATRIX")]
FolderOption = Annotated[Path, typer.Option("--dockerfiles", help="Folder of the templates and components.")]
LockOption = Annotated[Path, typer.Option("--lock", help="The lock; by default imagebuild.lock beside the matrix.")]
SelectArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[SELECT]...", help="Globs of target ids, and axis=value.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Give an axis values (a,b,…) or a pin a version."),
]
WithOption = Annotated[list[str] | None, typer.Option("--with", metavar="COMPONENT", help="Add a component.")]
WithoutOption = Annotated[list[str] | None, typer.Option("--without", metavar="COMPONENT", help="Leave out.")]
RegistryOption = Annotated[
    str | None,
    typer.Option("--registry", "--repository", metavar="R", help="Registry and folder of the images: ghcr.io/acme."),
]

DEFAULT_MATRIX = Path("matrix.yaml")
DEFAULT_FOLDER = Path("dockerfiles")
BESIDE_MATRIX = Path()


@dataclass(frozen=True)
class Work:
    """What every command starts from."""

    project: config.Project
    versions: planning.Pins
    plan: Plan

    @property
    def renderer(self) -> Renderer:
        return Renderer(self.project, self.versions)


def lock_path(matrix: Path, lock: Path) -> Path:
    """The lock that was named, or the one beside the matrix."""
    return matrix.parent / "imagebuild.lock" if lock == BESIDE_MATRIX else lock


def prepare(matrix: Path, dockerfiles: Path, lock: Path, changes: planning.Changes | None = None) -> Work:
    """Read the project and make its plan. Raises ConfigError."""
    project = config.load_project(matrix, dockerfiles, lock_path(matrix, lock))
    changes = changes or planning.Changes()
    if changes.repository:
        project = project.in_repository(changes.repository)
    return Work(project, planning.versions_with(project, changes), planning.make_plan(project, changes))


@app.callback()
def imagebuild(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Tested container images for GPU networking, from one matrix of versions."""


@app.command()
def plan(
    select: SelectArgument = None,
    as_json: Annotated[bool, typer.Option("--json", help="The full plan, or with --from the cost, as JSON.")] = False,
    github: Annotated[bool, typer.Option("--github", help="A GitHub Actions matrix.")] = False,
    why: Annotated[bool, typer.Option("--why", help="Also list what is not built, and why.")] = False,
    before: Annotated[
        str | None,
        typer.Option("--from", metavar="REF", help="What a build executes after that revision, folder, or `nothing`."),
    ] = None,
    after: Annotated[str | None, typer.Option("--to", metavar="REF", help="Instead of the working tree.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="With --from: for a pull request.")] = False,
    platform: Annotated[list[str] | None, typer.Option("--platform", help="With --from: only this.")] = None,
    base: Annotated[str, typer.Option("--base", help="With --from: as for build.")] = "bootstrap",
    timings: Annotated[Path, typer.Option("--timings", help="With --from: past builds.")] = Path("build"),
    settings: SetOption = None,
    matrix: MatrixOption = DEFAULT_MATRIX,
    dockerfiles: FolderOption = DEFAULT_FOLDER,
    lock: LockOption = BESIDE_MATRIX,
) -> None:
    """List the targets that a build would build, or say what a change makes it execute again."""
    if before or after or markdown or platform:
        from imagebuild import preview  # noqa: PLC0415 - others need it not

        form = preview.form_of(before, as_json=as_json, markdown=markdown, other=github or why)
        places = Places(matrix, dockerfiles, lock_path(matrix, lock))
        chosen = (select or (), settings or (), platform or (), base, timings)
        preview.show(preview.Wish(before or "", after, places, *chosen, form), prepare)
        return
    work = prepare(matrix, dockerfiles, lock, planning.parse_changes(settings or ()))
    if as_json:
        listing.as_json(work.plan, work.renderer, select or ())
    elif github:
        listing.as_github_matrix(work.plan, select or ())
    else:
        listing.as_table(work.plan, select or (), why=why)


@app.command()
def render(
    target: Annotated[str, typer.Argument(help="A target's id, or a glob that fits one.")],
    settings: SetOption = None,
    with_: WithOption = None,
    without: WithoutOption = None,
    base: Annotated[str | None, typer.Option("--base", metavar="IMAGE", help="Start from this image.")] = None,
    append: Annotated[Path | None, typer.Option("--append", metavar="FILE", help="Instructions to add.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write to a file.")] = None,
    matrix: MatrixOption = DEFAULT_MATRIX,
    dockerfiles: FolderOption = DEFAULT_FOLDER,
    lock: LockOption = BESIDE_MATRIX,
) -> None:
    """Print the self-contained Dockerfile of a target."""
    work = prepare(matrix, dockerfiles, lock, planning.parse_changes(settings or (), with_ or (), without or ()))
    chosen = planning.select_one(work.plan, target)
    text = work.renderer.dockerfile(chosen, base=base, append=files.read_text(append) if append else "").text
    if output:
        files.write_text(output, text)
    else:
        sys.stdout.write(text)


@app.command()
def build(
    select: SelectArgument = None,
    platform: Annotated[
        list[str] | None, typer.Option("--platform", help="Only this; `local` is this machine's.")
    ] = None,
    load: Annotated[bool, typer.Option("--load", help="Into the engine's image store (the default).")] = False,
    push: Annotated[bool, typer.Option("--push", help="Push by digest, to the staging repositories.")] = False,
    output: Annotated[Path | None, typer.Option("--output", metavar="DIR", help="OCI layouts in a folder.")] = None,
    registry: RegistryOption = None,
    compression: Annotated[
        str, typer.Option("--compression", metavar="NAME[:LEVEL]", help="Of layers that leave the engine: gzip, zstd.")
    ] = "gzip",
    builder: Annotated[str | None, typer.Option("--builder", help="Any builder of docker buildx.")] = None,
    source: Annotated[
        list[str] | None, typer.Option("--source", metavar="NAME=FOLDER", help="Source of a component.")
    ] = None,
    base: Annotated[str, typer.Option("--base", help="`bootstrap` from the archive, or `registry`.")] = "bootstrap",
    ca: Annotated[Path | None, typer.Option("--ca", metavar="FILE", help="CA bundle for steps that download.")] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Run every step again.")] = False,
    cache: Annotated[
        str | None, typer.Option("--cache", metavar="REPOSITORY", help="Take what is compiled from caches there.")
    ] = None,
    cache_write: Annotated[bool, typer.Option("--cache-write", help="And write them; for the main branch.")] = False,
    jobs: Annotated[int, typer.Option("--jobs", min=0, help="Targets built at a time; 0: all.")] = 0,
    stage: Annotated[str | None, typer.Option("--stage", help="Only this stage of the targets.")] = None,
    bundle: Annotated[Path | None, typer.Option("--bundle", metavar="DIR", help="Offline, from this bundle.")] = None,
    offline: Annotated[bool, typer.Option("--offline", help="From the bundle of `bundle use`.")] = False,
    settings: SetOption = None,
    with_: WithOption = None,
    without: WithoutOption = None,
    folder: Annotated[Path, typer.Option("--folder", help="Where Dockerfiles and results go.")] = Path("build"),
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="All output of all steps.")] = False,
    matrix: MatrixOption = DEFAULT_MATRIX,
    dockerfiles: FolderOption = DEFAULT_FOLDER,
    lock: LockOption = BESIDE_MATRIX,
) -> None:
    """Build targets with BuildKit."""
    from imagebuild import build as building  # noqa: PLC0415 - starts programs; others need it not
    from imagebuild import cli_bundle  # noqa: PLC0415 - needs what is in this module

    changes = planning.parse_changes(settings or (), with_ or (), without or (), repository=registry)
    work = prepare(matrix, dockerfiles, lock, changes)
    if sum((load, push, output is not None)) > 1:
        raise ConfigError("--load, --push and --output exclude each other")
    wish = building.Wish(
        targets=planning.select(work.plan, select or ()),
        platforms=tuple(platform or ()),
        output="push" if push else str(output.resolve()) if output else "load",
        packing=building.packing_of(work.project, compression),
        builder=builder,
        sources=tuple(source or ()),
        base=base,
        ca=ca,
        no_cache=no_cache,
        cache=cache,
        cache_write=cache_write,
        jobs=jobs,
        stage=stage,
        folder=folder,
        verbose=verbose,
        changes=changes,
        bundle=cli_bundle.chosen(bundle, offline),
    )
    building.build(work.project, work.renderer, wish)


@app.command()
def doctor() -> None:
    """Say what this machine has for building and checking, and how to get what it lacks."""
    from imagebuild import doctor as doctoring  # noqa: PLC0415 - starts programs

    findings = doctoring.examine()
    marks = {True: "[green]ok[/]", False: "[red]missing[/]", None: "[yellow]optional[/]"}
    console.table(("", "what", "found", "fix"), [(marks[f.ok], f.name, f.detail, f.fix) for f in findings])
    if any(f.ok is False for f in findings):
        raise typer.Exit(1)


@engine_app.command("up")
def engine_up() -> None:
    """Start the private engine; install it first where no usable engine is."""
    from imagebuild import engine, private_engine  # noqa: PLC0415 - starts programs

    try:
        found = engine.find(os.environ)
        if found.origin != "private":
            out.print(f"An engine answers at {found.host} ({found.origin}); nothing to do.")
            return
    except CommandError as error:
        err.print(f"No usable engine yet: {str(error).splitlines()[0]}", markup=False)
    _show_engine(private_engine.up())


@engine_app.command("status")
def engine_status() -> None:
    """Show the private engine."""
    from imagebuild import private_engine  # noqa: PLC0415 - starts programs

    _show_engine(private_engine.status())


@engine_app.command("down")
def engine_down(
    purge: Annotated[bool, typer.Option("--purge", help="Delete its images and cache too.")] = False,
) -> None:
    """Stop the private engine."""
    from imagebuild import private_engine  # noqa: PLC0415 - starts programs

    private_engine.down(purge=purge)
    out.print("The private engine is down" + (" and its data is deleted." if purge else "."))


def _show_engine(status: object) -> None:
    rows = [(name.replace("_", " "), str(value)) for name, value in vars(status).items() if value is not None]
    console.table(("private engine", ""), rows)


@cache
def register_topics() -> None:
    """Add the commands of other modules, once."""
    from imagebuild import (  # noqa: PLC0415 - need what is in this module
        cli_attest,
        cli_bundle,
        cli_diff,
        cli_job,
        cli_limits,
        cli_lock,
        cli_prune,
        cli_publish,
        cli_report,
        cli_sbom,
        cli_scan,
        cli_verify,
    )

    for topic in (
        cli_attest, cli_diff, cli_job, cli_limits, cli_lock, cli_prune, cli_publish, cli_report, cli_sbom, cli_scan,
        cli_verify,
    ):  # fmt: skip
        topic.register(app)
    app.add_typer(cli_bundle.app, name="bundle")


def main() -> None:
    """Run a command; errors that people meet become one message and an exit code."""
    # Being told to end is a reason to clean up, as Ctrl-C is.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    register_topics()
    try:
        app()
    except ImagebuildError as error:
        err.print(f"[red]error:[/] {escape(str(error))}")
        sys.exit(error.exit_code)
