"""Read and write images on disk: OCI layouts, tars of them, archives of `docker save`."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import IO, Any, BinaryIO, cast
from uuid import uuid4

import zstandard

from imagebuild.core.errors import CommandError, ConfigError, ResultError
from imagebuild.core.fields import full_reference
from imagebuild.core.run import RunProgram, run_program, which

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
CHUNK = 1 << 20


class Region:
    """A part of a file, read once in chunks."""

    def __init__(self, file: IO[bytes], offset: int, size: int) -> None:
        self._file = file
        self._rest = size
        self._sum = hashlib.sha256()
        file.seek(offset)

    def chunks(self) -> Iterator[bytes]:
        while self._rest:
            data = self._file.read(min(CHUNK, self._rest))
            if not data:
                raise EOFError("the file ends in it")
            self._rest -= len(data)
            self._sum.update(data)
            yield data

    @property
    def digest(self) -> str:
        """Of what has been read."""
        return f"sha256:{self._sum.hexdigest()}"


def decompressed(chunks: Iterator[bytes]) -> tuple[bool, Iterator[bytes]]:
    """Whether the bytes are compressed, and what is in them. Errors are zlib's and zstandard's."""
    first = next(chunks, b"")

    def every() -> Iterator[bytes]:
        yield first
        yield from chunks

    if first.startswith(GZIP):
        return True, _gunzip(every())
    if first.startswith(ZSTD):
        return True, _unzstd(every())
    return False, every()


def _gunzip(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """In pieces of bounded size, as a megabyte of zeros is a kilobyte."""
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
    # What is cut off ends without an error here; the digest tells.
    with zstandard.ZstdDecompressor().stream_reader(cast(IO[bytes], Joined(chunks)), read_across_frames=True) as reader:
        while data := reader.read(CHUNK):
            yield data


class Joined(RawIOBase):
    """Chunks as a file that can be read once, from its beginning."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = memoryview(chunk)
        taken = min(len(buffer), len(self._rest))
        buffer[:taken] = self._rest[:taken]
        self._rest = self._rest[taken:]
        return taken


INDEXES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")


@dataclass(frozen=True, slots=True)
class Blob:
    """Bytes in a file: all of it, or a member of a tar, which needs no unpacking."""

    file: Path
    offset: int
    size: int
    digest: str | None = None
    """`sha256:…` of the bytes as stored; whoever reads them compares."""
    name: str = ""

    def read(self) -> bytes:
        """All of it, for small ones. Raises ResultError if it is not what its digest says."""
        try:
            with self.file.open("rb") as file:
                file.seek(self.offset)
                data = file.read(self.size)
        except OSError as error:
            raise ResultError(f"{self.file}: cannot be read: {error.strerror}") from None
        found = f"sha256:{hashlib.sha256(data).hexdigest()}"
        if self.digest and self.digest.startswith("sha256:") and found != self.digest:
            raise ResultError(f"{self.file}: {self.name or self.digest}: is damaged: its digest is {found}")
        return data


