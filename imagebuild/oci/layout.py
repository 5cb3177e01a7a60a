"""Define the documents that images consist of. Read and write images on disk: OCI layouts, archives, their layers."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import posixpath
import shutil
import tarfile
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import IO, Any, cast
from uuid import uuid4

import zstandard

from imagebuild.core.errors import CommandError, ConfigError, ResultError
from imagebuild.core.fields import full_reference
from imagebuild.core.run import RunProgram, run_program, which

CHUNK = 1 << 20
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
"""Beginnings of compressed data."""
EPOCH, CREATED = "1754697600", "2025-08-09T00:00:00Z"
"""Time of the oldest files and of images, so that times do not differ from run to run: the day Debian 13 came out."""
WHITEOUT, OPAQUE = ".wh.", ".wh..wh..opq"
"""Beginning of the name that hides a file of lower layers, and the name that hides all of a folder."""
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
    """Name a blob or a manifest."""

    media_type: str
    digest: str
    size: int
    platform: str | None = None
    """`linux/arm64`, of an image in an index."""
    artifact_type: str | None = None
    """Of an attachment: what it is."""
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
        platform = document.get("platform") or {}
        return cls(
            media_type=document["mediaType"],
            digest=document["digest"],
            size=document["size"],
            platform="/".join(platform[k] for k in ("os", "architecture", "variant") if platform.get(k)) or None,
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
class AttachmentFile:
    """Hold a file of an attachment, which is a manifest that refers to an image."""

    name: str
    media_type: str
    content: bytes


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
    """Return the platform of a configuration or descriptor: `linux/amd64`. The variant of arm64 is always v8, and
    left out.
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


def config_json(platform: str, diff_id: str, settings: ImageSettings) -> dict[str, Any]:
    """Return the configuration of an image of one layer; `diff_id` is the digest of the uncompressed tar."""
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


def index_json(manifests: Iterable[Descriptor]) -> dict[str, Any]:
    """Return an index of these manifests, in this order."""
    return {"schemaVersion": 2, "mediaType": INDEX, "manifests": [item.to_json() for item in manifests]}


def index_document(manifests: Iterable[Descriptor]) -> bytes:
    """Return the canonical form of an index of these manifests, in this order."""
    return encode_json(index_json(manifests))


def attachment_manifest(
    subject: Descriptor, artifact_type: str, files: Iterable[AttachmentFile], annotations: Mapping[str, str]
) -> bytes:
    """Return the manifest of files that refer to another manifest. It holds no time but those in annotations."""
    empty = Descriptor(EMPTY_TYPE, digest_of(EMPTY), len(EMPTY))
    layers = [
        Descriptor(file.media_type, digest_of(file.content), len(file.content), annotations={TITLE: file.name})
        for file in files
    ]
    document = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "artifactType": artifact_type,
        "config": empty.to_json(),
        # The specification demands a layer: without files it is the empty one.
        "layers": [layer.to_json() for layer in layers or [empty]],
        "subject": Descriptor(subject.media_type, subject.digest, subject.size).to_json(),
    }
    return encode_json(document | ({"annotations": dict(annotations)} if annotations else {}))


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


def referrers_tag(digest: str) -> str:
    """Return the tag that lists what refers to a manifest, where the registry has no API for it."""
    return digest.replace(":", "-", 1)


# Reading


@dataclass(frozen=True, slots=True)
class Blob:
    """Name bytes in a file: all of it, or a member of a tar, which needs no unpacking."""

    file: Path
    offset: int
    size: int
    digest: str | None = None
    """`sha256:…` of the bytes as stored; whoever reads them compares."""
    name: str = ""

    def read(self) -> bytes:
        """Return all of a small blob. Raises ResultError if it is not what its digest says."""
        try:
            with self.file.open("rb") as file:
                file.seek(self.offset)
                data = file.read(self.size)
        except OSError as error:
            raise ResultError(f"{self.file}: cannot be read: {error.strerror}") from None
        if self.digest and self.digest.startswith("sha256:") and digest_of(data) != self.digest:
            raise ResultError(
                f"{self.file}: {self.name or self.digest}: is damaged: its digest is {digest_of(data)}; save it again"
            )
        return data


