"""Declare the options that several commands share, once, and read the project that they lead to."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast, get_args, get_type_hints

import typer
from typer.core import TyperCommand

from imagebuild.core.errors import ConfigError, ImagebuildError

if TYPE_CHECKING:
    from imagebuild.core.fields import Platform
    from imagebuild.project.changes import Changes
    from imagebuild.project.plan import Plan, Target
    from imagebuild.project.project import Project
    from imagebuild.publish.signatures import Signer
    from imagebuild.render.renderer import Renderer

STDIN = STDOUT = "-"
"""As the name of a file: the standard input or output."""
BUILDS = Path("build")
"""Folder in which builds leave Dockerfiles, layouts and results, unless `--folder` names another one."""
MATRIX = Path("matrix.yaml")
PROJECT_VARIABLE = "IMAGEBUILD_PROJECT"
DAY = ["%Y-%m-%d"]
"""The `formats` of an option that is a day."""


def option(usage: str, text: str, default: Any = ..., *, completes: str = "", **more: Any) -> Any:
    """Return an option as the help shows it: `--push`, or `-o, --output FILE`. `more` is typer's.

    It is the default of a command's parameter, or in a type that several have: then the default is the parameter's.
    `completes` is the kind of names that a shell completes: `targets`, `components`, or a folder as `jobs/clusters`.
    """
    words = usage.replace(", ", " ").split(" ")
    names = [word for word in words if word.startswith("-")]
    metavar = " ".join(words[len(names) :]) or None
    complete = (lambda incomplete: names_beginning(completes, incomplete)) if completes else None
    return typer.Option(default, *names, metavar=metavar, help=text, autocompletion=complete, **more)


def argument(metavar: str, text: str, default: Any = ..., *, completes: str = "") -> Any:
    """Return an argument as the help shows it; `default` and `completes` as of `option`."""
    complete = (lambda incomplete: names_beginning(completes, incomplete)) if completes else None
    return typer.Argument(default, metavar=metavar, help=text, autocompletion=complete)


def names_beginning(kind: str, incomplete: str) -> list[str]:
    """Return names of a kind, in the project of the current folder or of IMAGEBUILD_PROJECT, with this beginning."""
    from imagebuild.core.files import shipped_folder

    root = os.environ.get(PROJECT_VARIABLE)
    project = ProjectFiles(Path(root) if root else None if MATRIX.exists() else shipped_folder())
    folder, _, inner = kind.partition("/")
    try:
        if kind == "targets":
            known = [name for target in project.open().plan.targets for name in (target.image, target.id)]
        elif kind == "components":
            known = sorted(project.open().project.components)
        else:
            known = sorted(file.stem for top in data_folders(None, folder) for file in (top / inner).glob("*.yaml"))
    except ImagebuildError:
        return []  # the command itself will say what is wrong
    return [name for name in dict.fromkeys(known) if name.startswith(incomplete)]


# The project, and what the command line changes about it
Repeated = list[str] | None
"""Of what can be given several times."""
SelectArgument = Annotated[
    Repeated,
    argument("TARGET", "Globs of target ids, names of images, or AXIS=VALUE; by default all.", completes="targets"),
]
RegistryOption = Annotated[
    str | None, option("--registry HOST/PATH", "Registry and folder of the images, such as ghcr.io/acme.")
]

# Images, and where they are
ImageArgument = Annotated[str, argument("IMAGE", "A target, tag, digest, OCI layout or archive.", completes="targets")]
PlatformsOption = Annotated[
    Repeated, option("--platform OS/ARCH", "Only this platform; `local` is this machine's. Repeat it for several.")
]
PlatformOption = Annotated[str | None, option("--platform OS/ARCH", "Platform of an image that is for several.")]
FolderOption = Annotated[Path, option("--folder DIR", "Folder in which builds leave Dockerfiles and results.")]
BaseOption = Annotated[
    Literal["bootstrap", "registry"],
    option("--base bootstrap|registry", "Make base images from the distribution's archive, or pull them."),
]
CaOption = Annotated[Path | None, option("--ca FILE", "Bundle of CA certificates for downloads.")]
OfflineOption = Annotated[bool, option("--offline", "Use no network.")]
VerboseOption = Annotated[bool, option("-v, --verbose", "Print the whole output of all steps.")]

# Hardware
ProfileOption = Annotated[
    str | None, option("--profile NAME", "Hardware to compare speeds with, a file of profiles/.", completes="profiles")
]
ProfilesOption = Annotated[Path | None, option("--profiles DIR", "Read the profiles of this folder alone.")]

# What a command writes
JsonOption = Annotated[
    str | None, option("--json FILE|-", "Write the result as JSON to a file; with `-`, print it and nothing else.")
]
OutputOption = Annotated[str | None, option("-o, --output FILE", "Write to a file instead of the standard output.")]
CheckOption = Annotated[
    bool, option("--check", "Write nothing; end with exit status 1 if something is not as it should be.")
]
MarkdownOption = Annotated[bool, option("--markdown", "Print Markdown, for a pull request.")]

Command = TypeVar("Command", bound=Callable[..., object])


class StrictCommand(TyperCommand):
    """Refuse an option that is given twice where only one value counts: the last one would win without a word."""

    def __init__(self, *names: Any, **settings: Any) -> None:
        super().__init__(*names, **settings)
        for parameter in self.params:
            if parameter.param_type_name == "argument":
                # The metavar says more than Python's name of the type.
                vars(parameter)["display_type_rich"] = lambda **_: ""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments. Raises ConfigError for an option that is there twice."""
        if not ctx.resilient_parsing:
            _, _, given = cast(Any, self.make_parser(ctx)).parse_args(list(args))
            for parameter in given:
                single = parameter.param_type_name == "option" and not (parameter.multiple or parameter.is_flag)
                if single and given.count(parameter) > 1:
                    raise ConfigError(f"{parameter.opts[-1]}: given twice; leave one out")
        return super().parse_args(ctx, args)


