"""An image of one repository becomes one of another, with the same digest. Blobs that need not move do not."""

from __future__ import annotations

from dataclasses import dataclass

from imagebuild.errors import CommandError
from imagebuild.registry import documents
from imagebuild.registry.base import Descriptor, Manifest, MissingBlobs, Registry, Streamed, Traffic
from imagebuild.registry.parallel import each

ATTEMPTS = 3
"""Times that blobs are copied again because the registry refuses a manifest for lack of one."""


@dataclass(frozen=True)
class Place:
    """A repository of a registry."""

    registry: Registry
    repository: str

    def __str__(self) -> str:
        return f"{self.registry.host}/{self.repository}"


def copy(digest: str, source: Place, target: Place) -> Traffic:
    """Make a manifest, or an index with all that it names, available elsewhere by the same digest.

    What is there is left alone; blobs are mounted where that can be, else they stream through this machine. Raises
    CommandError if the source does not have it, or a registry fails.
    """
    if target.registry.digest(target.repository, digest) is not None:
        return Traffic()
    found = source.registry.manifest(source.repository, digest)
    if found is None:
        raise CommandError(f"{source}@{digest}: is not there; build and verify it first, or say which registry has it")
    moved = Traffic()
    for child in documents.children(found.document):
        moved += copy(child.digest, source, target)
    return moved + _copy_one(found, source, target)


def _copy_one(found: Manifest, source: Place, target: Place) -> Traffic:
    same = source.registry.host == target.registry.host
    may_mount = same and source.repository != target.repository

    def move(blob: Descriptor) -> Traffic:
        if target.registry.has_blob(target.repository, blob.digest):
            return Traffic()
        if may_mount and target.registry.mount_blob(target.repository, blob.digest, source.repository):
            return Traffic(mounted=1)
        stream = Streamed(blob.size, lambda: source.registry.open_blob(source.repository, blob.digest))
        sent = target.registry.put_blob(target.repository, stream, blob.digest)
        return Traffic(blobs=1, bytes=blob.size) if sent else Traffic()

    moved = Traffic()
    for attempt in range(ATTEMPTS):
        moved += sum(each(move, documents.blobs(found.document), source.registry, target.registry), Traffic())
        try:
            target.registry.put_manifest(target.repository, found.digest, found.content, found.media_type)
        except MissingBlobs:
            if attempt == ATTEMPTS - 1:
                raise
            may_mount = False  # a mount that left nothing behind would do so again
        else:
            break
    return moved + Traffic(manifests=1, bytes=len(found.content))
