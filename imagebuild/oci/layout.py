"""Define the documents that images consist of. Read and write images on disk: OCI layouts, archives, their layers."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import IO, Any, Literal, cast

import zstandard

from imagebuild.core.errors import ResultError
from imagebuild.core.files import temporary_file

CHUNK = 1 << 20
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
"""Beginnings of compressed data."""
Compression = Literal["", "gzip", "zstd"]
"""How data are compressed, if they are."""
EPOCH, CREATED = "1754697600", "2025-08-09T00:00:00Z"
"""Time of the oldest files and of images, so that times do not differ from run to run: the day Debian 13 came out."""
WHITEOUT, OPAQUE = ".wh.", ".wh..wh..opq"
"""Beginning of the name that hides a file of lower layers, and the name that hides all of a folder."""
MOST_BYTES = 128 << 20
"""Largest document of an image that is read, as with cosign; a registry could claim any size."""
KEPT_SIZE = 32 << 20
"""Bytes of the longest file of a layer whose content is kept."""

# Documents

INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
DOCKER_INDEX = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
INDEX_TYPES = (INDEX, DOCKER_INDEX)
MANIFEST_TYPES = (INDEX, MANIFEST, DOCKER_INDEX, DOCKER_MANIFEST)
EMPTY = b"{}"
EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
TITLE = "org.opencontainers.image.title"
"""Annotation of a layer of an attachment: the name of its file."""


@dataclass(frozen=True)
class Descriptor:
    """Describe a blob or a manifest: type, digest and size, as OCI descriptors do."""

    media_type: str
    digest: str
    size: int
    platform: str | None = None
    """`linux/arm64`, of an image in an index."""
    artifact_type: str | None = None
    """Type of an attachment."""
    annotations: Mapping[str, str] = field(default_factory=dict, hash=False)

    def to_json(self) -> dict[str, Any]:
        """Return the descriptor as it stands in manifests and indexes."""
        document: dict[str, Any] = {"mediaType": self.media_type, "digest": self.digest, "size": self.size}
        if self.platform:
            document["platform"] = platform_json(self.platform)
        if self.artifact_type:
            document["artifactType"] = self.artifact_type
        if self.annotations:
            document["annotations"] = dict(sorted(self.annotations.items()))
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Descriptor:
        """Read a descriptor. Raises LookupError or TypeError for something else."""
        return cls(
            media_type=document["mediaType"],
            digest=document["digest"],
            size=document["size"],
            platform=platform_of(document["platform"]) if document.get("platform") else None,
            artifact_type=document.get("artifactType"),
            annotations=document.get("annotations") or {},
        )


@dataclass(frozen=True)
class Manifest:
    """Hold a manifest or an index, byte for byte."""

    content: bytes
    media_type: str
    digest: str
    """Of the content."""

    @property
    def document(self) -> dict[str, Any]:
        """Return the parsed content. Raises ValueError if it is not JSON."""
        return dict(json.loads(self.content))


@dataclass(frozen=True)
class Attachment:
    """Hold a file that is stored in a manifest of its own, which refers to an image."""

    name: str
    media_type: str
    """Type of the file, and so of the attachment."""
    content: bytes
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ImageSettings:
    """Say what a new image declares. `created` is a fixed time, so that the digest depends on content alone."""

    created: str
    env: Sequence[str] = ()
    cmd: Sequence[str] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    history: str = ""


def digest_of(content: bytes) -> str:
    """Return `sha256:…` of the content."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def encode_json(document: Mapping[str, Any]) -> bytes:
    """Return the canonical form of a document: the same document gives the same bytes."""
    return json.dumps(document, separators=(",", ":"), sort_keys=True, ensure_ascii=False).encode()


def platform_json(platform: str) -> dict[str, str]:
    """Return `linux/arm64` or `linux/arm/v7` as OCI spells it."""
    return dict(zip(("os", "architecture", "variant"), platform.split("/"), strict=False))


