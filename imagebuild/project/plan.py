"""Compute the targets of a matrix, their names and tags, and every contradiction between the files. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from graphlib import CycleError, TopologicalSorter
from itertools import product
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from imagebuild.core.errors import ConfigError, Mistakes, NothingSelected, nearest, suggestion
from imagebuild.core.fields import OPERATORS, TAG, Arch, Condition, Loc, YamlFile, axis_facts, major, matches, minor
from imagebuild.project.component import Component, Variant
from imagebuild.project.lockfile import Lock, LockedImage
from imagebuild.project.matrix import NO_VERSION, REPOSITORY, Base, Excluded, Matrix, Pin, Plan, Target, combination_id

TAGGED = re.compile(rf"(?:[a-z0-9.-]+(?::[0-9]+)?/)?[a-z0-9._/-]+:{TAG}")
"""A repository with a tag."""
REVISION = "{revision}"
"""Stays in a plan's tags, so that a plan does not depend on the commit; publishing fills it in."""
REVISION_DIGITS = 7
FIELD = re.compile(r"{([^{}]*)}")
"""A name in a template."""


@dataclass(frozen=True)
class Changes:
    """Hold changes of the project by the command line."""

    values: Mapping[str, str] = field(default_factory=dict)
    """Axis → its values, with commas between, or pin → version (`version@commit` for a commit that is no tag)."""
    with_: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    repository: str | None = None
    """Where images are named and pushed, instead of the matrix's `repository`."""
    base_image: str | None = None
    """Image to start from instead of the base of each target, with a digest unless the Dockerfile is only printed."""
    append: str | None = None
    """File with instructions for the end of every image."""
    appended: str = ""
    """Those instructions."""

    @property
    def options_of_plan(self) -> tuple[str, ...]:
        """Return the options that change the plan, and so what is to be locked, as words of a command line."""
        pairs = [("--set", f"{name}={value}") for name, value in self.values.items()]
        pairs += [("--with", name) for name in self.with_] + [("--without", name) for name in self.without]
        return tuple(word for pair in pairs for word in pair)

    @property
    def options(self) -> tuple[str, ...]:
        """Return the options that make these changes, as words of a command line."""
        base = ("--base-image", self.base_image) if self.base_image else ()
        return (*self.options_of_plan, *base, *(("--append", self.append) if self.append else ()))

    def lock_command(self, *words: str) -> str:
        """Return the command that pins the sources of a plan with these changes; `words` are its other arguments."""
        return shlex.join(["imagebuild", "lock", *words, *self.options_of_plan])


def check_repository(option: str, name: str | None) -> None:
    """Raise ConfigError if an option has a text that cannot be a repository."""
    if name is not None and not REPOSITORY.fits(name):
        raise ConfigError(f"{option} {name}: must be {REPOSITORY.words}")


def parse_changes(
    settings: Iterable[str],
    with_: Iterable[str] = (),
    without: Iterable[str] = (),
    *,
    repository: str | None = None,
) -> Changes:
    """Return the changes of options such as `--set cuda=13.1`. Raises ConfigError for text that is not `name=value`."""
    check_repository("--registry", repository)
    values = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not (name and equals and value):
            raise ConfigError(f"--set {setting}: write it as name=value, for example --set cuda=13.1")
        if name in values:
            raise ConfigError(f"--set {setting}: {name} is set twice; give an axis several values as {name}=A,B")
        values[name] = value
    return Changes(values, tuple(with_), tuple(without), repository)


