"""The options of commands: from the YAML file beside each module to the parameters of the command's function.

`options.yaml` contains the options that several commands share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import datetime, timedelta
from functools import cached_property, partial, wraps
from math import isfinite
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, cast, get_args, get_origin, get_type_hints

import click

from imagebuild.cli.app import table
from imagebuild.core.errors import ConfigError, ImagebuildError, nearest, suggestion

if TYPE_CHECKING:
    from imagebuild.core.fields import Platform
    from imagebuild.project.plan import Plan, Target
    from imagebuild.project.project import Changes, Project
    from imagebuild.publish.signatures import Signer
    from imagebuild.render.renderer import Renderer

STDOUT = "-"
"""The file name that stands for the standard output."""
MATRIX = Path("matrix.yaml")
PROJECT_VARIABLE = "IMAGEBUILD_PROJECT"
Callback = Callable[..., object]


class IntRange(click.IntRange):
    name = "whole number"  # for messages, in which click would write "integer range"


class FloatRange(click.FloatRange):
    """A finite number in a range. A comparison with `nan` is never true, so every range would contain it."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number. Raises BadParameter for other texts, and for infinity and `nan`."""
        number: float = super().convert(value, param, ctx)
        if not isfinite(number) or "_" in str(value):
            self.fail(f"{value!r} is not a finite number; write a number such as 2.5", param, ctx)
        return number


class WordChoice(click.Choice[str]):
    """One of several words. The message about another word proposes the most similar one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the word. Raises BadParameter for another word."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            near = nearest(table("foreign")["values"].get(value, str(value)), self.choices)
            self.fail(error.message.removesuffix(".") + (f"; did you mean {near!r}?" if near else ""), param, ctx)


class Day(click.DateTime):
    """A day that is not in the future."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        """Return the beginning of the day. Raises BadParameter for another text, and for a day before 1980."""
        try:
            day: datetime = super().convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f"{value!r} is not a date; write a date such as 2026-11-27", param, ctx)
        if not datetime(1980, 1, 1) <= day <= datetime.now() + timedelta(days=1):
            self.fail(f"{value!r} must be a day from 1980-01-01 to today", param, ctx)
        return day


TYPES: Mapping[type, Callable[..., click.ParamType[Any]]] = {
    int: IntRange, float: FloatRange, Path: partial(click.Path, path_type=Path),
    datetime: partial(Day, ["%Y-%m-%d"]),
}  # fmt: skip
"""Maps the type of a parameter to the type that reads and checks its option."""


class StrictCommand(click.Command):
    """A command that refuses a repeated option, unless the option takes several values.
    In click, the last value of a repeated option wins without a message."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line. Raises ConfigError for a repeated option, and for an option of another tool."""
        if not ctx.resilient_parsing:
            try:
                _, _, given = self.make_parser(ctx).parse_args(list(args))
            except click.NoSuchOption as error:
                foreign = table("foreign")
                if instead := {**foreign["options"], **foreign.get(self.name or "", {})}.get(error.option_name):
                    raise ConfigError(f"No such option {error.option_name!r}; {instead}") from None
                raise
            for option in given:
                single = isinstance(option, click.Option) and not (option.multiple or option.is_flag)
                if single and given.count(option) > 1:
                    raise ConfigError(f"{option.opts[-1]}: given twice; remove one of the two")
        return super().parse_args(ctx, args)

    def get_short_help_str(self, limit: int = 45) -> str:
        """Return the first paragraph of the help; click would shorten it to `limit` characters."""
        return " ".join((self.help or "").split("\n\n")[0].split())


