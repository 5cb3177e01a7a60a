"""The selection of targets: ids, globs, images and values of axes on the command line. Pure."""

from collections import Counter
from collections.abc import Iterable

from imagebuild.core.errors import ConfigError, NothingSelected, nearest
from imagebuild.project.plan import EXCEPT, OPTIONS, Excluded, Plan, Target, fits, parts_of


def select_targets(plan: Plan, selectors: Iterable[str]) -> tuple[Target, ...]:
    """Return the targets that fit the selectors: globs of ids, names of images, `axis=value,…`, and `!SELECTOR`.

    A target must fit one of the globs or names, one of the values of each axis, and no selector after `!`. Without
    selectors, return all targets. Raises NothingSelected if no target fits all selectors or one of them, with the
    reason if a rule excludes the targets. Raises ConfigError if the options `--with` and `--without` make a selected
    target impossible, or if a selector after `!` leaves out nothing."""
    selectors = tuple(part for selector in selectors for part in parts_of(selector))
    wanted = tuple(selector for selector in selectors if not selector.startswith(EXCEPT))
    impossible = [item for item in select_excluded(plan, selectors) if item.rule == OPTIONS]
    if reasons := {item.image: item.reason for item in reversed(impossible)}:
        raise ConfigError("\n".join(dict.fromkeys(reversed(reasons.values()))))
    items: tuple[Target | Excluded, ...] = (*plan.targets, *plan.excluded)
    idle = tuple(selector for selector in wanted if not any(fits(item, (selector,)) for item in items))
    chosen = tuple(target for target in plan.targets if fits(target, wanted))
    for pattern in [selector.removeprefix(EXCEPT) for selector in selectors if selector not in wanted]:
        if chosen and not any(fits(item, wanted) and fits(item, (pattern,)) for item in items):
            known = {name for t in chosen for name in (t.image, t.id, *(f"{a}={value}" for a, value in t.axes.items()))}
            remedy = f"did you mean {near!r}?" if (near := nearest(pattern, known)) else "remove it"
            raise ConfigError(f"--exclude {pattern}: no selected target fits; {remedy}")
    if chosen and not idle:
        if kept := tuple(target for target in chosen if fits(target, selectors)):
            return kept
        raise NothingSelected(f"--exclude: leaves out all {len(chosen)} selected targets; exclude fewer of them")
    # A misspelled name beside a correct one is an error too: otherwise fewer images than requested would be built.
    selectors = idle or wanted
    problem = f"no target fits {' '.join(selectors)}" if selectors else "the matrix has no target"
    if excluded := select_excluded(plan, selectors):
        rules = Counter(item.rule for item in excluded)
        item = max(excluded, key=lambda item: rules[item.rule])
        reason = f"{item.rule} excludes {item.id}: {item.reason}"
        raise NothingSelected(f"{problem}: {reason}; `imagebuild plan` lists what is built")
    known = {name for t in plan.targets for name in (t.image, t.id, *(f"{a}={value}" for a, value in t.axes.items()))}
    left_out = {item.id: item for item in plan.excluded}
    near = next((n for name in selectors if name not in known and (n := nearest(name, {*known, *left_out}))), None)
    if near in left_out and near not in known:
        item = left_out[near]
        problem += f"; {item.rule} excludes {near}" if item.rule != OPTIONS else f"; {near} is not possible"
        raise NothingSelected(f"{problem}: {item.reason}; `imagebuild plan` lists what is built")
    axis, equals, _ = selectors[0].partition("=") if selectors else ("", "", "")
    values = sorted({f"{axis}={target.axes[axis]}" for target in plan.targets if equals and axis in target.axes})
    names = (
        f"known: {', '.join(values)}"
        if values
        else f"known images: {', '.join(sorted({t.image for t in plan.targets}))}"
    )
    raise NothingSelected(f"{problem}; " + (f"did you mean {near!r}?" if near else names))


def select_one(plan: Plan, *selectors: str) -> Target:
    """Return the only target that fits the selectors of `select_targets`.
    Raises NothingSelected if no target fits, and ConfigError if several targets fit."""
    chosen = select_targets(plan, selectors)
    if len(chosen) > 1:
        first = ", ".join(target.id for target in chosen[:5]) + (", …" if len(chosen) > 5 else "")
        axes = ["image"] if len({target.image for target in chosen}) > 1 else []
        axes += [axis for axis in chosen[0].axes if len({target.axes.get(axis) for target in chosen}) > 1]
        problem = f"{len(chosen)} targets fit ({first}), which differ in {', '.join(axes)}; name one of them"
        raise ConfigError(f"{' '.join(selectors) or 'TARGET'}: {problem}")
    return chosen[0]


def select_excluded(plan: Plan, selectors: Iterable[str]) -> tuple[Excluded, ...]:
    """Return the excluded combinations that fit the selectors of `select_targets`."""
    return tuple(e for e in plan.excluded if fits(e, tuple(selectors)))