@dataclass(frozen=True)
class Project:
    """Hold the files of a project: the matrix, the components and the lock, with those of what it extends."""

    matrix: YamlFile[Matrix]
    components: Mapping[str, YamlFile[Component]]
    lock: Lock
    roots: tuple[Path, ...]
    """Folders of templates and components: its own, then those of what it extends."""
    own_lock: Lock
    """What the project's own file has."""
    changes: Changes = Changes()
    """What the command line changes; pins, repository, base and appended instructions are in `matrix` already."""

    @property
    def root(self) -> Path:
        return self.matrix.path.parent

    def is_own(self, *place: str | int) -> bool:
        """Return whether the project's own matrix has a value, not one that it extends. Of a JSON file, it has all."""
        return not self.matrix.lines or place in self.matrix.lines

    def changed(self, changes: Changes) -> Project:
        """Return the project with these changes. Raises ConfigError for what `--set` cannot set."""
        matrix, bases, pins = self.matrix.model, self.matrix.model.bases, self.lock.images
        name, _, digest = (changes.base_image or "").partition("@")
        if name:
            bases = dict.fromkeys(bases, Base(image=name))
            pins = {**pins, name: LockedImage.model_construct(digest=digest)}
        images = {}
        for label, image in matrix.images.items():
            appended = "\n".join(filter(None, (image.append.strip(), changes.appended.strip())))
            images[label] = image.model_copy(update={"append": appended, "base": image.base and (name or image.base)})
        model = matrix.model_copy(
            update={
                "repository": changes.repository or matrix.repository,
                "bases": bases,
                "images": images,
                "versions": {**matrix.versions, **self._pins_set(changes.values)},
            }
        )
        lock = self.lock.model_copy(update={"images": pins})
        return replace(self, matrix=replace(self.matrix, model=model), lock=lock, changes=changes)

    def _pins_set(self, values: Mapping[str, str]) -> dict[str, tuple[Pin, ...]]:
        """Return the pins among the values of `--set`; the others are of axes."""
        mistakes, versions = Mistakes(), self.matrix.model.versions
        pins: dict[str, tuple[Pin, ...]] = {}
        axes = {axis for image in self.matrix.model.images.values() for axis in image.axes}
        for name, value in values.items():
            version, at, commit = value.partition("@")
            if name in axes:
                continue
            if name not in {*versions, *self.components}:
                problem = f"neither an axis nor a pin{suggestion(name, {*axes, *versions})}"
                mistakes.add(f"--set {name}={value}", problem)
                continue
            try:
                pins[name] = (Pin(version=version, commit=commit if at else None),)
            except ValidationError as error:
                mistakes.add(f"--set {name}={value}", error.errors()[0]["msg"].removeprefix("Value error, "))
        mistakes.stop_if_any()
        return pins

    def folder(self, component: str) -> Path:
        """Return the folder of a component. Raises ConfigError if there is no such component."""
        if component not in self.components:
            raise ConfigError(f"{self.roots[0]}: no component {component!r}{suggestion(component, self.components)}")
        return self.components[component].path.parent

    def template(self, name: str) -> Path:
        """Return the file of a template: `components/NAME/FILE`, or a file that all share, the project's own first."""
        if name.startswith("components/"):
            _, component, file = name.split("/", 2)
            return self.folder(component) / file
        return next((path for root in self.roots if (path := root / name).exists()), self.roots[0] / name)

    def pin(self, component: str, facts: Mapping[str, str]) -> Pin | None:
        """Return the first pin of a component whose condition holds; `facts` are of the target's axes."""
        rows = self.matrix.model.versions.get(self.components[component].model.pin or component, ())
        return next((pin for pin in rows if matches(pin.when, facts)), None)

    def version(self, component: str, facts: Mapping[str, str]) -> str | None:
        """Return the version of a component in a target with these facts; None if no pin is for it."""
        if axis := self.components[component].model.version_axis:
            return facts[axis]
        pin = self.pin(component, facts)
        return pin.version if pin else None

    def provider(self, wanted: str, present: Collection[str]) -> str | None:
        """Return what fulfils a requirement: a component that is present, else the one of that name, if any."""
        if wanted in present:
            return wanted
        provider = next((name for name in present if wanted in self.components[name].model.provides), None)
        return provider or (wanted if wanted in self.components else None)