class Group(click.Group):
    """A group whose help lists the commands in the order of their definition."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


def command(group: click.Group | None = None, name: str = "") -> Callable[[Callback], click.Command]:
    """Return a decorator that makes a command of a function. Its help, options and examples are in the YAML file of
    the module, under the words of the command.
    The annotations of the function determine the types of the options. A dataclass, such as ProjectFiles, stands for
    the options that its fields name. `needs` maps an option to the one that it needs; of each list in `exclusive`, only
    one option can be used."""

    def decorate(callback: Callback) -> click.Command:
        word = name or callback.__name__.replace("_", "-")
        row = table(callback.__module__.rpartition(".")[2])[f"{group.name} {word}" if group else word]
        hints = get_type_hints(callback)
        groups = {key: hints[key] for key in row["options"] if is_dataclass(hints[key])}

        @wraps(callback)
        def call(**given: Any) -> object:
            names = {each.name: each.opts[-1] for each in parameters}
            check_combination(
                {names[key]: value not in (None, False, (), "") for key, value in given.items()},
                {names[key]: names[other] for key, other in row.get("needs", {}).items()},
                [[names[key] for key in keys] for keys in row.get("exclusive", ())],
            )
            for key, is_folder in written.items():
                check_output(given[key], folder=is_folder)
            given |= (
                {"select": (*given["select"], *map("!{}".format, given.pop("exclude")))} if "exclude" in given else {}
            )
            for key, kind in groups.items():
                given[key] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
            return callback(**given)

        parameters: list[click.Parameter] = []
        written: dict[str, bool] = {}
        for key, own in row["options"].items():
            members = get_type_hints(groups[key]) if key in groups else {key: hints[key]}
            members |= {"exclude": hints[key]} if key == "select" else {}
            rows = {each: (own if each == key else None) or table("options")[each] for each in members}
            parameters += [_parameter(each, hint, rows[each]) for each, hint in members.items()]
            written |= {each: rows[each]["writes"] == "folder" for each in members if "writes" in rows[each]}
        epilog = "\n".join(["Examples:", "", "\b", *(f"  {line}" for line in row["examples"])])
        new = StrictCommand(word, callback=call, params=parameters, help=row["help"], epilog=epilog)
        if group:
            group.add_command(new)
        return new

    return decorate


def _parameter(name: str, hint: Any, row: Mapping[str, Any]) -> click.Parameter:
    """Return an option, or an argument, from the annotation of a parameter and a row of a YAML file.

    `names`: the words of the option, if they differ from the name of the parameter. `type`: arguments of the class in
    TYPES. `choices`: allowed values, if they are no Literal. `complete`: argument of `names_of`. `writes`: the option
    names a file that is written at the end, so it is checked at the beginning; `folder`: a folder. Other keys are
    arguments of `click.Option` or `click.Argument`."""
    if NoneType in get_args(hint):
        hint = get_args(hint)[0]
    several = get_origin(hint) in (tuple, Sequence)
    kind = get_args(hint)[0] if several else hint
    if get_origin(kind) is Literal:
        kind = WordChoice(get_args(kind))
    elif "choices" in row:
        kind = WordChoice(row["choices"])
    elif kind in TYPES:
        kind = TYPES[kind](**row.get("type", {}))
    given = {
        key: value
        for key, value in row.items()
        if key not in ("names", "argument", "complete", "type", "choices", "writes")
    }
    given |= {"type": kind, "shell_complete": names_of(row["complete"]) if "complete" in row else None}
    if row.get("argument"):
        return click.Argument([name], nargs=-1 if several else 1, **given)
    names = row.get("names", [f"--{name.replace('_', '-').rstrip('-')}"])
    return click.Option([name, *names], multiple=several, is_flag=kind is bool or None, **given)


def names_of(kind: str) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Return a function that completes names in a shell.

    `kind` is `targets`, `components` or a folder of YAML files such as `jobs/clusters`. The names are those
    of the project in the current folder, or of the project that IMAGEBUILD_PROJECT names."""

    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
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
            return []  # the command itself will print what is wrong
        return [name for name in dict.fromkeys(known) if name.startswith(incomplete)]

    return complete


