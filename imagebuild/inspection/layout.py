"""Images on disk: an OCI layout as a folder or a tar, or an archive of `docker save`. Reads only where blobs lie."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import zstandard

from imagebuild.errors import ConfigError, ResultError
from imagebuild.inspection.streams import GZIP, ZSTD

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
class Image:
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


def images(source: Path | Iterable[bytes], folder: Path) -> tuple[Image, ...]:
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


def _from_manifest(blobs: Mapping[str, Blob], digest: str, platform: str | None, where: str) -> Image:
    about = _blob(blobs, digest, where)
    manifest = json.loads(about.read())
    settings = _blob(blobs, manifest["config"]["digest"], where)
    config = json.loads(settings.read())
    layers = tuple(_blob(blobs, layer["digest"], where) for layer in manifest["layers"] or ())
    return Image(platform or _platform(config), digest, config, layers, (about, settings, *layers))


def _from_saved(blobs: Mapping[str, Blob], item: Mapping[str, Any], where: str) -> Image:
    """An image as engines before 25 save it: layers as plain tars, known by the digests in the configuration."""
    config = json.loads(_member(blobs, item["Config"], where).read())
    digests = config["rootfs"]["diff_ids"] or ()
    layers = [_member(blobs, name, where) for name in item["Layers"] or ()]
    pairs = zip(layers, digests, strict=True)
    return Image(
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
