"""`imagebuild verify`: the checks of an image's components, in a container."""

from __future__ import annotations

import os
import time

from docker import DockerClient
from rich.markup import escape

from imagebuild import checks, console, docker, engine, layers
from imagebuild.config import Project
from imagebuild.console import out
from imagebuild.errors import ConfigError, ResultError
from imagebuild.models import Check, Plan
from imagebuild.records import CheckResult, VerifyResult


def verify(project: Project, plan: Plan, image: str) -> VerifyResult:
    """Run the checks of the components that the image's labels name.

    `image` is a target's id, or any image that was built from a target. Raises ConfigError if it is neither,
    CommandError if the engine fails.
    """
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
                running,
                script,
                user=check.user,
                timeout_s=check.timeout_s,
                environment={"LC_ALL": "C.UTF-8", **check.environment},
            )

        results = [check_layers(client, info.id), *checks.run(todo, execute)]
    return VerifyResult(
        image=target.tags[0] if target else image,
        digest=info.digest,
        target=info.labels.get("imagebuild.target"),
        platform=info.platform,
        checks=tuple(results),
    )


def check_layers(client: DockerClient, image: str) -> CheckResult:
    """No layer holds a private key, not even one that a later layer hides."""
    began = time.monotonic()
    try:
        found = layers.private_keys(layers.files(docker.saved(client, image)))
    except ResultError as error:
        return CheckResult(component="image", check="no-keys", outcome="skipped", reason=str(error))
    return CheckResult(
        component="image",
        check="no-keys",
        outcome="failed" if found else "passed",
        reason=f"{len(found)} private keys in the layers" if found else "",
        output="\n".join(found),
        seconds=round(time.monotonic() - began, 3),
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