def command_group(summary: str | None = None) -> typer.Typer:
    return typer.Typer(no_args_is_help=bool(summary), add_completion=False, rich_markup_mode=None, help=summary)


def subcommand(group: typer.Typer, name: str, *examples: str) -> Callable[[Command], Command]:
    """Return a decorator that adds a command to a group; its help ends with command lines as examples."""

    def add(command: Command) -> Command:
        summary = (command.__doc__ or "").split("\n")[0]  # typer would cut it
        epilog = "Examples:\n\n\b\n" + "\n".join(f"  {line}" for line in examples)
        group.command(name, cls=StrictCommand, short_help=summary, epilog=epilog)(expand_groups(command))
        return command

    return add


def example(*lines: str) -> Callable[[Callable[..., object]], typer.Typer]:
    """Return a decorator that makes a function the only command of a group, with these examples in its help."""

    def make(command: Callable[..., object]) -> typer.Typer:
        group = command_group()
        subcommand(group, command.__name__, *lines)(command)
        return group

    return make


def expand_groups(command: Command) -> Command:
    """Return a command with an option for each field of its parameters that are dataclasses, as `ProjectFiles`."""
    hints = get_type_hints(command, include_extras=True)
    groups = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    parameters = [
        parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name])
        for name, parameter in signature(command).parameters.items()
        if name not in groups
    ]
    for kind in groups.values():
        types = get_type_hints(kind, include_extras=True)
        for field in fields(kind):
            option = Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=types[field.name])
            parameters.append(option)

    @wraps(command)
    def call(**given: Any) -> object:
        for name, kind in groups.items():
            values = {field.name: given.pop(field.name) for field in fields(kind)}
            given[name] = cast(Callable[..., object], kind)(**values)
        return command(**given)

    vars(call)["__signature__"] = Signature(parameters)
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return cast(Command, call)


@dataclass(frozen=True)
class Workspace:
    """Hold a project that was read, with the changes of the command line, and its plan."""

    project: Project
    plan: Plan

    @cached_property
    def renderer(self) -> Renderer:
        from imagebuild.render.renderer import Renderer

        return Renderer(self.project)


