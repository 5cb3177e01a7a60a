"""Propose newer versions of pins, as changes of the matrix: what `imagebuild bump` calls."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import yaml
from packaging.version import InvalidVersion, Version

from imagebuild.core import files
from imagebuild.core.errors import ConfigError, ImagebuildError, suggestion
from imagebuild.core.fields import YamlFile
from imagebuild.core.http import Advance
from imagebuild.lock.resolve import LockFile, ask_each, merged_sources
from imagebuild.lock.upstream import Upstream
from imagebuild.project.lockfile import GitRef, Key, PackageSource, Source, WheelSet, key_of, source_title
from imagebuild.project.matrix import Matrix
from imagebuild.project.plan import Project, make_plan
from imagebuild.render.recipe import Recipe
from imagebuild.render.renderer import Renderer

VERSION = "{version}"
EXACT = re.compile(r"^([A-Za-z0-9._-]+)==\{version\}$")
Row = tuple[str, int]
"""A pin's name in the matrix, and the index of one of its rows."""
Changes = Mapping[Row, str]
"""Row of a pin → its new version."""
Listing = Mapping[str, Collection[str]]
"""Names that upstream has, by package for a repository, else all under an empty name."""


@dataclass(frozen=True)
class Question:
    """Identify a list that versions are read from: what to ask upstream, and the form of the names in it."""

    listing: GitRef | WheelSet | PackageSource
    """Tags of a git repository, one wheel of the index, or one package of a repository."""
    template: str
    """Form of the names in the list, with `{version}`."""

    @property
    def package(self) -> str:
        """Return the package of a repository; empty for other lists."""
        return self.listing.packages[0] if isinstance(self.listing, PackageSource) else ""


@dataclass
class BumpResult:
    """Hold newer versions of pins, and why others stay."""

    changes: dict[Row, str] = field(default_factory=dict)
    kept: list[tuple[str, str, str]] = field(default_factory=list)
    """Pin, version, and why it stays."""


def inquiries(recipes: Iterable[Recipe]) -> dict[Row, set[Question]]:
    """Return what to ask about every row of a pin that a target uses."""
    result: dict[Row, set[Question]] = {}
    for recipe in recipes:
        for name in dict.fromkeys((*recipe.target.components, *recipe.stages)):
            pin = recipe.pin(name)
            if recipe.component(name).version_axis or pin is None:
                continue
            pin_name = recipe.component(name).pin or name
            # The command line can change pins; here they are those of the file.
            row = (pin_name, recipe.project.matrix.model.versions[pin_name].index(pin))
            result.setdefault(row, set()).update(() if pin.commit else _questions(recipe, name))
    return result


def _questions(recipe: Recipe, name: str) -> Iterator[Question]:
    """Yield the places that list versions of a component."""
    component = recipe.component(name)
    if component.git:
        yield Question(GitRef(component.git, component.tag), component.tag)
    for text in recipe.component(component.wheels_from or name).wheels:
        if match := EXACT.match(text):
            yield Question(WheelSet(match[1], "", ()), VERSION)
    wanted = [p for p in (*component.packages.runtime, *component.packages.devel) if VERSION in p and "=" in p]
    for arch in recipe.archs:
        repository = recipe.repository(name, arch)
        if repository and name in recipe.target.components:
            for text in wanted:
                filled = recipe.fill(name, text, {**recipe.values(name, arch), "version": VERSION}, "packages")
                package, _, template = filled.partition("=")
                source = PackageSource(repository.url, repository.suite, repository.key, (package,))
                yield Question(source, template)


def versions_in(template: str, names: Iterable[str]) -> set[str]:
    """Return the versions in names of tags or packages: with the template `v{version}-1`, `2.3` of `v2.3-1`."""
    before, _, after = template.partition(VERSION)
    return {
        name[len(before) : len(name) - len(after)]
        for name in names
        if name.startswith(before) and name.endswith(after) and len(name) > len(before) + len(after)
    }


def newer(current: str, versions: Iterable[str], *, pre: bool) -> list[str]:
    """Return the versions above the current one, newest first; only stable releases unless `pre`.

    Raises ValueError if the current one cannot be compared.
    """
    try:
        least = Version(current)
    except InvalidVersion:
        raise ValueError(f"{current} cannot be compared with other versions") from None
    above: dict[str, Version] = {}
    for text in versions:
        if text[:1].isdigit() and "+" not in text:
            with suppress(InvalidVersion):
                version = Version(text)
                if version > least and (pre or not version.is_prerelease):
                    above[text] = version
    return sorted(above, key=lambda text: (above[text], text), reverse=True)


def edited(matrix: YamlFile[Matrix], changes: Changes) -> str:
    """Return the matrix's text with other versions of pins, each in the quotes that it had.

    Raises ConfigError where a version is not written as one word, for example because an anchor has it.
    """
    text = files.read_text(matrix.path)
    pins = _children(_children(yaml.compose(text))["versions"])
    edits = []
    for (name, i), version in changes.items():
        pin, old = pins.get(name), matrix.model.versions[name][i].version
        row = pin.value[i] if pin and pin.id == "sequence" else pin
        node = row and _children(row).get("version", row)
        start, end = (node.start_mark.index, node.end_mark.index) if node else (0, 0)
        quote = text[start] if text[start] in "\"'" else ""
        if text[start:end] != f"{quote}{old}{quote}":
            where = matrix.at("versions", name, i)
            raise ConfigError(f"{where}: {old} does not stand here by itself; write {version} by hand")
        edits.append((start, end, f"{quote}{version}{quote}"))
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    return text


