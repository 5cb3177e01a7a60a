"""An image of an OCI layout becomes one of a registry, by its digest: blobs first, then manifests, the index last."""

from __future__ import annotations

from pathlib import Path

from imagebuild import oci
from imagebuild.errors import ResultError
from imagebuild.registry import documents
from imagebuild.registry.base import Descriptor, Manifest, MissingBlobs, Registry, Traffic
from imagebuild.registry.parallel import each

ATTEMPTS = 3
"""Times that blobs are sent again because the registry refuses a manifest for lack of one."""


def push(layout: Path, digest: str, registry: Registry, repository: str, tag: str | None = None) -> Traffic:
    """Push a manifest, or an index with all that it names; what is there already is not sent.

    A tag is given last. Raises ResultError if the layout does not have it all, CommandError if the registry fails.
    """
    found = _read(layout, digest)
    moved = Traffic()
    for child in documents.children(found.document):
        moved += push(layout, child.digest, registry, repository)
    if registry.digest(repository, digest) is None:
        moved += _push_one(layout, found, registry, repository)
    if tag and registry.digest(repository, tag) != digest:
        registry.put_manifest(repository, tag, found.content, found.media_type)
        moved += Traffic(manifests=1, bytes=len(found.content))
    return moved


def _push_one(layout: Path, found: Manifest, registry: Registry, repository: str) -> Traffic:
    def upload(blob: Descriptor) -> Traffic:
        path = oci.blob_path(layout, blob.digest)
        if not path.is_file() or path.stat().st_size != blob.size:
            raise ResultError(f"{layout}: does not have all of blob {blob.digest}; build it again")
        sent = registry.put_blob(repository, path, blob.digest)
        return Traffic(blobs=1, bytes=blob.size) if sent else Traffic()

    moved = Traffic()
    for attempt in range(ATTEMPTS):
        moved += sum(each(upload, documents.blobs(found.document), registry), Traffic())
        try:
            registry.put_manifest(repository, found.digest, found.content, found.media_type)
        except MissingBlobs:
            if attempt == ATTEMPTS - 1:
                raise
        else:
            break
    return moved + Traffic(manifests=1, bytes=len(found.content))


def _read(layout: Path, digest: str) -> Manifest:
    try:
        content = oci.blob_path(layout, digest).read_bytes()
    except OSError as error:
        raise ResultError(f"{layout}: has no manifest {digest}: {error.strerror}") from None
    if documents.digest_of(content) != digest:
        raise ResultError(f"{layout}: manifest {digest} was changed; build it again")
    try:
        document = Manifest(content, "", digest).document
    except ValueError as error:
        raise ResultError(f"{layout}: {digest} is no manifest: {error}") from None
    return Manifest(content, documents.media_type(document), digest)