@dataclass(frozen=True)
class Workspace:
    """A project with the changes of the command line, and its plan."""

    project: Project
    plan: Plan

    @cached_property
    def renderer(self) -> Renderer:
        from imagebuild.render.renderer import Renderer

        return Renderer(self.project)

    def locked(
        self, targets: Sequence[Target], *, wanted: bool, platforms: tuple[Platform, ...] = (), ca: Path | None = None,
        folder: Path = Path("build"),
    ) -> Workspace:  # fmt: skip
        """Pin the sources that the targets lack if the user `wanted` it with --lock. Return the workspace with pins.

        Raises CommandError if a source cannot be pinned."""
        if not wanted:
            return self
        from imagebuild.core.console import err
        from imagebuild.lock.resolve import LockFile, network_upstream

        file = LockFile(self.project, self.renderer, tuple(targets), platforms=platforms)
        if not file.unpinned:
            return self
        file.bring_up_to_date(network_upstream(ca), folder, say=err.print)
        return replace(self, project=self.project.with_own_lock(file.lock))


@dataclass(frozen=True)
class ProjectFiles:
    """The value of --project, and the project's folder."""

    root: Path | None = None

    @property
    def words(self) -> tuple[str, ...]:
        """The option as words of a command line; empty if the option was not used."""
        return ("--project", str(self.root)) if self.root else ()

    @property
    def is_shipped(self) -> bool:
        """True if no project is named or in the current folder, so the project that comes with imagebuild is used.
        Raises ConfigError if the folder has only a file whose name is similar to `matrix.yaml`."""
        path = (self.root or Path()) / MATRIX
        names = [] if os.path.lexists(path) else [other.name for other in path.parent.glob("*.*")]
        if near := nearest(path.name, names, likeness=0.85):
            raise ConfigError(f"{path.with_name(near)}: only {MATRIX} is read; rename this file to {MATRIX}")
        return not (self.root or os.path.lexists(path))

    @cached_property
    def folder(self) -> Path:
        """The project's folder. Prints a note if this folder is the project that comes with imagebuild."""
        from imagebuild.core.files import shipped_folder

        if self.is_shipped:
            sys.stderr.write(
                f"{Path.cwd()} has no {MATRIX}, so these are the images that come with imagebuild; "
                f"name your project with --project DIR or {PROJECT_VARIABLE}\n"
            )
            return shipped_folder()
        return self.root or Path()

    def open(
        self, changes: Changes | None = None, output: str | None = None, select: Sequence[str] | None = None
    ) -> Workspace:
        """Read the project and make its plan. Raises ConfigError that lists every mistake.

        The project that comes with imagebuild gets the lock beside the `output`, or in the current folder. With
        `select`, mistakes in tags and in other images do not count: see `make_plan`."""
        from imagebuild.project.load import load_project, with_lock_in
        from imagebuild.project.plan import make_plan
        from imagebuild.project.project import Changes

        project = load_project(self.folder)
        if self.is_shipped:
            project = with_lock_in(project, Path("" if output == STDOUT else output or "").parent)
        project = project.changed(replace(changes or Changes(), project=self.words))
        return Workspace(project, make_plan(project, select))

    def open_own(self, changes: Changes | None = None, select: Sequence[str] | None = None) -> Workspace:
        """Read a project whose files the command changes. Raises ConfigError if there is no such project."""
        if self.is_shipped:
            how = (
                "make a project with `imagebuild init`, name its folder with --project, or name a TARGET of imagebuild"
            )
            raise ConfigError(f"{MATRIX}: cannot be read: no such file here; {how}")
        return self.open(changes, select=select)


@dataclass(frozen=True)
class PlanChanges:
    """The options --set, --with and --without, which change the project without editing its files."""

    settings: Sequence[str] = ()
    with_: Sequence[str] = ()
    without: Sequence[str] = ()

    def parse(self, registry: str | None = None) -> Changes:
        """Return the changes that these options and --registry make. Raises ConfigError for a wrong value."""
        from imagebuild.project.project import parse_changes

        for setting in self.settings:
            name, _, value = setting.partition("=")
            _, dot, last = name.rpartition(".")
            if (dot and last) or last in table("foreign")["settings"]:
                words = name.removesuffix("+").split(".")
                known = [table("foreign")["settings"].get(word) for word in (words[-1], *words[1:2])]
                remedy = next(filter(None, known), "--set {name}={value} for an axis or a version, else matrix.yaml")
                remedy = remedy.format(name=last, value=value)
                raise ConfigError(f"--set {setting}: --set changes only axes and versions; use {remedy}")
        return parse_changes(self.settings, names_in(self.with_), names_in(self.without), repository=registry)

    def __bool__(self) -> bool:
        return bool(self.settings or self.with_ or self.without)


