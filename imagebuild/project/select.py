"""Targets selected by id, image and axes. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from imagebuild.core.errors import ConfigError, NothingSelected, nearest
from imagebuild.project.plan import Excluded, Plan, Target


def select_targets(plan: Plan, selectors: Iterable[str]) -> tuple[Target, ...]:
    """Return the targets that fit the selectors: globs of ids, names of images, and `axis=value`.

    A target must fit one of the globs or names, and every `axis=value`. Without selectors, return all targets. Raises
    NothingSelected if no target fits, with the reason if a rule excludes the targets."""
    selectors = tuple(selectors)
    if chosen := tuple(t for t in plan.targets if _fits(t, selectors)):
        return chosen
    problem = f"no target fits {' '.join(selectors)}" if selectors else "the matrix has no target"
    for item in select_excluded(plan, selectors):
        reason = f"{item.rule} excludes {item.id}: {item.reason}"
        raise NothingSelected(f"{problem}: {reason}; `imagebuild plan` lists what is built")
    known = {name for t in plan.targets for name in (t.image, t.id, *(f"{a}={value}" for a, value in t.axes.items()))}
    near = next((near for name in selectors if name not in known and (near := nearest(name, known))), None)
    images = ", ".join(sorted({target.image for target in plan.targets}))
    raise NothingSelected(f"{problem}; " + (f"did you mean {near!r}?" if near else f"known images: {images}"))


def restricted_components(plan: Plan, targets: Iterable[Target]) -> dict[str, str]:
    """Map each component with a restricted licence to the terms to accept before these targets are published."""
    used = {component for target in targets for component in target.components}
    return {name: text for name, text in plan.restricted.items() if name in used}


def select_one(plan: Plan, name: str) -> Target:
    """Return the target with an id, or the only target that fits a glob.
    Raises NothingSelected if no target fits, and ConfigError if several targets fit."""
    chosen = select_targets(plan, [name])
    if len(chosen) > 1:
        first = ", ".join(target.id for target in chosen[:5]) + (", …" if len(chosen) > 5 else "")
        raise ConfigError(f"{name}: {len(chosen)} targets fit ({first}); name one of them")
    return chosen[0]


def select_excluded(plan: Plan, selectors: Iterable[str]) -> tuple[Excluded, ...]:
    """Return the excluded combinations that fit the selectors of `select_targets`."""
    return tuple(e for e in plan.excluded if _fits(e, tuple(selectors)))


def _fits(item: Target | Excluded, selectors: tuple[str, ...]) -> bool:
    """Return whether a combination fits the selectors of `select_targets`."""
    values = {"image": item.image, **item.axes}
    pairs = [selector.split("=", 1) for selector in selectors if "=" in selector]
    globs = [selector for selector in selectors if "=" not in selector]
    return all(fnmatchcase(values.get(axis, ""), value) for axis, value in pairs) and (
        not globs or any(glob == item.image or fnmatchcase(item.id, glob) for glob in globs)
    )
