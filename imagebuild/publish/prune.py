"""Find staged images that nobody needs, and delete them. No other module deletes anything in a registry."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from imagebuild.core.errors import CommandError, ConfigError
from imagebuild.core.run import for_each
from imagebuild.oci.attestation import STATEMENT_MEDIA
from imagebuild.oci.layout import INDEX_TYPES, REFERRERS_TAG, Descriptor, Manifest, manifests_of, referrers_tag
from imagebuild.oci.reference import parse_reference
from imagebuild.oci.registry import DeletionDisabled, Registry, Repository
from imagebuild.project.matrix import Plan
from imagebuild.project.plan import Project, repository_name

STAGED = re.compile(r"staged-(\d{8}T\d{6}Z)-([0-9a-f]{12})")
"""The tag that a push leaves: its time, and the first digits of the digest that it pushed."""
OWN_TYPES = frozenset({STATEMENT_MEDIA})
"""Types of attachments that are deleted with the image; what somebody signed keeps it."""
UNITS = {"h": timedelta(hours=1), "d": timedelta(days=1), "w": timedelta(weeks=1)}

R = TypeVar("R")


@dataclass(frozen=True)
class Staged:
    """Describe an image or index in a staging repository that was pushed at least once."""

    digest: str
    tags: tuple[str, ...]
    """Tags that pushes left."""
    pushed: datetime
    """Time of the last push."""
    parts: tuple[str, ...] = ()
    """Digests of the manifests below it, if it is an index."""

    @property
    def all(self) -> tuple[str, ...]:
        """Return its digest and those of its parts."""
        return (self.digest, *self.parts)


@dataclass(frozen=True)
class Survey:
    """Hold what registries know about staged images."""

    staging: Repository
    staged: tuple[Staged, ...]
    held: Mapping[str, str] = field(default_factory=dict)
    """Digest → what keeps it: a tag that no push left, or an index with such a tag."""
    referrers: Mapping[str, tuple[tuple[Repository, Descriptor], ...]] = field(default_factory=dict)
    """Digest → what refers to it and where, for staged images that are old enough and for their attachments."""


@dataclass(frozen=True)
class PruneVerdict:
    """Say whether a staged image is deleted, and what is deleted with it."""

    staged: Staged
    kept: str | None
    """Why it is kept; None if it can be deleted."""
    parts: tuple[str, ...] = ()
    """Digests of the manifests of its platforms that are deleted with it."""
    attachments: tuple[str, ...] = ()
    """Digests of the attachments that are deleted with it."""
    lists: tuple[str, ...] = ()
    """Tags that list those attachments."""


# Decide


def parse_age(text: str) -> timedelta:
    """Parse `14d`, `36h` or `2w`. Raises ConfigError for anything else."""
    match = re.fullmatch(r"(\d{1,6})([hdw])", text)
    if not match:
        raise ConfigError(f"--older-than {text}: not an age; write a number of hours, days or weeks: 36h, 14d, 2w")
    return int(match[1]) * UNITS[match[2]]


def decide_pruning(
    survey: Survey, now: datetime, limit: timedelta, only: frozenset[str] | None = None
) -> tuple[PruneVerdict, ...]:
    """Decide for every staged image, the oldest first, whether it can be deleted.

    With `only`, decide for those with these digests; all others are taken to be kept.
    """
    asked = {s.digest for s in survey.staged if only is None or s.digest in only}
    kept = {s.digest: _reason(s, survey, now, limit) if s.digest in asked else "stays" for s in survey.staged}
    # An index that is kept keeps its parts, which may be indexes again.
    while True:
        whole = {part: s.digest for s in survey.staged if kept[s.digest] for part in s.parts}
        more = [digest for digest, reason in kept.items() if not reason and digest in whole]
        if not more:
            break
        kept |= {digest: f"is part of {short_digest(whole[digest])}, which stays" for digest in more}

    needed = {digest for staged in survey.staged if kept[staged.digest] for digest in staged.all}
    verdicts = []
    for staged in sorted(survey.staged, key=lambda s: (s.pushed, s.digest)):
        if staged.digest not in asked:
            continue
        unneeded = [] if kept[staged.digest] else [digest for digest in staged.all if digest not in needed]
        referrers = {digest: survey.referrers[digest] for digest in unneeded if digest in survey.referrers}
        verdicts.append(
            PruneVerdict(
                staged,
                kept=kept[staged.digest],
                parts=tuple(digest for digest in unneeded if digest != staged.digest),
                attachments=tuple(dict.fromkeys(own.digest for listed in referrers.values() for _, own in listed)),
                lists=tuple(map(referrers_tag, referrers)),
            )
        )
    return tuple(verdicts)


def _reason(staged: Staged, survey: Survey, now: datetime, limit: timedelta) -> str | None:
    """Return why a staged image is kept for its own sake, None if nothing is known that keeps it."""
    if now - staged.pushed < limit:
        return f"pushed {_format_age(now - staged.pushed)} ago, younger than {_format_age(limit)}"
    for digest in staged.all:
        part = "" if digest == staged.digest else f"its part {short_digest(digest)} "
        if digest in survey.held:
            return f"{part}{survey.held[digest]}"
        for place, own in survey.referrers.get(digest, ()):
            text = f"{part}is referred to by {own.artifact_type or 'something'} in {place} ({short_digest(own.digest)})"
            if place != survey.staging or own.artifact_type not in OWN_TYPES:
                return text
            if own.digest in survey.held:
                return f"{text}, which {survey.held[own.digest]}"
            if survey.referrers.get(own.digest):
                return f"{text}, which something else refers to"
    return None


def _format_age(age: timedelta) -> str:
    """Return `5 h` or `14 d`."""
    hours = int(age.total_seconds() // 3600)
    return f"{hours} h" if hours < 48 else f"{hours // 24} d"


def short_digest(digest: str) -> str:
    """Return the beginning of a digest that is enough for people: `sha256:` and 12 digits."""
    return digest[: len("sha256:") + 12]


# Survey and delete


JOBS = 16
"""Requests at a time: they are small, and a repository has thousands of tags."""
BATCH = 16
"""Images that are deleted after each new survey."""


def repositories_of(
    project: Project, plan: Plan, image: str, connect: Callable[[str], Registry]
) -> tuple[Repository, tuple[Repository, ...]]:
    """Return the staging repository of an image, and the repositories that its tags are in."""

    def repository_at(name: str) -> Repository:
        reference = parse_reference(name)
        return connect(reference.host).at(reference.repository)

    names = [f"{project.matrix.model.repository}/{image}"]
    for target in plan.targets:
        if target.image == image:
            names += [tag.rpartition(":")[0] for tag in (*target.tags, *target.aliases)]
    return repository_at(repository_name(project, image)), tuple(map(repository_at, dict.fromkeys(names)))


@dataclass
class Pruning:
    """Survey and prune the staging repository of one image."""

    staging: Repository
    published: tuple[Repository, ...]
    """Repositories in which the image is published."""
    limit: timedelta
    """Age that a staged image must have to be deleted."""
    now: datetime
    _manifests: dict[tuple[Repository, str], Manifest] = field(default_factory=dict)
    """(Repository, digest) → manifest; a digest never names anything else, so it is read once."""
    _pushes: dict[str, str] = field(default_factory=dict)
    """Tag that a push left → digest; nobody moves these tags, so each is read once."""

    def survey(self, only: frozenset[str] | None = None) -> Survey:
        """Ask the registries about the staged images, or about those with these digests.

        Raises CommandError if a registry fails.
        """
        names = self._names(self.staging)
        pushes: dict[str, dict[str, datetime]] = {}
        for tag, digest in names.items():
            if time := _push_time(tag, digest):
                self._pushes[tag] = digest
                pushes.setdefault(digest, {})[tag] = time
        parts = self._parts_of(self.staging, pushes)
        staged = tuple(Staged(d, tuple(times), max(times.values()), parts[d]) for d, times in pushes.items())
        held = self._held_by(self.staging, {tag: d for tag, d in names.items() if tag not in self._pushes})

        old = [s for s in staged if (only is None or s.digest in only) and self.now - s.pushed >= self.limit]
        digests = list(dict.fromkeys(digest for s in old for digest in s.all))
        copies = {place: set(self._each(place, digests, place.digest)) - {None} for place in self.published}
        for place in (place for place, there in copies.items() if there):
            held |= self._held_by(place, self._names(place))

        # Only images that nothing else keeps need their referrers looked up.
        asked = [digest for digest in digests if any(digest in s.all and held.keys().isdisjoint(s.all) for s in old)]
        referrers = self._referrers(self.staging, asked)
        referrers |= self._referrers(self.staging, [own.digest for listed in referrers.values() for _, own in listed])
        for place, there in copies.items():
            for digest, listed in self._referrers(place, [d for d in asked if d in there]).items():
                referrers[digest] = (*referrers.get(digest, ()), *listed)
        return Survey(self.staging, staged, held, referrers)

    def delete(self, verdicts: Iterable[PruneVerdict]) -> tuple[int, tuple[PruneVerdict, ...]]:
        """Delete what the verdicts allow, after another survey.

        Return the number of deleted manifests, and the verdicts on images that are kept after all. Raises
        DeletionDisabled if the registry does not allow deletion, CommandError if it fails.
        """
        # An index is deleted before its parts, which are staged images, too.
        todo = sorted((v for v in verdicts if not v.kept), key=lambda v: -len(v.staged.parts))
        deleted: set[str] = set()
        spared: list[PruneVerdict] = []
        for start in range(0, len(todo), BATCH):
            batch = frozenset(v.staged.digest for v in todo[start : start + BATCH])
            fresh = decide_pruning(self.survey(batch), self.now, self.limit, batch)
            spared += [verdict for verdict in fresh if verdict.kept]
            deleted.update(*for_each(self._delete, (v for v in fresh if not v.kept), self.staging.registry))
        return len(deleted), tuple(spared)

    def _delete(self, verdict: PruneVerdict) -> set[str]:
        """Delete one image, last of all its own manifest: until then its tag tells the next run what is left to do."""
        lists = filter(None, map(self.staging.digest, verdict.lists))
        first = list(dict.fromkeys((*verdict.attachments, *lists, *verdict.parts)))
        refused = []
        for digest in first:
            try:
                self.staging.delete(digest)
            except DeletionDisabled:
                raise
            except CommandError:
                refused.append(digest)
        self.staging.delete(verdict.staged.digest)
        # Some registries do not delete a part of an index that still exists.
        for digest in refused:
            self.staging.delete(digest)
        return {*first, verdict.staged.digest}

    def _names(self, place: Repository) -> dict[str, str]:
        """Return tag → digest of the tags that name images; tags of pushes count only in the staging repository."""
        staged = place == self.staging
        # A tag `sha256-…` lists what refers to a manifest; one with a suffix is a signature.
        every = dict.fromkeys(place.tags())
        tags = [tag for tag in every if "." in tag or not REFERRERS_TAG.fullmatch(tag)]
        known = {tag: self._pushes[tag] for tag in tags if staged and tag in self._pushes}
        unread = [tag for tag in tags if tag not in known and (staged or not STAGED.fullmatch(tag))]
        read = zip(unread, self._each(place, unread, place.find), strict=True)
        manifests = {tag: manifest for tag, manifest in read if manifest}
        self._manifests |= {(place, manifest.digest): manifest for manifest in manifests.values()}
        return known | {tag: manifest.digest for tag, manifest in manifests.items()}

    def _held_by(self, place: Repository, tags: Mapping[str, str]) -> dict[str, str]:
        """Return digest → why it is kept, for the digests that these tags name and for their parts."""
        parts = self._parts_of(place, tags.values())
        held = {part: f"is part of {place}:{tag}" for tag, digest in tags.items() for part in parts[digest]}
        for tag, digest in tags.items():
            held[digest] = f"is tagged {tag} in {place}"
            if match := REFERRERS_TAG.fullmatch(tag):
                held[f"sha256:{match[1]}"] = f"has {tag} in {place}"
        return held

    def _parts_of(self, place: Repository, digests: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Return digest → digests of the manifests below it, those in indexes below it included."""
        distinct = list(dict.fromkeys(digests))
        parts = for_each(lambda digest: self._parts(place, digest), distinct, place.registry, jobs=JOBS)
        return dict(zip(distinct, parts, strict=True))

    def _parts(self, place: Repository, digest: str) -> tuple[str, ...]:
        manifest = self._manifests.get((place, digest)) or place.find(digest)
        if manifest is None:
            return ()
        self._manifests[place, digest] = manifest
        children = manifests_of(manifest.document)
        deeper = [d for child in children if child.media_type in INDEX_TYPES for d in self._parts(place, child.digest)]
        return tuple(dict.fromkeys((*(child.digest for child in children), *deeper)))

    def _referrers(
        self, place: Repository, digests: Iterable[str]
    ) -> dict[str, tuple[tuple[Repository, Descriptor], ...]]:
        """Return digest → what refers to it in a repository, for the digests that anything refers to."""
        distinct = list(dict.fromkeys(digests))
        answers = zip(distinct, self._each(place, distinct, place.referrers), strict=True)
        return {digest: tuple((place, own) for own in listed) for digest, listed in answers if listed}

    def _each(self, place: Repository, names: Iterable[str], request: Callable[[str], R]) -> list[R]:
        """Make a request about each tag or digest of a repository, several at a time."""
        return for_each(request, names, place.registry, jobs=JOBS)


def _push_time(tag: str, digest: str) -> datetime | None:
    """Return the time of the push that left this tag; None for another tag, or one that names another digest."""
    match = STAGED.fullmatch(tag)
    if not match or not digest.startswith(f"sha256:{match[2]}"):
        return None
    try:
        return datetime.strptime(match[1], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        return None
