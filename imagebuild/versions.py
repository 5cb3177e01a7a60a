"""Does a version satisfy a condition."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from imagebuild.component import Row
from imagebuild.fields import Condition

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


def first_values(rows: Iterable[Row], axes: Mapping[str, str]) -> dict[str, str]:
    """Of each value, the text of the first row that has it and whose condition holds."""
    result: dict[str, str] = {}
    for row in rows:
        if matches(row.when, axes):
            result |= {name: text for name, text in row.values.items() if name not in result}
    return result


def major(version: str) -> str:
    """The part before the first dot: `13` of `13.0`."""
    return version.partition(".")[0]


def minor(version: str) -> str:
    """The part before the second dot: `13.2` of `13.2.1`."""
    return ".".join(version.split(".")[:2])


def facts(axes: Mapping[str, str]) -> dict[str, str]:
    """Axes, and of each the major as `<axis>-major`."""
    return {**axes, **{f"{name}-major": major(value) for name, value in axes.items()}}
