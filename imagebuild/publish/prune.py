"""Delete what builds pushed long ago and nothing needs any more. No other module deletes anything in a registry."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import chain
from typing import Literal

from imagebuild.core.errors import CommandError
from imagebuild.core.run import for_each
from imagebuild.oci.layout import REFERRERS_TAG, manifests_of
from imagebuild.oci.registry import DeletionDisabled, Repository
from imagebuild.project.plan import staged_tag

JOBS = 16
"""Requests at a time: they are small, and a repository has thousands of tags."""


@dataclass(frozen=True)
class PruneVerdict:
    """Say whether an image or index in a staging repository is deleted."""

    digest: str
    pushed: datetime
    """Time of the last push."""
    verdict: Literal["delete", "too young", "needed"]
    parts: tuple[str, ...] = ()
    """Digests of the manifests below it that go with it."""


def judge_staged(staging: Repository, now: datetime, limit: timedelta) -> tuple[PruneVerdict, ...]:
    """Judge what was pushed to a staging repository, the oldest first.

    It goes if all of its pushes are older than the limit, no other tag there names it or a manifest below it, and
    nothing there refers to one of them. Manifests below it go with it unless something that stays has them, too.
    Published repositories are not looked at: what they have is a copy. Raises CommandError if the registry fails.
    """
    registry, tags = staging.registry, staging.tags()
    names = [tag for tag in tags if not REFERRERS_TAG.fullmatch(tag)]
    # By a tag `sha256-…`, registries and cosign list what refers to a manifest.
    needed = {f"sha256:{match[1]}" for tag in tags if (match := REFERRERS_TAG.fullmatch(tag))}
    read = for_each(staging.find, names, registry, jobs=JOBS)
    named = {tag: manifest for tag, manifest in zip(names, read, strict=True) if manifest}
    whole = {m.digest: (m.digest, *(child.digest for child in manifests_of(m.document))) for m in named.values()}
    pushes: dict[str, datetime] = {}
    for tag, manifest in named.items():
        digest = manifest.digest
        if pushed := _push_time(tag, digest):
            pushes[digest] = max(pushed, pushes.get(digest, pushed))
        else:
            needed.update(whole[digest])

    old = [digest for digest, pushed in pushes.items() if now - pushed >= limit]
    asked = [part for part in dict.fromkeys(chain(*(whole[digest] for digest in old))) if part not in needed]
    referrers = for_each(staging.referrers, asked, registry, jobs=JOBS)
    needed.update(digest for digest, listed in zip(asked, referrers, strict=True) if listed)
    goes = {digest for digest in old if needed.isdisjoint(whole[digest])}
    # A part of what stays may have been pushed alone, too.
    needed.update(chain(*(whole[digest] for digest in pushes.keys() - goes)))
    return tuple(
        PruneVerdict(
            digest, pushed, "too young" if digest not in old else "needed" if digest in needed else "delete",
            parts=tuple(part for part in whole[digest][1:] if part not in needed),
        )
        for digest, pushed in sorted(pushes.items(), key=lambda push: (push[1], push[0]))
    )  # fmt: skip


def delete_staged(staging: Repository, verdicts: Iterable[PruneVerdict]) -> int:
    """Delete what the verdicts say, and return the number of manifests.

    Raises DeletionDisabled if the registry does not allow deletion, CommandError if it fails.
    """
    deleted: set[str] = set()
    # An index goes before a part of it that was pushed alone, too.
    for verdict in sorted((v for v in verdicts if v.verdict == "delete"), key=lambda v: -len(v.parts)):
        refused = []
        for digest in verdict.parts:
            try:
                staging.delete(digest)
            except DeletionDisabled:
                raise
            except CommandError:
                # Some registries do not delete a part of an index that still exists.
                refused.append(digest)
        # Its own manifest is the last: until then its tag tells the next run what is left to do.
        for digest in (verdict.digest, *refused):
            staging.delete(digest)
        deleted |= {verdict.digest, *verdict.parts}
    return len(deleted)


def _push_time(tag: str, digest: str) -> datetime | None:
    """Return the time of the push that left this tag; None for another tag, or one that names another digest."""
    try:
        pushed = datetime.strptime(tag, f"staged-%Y%m%dT%H%M%SZ-{digest[7:19]}").replace(tzinfo=UTC)
    except ValueError:
        return None
    # strptime takes numbers with fewer digits, too.
    return pushed if staged_tag(digest, pushed) == tag else None
