"""The origin of each value of a target: the file and line, or the option, that states it. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from imagebuild.core.fields import Loc, axis_facts
from imagebuild.project.matrix import FIELD
from imagebuild.project.plan import Target
from imagebuild.project.project import Project

SHOWN = ("description", "platforms", "build-on", "size-limit-mb", "user", "cmd", "waivers", "append")
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
    for key in ("build-with", "env", "labels", "python"):
        for inner, value in getattr(image, key.replace("-", "_")).items():
            yield f"{key}: {inner}", value, _place(project, name, key, inner)
    for kind, packages in image.packages.model_dump(by_alias=True, exclude_unset=True).items():
        for package in packages:
            yield f"packages: {kind}", package, _place(project, name, "packages", kind, package=package)
    written = image.model_dump(by_alias=True, exclude_unset=True, mode="json")
    for key in (key for key in SHOWN if written.get(key)):
        value, origin = written[key], _place(project, name, key)
        if key == "append":
            value, origin = (
                f"{len(value.splitlines())} lines",
                f"--append {changes.append}" if changes.append else origin,
            )
        elif isinstance(value, list):
            value = ", ".join(item if isinstance(item, str) else f"{item['rule']} {item['subject']}" for item in value)
        elif isinstance(value, dict):
            variant = target.axes["variant"]
            value, origin = value.get(variant, value), _place(project, name, key, variant)
        yield key, str(value), origin
    for key, word in ("tags", "tag"), ("aliases", "alias"):
        yield from ((word, tag, _place(project, name, key)) for tag in getattr(target, key))


def _place(project: Project, image: str, *key: str, package: str = "") -> str:
    """Return the place of a key of an image: in the image, or in the image that it starts from. `package`: an item of
    the list at this key, to which images add."""
    place: Loc = ("images", image, *key)
    source = project.matrix.model.images[image].from_ or image
    is_own = source != image and source in project.matrix.model.images
    owner = project if is_own else project.base
    while owner and source not in owner.matrix.model.images:
        owner = owner.base
    start = owner.matrix.model.images[source] if owner else None
    inherits = package and start and package in getattr(start.packages, key[-1].replace("-", "_"))
    if not inherits and (place in project.matrix.lines or not project.matrix.lines):
        return project.matrix.at(*place)
    return _place(owner, source, *key, package=package) if owner and start else "default"


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
