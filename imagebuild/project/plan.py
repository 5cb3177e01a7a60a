"""The plan: every target of a matrix with its names and tags, and every excluded combination. Pure."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from graphlib import CycleError, TopologicalSorter
from itertools import permutations, product
from math import prod
from typing import get_args

from pydantic import Field

from imagebuild.core.advisory import Advisory, Place, is_packaged, known_bad
from imagebuild.core.errors import Mistakes, suggestion
from imagebuild.core.fields import REPOSITORY, TAG, Model, Name, Platform, axis_facts, major, matches, minor
from imagebuild.project.component import Variant
from imagebuild.project.contradictions import check_names
from imagebuild.project.matrix import FIELD, NO_VERSION
from imagebuild.project.project import Project

TAGGED = re.compile(rf"(?:[a-z0-9.-]+(?::[0-9]+)?/)?[a-z0-9._/-]+:{TAG}")
"""Pattern of a repository with a tag."""
REVISION = "{revision}"
"""Placeholder that stays in the tags of a plan, so that the plan does not depend on the commit. `imagebuild publish`
replaces the placeholder."""
REVISION_DIGITS = 7
EXCEPT = "!"
"""The first character of a selector that leaves out targets: a value of --exclude."""
OPTIONS = "--with and --without"
"""Rule that excludes a combination because these options contradict the files of the project."""
OWN_BASE = "docs/tutorial.md, section 8"
"""The place that describes how to start from a company's own base image."""
MOST_COMBINATIONS = 10_000
"""Maximum number of combinations of an image's axes."""


def combination_id(image: str, axes: Mapping[str, str]) -> str:
    """Return the id of a combination: `<image>-cuda<V>-<os>-<variant>`.
    Only values of `cuda` and `gpu` are prefixed with the name of their axis."""
    values = [f"{axis}{value}" if axis in ("cuda", "gpu") else value for axis, value in axes.items()]
    return "-".join([image, *values])


class Target(Model):
    """A target: one combination of values of an image's axes."""

    id: str
    image: Name
    axes: dict[Name, str]
    platforms: tuple[Platform, ...]
    components: dict[Name, str]
    """Maps each component to its version. Each component comes after the components that it requires."""
    name: str
    """Name of the image in the engine's image store: the repository, with the id as the tag."""
    tags: tuple[str, ...]
    """Tags that `imagebuild publish` creates and never moves. `imagebuild publish` also replaces `{revision}`."""
    aliases: tuple[str, ...] = ()
    """Tags that `imagebuild publish` moves to the image of this target."""
    stages: dict[str, str] = Field(default_factory=dict)
    """Maps each build stage to its key, a digest of everything that the result of the stage depends on. Stages with
    equal keys are built once."""

    @property
    def bake_name(self) -> str:
        """The id as the name of a bake target, which cannot contain dots."""
        return self.id.replace(".", "_")

    @property
    def place(self) -> Place:
        """What is known about the machines on which the target runs: architectures and compute capability."""
        gpus = [f"{value[:-1]}.{value[-1:]}" for axis, value in self.axes.items() if axis == "gpu"]
        return Place(archs=tuple(platform.partition("/")[2] for platform in self.platforms), gpus=tuple(gpus))


def known_faults(targets: Iterable[Target], *, chosen: bool = False) -> list[tuple[Advisory, list[str]]]:
    """Return the advisories about versions in targets, each with the ids of these targets.
    `chosen`: leave out packages of distributions, whose versions nobody can choose."""
    found: dict[str, tuple[Advisory, list[str]]] = {}
    for target in targets:
        versions = {name: text for name, text in target.components.items() if not (chosen and is_packaged(text))}
        for advisory in known_bad(versions, target.place):
            found.setdefault(advisory.name, (advisory, []))[1].append(target.id)
    return [*found.values()]


class Excluded(Model):
    """A combination of values of an image's axes that is not built."""

    image: Name
    axes: dict[Name, str]
    rule: str
    reason: str

    @property
    def id(self) -> str:
        return combination_id(self.image, self.axes)


