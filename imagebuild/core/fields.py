"""Define what the types of all files share: names, platforms, conditions on versions, package URLs."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import textwrap
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal
from urllib.parse import quote, unquote

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.json_schema import GenerateJsonSchema

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$")]
Release = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")]
"""As `Name`, with dots for versions."""
Platform = Literal["linux/amd64", "linux/arm64"]
Arch = Literal["amd64", "arm64"]
Commit = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]


class DescribedSchema(GenerateJsonSchema):
    """Generate JSON Schema with the docstrings below fields as descriptions.

    Pydantic's `use_attribute_docstrings` would read the source of every model whenever its module is imported.
    """

    def model_schema(self, schema: Any) -> dict[str, Any]:
        """Return the schema of a model."""
        result = super().model_schema(schema)
        model: type[BaseModel] = schema["cls"]
        for name, text in field_docstrings(model).items():
            for key in (name, model.model_fields[name].alias):
                if key in result.get("properties", {}):
                    result["properties"][key].setdefault("description", text)
        return result


def field_docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstrings of a model's fields: strings that stand below them in the source, also of its bases."""
    result: dict[str, str] = {}
    for kind in reversed(model.__mro__):
        if not issubclass(kind, Model) or kind is Model:
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, following in itertools.pairwise(body.body):
            match statement, following:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    result[name] = inspect.cleandoc(text)
    return {name: text for name, text in result.items() if name in model.model_fields}


class Model(BaseModel):
    """Refuse unknown keys, and keep values as they were read.

    What validates is built when a model is first used: a command imports the types of many files and reads few.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", defer_build=True, alias_generator=lambda n: n.replace("_", "-"),
        populate_by_name=True,
    )  # fmt: skip

    @classmethod
    def model_json_schema(cls, *args: Any, **settings: Any) -> dict[str, Any]:
        """Return the JSON Schema, with the docstrings of fields."""
        return super().model_json_schema(*args, **{"schema_generator": DescribedSchema, **settings})


def _one_or_more(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


OneOrMore = Annotated[tuple[str, ...], BeforeValidator(_one_or_more), Field(min_length=1)]
"""One string, or a list of them."""
Condition = dict[str, Annotated[tuple[str, ...], BeforeValidator(_one_or_more)]]
"""Axis → what its value must be: a value, a version specifier such as `>=13,<13.4`, or a list of those (any).

Every axis named must match. Besides the axes there is `image`, the name of the image.
"""


DEFAULT_REGISTRY = "docker.io"


def full_reference(reference: str) -> str:
    """An image with its registry: `debian:13` is `docker.io/library/debian:13`."""
    first, slash, _ = reference.partition("/")
    if not slash:
        return f"{DEFAULT_REGISTRY}/library/{reference}"
    is_registry = "." in first or ":" in first or first == "localhost"
    return reference if is_registry else f"{DEFAULT_REGISTRY}/{reference}"


GITHUB = "https://github.com/"


def purl(kind: str, name: str, version: str = "", qualifiers: Mapping[str, str] | None = None) -> str:
    """`pkg:kind/name@version?…`; slashes in the name separate a namespace."""
    at = f"@{quote(version, safe=':')}" if version else ""
    pairs = [f"{key}={quote(value, safe='/:')}" for key, value in sorted((qualifiers or {}).items()) if value]
    return f"pkg:{kind}/{quote(name, safe='/')}{at}" + (f"?{'&'.join(pairs)}" if pairs else "")


def image_purl(reference: str, digest: str, arch: str = "") -> str:
    """An image or a manifest of a registry; `reference` has a tag or none, and no digest."""
    full = full_reference(reference)
    repository, colon, tag = full.rpartition(":")
    if not colon or "/" in tag:
        repository, tag = full, ""
    last = repository.rpartition("/")[2].lower()
    return purl("oci", last, digest, {"repository_url": repository, "tag": tag, "arch": arch})


def git_purl(name: str, url: str, commit: str) -> str:
    """A commit; `name` is what it is called where no forge that purl knows has it."""
    if url.startswith(GITHUB):
        return purl("github", url.removeprefix(GITHUB).removesuffix(".git").lower(), commit)
    return purl("generic", name, commit, {"vcs_url": f"git+{url}@{commit}"})


def archive_purl(name: str, version: str, url: str, sha256: str) -> str:
    """A file that is downloaded."""
    return purl("generic", name, version, {"download_url": url, "checksum": f"sha256:{sha256}"})


def wheel_purl(name: str, version: str) -> str:
    """A distribution of the Python package index."""
    return purl("pypi", re.sub(r"[-_.]+", "-", name).lower(), version)


def purl_identity(text: str) -> str:
    """Kind, name and version without qualifiers, the same for two spellings of the same thing."""
    return unquote(text.partition("?")[0].partition("#")[0])


OPERATORS = ("<", ">", "=", "!", "~")


@lru_cache(maxsize=4096)
def satisfies(value: str, wanted: str) -> bool:
    """Is `value` the value `wanted`, or does it fulfil the version specifier `wanted`?

    `13.0` fulfils `>=13,<13.4`. A value that is no version fulfils no specifier.
    Raises ValueError if `wanted` looks like a specifier and is none.
    """
    if not wanted.startswith(OPERATORS):
        return value == wanted
    try:
        specifier = SpecifierSet(wanted)
    except InvalidSpecifier:
        raise ValueError(f"{wanted!r} is not a version specifier such as '>=13,<13.4'") from None
    try:
        return specifier.contains(Version(value), prereleases=True)
    except InvalidVersion:
        return False


def matches(condition: Condition, axes: Mapping[str, str]) -> bool:
    """Does every axis that the condition names have one of the wanted values?"""
    return all(
        name in axes and any(satisfies(axes[name], wanted) for wanted in alternatives)
        for name, alternatives in condition.items()
    )


def major(version: str) -> str:
    """The part before the first dot: `13` of `13.0`."""
    return version.partition(".")[0]


def minor(version: str) -> str:
    """The part before the second dot: `13.2` of `13.2.1`."""
    return ".".join(version.split(".")[:2])


def axis_facts(axes: Mapping[str, str]) -> dict[str, str]:
    """Axes, and of each the major as `<axis>-major`."""
    return {**axes, **{f"{name}-major": major(value) for name, value in axes.items()}}
