"""Contradictions between the files of a project: names in one file that another file does not define. Pure."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

from imagebuild.core.errors import Mistakes, nearest, suggestion
from imagebuild.core.fields import OPERATORS, Arch, Condition, Loc, YamlFile, major
from imagebuild.core.yaml import foreign
from imagebuild.project.component import Variant
from imagebuild.project.matrix import FIELD, package_name
from imagebuild.project.project import Project

Reference = tuple[YamlFile[Any], Loc, str, str, Collection[str]]
"""A name that a file uses: the file, the place in the file, the problem if the name is unknown, the name, and all known
names."""


def check_names(project: Project, images: Collection[str], mistakes: Mistakes, *, publishing: bool) -> None:
    """Add a mistake for each name that a file or an option uses, but that no file defines.

    Names in other images than `images` do not count, and names in rules and the policy only for `publishing`."""
    matrix, at, changes = project.matrix.model, project.matrix.at, project.changes
    if not matrix.images:
        problem = "the matrix has no image; add one, such as the image that `imagebuild init` writes"
        mistakes.add(at("images"), f"images: {problem}")
    in_images: set[str] = set()
    for file, place, problem, name, known in (*_references(project), *_references_of_conditions(project)):
        in_images |= {name} if place[0] == "images" else set()
        if (place[0] == "images" and place[1] not in images) or (place[0] in ("rules", "publish") and not publishing):
            continue
        if name not in known and not (place[0] == "versions" and name in in_images):
            words = ".".join(str(word) for word in place if not isinstance(word, int) and word != name)
            remedy = suggestion(name, set(known)) or "; remove it"
            if problem == "unknown component":
                remedy = _instead_of(project, name, known)
            mistakes.add(file.at(*place), f"{words}: {problem} {name!r}{remedy}")
    tools = {name for name, document in project.components.items() if document.model.build_only}
    listed = {component for image in matrix.images.values() for component in image.components}
    listed |= {role for name in listed & project.components.keys() for role in project.components[name].model.provides}
    for option, names, choices, reason in (
        ("--with", changes.with_, project.components.keys() - tools, "is only a tool for build stages"),
        ("--without", changes.without, listed, "no image lists this component"),
    ):
        for name in names:
            if name not in choices:
                problem = reason if name in project.components else "unknown component"
                remedy = _instead_of(project, name, choices) if option == "--with" else suggestion(name, set(choices))
                mistakes.add(f"{option} {name}", f"{problem}{remedy}")
            elif name in changes.with_ and name in changes.without:
                mistakes.add_once(f"--with {name} --without {name}", "the options contradict each other; remove one")
    for name in images:
        image = matrix.images[name]
        axes = {"os": next(iter(matrix.bases), "debian13"), "variant": "runtime"}
        for i, component in enumerate(image.components):
            if component in tools:
                where = at("images", name, "components", i)
                mistakes.add(where, f"images.{name}.components: {component} is only a tool for build stages; remove it")
            elif component in project.components and (axis := project.components[component].model.version_axis):
                axes.setdefault(axis, f"VERSION of {component}")
        for package, other in _doubled(image.python):
            problem = f"is the same package as {other}; use one name"
            mistakes.add(at("images", name, "python", package), f"images.{name}.python.{package}: {problem}")
        usual = {*axes, "cuda", "gpu"}
        for axis in image.axes.keys() - usual:
            if near := nearest(axis, usual, likeness=0.7):
                problem = f"unknown axis {axis!r}; did you mean {near!r}?"
                mistakes.add(at("images", name, "axes", axis), f"images.{name}.axes: {problem}")
                axes.pop(near, None)
        for axis in axes.keys() - image.axes:
            problem = f"the axis {axis!r} is missing; add `{axis}: [{axes[axis]}]`"
            mistakes.add(at("images", name, "axes"), f"images.{name}.axes: {problem}")
        # `--base-image` is checked later, and only for the selected targets.
        for release in image.axes.get("os", ()) if not changes.base_image else ():
            if image.base and (problem := base_mismatch(image.base, release)):
                mistakes.add(at("images", name, "base"), f"images.{name}.base: {image.base}: {problem}")
    for name, document in project.components.items():
        pin = document.model.pin or name
        if document.model.version_axis or pin in matrix.versions:
            continue
        if users := [image for image in images if name in matrix.images[image].components]:
            problem = f"{users[0]} uses {name}, which has no version; add `{pin}: VERSION`"
            mistakes.add(at("versions"), f"versions: {problem}")
        elif name in changes.with_:
            mistakes.add(f"--with {name}", f"has no version; add `--set {pin}=VERSION`, or `{pin}` to `versions`")


def _doubled(packages: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each Python package that an earlier one names in another way, and the earlier one."""
    first: dict[str, str] = {}
    for package in packages:
        if (other := first.setdefault(package_name(package), package)) != package:
            yield package, other


def _instead_of(project: Project, name: str, known: Collection[str]) -> str:
    """Return the end of a message about a name that is not a component: a component to use, or how to add one."""
    if other := foreign("components").get(name.replace("_", "-")):
        return f"; use {other}"
    near = suggestion(name, set(known))
    path = project.roots[0] / "components" / name / "component.yaml"
    return near if "did you mean" in near else f"; list packages of the distribution in `packages`, or write {path}"


