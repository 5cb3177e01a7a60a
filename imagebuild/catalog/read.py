"""What a registry has of the matrix's images: tags, indexes, manifests, configurations and what refers to them.

What one image lacks, or what of it cannot be read, is a problem of the catalogue and stops no other image.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import PurePosixPath

from imagebuild import __version__
from imagebuild.catalog import evidence, tags
from imagebuild.catalog.describe import CREATED, Ours, described, newest_first, platform_of, with_evidence
from imagebuild.catalog.evidence import Said
from imagebuild.catalog.known import Known
from imagebuild.catalog.models import Catalog, Evidence, PublishedImage, PublishedPlatform
from imagebuild.errors import CommandError, ResultError
from imagebuild.models import Plan
from imagebuild.profiles import Profile
from imagebuild.registry import documents
from imagebuild.registry.base import Descriptor, Manifest, Registry
from imagebuild.registry.parallel import each
from imagebuild.registry.reference import Reference, parse

WORKERS = 8
"""Images read at a time, with a few requests each."""
COPIED_BYTES = 256 * 1024
"""Files that are copied into the site: results of checks and benchmarks are smaller, lists of packages are not."""
FOLDER = "evidence"
READ_ERRORS = (CommandError, ResultError, LookupError, TypeError, ValueError)
"""What an image of somebody else's making may lead to."""


@dataclass
class Reading:
    """A catalogue, and copies of small files that refer to its images: path → content."""

    catalog: Catalog
    copies: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Shop:
    """Where images are read from, and what is known without it."""

    registries: Mapping[str, Registry]
    """Host → registry."""
    ours: Ours
    profiles: Mapping[str, Profile] = field(default_factory=dict)
    known: Known = field(default_factory=Known)


def repositories(plan: Plan) -> dict[Reference, str]:
    """Repositories that publishing gives tags in → image, in the order of the plan. Raises ConfigError."""
    names = {tag.rpartition(":")[0]: t.image for t in plan.targets for tag in (*t.tags, *t.aliases)}
    return {parse(name): image for name, image in names.items()}