@dataclass(frozen=True, slots=True)
class LayoutImage:
    """An image for one platform."""

    platform: str
    digest: str | None
    config: Mapping[str, Any]
    layers: tuple[Blob, ...]
    stored: tuple[Blob, ...] = ()
    """Manifest, configuration and layers, each by its digest; empty for an archive that has no manifest."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """What containers of it start with: Env, User, Labels, …"""
        return self.config.get("config") or {}

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.settings.get("Labels") or {})

    @property
    def env(self) -> dict[str, str]:
        pairs = (str(item).partition("=") for item in self.settings.get("Env") or ())
        return {name: value for name, _, value in pairs}


def images_in(source: Path | Iterable[bytes], folder: Path) -> tuple[LayoutImage, ...]:
    """The images in a folder, a file, or a stream that an engine saves; one a platform.

    `folder` is for what has to be stored: a stream, or an archive that is compressed as a whole.
    Raises ConfigError if the path is no image, ResultError if the image cannot be read.
    """
    path = source if isinstance(source, Path) else _spool(source, folder / "saved.tar")
    if not path.exists():
        raise ConfigError(f"{path}: does not exist")
    blobs = _in_folder(path) if path.is_dir() else _in_tar(_plain(path, folder))
    try:
        if "index.json" in blobs:
            found = dict.fromkeys(_digests(blobs, blobs["index.json"].read(), None, str(path)))
            result = [_from_manifest(blobs, digest, platform, str(path)) for digest, platform in found]
        elif "manifest.json" in blobs:
            result = [_from_saved(blobs, item, str(path)) for item in json.loads(blobs["manifest.json"].read())]
        else:
            raise ConfigError(f"{path}: neither an OCI image layout nor an archive of `docker save`")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ResultError(f"{path}: not an image that can be read: {type(error).__name__}: {error}") from None
    if not result:
        raise ResultError(f"{path}: holds no image")
    several = [i.platform for i in result if sum(i.platform == other.platform for other in result) > 1]
    if several:
        raise ConfigError(f"{path}: holds several images for {several[0]}; save one of them alone")
    return tuple(result)


def _digests(
    blobs: Mapping[str, Blob], index: bytes, platform: str | None, where: str
) -> Iterator[tuple[str, str | None]]:
    """Digest and platform of every image in an index and the indexes in it, but of attestations."""
    items = json.loads(index)["manifests"]
    for item in items:
        named = _platform(item["platform"]) if item.get("platform") else platform
        if (named or "").startswith("unknown/") or "vnd.docker.reference.type" in (item.get("annotations") or {}):
            continue
        if _name(item["digest"]) not in blobs:
            if len(items) > 1:
                continue  # an engine saves an index whole, but only the platforms that it has
            raise ResultError(f"{where}: {item['digest']} is missing")
        if item.get("mediaType") in INDEXES:
            yield from _digests(blobs, _blob(blobs, item["digest"], where).read(), named, where)
        else:
            yield item["digest"], named


def _from_manifest(blobs: Mapping[str, Blob], digest: str, platform: str | None, where: str) -> LayoutImage:
    about = _blob(blobs, digest, where)
    manifest = json.loads(about.read())
    settings = _blob(blobs, manifest["config"]["digest"], where)
    config = json.loads(settings.read())
    layers = tuple(_blob(blobs, layer["digest"], where) for layer in manifest["layers"] or ())
    return LayoutImage(platform or _platform(config), digest, config, layers, (about, settings, *layers))


def _from_saved(blobs: Mapping[str, Blob], item: Mapping[str, Any], where: str) -> LayoutImage:
    """An image as engines before 25 save it: layers as plain tars, known by the digests in the configuration."""
    config = json.loads(_member(blobs, item["Config"], where).read())
    digests = config["rootfs"]["diff_ids"] or ()
    layers = [_member(blobs, name, where) for name in item["Layers"] or ()]
    pairs = zip(layers, digests, strict=True)
    return LayoutImage(
        _platform(config), None, config, tuple(Blob(b.file, b.offset, b.size, digest, b.name) for b, digest in pairs)
    )


def _platform(document: Mapping[str, Any]) -> str:
    """`linux/amd64`; the variant of arm64 is always v8 and says nothing."""
    variant = document.get("variant")
    plain = f"{document.get('os', 'unknown')}/{document.get('architecture', 'unknown')}"
    return f"{plain}/{variant}" if variant and document.get("architecture") == "arm" else plain


def _name(digest: str) -> str:
    return "blobs/" + digest.replace(":", "/", 1)


def _blob(blobs: Mapping[str, Blob], digest: str, where: str) -> Blob:
    found = _member(blobs, _name(digest), where)
    return Blob(found.file, found.offset, found.size, digest, digest)


def _member(blobs: Mapping[str, Blob], name: str, where: str) -> Blob:
    if name not in blobs:
        raise ResultError(f"{where}: {name} is missing")
    return blobs[name]


def _in_folder(path: Path) -> dict[str, Blob]:
    files = (file for file in path.rglob("*") if file.is_file())
    return {file.relative_to(path).as_posix(): Blob(file, 0, file.stat().st_size) for file in files}


def _in_tar(path: Path) -> dict[str, Blob]:
    try:
        with tarfile.open(path, "r:") as archive:
            members = archive.getmembers()
            found = {m.name.removeprefix("./"): Blob(path, m.offset_data, m.size) for m in members if m.isreg()}
            for link in (m for m in members if m.issym() or m.islnk()):  # engines save a layer once
                target = str(Path(link.name).parent / link.linkname) if link.issym() else link.linkname
                if target := _tidy(target):
                    found.setdefault(link.name, found.get(target, Blob(path, 0, 0, "sha256:missing")))
            return found
    except tarfile.TarError as error:
        raise ConfigError(f"{path}: neither an OCI image layout nor an archive of `docker save`: {error}") from None
    except OSError as error:
        raise ResultError(f"{path}: cannot be read: {error.strerror}") from None


def _tidy(name: str) -> str:
    parts: list[str] = []
    for part in name.split("/"):
        if part == "..":
            parts = parts[:-1]
        elif part not in ("", "."):
            parts.append(part)
    return "/".join(parts)


def _plain(path: Path, folder: Path) -> Path:
    """The archive itself, or what is in it if all of it is compressed."""
    try:
        with path.open("rb") as file:
            head = file.read(4)
            file.seek(0)
            if head.startswith(GZIP):
                return _copy(cast(IO[bytes], gzip.GzipFile(fileobj=file)), folder / "unpacked.tar")
            if head.startswith(ZSTD):
                reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
                return _copy(cast(IO[bytes], reader), folder / "unpacked.tar")
    except (OSError, EOFError, zstandard.ZstdError) as error:
        raise ResultError(f"{path}: cannot be read: {error}") from None
    return path


def _copy(source: IO[bytes], path: Path) -> Path:
    with path.open("wb") as file:
        shutil.copyfileobj(source, file, 1 << 20)
    return path


def _spool(chunks: Iterable[bytes], path: Path) -> Path:
    try:
        with path.open("wb") as file:
            file.writelines(chunks)
    except OSError as error:
        raise ResultError(f"{path}: the image cannot be stored: {error.strerror}") from None
    return path


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
    def from_json(cls, document: Mapping[str, Any]) -> Descriptor:
        """Read what `to_json` wrote; `KeyError` when it is something else."""
        platform = "/".join(document["platform"].values()) if "platform" in document else None
        return cls(document["mediaType"], document["digest"], document["size"], platform)


@dataclass(frozen=True)
class ImageSettings:
    """What an image says about itself; `created` is a fixed time, so that the digest depends on content."""

    created: str
    env: Sequence[str] = ()
    cmd: Sequence[str] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    history: str = ""


def platform_json(platform: str) -> dict[str, str]:
    """`linux/arm64` or `linux/arm/v7` as OCI spells it."""
    return dict(zip(("os", "architecture", "variant"), platform.split("/"), strict=False))


def config_json(platform: str, diff_id: str, settings: ImageSettings) -> dict[str, Any]:
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


def add_image(layout: Path, tar: Path, platform: str, settings: ImageSettings) -> Descriptor:
    """Add `tar` as an image of one layer; what comes back goes into `write_index`."""
    layer, diff_id = _write_layer(layout, tar)
    config = _write_json(layout, CONFIG, config_json(platform, diff_id, settings))
    manifest = _write_json(layout, MANIFEST, manifest_json(config, layer))
    return Descriptor(manifest.media_type, manifest.digest, manifest.size, platform)


def add_tree(layout: Path, tar: Path, platforms: Iterable[str], settings: ImageSettings) -> str:
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
    return (layout / "oci-layout").is_file() and not any(True for _ in missing_blob(layout, digest))


def missing_blob(layout: Path, digest: str) -> Iterator[str]:
    """Digests of what an image or an index names and the layout does not have in full."""
    for found, size in blobs_named(layout, digest):
        path = blob_path(layout, found)
        if not path.is_file() or size not in (None, path.stat().st_size):
            yield found


def blobs_named(layout: Path, digest: str, size: int | None = None) -> Iterator[tuple[str, int | None]]:
    """Digest and size of an image or an index, and of all that it names, as far as the layout has it."""
    yield digest, size
    path = blob_path(layout, digest)
    if not path.is_file():
        return
    document = json.loads(path.read_bytes())
    for item in document.get("manifests", ()):
        yield from blobs_named(layout, item["digest"], item["size"])
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


def prune_blobs(layout: Path, keep: Iterable[Descriptor], older_than: float) -> None:
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


LOOPBACK = ("localhost", "127.")


def pull_image(reference: str, layout: Path, run: RunProgram = run_program) -> str:
    """Copy `image:tag@digest`, all its platforms, from its registry with skopeo; returns the digest.

    Passwords are those of `docker login` and `skopeo login`. Raises CommandError if skopeo is missing or fails.
    """
    if not which("skopeo"):
        raise CommandError("`skopeo` is missing, which copies images of registries; install the package skopeo")
    name, _, digest = full_reference(reference).partition("@")
    last = name.rpartition("/")[2]
    name = name.removesuffix(":" + last.partition(":")[2]) if ":" in last else name  # it takes a tag or a digest
    insecure = ["--src-tls-verify=false"] if name.startswith(LOOPBACK) else []
    with tempfile.TemporaryDirectory(prefix="imagebuild-") as folder:
        # A folder keeps every byte; skopeo's own OCI layouts have manifests of OCI's types only.
        options = ("--all", "--preserve-digests", *insecure)
        run("skopeo", "copy", "--quiet", *options, f"docker://{name}@{digest}", f"dir:{folder}")
        adopt_image(Path(folder), layout)
    if absent := list(missing_blob(layout, digest)):
        raise ResultError(f"{reference}: skopeo did not copy {', '.join(absent)}")
    return digest


def adopt_image(folder: Path, layout: Path) -> None:
    """Move what skopeo's `dir:` has, manifests and blobs, into a layout."""
    start_layout(layout)
    for path in folder.iterdir():
        if path.name.endswith("manifest.json"):
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
        elif path.name == "version" or "." in path.name or path.name.startswith("signature"):
            continue
        else:
            digest = path.name
        shutil.move(path, blob_path(layout, f"sha256:{digest}"))


