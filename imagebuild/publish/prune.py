"""Deletion of old images from a staging repository, which contains the images that are not published yet.
No other module deletes anything from a registry."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import chain
from typing import Literal

from imagebuild.core.console import err
from imagebuild.core.errors import CommandError, ResultError
from imagebuild.core.fields import DIGEST
from imagebuild.core.run import for_each
from imagebuild.oci.layout import INDEX_TYPES, REFERRERS_TAG, Manifest
from imagebuild.oci.reference import ImageReference
from imagebuild.oci.registry import DeletionDisabled, Repository
from imagebuild.project.plan import staged_tag
from imagebuild.publish.evidence import read_attached
from imagebuild.publish.signatures import Signer

JOBS = 16
"""Maximum number of parallel requests. The requests are small, and a repository can have thousands of tags."""


@dataclass(frozen=True)
class PruneVerdict:
    """The decision whether one image or index in a staging repository is deleted."""

    digest: str
    pushed: datetime
    """Time at which the image or index was last pushed."""
    verdict: Literal["delete", "too young", "needed"]
    parts: tuple[str, ...] = ()
    """Digests of the manifests that are deleted together with the index that lists them. Empty for an image."""


def judge_staged(
    staging: Repository, now: datetime, limit: timedelta, trust: Signer | None = None
) -> tuple[PruneVerdict, ...]:
    """Decide which images and indexes in a staging repository are deleted. Return the decisions, the oldest push first.

    An image is deleted if its last push is at least `limit` ago, all its tags were created by pushes to the staging
    repository, and no attachment refers to the image. For an index, the same conditions apply to the index and to every
    manifest in the index. A manifest in a deleted index is deleted, too, unless an index that is kept lists it.
    What is not a manifest or index is kept, and so are the images that it names; a message says so.
    If `trust` is set, only signatures and attachments of this signer keep an image. Published repositories are not
    read, because they contain copies of the images. Raises CommandError if the registry fails."""
    registry, tags = staging.registry, staging.tags()
    names = [tag for tag in tags if not REFERRERS_TAG.fullmatch(tag)]
    # A tag `sha256-DIGEST` lists the attachments of the manifest with this digest. Such tags come from cosign, and are
    # also used in registries without a referrers API.
    signed = {f"sha256:{match[1]}" for tag in tags if (match := REFERRERS_TAG.fullmatch(tag))}
    needed = set[str]() if trust else set(signed)
    read = for_each(lambda tag: staging.find(tag, checked=False), names, registry, jobs=JOBS)
    whole: dict[str, tuple[str, ...]] = {}
    pushes: dict[str, datetime] = {}
    for tag, manifest in zip(names, read, strict=True):
        if manifest is None:
            continue
        digest = manifest.digest
        try:
            whole[digest] = (digest, *_parts(staging, tag, manifest))
        except ResultError as error:
            err.print(f"{error}; until then, the images that it names are kept")
            whole[digest] = (digest, *re.findall(DIGEST, manifest.content.decode(errors="replace")))
            needed.update(whole[digest])
        if pushed := _push_time(tag, digest):
            pushes[digest] = max(pushed, pushes.get(digest, pushed))
        else:
            needed.update(whole[digest])

    old = [digest for digest, pushed in pushes.items() if now - pushed >= limit]
    asked = [part for part in dict.fromkeys(chain(*(whole[digest] for digest in old))) if part not in needed]

    def is_attached(digest: str) -> bool:
        try:
            has_signature = digest in signed or bool(staging.referrers(digest))
        except ResultError as error:
            err.print(f"{error}; until then, the image is kept")
            return True
        if not trust:
            return has_signature
        image = ImageReference(registry.host, staging.name, digest=digest)
        return has_signature and (
            not trust.image_problem(image) or any(one.value for one in read_attached(staging, digest, trust))
        )

    attached = for_each(is_attached, asked, registry, jobs=JOBS)
    needed.update(digest for digest, has in zip(asked, attached, strict=True) if has)
    goes = {digest for digest in old if needed.isdisjoint(whole[digest])}
    # An image that was also pushed separately is kept if an index that is kept lists the image.
    needed.update(chain(*(whole[digest] for digest in pushes.keys() - goes)))
    return tuple(
        PruneVerdict(
            digest, pushed, "too young" if digest not in old else "needed" if digest in needed else "delete",
            parts=tuple(part for part in whole[digest][1:] if part not in needed),
        )
        for digest, pushed in sorted(pushes.items(), key=lambda push: (push[1], push[0]))
    )  # fmt: skip


def _parts(staging: Repository, tag: str, manifest: Manifest) -> tuple[str, ...]:
    """Return the manifests in an index, and those in indexes that it lists.
    Raises ResultError if one of the indexes cannot be read."""
    parts, todo = list[str](), [manifest]
    while todo:
        children = [child for child in staging.listed(tag, todo.pop()) if child.digest not in parts]
        parts += [child.digest for child in children]
        inner = (staging.find(child.digest) for child in children if child.media_type in INDEX_TYPES)
        todo += filter(None, inner)
    return tuple(parts)


def delete_staged(staging: Repository, verdicts: Iterable[PruneVerdict]) -> int:
    """Delete the images and indexes whose verdict is `delete`. Return the number of deleted manifests.
    Raises DeletionDisabled if the registry does not allow deletion, CommandError if the registry fails."""
    deleted: set[str] = set()
    # Indexes are deleted before images, because an image in an index may also have been pushed separately.
    for verdict in sorted((v for v in verdicts if v.verdict == "delete"), key=lambda v: -len(v.parts)):
        refused = []
        for digest in verdict.parts:
            try:
                staging.delete(digest)
            except DeletionDisabled:
                raise
            except CommandError:
                # Some registries refuse to delete a manifest while an index that lists the manifest exists.
                refused.append(digest)
        # The tagged manifest is deleted after the manifests in it, so that an interrupted run can be repeated.
        for digest in (verdict.digest, *refused):
            staging.delete(digest)
        deleted |= {verdict.digest, *verdict.parts}
    return len(deleted)


def _push_time(tag: str, digest: str) -> datetime | None:
    """Return the time of the push that created a staging tag. None if no push of this digest created the tag."""
    try:
        pushed = datetime.strptime(tag, f"staged-%Y%m%dT%H%M%SZ-{digest[7:19]}").replace(tzinfo=UTC)
    except ValueError:
        return None
    # strptime also accepts numbers with fewer digits, which imagebuild never writes.
    return pushed if staged_tag(digest, pushed) == tag else None