@dataclass(frozen=True, slots=True)
class LayoutImage:
    """Hold an image for one platform."""

    platform: str
    digest: str | None
    """Of the manifest; None for an archive that has none."""
    config: Mapping[str, Any]
    layers: tuple[Blob, ...]
    stored: tuple[Blob, ...] = ()
    """Manifest, configuration and layers, each by its digest; empty for an archive that has no manifest."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """Return what its containers start with: Env, User, Labels, …"""
        return self.config.get("config") or {}

    @property
    def labels(self) -> dict[str, str]:
        """Return the labels."""
        return dict(self.settings.get("Labels") or {})

    @property
    def env(self) -> dict[str, str]:
        """Return the environment that its containers start with."""
        pairs = (str(item).partition("=") for item in self.settings.get("Env") or ())
        return {name: value for name, _, value in pairs}


@dataclass(frozen=True)
class _StoredFiles:
    """Files of a layout or an archive, by their names in it."""

    path: Path
    blobs: Mapping[str, Blob]

    def member(self, name: str) -> Blob:
        """Return a file. Raises ResultError if it is missing."""
        if name not in self.blobs:
            raise ResultError(f"{self.path}: {name} is missing")
        return self.blobs[name]

    def blob(self, digest: str) -> Blob:
        """Return a blob of a layout. Raises ResultError if it is missing."""
        return replace(self.member(_blob_name(digest)), digest=digest, name=digest)

    def manifests(self, index: bytes, platform: str | None = None) -> Iterator[tuple[str, str | None]]:
        """Yield digest and platform of every image in an index and the indexes in it, without attestations."""
        items = json.loads(index)["manifests"]
        for item in items:
            own = platform_of(item["platform"]) if item.get("platform") else platform
            if (own or "").startswith("unknown/") or "vnd.docker.reference.type" in (item.get("annotations") or {}):
                continue
            if _blob_name(item["digest"]) not in self.blobs:
                if len(items) > 1:
                    continue  # an engine saves the whole index, but only the platforms that it has
                raise ResultError(f"{self.path}: {item['digest']} is missing")
            if item.get("mediaType") in INDEX_TYPES:
                yield from self.manifests(self.blob(item["digest"]).read(), own)
            else:
                yield item["digest"], own

    def image_of_manifest(self, digest: str, platform: str | None) -> LayoutImage:
        """Return the image of a manifest."""
        content = self.blob(digest)
        manifest = json.loads(content.read())
        settings = self.blob(manifest["config"]["digest"])
        config = json.loads(settings.read())
        layers = tuple(self.blob(layer["digest"]) for layer in manifest["layers"] or ())
        return LayoutImage(platform or platform_of(config), digest, config, layers, (content, settings, *layers))

    def image_of_archive(self, item: Mapping[str, Any]) -> LayoutImage:
        """Return an image as engines before 25 save it: layers are plain tars, their digests in the configuration."""
        config = json.loads(self.member(item["Config"]).read())
        layers = [self.member(name) for name in item["Layers"] or ()]
        pairs = zip(layers, config["rootfs"]["diff_ids"] or (), strict=True)
        return LayoutImage(
            platform_of(config), None, config, tuple(replace(blob, digest=digest) for blob, digest in pairs)
        )


def images_in(source: Path | Iterable[bytes], folder: Path) -> tuple[LayoutImage, ...]:
    """Return the images in a folder, a file, or a stream that an engine saves: one for each platform.

    `folder` takes what has to be stored: a stream, or the content of an archive that is compressed as a whole.
    Raises ConfigError if the path is no image, ResultError if the image cannot be read.
    """
    if isinstance(source, Path):
        path = source
    else:
        path = folder / "saved.tar"
        try:
            with path.open("wb") as file:
                file.writelines(source)
        except OSError as error:
            raise ResultError(f"{path}: the image cannot be stored: {error.strerror}") from None
    if not path.exists():
        raise ConfigError(f"{path}: does not exist")
    if path.is_dir():
        members = (file for file in path.rglob("*") if file.is_file())
        blobs = {file.relative_to(path).as_posix(): Blob(file, 0, file.stat().st_size) for file in members}
    else:
        blobs = _members_of_tar(_uncompressed_archive(path, folder))
    files = _StoredFiles(path, blobs)
    try:
        if "index.json" in blobs:
            digests = dict.fromkeys(files.manifests(blobs["index.json"].read()))
            result = [files.image_of_manifest(digest, platform) for digest, platform in digests]
        elif "manifest.json" in blobs:
            result = [files.image_of_archive(item) for item in json.loads(blobs["manifest.json"].read())]
        else:
            raise ConfigError(f"{path}: neither an OCI image layout nor an archive of `docker save`")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ResultError(f"{path}: not an image that can be read: {type(error).__name__}: {error}") from None
    if not result:
        raise ResultError(f"{path}: holds no image")
    platforms = Counter(image.platform for image in result)
    platform, count = platforms.most_common(1)[0]
    if count > 1:
        raise ConfigError(f"{path}: holds several images for {platform}; save one of them alone")
    return tuple(result)


def _blob_name(digest: str) -> str:
    return "blobs/" + digest.replace(":", "/", 1)


def _members_of_tar(path: Path) -> dict[str, Blob]:
    try:
        with tarfile.open(path, "r:") as archive:
            members = archive.getmembers()
    except tarfile.TarError as error:
        raise ConfigError(f"{path}: neither an OCI image layout nor an archive of `docker save`: {error}") from None
    except OSError as error:
        raise ResultError(f"{path}: cannot be read: {error.strerror}") from None
    blobs = {m.name.removeprefix("./"): Blob(path, m.offset_data, m.size) for m in members if m.isreg()}
    for link in (m for m in members if m.issym() or m.islnk()):  # engines save a layer once
        name = str(Path(link.name).parent / link.linkname) if link.issym() else link.linkname
        # Names that lead above the archive end at its top, as below the root of a file system.
        if target := posixpath.normpath(f"/{name}").strip("/"):
            blobs.setdefault(link.name, blobs.get(target, Blob(path, 0, 0, "sha256:missing")))
    return blobs


def _uncompressed_archive(path: Path, folder: Path) -> Path:
    """Return the archive itself, or what is in it if all of it is compressed."""
    try:
        with path.open("rb") as file:
            head = file.read(4)
            file.seek(0)
            if head.startswith(GZIP):
                reader = cast(IO[bytes], gzip.GzipFile(fileobj=file))
            elif head.startswith(ZSTD):
                reader = cast(IO[bytes], zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True))
            else:
                return path
            unpacked = folder / "unpacked.tar"
            with unpacked.open("wb") as target:
                shutil.copyfileobj(reader, target, CHUNK)
            return unpacked
    except (OSError, EOFError, zstandard.ZstdError) as error:
        raise ResultError(f"{path}: cannot be read: {error}") from None


def blob_path(layout: Path, digest: str) -> Path:
    """Return where a layout keeps a blob."""
    return layout / _blob_name(digest)


def blobs_named(layout: Path, digest: str, size: int | None = None) -> Iterator[tuple[str, int | None]]:
    """Yield digest and size of a manifest or an index and of everything below it, as far as the layout has it."""
    yield digest, size
    path = blob_path(layout, digest)
    if not path.is_file() or size not in (None, path.stat().st_size):
        return
    document = json.loads(path.read_bytes())
    for item in document.get("manifests", ()):
        yield from blobs_named(layout, item["digest"], item["size"])
    for item in [*([document["config"]] if "config" in document else []), *document.get("layers", ())]:
        yield item["digest"], item["size"]


def missing_blobs(layout: Path, digest: str, size: int | None = None) -> Iterator[str]:
    """Yield the digests of what an image or an index names and the layout does not have in full length."""
    for name, length in blobs_named(layout, digest, size):
        path = blob_path(layout, name)
        if not path.is_file() or length not in (None, path.stat().st_size):
            yield name


def has_image(layout: Path, digest: str) -> bool:
    """Return whether an image, or an index with all its images, is there in full length."""
    return (layout / "oci-layout").is_file() and not any(missing_blobs(layout, digest))


def is_complete(layout: Path, manifest: Descriptor) -> bool:
    """Return whether a manifest and everything that it names is there in full length."""
    return not any(missing_blobs(layout, manifest.digest, manifest.size))


def check_image(layout: Path, digest: str) -> None:
    """Raise ResultError if anything that an image names is missing or has changed."""
    for name, size in blobs_named(layout, digest):
        path = blob_path(layout, name)
        if not path.is_file() or size not in (None, path.stat().st_size):
            raise ResultError(f"{path}: is missing or cut off; make the bundle again")
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != path.name:
                raise ResultError(f"{path}: has changed; make the bundle again")


def read_index(layout: Path) -> tuple[Descriptor, ...]:
    """Return the manifests of the image that `write_index` wrote last. Raises ResultError if there is none."""
    try:
        image = json.loads((layout / "index.json").read_bytes())["manifests"][0]
        return manifests_of(json.loads(blob_path(layout, image["digest"]).read_bytes()))
    except (OSError, ValueError, LookupError, TypeError) as error:
        message = f"{layout}: not an OCI image layout with an index ({error}); remove the folder"
        raise ResultError(message) from error


def layer_of(layout: Path, platform: str) -> Path:
    """Return the layer of the image that `write_index` wrote last, for a platform. Raises what `read_index` raises."""
    manifest = next(item for item in read_index(layout) if item.platform == platform)
    return blob_path(layout, json.loads(blob_path(layout, manifest.digest).read_bytes())["layers"][0]["digest"])


# Writing


def start_layout(layout: Path) -> None:
    """Make an empty layout, if there is none. Its index stays empty: BuildKit is given digests."""
    (layout / "blobs" / "sha256").mkdir(parents=True, exist_ok=True)
    if not (layout / "oci-layout").exists():
        (layout / "index.json").write_text(json.dumps(index_json([])))
        (layout / "oci-layout").write_text(json.dumps({"imageLayoutVersion": "1.0.0"}))


def add_image(layout: Path, tar: Path, platform: str, settings: ImageSettings) -> Descriptor:
    """Add `tar` as an image of one layer. Return its descriptor, for `write_index`."""
    return _add_manifest(layout, *_add_layer(layout, tar), platform, settings)


def add_tree(layout: Path, tar: Path, platforms: Iterable[str], settings: ImageSettings) -> str:
    """Add `tar`, not compressed, as an image that is the same for all `platforms`. Return the digest of its index."""
    layer, diff_id = _add_layer(layout, tar, level=0)
    return write_index(layout, [_add_manifest(layout, layer, diff_id, platform, settings) for platform in platforms])


def write_index(layout: Path, manifests: Sequence[Descriptor]) -> str:
    """Make one image of manifests, one for each platform. Return its digest, for `oci-layout://…@digest`."""
    index = _add_document(layout, INDEX, index_json(sorted(manifests, key=lambda item: item.platform or "")))
    for path, document in {"oci-layout": {"imageLayoutVersion": "1.0.0"}, "index.json": index_json([index])}.items():
        with _temporary(layout) as temporary:
            temporary.write_text(json.dumps(document, indent=2))
            temporary.replace(layout / path)
    return index.digest


def prune_blobs(layout: Path, keep: Iterable[Descriptor], older_than: float) -> None:
    """Remove blobs that no manifest of `keep` needs and that were written before the time `older_than`.

    Younger ones stay: a build that started before may still read them.
    """
    needed = {digest for manifest in keep for digest, _ in blobs_named(layout, manifest.digest, manifest.size)}
    for path in (layout / "blobs" / "sha256").glob("*"):
        if f"sha256:{path.name}" not in needed and path.stat().st_mtime < older_than:
            path.unlink(missing_ok=True)


def _add_layer(layout: Path, tar: Path, level: int = 6) -> tuple[Descriptor, str]:
    """Compress a tar into a layer. Return its descriptor, and the digest of the tar itself."""
    with _temporary(layout) as path:
        content = hashlib.sha256()
        # Without a name and a time, the digest depends on content alone.
        with tar.open("rb") as source, path.open("wb") as target, gzip.GzipFile("", "wb", level, target, 0) as packed:
            while chunk := source.read(CHUNK):
                content.update(chunk)
                packed.write(chunk)
        with path.open("rb") as file:
            digest = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        layer = Descriptor(LAYER, digest, path.stat().st_size)
        path.replace(blob_path(layout, digest))
    return layer, f"sha256:{content.hexdigest()}"


def _add_manifest(layout: Path, layer: Descriptor, diff_id: str, platform: str, settings: ImageSettings) -> Descriptor:
    config = _add_document(layout, CONFIG, config_json(platform, diff_id, settings))
    layers = [layer.to_json()]
    document = {"schemaVersion": 2, "mediaType": MANIFEST, "config": config.to_json(), "layers": layers}
    return replace(_add_document(layout, MANIFEST, document), platform=platform)


def _add_document(layout: Path, media_type: str, document: Mapping[str, Any]) -> Descriptor:
    data = json.dumps(document, indent=2).encode()
    with _temporary(layout) as temporary:
        temporary.write_bytes(data)
        temporary.replace(blob_path(layout, digest_of(data)))
    return Descriptor(media_type, digest_of(data), len(data))


@contextmanager
def _temporary(layout: Path) -> Iterator[Path]:
    """Give a name beside the blobs, to write to and rename: whoever looks sees all of a file or nothing of it."""
    folder = layout / "blobs" / "sha256"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".{uuid4().hex}"
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


# Copying


def pull_image(reference: str, layout: Path, run: RunProgram = run_program) -> str:
    """Copy `image:tag@digest`, all its platforms, from its registry with skopeo. Return the digest.

    Passwords are those of `docker login` and `skopeo login`. Raises CommandError if skopeo is missing or fails.
    """
    if not which("skopeo"):
        raise CommandError("`skopeo` is missing, which copies images of registries; install the package skopeo")
    name, _, digest = full_reference(reference).partition("@")
    last = name.rpartition("/")[2]
    name = name.removesuffix(":" + last.partition(":")[2]) if ":" in last else name  # skopeo takes a tag or a digest
    insecure = ["--src-tls-verify=false"] if name.startswith(("localhost", "127.")) else []
    with tempfile.TemporaryDirectory(prefix="imagebuild-") as temporary:
        # A folder keeps every byte; skopeo's own OCI layouts have manifests of OCI's types only.
        options = ("--all", "--preserve-digests", *insecure)
        run("skopeo", "copy", "--quiet", *options, f"docker://{name}@{digest}", f"dir:{temporary}")
        start_layout(layout)
        for path in Path(temporary).iterdir():
            if path.name.endswith("manifest.json"):
                shutil.move(path, blob_path(layout, digest_of(path.read_bytes())))
            elif path.name != "version" and "." not in path.name and not path.name.startswith("signature"):
                shutil.move(path, blob_path(layout, f"sha256:{path.name}"))
    if missing := list(missing_blobs(layout, digest)):
        raise ResultError(f"{reference}: skopeo did not copy {', '.join(missing)}")
    return digest


def copy_to_layout(source: Path, digest: str, layout: Path) -> None:
    """Copy an image or an index from one layout to another."""
    start_layout(layout)
    for name, _ in blobs_named(source, digest):
        path = blob_path(layout, name)
        if not path.exists():
            shutil.copyfile(blob_path(source, name), path)


# Layers


class Region:
    """Read a part of a file once, in chunks, and compute its digest."""

    def __init__(self, file: IO[bytes], offset: int, size: int) -> None:
        self._file = file
        self._rest = size
        self._sum = hashlib.sha256()
        file.seek(offset)

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes. Raises EOFError if the file ends in the region."""
        while self._rest:
            data = self._file.read(min(CHUNK, self._rest))
            if not data:
                raise EOFError("the file ends in it")
            self._rest -= len(data)
            self._sum.update(data)
            yield data

    @property
    def digest(self) -> str:
        """Return the digest of what has been read."""
        return f"sha256:{self._sum.hexdigest()}"


