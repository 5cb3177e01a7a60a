"""What a registry can do for us, and what it answers with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from imagebuild.errors import CommandError


@dataclass(frozen=True)
class Descriptor:
    """What names a blob or a manifest of a registry."""

    media_type: str
    digest: str
    size: int
    platform: str | None = None
    """`linux/arm64`, of an image in an index."""
    artifact_type: str | None = None
    """Of something that refers to an image: what it is."""
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """A manifest or an index, byte for byte as the registry has it."""

    content: bytes
    media_type: str
    digest: str
    """Of the content; whoever read it compared."""

    @property
    def document(self) -> dict[str, Any]:
        """The content, read. Raises ValueError for what is not JSON."""
        return dict(json.loads(self.content))


@dataclass(frozen=True)
class File:
    """A file of something that refers to an image."""

    name: str
    media_type: str
    content: bytes


@dataclass(frozen=True)
class Streamed:
    """A blob that comes from elsewhere while it is uploaded."""

    size: int
    chunks: Callable[[], Iterator[bytes]]
    """Reads it from its start; called again for each attempt."""


@dataclass(frozen=True)
class Traffic:
    """What was moved to a registry."""

    manifests: int = 0
    blobs: int = 0
    """That were uploaded; those that were there, or mounted, do not count."""
    bytes: int = 0
    """Of those manifests and blobs."""
    mounted: int = 0
    """Blobs that the registry took from another repository."""

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.manifests + other.manifests,
            self.blobs + other.blobs,
            self.bytes + other.bytes,
            self.mounted + other.mounted,
        )


class MissingBlobs(CommandError):
    """A registry refused a manifest, since it does not have what that names."""


class DeletionDisabled(CommandError):
    """A registry lets nothing be deleted."""


class Registry(Protocol):
    """Repositories of one registry. `repository` is its name without the registry: `gpu/open`.

    Every method raises CommandError if the registry refuses, or fails more often than is patient.
    """

    @property
    def host(self) -> str:
        """Its name, with the port if it has one."""

    def manifest(self, repository: str, reference: str) -> Manifest | None:
        """A manifest by tag or digest; None if there is none."""

    def digest(self, repository: str, reference: str) -> str | None:
        """The digest of what a tag names now; None if there is none."""

    def put_manifest(self, repository: str, reference: str, content: bytes, media_type: str) -> str:
        """Store a manifest by tag or digest, read back what the registry says it has, and return its digest.

        Another digest than the content's means that somebody else moved the tag since. What is there already is not
        sent. Raises MissingBlobs if the registry lacks what the manifest names.
        """

    def tags(self, repository: str) -> tuple[str, ...]:
        """All tags of a repository; none if there is no such repository."""

    def has_blob(self, repository: str, digest: str) -> bool: ...

    def blob(self, repository: str, digest: str) -> bytes:
        """A small blob, compared with its digest."""

    def open_blob(self, repository: str, digest: str) -> Iterator[bytes]:
        """A blob of any size, piece by piece. Whoever takes it compares it with its digest, as `put_blob` does."""

    def put_blob(self, repository: str, content: bytes | Path | Streamed, digest: str) -> bool:
        """Upload a blob, unless the repository has it: whether anything was sent."""

    def mount_blob(self, repository: str, digest: str, source: str) -> bool:
        """Let a repository have a blob of another one, without sending it: whether the registry could."""

    def referrers(self, repository: str, digest: str, artifact_type: str | None = None) -> tuple[Descriptor, ...]:
        """What refers to a manifest, from the referrers API or, where there is none, the tag schema."""

    def attach(
        self,
        repository: str,
        subject: Descriptor,
        artifact_type: str,
        files: tuple[File, ...],
        annotations: Mapping[str, str],
    ) -> str:
        """Store files that refer to a manifest; returns the digest of their manifest. The same files and annotations
        again change nothing.
        """

    def delete(self, repository: str, digest: str) -> None:
        """Delete a manifest, with the tags that name it; one that is not there is deleted already.

        Raises DeletionDisabled where nothing may be deleted.
        """

    def stop(self) -> None:
        """Make what other threads are doing with it end with CommandError, for Ctrl-C."""
