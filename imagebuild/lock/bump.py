"""Propose newer versions of pins, as changes of the matrix and of the lock: what `imagebuild bump` calls."""

from __future__ import annotations

import difflib
import re
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from packaging.version import InvalidVersion, Version

from imagebuild.core import files
from imagebuild.core.errors import ConfigError, ImagebuildError, Mistakes, suggestion
from imagebuild.core.fields import ARCHS, Model, YamlFile
from imagebuild.core.http import Advance
from imagebuild.core.yaml import load_yaml
from imagebuild.lock.resolve import (
    LockFile,
    ask_each,
    incomplete,
    lock_table,
    merged_sources,
    resolve_sources,
    without_stale,
)
from imagebuild.lock.upstream import Upstream
from imagebuild.project.lockfile import (
    GitRef,
    Key,
    PackageSource,
    Source,
    Table,
    WheelSet,
    key_of,
    source_title,
)
from imagebuild.project.matrix import Matrix, Target
from imagebuild.project.plan import Project, make_plan
from imagebuild.render.recipe import Recipe
from imagebuild.render.renderer import Renderer

VERSION = "{version}"
SERIES = re.compile(r"==\{version\}\.\*$")
EXACT = re.compile(r"^([A-Za-z0-9._-]+)==\{version\}$")


Row = tuple[str, int]
"""A pin's name in the matrix, and the index of one of its rows."""
Changes = Mapping[Row, str]
"""Row of a pin → its new version."""


@dataclass(frozen=True)
class Question:
    """Identify a list that versions are read from: what to ask upstream, and the form of the names in it."""

    listing: GitRef | WheelSet | PackageSource
    """Tags of a git repository, one wheel of the index, or one package of a repository."""
    template: str
    """Form of the names in the list, with `{version}`."""

    @property
    def title(self) -> str:
        """Return what is listed, in one line."""
        package = f" {self.listing.packages[0]}={self.template}" if isinstance(self.listing, PackageSource) else ""
        return source_title(self.listing).strip() + package

    def versions(self, names: Mapping[str, Collection[str]]) -> set[str]:
        """Return the versions in the names that upstream listed, by package."""
        package = self.listing.packages[0] if isinstance(self.listing, PackageSource) else ""
        return versions_in(self.template, names[package])


@dataclass
class Inquiry:
    """Say what to ask upstream about one row of a pin, or why nobody can be asked."""

    questions: set[Question] = field(default_factory=set)
    obstacles: list[str] = field(default_factory=list)


def inquiries(recipes: Iterable[Recipe]) -> dict[Row, Inquiry]:
    """Return what to ask about every row of a pin that a target uses."""
    result: dict[Row, Inquiry] = {}
    for recipe in recipes:
        for name in dict.fromkeys((*recipe.target.components, *recipe.stages)):
            pin = recipe.pin(name)
            if recipe.component(name).version_axis or pin is None:
                continue
            pin_name = recipe.component(name).pin or name
            # The command line can change pins; here they are those of the file.
            rows = recipe.project.matrix.model.versions[pin_name]
            inquiry = result.setdefault((pin_name, rows.index(pin)), Inquiry())
            if pin.commit:
                inquiry.obstacles.append("is pinned to a commit, not to a tag")
                continue
            inquiry.questions.update(_questions(recipe, name))
            inquiry.obstacles.extend(_obstacles(recipe, name))
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


def _obstacles(recipe: Recipe, name: str) -> Iterator[str]:
    """Yield the reasons why versions of a component cannot be listed."""
    component = recipe.component(name)
    if any(SERIES.search(text) for text in recipe.component(component.wheels_from or name).wheels):
        yield "names a series of releases, which is chosen by hand"
    if component.archive and VERSION in component.archive:
        yield "is part of an archive's address, and nobody lists those"
    if component.repository and VERSION in component.repository.url:
        yield "is part of a repository's address, and nobody lists those"
    packages = (*component.packages.runtime, *component.packages.devel)
    if recipe.repository(name, ARCHS[0]) is None and any(VERSION in text for text in packages):
        yield "comes with the distribution's release"


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


SIGN = r"[\w.+:~-]"
"""A character of a version."""