class Plan(Model):
    """The plan, as `imagebuild plan --json` prints it."""

    targets: tuple[Target, ...]
    excluded: tuple[Excluded, ...]
    restricted: dict[Name, str] = Field(default_factory=dict)
    """Maps each component with a restricted licence to the terms to accept before an image with it is published."""
    provides: dict[Name, tuple[Name, ...]] = Field(default_factory=dict)
    """Maps each component to the names in its `provides`, such as `nccl-wheel` to `nccl`."""
    gpu_architectures: dict[str, str] = Field(default_factory=dict)
    """Maps each compute capability, such as `90`, to the versions of CUDA that can compile for it, such as `>=11.8`."""


def components_of(labels: Mapping[str, str]) -> dict[str, str]:
    """Map each component of an image to its version, as the labels of the image state."""
    prefix = "imagebuild.component."
    return {name.removeprefix(prefix): value for name, value in labels.items() if name.startswith(prefix)}


def axes_of(labels: Mapping[str, str]) -> dict[str, str]:
    """Map each axis of an image's target to its value, as the labels of the image state."""
    prefix = "imagebuild.axis."
    return {name.removeprefix(prefix): value for name, value in labels.items() if name.startswith(prefix)}


def make_plan(project: Project, select: Sequence[str] | None = None) -> Plan:
    """Return all targets and all excluded combinations. Raises ConfigError with all mistakes in the files.

    With `select`, return only those of the images that these selectors name. Mistakes that concern only other images,
    rules, tags or publishing do not count then, and an invalid tag is left out."""
    mistakes = Mistakes()
    matrix, changes, everything = project.matrix.model, project.changes, select is None
    images = named_images(matrix.images, select or ())
    check_names(project, images, mistakes, publishing=everything)
    mistakes.stop_if_any()
    targets: list[Target] = []
    excluded: list[Excluded] = []
    used: set[str] = set()
    edited = bool(changes.with_ or changes.without)
    for name in images:
        image = matrix.images[name]
        of_image = Mistakes() if edited else mistakes
        components = with_requirements(project, name, of_image, alone=not everything and len(images) == 1)
        choices = _axis_values(project, name, mistakes)
        if mistakes.texts:
            continue
        for values in product(*choices):
            axes = dict(zip(image.axes, values, strict=True))
            facts = axis_facts(axes)
            chosen = {c: project.version(c, facts) for c in components}
            against = list(_objections(project, name, facts, chosen))
            used.update(rule for rule, _ in against)
            # Options may fit only some images. They matter only to targets that are selected: see `select_targets`.
            against += [(OPTIONS, "\n".join(of_image.texts))] if edited and of_image.texts else []
            present = {c: v for c, v in chosen.items() if axes["variant"] in project.components[c].model.variants}
            lacking = [project.components[c].model.pin or c for c, version in present.items() if version is None]
            if not changes.values.keys().isdisjoint(axes):
                # A value of --set may fit only some images. Therefore a combination without a version is excluded,
                # and is not a mistake.
                against += [(f"versions.{pin}", _unknown_version(project, name, axes, lacking)) for pin in lacking]
            if against:
                rule, reason = against[0]
                excluded.append(Excluded(image=name, axes=axes, rule=rule, reason=reason))
                continue
            own = Mistakes() if edited else mistakes
            add_lacking(project, name, axes, lacking, own)
            versions = {c: str(version) for c, version in present.items()}
            wrong_tags = own if everything else Mistakes()
            made = [] if lacking else [make_target(project, name, axes, versions, wrong_tags)]
            if edited and own.texts:
                excluded.append(Excluded(image=name, axes=axes, rule=OPTIONS, reason="\n".join(own.texts)))
            else:
                targets += made
    whole = everything and not (changes.values or edited)
    if whole and not mistakes.texts:
        _check_use(project, targets, excluded, used, mistakes)
    mistakes.stop_if_any()
    _check_versions(project, [target for target in targets if fits(target, select or ())], mistakes, whole=whole)
    if everything:
        check_tags(project, targets, mistakes)
        check_policy(project, targets, mistakes)
    mistakes.stop_if_any()
    return Plan(
        targets=tuple(_with_own_aliases(targets)),
        excluded=tuple(excluded),
        restricted={n: d.model.redistribution for n, d in project.components.items() if d.model.redistribution},
        provides={n: d.model.provides for n, d in project.components.items() if d.model.provides},
        gpu_architectures={name: gpu.cuda for name, gpu in matrix.gpu_architectures.items()},
    )


