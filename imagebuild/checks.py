"""Choose the checks of an image, and run them in a session of a runner."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from imagebuild import measured, needs, redact
from imagebuild.component import Check, Component
from imagebuild.config import Project
from imagebuild.errors import ConfigError
from imagebuild.needs import Facilities
from imagebuild.records import CheckResult, Outcome
from imagebuild.runners.base import Command, Execution, Session
from imagebuild.versions import facts, matches

SKIPPED_STATUS = 77
"""With it a check says that it cannot run here; its last line of output says why."""
OUTPUT_LIMIT = 20_000
"""Characters of a check's output that are kept in the results, from its end."""
ANY_VERSION = r"[0-9][0-9A-Za-z.+:~-]*"
"""What `{version}` stands for where nobody says which version the image has."""
UNCOMPARED = "any version accepted: the image does not say which it has"


@dataclass(frozen=True)
class Planned:
    """A check about to be run: its script is read, and skipping it is decided."""

    component: str
    version: str | None
    """`None` where the image does not say it."""
    check: Check
    script: str
    skip: str

    @property
    def name(self) -> str:
        return f"{self.component}/{self.check.name}"


def components_of(labels: Mapping[str, str]) -> dict[str, str]:
    """Component → version, as the image's labels say."""
    return _labelled(labels, "imagebuild.component.")


def axes_of(labels: Mapping[str, str]) -> dict[str, str]:
    """Axis → value of the image's target, as its labels say."""
    return _labelled(labels, "imagebuild.axis.")


def _labelled(labels: Mapping[str, str], prefix: str) -> dict[str, str]:
    return {name.removeprefix(prefix): value for name, value in labels.items() if name.startswith(prefix)}


def of_component(component: Component) -> tuple[Check, ...]:
    """All checks of a component."""
    return (*license_check(component), *component.checks)


def planned(
    project: Project, components: Mapping[str, str | None], axes: Mapping[str, str], have: Facilities
) -> list[Planned]:
    """The checks of the components. Raises ConfigError if a component or a script is unknown here.

    Without axes, of an image that does not name them, conditions on them are no reason to skip.
    """
    unknown = [name for name in components if name not in project.components]
    if unknown:
        raise ConfigError(f"{', '.join(unknown)}: the image says it has it, but no such component is known here")
    result = []
    for name, version in components.items():
        for check in of_component(project.components[name].model):
            if axes and not matches(check.when, facts(axes)):
                skip = "only for " + ", ".join(f"{axis} {'|'.join(values)}" for axis, values in check.when.items())
            else:
                skip = needs.missing(check.needs, have)
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


def skipped(checks: Iterable[Planned], reason: str) -> list[CheckResult]:
    """The results of checks that could not even begin."""
    return [
        CheckResult(component=p.component, check=p.check.name, outcome="skipped", reason=p.skip or reason)
        for p in checks
    ]


def command_of(planned: Planned, log: Path | None = None, more: Mapping[str, str] | None = None) -> Command:
    """What a check starts; `more` are variables besides its own, which come first."""
    check = planned.check
    return Command(
        script=planned.script, user=check.user, timeout_s=check.timeout_s,
        environment={**(more or {}), **check.environment},
        nodes=needs.nodes(check.needs), ranks=check.ranks, log=log,
    )  # fmt: skip


def run(planned: Planned, session: Session, log: Path, more: Mapping[str, str] | None = None) -> CheckResult:
    """Run a check, or say why it cannot run; `more` are variables besides its own.

    A failed check is a result; raises CommandError if the runner fails.
    """
    command = command_of(planned, log, more)
    if reason := planned.skip or session.obstacle(command):
        return skipped([planned], reason)[0]
    started = datetime.now(UTC).isoformat(timespec="seconds")
    hung = 0
    while _hung(execution := session.run(command)) and hung + 1 < planned.check.attempts:
        hung += 1
    results = None
    outcome: Outcome = "skipped"
    if execution.status == SKIPPED_STATUS and execution.output.strip():
        reason = execution.output.strip().splitlines()[-1]
    else:
        results = measured.read(log, planned.name) if planned.check.results else None
        reason = judge(planned.check, planned.version, execution, log)
        if results and planned.check.results and execution.status is not None:
            reason = "; ".join(filter(None, (reason, measured.bad(results, planned.check.results))))
        outcome = "failed" if reason else "passed"
        if not reason and planned.version is None and "{version}" in (planned.check.expect or ""):
            reason = UNCOMPARED
    if hung:
        late = f"{hung + _hung(execution)} of {hung + 1} attempts did not end within {command.timeout_s} s"
        reason = "; ".join(filter(None, ("" if _hung(execution) else reason, late)))
    return CheckResult(
        component=planned.component,
        check=planned.check.name,
        outcome=outcome,
        reason=reason,
        output=redact.text(execution.output[-OUTPUT_LIMIT:]),
        seconds=round(execution.seconds, 3),
        command=execution.argv,
        status=execution.status,
        timeout=_hung(execution),
        environment=dict(execution.environment),
        started=started,
        results=results,
    )


def _hung(execution: Execution) -> bool:
    return execution.status is None and not execution.problem


def judge(check: Check, version: str | None, execution: Execution, log: Path | None = None) -> str:
    """Why a check failed; empty if it passed."""
    if execution.problem:
        return execution.problem
    if execution.status is None:
        return f"did not end within {check.timeout_s} s"
    if execution.status:
        return f"exit status {execution.status}"
    if check.expect is not None:
        pattern = check.expect.replace("{version}", re.escape(version) if version is not None else ANY_VERSION)
        if not _found(pattern, execution.output, log):
            return f"the output has no {pattern!r}"
    return ""


def _found(pattern: str, end: str, log: Path | None) -> bool:
    """Whether the output has the pattern: in the end of it that is in memory, or anywhere in the log."""
    if re.search(pattern, end, re.MULTILINE):
        return True
    if log is None or not log.exists() or not log.stat().st_size:
        return False
    with log.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
        return re.search(pattern.encode(), whole, re.MULTILINE) is not None
