"""Look at what was staged, and delete what nobody needs: the only module that deletes in a registry."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from imagebuild import retention
from imagebuild.errors import CommandError
from imagebuild.registry import documents
from imagebuild.registry.base import DeletionDisabled, Manifest
from imagebuild.registry.copy import Place
from imagebuild.registry.parallel import each
from imagebuild.retention import REFERRERS, STAGED, Referrer, Staged, Survey, Verdict

JOBS = 16
"""Questions at a time: they are small, and a repository has thousands of tags."""
BATCH = 16
"""Images that are deleted after one look."""


@dataclass
class Pruning:
    """One image's staging repository, with the repositories that its images are published in."""

    staging: Place
    published: tuple[Place, ...]
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
        old = [s for s in wanted if not retention.is_young(s, self.now, self.limit)]
        there: dict[Place, list[str]] = {}
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

    def delete(self, verdicts: Iterable[Verdict]) -> tuple[int, tuple[Verdict, ...]]:
        """Delete what can go, after another look: how many manifests are gone, and which images stay after all.

        Raises DeletionDisabled where the registry lets nothing be deleted, CommandError if it fails.
        """
        # An index goes before what is part of it.
        todo = sorted((v for v in verdicts if not v.kept), key=lambda v: -len(v.staged.parts))
        gone: set[str] = set()
        spared: list[Verdict] = []
        for start in range(0, len(todo), BATCH):
            chosen = frozenset(v.staged.digest for v in todo[start : start + BATCH])
            fresh = retention.decide(self.survey(chosen), self.now, self.limit, chosen)
            spared += [verdict for verdict in fresh if verdict.kept]
            removed = each(self._delete, (v for v in fresh if not v.kept), self.staging.registry)
            gone.update(*removed)
        return len(gone), tuple(spared)

    def _delete(self, verdict: Verdict) -> set[str]:
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
        times = {tag: retention.staged_at(tag, digest) for tag, digest in resolved.items()}
        others = {tag: digest for tag, digest in resolved.items() if times[tag] is None}
        self._pushes |= {tag: digest for tag, digest in resolved.items() if times[tag]}
        left: dict[str, list[str]] = {}
        for tag, digest in resolved.items():
            if times[tag] is not None:
                left.setdefault(digest, []).append(tag)
        parts = dict(
            zip(left, each(lambda d: self._parts(self.staging, d), left, self.staging.registry, jobs=JOBS), strict=True)
        )
        staged = tuple(
            Staged(digest, tuple(named), max(t for tag in named if (t := times[tag])), parts[digest])
            for digest, named in left.items()
        )
        return staged, others

    def _read(self, tags: Iterable[str]) -> dict[str, str]:
        """The digest that each tag of the staging repository names; what it names is needed too."""
        listed, place = list(tags), self.staging
        found = each(lambda tag: place.registry.manifest(place.repository, tag), listed, place.registry, jobs=JOBS)
        named = {tag: manifest for tag, manifest in zip(listed, found, strict=True) if manifest}
        self._manifests |= {(str(place), manifest.digest): manifest for manifest in named.values()}
        return {tag: manifest.digest for tag, manifest in named.items()}

    def _resolved(self, place: Place, tags: Iterable[str]) -> dict[str, str]:
        listed = list(tags)
        found = each(lambda tag: place.registry.digest(place.repository, tag), listed, place.registry, jobs=JOBS)
        return {tag: digest for tag, digest in zip(listed, found, strict=True) if digest}

    def _held(self, place: Place, tags: Mapping[str, str]) -> dict[str, str]:
        """Digest → who names it, from tags and their digests."""
        digests = dict.fromkeys(tags.values())
        parts = dict(
            zip(digests, each(lambda d: self._parts(place, d), digests, place.registry, jobs=JOBS), strict=True)
        )
        held = {part: f"is part of {place}:{tag}" for tag, digest in tags.items() for part in parts[digest]}
        for tag, digest in tags.items():
            held[digest] = f"is tagged {tag} in {place}"
            if about := REFERRERS.match(tag):
                held[f"sha256:{about[1]}"] = f"has {tag} in {place}"
        return held

    def _parts(self, place: Place, digest: str) -> tuple[str, ...]:
        """Manifests below an index, those of indexes in it too."""
        key = (str(place), digest)
        found = self._manifests.get(key) or place.registry.manifest(place.repository, digest)
        if found is None:
            return ()
        self._manifests[key] = found
        below = documents.children(found.document)
        deeper = [
            d for child in below if child.media_type in documents.INDEX_TYPES for d in self._parts(place, child.digest)
        ]
        return tuple(dict.fromkeys((*(child.digest for child in below), *deeper)))

    def _there(self, place: Place, digests: Iterable[str]) -> list[str]:
        asked = list(digests)
        found = each(lambda d: place.registry.digest(place.repository, d), asked, place.registry, jobs=JOBS)
        return [digest for digest in found if digest]

    def _referrers(self, place: Place, digests: Iterable[str]) -> dict[str, tuple[Referrer, ...]]:
        asked = list(dict.fromkeys(digests))
        found = each(lambda d: place.registry.referrers(place.repository, d), asked, place.registry, jobs=JOBS)
        return {
            digest: tuple(Referrer(r.digest, r.artifact_type, str(place), place == self.staging) for r in listed)
            for digest, listed in zip(asked, found, strict=True)
            if listed
        }


def _lasting(tags: Iterable[str], *, staged: bool = False) -> list[str]:
    """Tags that name an image: not those that only list attachments, nor, unless wanted, those of pushes."""
    return [tag for tag in tags if not REFERRERS.fullmatch(tag) and (staged or not STAGED.fullmatch(tag))]