def _with_own_aliases(targets: Sequence[Target]) -> Iterator[Target]:
    """Yield the targets. If several targets have the same alias, only the last one keeps it."""
    owner = {alias: target.id for target in targets for alias in target.aliases}
    for target in targets:
        own = dict.fromkeys(alias for alias in target.aliases if owner[alias] == target.id)
        yield target.model_copy(update={"aliases": tuple(own)})


def _images_for(project: Project, image: str, release: str, pins: Sequence[str]) -> list[str]:
    """Return the images of imagebuild, or of another extended project, from which an image for a release can start.
    Return an empty list if the pins do not depend on the release."""
    rows = [project.matrix.model.versions.get(pin, ()) for pin in pins]
    if not rows or not all(of_pin and all("os" in row.when for row in of_pin) for of_pin in rows):
        return []
    images = (project.base or project).matrix.model.images
    return [name for name, other in images.items() if name != image and release in other.axes.get("os", ())]


def _unknown_version(project: Project, image: str, axes: Mapping[str, str], pins: Sequence[str]) -> str:
    others = " or ".join(_images_for(project, image, axes["os"], pins))
    added = "add " + " ".join(f"--set {pin}=VERSION" for pin in pins)
    remedy = f"use the image {others}, or {added}" if others else added
    return f"no version applies to {combination_id(image, axes)}; {remedy}"


def add_lacking(project: Project, image: str, axes: Mapping[str, str], pins: Sequence[str], mistakes: Mistakes) -> None:
    """Add a mistake for each pin without a version for a combination, or one if no version is for its base."""
    combination = combination_id(image, axes)
    matrix, at, base = project.matrix.model, project.matrix.at, axes["os"]
    known = {value for rows in matrix.versions.values() for row in rows for value in row.when.get("os", ())}
    if pins and known and base not in known:
        release = next((name for name in matrix.bases if name in known), min(known))
        remedy = f"give this image the name of its release, such as {release}: see {OWN_BASE}"
        problem = f"no versions are known for this base: {', '.join(pins)}; {remedy}"
        mistakes.add_once(f"{at('bases', base)}: bases.{base}", problem)
        return
    if project.base and (others := _images_for(project, image, base, pins)):
        remedy = f"start from an image for {base}, such as `from: {others[0]}`"
        remedy += " instead of `components`" if ("images", image, "components") in project.matrix.lines else ""
        mistakes.add_once(
            f"{at('images', image)}: images.{image}", f"no version for {base}: {', '.join(pins)}; {remedy}"
        )
        return
    for pin in pins:
        problem = f"no version applies to {combination}; add `{pin}: VERSION`, or a rule that excludes this combination"
        mistakes.add_once(f"{at('versions', pin)}: versions.{pin}", problem)


def named_images(images: Iterable[str], selectors: Sequence[str]) -> tuple[str, ...]:
    """Return the images whose targets the selectors may fit. If they name no image, return all images."""
    everything = tuple(images)
    words = [selector for selector in selectors if "=" not in selector and not selector.startswith(EXCEPT)]
    starts = [re.split(r"[*?[]", word)[0] for word in words]
    named = [
        name
        for name in everything
        if any(f"{name}-".startswith(start) or start.startswith(f"{name}-") for start in starts)
    ]
    return tuple(named) or everything


