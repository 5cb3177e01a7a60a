"""Declare the options that several commands share, once, and read the project that they lead to."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperGroup

from imagebuild.core.errors import ConfigError

if TYPE_CHECKING:
    from imagebuild.core.fields import Platform
    from imagebuild.project.load import Project
    from imagebuild.project.matrix import Plan
    from imagebuild.project.plan import Changes, Pins
    from imagebuild.project.revision import ProjectPaths
    from imagebuild.publish.attest import Signer
    from imagebuild.render.renderer import Renderer

STDOUT = "-"
"""As the name of a file: the standard output."""
BUILDS = Path("build")
"""Folder in which builds leave Dockerfiles, layouts and results, unless `--folder` names another one."""
MATRIX, DOCKERFILES, PROFILES = Path("matrix.yaml"), Path("dockerfiles"), Path("profiles")
BESIDE_MATRIX = Path()
"""Default of `--lock`: the file imagebuild.lock beside the matrix."""

# The project, and what the command line changes about it
SelectArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="TARGET", help="Globs of target ids, names of images, and AXIS=VALUE; by default all."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Give an axis other values (a,b,…), or a pin another version."),
]
WithOption = Annotated[
    list[str] | None, typer.Option("--with", metavar="COMPONENT", help="Add a component to every image.")
]
WithoutOption = Annotated[
    list[str] | None, typer.Option("--without", metavar="COMPONENT", help="Leave a component out of every image.")
]
MatrixOption = Annotated[
    Path, typer.Option("--matrix", metavar="FILE", envvar="IMAGEBUILD_MATRIX", help="Matrix to read.")
]
DockerfilesOption = Annotated[
    Path, typer.Option("--dockerfiles", metavar="DIR", help="Folder of templates and components.")
]
LockOption = Annotated[
    Path,
    typer.Option(
        "--lock", metavar="FILE", show_default=False, help="Lock to use; by default imagebuild.lock beside the matrix."
    ),
]
RegistryOption = Annotated[
    str | None,
    typer.Option("--registry", metavar="HOST/PATH", help="Registry and folder of the images, such as ghcr.io/acme."),
]

# Images, and where they are
ImageArgument = Annotated[
    str,
    typer.Argument(
        metavar="IMAGE", help="A target's id, a tag or digest in the engine or a registry, an OCI layout or archive."
    ),
]
PlatformsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--platform", metavar="OS/ARCH", help="Only this platform; `local` is this machine's. Repeat it for several."
    ),
]
PlatformOption = Annotated[
    str | None,
    typer.Option("--platform", metavar="OS/ARCH", help="The platform to take of an image that is for several."),
]
FolderOption = Annotated[
    Path, typer.Option("--folder", metavar="DIR", help="Folder in which builds leave Dockerfiles and results.")
]
BaseOption = Annotated[
    str,
    typer.Option(
        "--base",
        metavar="bootstrap|registry",
        help="Make base images from the distribution's archive, or pull them from their registry.",
    ),
]
CaOption = Annotated[Path | None, typer.Option("--ca", metavar="FILE", help="Bundle of CA certificates for downloads.")]
OfflineOption = Annotated[bool, typer.Option("--offline", help="Use no network.")]
VerboseOption = Annotated[bool, typer.Option("-v", "--verbose", help="Print the whole output of all steps.")]

# Hardware
ProfileOption = Annotated[
    str | None, typer.Option("--profile", metavar="NAME", help="Hardware to compare speeds with, a file of profiles/.")
]
ProfilesOption = Annotated[Path, typer.Option("--profiles", metavar="DIR", help="Folder of profiles.")]

# Signatures
SignOption = Annotated[bool, typer.Option("--sign", help="Sign with cosign; in CI without a key.")]
SigningKeyOption = Annotated[
    str | None, typer.Option("--key", metavar="FILE", help="With --sign: sign with this private key.")
]
UnloggedOption = Annotated[
    bool, typer.Option("--no-tlog", help="With --sign: leave the signature out of the transparency log.")
]

# What a command writes
JsonOption = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE|-", help="Write the result as JSON to a file; `-` prints nothing else."),
]
OutputOption = Annotated[
    str | None, typer.Option("-o", "--output", metavar="FILE", help="Write to a file instead of the standard output.")
]
CheckOption = Annotated[
    bool, typer.Option("--check", help="Write nothing; end with exit status 1 if something is not as it should be.")
]
MarkdownOption = Annotated[bool, typer.Option("--markdown", help="Print Markdown, for a pull request.")]

Command = TypeVar("Command", bound=Callable[..., object])


def examples(*lines: str) -> str:
    """Return the end of a command's help: lines that are each a command line with a comment."""
    return "Examples:\n\n\b\n" + "\n".join(f"  {line}" for line in lines)


