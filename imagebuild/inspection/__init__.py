"""Check an image by reading it: no process of it is started, so the architecture does not matter."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from imagebuild.config import Project
from imagebuild.errors import ConfigError, ResultError
from imagebuild.inspection import layout
from imagebuild.inspection.context import Inspection
from imagebuild.inspection.judge import COMPONENT, judge
from imagebuild.inspection.scan import scan_all
from imagebuild.models import Plan
from imagebuild.plan import Pins
from imagebuild.records import CheckResult

__all__ = ["describe", "inspect"]


def inspect(
    source: Path | Iterable[bytes],
    project: Project | None = None,
    plan: Plan | None = None,
    *,
    versions: Pins | None = None,
    platform: str | None = None,
    workers: int | None = None,
) -> tuple[CheckResult, ...]:
    """What every rule says about an image, as results of the component `image`.

    `source` is a folder with an OCI layout, a tar of one, an archive of `docker save`, or the chunks that an engine
    saves. Without `project` and `plan`, rules about what the image should be are skipped; `versions` are the pins that
    the plan was made with, by default the matrix's. Of several platforms, `platform` chooses one; else all are checked,
    and results are named after theirs. Layers are read by `workers` processes, by default as many as there are CPUs.
    Raises ConfigError if the source is no image or lacks the platform, ResultError if it cannot be read.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="imagebuild-") as folder:
            found = layout.images(source, Path(folder))
            chosen = [image for image in found if platform in (None, image.platform)]
            if not chosen:
                has = ", ".join(image.platform for image in found)
                raise ConfigError(f"the image is not for {platform}, but for {has}")
            results: list[CheckResult] = []
            for image in chosen:
                began = time.monotonic()
                layers = scan_all(image.layers, workers)
                read = CheckResult(
                    component=COMPONENT, check="readable", outcome="passed", seconds=round(time.monotonic() - began, 3)
                )
                every = (read, *judge(Inspection(image, layers, project, plan, versions)))
                suffix = f" {image.platform}" if len(chosen) > 1 else ""
                results += [result.model_copy(update={"check": f"{result.check}{suffix}"}) for result in every]
            return tuple(results)
    except OSError as error:
        room = "TMPDIR may name a folder with more room"
        raise ResultError(f"the image cannot be unpacked to be read: {error.strerror or error}; {room}") from None


def describe(source: Path) -> tuple[layout.Image, ...]:
    """The images in a layout or archive, one a platform: digest, labels, settings. Raises as `inspect`."""
    with tempfile.TemporaryDirectory(prefix="imagebuild-") as folder:
        return layout.images(source, Path(folder))
