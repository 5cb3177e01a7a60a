"""Pushing an OCI layout to its staging repository, by digest.

Nobody pulls by the one tag that a push gets. It says when that was and what was pushed, so that `prune` finds old
digests: registries list nothing that has no tag.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from imagebuild import oci
from imagebuild.config import Project
from imagebuild.errors import ResultError
from imagebuild.models import Target
from imagebuild.registry import documents
from imagebuild.registry.base import Manifest, Registry

DIGITS = 12


def repository_of(project: Project, target: Target) -> str:
    """Registry and repository that a target is pushed to before it is verified."""
    matrix = project.matrix.model
    return matrix.publish.staging.format(repository=matrix.repository, image=target.image)


def staged_tag(digest: str, now: datetime) -> str:
    """`staged-20261121T104500Z-0123456789ab`."""
    return f"staged-{now.astimezone(UTC):%Y%m%dT%H%M%SZ}-{digest.removeprefix('sha256:')[:DIGITS]}"


def push(
    registry: Registry, repository: str, layout: Path, digest: str, *, now: datetime, note: Callable[[str], None]
) -> str:
    """Push what the layout has under the digest, what it names first; returns the tag that it got.

    Blobs that the repository has are not sent again: a push that was interrupted goes on where it was. Raises
    CommandError as the registry does, ResultError if the layout is damaged.
    """
    _push(registry, repository, layout, digest, note)
    tag = staged_tag(digest, now)
    root = _manifest(layout, digest)
    registry.put_manifest(repository, tag, root.content, root.media_type)
    return tag


def _push(registry: Registry, repository: str, layout: Path, digest: str, note: Callable[[str], None]) -> None:
    manifest = _manifest(layout, digest)
    for child in documents.children(manifest.document):
        _push(registry, repository, layout, child.digest, note)
    for blob in documents.blobs(manifest.document):
        if registry.put_blob(repository, oci.blob_path(layout, blob.digest), blob.digest):
            note(f"pushed {blob.digest[:19]}, {blob.size / 1e6:.1f} MB, to {registry.host}/{repository}")
    registry.put_manifest(repository, digest, manifest.content, manifest.media_type)


def _manifest(layout: Path, digest: str) -> Manifest:
    path = oci.blob_path(layout, digest)
    try:
        content = path.read_bytes()
        document = dict(json.loads(content))
    except (OSError, ValueError) as error:
        raise ResultError(f"{path}: cannot be read: {error}") from None
    if documents.digest_of(content) != digest:
        raise ResultError(f"{path}: is damaged: its digest is {documents.digest_of(content)}")
    kind = documents.INDEX if "manifests" in document else documents.MANIFEST
    return Manifest(content, document.get("mediaType", kind), digest)
