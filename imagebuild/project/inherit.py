"""Inheritance between images: an image takes the keys that it does not state from another image. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

from imagebuild.core.errors import Mistakes, suggestion
from imagebuild.core.fields import YamlFile
from imagebuild.project.matrix import ComponentEdits, Image, Matrix

REQUIRED = ("description", "axes", "platforms", "components", "tags")
"""Keys that every image has, its own or from the image that it starts from."""
MOST_STEPS = 50
"""Maximum number of images that start one from the other."""


def complete_images(document: YamlFile[Matrix], extended: Mapping[str, Image], mistakes: Mistakes) -> dict[str, Image]:
    """Return the images of a matrix, with the keys of the images that they start from.

    `extended` are the complete images of the extended project. Add a mistake for each image that does not exist, that
    starts from itself, or that lacks a key."""
    own, done = document.model.images, dict[str, Image]()

    def complete(name: str, trail: tuple[str, ...] = ()) -> Image:
        if name in done:
            return done[name]
        if name in trail:
            circle = " → ".join((*trail[trail.index(name) :], name))
            problem = f"circular dependency: {circle}; start one of them from another image"
            mistakes.add_once(f"{document.at('images', name, 'from')}: images.{name}.from", problem)
            return own[name]
        if len(trail) > MOST_STEPS:
            problem = f"starts from more than {MOST_STEPS} images, one from the other; start it from an earlier one"
            mistakes.add_once(f"{document.at('images', name)}: images.{name}", problem)
            return own[name]
        image = own[name]
        source = image.from_ if "from_" in image.model_fields_set else (name if name in extended else None)
        if source and source in own and source != name:
            image = _merged(complete(source, (*trail, name)), image)
        elif source and source in extended:
            image = _merged(extended[source], image)
        elif source:
            problem = f"no image {source!r}{suggestion(source, {*own, *extended} - {name})}"
            mistakes.add(document.at("images", name, "from"), f"images.{name}.from: {problem}")
            return image
        done[name] = _edited(name, image, own[name].components_, document, mistakes)
        return done[name]

    for name in own:
        complete(name)
    for name, key in product(done, REQUIRED) if not mistakes.texts else ():
        if not getattr(done[name], key):
            problem = f"is missing; add `{key}: …`, or `from: IMAGE` to start from another image"
            mistakes.add(document.at("images", name), f"images.{name}.{key}: {problem}")
    for name, image in own.items():
        if image.base in {*own, *extended}:
            problem = f"is an image of a project, not of a registry; write `from: {image.base}`"
            mistakes.add(document.at("images", name, "base"), f"images.{name}.base: {image.base} {problem}")
    return {name: done[name] for name in own if name in done}


def _merged(parent: Image, image: Image) -> Image:
    """Return an image with the keys of its parent. The entries of mappings are merged, other values are replaced."""
    update: dict[str, Any] = {"from_": None} | {key: getattr(image, key) for key in image.model_fields_set}
    for key, value in update.items():
        before = getattr(parent, key)
        if isinstance(value, dict) and isinstance(before, dict):
            update[key] = _in_order(before, value) if key == "axes" else {**before, **value}
    if isinstance(image.components_, ComponentEdits):
        update["components_"] = parent.components
    return parent.model_copy(update=update)


def _in_order(before: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the axes of an image. A new axis comes after the axis that it follows in `changed`, because the order of
    the axes determines the ids of targets."""
    order = list(before)
    previous = None
    for axis in changed:
        if axis not in before:
            order.insert(order.index(previous) + 1 if previous else 0, axis)
        previous = axis
    return {axis: changed.get(axis, before.get(axis)) for axis in order}


def _edited(name: str, image: Image, edits: object, document: YamlFile[Matrix], mistakes: Mistakes) -> Image:
    """Return an image with changes to its components."""
    if not isinstance(edits, ComponentEdits):
        return image
    components = list(image.components)
    rows: list[tuple[str, str | int, str, list[str]]]
    rows = [("replace", old, old, [new]) for old, new in edits.replace.items()]
    rows += [("remove", i, component, []) for i, component in enumerate(edits.remove)]
    for key, place, component, instead in rows:
        if component in components:
            at = components.index(component)
            components[at : at + 1] = instead
        else:
            where = document.at("images", name, "components", key, place)
            problem = f"{component} is not a component of the image to start from"
            remedy = suggestion(component, set(components)) or "; remove this entry"
            mistakes.add(where, f"images.{name}.components.{key}: {problem}{remedy}")
    components += edits.add
    if doubled := next((c for c in components if components.count(c) > 1), None):
        where = document.at("images", name, "components")
        mistakes.add(where, f"images.{name}.components: {doubled} is already a component; add it only once")
    return image.model_copy(update={"components_": tuple(components)})