def make_plan(project: Project) -> Plan:
    """Return all targets and all excluded combinations. Raises ConfigError with every mistake in the files."""
    mistakes = Mistakes()
    matrix, changes = project.matrix.model, project.changes
    check_names(project, mistakes)
    if not matrix.images:
        mistakes.add(project.matrix.at("images"), "images: there is none; add one, such as `imagebuild init` writes")
    mistakes.stop_if_any()
    targets: list[Target] = []
    excluded: list[Excluded] = []
    used: set[str] = set()
    for name, image in matrix.images.items():
        components = with_requirements(project, name, mistakes)
        choices = _axis_values(project, name, mistakes)
        if mistakes.texts:
            continue
        for values in product(*choices):
            axes = dict(zip(image.axes, values, strict=True))
            facts = axis_facts(axes)
            chosen = {c: project.version(c, facts) for c in components}
            against = list(_objections(project, name, facts, chosen))
            used.update(rule for rule, _ in against)
            present = {c: v for c, v in chosen.items() if axes["variant"] in project.components[c].model.variants}
            lacking = [project.components[c].model.pin or c for c, version in present.items() if version is None]
            problem = f"no version is for {combination_id(name, axes)}"
            if not changes.values.keys().isdisjoint(axes):
                # The axis is for the image that was asked for; others need not have versions for it.
                against += [(f"versions.{pin}", problem) for pin in lacking]
            if against:
                rule, reason = against[0]
                excluded.append(Excluded(image=name, axes=axes, rule=rule, reason=reason))
                continue
            for pin in lacking:
                where = f"{project.matrix.at('versions', pin)}: versions.{pin}"
                mistakes.add_once(where, f"{problem}; add `{pin}: VERSION`, or a rule that excludes it")
            if not lacking:
                versions = {c: str(version) for c, version in present.items()}
                targets.append(make_target(project, name, axes, versions, mistakes))
    if not (changes.values or changes.with_ or mistakes.texts):
        _check_use(project, targets, excluded, used, mistakes)
    mistakes.stop_if_any()
    check_tags(project, targets, mistakes)
    check_policy(project, targets, mistakes)
    mistakes.stop_if_any()
    restricted = {n: d.model.redistribution for n, d in project.components.items() if d.model.redistribution}
    return Plan(targets=with_own_aliases(targets), excluded=tuple(excluded), restricted=restricted)


def with_requirements(project: Project, image: str, mistakes: Mistakes) -> tuple[str, ...]:
    """Return the components of an image and what they require, requirements first; note what nothing fulfils."""
    where, what = project.matrix.at("images", image, "components"), f"images.{image}.components"
    own, changes = project.matrix.model.images[image].components, project.changes
    listed = tuple(dict.fromkeys(c for c in (*own, *changes.with_) if c not in changes.without))
    graph: dict[str, tuple[str, ...]] = {}
    todo = list(listed)
    while todo:
        name = todo.pop()
        if name in graph:
            continue
        requires = project.components[name].model.requires
        providers = {wanted: project.provider(wanted, (*listed, *graph)) for wanted in requires}
        for wanted, provider in providers.items():
            if provider is None:
                offers = [c for c, d in project.components.items() if wanted in d.model.provides]
                mistakes.add(where, f"{what}: {name} needs {wanted!r}; add one of: {', '.join(offers)}")
            elif provider in own and provider in changes.without:
                mistakes.add(f"--without {provider}", f"{name} in {image} requires it; leave that out, too")
        graph[name] = tuple(provider for provider in providers.values() if provider)
        todo += graph[name]
    for wanted in sorted({role for name in graph for role in project.components[name].model.provides}):
        offers = [name for name in graph if name == wanted or wanted in project.components[name].model.provides]
        if len(offers) > 1:
            both = " and ".join(sorted(offers))
            mistakes.add(where, f"{what}: {both} provide {wanted!r}; leave one out, or --without")
    try:
        return tuple(TopologicalSorter({n: graph[n] for n in sorted(graph)}).static_order())
    except CycleError as error:
        circle = error.args[1]
        problem = f"requires: goes in a circle: {' → '.join(reversed(circle))}; remove one of them"
        mistakes.add(project.components[circle[0]].at("requires"), problem)
        return ()


def _axis_values(project: Project, name: str, mistakes: Mistakes) -> list[Sequence[str]]:
    """Return the values of each axis of an image, those of `--set` where there are any; note what cannot be one."""
    matrix, changed = project.matrix.model, project.changes.values
    known_values: Mapping[str, tuple[str, Collection[str]]] = {
        "os": ("no base", matrix.bases),
        "variant": ("no variant", get_args(Variant)),
        "gpu": ("no compute capability", matrix.gpu_architectures),
    }
    choices: list[Sequence[str]] = []
    for axis, listed in matrix.images[name].axes.items():
        choices.append(changed[axis].split(",") if axis in changed else listed)
        problem, known = known_values.get(axis, ("", ()))
        for i, value in enumerate(choices[-1]):
            where = f"{project.matrix.at('images', name, 'axes', axis, i)}: images.{name}.axes.{axis}"
            where = f"--set {axis}" if axis in changed else where
            if value in choices[-1][:i]:
                mistakes.add(where, f"{value} appears twice; remove one")
            if axis == "cuda" and not re.fullmatch(r"[0-9]+(\.[0-9]+){0,2}", value):
                mistakes.add(where, f"{value!r} {NO_VERSION}")
            if known and value not in known:
                mistakes.add(where, f"{problem} {value!r}{suggestion(value, set(known))}")
    return choices