def decompressed(chunks: Iterator[bytes]) -> tuple[bool, Iterator[bytes]]:
    """Return whether the bytes are compressed, and what is in them. Errors are those of zlib and zstandard."""
    first = next(chunks, b"")
    everything = itertools.chain([first], chunks)
    if first.startswith(GZIP):
        return True, _gunzip(everything)
    if first.startswith(ZSTD):
        return True, _unzstd(everything)
    return False, everything


def _gunzip(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield pieces of bounded size, as a megabyte of zeros is a kilobyte."""
    unpack = zlib.decompressobj(wbits=31)
    for chunk in chunks:
        data = chunk
        while data:
            if unpack.eof:  # members follow each other, and zeros may follow the last
                if not data.strip(b"\0"):
                    break
                unpack = zlib.decompressobj(wbits=31)
            yield unpack.decompress(data, CHUNK)
            data = unpack.unconsumed_tail or unpack.unused_data
    while not unpack.eof:
        rest = unpack.decompress(b"", CHUNK)
        if not rest and not unpack.eof:
            raise EOFError("the compressed data are cut off")
        yield rest


def _unzstd(chunks: Iterator[bytes]) -> Iterator[bytes]:
    # Data that are cut off end without an error here; the digest tells.
    stream = cast(IO[bytes], ChunkReader(chunks))
    with zstandard.ZstdDecompressor().stream_reader(stream, read_across_frames=True) as reader:
        while data := reader.read(CHUNK):
            yield data


class ChunkReader(RawIOBase):
    """Give chunks as a file that can be read once, from its beginning."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        """Fill the buffer as far as the current chunk reaches. Return the number of bytes; 0 is the end."""
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = memoryview(chunk)
        taken = min(len(buffer), len(self._rest))
        buffer[:taken] = self._rest[:taken]
        self._rest = self._rest[taken:]
        return taken


def member_path(name: str) -> str | None:
    """Return the path of a member below the root, or None for the root itself. Raises TarError if it leads outside."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise tarfile.TarError(f"{name!r} leads out of the image")
    return "/".join(parts) or None


class LayerMembers:
    """Iterate over a layer in its order: the archive that has the content, the member, its path below the root."""

    def __init__(self, reader: IO[bytes], *, compressed: bool) -> None:
        self.compressed = compressed
        self._reader = reader

    def __iter__(self) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo, str]]:
        with tarfile.open(fileobj=self._reader, mode="r|", bufsize=CHUNK) as archive:
            for member in archive:
                if (path := member_path(member.name)) is not None:
                    yield archive, member, path
                    archive.members = []  # type: ignore[attr-defined]  # or it keeps all of them
        while self._reader.read(CHUNK):
            pass  # what follows the last entry belongs to the digest


@contextmanager
def layer_members(blob: Blob) -> Iterator[LayerMembers]:
    """Open a layer, whose members are to be read once and all of them.

    Raises ResultError if it cannot be read, or is not what its digest says.
    """
    try:
        with blob.file.open("rb") as file:
            region = Region(file, blob.offset, blob.size)
            compressed, chunks = decompressed(region.chunks())
            yield LayerMembers(cast(IO[bytes], BufferedReader(ChunkReader(chunks), CHUNK)), compressed=compressed)
    except (tarfile.TarError, EOFError, OSError, ValueError, zlib.error, zstandard.ZstdError) as error:
        raise ResultError(f"{blob.file}: layer {blob.name or blob.digest}: cannot be read: {error}") from None
    if blob.digest and blob.digest.startswith("sha256:") and region.digest != blob.digest:
        raise ResultError(f"{blob.file}: layer {blob.digest}: is damaged: its digest is {region.digest}")