@dataclass(frozen=True)
class ImageChanges(PlanChanges):
    """The options that change the project and the Dockerfiles of its images."""

    base_image: str | None = None
    append: Path | None = None

    def parse(self, registry: str | None = None) -> Changes:
        """Return the changes that these options and --registry make. Raises ConfigError for a wrong value."""
        from imagebuild.core.files import read_text
        from imagebuild.project.matrix import IMAGE
        from imagebuild.render.stages import check_appended

        if self.base_image is not None and not IMAGE.fits(self.base_image):
            raise ConfigError(f"--base-image {self.base_image}: not an image; write an image such as ubuntu:24.04")
        changes = replace(super().parse(registry), base_image=self.base_image)
        if self.append is None:
            return changes
        text = read_text(self.append)
        check_appended(text, f"--append {self.append}")
        return replace(changes, append=str(self.append), appended=text)

    def check_base(self, targets: Iterable[Target], *, pinned: bool) -> None:
        """Raise ConfigError if the image of --base-image has another release than a target, or is not pinned by digest.
        The digest is required only if `pinned` is true."""
        from imagebuild.project.contradictions import base_mismatch

        if self.base_image is None:
            return
        if pinned and "@sha256:" not in self.base_image:
            problem = "without a digest, the image is not verified; write IMAGE:TAG@sha256:…"
            raise ConfigError(f"--base-image {self.base_image}: {problem}")
        for target in targets:
            if problem := base_mismatch(self.base_image, target.axes["os"]):
                remedy = "or select a target of its release, such as os=ubuntu24.04"
                raise ConfigError(f"--base-image {self.base_image}: {problem}, {remedy}")


@dataclass(frozen=True)
class TrustOptions:
    """The options that say whose signatures are trusted."""

    key: str | None = None
    identities: tuple[str, ...] = ()
    issuer: str | None = None
    source: str | None = None
    ref: str | None = None
    no_tlog: bool = False

    def trusted(self) -> Signer | None:
        """Return the trusted signer. None if no option is used. Raises the errors of `Signer.check`."""
        return self._signer(signs=False) if self != TrustOptions() else None

    def _signer(self, *, signs: bool) -> Signer:
        from imagebuild.publish.signatures import Signer

        who = (self.key, self.identities, self.issuer, self.source, self.ref)
        signer = Signer(*who, log=not self.no_tlog, signs=signs)
        signer.check()
        return signer


@dataclass(frozen=True)
class SignOptions(TrustOptions):
    """The options that say who signs."""

    sign: bool = False

    def signer(self) -> Signer | None:
        """Return the signer. None without --sign. In a GitHub job, the default signer is the identity of the job.
        Raises ConfigError or CommandError if this signer cannot sign."""
        from imagebuild.publish.signatures import GITHUB_ISSUER, job_workflow

        if not self.sign:
            if self != SignOptions():
                raise ConfigError("--key, --certificate-identity and --no-tlog: need --sign; add --sign")
            return None
        named = self
        if not (self.key or self.identities) and (workflow := job_workflow(os.environ)):
            identity, source = f"{os.environ['GITHUB_SERVER_URL']}/{workflow}", os.environ["GITHUB_REPOSITORY"]
            named = replace(self, identities=(identity,), issuer=GITHUB_ISSUER, source=source)
        return named._signer(signs=True)


