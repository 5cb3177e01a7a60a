"""Define the documents that images consist of. Read and write images on disk: OCI layouts, archives, their layers."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import shutil
import tarfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from io import BufferedReader
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, Protocol

import zstandard

from imagebuild.core.errors import ConfigError, ResultError
from imagebuild.core.files import file_sha256, temporary_file, write_bytes
from imagebuild.core.run import os_errors_as_command_errors

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
    annotations: Mapping[str, str] = field(default_factory=dict, hash=False)

    def to_json(self) -> dict[str, Any]:
        os, _, architecture = (self.platform or "").partition("/")
        more = {
            "platform": {"os": os, "architecture": architecture} if os else None,
            "artifactType": self.artifact_type,
            "annotations": dict(sorted(self.annotations.items())),
        }
        document = {"mediaType": self.media_type, "digest": self.digest, "size": self.size}
        return document | {name: value for name, value in more.items() if value}

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

    @cached_property
    def digest(self) -> str:
        return digest_of(self.content)

    @property
    def document(self) -> dict[str, Any]:
        """Return the parsed content. Raises ValueError if it is not JSON."""
        return dict(json.loads(self.content))

    @property
    def descriptor(self) -> Descriptor:
        return Descriptor(self.media_type, self.digest, len(self.content))

    @property
    def as_referrer(self) -> Descriptor:
        """Return what names it, as the manifest of an attachment, in an index of referrers."""
        document = self.document
        artifact_type = document.get("artifactType") or (document.get("config") or {}).get("mediaType")
        annotations = document.get("annotations") or {}
        return replace(self.descriptor, artifact_type=artifact_type, annotations=annotations)


@dataclass(frozen=True)
class Attachment:
    """Hold a file that is stored in a manifest of its own, which refers to an image."""

    name: str
    media_type: str
    """Type of the file, and so of the attachment."""
    content: bytes
    annotations: Mapping[str, str] = field(default_factory=dict)

    def manifest(self, subject: Descriptor) -> Manifest:
        """Return its manifest, which refers to another. It holds no time but those in annotations."""
        layer = Descriptor(self.media_type, digest_of(self.content), len(self.content), annotations={TITLE: self.name})
        document = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "artifactType": self.media_type,
            "config": Descriptor(EMPTY_TYPE, digest_of(EMPTY), len(EMPTY)).to_json(),
            "layers": [layer.to_json()],
            "subject": Descriptor(subject.media_type, subject.digest, subject.size).to_json(),
        }
        notes = {"annotations": dict(self.annotations)} if self.annotations else {}
        return Manifest(encode_json(document | notes), MANIFEST)


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def encode_json(document: Mapping[str, Any]) -> bytes:
    """Return the canonical form of a document: the same document gives the same bytes."""
    return json.dumps(document, separators=(",", ":"), sort_keys=True, ensure_ascii=False).encode()


def platform_of(document: Mapping[str, Any]) -> str:
    """Return `linux/amd64`, of a configuration or a descriptor. A variant is left out: that of arm64 is always v8."""
    return f"{document.get('os', 'unknown')}/{document.get('architecture', 'unknown')}"


def blobs_of(document: Mapping[str, Any]) -> tuple[Descriptor, ...]:
    """Return the configuration and the layers that a manifest names, each once; an index names none."""
    items = [*([document["config"]] if document.get("config") else []), *document.get("layers", ())]
    return tuple({item["digest"]: Descriptor.from_json(item) for item in items}.values())


def manifests_of(document: Mapping[str, Any]) -> tuple[Descriptor, ...]:
    """Return the manifests that an index names; a manifest names none."""
    return tuple(Descriptor.from_json(item) for item in document.get("manifests", ()))


def index_document(manifests: Iterable[Descriptor]) -> bytes:
    """Return the canonical form of an index of these manifests, in this order."""
    items = [item.to_json() for item in manifests]
    return encode_json({"schemaVersion": 2, "mediaType": INDEX, "manifests": items})


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

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[bytes]:
        return self.chunks()


@dataclass(frozen=True, slots=True)
class Blob:
    """Locate a layer in a file, where it is or where it can be fetched to."""

    file: Path
    size: int
    digest: str | None = None
    """`sha256:…` of the bytes as stored; `open` compares them."""

    @contextmanager
    def open(self) -> Iterator[BufferedReader]:
        """Open the bytes for reading. Raises ResultError if they cannot be read, or are not what the digest says."""
        try:
            if self.digest and (digest := f"sha256:{file_sha256(self.file)}") != self.digest:
                raise ResultError(f"{self.file}: {self.digest}: is damaged: its digest is {digest}")
            with self.file.open("rb") as file:
                yield file
        except UNREADABLE as error:
            why = getattr(error, "strerror", None) or error
            raise ResultError(f"{self.file}: {self.digest or ''}: cannot be read: {why}") from None

    def read(self) -> bytes:
        """Return all of a small blob. Raises what `open` raises."""
        with self.open() as file:
            return file.read()

    @property
    def compression(self) -> Compression:
        """Return how the bytes are compressed as a whole; nothing if they are not."""
        with self.file.open("rb") as file:
            start = file.read(len(ZSTD))
        return "gzip" if start.startswith(GZIP) else "zstd" if start == ZSTD else ""


def decompressed(file: BufferedReader) -> Any:
    """Return what is in a file that may be compressed as a whole.

    Reading raises errors of zlib and zstandard, OSError or EOFError. Truncated zstd data end without an error.
    """
    head = file.peek(len(ZSTD))
    if head.startswith(GZIP):
        return gzip.GzipFile(fileobj=file)
    if head.startswith(ZSTD):
        return zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
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

INDEX_FILE, MARK_FILE = "index.json", "oci-layout"
BLOBS = "blobs/sha256"
MEMBER = re.compile(rf"(?:\./)?({INDEX_FILE}|{MARK_FILE}|{BLOBS}/[0-9a-f]{{64}})")
"""Names of members of an archive that are of an image."""
NO_IMAGE = "neither an OCI image layout nor an archive of one, as `docker save` writes it since Docker 25"


class BlobSource(Protocol):
    """Have blobs: a repository of a registry, or another layout."""

    def fetch(self, blob: Descriptor, path: Path) -> None:
        """Write a blob to a file, if it is not there yet; it appears under its name when it is whole."""


@dataclass(frozen=True)
class Layout:
    """Read and write the images of an OCI layout in a folder."""

    folder: Path

    def path(self, digest: str) -> Path:
        """Return where a blob is. Raises ResultError for what is no digest, and may lead out of the folder."""
        if not re.fullmatch("[a-z0-9]+:[0-9a-f]+", digest):
            raise ResultError(f"{self.folder}: {digest!r} is no digest")
        return self.folder / "blobs" / digest.replace(":", "/", 1)

    def named(self, digest: str, size: int | None = None) -> Iterator[tuple[str, int | None]]:
        """Yield digest and size of a manifest or an index and of everything below it, as far as it is here."""
        yield digest, size
        if not self._is_whole(digest, size):
            return
        document = json.loads(self.path(digest).read_bytes())
        for item in manifests_of(document):
            yield from self.named(item.digest, item.size)
        yield from ((item.digest, item.size) for item in blobs_of(document))

    def has(self, digest: str, size: int | None = None) -> bool:
        """Return whether an image, or an index with all its images, is here in full length."""
        return (self.folder / MARK_FILE).is_file() and all(self._is_whole(*part) for part in self.named(digest, size))

    def _is_whole(self, digest: str, size: int | None) -> bool:
        path = self.path(digest)
        return path.is_file() and size in (None, path.stat().st_size)

    def manifest(self, digest: str) -> Manifest:
        """Return a manifest or an index. Raises ResultError if it is missing or damaged."""
        content = self.blob(digest)
        document = json.loads(content)
        # It need not name its type.
        return Manifest(content, str(document.get("mediaType") or (INDEX if "manifests" in document else MANIFEST)))

    def blob(self, digest: str) -> bytes:
        """Return a document. Raises ResultError if it is missing or damaged."""
        return Blob(self.path(digest), 0, digest).read()

    def content(self, blob: Descriptor) -> BlobStream:
        """Return a blob, to be read when it is needed. Raises ResultError if not all of it is here."""
        path = self.path(blob.digest)
        if not self._is_whole(blob.digest, blob.size):
            raise ResultError(f"{self.folder}: does not have all of blob {blob.digest}; build it again")

        def chunks() -> Iterator[bytes]:
            # An OSError that ends an upload would be taken for one of the connection.
            with os_errors_as_command_errors(), path.open("rb") as file:
                while chunk := file.read(CHUNK):
                    yield chunk

        return BlobStream(blob.size, chunks)

    def fetch(self, blob: Descriptor, path: Path) -> None:
        """Copy a blob to a file, if that is not there yet; it appears under its name when it is whole."""
        if not path.exists():
            with temporary_file(path.parent) as temporary:
                shutil.copyfile(self.path(blob.digest), temporary)
                temporary.rename(path)

    def take(self, blob: Descriptor, source: BlobSource) -> Counter[str]:
        """Get a blob from another place, if it is not here yet. Return how many `blobs` and `bytes` that are."""
        if self.path(blob.digest).is_file():
            return Counter()
        source.fetch(blob, self.path(blob.digest))
        return Counter(blobs=1, bytes=blob.size)

    def put_manifest(self, manifest: Manifest) -> str:
        """Store a manifest whose parts are here, and return its digest."""
        write_bytes(self.path(manifest.digest), manifest.content)
        return manifest.digest

    # Writing

    def start(self) -> None:
        """Make an empty layout, if there is none. Its index stays empty: BuildKit is given digests."""
        if not (self.folder / MARK_FILE).exists():
            self.write_list([])

    def write_list(self, manifests: Iterable[Descriptor]) -> None:
        (self.folder / BLOBS).mkdir(parents=True, exist_ok=True)
        write_bytes(self.folder / INDEX_FILE, index_document(manifests))
        write_bytes(self.folder / MARK_FILE, b'{"imageLayoutVersion": "1.0.0"}')

    def write_index(self, manifests: Iterable[Descriptor]) -> str:
        """Make one image of manifests, one for each platform. Return its digest, for `oci-layout://…@digest`."""
        index = Manifest(index_document(sorted(manifests, key=lambda item: item.platform or "")), INDEX)
        self.write_list([index.descriptor])
        return self.put_manifest(index)

    def add_image(self, tar: Path, config: Mapping[str, Any]) -> Descriptor:
        """Add an image of one layer, whose digest the configuration gets. Return its descriptor, for `write_index`."""
        with temporary_file(self.folder / BLOBS) as path:
            # Without a name and a time, the digest depends on content alone.
            with tar.open("rb") as source, path.open("wb") as target, gzip.GzipFile("", "wb", 6, target, 0) as packed:
                shutil.copyfileobj(source, packed, CHUNK)
            layer = Descriptor(LAYER, f"sha256:{file_sha256(path)}", path.stat().st_size)
            path.replace(self.path(layer.digest))
        root = {"type": "layers", "diff_ids": [f"sha256:{file_sha256(tar)}"]}
        parts = {"schemaVersion": 2, "mediaType": MANIFEST, "layers": [layer.to_json()]}
        # The configuration is stored as a manifest is: byte for byte, under its digest.
        stored = Manifest(encode_json({**config, "rootfs": root}), CONFIG)
        manifest = Manifest(encode_json({**parts, "config": stored.descriptor.to_json()}), MANIFEST)
        for document in (stored, manifest):
            self.put_manifest(document)
        return replace(manifest.descriptor, platform=platform_of(config))


@contextmanager
def _opened(archive: Path | Iterable[bytes]) -> Iterator[Any]:
    """Open an archive, as far as tarfile needs a file that is a stream."""
    if isinstance(archive, Path):
        with archive.open("rb") as file:
            yield decompressed(file)
    else:
        chunks = filter(None, archive)
        yield SimpleNamespace(read=lambda _: next(chunks, b""))


def unpack(archive: Path | Iterable[bytes], folder: Path) -> Layout:
    """Unpack an archive of a layout, or a stream of one that an engine saves: what is of images, and nothing else.

    Raises ConfigError if it is no archive of a layout, ResultError if it cannot be read or stored.
    """
    try:
        with _opened(archive) as file, tarfile.open(fileobj=file, mode="r|", bufsize=CHUNK) as members:
            for member in members:
                name = MEMBER.fullmatch(member.name)
                if name and (content := members.extractfile(member)):
                    path = folder / name[1]
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with path.open("wb") as target:
                        shutil.copyfileobj(content, target, CHUNK)
    except tarfile.TarError as error:
        raise ConfigError(f"{archive}: {NO_IMAGE}: {error}") from None
    except UNREADABLE as error:
        raise ResultError(f"{archive}: cannot be read: {error}; TMPDIR may name another folder") from None
    return Layout(folder)