def platform_of(document: Mapping[str, Any]) -> str:
    """Return the platform of a configuration or descriptor: `linux/amd64`.

    The variant of arm64 is always v8, and left out.
    """
    variant = document.get("variant")
    plain = f"{document.get('os', 'unknown')}/{document.get('architecture', 'unknown')}"
    return f"{plain}/{variant}" if variant and document.get("architecture") == "arm" else plain


def media_type_of(document: Mapping[str, Any]) -> str:
    """Return the media type of a manifest or an index, which need not name it."""
    return str(document.get("mediaType") or (INDEX if "manifests" in document else MANIFEST))


def blobs_of(document: Mapping[str, Any]) -> tuple[Descriptor, ...]:
    """Return the configuration and the layers that a manifest names, each once; an index names none."""
    items = [*([document["config"]] if document.get("config") else []), *document.get("layers", ())]
    return tuple({item["digest"]: Descriptor.from_json(item) for item in items}.values())


def manifests_of(document: Mapping[str, Any]) -> tuple[Descriptor, ...]:
    """Return the manifests that an index names; a manifest names none."""
    return tuple(Descriptor.from_json(item) for item in document.get("manifests", ()))


def index_json(manifests: Iterable[Descriptor]) -> dict[str, Any]:
    """Return an index of these manifests, in this order."""
    return {"schemaVersion": 2, "mediaType": INDEX, "manifests": [item.to_json() for item in manifests]}


def index_document(manifests: Iterable[Descriptor]) -> bytes:
    """Return the canonical form of an index of these manifests, in this order."""
    return encode_json(index_json(manifests))


def attachment_manifest(subject: Descriptor, attachment: Attachment) -> bytes:
    """Return the manifest of a file that refers to another manifest. It holds no time but those in annotations."""
    content, notes = attachment.content, attachment.annotations
    layer = Descriptor(attachment.media_type, digest_of(content), len(content), annotations={TITLE: attachment.name})
    document = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "artifactType": attachment.media_type,
        "config": Descriptor(EMPTY_TYPE, digest_of(EMPTY), len(EMPTY)).to_json(),
        "layers": [layer.to_json()],
        "subject": Descriptor(subject.media_type, subject.digest, subject.size).to_json(),
    }
    return encode_json(document | ({"annotations": dict(notes)} if notes else {}))


def referrer_descriptor(content: bytes) -> Descriptor:
    """Return the descriptor under which an index of referrers lists the manifest of an attachment."""
    document = json.loads(content)
    return Descriptor(
        media_type=document.get("mediaType", MANIFEST),
        digest=digest_of(content),
        size=len(content),
        artifact_type=document.get("artifactType") or (document.get("config") or {}).get("mediaType"),
        annotations=document.get("annotations") or {},
    )


REFERRERS_TAG = re.compile(r"sha256-([0-9a-f]{64})(?:\.([a-z]+))?")
"""Tags that name no image: lists of what refers to a digest, and what cosign 2 attaches to one."""


def referrers_tag(digest: str) -> str:
    """Return the tag that lists what refers to a manifest, where the registry has no API for it."""
    return digest.replace(":", "-", 1)


# Content


@dataclass(frozen=True)
class BlobStream:
    """Describe a blob that is read while it is sent."""

    size: int
    chunks: Callable[[], Iterator[bytes]]
    """Reads the blob from its start."""

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[bytes]:
        return self.chunks()


class Region(RawIOBase):
    """Read a part of a file once, from its beginning."""

    def __init__(self, file: BufferedReader, offset: int, size: int) -> None:
        file.seek(offset)
        self._file, self._rest = file, size

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        """Fill the buffer. Return the number of bytes; 0 is the end."""
        count = self._file.readinto(memoryview(buffer)[: self._rest])
        self._rest -= count
        return count


