"""Write a root file system as an OCI image layout: a folder of blobs named by what they hold.

The same tar gives the same digest, whenever and wherever it is added, so what was built on it stays cached.
"""

import gzip
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

from imagebuild.errors import ResultError

INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"

_CHUNK = 1 << 20


@dataclass(frozen=True)
class Descriptor:
    """What names a blob: kind, digest, size; and the platform (`linux/arm64`) when the blob is for one."""

    media_type: str
    digest: str
    size: int
    platform: str | None = None

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = {"mediaType": self.media_type, "digest": self.digest, "size": self.size}
        return document | ({"platform": platform_json(self.platform)} if self.platform else {})

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "Descriptor":
        """Read what `to_json` wrote; `KeyError` when it is something else."""
        platform = "/".join(document["platform"].values()) if "platform" in document else None
        return cls(document["mediaType"], document["digest"], document["size"], platform)


@dataclass(frozen=True)
class Settings:
    """What an image says about itself; `created` is a fixed time, so that the digest depends on content."""

    created: str
    env: Sequence[str] = ()
    cmd: Sequence[str] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    history: str = ""


def platform_json(platform: str) -> dict[str, str]:
    """`linux/arm64` or `linux/arm/v7` as OCI spells it."""
    return dict(zip(("os", "architecture", "variant"), platform.split("/"), strict=False))


def config_json(platform: str, diff_id: str, settings: Settings) -> dict[str, Any]:
    """An image of one layer; `diff_id` is the digest of the uncompressed tar."""
    return {
        "created": settings.created,
        **platform_json(platform),
        "config": {
            "Env": list(settings.env),
            "Cmd": list(settings.cmd),
            "Labels": dict(sorted(settings.labels.items())),
        },
        "rootfs": {"type": "layers", "diff_ids": [diff_id]},
        "history": [{"created": settings.created, "created_by": settings.history}],
    }


def manifest_json(config: Descriptor, layer: Descriptor) -> dict[str, Any]:
    return {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": config.to_json(),
        "layers": [layer.to_json()],
    }


def index_json(manifests: Iterable[Descriptor]) -> dict[str, Any]:
    return {"schemaVersion": 2, "mediaType": INDEX, "manifests": [item.to_json() for item in manifests]}


def blob_path(layout: Path, digest: str) -> Path:
    return layout / "blobs" / digest.replace(":", "/", 1)


def add_image(layout: Path, tar: Path, platform: str, settings: Settings) -> Descriptor:
    """Add `tar` as an image of one layer; what comes back goes into `write_index`."""
    layer, diff_id = _write_layer(layout, tar)
    config = _write_json(layout, CONFIG, config_json(platform, diff_id, settings))
    manifest = _write_json(layout, MANIFEST, manifest_json(config, layer))
    return Descriptor(manifest.media_type, manifest.digest, manifest.size, platform)


def add_tree(layout: Path, tar: Path, platforms: Iterable[str], settings: Settings) -> str:
    """Add `tar` as an image that is the same for all `platforms`, not compressed; returns its index's digest."""
    layer, diff_id = _write_layer(layout, tar, level=0)
    manifests = []
    for platform in platforms:
        config = _write_json(layout, CONFIG, config_json(platform, diff_id, settings))
        manifest = _write_json(layout, MANIFEST, manifest_json(config, layer))
        manifests.append(Descriptor(manifest.media_type, manifest.digest, manifest.size, platform))
    return write_index(layout, manifests)


def has_image(layout: Path, digest: str) -> bool:
    """Whether an image, or an index with all its images, is there in full length."""
    return (layout / "oci-layout").is_file() and not any(True for _ in missing(layout, digest))


def missing(layout: Path, digest: str) -> Iterator[str]:
    """Digests of what an image or an index names and the layout does not have in full."""
    for found, size in closure(layout, digest):
        path = blob_path(layout, found)
        if not path.is_file() or size not in (None, path.stat().st_size):
            yield found


def closure(layout: Path, digest: str, size: int | None = None) -> Iterator[tuple[str, int | None]]:
    """Digest and size of an image or an index, and of all that it names, as far as the layout has it."""
    yield digest, size
    path = blob_path(layout, digest)
    if not path.is_file():
        return
    document = json.loads(path.read_bytes())
    for item in document.get("manifests", ()):
        yield from closure(layout, item["digest"], item["size"])
    for item in [*([document["config"]] if "config" in document else []), *document.get("layers", ())]:
        yield item["digest"], item["size"]


