"""Compute the targets of a matrix, their names and tags, and every mistake in what the files say together. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from graphlib import CycleError, TopologicalSorter
from itertools import product
from typing import TYPE_CHECKING

from imagebuild.core.errors import ConfigError, Mistakes, NothingSelected, suggestion
from imagebuild.core.fields import axis_facts, major, matches, minor
from imagebuild.project.component import checks_of
from imagebuild.project.matrix import Excluded, Image, Pin, Plan, Target, combination_id

if TYPE_CHECKING:
    from imagebuild.project.load import Project  # which reads YAML

TAG = re.compile(r"^(?:[a-z0-9.-]+(?::[0-9]+)?/)?[a-z0-9._/-]+:[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$")
"""A repository and a tag, as the OCI distribution specification allows them."""
REVISION = "{revision}"
"""Stays in a plan's tags, so that a plan does not depend on the commit; publishing fills it in."""
REVISION_DIGITS = 7
PARTS: Mapping[str, Callable[[str], str]] = {"major": major, "minor": minor}


def named(project: Project, image: str, axes: dict[str, str], components: dict[str, str], mistakes: Mistakes) -> Target:
    """The target of these axes and components, with all aliases that it may have."""
    matrix = project.matrix.model
    entry = matrix.images[image]
    provided = {c: (c, *project.components[c].model.provides) for c in components}
    values = {**axes, **{f"{n}.version": v for c, v in components.items() for n in provided[c]}}
    values |= {"image": image, "repository": matrix.repository}
    parts = {f"{axis}-{part}": of(value) for axis, value in axes.items() for part, of in PARTS.items()}
    known = {**axis_facts(axes), "image": image}

    def filled(field: str, i: int, template: str, values: Mapping[str, str]) -> str:
        return _filled(project, (image, field, i), template, values, mistakes)

    identity = combination_id(image, axes)
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


def with_own_aliases(targets: Iterable[Target]) -> tuple[Target, ...]:
    """The targets, each with only those aliases that no later one has too."""
    listed = list(targets)
    owner = {alias: target.id for target in listed for alias in target.aliases}
    kept = {t.id: tuple(dict.fromkeys(a for a in t.aliases if owner[a] == t.id)) for t in listed}
    return tuple(target.model_copy(update={"aliases": kept[target.id]}) for target in listed)


def _filled(
    project: Project, place: tuple[str, str, int], template: str, values: Mapping[str, str], mistakes: Mistakes
) -> str:
    image, field, i = place
    where, what = project.matrix.at("images", *place), f"images.{image}.{field}.{i}"
    for name in [f for f in re.findall(r"{([^{}]*)}", template) if f not in values]:
        mistakes.add(where, f"{what}: no value for {{{name}}}{suggestion(name, values)}")
    tag = re.sub(r"{([^{}]*)}", lambda m: values.get(m[1], "x"), template)
    if not TAG.match(tag.replace(REVISION, "0" * REVISION_DIGITS)):
        mistakes.add(where, f"{what}: {tag!r} is not a valid image name and tag")
    return tag


DIGITS = 12


def staging_of(project: Project, target: Target) -> str:
    """Registry and repository that a target is pushed to before it is verified."""
    return repository_name(project, target.image)


def repository_name(project: Project, image: str) -> str:
    """Registry and repository that builds of an image are pushed to."""
    matrix = project.matrix.model
    return matrix.publish.staging.format(repository=matrix.repository, image=image)


def staged_tag(digest: str, now: datetime) -> str:
    """`staged-20261121T104500Z-0123456789ab`."""
    return f"staged-{now.astimezone(UTC):%Y%m%dT%H%M%SZ}-{digest.removeprefix('sha256:')[:DIGITS]}"


FIELDS = {"repository", "image"}
NAME = re.compile(r"(?:[A-Za-z0-9.-]+(?::[0-9]+)?/)?[a-z0-9]+(?:[._/-]+[a-z0-9]+)*")