RELEASE = re.compile(r"(debian|ubuntu)[:_-]?(\d[\d.]*)")
"""A release in the name of an image, such as `nvidia/cuda:13.0.1-devel-ubuntu24.04`."""


def base_mismatch(image: str, release: str) -> str:
    """Return the reason why an image cannot be the base of a release, such as `debian13`.
    Only the name of the image is examined. Empty if the image can be the base."""
    name = image.partition("@")[0].rpartition("/")[2]
    named = [f"{distribution}{number}" for distribution, number in RELEASE.findall(name)]
    named += [other for word, other in foreign("releases").items() if word in name]
    unknown = not named and name.partition(":")[0] in ("debian", "ubuntu") and "{" not in name
    fits = not unknown and all(other.startswith(release.partition(".")[0]) for other in named)
    problem = f"is not a base image of {release}, but packages and pins are for {release}; use an image of {release}"
    return "" if fits else problem


def _references(project: Project) -> Iterator[Reference]:
    """Yield each name in a file that another file must define, except the names in conditions."""
    matrix, file, components = project.matrix.model, project.matrix, project.components
    roles = {wanted for document in components.values() for wanted in document.model.build_requires}
    fulfilled = {*components, *(name for document in components.values() for name in document.model.provides)}
    pins = {*components, *(document.model.pin for document in components.values() if document.model.pin)}
    for name, image in matrix.images.items():
        place = ("images", name)
        for i, component in enumerate(image.components):
            yield file, (*place, "components", i), "unknown component", component, components
        for wanted, component in image.build_with.items():
            yield file, (*place, "build-with"), "no build stage requires", wanted, roles
            if wanted in roles:
                offers = {c for c, document in components.items() if wanted in (c, *document.model.provides)}
                where = (*place, "build-with", wanted)
                yield file, where, f"not a component that provides {wanted}:", component, offers
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
        for other in document.model.conflicts:
            yield document, ("conflicts", other), "unknown component", other, fulfilled


MORE_NAMES: Mapping[str, Sequence[str]] = {
    "rules": ("image",),
    "aliases": ("image",),
    "require": ("image", "arch"),
    "waivers": ("image", "arch"),
    "supports": ("version",),
    "excludes": ("version",),
    "env": ("version",),
}
"""Maps the key of a list of rows, such as `rules`, to the names that conditions in the rows may use in addition to
axes. Conditions in `facts` may use all of these names, and the names in `build-requires`. A condition on any other name
never holds."""


def _references_of_conditions(project: Project) -> Iterator[Reference]:
    """Yield the axes and values that conditions in the project's own files use.
    Conditions in the files of an extended project are left out, because these conditions may use other axes."""
    matrix, components = project.matrix.model, project.components
    values: dict[str, set[str]] = {"os": {*matrix.bases}, "variant": {*get_args(Variant)}}
    for image in matrix.images.values():
        for axis, listed in image.axes.items():
            values.setdefault(axis, set()).update(listed)
    axes: dict[str, Collection[str]] = {f"{axis}-major": {*map(major, listed)} for axis, listed in values.items()}
    axes |= values
    # `()` accepts every value, because a condition may name any version.
    others: dict[str, Collection[str]] = {"image": [*matrix.images], "arch": get_args(Arch), "version": ()}
    users = {name: document.model.pin or name for name, document in components.items()}
    for role in {wanted for document in components.values() for wanted in document.model.build_requires}:
        others[role] = {*values.get(role, ()), *components}
    documents: list[YamlFile[Any]] = [project.matrix, *components.values()]
    for document in documents:
        for place, condition in _conditions(document.model.model_dump(by_alias=True)):
            is_matrix = document is project.matrix
            if not (
                project.is_own(*place[: 3 if place[0] == "images" else 2])
                if is_matrix
                else document.path.is_relative_to(project.roots[0])
            ):
                continue
            kind = [part for part in place[:-1] if isinstance(part, str)][-1]
            more = others if kind == "facts" else {name: others[name] for name in MORE_NAMES.get(kind, ())}
            if place[0] == "versions":
                more = {"component": [name for name, pin in users.items() if pin == place[1]]}
            names = {**axes, **more}
            for axis, alternatives in condition.items():
                yield document, (*place, axis), "unknown axis", axis, names
                for value in alternatives:
                    if names.get(axis) and not value.startswith(OPERATORS):
                        is_major = value in names.get(f"{axis}-major", ())
                        problem = f"only {axis}-major is" if is_major else "no target has"
                        yield document, (*place, axis), problem, value, names[axis]


def _conditions(value: object, place: Loc = ()) -> Iterator[tuple[Loc, Condition]]:
    """Yield each condition (`when`) in the content of a file, with the keys that lead to the condition."""
    if not isinstance(value, dict | tuple):
        return
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        if (
            key == "when" and place and isinstance(place[-1], int)
        ):  # only rows have conditions; `when` may also be a name
            yield (*place, key), inner
        else:
            yield from _conditions(inner, (*place, key))