def write_index(layout: Path, manifests: Sequence[Descriptor]) -> str:
    """Make one image of `manifests`, one a platform; its digest is what `oci-layout://…@digest` takes."""
    index = _write_json(layout, INDEX, index_json(sorted(manifests, key=lambda item: item.platform or "")))
    _write(layout, layout / "oci-layout", _encode({"imageLayoutVersion": "1.0.0"}))
    _write(layout, layout / "index.json", _encode(index_json([index])))
    return index.digest


def read_index(layout: Path) -> tuple[Descriptor, ...]:
    """The manifests of the image that `write_index` wrote last; `ResultError` when there is none."""
    try:
        image = json.loads((layout / "index.json").read_bytes())["manifests"][0]
        index = json.loads(blob_path(layout, image["digest"]).read_bytes())
        return tuple(Descriptor.from_json(item) for item in index["manifests"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        message = f"{layout}: not an OCI image layout with an index ({error}); remove the folder"
        raise ResultError(message) from error


def layer_of(layout: Path, platform: str) -> Path:
    """The layer of the image that `write_index` wrote last, for a platform. Raises ResultError as `read_index`."""
    manifest = next(item for item in read_index(layout) if item.platform == platform)
    return blob_path(layout, json.loads(blob_path(layout, manifest.digest).read_bytes())["layers"][0]["digest"])


def is_complete(layout: Path, manifest: Descriptor) -> bool:
    """Whether the manifest and all that it names are there, in full length."""
    return all(_has(layout, item) for item in _reachable(layout, manifest))


def prune(layout: Path, keep: Iterable[Descriptor], older_than: float) -> None:
    """Remove blobs that no manifest of `keep` needs and that were written before the time `older_than`.

    Young ones stay: a build that started before may still read them.
    """
    needed = {item.digest for manifest in keep for item in _reachable(layout, manifest)}
    for path in (layout / "blobs" / "sha256").glob("*"):
        if f"sha256:{path.name}" not in needed and path.stat().st_mtime < older_than:
            path.unlink(missing_ok=True)


def _reachable(layout: Path, manifest: Descriptor) -> Iterator[Descriptor]:
    yield manifest
    if _has(layout, manifest):
        document = json.loads(blob_path(layout, manifest.digest).read_bytes())
        yield from map(Descriptor.from_json, (document["config"], *document["layers"]))


def _has(layout: Path, item: Descriptor) -> bool:
    path = blob_path(layout, item.digest)
    return path.is_file() and path.stat().st_size == item.size


def _encode(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, indent=2).encode()


def _write_json(layout: Path, media_type: str, document: Mapping[str, Any]) -> Descriptor:
    data = _encode(document)
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    _write(layout, blob_path(layout, digest), data)
    return Descriptor(media_type, digest, len(data))


def _write_layer(layout: Path, tar: Path, level: int = 6) -> tuple[Descriptor, str]:
    """The compressed layer, and the digest of the tar itself."""
    with _temporary(layout) as path:
        with tar.open("rb") as source, path.open("wb") as target:
            unpacked = _compress(source, target, level)
        with path.open("rb") as packed:
            digest = f"sha256:{hashlib.file_digest(packed, 'sha256').hexdigest()}"
        layer = Descriptor(LAYER, digest, path.stat().st_size)
        path.replace(blob_path(layout, digest))
    return layer, f"sha256:{unpacked}"


def _compress(source: BinaryIO, target: BinaryIO, level: int) -> str:
    """Pack `source` and tell its sha256; no name and no time get in: the digest depends on content alone."""
    content = hashlib.sha256()
    with gzip.GzipFile("", "wb", level, target, mtime=0) as packed:
        while chunk := source.read(_CHUNK):
            content.update(chunk)
            packed.write(chunk)
    return content.hexdigest()


def _write(layout: Path, path: Path, data: bytes) -> None:
    with _temporary(layout) as temporary:
        temporary.write_bytes(data)
        temporary.replace(path)


@contextmanager
def _temporary(layout: Path) -> Iterator[Path]:
    """A name beside the blobs, to write to and rename: whoever looks sees all of a file or nothing of it."""
    folder = layout / "blobs" / "sha256"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".{uuid4().hex}"
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)
