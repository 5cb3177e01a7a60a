"""Run a command for every image that builds pushed, as their result files name it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from imagebuild import programs
from imagebuild.console import err
from imagebuild.errors import CommandError, NothingSelected, ResultError
from imagebuild.fields import Platform
from imagebuild.records import BuildResult

RESULT = "result.json"
Call = Callable[[Sequence[str]], int]


@dataclass(frozen=True)
class Pushed:
    """The image of a target for one platform, in its staging repository."""

    target: str
    platform: Platform
    image: str
    """Repository and digest of the manifest."""
    folder: Path
    """Where the build left its result."""

    @property
    def values(self) -> Mapping[str, str]:
        arch = self.platform.removeprefix("linux/")
        return {"target": self.target, "platform": self.platform, "arch": arch, "image": self.image,
                "folder": str(self.folder)}  # fmt: skip


def pushed(folder: Path, platforms: Sequence[str] = ()) -> Iterator[Pushed]:
    """All images that results below a folder name, in the order of their paths.

    Raises ResultError for a result that cannot be read.
    """
    for path in sorted(folder.rglob(RESULT)):
        try:
            result = BuildResult.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            raise ResultError(f"{path}: is no result of a build: {str(error).splitlines()[0]}") from None
        for platform, digest in result.manifests.items():
            if result.repository and (platform in platforms or not platforms):
                yield Pushed(result.target, platform, f"{result.repository}@{digest}", path.parent)


def filled(command: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """The command with `{image}` and the like filled in; other braces stay."""
    words = list(command)
    for name, value in values.items():
        words = [word.replace(f"{{{name}}}", value) for word in words]
    return words


def run(folder: Path, platforms: Sequence[str], command: Sequence[str], call: Call | None = None) -> int:
    """Run the command for every image; a failure does not stop the others. The worst exit status.

    Raises NothingSelected if there is no image, CommandError if the program cannot be started.
    """
    images = list(pushed(folder, platforms))
    if not images:
        for_ = f" for {', '.join(platforms)}" if platforms else ""
        raise NothingSelected(f"{folder}: no {RESULT} below it names a pushed image{for_}; `imagebuild build --push`")
    grouped = os.environ.get("GITHUB_ACTIONS") == "true"
    failed: dict[str, int] = {}
    for image in images:
        about = f"{image.target} {image.platform}"
        err.print(f"::group::{about}" if grouped else f"{about}: {image.image}", markup=False)
        if status := (call or _call)(filled(command, image.values)):
            failed[about] = status
        if grouped:
            err.print("::endgroup::", markup=False)
    for about, status in failed.items():
        err.print(f"{about}: exit status {status}", markup=False)
    err.print(f"{len(images) - len(failed)} of {len(images)} succeeded", markup=False)
    return max(failed.values(), default=0)


def _call(command: Sequence[str]) -> int:
    try:
        status = subprocess.run(command, env=programs.environment(), check=False).returncode
    except OSError as error:
        raise CommandError(f"`{command[0]}` cannot be run: {error.strerror}") from error
    return status if status >= 0 else 128 - status  # as a shell says that a signal ended it
