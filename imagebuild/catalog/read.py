"""What a registry has of the matrix's images: tags, indexes, manifests, configurations and what refers to them.

What one image lacks, or what of it cannot be read, is a problem of the catalogue and stops no other image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import PurePosixPath

from imagebuild import __version__
from imagebuild.catalog import evidence, tags
from imagebuild.catalog.describe import Described, Ours, described, newest_first, platform_of
from imagebuild.catalog.evidence import Said
from imagebuild.catalog.models import Catalog, Evidence, PublishedImage, PublishedPlatform
from imagebuild.errors import CommandError, ResultError
from imagebuild.profiles import Profile
from imagebuild.registry import documents
from imagebuild.registry.base import Descriptor, Manifest, Registry

WORKERS = 8
"""Images read at a time."""
COPIED_BYTES = 256 * 1024
"""Files that are copied into the site: results of checks and benchmarks are smaller, lists of packages are not."""
FOLDER = "evidence"


@dataclass
class Reading:
    """A catalogue, and copies of small files that refer to its images: path → content."""

    catalog: Catalog
    copies: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Shop:
    """Where images are read from, and what is known without it."""

    registry: Registry
    prefix: str
    """What comes before the image in the names of repositories; with the registry, `ghcr.io/acme` is `acme`."""
    ours: Ours
    profiles: Mapping[str, Profile] = field(default_factory=dict)

    def repository(self, image: str) -> str:
        return "/".join(filter(None, (self.prefix, image)))


def read(shop: Shop, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> Reading:
    """The catalogue. An image that cannot be read is a problem of the catalogue.

    Raises CommandError if the registry cannot be read at all.
    """
    copies: dict[str, bytes] = {}
    problems: list[str] = []
    images: list[PublishedImage] = []
    for image in shop.ours.matrix.images:
        repository = shop.repository(image)
        everything = shop.registry.tags(repository)
        signatures = tags.signed(everything)
        with ThreadPoolExecutor(WORKERS) as pool:
            named = _by_digest(shop, repository, pool, tags.of_images(everything))
            jobs = [
                pool.submit(_image, shop, image, digest, found, signatures, copies) for digest, found in named.items()
            ]
            results = [job.result() for job in jobs]
        problems += [problem for _, found in results for problem in found]
        images += newest_first(one for one, _ in results if one)
    return Reading(
        Catalog(
            repository="/".join(filter(None, (shop.registry.host, shop.prefix))),
            read=now().strftime("%Y-%m-%dT%H:%M:%SZ"),
            imagebuild=__version__,
            images=tuple(images),
            problems=tuple(problems),
        ),
        copies,
    )


def _by_digest(shop: Shop, repository: str, pool: ThreadPoolExecutor, names: Sequence[str]) -> dict[str, list[str]]:
    """Digest → tags."""
    found: dict[str, list[str]] = {}
    for tag, digest in zip(names, pool.map(lambda tag: shop.registry.digest(repository, tag), names), strict=True):
        if digest:  # else it was deleted meanwhile
            found.setdefault(digest, []).append(tag)
    return found


def _image(
    shop: Shop, image: str, digest: str, names: list[str], signatures: frozenset[str], copies: dict[str, bytes]
) -> tuple[PublishedImage | None, list[str]]:
    """What tags name, and what of it could not be read."""
    repository = shop.repository(image)
    where = f"{shop.registry.host}/{repository}@{digest}"
    problems: list[str] = []
    try:
        manifest = _manifest(shop, repository, digest)
        runnable = [child for child in documents.children(manifest.document) if _runs(child)]
        if manifest.media_type not in documents.INDEX_TYPES:
            runnable = [Descriptor(manifest.media_type, digest, len(manifest.content))]
        platforms = [_platform(shop, repository, child, signatures, copies, problems) for child in runnable]
        if not platforms:
            return None, [f"{where}: names nothing that runs"]
        own = _evidence(shop, repository, digest, {}, []) if manifest.media_type in documents.INDEX_TYPES else ()
    except (CommandError, ResultError, LookupError, TypeError, ValueError) as error:
        return None, [f"{where}: {error}"]
    about = described(image, platforms, names, shop.ours)
    signed = digest in signatures or any(entry.kind == "signature" for entry, _ in own)
    return _published(about, f"{shop.registry.host}/{repository}", digest, platforms, signed), [
        f"{where}: {problem}" for problem in problems
    ]


def _runs(child: Descriptor) -> bool:
    return bool(child.platform) and not str(child.platform).startswith("unknown") and not child.artifact_type


def _published(
    about: Described, repository: str, digest: str, platforms: Iterable[PublishedPlatform], signed: bool
) -> PublishedImage:
    return PublishedImage(**vars(about), repository=repository, digest=digest, platforms=tuple(platforms), signed=signed)


def _platform(
    shop: Shop,
    repository: str,
    child: Descriptor,
    signatures: frozenset[str],
    copies: dict[str, bytes],
    problems: list[str],
) -> PublishedPlatform:
    manifest = _manifest(shop, repository, child.digest).document
    config = shop.registry.blob(repository, manifest["config"]["digest"])
    said = _evidence(shop, repository, child.digest, copies, problems)
    return platform_of(child, manifest, config, said, signed=child.digest in signatures)


def _manifest(shop: Shop, repository: str, digest: str) -> Manifest:
    found = shop.registry.manifest(repository, digest)
    if found is None:
        raise ResultError(f"{digest} is named but not there")
    return found


def _evidence(
    shop: Shop, repository: str, subject: str, copies: dict[str, bytes], problems: list[str]
) -> list[tuple[Evidence, Said]]:
    """Everything that refers to a manifest, with what it says; the newest first, as far as annotations tell."""
    found = sorted(
        shop.registry.referrers(repository, subject),
        key=lambda one: (one.annotations.get("org.opencontainers.image.created", ""), one.digest),
        reverse=True,
    )
    result = []
    for referrer in found:
        kind = evidence.kind_of(referrer.artifact_type)
        try:
            result.append(_one(shop, repository, kind, referrer.digest, copies))
        except (ResultError, CommandError, LookupError, TypeError, ValueError) as error:
            problems.append(str(error))
            result.append((Evidence(kind=kind, digest=referrer.digest), Said()))
    return result


def _one(shop: Shop, repository: str, kind: str, digest: str, copies: dict[str, bytes]) -> tuple[Evidence, Said]:
    layers = documents.blobs(_manifest(shop, repository, digest).document)[1:]
    size = sum(layer.size for layer in layers)
    if kind not in evidence.READ or not layers:
        return Evidence(kind=kind, digest=digest, size_bytes=size), Said()
    content = shop.registry.blob(repository, layers[0].digest)
    said = evidence.read(kind, digest, content, shop.profiles)
    copy = None
    if len(content) <= COPIED_BYTES:
        copy = str(PurePosixPath(FOLDER, f"{digest.removeprefix('sha256:')[:16]}-{evidence.file_of(kind)}"))
        copies[copy] = content
    return Evidence(kind=kind, digest=digest, size_bytes=size, file=copy), said
