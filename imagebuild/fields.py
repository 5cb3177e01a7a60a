"""What the types of all files share: how they are read, names, platforms, conditions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$")]
Release = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")]
"""As `Name`, with dots for versions."""
Platform = Literal["linux/amd64", "linux/arm64"]
Arch = Literal["amd64", "arm64"]
Commit = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]


class Model(BaseModel):
    """Unknown keys are mistakes, values do not change, field docstrings are the JSON Schema's text."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, alias_generator=lambda n: n.replace("_", "-"),
        populate_by_name=True,
    )  # fmt: skip


def _one_or_more(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Condition = dict[str, Annotated[tuple[str, ...], BeforeValidator(_one_or_more)]]
"""Axis → what its value must be: a value, a version specifier such as `>=13,<13.4`, or a list of those (any).

Every axis named must match. Besides the axes there is `image`, the name of the image.
"""
