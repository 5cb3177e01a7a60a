"""Newer versions of pins (versions in the matrix): find them on the servers, and write them into the matrix.
Used by `imagebuild bump`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import yaml
from packaging.version import InvalidVersion, Version

from imagebuild.core import fields, files
from imagebuild.core.advisory import known_bad
from imagebuild.core.errors import ConfigError, ImagebuildError, suggestion
from imagebuild.core.fields import YamlFile
from imagebuild.core.http import Advance
from imagebuild.lock.resolve import LockFile, ask_each, merged_sources
from imagebuild.lock.upstream import Upstream
from imagebuild.project.lockfile import GitRef, Key, PackageSource, Source, WheelSet, key_of, source_title
from imagebuild.project.matrix import Matrix
from imagebuild.project.plan import make_plan
from imagebuild.project.project import Project
from imagebuild.render.recipe import Part, Recipe
from imagebuild.render.renderer import Renderer

VERSION = "{version}"
EXACT = re.compile(r"^([A-Za-z0-9._-]+)==\{version\}$")
Row = tuple[str, int]
"""The name of a pin in the matrix, and the index of one of its rows. A pin may list several versions, one in each
row."""
Changes = Mapping[Row, str]
"""Maps the row of a pin to its new version."""
Question = tuple[Source, str]
"""A source that lists versions (tags of a git repository, or versions of a wheel or a package), and the form of the
names in the list, such as `v{version}`."""


@dataclass
class BumpResult:
    """Newer versions of pins, and the reasons why other pins keep their versions."""

    changes: dict[Row, str] = field(default_factory=dict)
    kept: list[tuple[str, str, str]] = field(default_factory=list)
    """The name and version of each pin that keeps its version, and the reason."""
    faults: list[str] = field(default_factory=list)
    """The advisories that each change fixes, and those about the new version."""


def inquiries(project: Project, recipes: Iterable[Recipe]) -> dict[Row, set[Question]]:
    """Return the rows of pins that targets use. Maps each row to the sources to ask for newer versions."""
    result: defaultdict[Row, set[Question]] = defaultdict(set)
    for recipe in recipes:
        for part in recipe.parts.values():
            if part.pin and not part.component.version_axis:
                # Find the row in the file. The command line can change pins only in memory.
                name = part.component.pin or part.name
                row = project.matrix.model.versions[name].index(part.pin)
                result[name, row].update(() if part.pin.commit else _questions(project, part))
    return result


def _questions(project: Project, part: Part) -> Iterator[Question]:
    """Yield each source that lists the versions of a component, with the pattern of a version's name in the list."""
    component = part.component
    if component.git:
        yield GitRef(component.git, component.tag), component.tag
    for text in (*project.components[component.wheels_from or part.name].model.wheels, *component.python):
        if match := EXACT.match(text):
            yield WheelSet(match[1], "", ()), VERSION
    yield from part.versioned


def newer(current: str, versions: Iterable[str]) -> list[str]:
    """Return the stable versions that are newer than `current`, newest first.
    Raises InvalidVersion if `current` is not a version."""
    least = Version(current)
    above: dict[str, Version] = {}
    for text in versions:
        if text[:1].isdigit() and "+" not in text and fields.VERSION.fits(text):
            with suppress(ValueError):
                if (version := Version(text)) > least and not version.is_prerelease:
                    above[text] = version
    return sorted(above, key=lambda text: (above[text], text), reverse=True)


def edited(matrix: YamlFile[Matrix], changes: Changes) -> str:
    """Return the text of the matrix with new versions of pins. Quotes around the versions are kept.
    Raises ConfigError if a version is not written as a plain value, for example because it is a YAML alias."""
    text = files.read_text(matrix.path)
    edits = []
    for (name, i), version in changes.items():
        node: Any = yaml.compose(text)
        old = matrix.model.versions[name][i].version
        # A pin is a version, a mapping with a version, or a list of these.
        for key in ("versions", name, i, "version"):
            if isinstance(node, yaml.MappingNode):
                node = next((value for name, value in node.value if name.value == key), node)
            elif isinstance(node, yaml.SequenceNode):
                node = node.value[i]
        start, end = node.start_mark.index, node.end_mark.index
        quote = text[start] if text[start] in "\"'" else ""
        if text[start:end] != f"{quote}{old}{quote}":
            where = matrix.at("versions", name, i)
            raise ConfigError(f"{where}: {old} is not written here as a plain value; change it to {version} by hand")
        edits.append((start, end, f"{quote}{version}{quote}"))
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    return text