@dataclass(frozen=True, slots=True)
class Blob:
    """Locate bytes in a file: all of it, or a member of a tar, which needs no unpacking."""

    file: Path
    offset: int
    size: int
    digest: str | None = None
    """`sha256:…` of the bytes as stored; `open` compares them."""

    @contextmanager
    def open(self) -> Iterator[BufferedReader]:
        """Open the bytes for reading. Raises ResultError if they cannot be read, or are not what the digest says."""
        try:
            with self.file.open("rb") as file:
                if self.digest and self.digest.startswith("sha256:"):
                    whole = BufferedReader(Region(file, self.offset, self.size), CHUNK)
                    if (digest := f"sha256:{hashlib.file_digest(whole, 'sha256').hexdigest()}") != self.digest:
                        raise ResultError(f"{self.file}: {self.digest}: is damaged: its digest is {digest}")
                yield BufferedReader(Region(file, self.offset, self.size), CHUNK)
        except UNREADABLE as error:
            raise ResultError(f"{self.file}: {self.digest or ''}: cannot be read: {error}") from None

    def read(self) -> bytes:
        """Return all of a small blob. Raises what `open` raises."""
        with self.open() as file:
            return file.read()

    @property
    def compression(self) -> Compression:
        """Return how the bytes are compressed as a whole; nothing if they are not."""
        with self.file.open("rb") as file:
            start = Region(file, self.offset, self.size).read(len(ZSTD))
        return "gzip" if start.startswith(GZIP) else "zstd" if start == ZSTD else ""


def decompressed(file: BufferedReader) -> IO[bytes]:
    """Return what is in a file that may be compressed as a whole.

    Reading raises errors of zlib and zstandard, OSError or EOFError. Truncated zstd data end without an error.
    """
    head = file.peek(len(ZSTD))
    if head.startswith(GZIP):
        return cast(IO[bytes], gzip.GzipFile(fileobj=file))
    if head.startswith(ZSTD):
        return cast(IO[bytes], zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True))
    return file


UNREADABLE = (tarfile.TarError, EOFError, OSError, ValueError, zlib.error, zstandard.ZstdError)
"""Errors of content that is damaged or cut off."""