def data_folders(given: Path | None, kind: str, project: Path | None = None) -> tuple[Path, ...]:
    """Return the folder that an option names, or else the default folders of a kind, such as `profiles`.

    These are the folders of imagebuild, of the projects that the project extends, and of the project. If two folders
    have a file with the same name, the file in the last folder is used. The project is read only if it extends
    another one. Raises ConfigError that lists the mistakes in the project."""
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


def names_in(values: Iterable[str]) -> tuple[str, ...]:
    """Return the names in the values of an option, which are separated by commas."""
    return tuple(name.strip() for value in values for name in value.split(","))


def parse_platforms(values: Sequence[str]) -> tuple[Platform, ...]:
    """Return the platforms of --platform; `local` is this machine's. Raises ConfigError for an unknown platform."""
    from imagebuild.core.fields import Platform
    from imagebuild.core.run import native_platform

    platforms = tuple(native_platform() if name == "local" else name for name in names_in(values))
    for name in set(platforms) - set(get_args(Platform)):
        known = [*get_args(Platform), "local"]
        raise ConfigError(f"--platform {name}: unknown platform{suggestion(name, known)}")
    return cast(tuple[Platform, ...], platforms)


def check_combination(
    given: Mapping[str, object], needs: Mapping[str, str], exclusive: Iterable[Sequence[str]]
) -> None:
    """Raise ConfigError if an option lacks the option that it needs, or if exclusive options are combined.
    `given` maps options to their values. A false value means that the option is absent."""
    for name, wanted in needs.items():
        if given[name] and not given[wanted]:
            raise ConfigError(f"{name}: needs {wanted}; add {wanted}, or remove {name}")
    for names in exclusive:
        both = [name for name in names if given[name]]
        if len(both) > 1:
            raise ConfigError(f"{both[0]}: cannot be combined with {' and '.join(both[1:])}; leave out all but one")


def check_output(name: str | Path | None, *, folder: bool = False) -> None:
    """Raise ConfigError if the file, or the `folder`, that an option names cannot be written. None is accepted, and `-`
    for a file."""
    from imagebuild.core.files import check_writable

    if name == "":
        raise ConfigError("FILE: the name of the output file is empty; name a file, or remove the option")
    if name is not None and str(name) != STDOUT:
        check_writable(Path(name), folder=folder)


def name_advisories(targets: Iterable[Target], *, whole: bool = False) -> None:
    """Print the advisories about versions in the targets. Unless `whole`, print only names, and leave out packages of
    distributions."""
    from imagebuild.core.console import err
    from imagebuild.project.plan import known_faults

    faults = known_faults(targets, chosen=not whole)
    for advisory, ids in faults if whole else ():
        err.print(f"{ids[0]}{f' and {len(ids) - 1} more' if len(ids) > 1 else ''}: {advisory}")
    if faults and not whole:
        names = ", ".join(advisory.name for advisory, _ in faults)
        err.print(f"known faults of these versions: {names}; `imagebuild plan --why` explains them")


def print_or_write(text: str, output: str | None) -> None:
    """Print a text, or write it unchanged to the file of --output. In a terminal, invisible characters are replaced.
    Raises ConfigError if the file cannot be written."""
    from imagebuild.core.files import write_text

    if output is None or output == STDOUT:
        if sys.stdout.isatty():
            from imagebuild.core.console import visible

            text = visible(text)
        sys.stdout.write(text)
    else:
        write_text(Path(output), text, named=True)


def print_result(json_file: str | None, result: object, show: Callable[[], None], status: int = 0) -> None:
    """Write a result as JSON to the file of --json. Call `show`, which prints a text, unless the JSON was printed.

    Then exit, unless `status` is 0 or False. If the file cannot be written, the text is printed anyway, before
    ConfigError is raised."""
    try:
        if json_file is not None:
            from pydantic_core import to_json

            from imagebuild.core.console import escaped_json

            text = to_json(result, indent=1, by_alias=False, inf_nan_mode="null").decode()
            print_or_write(escaped_json(text) + "\n", json_file)
    finally:
        if json_file != STDOUT:
            show()
    if status:
        sys.exit(int(status))
