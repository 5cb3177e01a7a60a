"""The types of what a build and a verification leave behind."""

from __future__ import annotations

from typing import Literal

from imagebuild.models import Model, Platform


class Step(Model):
    """A step that BuildKit executed or took from its cache."""

    name: str
    target: str
    stage: str
    component: str | None
    cached: bool
    seconds: float
    error: str | None = None


class BuildResult(Model):
    """The file `result.json` of a target."""

    target: str
    digest: str | None
    """Digest of what was built: an index or a manifest."""
    tags: tuple[str, ...]
    platforms: tuple[Platform, ...]
    size_bytes: int | None
    """Size of the compressed layers of one platform, where the result is in the engine's image store."""
    seconds: float
    steps: tuple[Step, ...]


Outcome = Literal["passed", "failed", "skipped"]


class CheckResult(Model):
    """What a check said about an image."""

    component: str
    check: str
    outcome: Outcome
    reason: str = ""
    """Why it was skipped or failed."""
    output: str = ""
    seconds: float = 0.0


class VerifyResult(Model):
    """What `imagebuild verify --json` writes."""

    image: str
    digest: str | None
    target: str | None
    platform: str
    checks: tuple[CheckResult, ...]
