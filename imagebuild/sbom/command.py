"""`imagebuild sbom`: find the image, let syft look, complete what it found."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from imagebuild.errors import ConfigError, ResultError
from imagebuild.fields import Platform
from imagebuild.locating.located import Located
from imagebuild.models import Plan
from imagebuild.render import Renderer
from imagebuild.sbom import parts, syft
from imagebuild.sbom.complete import About, complete

EPOCH = "SOURCE_DATE_EPOCH"


def of(
    image: Located, plan: Plan, renderer: Renderer | None, environ: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The SPDX document of an image, the same for the same image and lock.

    Raises ConfigError for an image without manifest, CommandError if syft is missing or fails, ResultError if it wrote
    something else.
    """
    subject = about(image, os.environ if environ is None else environ)
    with tempfile.TemporaryDirectory(prefix="imagebuild-") as name:
        folder = Path(name)
        found = syft.scan(image.as_layout(folder / "layout"), folder)
    known = parts.known(subject.labels, subject.platform, plan, renderer)
    try:
        return complete(found, subject, known)
    except (LookupError, TypeError, AttributeError, StopIteration) as error:
        raise ResultError(f"syft wrote a document that cannot be read: {type(error).__name__}: {error}") from None


def about(image: Located, environ: Mapping[str, str]) -> About:
    """What an image says about itself. Raises ConfigError for one without a manifest, whose digest nothing can name."""
    if not image.digest:
        raise ConfigError(f"{image.name}: an archive without manifest has no digest; push the image, or save it as OCI")
    history = image.config.get("history") or [{}]
    platform: Platform = "linux/arm64" if image.architecture == "arm64" else "linux/amd64"
    if image.platform != platform:
        raise ConfigError(f"{image.name}: is for {image.platform}; images are for linux/amd64 and linux/arm64")
    return About(
        image.digest, platform, _created(image, environ), image.labels, str(history[0].get("created_by", ""))
    )  # fmt: skip


def _created(image: Located, environ: Mapping[str, str]) -> str:
    """SOURCE_DATE_EPOCH, or when the image was made: either is the same next time."""
    try:
        if given := environ.get(EPOCH):
            time = datetime.fromtimestamp(int(given), UTC)
        else:
            time = datetime.fromisoformat(str(image.config.get("created") or "1970-01-01T00:00:00+00:00"))
    except (ValueError, OverflowError) as error:
        what = f"{EPOCH}={environ[EPOCH]}" if environ.get(EPOCH) else f"{image.name}: its creation time"
        raise ConfigError(f"{what}: is no time: {error}") from None
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
