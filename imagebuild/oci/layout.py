"""The documents of OCI images, and images on disk: layouts, archives and layers."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, cast

import zstandard

from imagebuild.core.errors import ConfigError, ResultError
from imagebuild.core.files import file_sha256, open_file, temporary_file, write_bytes
from imagebuild.core.run import os_errors_as_command_errors
from imagebuild.core.yaml import distinct_keys
from imagebuild.oci.tar import CHUNK, GZIP, ZSTD, Member, TarArchive, TarError, decompressed, member_path

Compression = Literal["", "gzip", "zstd"]
"""Compression of data. Empty if the data are not compressed."""
EPOCH, CREATED = "1754697600", "2025-08-09T00:00:00Z"
"""Timestamp of all files and images: always the release date of Debian 13, so that equal builds give equal digests."""
WHITEOUT, OPAQUE = ".wh.", ".wh..wh..opq"
"""Prefix of the name of a file that hides a file of lower layers, and name of a file that hides a whole folder of lower
layers."""
MOST_BYTES = 128 << 20
"""Maximum size in bytes of a document that is read. A registry could send a document of any size. cosign has the same
limit."""
KEPT_SIZE = 32 << 20
"""Maximum size in bytes of a file in a layer whose content `verify` keeps."""

INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
PLAIN_LAYER = "application/vnd.oci.image.layer.v1.tar"
"""Media type of a layer that engines do not decompress."""
DOCKER_INDEX = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
INDEX_TYPES = (INDEX, DOCKER_INDEX)
MANIFEST_TYPES = (INDEX, MANIFEST, DOCKER_INDEX, DOCKER_MANIFEST)
EMPTY = b"{}"
EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
TITLE = "org.opencontainers.image.title"
"""Annotation with the file name of an attachment."""
ARCHITECTURES = {
    "i386": "386", "x86_64": "amd64", "x86-64": "amd64", "aarch64": "arm64", "armhf": "arm/v7", "armel": "arm/v6",
}  # fmt: skip
"""Maps other names of architectures, which engines accept in an index, to the names of the OCI specification."""
USUAL_VARIANTS = {"amd64": ("v1",), "arm64": ("v8", "8"), "arm": ("v7", "7")}
"""Variants of each architecture that mean the same as no variant."""
MOST_MANIFESTS = 1000
"""Maximum number of manifests in an index, and of attachments of an image. Each of them costs requests."""
REFERRERS_TAG = re.compile(r"sha256-([0-9a-f]{64})(?:\.([a-z]+))?")
"""Matches tags that do not name images: tags of lists of attachments, and tags of attachments that cosign 2 wrote."""
ANY_DIGEST = re.compile(r"[a-z0-9]+([+._-][a-z0-9]+)*:[A-Za-z0-9=_-]+")
"""Matches digests of all algorithms, as the OCI specification defines them."""
UNREADABLE = (EOFError, OSError, ValueError, zlib.error, zstandard.ZstdError)
"""Errors caused by damaged or truncated content."""
INDEX_FILE, MARK_FILE = "index.json", "oci-layout"
BLOBS = "blobs/sha256"
MEMBER = re.compile(rf"(?:\./)?({INDEX_FILE}|{MARK_FILE}|{BLOBS}/[0-9a-f]{{64}})")
"""Matches the members of an archive that belong to a layout."""
NO_IMAGE = "neither an OCI image layout nor an archive with one, as `docker save` writes it since Docker 25"


MAPS = frozenset({"annotations", "ExposedPorts", "Labels", "Volumes"})
"""Objects whose keys are texts of the author. All other keys are those of the OCI specification."""
KEYS = (
    "annotations", "architecture", "artifactType", "author", "comment", "config", "created", "created_by", "data",
    "diff_ids", "digest", "empty_layer", "history", "layers", "manifests", "mediaType", "os", "os.features",
    "os.version", "platform", "rootfs", "schemaVersion", "size", "subject", "type", "urls", "variant", "ArgsEscaped",
    "Cmd", "Entrypoint", "Env", "ExposedPorts", "Healthcheck", "Labels", "OnBuild", "Shell", "StopSignal", "Test",
    "User", "Volumes", "WorkingDir",
)  # fmt: skip
FOLDED = {key.casefold(): key for key in KEYS}


def parse_document(content: bytes) -> Any:
    """Return the JSON value in a manifest, an index or a configuration.

    Raises ValueError if it is not JSON, or if engines may read another value: Go ignores the case of keys, so that
    `Layers` replaces `layers`, and merges objects whose key appears twice."""
    try:
        document = json.loads(content, object_pairs_hook=distinct_keys)
        _check_case(document)
        json.dumps(document, ensure_ascii=False).encode()  # Go replaces texts that are not Unicode
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
    return document


def _check_case(value: Any) -> None:
    if isinstance(value, list):
        for item in value:
            _check_case(item)
    elif isinstance(value, dict):
        for key, inner in value.items():
            if (read_as := FOLDED.get(key.casefold(), key)) != key:
                raise ValueError(f"engines read the key {key!r} as {read_as!r}")
            if key not in MAPS:
                _check_case(inner)


@dataclass(frozen=True)
class Descriptor:
    """An OCI descriptor: the type, digest and size of a blob or a manifest."""

    media_type: str
    digest: str
    size: int
    platform: str | None = None
    """Platform of an image in an index, such as `linux/arm64`."""
    artifact_type: str | None = None
    annotations: Mapping[str, str] = field(default_factory=dict, hash=False)

    def to_json(self) -> dict[str, Any]:
        """Return the descriptor as a JSON object, as the OCI specification defines it."""
        parts = (self.platform or "").split("/")
        more = {
            "platform": dict(zip(("os", "architecture", "variant"), parts, strict=False)) if self.platform else None,
            "artifactType": self.artifact_type,
            "annotations": dict(sorted(self.annotations.items())),
        }
        document = {"mediaType": self.media_type, "digest": self.digest, "size": self.size}
        return document | {name: value for name, value in more.items() if value}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Descriptor:
        """Return the descriptor in a JSON object.
        Raises LookupError, TypeError or AttributeError if the object is not a descriptor."""
        texts = (document["mediaType"], document["digest"], document.get("artifactType") or "")
        if {*map(type, texts)} != {str} or type(document["size"]) is not int:
            raise TypeError("the type or digest of a descriptor is not a text, or the size is not a number")
        if not ANY_DIGEST.fullmatch(document["digest"]):  # it becomes a part of URLs
            raise TypeError(f"{document['digest']!r} is not a digest")
        place = document.get("platform") or {}
        if place.get("os.features") and place.get("os") != "windows":
            raise TypeError("os.features: engines do not agree which image they run")
        return cls(
            media_type=document["mediaType"], digest=document["digest"], size=document["size"],
            platform=platform_of(document["platform"]) if document.get("platform") else None,
            artifact_type=document.get("artifactType"), annotations=annotations_of(document),
        )  # fmt: skip


@dataclass(frozen=True)
class Manifest:
    """The bytes of a manifest or an index."""

    content: bytes
    media_type: str

    @cached_property
    def digest(self) -> str:
        return digest_of(self.content)

    @property
    def document(self) -> dict[str, Any]:
        """The parsed content. Raises ValueError if it is not JSON, or if it is both a manifest and an index."""
        document = dict(parse_document(self.content))
        if document.get("manifests") and (document.get("layers") or document.get("config")):
            raise ValueError("it is both a manifest and an index, which engines refuse")
        return document

    @property
    def descriptor(self) -> Descriptor:
        return Descriptor(self.media_type, self.digest, len(self.content))

    @property
    def as_referrer(self) -> Descriptor:
        """The descriptor of this manifest in a referrers index, the list of the attachments of an image.
        Only for the manifest of an attachment."""
        document = self.document
        artifact_type = document.get("artifactType") or (document.get("config") or {}).get("mediaType")
        return replace(self.descriptor, artifact_type=artifact_type, annotations=annotations_of(document))


@dataclass(frozen=True)
class Attachment:
    """A file that a registry stores with its own manifest. The manifest refers to an image."""

    name: str
    media_type: str
    """Media type of the file. The attachment has the same artifact type."""
    content: bytes
    annotations: Mapping[str, str] = field(default_factory=dict)

    def manifest(self, subject: Descriptor) -> Manifest:
        """Return the manifest that attaches the file to the image `subject`. Times are stored only in annotations."""
        layer = Descriptor(self.media_type, digest_of(self.content), len(self.content), annotations={TITLE: self.name})
        document = {
            "schemaVersion": 2, "mediaType": MANIFEST, "artifactType": self.media_type,
            "config": Descriptor(EMPTY_TYPE, digest_of(EMPTY), len(EMPTY)).to_json(), "layers": [layer.to_json()],
            "subject": Descriptor(subject.media_type, subject.digest, subject.size).to_json(),
        }  # fmt: skip
        notes = {"annotations": dict(self.annotations)} if self.annotations else {}
        return Manifest(encode_json(document | notes), MANIFEST)


def digest_of(content: bytes) -> str:
    """Return the digest of some bytes: `sha256:…`."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def encode_json(document: Mapping[str, Any]) -> bytes:
    """Return a document as canonical JSON: equal documents give equal bytes."""
    return json.dumps(document, separators=(",", ":"), sort_keys=True, ensure_ascii=False).encode()