def member_path(name: str) -> str | None:
    """Return the path of a member below the root, or None for the root itself. Raises TarError if it leads outside."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise tarfile.TarError(f"{name!r} leads out of the image")
    return "/".join(parts) or None


@contextmanager
def layer_members(blob: Blob) -> Iterator[Iterator[tuple[tarfile.TarFile, tarfile.TarInfo, str]]]:
    """Open a layer to read its members once, in order: the archive with the content, the member, its path in the image.

    Raises ResultError, also while content is read, if the layer cannot be read or has another digest.
    """

    def members(archive: tarfile.TarFile) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo, str]]:
        for member in archive:
            if (path := member_path(member.name)) is not None:
                yield archive, member, path
                archive.members = []  # type: ignore[attr-defined]  # or it keeps all of them

    with blob.open() as file, tarfile.open(fileobj=decompressed(file), mode="r|", bufsize=CHUNK) as archive:
        yield members(archive)


# Layouts


BLOBS = "blobs/sha256"


def blob_name(digest: str) -> str:
    """Return the name of a blob in a layout: `blobs/sha256/…`."""
    return "blobs/" + digest.replace(":", "/", 1)


def blob_path(layout: Path, digest: str) -> Path:
    """Return where a layout keeps a blob."""
    return layout / blob_name(digest)


def blobs_named(layout: Path, digest: str, size: int | None = None) -> Iterator[tuple[str, int | None]]:
    """Yield digest and size of a manifest or an index and of everything below it, as far as the layout has it."""
    yield digest, size
    path = blob_path(layout, digest)
    if not path.is_file() or size not in (None, path.stat().st_size):
        return
    document = json.loads(path.read_bytes())
    for item in manifests_of(document):
        yield from blobs_named(layout, item.digest, item.size)
    yield from ((item.digest, item.size) for item in blobs_of(document))


def has_image(layout: Path, digest: str, size: int | None = None) -> bool:
    """Return whether an image, or an index with all its images, is there in full length."""
    paths = ((blob_path(layout, name), size) for name, size in blobs_named(layout, digest, size))
    return (layout / "oci-layout").is_file() and all(
        path.is_file() and size in (None, path.stat().st_size) for path, size in paths
    )


def check_image(layout: Path, digest: str) -> None:
    """Raise ResultError if anything that an image names is missing or has changed."""
    for name, size in blobs_named(layout, digest):
        path = blob_path(layout, name)
        if not path.is_file() or size not in (None, path.stat().st_size):
            raise ResultError(f"{path}: is missing or cut off; make the bundle again")
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != path.name:
                raise ResultError(f"{path}: has changed; make the bundle again")


# Writing


def start_layout(layout: Path) -> None:
    """Make an empty layout, if there is none. Its index stays empty: BuildKit is given digests."""
    (layout / BLOBS).mkdir(parents=True, exist_ok=True)
    if not (layout / "oci-layout").exists():
        (layout / "index.json").write_text(json.dumps(index_json([])))
        (layout / "oci-layout").write_text(json.dumps({"imageLayoutVersion": "1.0.0"}))


def add_image(layout: Path, tar: Path, platform: str, settings: ImageSettings) -> Descriptor:
    """Add `tar` as an image of one layer. Return its descriptor, for `write_index`."""
    return _add_manifest(layout, *_add_layer(layout, tar), platform, settings)


def write_index(layout: Path, manifests: Sequence[Descriptor]) -> str:
    """Make one image of manifests, one for each platform. Return its digest, for `oci-layout://…@digest`."""
    index = _add_document(layout, INDEX, index_json(sorted(manifests, key=lambda item: item.platform or "")))
    for path, document in {"oci-layout": {"imageLayoutVersion": "1.0.0"}, "index.json": index_json([index])}.items():
        with temporary_file(layout / BLOBS) as temporary:
            temporary.write_text(json.dumps(document, indent=2))
            temporary.replace(layout / path)
    return index.digest


def _add_layer(layout: Path, tar: Path) -> tuple[Descriptor, str]:
    """Compress a tar into a layer. Return its descriptor, and the digest of the tar itself."""
    with temporary_file(layout / BLOBS) as path:
        content = hashlib.sha256()
        # Without a name and a time, the digest depends on content alone.
        with tar.open("rb") as source, path.open("wb") as target, gzip.GzipFile("", "wb", 6, target, 0) as packed:
            while chunk := source.read(CHUNK):
                content.update(chunk)
                packed.write(chunk)
        with path.open("rb") as file:
            digest = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        layer = Descriptor(LAYER, digest, path.stat().st_size)
        path.replace(blob_path(layout, digest))
    return layer, f"sha256:{content.hexdigest()}"


def _add_manifest(layout: Path, layer: Descriptor, diff_id: str, platform: str, settings: ImageSettings) -> Descriptor:
    """Add configuration and manifest of an image of one layer; `diff_id` is the digest of the uncompressed tar."""
    labels = dict(sorted(settings.labels.items()))
    config = {
        "created": settings.created,
        **platform_json(platform),
        "config": {"Env": list(settings.env), "Cmd": list(settings.cmd), "Labels": labels},
        "rootfs": {"type": "layers", "diff_ids": [diff_id]},
        "history": [{"created": settings.created, "created_by": settings.history}],
    }
    stored = _add_document(layout, CONFIG, config)
    layers = [layer.to_json()]
    document = {"schemaVersion": 2, "mediaType": MANIFEST, "config": stored.to_json(), "layers": layers}
    return replace(_add_document(layout, MANIFEST, document), platform=platform)


def _add_document(layout: Path, media_type: str, document: Mapping[str, Any]) -> Descriptor:
    data = json.dumps(document, indent=2).encode()
    with temporary_file(layout / BLOBS) as temporary:
        temporary.write_bytes(data)
        temporary.replace(blob_path(layout, digest_of(data)))
    return Descriptor(media_type, digest_of(data), len(data))