def edited(matrix: YamlFile[Matrix], wanted: YamlFile[Matrix], changes: Changes) -> str:
    """Return the matrix's text with the versions of `changes`; `wanted` is what the text must mean.

    Raises ConfigError where a version cannot be changed by itself, for example because an anchor has it.
    """
    lines = files.read_text(matrix.path).splitlines(keepends=True)
    for row, version in changes.items():
        number = _line(matrix, row)
        old = matrix.model.versions[row[0]][row[1]].version
        changed = _replaced(lines[number - 1], row[0], old, version)
        if changed is None:
            raise ConfigError(f"{matrix.path}:{number}: {old} is not here exactly once; write {version} by hand")
        lines[number - 1] = changed
    text = "".join(lines)
    with tempfile.TemporaryDirectory(prefix="imagebuild-") as folder:
        copy = Path(folder) / "matrix.yaml"
        copy.write_text(text, encoding="utf-8")
        document, own = (load_yaml(path, Matrix, Mistakes()) for path in (copy, matrix.path))
    if own:  # without what comes from the matrix that it extends
        versions = {name: wanted.model.versions[name] for name in own.model.versions}
        own = replace(own, model=own.model.model_copy(update={"versions": versions}))
    if document is None or own is None or document.model != own.model:
        where = ", ".join(f"{matrix.path}:{_line(matrix, row)}" for row in changes)
        raise ConfigError(f"{where}: a change of the version here changes something else too; do it by hand")
    return text


def _line(matrix: YamlFile[Matrix], row: Row) -> int:
    """Return the number of the line that has the version of a row."""
    name, i = row
    places = (("versions", name, *rest) for rest in ((i, "version"), (i,), ("version",), ()))
    return next(matrix.lines[place] for place in places if place in matrix.lines)


def _replaced(line: str, name: str, old: str, new: str) -> str | None:
    """Return the line with the version replaced, after `version:` or the pin's name, or where it stands alone.

    Returns None if the version is not there exactly once.
    """
    keys = list(re.finditer(rf"""(?:\bversion|^\s*["']?{re.escape(name)})["']?\s*:\s""", line))
    start = keys[-1].end() if keys else 0
    comment = re.search(r"\s#", line)
    end = comment.start() if comment else len(line)
    matches = [
        match for match in re.finditer(rf"(?<!{SIGN}){re.escape(old)}(?!{SIGN})", line[:end]) if match.start() >= start
    ]
    return line[: matches[0].start()] + new + line[matches[0].end() :] if len(matches) == 1 else None


@dataclass
class Proposals:
    """Hold newer versions of pins, and why others stay."""

    changes: dict[Row, str] = field(default_factory=dict)
    kept: list[tuple[str, str, str]] = field(default_factory=list)
    """Pin, version, and why it stays."""


def propose(
    project: Project,
    targets: Collection[Target],
    names: Collection[str],
    upstream: Upstream,
    *,
    pre: bool,
) -> Proposals:
    """Find the newest version of each pin that all its lists have and the plan accepts; say why other pins stay.

    Of versions that do not fit together, those of the pins that come first are taken. Without `names`, all pins are
    looked up. Raises ConfigError for a name that is no pin.
    """
    versions = project.matrix.model.versions
    pins = {name: rows for name, rows in versions.items() if ("versions", name) not in project.inherited}
    for name in names:
        if name not in pins:
            unknown = f"no pin {name!r}{suggestion(name, dict(pins))}"
            inherited = f"{name} is a pin of the extended matrix; write it here to change it"
            where = project.matrix.at("versions")
            raise ConfigError(f"{where}: versions: {inherited if name in versions else unknown}")
    renderer = Renderer(project, versions)
    known = inquiries(renderer.recipe(target) for target in targets)
    result = Proposals()
    asked: dict[Row, Inquiry] = {}
    for name, rows in pins.items():
        for i, pin in enumerate(rows if not names or name in names else ()):
            inquiry = known.get((name, i))
            if inquiry is None:
                obstacle = "no target uses it"
            elif not inquiry.questions or pin.commit:
                obstacle = "; ".join(dict.fromkeys(inquiry.obstacles)) or "nobody lists its versions"
            elif "+" in pin.version:
                obstacle = "has a local part after the +"
            elif pin.when and not names:
                obstacle = "is for some targets only; name the pin to have it bumped too"
            else:
                asked[name, i] = inquiry
                continue
            result.kept.append((name, pin.version, obstacle))
    answers = _ask({question.listing for inquiry in asked.values() for question in inquiry.questions}, upstream)
    for row, inquiry in asked.items():
        _decide(project, row, {q: answers[key_of(q.listing)] for q in inquiry.questions}, result, pre=pre)
    return result


def _ask(listings: Iterable[Source], upstream: Upstream) -> dict[Key, Mapping[str, Collection[str]] | ImagebuildError]:
    """Return the names in each list, by package for a repository, or the error. A repository is read once."""
    answers: dict[Key, Mapping[str, Collection[str]] | ImagebuildError] = {}

    def ask(listing: Source, _: Advance) -> Mapping[str, Collection[str]]:
        match listing:
            case GitRef(url):
                return {"": upstream.tags(url)}
            case WheelSet(component):
                return {"": upstream.wheel_versions(component)}
            case PackageSource(packages=names):
                return upstream.index(listing, names).versions
        raise AssertionError(listing)

    def settle(listing: Source, answer: Mapping[str, Collection[str]] | ImagebuildError) -> tuple[str, bool]:
        answers[key_of(listing)] = answer
        return ("could not be asked", False) if isinstance(answer, ImagebuildError) else ("asked", True)

    ask_each(sorted(merged_sources(listings), key=source_title), source_title, ask, upstream, settle)
    return answers