def _objections(
    project: Project, image: str, facts: Mapping[str, str], versions: Mapping[str, str | None]
) -> Iterator[tuple[str, str]]:
    """Yield the rules against a combination, with their reasons."""
    for rule in project.matrix.model.rules:
        if matches(rule.when, {"image": image, **facts}):
            yield rule.name, rule.reason
    for name, version in versions.items():
        component = project.components[name].model
        if not (component.supports or component.excludes):
            continue
        known = {**facts, "version": version or ""}
        for support in component.supports:
            if not matches(support.when, known):
                yield f"{name}-supports", support.reason
        for exclusion in component.excludes:
            if matches(exclusion.when, known):
                yield f"{name}-excludes", exclusion.reason


def make_target(
    project: Project, image: str, axes: dict[str, str], components: dict[str, str], mistakes: Mistakes
) -> Target:
    """Return the target of these axes and components, with all aliases that it may have."""
    matrix = project.matrix.model
    entry, identity = matrix.images[image], combination_id(image, axes)
    values = {**axes, "image": image, "repository": matrix.repository}
    for name, version in components.items():
        values |= {f"{n}.version": version for n in (name, *project.components[name].model.provides)}
    parts = {f"{axis}-major": major(value) for axis, value in axes.items()}
    parts |= {f"{axis}-minor": minor(value) for axis, value in axes.items()}
    known = {**axis_facts(axes), "image": image}

    def filled(field: str, i: int, template: str, values: Mapping[str, str]) -> str:
        """Return a template of a tag with its values; note names without a value, and what is not a tag."""
        where = f"{project.matrix.at('images', image, field, i)}: images.{image}.{field}.{i}"
        for name in [name for name in FIELD.findall(template) if name not in values]:
            mistakes.add_once(where, f"no value for {{{name}}}{suggestion(name, values)}")
        tag = FIELD.sub(lambda match: values.get(match[1], "x"), template)
        if not TAGGED.fullmatch(tag.replace(REVISION, "0" * REVISION_DIGITS)):
            mistakes.add_once(where, f"{tag!r} is no image with a tag; write name:tag")
        return tag

    return Target(
        id=identity,
        image=image,
        axes=axes,
        platforms=entry.platforms,
        components=components,
        name=f"{matrix.repository}/{image}:{identity.removeprefix(f'{image}-')}",
        tags=tuple(
            filled("tags", i, template, {**values, "revision": REVISION}) for i, template in enumerate(entry.tags)
        ),
        aliases=tuple(
            filled("aliases", i, alias.tag, {**values, **parts})
            for i, alias in enumerate(entry.aliases)
            if matches(alias.when, known)
        ),
    )


def with_own_aliases(targets: Collection[Target]) -> tuple[Target, ...]:
    """Return the targets, each with only those aliases that no later one has too."""
    owner = {alias: target.id for target in targets for alias in target.aliases}
    kept = {t.id: tuple(dict.fromkeys(a for a in t.aliases if owner[a] == t.id)) for t in targets}
    return tuple(target.model_copy(update={"aliases": kept[target.id]}) for target in targets)


def repository_name(project: Project, image: str) -> str:
    """Return the repository, with its registry, that builds of an image are pushed to before they are verified."""
    matrix = project.matrix.model
    return matrix.publish.staging.replace("{repository}", matrix.repository).replace("{image}", image)


def staged_tag(digest: str, now: datetime) -> str:
    """Return the tag that keeps a staged image: `staged-20261121T104500Z-0123456789ab`."""
    return f"staged-{now.astimezone(UTC):%Y%m%dT%H%M%SZ}-{digest.removeprefix('sha256:')[:12]}"


# Contradictions between the files

Reference = tuple[YamlFile[Any], Loc, str, str, Collection[str]]
"""File, place in it, what an unknown name is there, the name, and the names that there are."""


