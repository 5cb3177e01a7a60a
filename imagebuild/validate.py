"""What the files say about each other: names that must be known, rules that must match, tags that must differ. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from imagebuild.config import Mistakes, Project, suggestion
from imagebuild.models import Target
from imagebuild.versions import facts, matches


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
            *(a for image in matrix.images.values() for a in facts(dict.fromkeys(image.axes, ""))),
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