def check_policy(project: Project, targets: Iterable[Target], mistakes: Mistakes) -> None:
    """Templates of no repository, and requirements that no image can fulfil."""
    _check_staging(project, list(targets), mistakes)
    policy, at = project.matrix.model.publish, project.matrix.at
    known = {
        f"{name}/{check.name}" for name, document in project.components.items() for check in checks_of(document.model)
    }
    named = (axis_facts(dict.fromkeys(image.axes, "")) for image in project.matrix.model.images.values())
    axes = {"image", "arch", *(axis for found in named for axis in found)}
    for i, row in enumerate(policy.require):
        for axis, alternatives in row.when.items():
            where = at("publish", "require", i, "when", axis)
            if axis not in axes:
                mistakes.add(where, f"publish.require: unknown axis {axis!r}{suggestion(axis, axes)}")
            try:
                matches({axis: alternatives}, {axis: "0"})
            except ValueError as error:
                mistakes.add(where, f"publish.require: {axis}: {error}")
        for j, pattern in enumerate(row.checks):
            full = pattern if "/" in pattern else f"{pattern}/*"
            fits = any(fnmatchcase(name, full.removesuffix("-speed")) for name in known)
            if not fits and not full.startswith("image/"):
                near = suggestion(full, known)
                shown = near if "did you mean" in near else "; see `imagebuild verify --list`"
                mistakes.add(at("publish", "require", i, "checks", j), f"publish.require: no check {pattern}{shown}")


def _check_staging(project: Project, targets: list[Target], mistakes: Mistakes) -> None:
    template, where = project.matrix.model.publish.staging, project.matrix.at("publish", "staging")
    if unknown := [name for name in re.findall(r"{([^{}]*)}", template) if name not in FIELDS]:
        mistakes.add(where, f"publish.staging: no value for {{{unknown[0]}}}; known: {', '.join(sorted(FIELDS))}")
        return
    for target in targets:
        name = template.replace("{repository}", project.matrix.model.repository).replace("{image}", target.image)
        if not NAME.fullmatch(name):
            mistakes.add(where, f"publish.staging: {name!r} is no name of a repository")
        if name in {tag.rpartition(":")[0] for tag in (*target.tags, *target.aliases)}:
            mistakes.add(where, f"publish.staging: {name} is where people pull {target.image} from; name another one")


def check_names(project: Project, with_: Iterable[str], without: Iterable[str], mistakes: Mistakes) -> None:
    """Names in one file that another must know."""
    matrix, at = project.matrix.model, project.matrix.at
    known = project.components
    for name, image in matrix.images.items():
        for i, component in enumerate(image.components):
            if component not in known:
                mistakes.add(
                    at("images", name, "components", i),
                    f"images.{name}.components: unknown component {component!r}{suggestion(component, known)}",
                )
        for wanted, component in image.build_with.items():
            if component not in known:
                where = at("images", name, "build-with", wanted)
                mistakes.add(
                    where, f"images.{name}.build-with: unknown component {component!r}{suggestion(component, known)}"
                )
        for i, value in enumerate(image.axes.get("os", ())):
            if value not in matrix.bases:
                what = f"images.{name}.axes.os: no base {value!r}{suggestion(value, matrix.bases)}"
                mistakes.add(at("images", name, "axes", "os", i), what)
        if "os" not in image.axes:
            mistakes.add(at("images", name, "axes"), f"images.{name}.axes: the axis 'os' is missing")
    for option, names in (("--with", with_), ("--without", without)):
        for component in names:
            if component not in known:
                mistakes.add(f"{option} {component}", f"unknown component{suggestion(component, known)}")
    pins = {*known, *(d.model.pin for d in known.values() if d.model.pin)}
    for pin in matrix.versions:
        if pin not in pins:
            mistakes.add(at("versions", pin), f"versions.{pin}: unknown component{suggestion(pin, pins)}")
    for name, base in matrix.bases.items():
        if base.build_on and base.build_on not in matrix.bases:
            near = suggestion(base.build_on, matrix.bases)
            mistakes.add(at("bases", name, "build-on"), f"bases.{name}.build-on: no base {base.build_on!r}{near}")
    for i, rule in enumerate(matrix.rules):
        axes = {
            "image",
            *(a for image in matrix.images.values() for a in axis_facts(dict.fromkeys(image.axes, ""))),
        }
        for axis in rule.when:
            if axis not in axes:
                mistakes.add(at("rules", i, "when", axis), f"rules.{rule.name}: unknown axis{suggestion(axis, axes)}")
    for name, document in known.items():
        _check_component(project, name, document.at, mistakes)
    _check_conditions(project, mistakes)


