"""Define what the types of all files share: their base, names, platforms, conditions on versions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version
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


@dataclass(frozen=True)
class Form:
    """Require that all of a text matches a regular expression; say in words what it must be."""

    pattern: str
    words: str

    def fits(self, text: str) -> bool:
        return bool(re.fullmatch(self.pattern, text))

    def check(self, text: str) -> str:
        if not self.fits(text):
            raise ValueError(f"must be {self.words}")
        return text

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the check of a text that pydantic has read."""
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the regular expression for editors."""
        return {**handler(schema), "pattern": f"^({self.pattern})$"}


Name = Annotated[str, Form(r"[a-z0-9][a-z0-9-]*", "lower-case letters, digits and hyphens")]
Release = Annotated[str, Form(r"[a-z0-9][a-z0-9.-]*", "lower-case letters, digits, dots and hyphens")]
"""As `Name`, with dots for versions."""
Platform = Literal["linux/amd64", "linux/arm64"]
Arch = Literal["amd64", "arm64"]
ARCHS: tuple[Arch, ...] = get_args(Arch)
CPUS: Mapping[str, str] = {"amd64": "x86_64", "arm64": "aarch64"}
"""Architecture → the kernel's name of it."""
Line = Annotated[str, Form(r"[^\x00-\x1f\x7f]*", "one line, without control characters")]
"""It stays on its line of a Dockerfile."""
EnvironmentValue = Annotated[str, Form(r'[^\x00-\x1f\x7f"\\`]*', "one line without quotes, backslashes and backticks")]
"""It is the same text in a Dockerfile, a shell and sshd."""
Variable = Annotated[str, Form("[A-Za-z_][A-Za-z0-9_]*", "the name of a variable: letters, digits and underscores")]
Folder = Annotated[str, Form(r"/[^\s\x00]*", "an absolute path, without blanks")]
Url = Annotated[str, Form(r"(https?|\{[a-z-]+\})://\S+", "an address that begins with https://")]
GitUrl = Annotated[
    str, Form(r"((https?|ssh|git|file)://|git@)\S+", "the address of a git repository, such as https://host/name.git")
]
PackageText = Annotated[
    str, Form(r"[a-z0-9{][a-z0-9+.{}-]+(:[a-z0-9]+)?(=[A-Za-z0-9.+:~{}-]+)?", "a package: name or name={version}")
]
"""A package of a distribution, perhaps with its version and architecture; words in braces are filled in."""
VERSION = Form("[A-Za-z0-9][A-Za-z0-9._+~:-]*", "a version: letters, digits and . + ~ : _ -")
VersionText = Annotated[str, VERSION]
"""A version, or a value of an axis: safe in a shell line, a tag and an address without quotes."""
Commit = Annotated[str, Form("[0-9a-f]{40}", "a commit of 40 digits (0-9, a-f)")]
DIGEST, TAG = r"sha256:[0-9a-f]{64}", r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"
"""Patterns of an image's digest and tag, as the OCI distribution specification allows them."""
Digest = Annotated[str, Form(DIGEST, "a digest: sha256: and 64 digits (0-9, a-f)")]
Tag = Annotated[str, Form(TAG, "a tag: letters, digits and . _ -")]