def bump_pins(lock: LockFile, upstream: Upstream, names: Collection[str]) -> BumpResult:
    """Find a new version of each pin: the newest one that all sources of the pin list and that the plan accepts.

    If new versions of two pins do not fit together, the pin that comes first in the matrix gets its new version.
    Without `names`, all pins are checked. Raises ConfigError if a name is not a pin in the project's own matrix."""
    project = lock.project
    pins = {name: rows for name, rows in project.matrix.model.versions.items() if project.is_own("versions", name)}
    for name in names:
        if name not in pins:
            where = project.matrix.at("versions")
            raise ConfigError(f"{where}: versions: there is no pin {name!r}{suggestion(name, dict(pins))}")
    known = inquiries(project, lock.recipes)
    result = BumpResult()
    asked: dict[Row, set[Question]] = {}
    for name, rows in pins.items():
        for i, pin in enumerate(rows if not names or name in names else ()):
            if not known.get((name, i)):
                result.kept.append((name, pin.version, "no server lists its versions"))
            elif pin.when and not names:
                reason = f"applies only to some targets; to change the version, run `imagebuild bump {name}`"
                result.kept.append((name, pin.version, reason))
            else:
                asked[name, i] = known[name, i]
    answers = _ask({listing for questions in asked.values() for listing, _ in questions}, upstream)
    for (name, i), questions in asked.items():
        current = pins[name][i].version
        try:
            candidates = newer(current, set.intersection(*(_versions(answers, *question) for question in questions)))
        except (ImagebuildError, InvalidVersion) as error:
            result.kept.append((name, current, f"cannot be compared: {str(error).splitlines()[0]}"))
            continue
        for version in candidates:
            try:
                check_versions(project, {**result.changes, (name, i): version})
            except ConfigError as error:
                result.kept.append((name, current, f"{version} exists, but cannot be used: {error}"))
            else:
                result.changes[name, i] = version
                used = {part.name for r in lock.recipes for part in r.parts.values() if part.pin == pins[name][i]}
                result.faults += _faults_of_change(name, used, current, version)
                break
    return result


def _faults_of_change(name: str, used: Collection[str], current: str, version: str) -> Iterator[str]:
    """Yield a sentence for each advisory about the old or the new version of a pin. `used`: components with the pin."""
    before, after = (
        {advisory.id: advisory for advisory in known_bad(dict.fromkeys(used, each))} for each in (current, version)
    )
    for advisory in after.values():
        yield f"known fault of {name} {version}: {advisory}"
    for id_, advisory in before.items():
        if id_ not in after:
            yield f"{name} {version} fixes {advisory.name}: {advisory.summary}"


Answer = Mapping[str, Collection[str]] | ImagebuildError
"""The answer about a source: the error, or the versions that the server lists. Maps each package of a package
repository to its versions. For other sources, the only key is the empty text."""


def _ask(listings: Iterable[Source], upstream: Upstream) -> dict[Key, Answer]:
    """Return the names that each source lists, or the error. Each repository is read only once."""
    answers: dict[Key, Answer] = {}

    def ask(listing: Source, _: Advance) -> Mapping[str, Collection[str]]:
        match listing:
            case GitRef(url):
                return {"": upstream.tags(url)}
            case WheelSet(component):
                return {"": upstream.wheel_versions(component)}
            case PackageSource():
                return upstream.index(listing).versions
        raise AssertionError(listing)

    def settle(listing: Source, answer: Answer) -> tuple[str, bool]:
        answers[key_of(listing)] = answer
        return ("failed", False) if isinstance(answer, ImagebuildError) else ("read", True)

    ask_each(sorted(merged_sources(listings), key=source_title), ask, upstream, settle)
    return answers


def _versions(answers: Mapping[Key, Answer], listing: Source, template: str) -> set[str]:
    """Return the versions in the names that a source lists: `2.3` for `v2.3-1` and the template `v{version}-1`.
    If the answer about the source is an error, raise this error."""
    answer = answers[key_of(listing)]
    if isinstance(answer, ImagebuildError):
        raise answer
    names = answer[listing.packages[0] if isinstance(listing, PackageSource) else ""]
    before, _, after = map(re.escape, template.partition(VERSION))
    return {match[1] for name in names if (match := re.fullmatch(f"{before}(.+){after}", name))}


def check_versions(project: Project, changes: Changes) -> None:
    """Raise ConfigError if the matrix is not valid with the new versions of pins, or if an advisory refuses one."""
    matrix = project.matrix.model
    versions = dict(matrix.versions)
    for (name, i), version in changes.items():
        for advisory in known_bad({name: version}):
            if advisory.severity == "refuse" and not advisory.only_if:
                raise ConfigError(str(advisory))
        rows = versions[name]
        versions[name] = (*rows[:i], rows[i].model_copy(update={"version": version}), *rows[i + 1 :])
    document = replace(project.matrix, model=matrix.model_copy(update={"versions": versions}))
    changed = replace(project, matrix=document)
    renderer = Renderer(changed)
    merged_sources(owned.source for t in make_plan(changed).targets for owned in renderer.recipe(t).sources)
