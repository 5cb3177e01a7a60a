"""`imagebuild verify`: what reading an image says, and the checks of its components in a container."""

from __future__ import annotations

import os
from pathlib import Path

from rich.markup import escape

from imagebuild import checks, console, docker, engine
from imagebuild.config import Project
from imagebuild.console import out
from imagebuild.errors import ConfigError
from imagebuild.inspection import describe, inspect
from imagebuild.models import Check, Plan
from imagebuild.plan import Pins
from imagebuild.records import CheckResult, VerifyResult


def verify(project: Project, plan: Plan, image: str, versions: Pins | None = None) -> VerifyResult:
    """Run the checks of the components that the image's labels name.

    `image` is a target's id, any image that was built from a target, or the path of a saved image, which is only read.
    Raises ConfigError if it is none of them, CommandError if the engine fails.
    """
    if path := saved_at(image):
        return verify_saved(project, plan, path, versions)
    client = docker.connect(engine.find(os.environ))
    target = next((t for t in plan.targets if t.id == image), None)
    info = docker.inspect(client, target.tags[0] if target else image)
    components = checks.components_of(info.labels)
    if not components:
        raise ConfigError(f"{image}: has no labels imagebuild.component.*; it was not built here")
    if target and components != target.components:
        raise ConfigError(f"{image}: the image in the engine's store has other versions; build it again")
    todo = checks.planned(project, components, checks.axes_of(info.labels), have=())
    with docker.container(client, info.id, hostname="check", shm_size="1g") as running:

        def execute(script: str, check: Check) -> tuple[int, str]:
            return docker.execute(
                running, script, user=check.user, timeout_s=check.timeout_s, environment={"LC_ALL": "C.UTF-8"}
            )

        static = inspect(docker.saved(client, info.id), project, plan, versions=versions, platform=info.platform)
        results = [*static, *checks.run(todo, execute)]
    return VerifyResult(
        image=target.tags[0] if target else image,
        digest=info.digest,
        target=info.labels.get("imagebuild.target"),
        platform=info.platform,
        checks=tuple(results),
    )


def saved_at(image: str) -> Path | None:
    """The path that `oci:PATH` names, or that exists and is no image's name."""
    if image.startswith("oci:"):
        return Path(image.removeprefix("oci:"))
    path = Path(image)
    return path if (path / "oci-layout").is_file() or path.is_file() else None


def verify_saved(project: Project, plan: Plan, path: Path, versions: Pins | None = None) -> VerifyResult:
    """What reading an image says, without an engine. Raises ConfigError if it is none, ResultError if it is damaged."""
    about = describe(path)
    return VerifyResult(
        image=str(path),
        digest=about[0].digest,
        target=about[0].labels.get("imagebuild.target"),
        platform=", ".join(image.platform for image in about),
        checks=inspect(path, project, plan, versions=versions),
    )


def show(result: VerifyResult) -> None:
    """Print a table of the checks, and the output of those that failed."""
    rows = [(c.component, c.check, console.MARKS[c.outcome], c.reason, f"{c.seconds:.1f} s") for c in result.checks]
    console.table(("component", "check", "outcome", "why", "time"), rows)
    for check in result.checks:
        if check.outcome == "failed":
            out.print(f"\n[bold]{check.component} {check.check}[/]: {escape(check.reason)}")
            out.print(check.output.rstrip() or "(no output)", markup=False)
    out.print(f"{result.image}, {result.platform}: {summary(result.checks)}")


def summary(results: tuple[CheckResult, ...]) -> str:
    """`24 passed, 0 failed, 1 skipped`."""
    count = {outcome: sum(r.outcome == outcome for r in results) for outcome in console.MARKS}
    return ", ".join(f"{number} {outcome}" for outcome, number in count.items())
