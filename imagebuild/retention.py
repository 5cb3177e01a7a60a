"""Which staged images nobody needs any more, and why the others stay. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from imagebuild.attachments import KINDS
from imagebuild.errors import ConfigError
from imagebuild.registry.documents import referrers_tag

STAGED = re.compile(r"staged-(\d{8}T\d{6}Z)-([0-9a-f]{12})")
"""The tag of a push: when that was, and the first digits of what was pushed."""
REFERRERS = re.compile(r"sha256-([0-9a-f]{64})")
"""The tag that lists what refers to a manifest, where the registry has no API for it."""
OWN = frozenset(kind.artifact_type for kind in KINDS.values())
"""What imagebuild attaches: it goes with the image."""
UNITS = {"h": timedelta(hours=1), "d": timedelta(days=1), "w": timedelta(weeks=1)}


@dataclass(frozen=True)
class Staged:
    """What one or more pushes left in a staging repository."""

    digest: str
    tags: tuple[str, ...]
    pushed: datetime
    """When it was pushed last."""
    parts: tuple[str, ...] = ()
    """Digests of the manifests that it names, if it is an index."""

    @property
    def all(self) -> tuple[str, ...]:
        return (self.digest, *self.parts)


@dataclass(frozen=True)
class Referrer:
    """What refers to a manifest."""

    digest: str
    artifact_type: str | None
    repository: str
    staging: bool
    """Whether it is in the staging repository."""


@dataclass(frozen=True)
class Survey:
    """What registries know about staged images."""

    staged: tuple[Staged, ...]
    held: Mapping[str, str] = field(default_factory=dict)
    """Digest → who names it: a tag that no push has left, or an index with one."""
    referrers: Mapping[str, tuple[Referrer, ...]] = field(default_factory=dict)
    """Digest → what refers to it, of staged images that are old enough and of their attachments."""


@dataclass(frozen=True)
class Verdict:
    """What becomes of a staged image."""

    staged: Staged
    kept: str | None
    """Why it stays; `None` if it can go."""
    parts: tuple[str, ...] = ()
    """Manifests of its platforms that go with it."""
    attachments: tuple[str, ...] = ()
    """Digests of attachments that go with it."""
    lists: tuple[str, ...] = ()
    """Tags that list those attachments."""


def staged_at(tag: str, digest: str) -> datetime | None:
    """When the push was that left this tag; None for a tag that says something else, or names something else."""
    found = STAGED.fullmatch(tag)
    if not found or not digest.startswith(f"sha256:{found[2]}"):
        return None
    try:
        return datetime.strptime(found[1], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        return None


def age(text: str) -> timedelta:
    """`14d`, `36h` or `2w`. Raises ConfigError."""
    found = re.fullmatch(r"(\d{1,6})([hdw])", text)
    if not found:
        raise ConfigError(f"--older-than {text}: write a number of hours, days or weeks: 36h, 14d, 2w")
    return int(found[1]) * UNITS[found[2]]


def told(span: timedelta) -> str:
    """`5 h`, `14 d`."""
    hours = int(span.total_seconds() // 3600)
    return f"{hours} h" if hours < 48 else f"{hours // 24} d"


def is_young(staged: Staged, now: datetime, limit: timedelta) -> bool:
    return now - staged.pushed < limit


def decide(survey: Survey, now: datetime, limit: timedelta, only: frozenset[str] | None = None) -> tuple[Verdict, ...]:
    """What becomes of each staged image, or of those with these digests: then the others count as ones that stay."""
    asked = {s.digest for s in survey.staged if only is None or s.digest in only}
    kept = {s.digest: _reason(s, survey, now, limit) if s.digest in asked else "stays" for s in survey.staged}
    while more := _parts_of_kept(survey.staged, kept):
        kept |= more
    needed = {digest for staged in survey.staged if kept[staged.digest] for digest in staged.all}
    return tuple(
        Verdict(staged, kept[staged.digest]) if kept[staged.digest] else _removal(staged, survey, needed)
        for staged in sorted(survey.staged, key=lambda s: (s.pushed, s.digest))
        if staged.digest in asked
    )


def _reason(staged: Staged, survey: Survey, now: datetime, limit: timedelta) -> str | None:
    if is_young(staged, now, limit):
        return f"pushed {told(now - staged.pushed)} ago, younger than {told(limit)}"
    for digest in staged.all:
        which = "" if digest == staged.digest else f"its part {short(digest)} "
        if digest in survey.held:
            return f"{which}{survey.held[digest]}"
        for referrer in survey.referrers.get(digest, ()):
            what = f"{referrer.artifact_type or 'something'} in {referrer.repository} ({short(referrer.digest)})"
            if not referrer.staging or referrer.artifact_type not in OWN:
                return f"{which}is referred to by {what}"
            if referrer.digest in survey.held:
                return f"{which}is referred to by {what}, which {survey.held[referrer.digest]}"
            if survey.referrers.get(referrer.digest):
                return f"{which}is referred to by {what}, which something else refers to"
    return None


def _parts_of_kept(all_staged: Iterable[Staged], kept: Mapping[str, str | None]) -> dict[str, str | None]:
    """Images that could go, but are parts of one that stays."""
    whole = {part: s.digest for s in all_staged if kept[s.digest] for part in s.parts}
    return {d: f"is part of {short(whole[d])}, which stays" for d, why in kept.items() if not why and d in whole}


def _removal(staged: Staged, survey: Survey, needed: set[str]) -> Verdict:
    gone = [digest for digest in staged.all if digest not in needed]
    attachments = {digest: tuple(r.digest for r in survey.referrers.get(digest, ())) for digest in gone}
    return Verdict(
        staged,
        kept=None,
        parts=tuple(digest for digest in gone if digest != staged.digest),
        attachments=tuple(dict.fromkeys(a for found in attachments.values() for a in found)),
        lists=tuple(referrers_tag(digest) for digest, found in attachments.items() if found),
    )


def short(digest: str) -> str:
    """Enough of a digest for people."""
    return digest[: len("sha256:") + 12]
