"""The origin of each value of a target: the file and line, or the option, that states it. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from imagebuild.core.fields import Loc, axis_facts
from imagebuild.project.matrix import FIELD
from imagebuild.project.plan import Target
from imagebuild.project.project import Project

SHOWN = ("platforms", "build-on", "size-limit-mb", "user", "cmd", "packages", "waivers", "append")
"""Keys of an image that are shown as they are."""

Row = tuple[str, str, str]
"""The name of a value, the value, and its origin."""


def explain(project: Project, target: Target) -> Iterator[Row]:
    """Yield each value of a target that the matrix or an option states, with its origin."""
    matrix, changes, name = project.matrix.model, project.changes, target.image
    image, facts = matrix.images[name], axis_facts(target.axes)
    for axis, value in target.axes.items():
        yield f"axis: {axis}", value, f"--set {axis}" if axis in changes.values else _place(project, name, "axes", axis)
    release = target.axes["os"]
    origin = _place(project, name, "base") if image.base else _stated(project, ("bases", release))
    base = FIELD.sub(lambda match: target.axes[match[1]], image.base or matrix.bases[release].image)
    yield "base", base, "--base-image" if changes.base_image else origin
    for component, version in target.components.items():
        origin = _version_place(project, component, facts)
        if component in changes.with_:
            origin = f"--with; version: {origin}"
        elif component not in image.components:
            requires = {c: project.components[c].model.requires for c in target.components}
            users = [c for c in requires if component in [project.provider(n, target.components) for n in requires[c]]]
            origin = f"needed by {', '.join(users)}; version: {origin}"
        yield f"component: {component}", version, origin
    yield "components", f"{len(image.components)} listed", _place(project, name, "components")
    for component in changes.without:
        yield f"component: {component}", "removed", "--without"
    for key in ("build-with", "env", "labels"):
        for inner, value in getattr(image, key.replace("-", "_")).items():
            yield f"{key}: {inner}", value, _place(project, name, key, inner)
    written = image.model_dump(by_alias=True, exclude_unset=True, mode="json")
    for key in (key for key in SHOWN if written.get(key)):
        value, origin = written[key], _place(project, name, key)
        if key == "append":
            value, origin = (
                f"{len(value.splitlines())} lines",
                f"--append {changes.append}" if changes.append else origin,
            )
        elif key == "packages":
            value = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in value.items() if names)
        elif isinstance(value, list):
            value = ", ".join(item if isinstance(item, str) else f"{item['rule']} {item['subject']}" for item in value)
        elif isinstance(value, dict):
            value = value.get(target.axes["variant"], value)
        yield key, str(value), origin
    for key, word in ("tags", "tag"), ("aliases", "alias"):
        yield from ((word, tag, _place(project, name, key)) for tag in getattr(target, key))


def _place(project: Project, image: str, *key: str) -> str:
    """Return the place of a key of an image: in the image, or in the image that it starts from."""
    place: Loc = ("images", image, *key)
    entry = project.matrix.model.images[image]
    if place in project.matrix.lines or not project.matrix.lines:
        return project.matrix.at(*place)
    source = entry.from_ or image
    if source != image and source in project.matrix.model.images:
        return _place(project, source, *key)
    if project.base and source in project.base.matrix.model.images:
        return _place(project.base, source, *key)
    return "default"


def _version_place(project: Project, component: str, facts: dict[str, str]) -> str:
    model = project.components[component].model
    pin = model.pin or component
    if model.version_axis:
        return f"axis {model.version_axis}"
    if pin in project.changes.values:
        return f"--set {pin}"
    if not (row := project.pin(component, facts)):
        return "nowhere"
    return _stated(project, ("versions", pin), project.matrix.model.versions[pin].index(row))


def _stated(project: Project, place: Loc, *inner: int) -> str:
    """Return the place of a value that a project may inherit from the project that it extends."""
    owner = project
    while owner.base and not owner.is_own(*place):
        owner = owner.base
    return owner.matrix.at(*place, *inner)
