"""Mistakes in what `matrix.yaml` says about publishing. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

from imagebuild import checks
from imagebuild.config import Mistakes, Project, suggestion
from imagebuild.models import Target
from imagebuild.versions import facts, matches

FIELDS = {"repository", "image"}
NAME = re.compile(r"(?:[A-Za-z0-9.-]+(?::[0-9]+)?/)?[a-z0-9]+(?:[._/-]+[a-z0-9]+)*")


def check_policy(project: Project, targets: Iterable[Target], mistakes: Mistakes) -> None:
    """Templates of no repository, and requirements that no image can fulfil."""
    _check_staging(project, list(targets), mistakes)
    policy, at = project.matrix.model.publish, project.matrix.at
    known = {
        f"{name}/{check.name}"
        for name, document in project.components.items()
        for check in checks.of_component(document.model)
    }
    named = (facts(dict.fromkeys(image.axes, "")) for image in project.matrix.model.images.values())
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
