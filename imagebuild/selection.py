"""Which checks of an image run: all of its components, or those chosen by name. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from imagebuild import checks
from imagebuild.component import Check
from imagebuild.config import Project, suggestion
from imagebuild.errors import ConfigError, NothingSelected

IMAGE = "image"
"""Stands before the names of checks that read an image without starting it."""


@dataclass(frozen=True)
class Listed:
    """A check that can be chosen."""

    name: str
    description: str
    check: Check | None
    """`None` for one that starts nothing in the image."""


def known(project: Project, static: Mapping[str, str]) -> list[Listed]:
    """All checks there are; `static` are those of the image as a whole, with what they prove."""
    listed = [Listed(f"{IMAGE}/{name}", text, None) for name, text in static.items()]
    for component, document in project.components.items():
        listed += [
            Listed(f"{component}/{check.name}", check.description, check)
            for check in checks.of_component(document.model)
        ]
    return listed


def of_components(listed: Iterable[Listed], components: Iterable[str]) -> list[Listed]:
    """Those of an image with these components."""
    wanted = {IMAGE, *components}
    return [entry for entry in listed if entry.name.partition("/")[0] in wanted]


def chosen(patterns: Sequence[str], offered: Sequence[Listed], everything: Sequence[Listed]) -> list[Listed]:
    """What fits the patterns `component/check`; a component alone means all of its checks. Without patterns, all.

    Raises ConfigError for a name that is not known anywhere, NothingSelected if nothing is left.
    """
    wanted = [pattern if "/" in pattern else f"{pattern}/*" for pattern in patterns] or ["*"]
    for pattern in wanted:
        if not _fit(pattern, everything):
            names = [entry.name for entry in everything]
            near = suggestion(pattern, names) if pattern.endswith("/*") is False else _component(pattern, names)
            raise ConfigError(f"--check {pattern}: no such check{near or '; see `imagebuild verify --list`'}")
    found = {entry.name: entry for pattern in wanted for entry in _fit(pattern, offered)}
    if not found:
        raise NothingSelected(f"--check {' '.join(patterns)}: the image has nothing that these checks are about")
    return [entry for entry in offered if entry.name in found]


def _fit(pattern: str, listed: Iterable[Listed]) -> list[Listed]:
    return [entry for entry in listed if fnmatchcase(entry.name, pattern)]


def _component(pattern: str, names: Iterable[str]) -> str:
    return suggestion(pattern.removesuffix("/*"), {name.partition("/")[0] for name in names})