def check_names(project: Project, mistakes: Mistakes) -> None:
    """Note names in one file, or of an option, that another file does not know."""
    matrix, at, changes = project.matrix.model, project.matrix.at, project.changes
    in_images: set[str] = set()
    for file, place, problem, name, known in (*_references(project), *_references_of_conditions(project)):
        in_images |= {name} if place[0] == "images" else set()
        if name not in known and not (place[0] == "versions" and name in in_images):
            words = ".".join(str(word) for word in place if not isinstance(word, int) and word != name)
            remedy = suggestion(name, set(known)) or "; remove it"
            if problem == "unknown component" and "did you mean" not in remedy:
                remedy = f"; write {project.roots[0] / 'components' / name / 'component.yaml'}"
            mistakes.add(file.at(*place), f"{words}: {problem} {name!r}{remedy}")
    tools = {name for name, document in project.components.items() if document.model.build_only}
    listed = {component for image in matrix.images.values() for component in image.components}
    for option, names, choices in (
        ("--with", changes.with_, project.components.keys() - tools),
        ("--without", changes.without, listed),
    ):
        for name in names:
            if name not in choices:
                problem = "cannot be in an image" if name in project.components else "unknown component"
                mistakes.add(f"{option} {name}", f"{problem}{suggestion(name, set(choices))}")
            elif name in changes.with_ and name in changes.without:
                mistakes.add_once(f"--with {name} --without {name}", "they exclude each other; leave one out")
    for name, image in matrix.images.items():
        axes = {"os": next(iter(matrix.bases), "debian13"), "variant": "runtime"}
        for i, component in enumerate(image.components):
            if component in tools:
                where = at("images", name, "components", i)
                mistakes.add(where, f"images.{name}.components: {component} is a tool of build stages; leave it out")
            elif component in project.components and (axis := project.components[component].model.version_axis):
                axes.setdefault(axis, f"VERSION of {component}")
        for axis in axes.keys() - image.axes:
            problem = f"the axis {axis!r} is missing; add `{axis}: [{axes[axis]}]`"
            mistakes.add(at("images", name, "axes"), f"images.{name}.axes: {problem}")
        # Another base is for the targets that were asked for, and compared with those alone.
        for release in image.axes.get("os", ()) if not changes.base_image else ():
            if image.base and (problem := base_mismatch(image.base, release)):
                mistakes.add(at("images", name, "base"), f"images.{name}.base: {image.base}: {problem}")
    for name, document in project.components.items():
        pin = document.model.pin or name
        if document.model.version_axis or pin in matrix.versions:
            continue
        if users := [image_name for image_name, image in matrix.images.items() if name in image.components]:
            problem = f"no version for {name}, which {users[0]} uses; add `{pin}: VERSION`"
            mistakes.add(at("versions"), f"versions: {problem}")
        elif name in changes.with_:
            mistakes.add(f"--with {name}", f"has no version; add `--set {pin}=VERSION`, or `{pin}` to `versions`")


def base_mismatch(image: str, release: str) -> str:
    """Return why an image, by its name, cannot be the base of a release; empty if it may be."""
    name, _, tag = image.partition("@")[0].rpartition("/")[2].partition(":")
    fits = name not in ("debian", "ubuntu") or "{" in tag or f"{name}{tag}".startswith(release.partition(".")[0])
    return "" if fits else f"packages and pins are for {release}; use a base image of that release"


def _references(project: Project) -> Iterator[Reference]:
    """Yield the places where files name something that another file defines, but for conditions."""
    matrix, file, components = project.matrix.model, project.matrix, project.components
    roles = {wanted for document in components.values() for wanted in document.model.build_requires}
    fulfilled = {*components, *(name for document in components.values() for name in document.model.provides)}
    pins = {*components, *(document.model.pin for document in components.values() if document.model.pin)}
    for name, image in matrix.images.items():
        place = ("images", name)
        for i, component in enumerate(image.components):
            yield file, (*place, "components", i), "unknown component", component, components
        for wanted, component in image.build_with.items():
            yield file, (*place, "build-with"), "no component builds with", wanted, roles
            if wanted in roles:
                offers = {c for c, document in components.items() if wanted in (c, *document.model.provides)}
                where = (*place, "build-with", wanted)
                yield file, where, "not a component that provides it:", component, offers
        if image.build_on:
            yield file, (*place, "build-on"), "no base", image.build_on, matrix.bases
        for axis in FIELD.findall(image.base or ""):
            yield file, (*place, "base"), "unknown axis", axis, image.axes
    for pin in matrix.versions:
        yield file, ("versions", pin), "unknown component", pin, pins
    for name, base in matrix.bases.items():
        if base.build_on:
            yield file, ("bases", name, "build-on"), "no base", base.build_on, matrix.bases
    for document in components.values():
        for key, names in ("requires", document.model.requires), ("build-requires", document.model.build_requires):
            for i, wanted in enumerate(names):
                yield document, (key, i), "unknown component", wanted, fulfilled


