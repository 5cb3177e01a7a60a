"""Which targets another state of the project does not have as they are now: what CI builds, verifies or tags again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from imagebuild import checks, preview, steps
from imagebuild.config import Project
from imagebuild.console import err
from imagebuild.cost import Side
from imagebuild.errors import ConfigError
from imagebuild.models import Target
from imagebuild.revision import Places, files_of

Reason = Literal["new", "image", "checks", "tags"]
"""Why: the other state has no such target, makes another image of it, checks it otherwise, or lacks a tag of it."""


@dataclass(frozen=True)
class Seen:
    """A target as one state of the project has it."""

    target: Target
    text: str
    """Its Dockerfile."""
    settings: Mapping[str, steps.Setting]
    """Platform → for whom it is built."""
    checked: object
    """All that decides what verification says about the image."""


@dataclass(frozen=True)
class Change:
    """A target that differs on at least one of its platforms; publishing needs all of them."""

    target: Target
    reason: Reason


State = Mapping[str, Seen]
"""Id → target."""


def state_before(reference: str, places: Places, prepare: preview.Prepare) -> State:
    """The project in another state; empty for `nothing`, and for one that this version cannot read any more.

    Raises ConfigError for what is neither a revision nor a folder.
    """
    if reference == preview.NOTHING:
        return {}
    with files_of(reference, places) as found:
        try:
            work = prepare(found.matrix, found.dockerfiles, found.lock, None)
            return state_of(preview.side_of(work.project, work.versions, work.plan.targets, (), "bootstrap"))
        except ConfigError as error:
            # What was right then may be a mistake for this version; CI must not stop at it.
            err.print(f"{reference} cannot be read, so everything counts as changed: {error}", markup=False)
            return {}


def state_of(side: Side) -> State:
    """The targets of a side. Raises ConfigError if a template is wrong or a script is missing."""
    of_component: dict[str, object] = {}
    result = {}
    for target in side.targets:
        for name in target.components:
            if name not in of_component:
                of_component[name] = _checked(side.project, name)
        image = side.project.matrix.model.images[target.image]
        result[target.id] = Seen(
            target,
            side.renderer.dockerfile(target).text,
            {setting.platform: setting for setting in side.settings(target)},
            ([of_component[name] for name in target.components], image.waivers, image.size_limit_mb),
        )
    return result


def _checked(project: Project, name: str) -> object:
    component = project.components[name].model
    scripts = [(check, checks.script_of(project, name, check)) for check in checks.of_component(component)]
    return scripts, component.waivers, component.gpu_code


def changes(before: State, after: State) -> Iterator[Change]:
    """What of `after` is not the same in `before`, in the order of the plan.

    Both are rendered by this version of imagebuild: what a change of its own code does is not seen.
    """
    for new in after.values():
        old = before.get(new.target.id)
        reasons = [reason for platform in new.settings if (reason := _reason(old, new, platform))]
        if reasons:
            yield Change(new.target, reasons[0])


def _reason(old: Seen | None, new: Seen, platform: str) -> Reason | None:
    if old is None or platform not in old.settings:
        return "new"
    # Keys take much longer than a comparison of texts, and most texts are equal.
    same = (old.text, old.settings[platform]) == (new.text, new.settings[platform])
    if not same and _key(old, platform) != _key(new, platform):
        return "image"
    if old.checked != new.checked:
        return "checks"
    if {*new.target.tags, *new.target.aliases} - {*old.target.tags, *old.target.aliases}:
        return "tags"
    return None


def _key(seen: Seen, platform: str) -> str:
    return steps.result_key(seen.text, seen.settings[platform])


def summary(found: Sequence[Change], total: int, reference: str) -> str:
    """One line for people."""
    counts = {reason: sum(c.reason == reason for c in found) for reason in get_args(Reason)}
    why = ", ".join(f"{number} {reason}" for reason, number in counts.items() if number)
    return f"{len(found)} of {total} targets differ from {reference}" + (f": {why}" if why else "")
