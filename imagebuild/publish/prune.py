"""Delete what builds pushed long ago and nothing needs any more. No other module deletes anything in a registry."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from imagebuild.core.errors import CommandError
from imagebuild.core.run import for_each
from imagebuild.oci.layout import REFERRERS_TAG, manifests_of
from imagebuild.oci.registry import DeletionDisabled, Repository

STAGED = re.compile(r"staged-(\d{8}T\d{6}Z)-([0-9a-f]{12})")
"""The tag that a push leaves: its time, and the first digits of the digest that it pushed."""
JOBS = 16
"""Requests at a time: they are small, and a repository has thousands of tags."""


@dataclass(frozen=True)
class PruneVerdict:
    """Say whether an image or index in a staging repository is deleted."""

    digest: str
    pushed: datetime
    """Time of the last push."""
    kept: str
    """Why it is kept; empty if it goes."""
    parts: tuple[str, ...] = ()
    """Digests of the manifests below it that go with it."""


def judge_staged(staging: Repository, now: datetime, limit: timedelta) -> tuple[PruneVerdict, ...]:
    """Judge what was pushed to a staging repository, the oldest first.

    It goes if all of its pushes are older than the limit, no other tag there names it or a manifest below it, and
    nothing there refers to one of them. Manifests below it go with it unless something that stays has them, too.
    Published repositories are not looked at: what they have is a copy. Raises CommandError if the registry fails.
    """
    registry, tags = staging.registry, staging.tags()
    # By a tag `sha256-…`, registries and cosign list what refers to a manifest.
    kept = {f"sha256:{match[1]}": f"has {match[0]}" for tag in tags if (match := REFERRERS_TAG.fullmatch(tag))}
    names = [tag for tag in tags if not REFERRERS_TAG.fullmatch(tag)]
    read = for_each(staging.find, names, registry, jobs=JOBS)
    named = {tag: manifest for tag, manifest in zip(names, read, strict=True) if manifest}
    below = {m.digest: tuple(child.digest for child in manifests_of(m.document)) for m in named.values()}
    pushes: dict[str, datetime] = {}
    for tag, manifest in named.items():
        digest = manifest.digest
        if pushed := _push_time(tag, digest):
            pushes[digest] = max(pushed, pushes.get(digest, pushed))
            continue
        kept |= dict.fromkeys(below[digest], f"is part of {tag}") | {digest: f"is tagged {tag}"}

    old = [digest for digest, pushed in pushes.items() if now - pushed >= limit]
    asked = list(dict.fromkeys(part for digest in old for part in (digest, *below[digest]) if part not in kept))
    referrers = for_each(staging.referrers, asked, registry, jobs=JOBS)
    kept |= {digest: "has attachments" for digest, listed in zip(asked, referrers, strict=True) if listed}

    def reason(digest: str) -> str:
        if digest not in old:
            return "too young"
        why = {part: f"its part {short_digest(part)} {kept[part]}" for part in below[digest] if part in kept}
        return kept.get(digest) or next(iter(why.values()), "")

    reasons = {digest: reason(digest) for digest in pushes}
    needed = {part for digest, why in reasons.items() if why for part in (digest, *below[digest])} | kept.keys()
    return tuple(
        PruneVerdict(
            digest, pushed, kept=reasons[digest] or ("is part of what stays" if digest in needed else ""),
            parts=tuple(part for part in below[digest] if part not in needed),
        )
        for digest, pushed in sorted(pushes.items(), key=lambda push: (push[1], push[0]))
    )  # fmt: skip


def delete_staged(staging: Repository, verdicts: Iterable[PruneVerdict]) -> int:
    """Delete what the verdicts do not keep, and return the number of manifests.

    Raises DeletionDisabled if the registry does not allow deletion, CommandError if it fails.
    """
    deleted: set[str] = set()
    # An index goes before a part of it that was pushed alone, too.
    for verdict in sorted((v for v in verdicts if not v.kept), key=lambda v: -len(v.parts)):
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


def short_digest(digest: str) -> str:
    """Return the beginning of a digest that is enough for people: `sha256:` and 12 digits."""
    return digest[: len("sha256:") + 12]


def _push_time(tag: str, digest: str) -> datetime | None:
    """Return the time of the push that left this tag; None for another tag, or one that names another digest."""
    match = STAGED.fullmatch(tag)
    if not match or not digest.startswith(f"sha256:{match[2]}"):
        return None
    try:
        return datetime.strptime(match[1], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        return None