MORE_NAMES: Mapping[str, Sequence[str]] = {
    "rules": ("image",),
    "aliases": ("image",),
    "require": ("image", "arch"),
    "waivers": ("image", "arch"),
    "supports": ("version",),
    "excludes": ("version",),
    "env": ("version",),
}
"""Key of rows with conditions → what these may name besides axes. Those of `facts` may name all, and what components
build with; a condition on what is not known there would never hold."""


def _references_of_conditions(project: Project) -> Iterator[Reference]:
    """Yield the axes and values that conditions name. What is extended need not fit."""
    matrix, components = project.matrix.model, project.components
    values: dict[str, set[str]] = {"os": {*matrix.bases}, "variant": {*get_args(Variant)}}
    for image in matrix.images.values():
        for axis, listed in image.axes.items():
            values.setdefault(axis, set()).update(listed)
    axes: dict[str, Collection[str]] = {f"{axis}-major": {*map(major, listed)} for axis, listed in values.items()}
    axes |= values
    # Of a version, no values are known yet.
    others: dict[str, Collection[str]] = {"image": [*matrix.images], "arch": get_args(Arch), "version": ()}
    for role in {wanted for document in components.values() for wanted in document.model.build_requires}:
        others[role] = {*values.get(role, ()), *components}
    documents: list[YamlFile[Any]] = [project.matrix, *components.values()]
    for document in documents:
        for place, condition in _conditions(document.model.model_dump(by_alias=True)):
            is_matrix = document is project.matrix
            if not (project.is_own(*place[:2]) if is_matrix else document.path.is_relative_to(project.roots[0])):
                continue
            kind = [part for part in place[:-1] if isinstance(part, str)][-1]
            more = others if kind == "facts" else {name: others[name] for name in MORE_NAMES.get(kind, ())}
            names = {**axes, **more}
            for axis, alternatives in condition.items():
                yield document, (*place, axis), "unknown axis", axis, names
                for value in alternatives:
                    if names.get(axis) and not value.startswith(OPERATORS):
                        is_major = value in names.get(f"{axis}-major", ())
                        problem = f"only {axis}-major is" if is_major else "no target has"
                        yield document, (*place, axis), problem, value, names[axis]


def _conditions(value: object, place: Loc = ()) -> Iterator[tuple[Loc, Condition]]:
    """Yield the conditions in what a file says, each with its place."""
    if not isinstance(value, dict | tuple):
        return
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        if key == "when" and place and isinstance(place[-1], int):  # only rows have conditions, and names may be `when`
            yield (*place, key), inner
        else:
            yield from _conditions(inner, (*place, key))


def _check_use(
    project: Project,
    targets: Collection[Target],
    excluded: Collection[Excluded],
    used: Collection[str],
    mistakes: Mistakes,
) -> None:
    """Note rules that exclude nothing, and images of which nothing is left."""
    matrix, at = project.matrix.model, project.matrix.at
    for i, row in enumerate(matrix.rules):
        if row.name not in used and project.is_own("rules", i):
            mistakes.add(at("rules", i), f"rules.{row.name}: matches no combination; remove it, or correct its 'when'")
    for name in matrix.images.keys() - {target.image for target in targets}:
        item = next(item for item in excluded if item.image == name)
        problem = f"{item.rule} excludes {item.id}, and all others: {item.reason}; change axes"
        mistakes.add(f"{at('images', name, 'axes')}: images.{name}.axes", problem)