def with_requirements(project: Project, image: str, mistakes: Mistakes, *, alone: bool = False) -> tuple[str, ...]:
    """Return the components of an image and all components that they require, requirements first.

    `alone`: this is the only image, so that `--without` must name one of its components.

    Add a mistake for each requirement that no component fulfils, for each name that several components provide, and for
    each pair of components that cannot be in one image."""
    where, what = project.matrix.at("images", image, "components"), f"images.{image}.components"
    own, changes = project.matrix.model.images[image].components, project.changes
    removed = {c: name for name in changes.without for c in own if c == name}
    for name in [name for name in changes.without if name not in own]:
        # A role stands for the components of the image that provide it, such as `nccl` for `nccl-wheel`.
        removed |= {c: name for c in own if name in project.components[c].model.provides and c not in changes.with_}
    listed = tuple(dict.fromkeys(c for c in (*own, *changes.with_) if c not in removed))
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
        graph[name] = tuple(provider for provider in providers.values() if provider)
        todo += graph[name]
    for name in [name for name in graph if name in removed]:
        users = [c for c in listed if name in reached(project, c, (*listed, *graph))]
        verb = "requires" if len(users) == 1 else "require"
        remedy = " ".join(f"remove --with {c}" if c in changes.with_ else f"--without {c}" for c in users)
        add = "" if remedy.startswith("remove") else "add "
        mistakes.add(f"--without {removed[name]}", f"{', '.join(users)} in {image} {verb} {name}; {add}{remedy}")
    for name in changes.without if alone else ():
        if name not in removed.values():
            problem = f"{image} does not contain it{suggestion(name, set(own))}"
            mistakes.add(f"--without {name}", problem)
    offered = {name: {name, *project.components[name].model.provides} for name in sorted(graph)}
    clashes: dict[str, list[str]] = {}
    for wanted in sorted({role for name in graph for role in project.components[name].model.provides}):
        offers = [name for name in offered if wanted in offered[name]]
        users = [c for c in changes.with_ if reached(project, c, graph) & {*offers} - {*own}]
        if users and (others := [c for c in offers if c in own]):
            clashes.setdefault(users[0], []).extend(c for c in others if c not in clashes.get(users[0], ()))
        elif len(offers) > 1:
            mistakes.add(where, f"{what}: {' and '.join(offers)} provide {wanted!r}; remove one, or use --without")
    for user, others in clashes.items():
        problem = f"provides the same as {' and '.join(others)} in {image}; add --without {' --without '.join(others)}"
        mistakes.add(f"--with {user}", f"{problem}, or remove --with {user}")
    for name, other in permutations(offered, 2):
        for reason in (text for of, text in project.components[name].model.conflicts.items() if of in offered[other]):
            mistakes.add(where, f"{what}: {name} and {other} cannot be in one image: {reason}; remove one of the two")
    axes = project.matrix.model.images[image].axes
    for name, axis in ((name, project.components[name].model.version_axis) for name in graph):
        if axis and axis not in axes:
            problem = f"needs the axis {axis!r}, which {image} does not have; add it to images.{image}.axes"
            reaching = {c: found for c in listed if name in (found := reached(project, c, graph))}
            least = ", ".join(c for c, found in reaching.items() if not found & (reaching.keys() - {c}))
            by = "" if name in reaching else f", required by {least},"
            mistakes.add_once(where, f"{what}: {name}{by} {problem}, or remove {least}")
    try:
        return tuple(TopologicalSorter({n: graph[n] for n in sorted(graph)}).static_order())
    except CycleError as error:
        circle = error.args[1]
        problem = f"requires: circular dependency: {' → '.join(reversed(circle))}; remove one entry"
        mistakes.add(project.components[circle[0]].at("requires"), problem)
        return ()


def reached(project: Project, component: str, present: Collection[str]) -> set[str]:
    """Return a component and all components that it requires, if the image has the components `present`."""
    found: set[str] = set()
    todo = [component]
    while todo:
        if (name := todo.pop()) not in found:
            found.add(name)
            providers = (project.provider(wanted, present) for wanted in project.components[name].model.requires)
            todo += [provider for provider in providers if provider]
    return found


def _axis_values(project: Project, name: str, mistakes: Mistakes) -> list[Sequence[str]]:
    """Return the values of each axis of an image. Values of `--set` replace the values in the matrix.
    Add a mistake for each invalid value, and for too many combinations."""
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
    if (number := prod(map(len, choices))) > MOST_COMBINATIONS:
        problem = f"has {number} combinations, the maximum is {MOST_COMBINATIONS}; remove values"
        mistakes.add(project.matrix.at("images", name, "axes"), f"images.{name}.axes: {problem}")
    return choices