def _decide(
    project: Project,
    row: Row,
    answers: Mapping[Question, Mapping[str, Collection[str]] | ImagebuildError],
    result: Proposals,
    *,
    pre: bool,
) -> None:
    """Add the newest version that fits, also to what is in the result already, or why there is none."""
    current = project.matrix.model.versions[row[0]][row[1]].version
    versions: dict[Question, set[str]] = {}
    for question, answer in answers.items():
        if isinstance(answer, ImagebuildError):
            result.kept.append((row[0], current, f"could not be asked: {str(answer).splitlines()[0]}"))
            return
        versions[question] = question.versions(answer)
    try:
        everywhere = newer(current, set.intersection(*versions.values()), pre=pre)
        somewhere = newer(current, set.union(*versions.values()), pre=pre)
    except ValueError as error:
        result.kept.append((row[0], current, str(error)))
        return
    for version in everywhere:
        try:
            sources_of(with_pins(project, {**result.changes, row: version}))
        except ConfigError as error:
            result.kept.append((row[0], current, f"{version} is there, but: {error}"))
        else:
            result.changes[row] = version
            break
    if somewhere and somewhere[0] not in everywhere:
        lacking = sorted(question.title for question, listed in versions.items() if somewhere[0] not in listed)
        result.kept.append((row[0], current, f"{somewhere[0]} is not yet everywhere: {', '.join(lacking)} lacks it"))


def with_pins(project: Project, changes: Changes) -> Project:
    """Return the project with other versions of pins."""
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


def sources_of(project: Project) -> tuple[Source, ...]:
    """Return every source of every target. Raises ConfigError if the plan or a template does not fit the versions."""
    plan = make_plan(project)
    renderer = Renderer(project, project.matrix.model.versions)
    return merged_sources(source for target in plan.targets for source in renderer.recipe(target).sources())


def relocked(project: Project, changes: Changes, upstream: Upstream) -> tuple[Table, str]:
    """Return the lock's entries for the new versions, without those that only the old ones used.

    The second value says which new sources could not be pinned, a line for each.
    """
    entries = lock_table(project.lock)
    before, after = sources_of(project), sources_of(with_pins(project, changes))
    new = [source for source in incomplete(entries, after) if source not in before]
    outcome = resolve_sources(entries, new, upstream, keep=lambda: None)
    return without_stale(entries, after, before), outcome.complaint()


def diff(path: Path, text: str) -> str:
    """Return the change from a file to its new text as a unified diff."""
    before = files.read_text(path).splitlines(keepends=True) if path.exists() else []
    return "".join(difflib.unified_diff(before, text.splitlines(keepends=True), f"a/{path}", f"b/{path}"))


class NewVersion(Model):
    """Describe a newer version of a pin."""

    pin: str
    row: int
    """Which of the pin's versions in the matrix, from 0."""
    version: str
    """What the matrix has."""
    newer: str


class KeptVersion(Model):
    """Describe a version that stays, and why."""

    pin: str
    version: str
    reason: str


class BumpResult(Model):
    """Describe what `imagebuild bump --json` writes."""

    changes: tuple[NewVersion, ...]
    kept: tuple[KeptVersion, ...]
    written: bool
    """Whether the files were changed."""
    unresolved: str = ""
    """With `--relock`: new sources that could not be pinned, a line for each."""


def bump_pins(
    lock: LockFile, upstream: Upstream, names: Collection[str], *, write: bool, relock: bool, pre: bool
) -> tuple[BumpResult, Mapping[Path, str]]:
    """Find newer versions of pins; with `write`, change the matrix, and the lock if it is to be completed (`relock`).

    Returns the result, and the changed files with their new texts. Raises ConfigError for a name that is no pin, or a
    line that cannot be edited.
    """
    proposals = propose(lock.project, lock.targets, names, upstream, pre=pre)
    matrix = lock.project.matrix
    texts: dict[Path, str] = {}
    unresolved = ""
    if proposals.changes:
        wanted = with_pins(lock.project, proposals.changes)
        texts[matrix.path] = edited(matrix, wanted.matrix, proposals.changes)
        if relock:
            entries, unresolved = relocked(lock.project, proposals.changes, upstream)
            texts[lock.path] = lock.text(entries)
    if write:
        for path, text in texts.items():
            files.write_text(path, text)
    result = BumpResult(
        changes=tuple(
            NewVersion(pin=pin, row=row, version=matrix.model.versions[pin][row].version, newer=newer)
            for (pin, row), newer in proposals.changes.items()
        ),
        kept=tuple(KeptVersion(pin=pin, version=version, reason=why) for pin, version, why in proposals.kept),
        written=write and bool(texts),
        unresolved=unresolved,
    )
    return result, texts
