"""Compare objects of Kubernetes with the API references in `tests/data/kubernetes-fields.yaml`: names and types only."""

from __future__ import annotations

from functools import lru_cache
from types import GenericAlias
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, create_model

from tests.conftest import data

FIELDS: dict[str, dict[str, str]] = data("kubernetes-fields")
"""Kind of object → its fields and their types; `!` marks a required field."""
TYPES: dict[str, Any] = {
    "int": int, "bool": bool, "string": str,
    "quantity": Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti|e[0-9]+)?$")],
    "label": Annotated[str, Field(pattern="^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")],
}  # fmt: skip


@lru_cache
def type_of(kind: str) -> Any:
    """What a value of this kind must be."""
    if kind[0] in "[{":
        inner = type_of(kind[1:-1])
        return GenericAlias(list, inner) if kind[0] == "[" else GenericAlias(dict, (str, inner))
    if "|" in kind:
        return Literal[tuple(kind.split("|"))]
    if kind in TYPES:
        return TYPES[kind]
    fields: dict[str, Any] = {
        name.rstrip("!"): (type_of(kind), ... if name.endswith("!") else None) for name, kind in FIELDS[kind].items()
    }
    return create_model(kind, __config__=ConfigDict(extra="forbid", strict=True), **fields)


def mistakes(value: Any, kind: str) -> list[str]:
    """Every difference from the reference, with its path."""
    try:
        TypeAdapter(type_of(kind)).validate_python(value)
    except ValidationError as error:
        return [f"{'.'.join(map(str, problem['loc']))}: {problem['type']}" for problem in error.errors()]
    return []
