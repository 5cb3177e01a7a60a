"""Find an image in a layout, an archive, an engine or a registry. Layers are fetched when they are asked for."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imagebuild.core.console import err
from imagebuild.core.errors import CommandError, ConfigError, ResultError
from imagebuild.oci import engine
from imagebuild.oci.layout import (
    CHUNK,
    INDEX_TYPES,
    UNREADABLE,
    Blob,
    Descriptor,
    Manifest,
    blob_name,
    blob_path,
    decompressed,
    digest_of,
    index_json,
    manifests_of,
    media_type_of,
    platform_of,
    start_layout,
)
from imagebuild.oci.reference import ImageReference

if TYPE_CHECKING:
    from imagebuild.oci.registry import Registry, RepositoryAt


# Images


@dataclass(frozen=True)
class PlatformImage:
    """Describe an image for one platform, wherever it is."""

    platform: str
    digest: str
    """Of the manifest."""
    config: Mapping[str, Any]
    layers: tuple[Blob, ...]
    """Those of a registry have no file until they are fetched."""
    documents: tuple[bytes, ...] = ()
    """Manifest and configuration."""
    name: str = ""
    """As it was asked for."""
    compressed: bool = True
    """Whether layers are compressed, as registries keep them."""
    repository: RepositoryAt | None = None
    """Where layers and attestations are fetched from."""

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

    @property
    def descriptor(self) -> Descriptor:
        """Return the descriptor of the manifest."""
        content = self.documents[0]
        return Descriptor(media_type_of(json.loads(content)), digest_of(content), len(content), self.platform)

    @property
    def architecture(self) -> str:
        """Return the architecture: `amd64` of `linux/amd64`."""
        return self.platform.split("/")[1]

    def fetch(self, layer: Blob) -> Blob:
        """Put a layer on this machine, if it is not there.

        Raises CommandError if the registry fails, ResultError if the layer is damaged or does not fit.
        """
        if self.repository:
            self.repository.fetch(Descriptor("", layer.digest or "", layer.size), layer.file)
        return layer

    def as_layout(self, folder: Path) -> Path:
        """Make an OCI layout with this image alone."""
        start_layout(folder)
        for document in self.documents:
            blob_path(folder, digest_of(document)).write_bytes(document)
        for layer in map(self.fetch, self.layers):
            _link_or_copy(layer, blob_path(folder, layer.digest or ""))
        (folder / "index.json").write_text(json.dumps(index_json([self.descriptor])))
        return folder


@dataclass(frozen=True)
class FoundImage:
    """Describe an image that may be for several platforms, wherever it is."""

    name: str
    origin: str
    """Where it was found."""
    platforms: tuple[str, ...]
    read: Callable[[str], PlatformImage]
    """Returns the image for one of these platforms."""
    digest: str | None = None
    """Digest of the index or manifest that the name stands for, where it is known."""

    def image(self, platform: str | None) -> PlatformImage:
        """Return the image for a platform, by default the only one. Raises ConfigError if there is none."""
        has = ", ".join(self.platforms)
        if platform is None and len(self.platforms) > 1:
            raise ConfigError(f"{self.name}: is for {has}; choose with --platform")
        chosen = platform or self.platforms[0]
        if chosen not in self.platforms:
            raise ConfigError(f"{self.name}: is not for {chosen}, but for {has}")
        return self.read(chosen)


def _link_or_copy(blob: Blob, path: Path) -> None:
    if path.exists():
        return
    try:
        if blob.offset == 0 and blob.size == blob.file.stat().st_size:
            path.symlink_to(blob.file.resolve())
        else:
            with blob.open() as source, path.open("wb") as target:
                shutil.copyfileobj(source, target, CHUNK)
    except OSError as error:
        raise ResultError(f"{path}: cannot be written: {error.strerror}; TMPDIR may name another folder") from None


def is_image(item: Descriptor) -> bool:
    """Return whether an entry of an index is an image that runs, not an attestation about one."""
    return not (item.platform or "").startswith("unknown") and "vnd.docker.reference.type" not in item.annotations


def image_of_manifest(manifest: bytes, config: bytes, blob: Callable[[Descriptor], Blob]) -> PlatformImage:
    """Return the image of a manifest; `blob` tells where layers are. Raises LookupError, TypeError or ValueError."""
    layers = [Descriptor.from_json(item) for item in json.loads(manifest)["layers"] or ()]
    settings = json.loads(config)
    return PlatformImage(
        platform_of(settings), digest_of(manifest), settings, tuple(map(blob, layers)), (manifest, config),
        compressed=all(layer.media_type.endswith(("gzip", "zstd")) for layer in layers),
    )  # fmt: skip


# In files

NO_IMAGE = "neither an OCI image layout nor an archive of one, as `docker save` writes it since Docker 25"


@dataclass(frozen=True)
class _StoredFiles:
    """Hold the files of a layout or an archive, by their names in it."""

    path: Path
    blobs: Mapping[str, Blob]

    def blob(self, digest: str) -> Blob:
        """Return a blob of a layout. Raises ResultError if it is missing."""
        if (name := blob_name(digest)) not in self.blobs:
            raise ResultError(f"{self.path}: {name} is missing")
        return replace(self.blobs[name], digest=digest)

    def manifests(self, index: bytes) -> Iterator[bytes]:
        """Yield the manifest of every image in an index and the indexes in it, without attestations."""
        items = [item for item in manifests_of(json.loads(index)) if is_image(item)]
        for item in items:
            # An engine saves the whole index, but only the platforms that it has.
            if blob_name(item.digest) in self.blobs or len(items) == 1:
                content = self.blob(item.digest).read()
                yield from self.manifests(content) if item.media_type in INDEX_TYPES else (content,)


def images_in(source: Path | Iterable[bytes], folder: Path) -> tuple[PlatformImage, ...]:
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
        blobs = _members_of_tar(path, folder)
    files = _StoredFiles(path, blobs)
    try:
        if "index.json" not in blobs:
            raise ConfigError(f"{path}: {NO_IMAGE}")
        result = []
        for manifest in dict.fromkeys(files.manifests(blobs["index.json"].read())):
            config = files.blob(json.loads(manifest)["config"]["digest"]).read()
            result.append(image_of_manifest(manifest, config, lambda part: files.blob(part.digest)))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ResultError(f"{path}: not an image that can be read: {type(error).__name__}: {error}") from None
    if not result:
        raise ResultError(f"{path}: holds no image")
    platforms = Counter(image.platform for image in result)
    platform, count = platforms.most_common(1)[0]
    if count > 1:
        raise ConfigError(f"{path}: holds several images for {platform}; save one of them alone")
    return tuple(result)


def _members_of_tar(path: Path, folder: Path) -> dict[str, Blob]:
    """Return the files of an archive; one that is compressed as a whole is unpacked into the folder first."""
    try:
        whole = Blob(path, 0, path.stat().st_size)
        if whole.compression:
            path = folder / "unpacked.tar"
            with whole.open() as file, path.open("wb") as target:
                shutil.copyfileobj(decompressed(file), target, CHUNK)
        with tarfile.open(path, "r:") as archive:
            members = archive.getmembers()
    except tarfile.TarError as error:
        raise ConfigError(f"{path}: {NO_IMAGE}: {error}") from None
    except UNREADABLE as error:
        raise ResultError(f"{path}: cannot be read: {error}") from None
    return {m.name.removeprefix("./"): Blob(path, m.offset_data, m.size) for m in members if m.isreg()}


def image_in_files(name: str, path: Path, folder: Path) -> FoundImage:
    """Return the image of a layout or an archive. `folder` is for what has to be unpacked.

    Raises ConfigError if it is no image, ResultError if it cannot be read.
    """
    return _found_image(name, str(path), images_in(path, folder))


def _found_image(name: str, origin: str, images: Iterable[PlatformImage], digest: str | None = None) -> FoundImage:
    named = {image.platform: replace(image, name=name) for image in images}
    return FoundImage(name, origin, tuple(named), named.__getitem__, digest)


# In an engine


SILENT_S = 2.0
"""After how long we print that the engine saves an image, whose size it does not tell before."""


def image_in_engine(name: str, image: str, folder: Path) -> FoundImage | None:
    """Return an image of the engine's store; None if there is no engine, or it does not have the image.

    Raises CommandError if the engine fails, ResultError if the image cannot be read.
    """
    try:
        client = engine.connect_engine(engine.find_engine(os.environ))
    except CommandError:
        return None
    note = threading.Timer(SILENT_S, err.print, (f"{name}: reading it from the engine",), {"markup": False})
    note.daemon = True
    with closing(client):
        try:
            digest = engine.inspect_image(client, image).digest
        except (ConfigError, CommandError):
            return None
        note.start()
        try:
            images = images_in(engine.save_image(client, image), folder)
        finally:
            note.cancel()
    return _found_image(name, "the engine's store", images, digest)


# In a registry


def image_in_registry(name: str, reference: ImageReference, registry: Registry, folder: Path) -> FoundImage:
    """Return an image in a registry. Layers that are asked for are put into `folder`.

    Raises ConfigError if it is not there, CommandError if the registry refuses, ResultError for what is no image.
    """
    place = registry.at(reference.repository)
    top = registry.manifest(reference.repository, reference.wanted)
    if top is None:
        raise ConfigError(f"{name}: {reference.host} has no such image")

    def read(digest: str) -> PlatformImage:
        manifest = top if digest == top.digest else place.manifest(digest)
        return image_at(place, manifest, name, folder)

    with _explained(name):
        children = manifests_of(top.document)
        images = {item.platform: item.digest for item in children if item.platform and is_image(item)}
    if not children:
        image = read(top.digest)
        return FoundImage(name, reference.name, (image.platform,), lambda _: image, top.digest)
    if not images:
        raise ConfigError(f"{name}: an index without images")
    return FoundImage(name, reference.name, tuple(images), lambda platform: read(images[platform]), top.digest)


def image_at(place: RepositoryAt, manifest: Manifest, name: str = "", folder: Path = Path()) -> PlatformImage:
    """Return the image of a manifest in a registry; layers that are asked for are put into `folder`.

    Raises CommandError if the registry refuses, ResultError for what is no image.
    """

    def blob(part: Descriptor) -> Blob:
        return Blob(folder / part.digest.replace(":", "-"), 0, part.size, part.digest)

    with _explained(name or f"{place}@{manifest.digest}"):
        config = place.registry.blob(place.repository, str(manifest.document["config"]["digest"]))
        image = image_of_manifest(manifest.content, config, blob)
    return replace(image, name=name, repository=place)


@contextmanager
def _explained(name: str) -> Iterator[None]:
    try:
        yield
    except (LookupError, TypeError, ValueError) as error:
        raise ResultError(f"{name}: what the registry has is not an image: {type(error).__name__}: {error}") from None
