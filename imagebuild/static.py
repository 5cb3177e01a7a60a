"""Checks that read an image without starting anything in it, while a container starts beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from imagebuild import docker
from imagebuild.config import Project
from imagebuild.inspection import inspect
from imagebuild.inspection.table import RULES
from imagebuild.models import Plan
from imagebuild.records import CheckResult
from imagebuild.runners.base import Runner
from imagebuild.runners.docker import DockerRunner
from imagebuild.subject import Subject

CHECKS = {
    "readable": "Every layer can be read",
    **{rule.name: rule.description for rule in RULES},
    "waivers": "All exceptions that the components and the matrix declare are needed",
}
UNREADABLE = "not through this runner; give an OCI layout of the image with --layout"


@contextmanager
def started(
    image: Subject, names: Sequence[str], runner: Runner, project: Project, plan: Plan
) -> Iterator[Callable[[], list[CheckResult]]]:
    """Begin to read the image; what is yielded waits for the results."""

    def read() -> list[CheckResult]:
        if image.layout:
            found = inspect(image.layout, project, plan)
        elif isinstance(runner, DockerRunner) and image.reference:
            found = inspect(docker.saved(runner.client, image.reference), project, plan, platform=image.platform)
        else:
            return [CheckResult(component="image", check=n, outcome="skipped", reason=UNREADABLE) for n in names]
        # Of an image for several platforms, results have the platform after their name.
        return [result for result in found if result.check.partition(" ")[0] in names]

    if not names:
        yield list
        return
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        yield reading.result