class Model(BaseModel):
    """Refuse unknown keys, and later changes of values.

    Validators are built when a model is first used: a command imports the types of many files, and reads few. The
    docstrings of fields are their descriptions in the JSON Schema where `use_attribute_docstrings` is set, which reads
    the source of each type when it is imported, and takes longer than all else that a command does with it.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", defer_build=True, alias_generator=lambda name: name.replace("_", "-"),
        populate_by_name=True,
    )  # fmt: skip


M = TypeVar("M", bound=BaseModel)
Loc = tuple[str | int, ...]
"""Keys and indexes that lead to a value of a file."""


@dataclass(frozen=True)
class YamlFile(Generic[M]):
    """Hold a file that was read: its model, and the line of each value."""

    path: Path
    model: M
    lines: Mapping[Loc, int]

    def at(self, *loc: str | int) -> str:
        """Return `file:line` of the deepest part of `loc` that the file has."""
        return f"{self.path}:{line_of(self.lines, loc)}"


def line_of(lines: Mapping[Loc, int], loc: Loc) -> int:
    """Return the line of the deepest part of `loc` that the file has."""
    while loc and loc not in lines:
        loc = loc[:-1]
    return lines.get(loc, 1)


def one_or_more(value: Any) -> Any:
    """Return a list of one for a string, for fields that take both."""
    return (value,) if isinstance(value, str) else value


def distinct(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the values of a list. Raises ValueError if one is there twice."""
    if twice := next((value for value in values if values.count(value) > 1), None):
        raise ValueError(f"{twice} is there twice; remove one")
    return values


OneOrMore = Annotated[tuple[str, ...], Field(min_length=1), BeforeValidator(one_or_more)]
"""One string, or a list of them."""


def _readable(wanted: str) -> str:
    satisfies("0", wanted)  # raises ValueError for a bad specifier
    return wanted


Wanted = Annotated[str, AfterValidator(_readable)]
Condition = dict[str, Annotated[tuple[Wanted, ...], Field(min_length=1), BeforeValidator(one_or_more)]]
"""Axis → what its value must be: a value, a version specifier such as `>=13,<13.4`, or a list of those (any).

Every axis named has to match. Besides the axes there is `image`, the name of the image.
"""

DEFAULT_REGISTRY = "docker.io"
OPERATORS = ("<", ">", "=", "!", "~")
"""Beginnings of version specifiers."""


def natural_order(text: str) -> list[tuple[int, int, str]]:
    """Return a key that sorts `12.9` before `12.10`."""
    return [(1, int(p), "") if p.isdecimal() else (0, 0, p) for p in re.split(r"(\d+)", text) if p]


def full_reference(reference: str) -> str:
    """Return the name of an image with its registry: `docker.io/library/debian:13` for `debian:13`."""
    first, slash, _ = reference.partition("/")
    if not slash:
        return f"{DEFAULT_REGISTRY}/library/{reference}"
    is_registry = "." in first or ":" in first or first == "localhost"
    return reference if is_registry else f"{DEFAULT_REGISTRY}/{reference}"


@lru_cache(maxsize=4096)
def satisfies(value: str, wanted: str) -> bool:
    """Return whether `value` equals `wanted`, or satisfies it as a version specifier.

    `13.0` satisfies `>=13,<13.4`. A value that is no version satisfies no specifier.
    Raises ValueError if `wanted` begins like a specifier but is not one.
    """
    if not wanted.startswith(OPERATORS):
        return value == wanted
    try:
        specifier = SpecifierSet(wanted)
    except InvalidSpecifier:
        raise ValueError(f"{wanted!r} is not a version specifier; write one such as '>=13,<13.4'") from None
    try:
        return specifier.contains(Version(value), prereleases=True)
    except InvalidVersion:
        return False


def matches(condition: Condition, axes: Mapping[str, str]) -> bool:
    """Return whether every axis that the condition names has one of its values."""
    return all(
        name in axes and any(satisfies(axes[name], wanted) for wanted in alternatives)
        for name, alternatives in condition.items()
    )


def major(version: str) -> str:
    """Return the part before the first dot: `13` of `13.0`."""
    return version.partition(".")[0]


def minor(version: str) -> str:
    """Return the part before the second dot: `13.2` of `13.2.1`."""
    return ".".join(version.split(".")[:2])


def axis_facts(axes: Mapping[str, str]) -> dict[str, str]:
    """Return the axes, and the major version of each as `<axis>-major`."""
    return {**axes, **{f"{name}-major": major(value) for name, value in axes.items()}}
