"""What a target is called: in the engine's store, by tags that never move, and by aliases that do. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from imagebuild.config import Mistakes, Project, suggestion
from imagebuild.models import Target, combination_id
from imagebuild.versions import facts, major, matches, minor

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
    known = {**facts(axes), "image": image}

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
