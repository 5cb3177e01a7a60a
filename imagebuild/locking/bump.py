"""`imagebuild bump`: newer versions of pins, as changes of the matrix and of the lock."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from imagebuild import files
from imagebuild import plan as planning
from imagebuild.config import Project, suggestion
from imagebuild.errors import ConfigError, ImagebuildError
from imagebuild.locking.candidates import (
    Asking,
    PackageVersions,
    Question,
    Row,
    Tags,
    WheelVersions,
    askings,
    newer,
    versions_in,
)
from imagebuild.locking.display import Display
from imagebuild.locking.entries import Table, merged, pruned, table
from imagebuild.locking.pool import asked
from imagebuild.locking.resolve import resolve, todo
from imagebuild.locking.upstream import Upstream
from imagebuild.models import Target
from imagebuild.render import Renderer
from imagebuild.sources import GitRef, PackageSource, Source, title

Asked = Tags | WheelVersions | PackageSource
Answer = set[str] | ImagebuildError
Changes = Mapping[Row, str]
"""Row of a pin → its new version."""


@dataclass
class Proposals:
    """What upstream has to offer."""

    changes: dict[Row, str] = field(default_factory=dict)
    reasons: list[tuple[str, str, str]] = field(default_factory=list)
    """Pin, version, and why it stays."""


def propose(
    project: Project,
    targets: Collection[Target],
    names: Collection[str],
    upstream: Upstream,
    display: Display,
    *,
    pre: bool,
) -> Proposals:
    """The newest version of each pin that all its sources have and with which the plan can be made.

    Raises ConfigError for the name of no pin.
    """
    pins = project.matrix.model.versions
    for name in names:
        if name not in pins:
            raise ConfigError(
                f"{project.matrix.at('versions')}: versions: no pin {name!r}{suggestion(name, dict(pins))}"
            )
    renderer = Renderer(project, pins)
    known = askings(renderer.recipe(target) for target in targets)
    wanted = {
        (n, i): known.get((n, i)) for n, rows in pins.items() for i in range(len(rows)) if not names or n in names
    }
    result = Proposals()
    todo: dict[Row, Asking] = {}
    for row, asking in wanted.items():
        if why := _obstacle(project, row, asking, named=bool(names)):
            result.reasons.append((row[0], _version(project, row), why))
        elif asking:
            todo[row] = asking
    answers = _ask({q for asking in todo.values() for q in asking.questions}, upstream, display)
    for row, asking in todo.items():
        _decide(project, row, [(q, answers[q]) for q in asking.questions], result, pre=pre)
    if result.changes:
        sources_of(with_pins(project, result.changes))
    return result


def _obstacle(project: Project, row: Row, asking: Asking | None, *, named: bool) -> str | None:
    pin = project.matrix.model.versions[row[0]][row[1]]
    if asking is None:
        return "no target uses it"
    if not asking.questions or pin.commit:
        return "; ".join(dict.fromkeys(asking.reasons)) or "nobody lists its versions"
    if "+" in pin.version:
        return "has an addition of its own behind the +"
    if pin.when and not named:
        return "is for some targets only; name the pin to have it bumped too"
    return None


def _ask(questions: set[Question], upstream: Upstream, display: Display) -> dict[Question, Answer]:
    """Question → versions, or why there is no answer. A repository is read once for all its packages."""
    packages = [question.source for question in questions if isinstance(question, PackageVersions)]
    repositories = [source for source in merged(packages) if isinstance(source, PackageSource)]
    wanted: list[Asked] = [*repositories, *(q for q in questions if not isinstance(q, PackageVersions))]

    def ask(question: Asked) -> dict[str, list[str]]:
        display.begin(_title(question))
        match question:
            case Tags(url, _):
                return {"": list(upstream.tags(url))}
            case WheelVersions(name):
                return {"": list(upstream.wheel_versions(name))}
            case PackageSource(packages=names):
                return dict(upstream.index(question, names).versions)

    found: dict[Asked, dict[str, list[str]] | ImagebuildError] = {}
    with display, asked(sorted(wanted, key=_title), ask, upstream.stop) as answers:
        for question, answer in answers:
            found[question] = answer
            bad = isinstance(answer, ImagebuildError)
            display.end(_title(question), "could not be asked" if bad else "asked", good=not bad)
    by_url = {q.url: answer for q, answer in found.items() if isinstance(q, PackageSource)}
    return {q: _versions(q, by_url[q.source.url] if isinstance(q, PackageVersions) else found[q]) for q in questions}


def _versions(question: Question, answer: dict[str, list[str]] | ImagebuildError) -> Answer:
    if isinstance(answer, ImagebuildError):
        return answer
    match question:
        case PackageVersions(source, template):
            return versions_in(template, answer[source.packages[0]])
        case Tags(_, template):
            return versions_in(template, answer[""])
        case WheelVersions():
            return set(answer[""])


def _decide(
    project: Project,
    row: Row,
    answers: list[tuple[Question, Answer]],
    result: Proposals,
    *,
    pre: bool,
) -> None:
    """Add the newest version that fits, or why there is none, to the result."""
    current = _version(project, row)
    errors = [str(answer).splitlines()[0] for _, answer in answers if isinstance(answer, ImagebuildError)]
    if errors:
        result.reasons.append((row[0], current, f"could not be asked: {errors[0]}"))
        return
    sets = [answer for _, answer in answers if not isinstance(answer, ImagebuildError)]
    try:
        everywhere = newer(current, set.intersection(*sets), pre=pre)
        somewhere = newer(current, set.union(*sets), pre=pre)
    except ValueError as error:
        result.reasons.append((row[0], current, str(error)))
        return
    for version in everywhere:
        try:
            sources_of(with_pins(project, {row: version}))
        except ConfigError as error:
            result.reasons.append((row[0], current, f"{version} is there, but: {error}"))
        else:
            result.changes[row] = version
            break
    if somewhere and somewhere[0] not in everywhere:
        lacking = sorted({_title(q) for q, answer in answers if isinstance(answer, set) and somewhere[0] not in answer})
        result.reasons.append((row[0], current, f"{somewhere[0]} is not yet everywhere: {', '.join(lacking)} lacks it"))


def _version(project: Project, row: Row) -> str:
    return project.matrix.model.versions[row[0]][row[1]].version


def _title(question: Question | PackageSource) -> str:
    match question:
        case Tags(url, template):
            return title(GitRef(url, template))
        case PackageVersions(source, template):
            return f"{title(source)} {source.packages[0]}={template}"
        case WheelVersions(name):
            return f"wheels {name}"
        case PackageSource():
            return title(question)


def with_pins(project: Project, changes: Changes) -> Project:
    """The project with other versions."""
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
    """Every source of every target. Raises ConfigError if the plan or a template does not go with the versions."""
    plan = planning.make_plan(project)
    renderer = Renderer(project, project.matrix.model.versions)
    return merged(source for target in plan.targets for source in renderer.recipe(target).sources())


def relocked(project: Project, changes: Changes, upstream: Upstream, display: Display) -> tuple[Table, str]:
    """The lock's entries for the new versions, without those only the old ones used, and what was not resolved."""
    entries = table(project.lock)
    before, after = sources_of(project), sources_of(with_pins(project, changes))
    outcome = resolve(
        entries, [s for s in todo(entries, after) if s not in before], upstream, display, keep=lambda: None
    )
    return pruned(entries, after, before), outcome.complaint()


def diff(path: Path, text: str) -> str:
    """The change of a file as a unified diff."""
    old = files.read_text(path) if path.exists() else ""
    return "".join(_lines(old, text, str(path)))


def _lines(old: str, new: str, name: str) -> Iterator[str]:
    before, after = old.splitlines(keepends=True), new.splitlines(keepends=True)
    return difflib.unified_diff(before, after, f"a/{name}", f"b/{name}")