def check_tags(project: Project, targets: Collection[Target], mistakes: Mistakes) -> None:
    """Note tags that name two targets, and aliases that would move a tag."""
    owners: dict[str, str] = {}
    for target in targets:
        for i, tag in enumerate(target.tags):
            if (owner := owners.setdefault(tag, target.id)) != target.id:
                where = project.matrix.at("images", target.image, "tags", i)
                mistakes.add(where, f"tag {tag} names both {owner} and {target.id}; add the axis that differs")
    for target in targets:
        for alias in target.aliases:
            if alias in owners:
                where = project.matrix.at("images", target.image, "aliases")
                mistakes.add(where, f"alias {alias} of {target.id} would move a tag of {owners[alias]}; take another")


def check_policy(project: Project, targets: Iterable[Target], mistakes: Mistakes) -> None:
    """Note a wrong template of the staging repository, and required checks that do not exist."""
    policy, at = project.matrix.model.publish, project.matrix.at
    known = {f"{name}/{check.name}" for name, document in project.components.items() for check in document.model.checks}
    for i, row in enumerate(policy.require):
        for j, pattern in enumerate(row.checks):
            full = pattern if "/" in pattern else f"{pattern}/*"
            fits = any(fnmatchcase(name, full.removesuffix("-speed")) for name in known)
            if not fits and not full.startswith("image/"):
                problem = f"publish.require: no check {pattern}{suggestion(full, known)}"
                mistakes.add(at("publish", "require", i, "checks", j), problem)
    where = at("publish", "staging")
    for target in targets:
        name = repository_name(project, target.image)
        if not REPOSITORY.fits(name):
            problem = f"{name!r} is not a valid name of a repository; write {{repository}}/{{image}} and more"
            mistakes.add_once(f"{where}: publish.staging", problem)
        if name in {tag.rpartition(":")[0] for tag in (*target.tags, *target.aliases)}:
            mistakes.add(where, f"publish.staging: {name} is where people pull {target.image} from; name another one")


# Selecting targets


def select_targets(plan: Plan, selectors: Iterable[str]) -> tuple[Target, ...]:
    """Return the targets whose id fits a glob or whose image is named, and whose axes have every `axis=value`.

    Without selectors, all. Raises NothingSelected if none fits, with the reason if a rule excludes them.
    """
    selectors = tuple(selectors)
    if chosen := tuple(t for t in plan.targets if _fits(t, selectors)):
        return chosen
    problem = f"no target fits {' '.join(selectors)}" if selectors else "the matrix has no target"
    for item in select_excluded(plan, selectors):
        reason = f"{item.rule} excludes {item.id}: {item.reason}"
        raise NothingSelected(f"{problem}: {reason}; `imagebuild plan` lists what is built")
    known = {name for t in plan.targets for name in (t.image, t.id, *(f"{a}={value}" for a, value in t.axes.items()))}
    near = next((near for name in selectors if name not in known and (near := nearest(name, known))), None)
    images = ", ".join(sorted({target.image for target in plan.targets}))
    raise NothingSelected(f"{problem}; " + (f"did you mean {near!r}?" if near else f"known images: {images}"))


def restricted_components(plan: Plan, targets: Iterable[Target]) -> dict[str, str]:
    """Return component → what whoever publishes these targets must accept."""
    used = {component for target in targets for component in target.components}
    return {name: text for name, text in plan.restricted.items() if name in used}


def select_one(plan: Plan, name: str) -> Target:
    """Return the target of an id, or of a glob that fits only one. Raises NothingSelected or ConfigError."""
    chosen = select_targets(plan, [name])
    if len(chosen) > 1:
        first = ", ".join(target.id for target in chosen[:5]) + (", …" if len(chosen) > 5 else "")
        raise ConfigError(f"{name}: {len(chosen)} targets fit ({first}); name one")
    return chosen[0]


def select_excluded(plan: Plan, selectors: Iterable[str]) -> tuple[Excluded, ...]:
    """Return the excluded combinations that would fit the selectors."""
    return tuple(e for e in plan.excluded if _fits(e, tuple(selectors)))


def _fits(item: Target | Excluded, selectors: tuple[str, ...]) -> bool:
    """Return whether a combination fits globs of ids, names of images, and `axis=value`."""
    values = {"image": item.image, **item.axes}
    pairs = [selector.split("=", 1) for selector in selectors if "=" in selector]
    globs = [selector for selector in selectors if "=" not in selector]
    return all(fnmatchcase(values.get(axis, ""), value) for axis, value in pairs) and (
        not globs or any(glob == item.image or fnmatchcase(item.id, glob) for glob in globs)
    )