def _objections(
    project: Project, image: str, facts: Mapping[str, str], versions: Mapping[str, str | None]
) -> Iterator[tuple[str, str]]:
    for rule in project.matrix.model.rules:
        if matches(rule.when, {"image": image, **facts}):
            yield rule.name, rule.reason
    for name, version in versions.items():
        component = project.components[name].model
        if not (component.supports or component.excludes):
            continue
        known = {**facts, "version": version or ""}
        own = name in project.matrix.model.images[image].components
        users = [] if own else [c for c in project.changes.with_ if name in reached(project, c, versions)]
        because = f"--with {users[0]} adds {name}, but " if users and users[0] != name else ""
        roles = {role for user in users[:1] for role in project.components[user].model.provides}
        same = [c for c, d in project.components.items() if roles & {*d.model.provides} and c != users[0]]
        instead = f"; {', '.join(sorted(roles))} is also in {', '.join(same)}" if same else ""
        for support in component.supports:
            if not matches(support.when, known):
                yield f"{name}-supports", because + support.reason + instead
        for exclusion in component.excludes:
            if matches(exclusion.when, known):
                yield f"{name}-excludes", because + exclusion.reason + instead


def make_target(
    project: Project, image: str, axes: dict[str, str], components: dict[str, str], mistakes: Mistakes
) -> Target:
    """Return the target with these axes and components. Other targets may have the same aliases."""
    matrix = project.matrix.model
    entry, identity = matrix.images[image], combination_id(image, axes)
    values = {**axes, "image": image, "repository": matrix.repository}
    for name, version in components.items():
        values |= {f"{n}.version": version for n in (name, *project.components[name].model.provides)}
    parts = {f"{axis}-major": major(value) for axis, value in axes.items()}
    parts |= {f"{axis}-minor": minor(value) for axis, value in axes.items()}
    known = {**axis_facts(axes), "image": image}

    def filled(field: str, i: int, template: str, values: Mapping[str, str]) -> str:
        """Return a tag: the template with all values. Add a mistake for an unknown name or an invalid tag.
        Return an empty text for such a tag."""
        where = f"{project.matrix.at('images', image, field, i)}: images.{image}.{field}.{i}"
        for name in [name for name in FIELD.findall(template) if name not in values]:
            mistakes.add_once(where, f"no value for {{{name}}}{suggestion(name, values)}")
            return ""
        tag = FIELD.sub(lambda match: values[match[1]], template)
        if not TAGGED.fullmatch(tag.replace(REVISION, "0" * REVISION_DIGITS)):
            is_long = re.fullmatch(r"[\w./:-]+:[\w.-]{129,}", tag.replace(REVISION, "0" * REVISION_DIGITS))
            problem = "has a tag of more than 128 characters; shorten it" if is_long else "is not an image with a tag"
            mistakes.add_once(where, f"{tag!r} {problem}" + ("" if is_long else "; write name:tag"))
            return ""
        return tag

    return Target(
        id=identity, image=image, axes=axes, platforms=entry.platforms, components=components,
        name=f"{matrix.repository}/{image}:{identity.removeprefix(f'{image}-')}",
        tags=tuple(
            tag
            for i, template in enumerate(entry.tags)
            if (tag := filled("tags", i, template, {**values, "revision": REVISION}))
        ),
        aliases=tuple(
            tag
            for i, alias in enumerate(entry.aliases)
            if matches(alias.when, known) and (tag := filled("aliases", i, alias.tag, {**values, **parts}))
        ),
    )  # fmt: skip


def repository_name(project: Project, image: str) -> str:
    """Return the name of an image's staging repository, with its registry.
    Builds are pushed to the staging repository before they are verified."""
    matrix = project.matrix.model
    return matrix.publish.staging.replace("{repository}", matrix.repository).replace("{image}", image)


def staged_tag(digest: str, now: datetime) -> str:
    """Return a tag that protects an image in the staging repository from garbage collection.
    The tag contains the time and the first digits of the digest: `staged-20261121T104500Z-0123456789ab`."""
    return f"staged-{now.astimezone(UTC):%Y%m%dT%H%M%SZ}-{digest.removeprefix('sha256:')[:12]}"


