"""Field types that all file formats share: names, platforms, versions, conditions; and the base of all models."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args

from packaging.specifiers import SpecifierSet
from packaging.version import Version
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
)
from pydantic_core import CoreSchema, core_schema

DEFAULT_REGISTRY = "docker.io"
OPERATORS = ("<", ">", "=", "!", "~")
"""The characters with which version specifiers begin."""


@dataclass(frozen=True)
class Form:
    """A field type for texts that match a regular expression. `words` describes such a text in messages."""

    pattern: str
    words: str

    def fits(self, text: str) -> bool:
        return bool(re.fullmatch(self.pattern, text))

    def check(self, text: str) -> str:
        """Return the text unchanged. Raises ValueError if the text does not match the regular expression."""
        if not self.fits(text):
            raise ValueError(f"must be {self.words}")
        return text

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema by which pydantic checks a text."""
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the JSON schema, with the regular expression for editors."""
        return {**handler(schema), "pattern": f"^({self.pattern})$"}


def in_utc(text: str) -> str:
    """Return a time in the form of ISO 8601 in UTC, so that the texts of two times can be compared.
    Raises ValueError if the text does not have this form. A time without a zone counts as UTC."""
    try:
        time = datetime.fromisoformat(text)
        return time.replace(tzinfo=time.tzinfo or UTC).astimezone(UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is not a time in the form of ISO 8601, such as 2026-11-27T08:00:00Z") from None


Time = Annotated[str, AfterValidator(in_utc)]
Name = Annotated[str, Form(r"[a-z0-9][a-z0-9-]*", "lower-case letters, digits and hyphens")]
Release = Annotated[str, Form(r"[a-z0-9][a-z0-9.-]*", "lower-case letters, digits, dots and hyphens")]
"""A name that may contain dots, so that it can end in a version."""
Platform = Literal["linux/amd64", "linux/arm64"]
Arch = Literal["amd64", "arm64"]
ARCHS: tuple[Arch, ...] = get_args(Arch)
CPUS: Mapping[str, str] = {"amd64": "x86_64", "arm64": "aarch64"}
"""Maps each architecture, such as `amd64`, to its name in the kernel, such as `x86_64`."""
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Value of PATH in an image that does not set it."""
Line = Annotated[str, Form(r"[^\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]*", "one line, without control characters")]
"""A text of one line, so that it cannot add lines to a Dockerfile."""
EnvironmentValue = Annotated[str, Form(r'[^\x00-\x1f\x7f"\\`$]*', "one line without quotes, \\, ` and $VARIABLES")]
"""A text that has the same meaning in a Dockerfile, a shell and the configuration of sshd."""
Variable = Annotated[
    str, Form("[A-Za-z_][A-Za-z0-9_]*", "the name of an environment variable: letters, digits and underscores")
]
FOLDER_LISTS = ("CPATH", "LD_LIBRARY_PATH", "LIBRARY_PATH", "PATH", "PKG_CONFIG_PATH")
"""Environment variables that are lists of folders, separated by colons."""


def absolute_folders(values: dict[str, str]) -> dict[str, str]:
    """Return environment variables unchanged. Raises ValueError if a list of folders contains a relative path."""
    for name in FOLDER_LISTS:
        for part in values.get(name, "").split(":"):
            if part and not part.startswith(("/", "{")):
                raise ValueError(f"{name}: {part!r} is not an absolute path; begin it with /")
    return values


Environment = Annotated[dict[Variable, EnvironmentValue], AfterValidator(absolute_folders)]
"""Environment variables of an image."""
Folder = Annotated[str, Form(r"/[^\s\x00]*", "an absolute path without spaces")]
Url = Annotated[str, Form(r"(https?|\{[a-z-]+\})://\S+", "a URL that begins with https://")]
GitUrl = Annotated[
    str, Form(r"((https?|ssh|git|file)://|git@)\S+", "the URL of a git repository, such as https://host/name.git")
]
PackageText = Annotated[
    str, Form(r"[a-z0-9{][a-z0-9+.{}-]+(:[a-z0-9]+)?(=[A-Za-z0-9.+:~{}-]+)?", "a package: name or name={version}")
]
"""A package of the distribution: `name`, `name:architecture` or `name=version`. `{…}` is a placeholder."""
VERSION = Form("[A-Za-z0-9][A-Za-z0-9._+~:-]*", "a version: letters, digits and . + ~ : _ -")
VersionText = Annotated[str, VERSION]
"""A version, or the value of an axis such as `cuda`. Safe in a shell command, a tag and a URL without quotes."""
Commit = Annotated[str, Form("[0-9a-f]{40}", "a commit of 40 hexadecimal digits")]
DIGEST, TAG = r"sha256:[0-9a-f]{64}", r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"
"""Regular expressions of a digest and a tag, from the OCI distribution specification."""
Digest = Annotated[str, Form(DIGEST, "a digest: sha256: and 64 hexadecimal digits")]
Tag = Annotated[str, Form(TAG, "a tag: letters, digits and . _ -")]
Sha256 = Annotated[str, Form("[0-9a-f]{64}", "64 hexadecimal digits")]
Revision = Annotated[str, Form("[0-9a-f]{40}([0-9a-f]{24})?(-dirty)?", "a commit, with -dirty if files had changed")]
TargetId = Annotated[str, Form(VERSION.pattern, "the id of a target, which begins with a letter or a digit")]
HOST = r"(?:[A-Za-z0-9][A-Za-z0-9.-]*|\[[0-9A-Fa-f:]+\])(?::[0-9]+)?"
PATH = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
"""Regular expressions of the host of a registry, and of a part of the path of a repository."""
REPOSITORY = Form(rf"(?:{HOST}/)?{PATH}(?:/{PATH})*", "a repository without a tag, in lower case, such as ghcr.io/acme")
Repository = Annotated[str, REPOSITORY]
ImageName = Annotated[str, Form("[A-Za-z0-9[][A-Za-z0-9._:/@+~[\\]-]*", "the name of an image")]
Address = Annotated[str, Form(r"(https?://[^\x00-\x20\x7f][^\x00-\x1f\x7f]*)?", "a URL that begins with https://")]
_SYSTEM = "[a-z0-9][a-z0-9._-]*(/[a-z0-9][a-z0-9._-]*){1,2}"
AnyPlatform = Annotated[str, Form(_SYSTEM, "a platform such as linux/amd64")]
AnyPlatforms = Annotated[str, Form(f"unknown|{_SYSTEM}(, *{_SYSTEM})*", "platforms such as linux/amd64, or `unknown`")]


