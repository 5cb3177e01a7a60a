"""The types of `imagebuild.lock`: every source of every target, pinned by content."""

from __future__ import annotations

from datetime import date as Day  # noqa: N812 - the lock has a field `date`
from typing import Annotated, Literal

from pydantic import Field

from imagebuild.fields import Arch, Commit, Model, Name, Platform

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
Fingerprint = Annotated[str, Field(pattern=r"^[0-9A-F]{40}$")]
Unresolved = Literal["unresolved"]
UNRESOLVED: Unresolved = "unresolved"
"""Needed, but nobody could resolve it yet. It is rendered as it is, and stops a build."""


class Wheel(Model):
    """A wheel of the Python package index, pinned by content for each architecture."""

    name: str
    version: str
    sha256: dict[Arch, Sha256]


class LockedImage(Model):
    """An image of a registry, pinned."""

    digest: Digest
    """Of the index of all platforms, or of the manifest if there is only one."""
    platforms: dict[Platform, Digest] = Field(default_factory=dict)


class LockedRepository(Model):
    """A signed repository of packages, as it was when locked."""

    fingerprint: Fingerprint
    """Of the key that signed it."""
    packages: dict[str, str] = Field(default_factory=dict)
    """Package → exact version, of the packages that are used. A package that is asked for with its version
    (`name=version`) stands here as it is asked for: it was there, and another target may ask for another version."""


class Lock(Model):
    """The file `imagebuild.lock`: sources pinned by content."""

    archives: dict[str, Sha256 | Unresolved] = Field(default_factory=dict)
    """Address → sha256."""
    git: dict[str, dict[str, Commit | Unresolved]] = Field(default_factory=dict)
    """Address → tag → commit."""
    images: dict[str, LockedImage | Unresolved] = Field(default_factory=dict)
    """Image with tag → digests."""
    repositories: dict[str, LockedRepository | Unresolved] = Field(default_factory=dict)
    """Address of a repository of packages → key and versions."""
    wheels: dict[Name, dict[str, tuple[Wheel, ...] | Unresolved]] = Field(default_factory=dict)
    """Component → version → wheels."""
    date: Day | None = None
    """When it was first written, or what `lock --date` says: no file of an image is younger. It moves only when told
    to, because the layers of all images change with it."""