@dataclass(frozen=True)
class ProjectFiles:
    """Hold the option that says where the project is."""

    root: Annotated[
        Path | None, option("--project DIR", "Folder of the project; by default this one.", envvar=PROJECT_VARIABLE)
    ] = None

    @property
    def words(self) -> tuple[str, ...]:
        """Return the option, if it was given, as words of a command line."""
        return ("--project", str(self.root)) if self.root else ()

    @property
    def is_shipped(self) -> bool:
        """Return whether no project is named and none is here, so that the one that comes with imagebuild is read."""
        return not (self.root or os.path.lexists(MATRIX))

    @cached_property
    def folder(self) -> Path:
        """Return the project's folder. Say so if it is the one that comes with imagebuild."""
        from imagebuild.core.files import shipped_folder

        if self.is_shipped:
            sys.stderr.write(
                f"{Path.cwd()} has no {MATRIX}, so these are the images that come with imagebuild; "
                f"--project DIR or {PROJECT_VARIABLE} names your project\n"
            )
            return shipped_folder()
        return self.root or Path()

    def open(self, changes: Changes | None = None) -> Workspace:
        """Read the project and make its plan. Raises ConfigError with every mistake."""
        from imagebuild.project.changes import Changes
        from imagebuild.project.load import load_project
        from imagebuild.project.plan import make_plan

        project = load_project(self.folder).changed(changes or Changes())
        return Workspace(project, make_plan(project))

    def open_own(self, changes: Changes | None = None) -> Workspace:
        """Read a project whose files the command changes. Raises ConfigError if there is none here."""
        if self.is_shipped:
            how = "`imagebuild init` makes a project, --project names its folder"
            raise ConfigError(f"{MATRIX}: cannot be read: no such file here; {how}")
        return self.open(changes)


@dataclass(frozen=True)
class PlanChanges:
    """Hold the options that change the project without editing its files."""

    settings: Annotated[
        Repeated, option("--set NAME=VALUE", "Give an axis other values (a,b,…), or a pin another version.")
    ] = None
    with_: Annotated[Repeated, option("--with COMPONENT", "Add it to every image.", completes="components")] = None
    without: Annotated[
        Repeated, option("--without COMPONENT", "Leave it out of every image.", completes="components")
    ] = None

    def parse(self, registry: str | None = None) -> Changes:
        """Return what these options and --registry change. Raises ConfigError for a wrong value."""
        from imagebuild.project.changes import parse_changes

        return parse_changes(self.settings or (), self.with_ or (), self.without or (), repository=registry)

    def __bool__(self) -> bool:
        return bool(self.settings or self.with_ or self.without)


@dataclass(frozen=True)
class ImageChanges(PlanChanges):
    """Hold the options that change the project and the Dockerfiles of its images."""

    base_image: Annotated[
        str | None, option("--base-image IMAGE", "Start from this image, not from the target's base.")
    ] = None
    append: Annotated[
        Path | None, option("--append FILE|-", "Add this file's instructions at the end; their CMD, ENV and LABEL win.")
    ] = None

    def parse(self, registry: str | None = None) -> Changes:
        """Return what these options and --registry change. Raises ConfigError for a wrong value."""
        from imagebuild.core.files import read_text
        from imagebuild.project.matrix import IMAGE
        from imagebuild.render.stages import check_appended

        if self.base_image is not None and not IMAGE.fits(self.base_image):
            raise ConfigError(f"--base-image {self.base_image}: not an image such as ubuntu:24.04")
        changes = replace(super().parse(registry), base_image=self.base_image)
        if self.append is None:
            return changes
        text = sys.stdin.read() if str(self.append) == STDIN else read_text(self.append)
        check_appended(text, f"--append {self.append}")
        return replace(changes, append=str(self.append), appended=text)

    def check_base(self, targets: Iterable[Target], *, pinned: bool) -> None:
        """Raise ConfigError if the other base, by its name, is of another release, or needs a digest."""
        from imagebuild.project.contradictions import base_mismatch

        if self.base_image is None:
            return
        if pinned and "@sha256:" not in self.base_image:
            problem = "nothing would verify it; add its digest, IMAGE:TAG@sha256:…"
            raise ConfigError(f"--base-image {self.base_image}: {problem}")
        for target in targets:
            if problem := base_mismatch(self.base_image, target.axes["os"]):
                raise ConfigError(f"--base-image {self.base_image}: {problem}")


@dataclass(frozen=True)
class TrustOptions:
    """Hold the options that say whose signatures count."""

    key: Annotated[str | None, option("--key FILE", "Key that signs with --sign, else the public key.")] = None
    identity: Annotated[
        str | None, option("--certificate-identity ID", "Identity that signs, or must have signed, without a key.")
    ] = None
    issuer: Annotated[str | None, option("--certificate-oidc-issuer URL", "OIDC issuer of that identity.")] = None
    no_tlog: Annotated[bool, option("--no-tlog", "Do without the public transparency log of signatures.")] = False

    def trusted(self) -> Signer | None:
        """Return who is trusted, None if nobody is named. Raises ConfigError or CommandError as `Signer.check` does."""
        return self._signer(signs=False) if self.key or self.identity or self.issuer else None

    def _signer(self, *, signs: bool) -> Signer:
        from imagebuild.publish.signatures import Signer

        signer = Signer(self.key, self.identity, self.issuer, not self.no_tlog, signs=signs)
        signer.check()
        return signer


