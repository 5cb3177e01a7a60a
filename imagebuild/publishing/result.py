"""What `imagebuild publish --json` writes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from imagebuild.fields import Model, Platform

State = Literal["published", "unchanged", "possible", "refused", "failed"]
"""`possible` is what `--dry-run` says of what would be published; `failed`: a registry did, or another publisher came
between."""


class Published(Model):
    """What became of a target."""

    target: str
    state: State
    reasons: tuple[str, ...] = ()
    """Why it was refused, or failed."""
    digest: str | None = None
    """Of the index."""
    platforms: dict[Platform, str] = Field(default_factory=dict)
    """Platform → digest of its image."""
    given: tuple[str, ...] = ()
    """Tags that are new."""
    kept: tuple[str, ...] = ()
    """Tags and aliases that named it already."""
    moved: dict[str, str] = Field(default_factory=dict)
    """Alias → digest that it named before."""
    attached: dict[str, int] = Field(default_factory=dict)
    """Kind of attachment → how many are new."""
    signed: int = 0
    """Images and indexes that were signed."""
    sent_bytes: int = 0
    """Of blobs and manifests that did not have to be mounted."""
    mounted: int = 0
    """Blobs that the registry took from the staging repository."""


class PublishResult(Model):
    """What was published, target by target."""

    targets: tuple[Published, ...]
    ignored: int = 0
    """JSON files in the folders that are no evidence."""
    unnamed: tuple[str, ...] = ()
    """Verifications that do not say of which digest they are, and so count for nothing."""
    requests: dict[str, int] = Field(default_factory=dict)
    """Method → how many requests, for all targets; `sent` and `received` are bytes of bodies."""

    @property
    def exit_status(self) -> int:
        """0 all is published, 1 something was refused, 4 a registry failed."""
        states = {target.state for target in self.targets}
        return 4 if "failed" in states else 1 if "refused" in states else 0
