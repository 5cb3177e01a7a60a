"""Manifests of a registry, one request at a time; whoever calls repeats it while it raises `Again`."""

from __future__ import annotations

from http import HTTPStatus

import requests

from imagebuild.registry import answers, documents
from imagebuild.registry.base import Manifest, MissingBlobs
from imagebuild.registry.wire import Again, Wire

ACCEPT = {"Accept": ", ".join(documents.MANIFEST_TYPES)}
UNKNOWN = frozenset({"MANIFEST_BLOB_UNKNOWN", "BLOB_UNKNOWN", "MANIFEST_UNKNOWN"})


def digest(wire: Wire, repository: str, reference: str) -> str | None:
    """The digest of what a tag or digest names; None if there is nothing. Raises Again, CommandError."""
    answer = wire.once("HEAD", f"{repository}/manifests/{reference}", answers.pull(repository), headers=ACCEPT)
    if answer.status_code == HTTPStatus.NOT_FOUND:
        return None
    answers.expect(answer, f"{wire.host}/{repository}: {reference}", HTTPStatus.OK)
    if told := answer.headers.get("Docker-Content-Digest"):
        return told
    found = read(wire, repository, reference)
    return found.digest if found else None


def read(wire: Wire, repository: str, reference: str) -> Manifest | None:
    """One question for a manifest. Raises Again, also if it is not what its digest says, and CommandError."""
    answer = wire.once("GET", f"{repository}/manifests/{reference}", answers.pull(repository), headers=ACCEPT)
    if answer.status_code == HTTPStatus.NOT_FOUND:
        return None
    answers.expect(answer, f"{wire.host}/{repository}: manifest {reference}", HTTPStatus.OK)
    digest = documents.digest_of(answer.content)
    told = reference if ":" in reference else answer.headers.get("Docker-Content-Digest", digest)
    if told != digest:
        raise Again(f"the registry sent a manifest of digest {digest} as {told}")
    media_type = answer.headers.get("Content-Type", "").partition(";")[0]
    return Manifest(answer.content, media_type, digest)


def store(wire: Wire, repository: str, reference: str, content: bytes, media_type: str) -> requests.Response:
    """Send a manifest once. Raises MissingBlobs, Again, CommandError."""
    answer = wire.once(
        "PUT", f"{repository}/manifests/{reference}", answers.push(repository), data=content,
        headers={"Content-Type": media_type},
    )  # fmt: skip
    where = f"{wire.host}/{repository}: manifest {reference}"
    if UNKNOWN & set(answers.codes(answer)):
        raise MissingBlobs(f"{where}: the registry lacks what it names: {answers.said(answer)}")
    answers.expect(answer, where, HTTPStatus.CREATED, HTTPStatus.ACCEPTED, HTTPStatus.OK)
    return answer
