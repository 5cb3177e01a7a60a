"""Checks that read an image without starting anything in it, while a container starts beside them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from docker import DockerClient

from imagebuild import docker, layers
from imagebuild.errors import ResultError
from imagebuild.records import CheckResult
from imagebuild.runners.base import Runner
from imagebuild.runners.docker import DockerRunner
from imagebuild.subject import Subject

CHECKS = {"no-keys": "No layer holds a private key, not even one that a later layer hides"}
UNREADABLE = "the runner cannot read the image's files; give an OCI layout of it with --layout"


@contextmanager
def started(image: Subject, names: Sequence[str], runner: Runner) -> Iterator[Callable[[], list[CheckResult]]]:
    """Begin to read the image; what is yielded waits for the results."""
    if not names or not isinstance(runner, DockerRunner):
        reason = [CheckResult(component="image", check=n, outcome="skipped", reason=UNREADABLE) for n in names]
        yield lambda: reason
        return
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(lambda: [check_layers(runner.client, image.reference or "")])
        yield reading.result


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