def example(*lines: str) -> Callable[[Command], Command]:
    """Return a decorator that gives a command `examples` for its help."""

    def add(command: Command) -> Command:
        vars(command)["epilog"] = examples(*lines)
        return command

    return add


class CommandGroup(TyperGroup):
    """A group of commands whose help says the whole first line of each, where typer would cut it."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands with the first line of their help."""
        with formatter.section("Commands"):
            formatter.write_dl([(n, (c.help or "").split("\n")[0]) for n, c in self.commands.items()])


def command_group(summary: str) -> typer.Typer:
    """Return an empty group of commands."""
    return typer.Typer(
        cls=CommandGroup, no_args_is_help=True, add_completion=False, rich_markup_mode=None, help=summary
    )


@dataclass(frozen=True)
class Workspace:
    """A project that was read, its plan, and the pins that the plan was made with."""

    project: Project
    versions: Pins
    plan: Plan

    @cached_property
    def renderer(self) -> Renderer:
        """Return what renders this project's targets."""
        from imagebuild.render.renderer import Renderer

        return Renderer(self.project, self.versions)


def lock_path(matrix: Path, lock: Path) -> Path:
    """Return the lock that was named, or the one beside the matrix."""
    return matrix.parent / "imagebuild.lock" if lock == BESIDE_MATRIX else lock


def project_paths(matrix: Path, dockerfiles: Path, lock: Path) -> ProjectPaths:
    """Return where the project's files are."""
    from imagebuild.project.revision import ProjectPaths

    return ProjectPaths(matrix, dockerfiles, lock_path(matrix, lock))


def open_workspace(matrix: Path, dockerfiles: Path, lock: Path, changes: Changes | None = None) -> Workspace:
    """Read a project and make its plan. Raises ConfigError with every mistake in the files."""
    from imagebuild.project.load import load_project
    from imagebuild.project.plan import Changes, make_plan, versions_with

    project = load_project(matrix, dockerfiles, lock_path(matrix, lock))
    changes = changes or Changes()
    if changes.repository:
        project = project.in_repository(changes.repository)
    return Workspace(project, versions_with(project, changes), make_plan(project, changes))


def open_if_there(matrix: Path, dockerfiles: Path, lock: Path) -> Workspace | None:
    """Read the project, for commands that also work without one; None if the default matrix does not exist."""
    if matrix == MATRIX and not matrix.exists():
        return None
    return open_workspace(matrix, dockerfiles, lock)


def changes_of(
    settings: Sequence[str] | None = None,
    with_: Sequence[str] | None = None,
    without: Sequence[str] | None = None,
    *,
    registry: str | None = None,
) -> Changes:
    """Return what --set, --with, --without and --registry change. Raises ConfigError for what they cannot be."""
    from imagebuild.project.plan import parse_changes

    return parse_changes(settings or (), with_ or (), without or (), repository=registry)


def parse_platforms(names: Sequence[str] | None) -> tuple[Platform, ...]:
    """Return the platforms of --platform, with this machine's for `local`. Raises ConfigError for an unknown one."""
    from typing import cast, get_args

    from imagebuild.core.fields import Platform
    from imagebuild.core.run import native_platform

    platforms = [native_platform() if name == "local" else name for name in names or ()]
    known = get_args(Platform)
    for name in platforms:
        if name not in known:
            raise ConfigError(f"--platform {name}: unknown platform; use {', '.join(known)} or local")
    return cast(tuple[Platform, ...], tuple(platforms))


def signer_of(key: str | None, *, sign: bool, log: bool) -> Signer | None:
    """Return who signs, None without --sign. Raises ConfigError or CommandError if that could not sign anything."""
    from imagebuild.publish.attest import Signer

    if not sign:
        if key or not log:
            raise ConfigError("--key and --no-tlog: need --sign")
        return None
    signer = Signer(key, log)
    signer.check()
    return signer


def print_or_write(text: str, output: str | None) -> None:
    """Print a text as it is, or write it to the file of --output. Raises ConfigError if it cannot be written."""
    from imagebuild.core.files import write_text

    if output in (None, STDOUT):
        sys.stdout.write(text)
    else:
        write_text(Path(str(output)), text)


def print_result(json_file: str | None, as_json: Callable[[], str], show: Callable[[], None]) -> None:
    """Write a result to the file of --json, and show it to people unless the JSON is on the standard output."""
    if json_file is not None:
        print_or_write(as_json() + "\n", json_file)
    if json_file != STDOUT:
        show()