def _check_component(project: Project, name: str, at: object, mistakes: Mistakes) -> None:
    assert callable(at)
    component, versions = project.components[name].model, project.matrix.model.versions
    provided = {p for d in project.components.values() for p in d.model.provides}
    for key in ("requires", "build_requires"):
        for i, wanted in enumerate(getattr(component, key)):
            if wanted not in project.components and wanted not in provided:
                near = suggestion(wanted, {*project.components, *provided})
                dashed = key.replace("_", "-")
                mistakes.add(at(dashed, i), f"{dashed}: unknown component {wanted!r}{near}")
    if not component.version_axis and (component.pin or name) not in versions:
        used = [i for i, image in project.matrix.model.images.items() if name in image.components]
        if used:
            mistakes.add(project.matrix.at("versions"), f"versions: no version for {name}, which {used[0]} uses")


def _check_conditions(project: Project, mistakes: Mistakes) -> None:
    """Version specifiers that are none."""
    conditions = [
        (project.matrix.at("rules", i, "when"), rule.when) for i, rule in enumerate(project.matrix.model.rules)
    ]
    for document in project.components.values():
        conditions += [(document.at("supports", i), s.when) for i, s in enumerate(document.model.supports)]
        conditions += [(document.at("excludes", i), e.when) for i, e in enumerate(document.model.excludes)]
        conditions += [(document.at("facts", i), r.when) for i, r in enumerate(document.model.facts)]
        conditions += [(document.at("env", i), r.when) for i, r in enumerate(document.model.env)]
        conditions += [(document.at("checks", i), c.when) for i, c in enumerate(document.model.checks)]
    for name, rows in project.matrix.model.versions.items():
        conditions += [(project.matrix.at("versions", name, i), row.when) for i, row in enumerate(rows)]
    for where, condition in conditions:
        for axis, alternatives in condition.items():
            try:
                matches({axis: alternatives}, {axis: "0"})
            except ValueError as error:
                mistakes.add(where, f"{axis}: {error}")


def check_rules_used(project: Project, used: Counter[str], mistakes: Mistakes) -> None:
    for i, rule in enumerate(project.matrix.model.rules):
        if not used[rule.name]:
            where = project.matrix.at("rules", i)
            mistakes.add(where, f"rules.{rule.name}: matches no combination; remove it, or correct its 'when'")


def check_tags(project: Project, targets: Iterable[Target], mistakes: Mistakes) -> None:
    owners: dict[str, str] = {}
    listed = list(targets)
    for target in listed:
        for i, tag in enumerate(target.tags):
            if (owner := owners.setdefault(tag, target.id)) != target.id:
                where = project.matrix.at("images", target.image, "tags", i)
                mistakes.add(where, f"tag {tag} names both {owner} and {target.id}; add the axis that differs")
    for target in listed:
        for alias in target.aliases:
            if alias in owners:
                where = project.matrix.at("images", target.image, "aliases")
                mistakes.add(where, f"alias {alias} of {target.id} would move a tag of {owners[alias]}")


Pins = Mapping[str, tuple[Pin, ...]]
"""Name → rows of versions."""


@dataclass(frozen=True)
class Changes:
    """What the command line changes about the matrix."""

    values: Mapping[str, str] = field(default_factory=dict)
    """Axis → its values, with commas between, or pin → version (`version@commit` for a commit that is no tag)."""
    with_: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    repository: str | None = None
    """Where images are named and pushed, instead of where the matrix says."""

    @property
    def settings(self) -> tuple[str, ...]:
        """`values` as `--set` takes them."""
        return tuple(f"{name}={value}" for name, value in self.values.items())