def read(shop: Shop, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> Reading:
    """The catalogue. An image that cannot be read is a problem of the catalogue.

    Raises CommandError if the registry cannot be read at all.
    """
    copies: dict[str, str] = {}
    problems: list[str] = []
    images: list[PublishedImage] = []
    named = repositories(shop.ours.plan)
    for reference, image in named.items():
        registry = shop.registries[reference.host]
        everything = registry.tags(reference.repository)
        shelf = Shelf(shop, registry, reference.repository, image, tags.signed(everything), copies)
        digests = _by_digest(shelf, tags.of_images(everything))
        results = each(shelf.image_of, digests.items(), registry, jobs=WORKERS)
        problems += [problem for _, found in results for problem in found]
        images += newest_first(one for one, _ in results if one)
    return Reading(
        Catalog(
            repository=_common([reference.name for reference in named]),
            read=now().strftime("%Y-%m-%dT%H:%M:%SZ"),
            imagebuild=__version__,
            images=tuple(images),
            problems=tuple(problems),
        ),
        copies,
    )


def _common(names: Sequence[str]) -> str:
    """The folder of all repositories."""
    parts = [name.split("/")[:-1] for name in names]
    shared = takewhile(lambda column: len(set(column)) == 1, zip(*parts, strict=False))
    return "/".join(column[0] for column in shared)


def _by_digest(shelf: Shelf, names: Sequence[str]) -> dict[str, list[str]]:
    """Digest → tags."""
    found: dict[str, list[str]] = {}
    digests = each(lambda tag: shelf.registry.digest(shelf.repository, tag), names, shelf.registry, jobs=WORKERS)
    for tag, digest in zip(names, digests, strict=True):
        if digest:  # else it was deleted meanwhile
            found.setdefault(digest, []).append(tag)
    return found


@dataclass(frozen=True)
class Shelf:
    """A repository of one image."""

    shop: Shop
    registry: Registry
    repository: str
    """Without the registry."""
    image: str
    signatures: frozenset[str]
    """Digests that have a signature by tag."""
    copies: dict[str, str]
    """What is copied into the site; grows while images are read."""

    def image_of(self, named: tuple[str, list[str]]) -> tuple[PublishedImage | None, list[str]]:
        """What a digest with its tags is, and what of it could not be read."""
        digest, names = named
        problems: list[str] = []
        try:
            manifest = self._manifest(digest)
            is_index = manifest.media_type in documents.INDEX_TYPES
            alone = Descriptor(manifest.media_type, digest, len(manifest.content))
            runnable = [c for c in documents.children(manifest.document) if _runs(c)] if is_index else [alone]
            platforms = tuple(self._platform(child, problems) for child in runnable)
            if not platforms:
                raise ResultError("names nothing that runs")
            own = self._evidence(digest, problems) if is_index else []
        except READ_ERRORS as error:
            return None, [self._told(digest, str(error))]
        made = PublishedImage(
            **vars(described(self.image, platforms, names, self.shop.ours)),
            repository=f"{self.registry.host}/{self.repository}",
            digest=digest,
            platforms=platforms,
            signed=digest in self.signatures or any(entry.kind == "signature" for entry, _ in own),
        )
        return made, [self._told(digest, problem) for problem in problems]

    def _told(self, digest: str, problem: str) -> str:
        return f"{self.registry.host}/{self.repository}@{digest}: {problem}"

    def _platform(self, child: Descriptor, problems: list[str]) -> PublishedPlatform:
        platform = self.shop.known.platforms.get(child.digest)
        if platform is None:
            manifest = self._manifest(child.digest).document
            config = self.registry.blob(self.repository, manifest["config"]["digest"])
            platform = platform_of(child, manifest, config)
        said = self._evidence(child.digest, problems)
        return with_evidence(platform, said, signed=child.digest in self.signatures)

    def _manifest(self, digest: str) -> Manifest:
        found = self.registry.manifest(self.repository, digest)
        if found is None:
            raise ResultError(f"{digest} is named but not there")
        return found

    def _evidence(self, subject: str, problems: list[str]) -> list[tuple[Evidence, Said]]:
        """Everything that refers to a manifest, with what it says; the newest first, as far as annotations tell."""
        found = sorted(
            self.registry.referrers(self.repository, subject),
            key=lambda one: (one.annotations.get(CREATED, ""), one.digest),
            reverse=True,
        )
        result = []
        for referrer in found:
            kind = evidence.kind_of(referrer.artifact_type)
            try:
                result.append(self._one(kind, referrer.digest))
            except READ_ERRORS as error:
                problems.append(str(error))
                result.append((Evidence(kind=kind, digest=referrer.digest), Said()))
        return result

    def _one(self, kind: str, digest: str) -> tuple[Evidence, Said]:
        if found := self.shop.known.evidence.get(digest):
            if found[0].file:
                self.copies[found[0].file] = self.shop.known.copies[found[0].file]
            return found
        layers = documents.blobs(self._manifest(digest).document)[1:]
        size = sum(layer.size for layer in layers)
        if kind not in evidence.READ or not layers:
            return Evidence(kind=kind, digest=digest, size_bytes=size), Said()
        content = self.registry.blob(self.repository, layers[0].digest)
        said = evidence.read(kind, digest, content, self.shop.profiles)
        copy = None
        if len(content) <= COPIED_BYTES:
            copy = str(PurePosixPath(FOLDER, f"{digest.removeprefix('sha256:')[:16]}-{evidence.file_of(kind)}"))
            self.copies[copy] = content.decode()
        return Evidence(kind=kind, digest=digest, size_bytes=size, file=copy), said


def _runs(child: Descriptor) -> bool:
    return bool(child.platform) and not str(child.platform).startswith("unknown") and not child.artifact_type