class Model(BaseModel):
    """The base of all models: immutable, and without unknown keys.

    Validators are built when a model is first used, because a command imports many models and uses few.
    `use_attribute_docstrings` turns the docstrings of fields into descriptions in the JSON schema. Only the command
    that writes the schemas sets this option: pydantic then parses the source of each model during the import, which is
    slow."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", defer_build=True, alias_generator=lambda name: name.replace("_", "-"),
        populate_by_name=True,
    )  # fmt: skip


M = TypeVar("M", bound=BaseModel)
Loc = tuple[str | int, ...]
"""Path of a value in a file: keys of mappings and indexes of lists."""


@dataclass(frozen=True)
class YamlFile(Generic[M]):
    """The contents of a file, and the line of each value."""

    path: Path
    model: M
    lines: Mapping[Loc, int]

    def at(self, *loc: str | int) -> str:
        """Return the place of a value as `file:line`.
        If the value is missing, return the place of its nearest parent."""
        return f"{self.path}:{line_of(self.lines, loc)}"


def line_of(lines: Mapping[Loc, int], loc: Loc) -> int:
    """Return the line of a value. If the value is missing, return the line of its nearest parent."""
    while loc and loc not in lines:
        loc = loc[:-1]
    return lines.get(loc, 1)


def one_or_more(value: Any) -> Any:
    """Return a tuple with one item for a text, and any other value unchanged.
    For fields that accept a text or a list."""
    return (value,) if isinstance(value, str) else value


def distinct(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the values unchanged. Raises ValueError if a value appears twice."""
    if twice := next((value for value in values if values.count(value) > 1), None):
        raise ValueError(f"{twice} appears twice; remove one")
    return values


def _readable(wanted: str) -> str:
    satisfies("0", wanted)  # raises ValueError for a bad specifier
    return wanted


Wanted = Annotated[str, AfterValidator(_readable)]
Condition = dict[str, Annotated[tuple[Wanted, ...], Field(min_length=1), BeforeValidator(one_or_more)]]
"""Maps axes, such as `cuda`, to the values that match: a value, a version specifier such as `>=13,<13.4`, or a list of
alternatives. All axes in the condition have to match. The key `image` stands for the name of the image."""


class Support(Model):
    """A condition that must hold (in `supports`) or must not hold (in `excludes`), and the reason."""

    when: Condition
    reason: str


def natural_order(text: str) -> list[tuple[int, int, str]]:
    """Return a sort key for texts with numbers, which sorts `12.9` before `12.10`."""
    # The length of a number compares numbers of any length.
    parts = [p.lstrip("0") if p.isdecimal() else p for p in re.split(r"(\d+)", text) if p]
    return [(1, len(p), p) if p == "" or p.isdecimal() else (0, 0, p) for p in parts]


def is_loopback(host: str) -> bool:
    """Return whether a host, with or without a port, is this machine."""
    return bool(re.fullmatch(r"(localhost|127(\.[0-9]+){3}|\[::1\])(:[0-9]+)?", host))


def full_reference(reference: str) -> str:
    """Return the reference of an image with its registry: `docker.io/library/debian:13` for `debian:13`."""
    first, slash, _ = reference.partition("/")
    if not slash:
        return f"{DEFAULT_REGISTRY}/library/{reference}"
    is_registry = "." in first or ":" in first or first == "localhost"
    return reference if is_registry else f"{DEFAULT_REGISTRY}/{reference}"


@lru_cache(maxsize=4096)
def satisfies(value: str, wanted: str) -> bool:
    """Return whether `value` equals `wanted`, or satisfies it as a version specifier.

    `13.0` satisfies `>=13,<13.4`. A value that is not a version does not satisfy any specifier.
    Raises ValueError if `wanted` begins like a specifier but is not one."""
    if not wanted.startswith(OPERATORS):
        return value == wanted
    try:
        specifier = SpecifierSet(wanted)
    except ValueError:  # also for a number of more than 4300 digits
        raise ValueError(f"{wanted!r} is not a version specifier; write a specifier such as '>=13,<13.4'") from None
    try:
        return specifier.contains(Version(value), prereleases=True)
    except ValueError:
        return False


def matches(condition: Condition, axes: Mapping[str, str]) -> bool:
    """Return whether all axes in a condition have a matching value."""
    return all(
        name in axes and any(satisfies(axes[name], wanted) for wanted in alternatives)
        for name, alternatives in condition.items()
    )


def major(version: str) -> str:
    """Return the part of a version before the first dot: `13` for `13.0`."""
    return version.partition(".")[0]


def minor(version: str) -> str:
    """Return the part of a version before the second dot: `13.2` for `13.2.1`."""
    return ".".join(version.split(".")[:2])


def axis_facts(axes: Mapping[str, str]) -> dict[str, str]:
    """Return the values of the axes, and the major version of each value under the name `<axis>-major`."""
    return {**axes, **{f"{name}-major": major(value) for name, value in axes.items()}}