def copy_to_layout(source: Path, digest: str, layout: Path) -> None:
    """Copy an image or an index from one layout to another."""
    start_layout(layout)
    for found, _ in blobs_named(source, digest):
        path = blob_path(layout, found)
        if not path.exists():
            shutil.copyfile(blob_path(source, found), path)


def start_layout(layout: Path) -> None:
    """Make an empty layout, if there is none. Its index stays empty: BuildKit is given digests."""
    (layout / "blobs" / "sha256").mkdir(parents=True, exist_ok=True)
    if not (layout / "oci-layout").exists():
        (layout / "index.json").write_text(json.dumps(index_json([])))
        (layout / "oci-layout").write_text(json.dumps({"imageLayoutVersion": "1.0.0"}))


def check_image(layout: Path, digest: str) -> None:
    """Raise ResultError if anything that an image names is missing or has changed."""
    for found, size in blobs_named(layout, digest):
        path = blob_path(layout, found)
        if not path.is_file() or size not in (None, path.stat().st_size):
            raise ResultError(f"{path}: is missing or cut off; make the bundle again")
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != path.name:
                raise ResultError(f"{path}: has changed; make the bundle again")


# No file is younger than this, so that times do not differ from run to run: the day Debian 13 came out.
EPOCH, CREATED = "1754697600", "2025-08-09T00:00:00Z"