def _check_use(
    project: Project, targets: Collection[Target], excluded: Collection[Excluded], used: Collection[str],
    mistakes: Mistakes,
) -> None:  # fmt: skip
    """Add a mistake for each rule that excludes nothing, and for each image without any target."""
    matrix, at = project.matrix.model, project.matrix.at
    for i, row in enumerate(matrix.rules):
        if row.name not in used and project.is_own("rules", i):
            problem = "matches no combination; remove the rule, or correct its `when`"
            mistakes.add(at("rules", i), f"rules.{row.name}: {problem}")
    for name in matrix.images.keys() - {target.image for target in targets}:
        item = next(item for item in excluded if item.image == name)
        example = f"{item.rule} excludes {item.id}: {item.reason}"
        problem = f"all combinations are excluded; for example, {example}; change axes or rules"
        mistakes.add(f"{at('images', name, 'axes')}: images.{name}.axes", problem)


def _check_versions(project: Project, targets: Sequence[Target], mistakes: Mistakes, *, whole: bool) -> None:
    """Add a mistake for each `--set` that changes none of the targets. `whole`: also for each entry of `versions` in
    the user's matrix that no target uses, if the targets have another component of the same kind instead."""
    if not targets:
        return
    components = {c for target in targets for c in (*target.components, *_compiled_with(project, target))}
    models = [project.components[name].model for name in components]
    owners = {owner for model in models for owner in (model.packages_from, model.wheels_from) if owner}
    used = {*map(project.setting, components | owners), *(axis for target in targets for axis in target.axes)}
    settings = {name: f"--set {name}={value}" for name, value in project.changes.values.items()}
    own = [n for n in project.matrix.model.versions if whole and project.base and project.is_own("versions", n)]
    for name in [name for name in (*settings, *own) if name not in used]:
        users = [component for component in project.components if project.setting(component) == name]
        target, others = next(
            ((t, found) for t in targets if (found := _same_kind(project, users, t.components))), (targets[0], [])
        )
        added = next((options for c in users if (options := _options_to_use(project, target, c))), None)
        instead = {project.setting(c) for c in others or [name] if c in project.components}
        what = f"{target.id} contains {' and '.join(others)} instead" if others else "changes no selected target"
        if name in settings:
            remedies = [f"add {' '.join(added)}"] if added else [f"use --set {other}" for other in instead - {name}]
            mistakes.add(settings[name], f"{what}; {', or '.join([*remedies, f'remove --set {name}'])}")
        elif others:
            remedies = [f"build it as with {' '.join(added)}"] if added else [f"write {' and '.join(sorted(instead))}"]
            mistakes.add(
                project.matrix.at("versions", name), f"versions.{name}: {what}; {remedies[0]}, or remove the entry"
            )


def _compiled_with(project: Project, target: Target) -> set[str]:
    """Return the components that the build stages of a target use."""
    preferred = project.matrix.model.images[target.image].build_with
    found: set[str] = set()
    todo = [*target.components]
    while todo:
        roles = project.components[todo.pop()].model.build_requires
        providers = {project.provider(role, target.components, preferred) for role in roles}
        new = {name for name in providers if name} - found
        found |= new
        todo += new
    return found


def _same_kind(project: Project, names: Iterable[str], present: Iterable[str]) -> list[str]:
    """Return the components among `present` that provide the same as one of the components `names`."""
    offers = {n: {n, *project.components[n].model.provides} for n in (*names, *present)}
    return [name for name in present if name not in names and any(offers[name] & offers[n] for n in names)]


def _options_to_use(project: Project, target: Target, component: str) -> list[str]:
    """Return the options --with and --without that replace components of a target by another one.
    Return an empty list if the target cannot contain this component."""
    own, changes = project.matrix.model.images[target.image].components, project.changes
    if project.components[component].model.build_only or component in changes.without:
        return []

    def compiles(name: str) -> bool:
        return (project.folder(name) / "build.j2").exists()

    present = [*target.components]
    for _ in range(2):  # what is compiled needs components that have a build stage
        added = reached(project, component, present)
        compiled = {role for name in added for role in project.components[name].model.build_requires}
        roles = {name: compiled & {*project.components[name].model.provides} for name in present}
        present = [name for name in present if not roles[name] or compiles(name)]
    removed = _same_kind(project, added, [name for name in own if name in target.components])
    values = {axis: value for axis, value in changes.values.items() if axis in target.axes}
    changed = replace(changes, values=values, with_=(*changes.with_, component), without=(*changes.without, *removed))
    plan = make_plan(replace(project, changes=changed), [target.id])
    works = any(t.id == target.id and all(map(compiles, _compiled_with(project, t))) for t in plan.targets)
    return ["--with", component, *(word for name in removed for word in ("--without", name))] if works else []