def parse_changes(
    settings: Iterable[str],
    with_: Iterable[str] = (),
    without: Iterable[str] = (),
    *,
    repository: str | None = None,
) -> Changes:
    """`["cuda=13.1"]` to Changes. Raises ConfigError for text that is not `name=value`."""
    values = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not (name and equals and value):
            raise ConfigError(f"--set {setting}: write it as name=value, for example --set cuda=13.1")
        values[name] = value
    return Changes(values, tuple(with_), tuple(without), repository)


def make_plan(project: Project, changes: Changes | None = None) -> Plan:
    """All targets and all excluded combinations. Raises ConfigError with every mistake found."""
    mistakes = Mistakes()
    changes = changes or Changes()
    matrix = project.matrix.model
    versions = _changed_versions(project, changes, mistakes)
    check_names(project, changes.with_, changes.without, mistakes)
    mistakes.stop_if_any()
    targets: list[Target] = []
    excluded: list[Excluded] = []
    used: Counter[str] = Counter()
    for name, image in matrix.images.items():
        components = resolve(project, name, _changed_components(image, changes), mistakes)
        for values in product(*_changed_axes(image, changes).values()):
            axes = dict(zip(image.axes, values, strict=True))
            facts = axis_facts(axes)
            chosen = {c: version_of(project, versions, c, facts) for c in components}
            if objections := list(_objections(project, name, facts, chosen)):
                used.update(rule for rule, _ in objections)
                rule, reason = objections[0]
                excluded.append(Excluded(image=name, axes=axes, rule=rule, reason=reason))
                continue
            variant = axes.get("variant", "")
            present: dict[str, str] = {}
            for component, version in chosen.items():
                if variant and variant not in project.components[component].model.variants:
                    continue
                if version is None:
                    where = project.matrix.at("versions", component)
                    mistakes.add(where, f"versions: no version of {component} for {combination_id(name, axes)}")
                else:
                    present[component] = version
            targets.append(named(project, name, axes, present, mistakes))
    if not changes.values:
        check_rules_used(project, used, mistakes)
    check_tags(project, targets, mistakes)
    check_policy(project, targets, mistakes)
    mistakes.stop_if_any()
    restricted = {n: d.model.redistribution for n, d in project.components.items() if d.model.redistribution}
    return Plan(targets=with_own_aliases(targets), excluded=tuple(excluded), restricted=restricted)


def select_targets(plan: Plan, selectors: Iterable[str]) -> tuple[Target, ...]:
    """Targets whose id fits a glob or whose image is named, with every `axis=value` given; all without selectors.

    Raises NothingSelected if none fits, with the reason if a rule is why.
    """
    selectors = tuple(selectors)
    if chosen := tuple(t for t in plan.targets if _fits(t, selectors)):
        return chosen
    asked = f"no target fits {' '.join(selectors)}" if selectors else "the matrix has no target"
    if excluded := select_excluded(plan, selectors):
        raise NothingSelected(f"{asked}: {excluded[0].rule} excludes {excluded[0].id}: {excluded[0].reason}")
    near = [suggestion(s, [t.id for t in plan.targets]) for s in selectors if "=" not in s]
    shown = next((text for text in near if "did you mean" in text), "; `imagebuild plan` lists the targets")
    raise NothingSelected(asked + shown)


def restricted_components(plan: Plan, targets: Iterable[Target]) -> dict[str, str]:
    """Component of these targets → what whoever publishes them must accept."""
    used = {component for target in targets for component in target.components}
    return {name: text for name, text in plan.restricted.items() if name in used}


def select_one(plan: Plan, name: str) -> Target:
    """The target of an id. Raises NothingSelected or ConfigError."""
    chosen = select_targets(plan, [name])
    if len(chosen) > 1:
        shown = ", ".join(t.id for t in chosen[:5])
        raise ConfigError(f"{name}: {len(chosen)} targets fit ({shown}, …); name one")
    return chosen[0]


def select_excluded(plan: Plan, selectors: Iterable[str]) -> tuple[Excluded, ...]:
    """Excluded combinations that would fit the selectors."""
    return tuple(e for e in plan.excluded if _fits(e, tuple(selectors)))