def _children(node: Any) -> dict[str, Any]:
    """Return key → node of a mapping; nothing of another node."""
    return {key.value: value for key, value in node.value} if node.id == "mapping" else {}


def bump_pins(lock: LockFile, upstream: Upstream, names: Collection[str], *, pre: bool) -> BumpResult:
    """Find the newest version of each pin that all its lists have and the plan accepts; say why other pins stay.

    Of versions that do not fit together, those of the pins that come first are taken. Without `names`, all pins are
    looked up. Raises ConfigError for a name that is no pin.
    """
    project = lock.project
    versions = project.matrix.model.versions
    pins = {name: rows for name, rows in versions.items() if project.is_own("versions", name)}
    for name in names:
        if name not in pins:
            unknown = f"no pin {name!r}{suggestion(name, dict(pins))}"
            inherited = f"{name} is a pin of the extended matrix; write it here to change it"
            where = project.matrix.at("versions")
            raise ConfigError(f"{where}: versions: {inherited if name in versions else unknown}")
    known = inquiries(lock.recipes)
    result = BumpResult()
    asked: dict[Row, set[Question]] = {}
    for name, rows in pins.items():
        for i, pin in enumerate(rows if not names or name in names else ()):
            if not known.get((name, i)):
                reason = "nobody lists its versions" if (name, i) in known else "no target uses it"
            elif "+" in pin.version:
                reason = "has a local part after the +"
            elif pin.when and not names:
                reason = "is for some targets only; name the pin to have it bumped too"
            else:
                asked[name, i] = known[name, i]
                continue
            result.kept.append((name, pin.version, reason))
    answers = _ask({question.listing for questions in asked.values() for question in questions}, upstream)
    for row, questions in asked.items():
        _decide(project, row, {q: answers[key_of(q.listing)] for q in questions}, result, pre=pre)
    return result


def _ask(listings: Iterable[Source], upstream: Upstream) -> dict[Key, Listing | ImagebuildError]:
    """Return the names in each list, or the error. A repository is read once."""
    answers: dict[Key, Listing | ImagebuildError] = {}

    def ask(listing: Source, _: Advance) -> Listing:
        match listing:
            case GitRef(url):
                return {"": upstream.tags(url)}
            case WheelSet(component):
                return {"": upstream.wheel_versions(component)}
            case PackageSource(packages=names):
                return upstream.index(listing, names).versions
        raise AssertionError(listing)

    def settle(listing: Source, answer: Listing | ImagebuildError) -> tuple[str, bool]:
        answers[key_of(listing)] = answer
        return ("could not be asked", False) if isinstance(answer, ImagebuildError) else ("asked", True)

    ask_each(sorted(merged_sources(listings), key=source_title), source_title, ask, upstream, settle)
    return answers


def _decide(
    project: Project, row: Row, answers: Mapping[Question, Listing | ImagebuildError], result: BumpResult, *, pre: bool
) -> None:
    """Add the newest version that fits, also to what is in the result already, or why there is none."""
    current = project.matrix.model.versions[row[0]][row[1]].version
    versions: dict[Question, set[str]] = {}
    for question, answer in answers.items():
        if isinstance(answer, ImagebuildError):
            result.kept.append((row[0], current, f"could not be asked: {str(answer).splitlines()[0]}"))
            return
        versions[question] = versions_in(question.template, answer[question.package])
    try:
        everywhere = newer(current, set.intersection(*versions.values()), pre=pre)
        somewhere = newer(current, set.union(*versions.values()), pre=pre)
    except ValueError as error:
        result.kept.append((row[0], current, str(error)))
        return
    for version in everywhere:
        try:
            check_sources(with_pins(project, {**result.changes, row: version}))
        except ConfigError as error:
            result.kept.append((row[0], current, f"{version} is there, but: {error}"))
        else:
            result.changes[row] = version
            break
    if somewhere and somewhere[0] not in everywhere:
        lacking = sorted(
            {source_title(q.listing).strip() for q, found in versions.items() if somewhere[0] not in found}
        )
        result.kept.append((row[0], current, f"{somewhere[0]} is not yet everywhere: {', '.join(lacking)} lacks it"))


def with_pins(project: Project, changes: Changes) -> Project:
    matrix = project.matrix.model
    versions = {
        name: tuple(
            pin.model_copy(update={"version": changes[name, i]}) if (name, i) in changes else pin
            for i, pin in enumerate(rows)
        )
        for name, rows in matrix.versions.items()
    }
    document = replace(project.matrix, model=matrix.model_copy(update={"versions": versions}))
    return replace(project, matrix=document)


def check_sources(project: Project) -> None:
    """Raise ConfigError if the plan, or a template of an address, does not fit the versions."""
    renderer = Renderer(project, project.matrix.model.versions)
    merged_sources(source for target in make_plan(project).targets for source in renderer.recipe(target).sources())