@dataclass(frozen=True)
class SignOptions(TrustOptions):
    """Hold the options that say who signs."""

    sign: Annotated[bool, option("--sign", "Sign with cosign; in CI without a key.")] = False

    def signer(self) -> Signer | None:
        """Return who signs, None without --sign; a job of GitHub knows its identity.

        Raises ConfigError or CommandError if that could not sign anything.
        """
        from imagebuild.publish.signatures import GITHUB_ISSUER, job_workflow

        if not self.sign:
            if self != SignOptions():
                raise ConfigError("--key, --certificate-identity and --no-tlog: need --sign")
            return None
        named = self
        if not (self.key or self.identity) and (workflow := job_workflow(os.environ)):
            named = replace(self, identity=f"{os.environ['GITHUB_SERVER_URL']}/{workflow}", issuer=GITHUB_ISSUER)
        return named._signer(signs=True)


def data_folders(given: Path | None, kind: str, project: Path | None = None) -> tuple[Path, ...]:
    """Return the folder of an option; else the folders that imagebuild, each extended project and the project have.

    A file of a later folder replaces those with the same name in earlier ones. The project is read only if it extends
    another one. Raises ConfigError with the mistakes in it.
    """
    from imagebuild.core.files import shipped_folder

    if given:
        return (given,)
    folder = project or Path(os.environ.get(PROJECT_VARIABLE, ""))
    matrix, parents = folder / MATRIX, [folder]
    if matrix.is_file() and b"extends:" in matrix.read_bytes():
        from imagebuild.project.load import load_project

        parents = [root.parent for root in reversed(load_project(folder).roots)]
    folders = [path for parent in (shipped_folder(), *parents) if (path := parent / kind).is_dir()]
    return tuple({path.resolve(): path for path in folders}.values())


def parse_platforms(names: Sequence[str] | None) -> tuple[Platform, ...]:
    """Return the platforms of --platform, with this machine's for `local`. Raises ConfigError for an unknown one."""
    from imagebuild.core.fields import Platform
    from imagebuild.core.run import native_platform

    platforms = tuple(native_platform() if name == "local" else name for name in names or ())
    for name in set(platforms) - set(get_args(Platform)):
        raise ConfigError(f"--platform {name}: unknown platform; use {', '.join(get_args(Platform))} or local")
    return cast(tuple[Platform, ...], platforms)


def check_combination(
    given: Mapping[str, object], needs: Mapping[str, Sequence[str]], exclusive: Iterable[Sequence[str]]
) -> None:
    """Raise ConfigError if an option lacks one that it needs, or two of which only one can be given are there.

    `given` has option → what was given; what is false was not.
    """
    for name, wanted in needs.items():
        if given[name] and not any(given[other] for other in wanted):
            raise ConfigError(f"{name}: needs {' or '.join(wanted)}; add it, or leave this out")
    for names in exclusive:
        both = [name for name in names if given[name]]
        if len(both) > 1:
            raise ConfigError(f"{both[0]}: excludes {' and '.join(both[1:])}; give one of them")


def print_or_write(text: str, output: str | None) -> None:
    """Print a text as it is, or write it to the file of --output. Raises ConfigError if it cannot be written."""
    from imagebuild.core.files import write_text

    if output == "":
        raise ConfigError("the name of the file to write is empty; name a file, or leave the option out")
    if output is None or output == STDOUT:
        sys.stdout.write(text)
    else:
        write_text(Path(output), text)


def print_result(json_file: str | None, result: object, show: Callable[[], None]) -> None:
    """Write a result as JSON to the file of --json, and show it to people unless the standard output has the JSON."""
    if json_file is not None:
        from pydantic_core import to_json

        text = to_json(result, indent=1, by_alias=False, inf_nan_mode="null").decode()
        print_or_write(text + "\n", json_file)
    if json_file != STDOUT:
        show()
