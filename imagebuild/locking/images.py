"""Digests of images, asked from registries by `docker buildx imagetools`, which needs no engine."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from typing import Any, get_args

from imagebuild.errors import Absent, CommandError, ResultError, Unreachable
from imagebuild.fields import Platform
from imagebuild.lockfile import LockedImage

TIMEOUT_S = 60
INDEXES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")

Read = Callable[..., bytes]
"""Runs a program, returns the bytes that it printed, raises CommandError if it fails."""


def resolve(read: Read, reference: str) -> LockedImage:
    """The digests behind a tag.

    Raises Absent or Unreachable if the registry does not have it or does not answer, ResultError for what is no
    manifest.
    """
    content = _manifest(read, reference)
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    try:
        data: dict[str, Any] = json.loads(content)
        if data.get("mediaType") not in INDEXES and "manifests" not in data:
            return LockedImage(digest=digest)
        return LockedImage(digest=digest, platforms=dict(filter(None, map(_platform, data["manifests"]))))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ResultError(f"{reference}: the registry's answer is no manifest: {error!r}") from None


def exists(read: Read, reference: str, digest: str) -> bool:
    """Does the registry still have what was pinned? Raises Unreachable."""
    repository = reference if ":" not in reference.rpartition("/")[2] else reference.rpartition(":")[0]
    try:
        _manifest(read, f"{repository}@{digest}")
    except Absent:
        return False
    return True


def _platform(entry: dict[str, Any]) -> tuple[Platform, str] | None:
    """Platform and digest of one manifest of an index; attestations have the platform unknown/unknown."""
    found = f"{entry['platform']['os']}/{entry['platform']['architecture']}"
    return next(((platform, entry["digest"]) for platform in get_args(Platform) if platform == found), None)


def _manifest(read: Read, reference: str) -> bytes:
    try:
        return read("docker", "buildx", "imagetools", "inspect", "--raw", reference, timeout=TIMEOUT_S)
    except CommandError as error:
        why = str(error).splitlines()[-1].rpartition("ERROR: ")[2]
        why = re.sub(r'^failed to do request: \w+ "[^"]*": ', "", why)
        if why.endswith("not found"):
            raise Absent(f"{reference}: the registry does not have it") from None
        raise Unreachable(f"{reference}: {why}") from None
