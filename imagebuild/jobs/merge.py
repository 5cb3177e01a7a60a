"""Layers of facts to the environment of a job. Pure.

Later layers add. Only the names in `OVERRIDABLE` may be set anew; two values of any other name stop. Every variable
ends up once, with the scope that its entry names, and scopes that the scheduler has no place for stop too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from imagebuild.errors import ConfigError
from imagebuild.jobs.models import OVERRIDABLE, Container, Env, Expect, Layer, Scheduler, Scope
from imagebuild.versions import matches

PLACES: Mapping[tuple[Scheduler, Container], tuple[Scope, ...]] = {
    ("mpijob", "kubernetes"): ("rank", "container", "launcher"),
    ("jobset", "kubernetes"): ("rank", "container", "launcher"),
    ("slurm", "pyxis"): ("rank", "container", "batch"),
    ("slurm", "none"): ("rank", "batch"),
}
"""Scopes that can be told apart: Slurm has no launcher, and where there is no container it has no environment."""


@dataclass(frozen=True)
class Placed:
    """A variable, and who set it."""

    entry: Env
    value: str | None
    layer: str
    where: str
    replaces: bool = False
    """`--set NAME:=VALUE` sets anew whatever was there."""


@dataclass(frozen=True)
class Source:
    """A layer: its facts, its name in messages, and where they stand."""

    label: str
    layer: Layer
    at: Callable[..., str]
    path: tuple[str, ...] = ()

    def where(self, index: int) -> str:
        return self.at(*self.path, "env", index)


def entries(sources: Iterable[Source], facts: Mapping[str, str], parameters: Mapping[str, str]) -> list[Placed]:
    """Entries whose condition holds, with parameters filled in, lowest layer first. Raises ConfigError."""
    return [
        Placed(entry, fill(entry.value, parameters, source.where(i)), source.label, source.where(i))
        for source in sources
        for i, entry in enumerate(source.layer.env)
        if matches(entry.when, facts)
    ]


def expects(sources: Iterable[Source], facts: Mapping[str, str]) -> tuple[Expect, ...]:
    return tuple(e for source in sources for e in source.layer.expect if matches(e.when, facts))


def merge(placed: Iterable[Placed], scheduler: Scheduler, container: Container) -> tuple[Placed, ...]:
    """Every name once. Raises ConfigError where two layers disagree, or a scope has no place."""
    result: dict[str, Placed] = {}
    for one in placed:
        name = one.entry.name
        if one.entry.scope not in PLACES[scheduler, container]:
            raise ConfigError(f"{one.where}: {name}: {_no_place(one.entry.scope, scheduler, container)}")
        before = result.get(name)
        if before and not one.replaces and name not in OVERRIDABLE:
            if (before.value, before.entry.scope) != (one.value, one.entry.scope):
                raise ConfigError(_conflict(before, one))
            continue
        result[name] = one
    return tuple(result.values())


def fill(text: str | None, parameters: Mapping[str, str], where: str) -> str | None:
    """`{name}` replaced by parameters. Raises ConfigError for a name that is none."""
    if text is None:
        return None

    def value(match: re.Match[str]) -> str:
        if match[1] not in parameters:
            raise ConfigError(f"{where}: {{{match[1]}}} is no parameter; there are: {', '.join(sorted(parameters))}")
        return parameters[match[1]]

    return re.sub(r"(?<!\$){([a-z][a-z0-9-]*)}", value, text)


def of(placed: Iterable[Placed], scope: Scope) -> tuple[Placed, ...]:
    """Those with that scope, in order."""
    return tuple(one for one in placed if one.entry.scope == scope)


def _no_place(scope: Scope, scheduler: Scheduler, container: Container) -> str:
    if scope == "container":
        return f"scope container, but with --container {container} there is no container"
    if scope == "launcher":
        return "scope launcher, but Slurm starts ranks without one; take rank or batch"
    return f"scope {scope}, but {scheduler} has no batch script; take rank or launcher"


def _conflict(before: Placed, after: Placed) -> str:
    name = after.entry.name

    def side(one: Placed) -> str:
        return f"{one.value!r} for {one.entry.scope} by {one.layer} ({one.entry.why})"

    advice = f"to replace it, write --set {name}:={after.value}" if after.layer == "--set" else "only one can stay"
    return f"{after.where}: {name} has two values: {side(before)}, and {side(after)}; {advice}"
