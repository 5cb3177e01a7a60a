"""Run the checks of an image's components in a container."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from imagebuild.config import Project
from imagebuild.errors import ConfigError
from imagebuild.models import Check, Component
from imagebuild.records import CheckResult
from imagebuild.versions import facts, matches

TIMEOUT_STATUS, KILLED_STATUS = 124, 137
SKIPPED_STATUS = 77
"""With it a check says that it cannot run here; its last line of output says why."""
OUTPUT_LIMIT = 20_000
"""Characters of a check's output that are kept, from its end."""

Execute = Callable[[str, Check], tuple[int, str]]
"""Runs a script for a check in the image: status and output."""


@dataclass(frozen=True)
class Planned:
    """A check about to be run: its script is read, and skipping it is decided."""

    component: str
    version: str
    check: Check
    script: str
    skip: str


def components_of(labels: Mapping[str, str]) -> dict[str, str]:
    """Component → version, as the image's labels say."""
    return _labelled(labels, "imagebuild.component.")


def axes_of(labels: Mapping[str, str]) -> dict[str, str]:
    """Axis → value of the image's target, as its labels say."""
    return _labelled(labels, "imagebuild.axis.")


def _labelled(labels: Mapping[str, str], prefix: str) -> dict[str, str]:
    return {name.removeprefix(prefix): value for name, value in labels.items() if name.startswith(prefix)}


def planned(
    project: Project, components: Mapping[str, str], axes: Mapping[str, str], have: Iterable[str]
) -> list[Planned]:
    """The checks of the components. Raises ConfigError if a component or a script is unknown here."""
    unknown = [name for name in components if name not in project.components]
    if unknown:
        raise ConfigError(f"{', '.join(unknown)}: the image says it has it, but no such component is known here")
    result = []
    for name, version in components.items():
        for check in (*license_check(project.components[name].model), *project.components[name].model.checks):
            missing = [need for need in check.needs if need not in set(have)]
            skip = f"no {' and no '.join(missing)} here" if missing else ""
            if not skip and not matches(check.when, facts(axes)):
                skip = "only for " + ", ".join(f"{axis} {'|'.join(values)}" for axis, values in check.when.items())
            result.append(Planned(name, version, check, script_of(project, name, check), skip))
    return result


def license_check(component: Component) -> tuple[Check, ...]:
    """The check that the licence texts of a component are in the image, if it says where."""
    if not component.license_files:
        return ()
    run = "".join(f"ls {pattern}\n" for pattern in component.license_files)
    return (Check(name="license", description=f"The texts of {component.license} are in the image", run=run),)


def script_of(project: Project, component: str, check: Check) -> str:
    """The commands of a check."""
    if check.run is not None:
        return check.run
    owner, _, script = (check.script or check.name).rpartition("/")
    path: Path = project.root / "components" / (owner or component) / "checks" / f"{script}.sh"
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        where = project.components[component].at("checks")
        raise ConfigError(f"{where}: checks.{check.name}: {path}: {error.strerror}") from None


def run(checks: Iterable[Planned], execute: Execute) -> list[CheckResult]:
    """Run the checks one after another. A failed check is a result."""
    return [_run_one(planned, execute) for planned in checks]


def _run_one(planned: Planned, execute: Execute) -> CheckResult:
    check = planned.check
    if planned.skip:
        return CheckResult(component=planned.component, check=check.name, outcome="skipped", reason=planned.skip)
    began = time.monotonic()
    status, output = execute(planned.script, check)
    skipped = status == SKIPPED_STATUS and output.strip()
    reason = output.strip().splitlines()[-1] if skipped else judge(check, planned.version, status, output)
    return CheckResult(
        component=planned.component,
        check=check.name,
        outcome="skipped" if skipped else "failed" if reason else "passed",
        reason=reason,
        output=output[-OUTPUT_LIMIT:],
        seconds=round(time.monotonic() - began, 3),
    )


def judge(check: Check, version: str, status: int, output: str) -> str:
    """Why a check failed; empty if it passed."""
    if status in (TIMEOUT_STATUS, KILLED_STATUS):
        return f"did not end within {check.timeout_s} s"
    if status:
        return f"exit status {status}"
    if check.expect is not None:
        pattern = check.expect.replace("{version}", re.escape(version))
        if not re.search(pattern, output, re.MULTILINE):
            return f"the output has no {pattern!r}"
    return ""
