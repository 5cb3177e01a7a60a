"""Delete staged images that nobody needs. The only module that deletes in a registry."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from imagebuild.core.errors import CommandError, ConfigError
from imagebuild.oci.layout import INDEX_TYPES, KINDS, Manifest, manifests_of, referrers_tag
from imagebuild.oci.reference import parse_reference
from imagebuild.oci.registry import DeletionDisabled, Registry, RepositoryAt, for_each
from imagebuild.project.load import Project
from imagebuild.project.matrix import Plan
from imagebuild.project.plan import repository_name

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
class PruneVerdict:
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


def parse_age(text: str) -> timedelta:
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


def decide_pruning(
    survey: Survey, now: datetime, limit: timedelta, only: frozenset[str] | None = None
) -> tuple[PruneVerdict, ...]:
    """What becomes of each staged image, or of those with these digests: then the others count as ones that stay."""
    asked = {s.digest for s in survey.staged if only is None or s.digest in only}
    kept = {s.digest: _reason(s, survey, now, limit) if s.digest in asked else "stays" for s in survey.staged}
    while more := _parts_of_kept(survey.staged, kept):
        kept |= more
    needed = {digest for staged in survey.staged if kept[staged.digest] for digest in staged.all}
    return tuple(
        PruneVerdict(staged, kept[staged.digest]) if kept[staged.digest] else _removal(staged, survey, needed)
        for staged in sorted(survey.staged, key=lambda s: (s.pushed, s.digest))
        if staged.digest in asked
    )


def _reason(staged: Staged, survey: Survey, now: datetime, limit: timedelta) -> str | None:
    if is_young(staged, now, limit):
        return f"pushed {told(now - staged.pushed)} ago, younger than {told(limit)}"
    for digest in staged.all:
        which = "" if digest == staged.digest else f"its part {short_digest(digest)} "
        if digest in survey.held:
            return f"{which}{survey.held[digest]}"
        for referrer in survey.referrers.get(digest, ()):
            what = f"{referrer.artifact_type or 'something'} in {referrer.repository} ({short_digest(referrer.digest)})"
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
    return {d: f"is part of {short_digest(whole[d])}, which stays" for d, why in kept.items() if not why and d in whole}


def _removal(staged: Staged, survey: Survey, needed: set[str]) -> PruneVerdict:
    gone = [digest for digest in staged.all if digest not in needed]
    attachments = {digest: tuple(r.digest for r in survey.referrers.get(digest, ())) for digest in gone}
    return PruneVerdict(
        staged,
        kept=None,
        parts=tuple(digest for digest in gone if digest != staged.digest),
        attachments=tuple(dict.fromkeys(a for found in attachments.values() for a in found)),
        lists=tuple(referrers_tag(digest) for digest, found in attachments.items() if found),
    )


def short_digest(digest: str) -> str:
    """Enough of a digest for people."""
    return digest[: len("sha256:") + 12]


JOBS = 16
"""Questions at a time: they are small, and a repository has thousands of tags."""
BATCH = 16
"""Images that are deleted after one look."""


def repositories_of(
    project: Project, plan: Plan, image: str, connect: Callable[[str], Registry]
) -> tuple[RepositoryAt, tuple[RepositoryAt, ...]]:
    """Return the staging repository of an image, and the repositories that its tags are in."""

    def repository_at(name: str) -> RepositoryAt:
        reference = parse_reference(name)
        return RepositoryAt(connect(reference.host), reference.repository)

    names = [f"{project.matrix.model.repository}/{image}"]
    for target in plan.targets:
        if target.image == image:
            names += [tag.rpartition(":")[0] for tag in (*target.tags, *target.aliases)]
    return repository_at(repository_name(project, image)), tuple(map(repository_at, dict.fromkeys(names)))


@dataclass
class Pruning:
    """One image's staging repository, with the repositories that its images are published in."""

    staging: RepositoryAt
    published: tuple[RepositoryAt, ...]
    limit: timedelta
    now: datetime
    _manifests: dict[tuple[str, str], Manifest] = field(default_factory=dict)
    """Place and digest → what is there: that does not change while we look."""
    _pushes: dict[str, str] = field(default_factory=dict)
    """Tag that a push left → digest: nobody moves those."""

    def survey(self, only: frozenset[str] | None = None) -> Survey:
        """Ask the registries, or ask again about some staged images. Raises CommandError."""
        tags = self.staging.registry.tags(self.staging.repository)
        staged, others = self._staged(tags)
        held = self._held(self.staging, others)
        wanted = [s for s in staged if only is None or s.digest in only]
        old = [s for s in wanted if not is_young(s, self.now, self.limit)]
        there: dict[RepositoryAt, list[str]] = {}
        for place in self.published:
            there[place] = self._there(place, dict.fromkeys(digest for s in old for digest in s.all))
            if there[place]:
                held |= self._held(place, self._resolved(place, _lasting(place.registry.tags(place.repository))))
        # What else is known to be needed is not asked about.
        asked = dict.fromkeys(d for s in old if held.keys().isdisjoint(s.all) for d in s.all)
        referrers = self._referrers(self.staging, asked)
        attached = [r.digest for found in referrers.values() for r in found]
        referrers |= self._referrers(self.staging, attached)
        for place, copies in there.items():
            for digest, found in self._referrers(place, (d for d in copies if d in asked)).items():
                referrers[digest] = (*referrers.get(digest, ()), *found)
        return Survey(staged, held, referrers)

    def delete(self, verdicts: Iterable[PruneVerdict]) -> tuple[int, tuple[PruneVerdict, ...]]:
        """Delete what can go, after another look: how many manifests are gone, and which images stay after all.

        Raises DeletionDisabled where the registry lets nothing be deleted, CommandError if it fails.
        """
        # An index goes before what is part of it.
        todo = sorted((v for v in verdicts if not v.kept), key=lambda v: -len(v.staged.parts))
        gone: set[str] = set()
        spared: list[PruneVerdict] = []
        for start in range(0, len(todo), BATCH):
            chosen = frozenset(v.staged.digest for v in todo[start : start + BATCH])
            fresh = decide_pruning(self.survey(chosen), self.now, self.limit, chosen)
            spared += [verdict for verdict in fresh if verdict.kept]
            removed = for_each(self._delete, (v for v in fresh if not v.kept), self.staging.registry)
            gone.update(*removed)
        return len(gone), tuple(spared)

    def _delete(self, verdict: PruneVerdict) -> set[str]:
        """What a push left goes last: until then its tag tells the next run that there is something to delete."""
        registry, repository = self.staging.registry, self.staging.repository
        lists = filter(None, (registry.digest(repository, tag) for tag in verdict.lists))
        first = list(dict.fromkeys((*verdict.attachments, *lists, *verdict.parts)))
        refused = []
        for digest in first:
            try:
                registry.delete(repository, digest)
            except DeletionDisabled:
                raise
            except CommandError:
                refused.append(digest)
        registry.delete(repository, verdict.staged.digest)
        # Some registries delete no part of an index that is still there.
        for digest in refused:
            registry.delete(repository, digest)
        return {*first, verdict.staged.digest}

    def _staged(self, tags: Iterable[str]) -> tuple[tuple[Staged, ...], dict[str, str]]:
        """What pushes left, and the tags that name something for another reason."""
        listed = set(tags)
        fresh = self._read(tag for tag in _lasting(listed, staged=True) if tag not in self._pushes)
        resolved = fresh | {tag: digest for tag, digest in self._pushes.items() if tag in listed}
        times = {tag: staged_at(tag, digest) for tag, digest in resolved.items()}
        others = {tag: digest for tag, digest in resolved.items() if times[tag] is None}
        self._pushes |= {tag: digest for tag, digest in resolved.items() if times[tag]}
        left: dict[str, list[str]] = {}
        for tag, digest in resolved.items():
            if times[tag] is not None:
                left.setdefault(digest, []).append(tag)
        parts = dict(
            zip(
                left,
                for_each(lambda d: self._parts(self.staging, d), left, self.staging.registry, jobs=JOBS),
                strict=True,
            )
        )
        staged = tuple(
            Staged(digest, tuple(named), max(t for tag in named if (t := times[tag])), parts[digest])
            for digest, named in left.items()
        )
        return staged, others

    def _read(self, tags: Iterable[str]) -> dict[str, str]:
        """The digest that each tag of the staging repository names; what it names is needed too."""
        listed, place = list(tags), self.staging
        found = for_each(lambda tag: place.registry.manifest(place.repository, tag), listed, place.registry, jobs=JOBS)
        named = {tag: manifest for tag, manifest in zip(listed, found, strict=True) if manifest}
        self._manifests |= {(str(place), manifest.digest): manifest for manifest in named.values()}
        return {tag: manifest.digest for tag, manifest in named.items()}

    def _resolved(self, place: RepositoryAt, tags: Iterable[str]) -> dict[str, str]:
        listed = list(tags)
        found = for_each(lambda tag: place.registry.digest(place.repository, tag), listed, place.registry, jobs=JOBS)
        return {tag: digest for tag, digest in zip(listed, found, strict=True) if digest}

    def _held(self, place: RepositoryAt, tags: Mapping[str, str]) -> dict[str, str]:
        """Digest → who names it, from tags and their digests."""
        digests = dict.fromkeys(tags.values())
        parts = dict(
            zip(digests, for_each(lambda d: self._parts(place, d), digests, place.registry, jobs=JOBS), strict=True)
        )
        held = {part: f"is part of {place}:{tag}" for tag, digest in tags.items() for part in parts[digest]}
        for tag, digest in tags.items():
            held[digest] = f"is tagged {tag} in {place}"
            if about := REFERRERS.match(tag):
                held[f"sha256:{about[1]}"] = f"has {tag} in {place}"
        return held

    def _parts(self, place: RepositoryAt, digest: str) -> tuple[str, ...]:
        """Manifests below an index, those of indexes in it too."""
        key = (str(place), digest)
        found = self._manifests.get(key) or place.registry.manifest(place.repository, digest)
        if found is None:
            return ()
        self._manifests[key] = found
        below = manifests_of(found.document)
        deeper = [d for child in below if child.media_type in INDEX_TYPES for d in self._parts(place, child.digest)]
        return tuple(dict.fromkeys((*(child.digest for child in below), *deeper)))

    def _there(self, place: RepositoryAt, digests: Iterable[str]) -> list[str]:
        asked = list(digests)
        found = for_each(lambda d: place.registry.digest(place.repository, d), asked, place.registry, jobs=JOBS)
        return [digest for digest in found if digest]

    def _referrers(self, place: RepositoryAt, digests: Iterable[str]) -> dict[str, tuple[Referrer, ...]]:
        asked = list(dict.fromkeys(digests))
        found = for_each(lambda d: place.registry.referrers(place.repository, d), asked, place.registry, jobs=JOBS)
        return {
            digest: tuple(Referrer(r.digest, r.artifact_type, str(place), place == self.staging) for r in listed)
            for digest, listed in zip(asked, found, strict=True)
            if listed
        }


def _lasting(tags: Iterable[str], *, staged: bool = False) -> list[str]:
    """Tags that name an image: not those that only list attachments, nor, unless wanted, those of pushes."""
    return [tag for tag in tags if not REFERRERS.fullmatch(tag) and (staged or not STAGED.fullmatch(tag))]
