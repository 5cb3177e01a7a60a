"""Matrix and components to targets. Pure: no files, no programs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from graphlib import CycleError, TopologicalSorter
from itertools import product

from imagebuild import naming, validate
from imagebuild.component import Component
from imagebuild.config import Mistakes, Project, suggestion
from imagebuild.errors import ConfigError, NothingSelected
from imagebuild.models import Excluded, Image, Pin, Plan, Target, combination_id
from imagebuild.publishing import policy
from imagebuild.versions import facts, matches

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
    validate.check_names(project, changes.with_, changes.without, mistakes)
    mistakes.stop_if_any()
    targets: list[Target] = []
    excluded: list[Excluded] = []
    used: Counter[str] = Counter()
    for name, image in matrix.images.items():
        components = resolve(project, name, _changed_components(image, changes), mistakes)
        for values in product(*_changed_axes(image, changes).values()):
            axes = dict(zip(image.axes, values, strict=True))
            if reasons := list(_objections(project, name, axes, components, versions)):
                used.update(rule for rule, _ in reasons)
                excluded += [Excluded(image=name, axes=axes, rule=r, reason=why) for r, why in reasons[:1]]
            else:
                variant = axes.get("variant", "")
                present = [c for c in components if not variant or variant in _component(project, c).variants]
                chosen = {c: version_of(project, versions, c, axes) for c in present}
                for c in [c for c, version in chosen.items() if version is None]:
                    where = project.matrix.at("versions", c)
                    mistakes.add(where, f"versions: no version of {c} for {combination_id(name, axes)}")
                found = {c: version for c, version in chosen.items() if version}
                targets.append(naming.named(project, name, axes, found, mistakes))
    if not changes.values:
        validate.check_rules_used(project, used, mistakes)
    validate.check_tags(project, targets, mistakes)
    policy.check_policy(project, targets, mistakes)
    mistakes.stop_if_any()
    restricted = {n: d.model.redistribution for n, d in project.components.items() if d.model.redistribution}
    return Plan(targets=naming.with_own_aliases(targets), excluded=tuple(excluded), restricted=restricted)


def select(plan: Plan, selectors: Iterable[str]) -> tuple[Target, ...]:
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


def restricted(plan: Plan, targets: Iterable[Target]) -> dict[str, str]:
    """Component of these targets → what whoever publishes them must accept."""
    used = {component for target in targets for component in target.components}
    return {name: text for name, text in plan.restricted.items() if name in used}


def select_one(plan: Plan, name: str) -> Target:
    """The target of an id. Raises NothingSelected or ConfigError."""
    chosen = select(plan, [name])
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
        requires = _component(project, name).requires
        found = {r: provider(project, r, (*listed, *graph)) for r in requires}
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


def provider(project: Project, wanted: str, present: Iterable[str]) -> str | None:
    """Who fulfils the requirement: a component that is there, else the component of that name."""
    present = tuple(present)
    if wanted in present:
        return wanted
    offers = [name for name in present if wanted in _component(project, name).provides]
    return offers[0] if offers else (wanted if wanted in project.components else None)


def pin_of(versions: Pins, name: str, axes: Mapping[str, str]) -> Pin | None:
    """The first pin of that name whose condition holds."""
    return next((pin for pin in versions.get(name, ()) if matches(pin.when, facts(axes))), None)


def version_of(project: Project, versions: Pins, name: str, axes: Mapping[str, str]) -> str | None:
    """Version of a component in a target; None if no pin is for it."""
    component = _component(project, name)
    if component.version_axis:
        return facts(axes)[component.version_axis]
    pin = pin_of(versions, component.pin or name, axes)
    return pin.version if pin else None


def versions_with(project: Project, changes: Changes) -> dict[str, tuple[Pin, ...]]:
    """The pins of the matrix with the changes of the command line. Raises ConfigError."""
    mistakes = Mistakes()
    versions = _changed_versions(project, changes, mistakes)
    mistakes.stop_if_any()
    return versions


def _component(project: Project, name: str) -> Component:
    return project.components[name].model


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
    project: Project, image: str, axes: Mapping[str, str], components: Iterable[str], versions: Pins
) -> Iterator[tuple[str, str]]:
    """Rules against a combination, with their reasons."""
    for rule in project.matrix.model.rules:
        if matches(rule.when, {"image": image, **facts(axes)}):
            yield rule.name, rule.reason
    for name in components:
        known = {**facts(axes), "version": version_of(project, versions, name, axes) or ""}
        for support in _component(project, name).supports:
            if not matches(support.when, known):
                yield f"{name}-supports", support.reason
        for exclusion in _component(project, name).excludes:
            if matches(exclusion.when, known):
                yield f"{name}-excludes", exclusion.reason