WHITEOUT, OPAQUE = ".wh.", ".wh..wh..opq"


KEPT_SIZE = 32 << 20


def member_path(name: str) -> str | None:
    """The path below the root; None for the root itself."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise tarfile.TarError(f"{name!r} leads out of the image")
    return "/".join(parts) or None


class Members:
    """The members of a layer, in its order: the archive that has its content, the member, its path below the root."""

    def __init__(self, reader: IO[bytes], *, compressed: bool) -> None:
        self.compressed = compressed
        self._reader = reader

    def __iter__(self) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo, str]]:
        with tarfile.open(fileobj=self._reader, mode="r|", bufsize=CHUNK) as archive:
            for member in archive:
                if (path := member_path(member.name)) is not None:
                    yield archive, member, path
                    archive.members = []  # type: ignore[attr-defined]  # or it keeps every one
        while self._reader.read(CHUNK):
            pass  # what follows the last entry belongs to the digest


@contextmanager
def layer_members(blob: Blob) -> Iterator[Members]:
    """The members of a layer, to be read once and all of them.

    Raises ResultError if it cannot be read, or is not what its digest says.
    """
    try:
        with blob.file.open("rb") as file:
            region = Region(file, blob.offset, blob.size)
            compressed, chunks = decompressed(region.chunks())
            yield Members(cast(IO[bytes], BufferedReader(Joined(chunks), CHUNK)), compressed=compressed)
    except (tarfile.TarError, EOFError, OSError, ValueError, zlib.error, zstandard.ZstdError) as error:
        raise ResultError(f"{blob.file}: layer {blob.name or blob.digest}: cannot be read: {error}") from None
    if blob.digest and blob.digest.startswith("sha256:") and region.digest != blob.digest:
        raise ResultError(f"{blob.file}: layer {blob.digest}: is damaged: its digest is {region.digest}")