def check_tags(project: Project, targets: Collection[Target], mistakes: Mistakes) -> None:
    """Add a mistake for each tag that two targets have, and for each alias that is also a tag."""
    owners: dict[str, str] = {}
    for target in targets:
        for i, tag in enumerate(target.tags):
            if (owner := owners.setdefault(tag, target.id)) != target.id:
                where = project.matrix.at("images", target.image, "tags", i)
                problem = f"tag {tag} names both {owner} and {target.id}"
                mistakes.add(where, f"{problem}; add the axis that differs to the tag")
    for target, alias in ((t, alias) for t in targets for alias in t.aliases if alias in owners):
        where = project.matrix.at("images", target.image, "aliases")
        problem = f"alias {alias} of {target.id} would move a tag of {owners[alias]}"
        mistakes.add(where, f"{problem}; choose another tag or alias")


def check_policy(project: Project, targets: Iterable[Target], mistakes: Mistakes) -> None:
    """Add a mistake for each wrong name of a staging repository, and for each required check that does not exist."""
    policy, at = project.matrix.model.publish, project.matrix.at
    known = {f"{name}/{check.name}" for name, document in project.components.items() for check in document.model.checks}
    for i, row in enumerate(policy.require):
        for j, pattern in enumerate(row.checks):
            full = pattern if "/" in pattern else f"{pattern}/*"
            fits = any(fnmatchcase(name, full.removesuffix("-speed")) for name in known)
            if not fits and not full.startswith("image/"):
                problem = f"publish.require: no component has the check {pattern}{suggestion(full, known)}"
                mistakes.add(at("publish", "require", i, "checks", j), problem)
    where = at("publish", "staging")
    for target in targets:
        name = repository_name(project, target.image)
        if not REPOSITORY.fits(name):
            remedy = "write a template such as {repository}/{image}-staging"
            mistakes.add_once(f"{where}: publish.staging", f"{name!r} is not the name of a repository; {remedy}")
        if name in {tag.rpartition(":")[0] for tag in (*target.tags, *target.aliases)}:
            remedy = "choose another repository"
            mistakes.add(where, f"publish.staging: {name} is the published repository of {target.image}; {remedy}")


def restricted_components(plan: Plan, targets: Iterable[Target]) -> dict[str, str]:
    """Map each component with a restricted licence to the terms to accept before these targets are published."""
    used = {component for target in targets for component in target.components}
    return {name: text for name, text in plan.restricted.items() if name in used}


def parts_of(selector: str) -> list[str]:
    """Return a selector for each of the values or names that are separated by commas."""
    axis, equals, _ = selector.partition("=")
    beginning = f"{axis}=" if equals else EXCEPT if selector.startswith(EXCEPT) else ""
    return [beginning + value for value in selector.removeprefix(beginning).split(",")]


def fits(item: Target | Excluded, selectors: Sequence[str]) -> bool:
    values, wanted, globs = {"image": item.image, **item.axes}, dict[str, list[bool]](), list[str]()
    for selector in (part for text in selectors for part in parts_of(text)):
        axis, equals, value = selector.partition("=")
        if selector.startswith(EXCEPT):
            wanted[selector] = [not fits(item, [selector.removeprefix(EXCEPT)])]
        elif equals:
            wanted.setdefault(axis, []).append(fnmatchcase(values.get(axis, ""), value))
        else:
            globs.append(selector)
    return all(map(any, wanted.values())) and (
        not globs or any(glob == item.image or fnmatchcase(item.id, glob) for glob in globs)
    )
