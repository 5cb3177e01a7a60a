"""`--set`: variables (`NCCL_IB_TC=41`) and parameters (`minutes=30`) of a job."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from imagebuild.config import suggestion
from imagebuild.errors import ConfigError
from imagebuild.jobs.merge import Placed
from imagebuild.jobs.models import Env, Scope

PARAMETERS = {
    "account": r"[A-Za-z0-9_.,=-]+",
    "constraint": r"[A-Za-z0-9_&|,*()\[\]-]+",
    "cpu": r"[0-9]+",
    "cpus-per-task": r"[1-9][0-9]*",
    "driver": r"[0-9]+(\.[0-9]+)*",
    "hca": r"[A-Za-z0-9_:,=^-]+",
    "images": r"[A-Za-z0-9_./${}:-]+",
    "interface": r"[A-Za-z0-9_.,=^-]+",
    "json": r"yes|no",
    "memory": r"[0-9]+(Ki|Mi|Gi|Ti)?",
    "min-bw": r"[0-9]+(\.[0-9]+)?",
    "minutes": r"[0-9]+",
    "name": r"[a-z]([-a-z0-9]*[a-z0-9])?",
    "partition": r"[A-Za-z0-9_,-]+",
    "plugin": r"[A-Za-z0-9_.-]+",
    "programs": r"/[A-Za-z0-9_./-]+",
    "rack-nodes": r"[0-9]+",
    "resource": r"[a-z0-9.-]+/[A-Za-z0-9._-]+:[0-9]+",
    "suffix": r"[A-Za-z0-9_-]*",
}
"""Name → what a value looks like."""
PREFIXES: tuple[Scope, ...] = ("rank", "container", "launcher", "batch")
VARIABLE = re.compile(r"(?:(?P<scope>[a-z]+):)?(?P<name>[A-Z_][A-Z0-9_a-z]*)(?P<replace>:?)=(?P<value>.*)", re.DOTALL)


@dataclass(frozen=True)
class Settings:
    """What `--set` gave."""

    values: dict[str, str]
    variables: tuple[Placed, ...]

    def get(self, name: str, default: str | None = None) -> str | None:
        return self.values.get(name, default)


def parse(settings: Iterable[str]) -> Settings:
    """Raises ConfigError for what is neither a parameter nor a variable, and for values that cannot be written."""
    values: dict[str, str] = {}
    variables: list[Placed] = []
    for text in settings:
        if match := VARIABLE.fullmatch(text):
            variables.append(_variable(text, match))
            continue
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--set {text}: write it as name=value, for example --set minutes=30 or NCCL_IB_TC=41")
        if name not in PARAMETERS:
            raise ConfigError(f"--set {name}: no such parameter{suggestion(name, set(PARAMETERS))}")
        if not re.fullmatch(PARAMETERS[name], value):
            raise ConfigError(f"--set {name}={value!r}: must match {PARAMETERS[name]}")
        values[name] = value
    return Settings(values, tuple(variables))


def _variable(text: str, match: re.Match[str]) -> Placed:
    scope = match["scope"] or "rank"
    if scope not in PREFIXES:
        raise ConfigError(f"--set {text}: no scope {scope!r}{suggestion(scope, list(PREFIXES))}")
    value = match["value"]
    if bad := next((c for c in value if c in "'\"\\`" or not c.isprintable()), None):
        raise ConfigError(
            f"--set {match['name']}: {bad!r} in a value; quotes, backslashes and line ends mean something to shells "
            "and files that the value passes, so take a value without"
        )
    if "$" in value:
        raise ConfigError(f"--set {match['name']}: '$' in a value; say what it stands for")
    entry = Env(name=match["name"], value=value, scope=scope, why="set on the command line")
    return Placed(entry, value, "--set", f"--set {match['name']}", replaces=bool(match["replace"]))
