"""Who can be asked for newer versions of a pin, and which of the answers are. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from packaging.version import InvalidVersion, Version

from imagebuild.recipe import ARCHS, Recipe
from imagebuild.sources import PackageSource

VERSION = "{version}"
SERIES = re.compile(r"==\{version\}\.\*$")
EXACT = re.compile(r"^([A-Za-z0-9._-]+)==\{version\}$")


@dataclass(frozen=True)
class Tags:
    """The tags of a git repository."""

    url: str
    template: str


@dataclass(frozen=True)
class WheelVersions:
    """The versions of a wheel on the package index."""

    name: str


@dataclass(frozen=True)
class PackageVersions:
    """The versions of a package in a repository."""

    source: PackageSource
    """With this one package, without version."""
    template: str
    """Of the package's version, where only `{version}` is left to fill in."""


Question = Tags | WheelVersions | PackageVersions
Row = tuple[str, int]
"""A pin's name in the matrix, and which of its rows."""


@dataclass
class Asking:
    """What to ask about one row of a pin, or why nobody can be asked."""

    questions: set[Question] = field(default_factory=set)
    reasons: list[str] = field(default_factory=list)


def askings(recipes: Iterable[Recipe]) -> dict[Row, Asking]:
    """For every row of a pin that a target uses."""
    found: dict[Row, Asking] = {}
    for recipe in recipes:
        for name in dict.fromkeys((*recipe.target.components, *recipe.stages)):
            pin = recipe.pin(name)
            if recipe.of(name).version_axis or pin is None:
                continue
            pin_name = recipe.of(name).pin or name
            # The command line can change pins; here they are those of the file.
            rows = recipe.project.matrix.model.versions[pin_name]
            asking = found.setdefault((pin_name, rows.index(pin)), Asking())
            if pin.commit:
                asking.reasons.append("is pinned to a commit that is no tag")
                continue
            asking.questions.update(_questions(recipe, name))
            asking.reasons.extend(_obstacles(recipe, name))
    return found


def _questions(recipe: Recipe, name: str) -> Iterator[Question]:
    component = recipe.of(name)
    if component.git:
        yield Tags(component.git, component.tag)
    for text in recipe.of(component.wheels_from or name).wheels:
        if match := EXACT.match(text):
            yield WheelVersions(match[1])
    wanted = [p for p in (*component.packages.runtime, *component.packages.devel) if VERSION in p and "=" in p]
    for arch in recipe.archs:
        repository = recipe.repository(name, arch)
        if repository and name in recipe.target.components:
            for text in wanted:
                filled = recipe.fill(name, text, {**recipe.values(name, arch), "version": VERSION}, "packages")
                package, _, template = filled.partition("=")
                source = PackageSource(repository.url, repository.suite, repository.key, (package,))
                yield PackageVersions(source, template)


def _obstacles(recipe: Recipe, name: str) -> Iterator[str]:
    component = recipe.of(name)
    if any(SERIES.search(text) for text in recipe.of(component.wheels_from or name).wheels):
        yield "names a series of releases, which is chosen by hand"
    if component.archive and VERSION in component.archive:
        yield "is part of an archive's address, and nobody lists those"
    if component.repository and VERSION in component.repository.url:
        yield "is part of a repository's address, and nobody lists those"
    packages = (*component.packages.runtime, *component.packages.devel)
    if recipe.repository(name, ARCHS[0]) is None and any(VERSION in text for text in packages):
        yield "comes with the distribution's release"


def versions_in(template: str, names: Iterable[str]) -> set[str]:
    """The versions that tags or packages of that form have: `v{version}-1` has `2.3` in `v2.3-1`."""
    before, _, after = template.partition(VERSION)
    return {
        name[len(before) : len(name) - len(after)]
        for name in names
        if name.startswith(before) and name.endswith(after) and len(name) > len(before) + len(after)
    }


def newer(current: str, versions: Iterable[str], *, pre: bool) -> list[str]:
    """Those above the current one, newest first; only stable releases unless `pre`.

    Raises ValueError if the current one cannot be compared.
    """
    try:
        least = Version(current)
    except InvalidVersion:
        raise ValueError(f"{current} cannot be compared with other versions") from None
    found: Mapping[str, Version] = {text: v for text in versions if (v := _parsed(text)) and v > least}
    return sorted(
        (t for t, v in found.items() if pre or not v.is_prerelease), key=lambda t: (found[t], t), reverse=True
    )


def _parsed(text: str) -> Version | None:
    try:
        return Version(text) if text[:1].isdigit() and "+" not in text else None
    except InvalidVersion:
        return None