def _fits(item: Target | Excluded, selectors: tuple[str, ...]) -> bool:
    pairs = [s.partition("=")[::2] for s in selectors if "=" in s]
    globs = [s for s in selectors if "=" not in s]
    values = {"image": item.image, **item.axes}
    return all(fnmatchcase(values.get(axis, ""), value) for axis, value in pairs) and (
        not globs or any(g == item.image or fnmatchcase(item.id, g) for g in globs)
    )


def resolve(project: Project, image: str, names: Iterable[str], mistakes: Mistakes) -> tuple[str, ...]:
    """Components of an image and what they require, requirements first."""
    listed = tuple(dict.fromkeys(names))
    graph: dict[str, tuple[str, ...]] = {}
    todo = list(listed)
    while todo:
        name = todo.pop()
        if name in graph:
            continue
        requires = project.components[name].model.requires
        found = {r: provider_of(project, r, (*listed, *graph)) for r in requires}
        for wanted, answer in found.items():
            if answer is None:
                offers = [c for c, d in project.components.items() if wanted in d.model.provides]
                mistakes.add(
                    project.matrix.at("images", image, "components"),
                    f"images.{image}.components: {name} needs {wanted!r}; add one of: {', '.join(offers)}",
                )
        graph[name] = tuple(answer for answer in found.values() if answer)
        todo += graph[name]
    try:
        order = TopologicalSorter({n: graph[n] for n in sorted(graph)}).static_order()
        return tuple(order)
    except CycleError as error:
        cycle = " → ".join(reversed(error.args[1]))
        mistakes.add(project.components[error.args[1][0]].at("requires"), f"requires: goes in a circle: {cycle}")
        return ()


def provider_of(project: Project, wanted: str, present: Collection[str]) -> str | None:
    """Return what fulfils a requirement: a component that is present, else the component of that name, if any."""
    if wanted in present:
        return wanted
    provider = next((name for name in present if wanted in project.components[name].model.provides), None)
    return provider or (wanted if wanted in project.components else None)


def pin_of(versions: Pins, name: str, facts: Mapping[str, str]) -> Pin | None:
    """Return the first pin of that name whose condition holds; `facts` are of the target's axes."""
    return next((pin for pin in versions.get(name, ()) if not pin.when or matches(pin.when, facts)), None)


def version_of(project: Project, versions: Pins, name: str, facts: Mapping[str, str]) -> str | None:
    """Return the version of a component in a target with these facts; None if no pin is for it."""
    component = project.components[name].model
    if component.version_axis:
        return facts[component.version_axis]
    pin = pin_of(versions, component.pin or name, facts)
    return pin.version if pin else None


def versions_with(project: Project, changes: Changes) -> dict[str, tuple[Pin, ...]]:
    """The pins of the matrix with the changes of the command line. Raises ConfigError."""
    mistakes = Mistakes()
    versions = _changed_versions(project, changes, mistakes)
    mistakes.stop_if_any()
    return versions


def _changed_axes(image: Image, changes: Changes) -> dict[str, tuple[str, ...]]:
    return {a: tuple(changes.values[a].split(",")) if a in changes.values else v for a, v in image.axes.items()}


def _changed_components(image: Image, changes: Changes) -> tuple[str, ...]:
    return tuple(c for c in (*image.components, *changes.with_) if c not in changes.without)


def _changed_versions(project: Project, changes: Changes, mistakes: Mistakes) -> dict[str, tuple[Pin, ...]]:
    versions = dict(project.matrix.model.versions)
    axes = {axis for image in project.matrix.model.images.values() for axis in image.axes}
    for name, value in changes.values.items():
        if name in axes:
            continue
        if name not in versions:
            mistakes.add(f"--set {name}={value}", f"neither an axis nor a pin{suggestion(name, {*axes, *versions})}")
            continue
        version, at, commit = value.partition("@")
        if at and not re.fullmatch("[0-9a-f]{40}", commit):
            mistakes.add(f"--set {name}={value}", f"write it as {name}=<tag> or {name}={version}@<40-digit commit>")
            continue
        versions[name] = (Pin(version=version, commit=commit or None),)
    return versions


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