def platform_of(document: Mapping[str, Any]) -> str:
    """Return the platform in a configuration or a descriptor, such as `linux/amd64` or `linux/arm/v6`.

    As in engines, `x86_64` means `amd64`, no system means Linux, and the usual variant of an architecture means no
    variant. A part is `unknown` if it is not a word, such as `--pull`, or if the architecture is missing."""
    os, named, variant = (str(document.get(key) or "").lower() for key in ("os", "architecture", "variant"))
    architecture, _, of_name = ARCHITECTURES.get(named, named).partition("/")
    variant = of_name or variant
    parts = (os or "linux", architecture, *([variant] if variant else []))
    if variant in USUAL_VARIANTS.get(architecture, ()):
        parts = parts[:2]
    return "/".join(part if re.fullmatch("[a-z0-9][a-z0-9._-]*", part) else "unknown" for part in parts)


def blobs_of(document: Mapping[str, Any]) -> tuple[Descriptor, ...]:
    """Return the configuration and the layers of a manifest, each once.
    Return an empty tuple if the document is an index."""
    items = [*([document["config"]] if document.get("config") else []), *document.get("layers", ())]
    return tuple({item["digest"]: Descriptor.from_json(item) for item in items}.values())


def annotations_of(document: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the annotations of a manifest or descriptor. Raises TypeError or AttributeError if they are not texts."""
    notes = document.get("annotations") or {}
    if not all(isinstance(text, str) for text in notes.values()):
        raise TypeError("an annotation is not a text")
    return cast(Mapping[str, str], notes)


def manifests_of(document: Mapping[str, Any]) -> tuple[Descriptor, ...]:
    """Return the manifests in an index. Return an empty tuple if the document is itself a manifest.
    Raises LookupError, TypeError, ValueError or AttributeError if the document is not an index of manifests."""
    items = document.get("manifests", ())
    if len(items) > MOST_MANIFESTS:
        raise ValueError(f"there are {len(items)} manifests or attachments, the maximum is {MOST_MANIFESTS}")
    return tuple(map(Descriptor.from_json, items))


def index_document(manifests: Iterable[Descriptor]) -> bytes:
    """Return an index that lists the given manifests in the given order, as canonical JSON."""
    items = [item.to_json() for item in manifests]
    return encode_json({"schemaVersion": 2, "mediaType": INDEX, "manifests": items})


def referrers_tag(digest: str) -> str:
    """Return the tag that lists the attachments of a manifest, for registries without the referrers API."""
    return digest.replace(":", "-", 1)


@dataclass(frozen=True)
class BlobStream:
    """A blob that is read while it is sent."""

    size: int
    chunks: Callable[[], Iterator[bytes]]

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[bytes]:
        return self.chunks()


@dataclass(frozen=True, slots=True)
class Blob:
    """A layer, and the file with its content. The file may not exist until the layer is fetched."""

    file: Path
    size: int
    digest: str | None = None
    """Digest of the stored bytes: `sha256:…`. `open` checks it."""
    diff_id: str | None = None
    """Digest of the decompressed bytes: `sha256:…`. `layer_members` checks it."""
    may_be_compressed: bool = True
    annotations: Mapping[str, str] = field(default_factory=dict, hash=False)

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """Open the file for reading.
        Raises ResultError if the file cannot be read or has another digest than `digest`."""
        try:
            with open_file(self.file) as file:
                if self.digest and (digest := f"sha256:{file_sha256(self.file)}") != self.digest:
                    raise ResultError(f"{self.file}: {self.digest}: the content is damaged; its digest is {digest}")
                yield file
        except UNREADABLE as error:
            why = getattr(error, "strerror", None) or error
            raise ResultError(f"{self.file}: {self.digest or ''}: cannot be read: {why}") from None

    def read(self) -> bytes:
        """Return the content of a small blob. Raises ResultError as `open` does, and if the blob is too large."""
        with self.open() as file:
            if (size := self.file.stat().st_size) > MOST_BYTES:
                raise TarError(f"{size >> 20} MiB is too large for a document")
            return file.read()

    @property
    def compression(self) -> Compression:
        """The compression of the file. Empty if it is not compressed."""
        with self.file.open("rb") as file:
            start = file.read(len(ZSTD))
        return "gzip" if start.startswith(GZIP) else "zstd" if start == ZSTD else ""


@contextmanager
def layer_members(blob: Blob) -> Iterator[Iterator[tuple[TarArchive, Member, str]]]:
    """Open a layer, and yield an iterator over its members.

    The iterator yields the archive (to read the content), the member and its path in the image, in the order of the
    archive. Raises ResultError, also during the iteration, if the layer cannot be read, or if the stored or the
    decompressed bytes have another digest."""

    def members(archive: TarArchive) -> Iterator[tuple[TarArchive, Member, str]]:
        for member in archive:
            if (path := member_path(member.name)) is not None:
                yield archive, member, path
        if (digest := archive.digest()) != (blob.diff_id or digest):
            raise TarError(f"the digest after decompression is {digest}, but {blob.diff_id} in the configuration")

    with blob.open() as file:
        if (size := blob.file.stat().st_size) != blob.size:
            raise TarError(f"its size is {size} bytes, but {blob.size} in the manifest")
        yield members(TarArchive(decompressed(file) if blob.may_be_compressed else iter(lambda: file.read(CHUNK), b"")))


class BlobSource(Protocol):
    """A place with blobs: a repository in a registry, or a layout."""

    def fetch(self, blob: Descriptor, path: Path) -> None:
        """Write a blob to a file, unless the file exists. The file appears only when it is complete."""


@dataclass(frozen=True)
class Layout:
    """An OCI layout in a folder."""

    folder: Path

    def path(self, digest: str) -> Path:
        """Return the path of a blob.
        Raises ResultError if the digest is invalid: an invalid digest could lead outside the folder."""
        if not re.fullmatch("[a-z0-9]+:[0-9a-f]+", digest):
            raise ResultError(f"{self.folder}: {digest!r} is not a digest")
        return self.folder / "blobs" / digest.replace(":", "/", 1)

    def named(self, digest: str, size: int | None = None) -> Iterator[tuple[str, int | None]]:
        """Yield the digest and size of a manifest or an index.
        If the layout contains this document, also yield the digest and size of each of its parts."""
        yield digest, size
        if not self._is_whole(digest, size):
            return
        document = json.loads(self.path(digest).read_bytes())
        for item in manifests_of(document):
            yield from self.named(item.digest, item.size)
        yield from ((item.digest, item.size) for item in blobs_of(document))

    def has(self, digest: str, size: int | None = None) -> bool:
        """Return whether the layout contains an image, or an index with all its images.
        Only sizes are checked, not digests."""
        return (self.folder / MARK_FILE).is_file() and all(self._is_whole(*part) for part in self.named(digest, size))

    def _is_whole(self, digest: str, size: int | None) -> bool:
        path = self.path(digest)
        return path.is_file() and size in (None, path.stat().st_size)

    def manifest(self, digest: str) -> Manifest:
        """Return a manifest or an index. Raises ResultError if it is missing or damaged."""
        content = self.blob(digest)
        document = json.loads(content)
        # The media type in a manifest is optional.
        return Manifest(content, str(document.get("mediaType") or (INDEX if "manifests" in document else MANIFEST)))

    def blob(self, digest: str) -> bytes:
        """Return the content of a small blob. Raises ResultError if it is missing or damaged."""
        return Blob(self.path(digest), 0, digest).read()

    def content(self, blob: Descriptor) -> BlobStream:
        """Return a stream of a blob. Raises ResultError if the blob is missing or truncated."""
        path = self.path(blob.digest)
        if not self._is_whole(blob.digest, blob.size):
            raise ResultError(f"{self.folder}: blob {blob.digest} is missing or truncated; build the image again")

        def chunks() -> Iterator[bytes]:
            # During an upload, an OSError would look like an error of the connection.
            with os_errors_as_command_errors(), path.open("rb") as file:
                while chunk := file.read(CHUNK):
                    yield chunk

        return BlobStream(blob.size, chunks)

    def fetch(self, blob: Descriptor, path: Path) -> None:
        """Copy a blob to a file, unless the file exists. The file appears only when it is complete.
        Raises ResultError if the layout lacks the blob."""
        if not path.exists():
            if not self.path(blob.digest).is_file():
                raise ResultError(f"{self.folder}: blob {blob.digest} is missing; build or fetch the image again")
            with temporary_file(path.parent) as temporary:
                shutil.copyfile(self.path(blob.digest), temporary)
                temporary.rename(path)

    def take(self, blob: Descriptor, source: BlobSource) -> Counter[str]:
        """Copy a blob from another layout or a registry, unless this layout contains the blob.
        Return the number of `blobs` and `bytes` that were copied."""
        if self.path(blob.digest).is_file():
            return Counter()
        source.fetch(blob, self.path(blob.digest))
        return Counter(blobs=1, bytes=blob.size)

    def put_manifest(self, manifest: Manifest) -> str:
        """Store a manifest, and return its digest."""
        write_bytes(self.path(manifest.digest), manifest.content)
        return manifest.digest

    def start(self) -> None:
        """Create an empty layout, unless it exists. Its index stays empty, because BuildKit finds images by digest."""
        if not (self.folder / MARK_FILE).exists():
            self.write_list([])

    def write_list(self, manifests: Iterable[Descriptor]) -> None:
        """Write the index of the layout (index.json)."""
        (self.folder / BLOBS).mkdir(parents=True, exist_ok=True)
        write_bytes(self.folder / INDEX_FILE, index_document(manifests))
        write_bytes(self.folder / MARK_FILE, b'{"imageLayoutVersion": "1.0.0"}')

    def write_index(self, manifests: Iterable[Descriptor]) -> str:
        """Combine manifests of different platforms into one image. Return its digest."""
        index = Manifest(index_document(sorted(manifests, key=lambda item: item.platform or "")), INDEX)
        self.write_list([index.descriptor])
        return self.put_manifest(index)

    def join(self, digests: Iterable[tuple[str, str]]) -> str:
        """Combine the images in the layout into one, byte for byte as BuildKit does it, and return its digest.

        `digests` are pairs of a platform and the digest of its manifest, in the order of the platforms in the build."""
        items = []
        for platform, digest in digests:
            item = self.manifest(digest).descriptor.to_json()
            system, cpu, *variant = platform.split("/")
            names = {"architecture": cpu, "os": system, **({"variant": variant[0]} if variant else {})}
            items.append({name: item[name] for name in ("mediaType", "digest", "size")} | {"platform": names})
        document = {"schemaVersion": 2, "mediaType": INDEX, "manifests": items}
        index = Manifest(json.dumps(document, indent=2).encode(), INDEX)
        self.write_list([index.descriptor])
        return self.put_manifest(index)

    def add_image(self, tar: Path, config: Mapping[str, Any]) -> Descriptor:
        """Add an image with one layer, and return its descriptor for `write_index`.
        The digest of the layer is added to `config`."""
        with temporary_file(self.folder / BLOBS) as path:
            # No name and no time in the gzip header: the digest depends only on the content.
            with tar.open("rb") as source, path.open("wb") as target, gzip.GzipFile("", "wb", 6, target, 0) as packed:
                shutil.copyfileobj(source, packed, CHUNK)
            layer = Descriptor(LAYER, f"sha256:{file_sha256(path)}", path.stat().st_size)
            path.replace(self.path(layer.digest))
        root = {"type": "layers", "diff_ids": [f"sha256:{file_sha256(tar)}"]}
        parts = {"schemaVersion": 2, "mediaType": MANIFEST, "layers": [layer.to_json()]}
        # The configuration is stored in the same way as a manifest: unchanged, under its digest.
        stored = Manifest(encode_json({**config, "rootfs": root}), CONFIG)
        manifest = Manifest(encode_json({**parts, "config": stored.descriptor.to_json()}), MANIFEST)
        for document in (stored, manifest):
            self.put_manifest(document)
        return replace(manifest.descriptor, platform=platform_of(config))


def layouts_in(folder: Path) -> list[Path]:
    """Return the complete layouts in a folder, such as those of bootstrapped images of one release.
    The name of each layout's folder is the digest of its image."""
    folders = folder.iterdir() if folder.is_dir() else ()
    return [path for path in folders if Layout(path).has(f"sha256:{path.name}")]


def unpack(archive: Path | Iterable[bytes], folder: Path) -> Layout:
    """Unpack an archive with a layout, or the stream of `docker save`. Other files in the archive are ignored.

    Raises ConfigError if the archive does not contain a layout, and ResultError if the archive cannot be read or
    unpacked."""
    try:
        with ExitStack() as stack:
            if isinstance(archive, Path):
                members = TarArchive(decompressed(stack.enter_context(open_file(archive))))
            else:
                members = TarArchive(archive)
            for member in members:
                if (name := MEMBER.fullmatch(member.name)) and member.kind == "file":
                    path = folder / name[1]
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with path.open("wb") as target:
                        target.writelines(members.content())
    except TarError as error:
        raise ConfigError(f"{archive}: {NO_IMAGE}: {error}") from None
    except UNREADABLE as error:
        remedy = "if the disk is full, set TMPDIR to a folder with more space"
        raise ResultError(f"{archive}: cannot be read: {error}; {remedy}") from None
    return Layout(folder)
