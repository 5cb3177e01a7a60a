"""Find an image in a layout, an archive, an engine or a registry. Layers are fetched when they are asked for."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imagebuild.core.console import doing
from imagebuild.core.errors import CommandError, ConfigError, ResultError
from imagebuild.oci import engine
from imagebuild.oci.layout import (
    INDEX_FILE,
    INDEX_TYPES,
    NO_IMAGE,
    Blob,
    Descriptor,
    Layout,
    Manifest,
    manifests_of,
    platform_of,
    unpack,
)
from imagebuild.oci.reference import ImageReference

if TYPE_CHECKING:
    from imagebuild.oci.registry import Registry, Repository


@dataclass(frozen=True)
class PlatformImage:
    """Describe an image for one platform, wherever it is."""

    platform: str
    manifest: Manifest
    config: Mapping[str, Any]
    layers: tuple[Blob, ...]
    """Those of a registry have no file until they are fetched."""
    place: Repository | Layout
    """Where layers and attestations are fetched from."""
    name: str = ""
    compressed: bool = True
    """Whether layers are compressed, as registries keep them."""

    @property
    def digest(self) -> str:
        return self.manifest.digest

    @property
    def repository(self) -> Repository | None:
        return None if isinstance(self.place, Layout) else self.place

    @property
    def settings(self) -> Mapping[str, Any]:
        """Return what its containers start with: Env, User, Labels, …"""
        return self.config.get("config") or {}

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.settings.get("Labels") or {})

    @property
    def env(self) -> dict[str, str]:
        pairs = (str(item).partition("=") for item in self.settings.get("Env") or ())
        return {name: value for name, _, value in pairs}

    @property
    def descriptor(self) -> Descriptor:
        return replace(self.manifest.descriptor, platform=self.platform)

    @property
    def architecture(self) -> str:
        """Return the architecture: `amd64` of `linux/amd64`."""
        return self.platform.split("/")[1]

    def fetch(self, layer: Blob) -> Blob:
        """Put a layer on this machine, if it is not there. Raises CommandError, or ResultError if it does not fit."""
        self.place.fetch(Descriptor("", layer.digest or "", layer.size), layer.file)
        return layer

    def as_layout(self, folder: Path) -> Layout:
        """Make an OCI layout with this image alone."""
        layout = Layout(folder)
        layout.write_list([self.descriptor])
        digest = str(self.manifest.document["config"]["digest"])
        layout.put_manifest(self.manifest)
        layout.path(digest).write_bytes(self.place.blob(digest))
        for layer in map(self.fetch, self.layers):
            if not layout.path(layer.digest or "").exists():
                layout.path(layer.digest or "").symlink_to(layer.file.resolve())
        return layout


@dataclass(frozen=True)
class FoundImage:
    """Describe an image that may be for several platforms, wherever it is."""

    name: str
    origin: str
    platforms: tuple[str, ...]
    read: Callable[[str], PlatformImage]
    """Returns the image for one of these platforms."""
    digest: str | None = None
    """Digest of the index or manifest that the name stands for, where it is known."""

    @classmethod
    def of(cls, name: str, origin: str, images: Iterable[PlatformImage], digest: str | None = None) -> FoundImage:
        """Return images that were read as one, which is for all their platforms."""
        named = {image.platform: replace(image, name=name) for image in images}
        return cls(name, origin, tuple(named), named.__getitem__, digest)

    def image(self, platform: str | None) -> PlatformImage:
        """Return the image for a platform, by default the only one. Raises ConfigError if there is none."""
        has = ", ".join(self.platforms)
        if platform is None and len(self.platforms) > 1:
            raise ConfigError(f"{self.name}: is for {has}; choose with --platform")
        chosen = platform or self.platforms[0]
        if chosen not in self.platforms:
            raise ConfigError(f"{self.name}: is not for {chosen}, but for {has}")
        return self.read(chosen)


def is_image(item: Descriptor) -> bool:
    """Return whether an entry of an index is an image that runs, not an attestation about one."""
    return not (item.platform or "").startswith("unknown") and "vnd.docker.reference.type" not in item.annotations


def image_of(place: Repository | Layout, manifest: Manifest, name: str = "", folder: Path = Path()) -> PlatformImage:
    """Return the image of a manifest; fetched layers are put into `folder`. Raises ResultError if it is none."""
    with _explained(name or f"{place}@{manifest.digest}"):
        document = manifest.document
        config = json.loads(place.blob(document["config"]["digest"]))
        layers = [Descriptor.from_json(layer) for layer in document["layers"] or ()]
        files = place if isinstance(place, Layout) else Layout(folder)
        blobs = tuple(Blob(files.path(layer.digest), layer.size, layer.digest) for layer in layers)
        compressed = all(layer.media_type.endswith(("gzip", "zstd")) for layer in layers)
        return PlatformImage(platform_of(config), manifest, config, blobs, place, name, compressed)


@contextmanager
def _explained(name: str) -> Iterator[None]:
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ResultError(f"{name}: is not an image that can be read: {type(error).__name__}: {error}") from None


def images_in(source: Path | Iterable[bytes], folder: Path) -> tuple[PlatformImage, ...]:
    """Return the images in a folder, a file, or a stream that an engine saves: one for each platform.

    `folder` takes what has to be unpacked. Raises ConfigError if the path is no image, ResultError if the image cannot
    be read.
    """
    path = source if isinstance(source, Path) else folder
    if not path.exists():
        raise ConfigError(f"{path}: does not exist")
    layout = Layout(source) if isinstance(source, Path) and source.is_dir() else unpack(source, folder / "unpacked")
    listing = layout.folder / INDEX_FILE
    if not listing.is_file():
        raise ConfigError(f"{path}: {NO_IMAGE}")
    with _explained(str(path)):
        manifests = {manifest.digest: manifest for manifest in _manifests(layout, json.loads(listing.read_bytes()))}
        images = tuple(image_of(layout, manifest, str(path)) for manifest in manifests.values())
    if not images:
        raise ResultError(f"{path}: holds no image")
    platforms = [image.platform for image in images]
    if len(platforms) > len(set(platforms)):
        raise ConfigError(f"{path}: holds several images for {max(platforms, key=platforms.count)}; save one alone")
    return images


def _manifests(layout: Layout, index: Mapping[str, Any]) -> Iterator[Manifest]:
    """Yield the manifest of every image in an index and the indexes in it, without attestations."""
    items = [item for item in manifests_of(index) if is_image(item)]
    for item in items:
        # An engine saves the whole index, but only the platforms that it has.
        if layout.path(item.digest).is_file() or len(items) == 1:
            manifest = layout.manifest(item.digest)
            yield from _manifests(layout, manifest.document) if item.media_type in INDEX_TYPES else (manifest,)


def image_in_engine(name: str, image: str, folder: Path) -> FoundImage | None:
    """Return an image of the engine's store; None without engine or image. Raises CommandError or ResultError."""
    try:
        client = engine.connect_engine(engine.find_engine(os.environ))
    except CommandError:
        return None
    with closing(client), doing(f"{name}: reading it from the engine"):
        try:
            digest = engine.inspect_image(client, image).digest
        except (ConfigError, CommandError):
            return None
        images = images_in(engine.save_image(client, image), folder)
    return FoundImage.of(name, "the engine's store", images, digest)


def image_in_registry(name: str, reference: ImageReference, registry: Registry, folder: Path) -> FoundImage:
    """Return an image in a registry. Layers that are asked for are put into `folder`.

    Raises ConfigError if it is not there, CommandError if the registry refuses, ResultError for what is no image.
    """
    place = registry.at(reference.repository)
    top = place.find(reference.wanted)
    if top is None:
        raise ConfigError(f"{name}: {reference.host} has no such image")
    with _explained(name):
        children = manifests_of(top.document)
        images = {item.platform: item.digest for item in children if item.platform and is_image(item)}
    if not children:
        return FoundImage.of(name, reference.name, [image_of(place, top, name, folder)], top.digest)
    if not images:
        raise ConfigError(f"{name}: an index without images")

    def read(platform: str) -> PlatformImage:
        return image_of(place, place.manifest(images[platform]), name, folder)

    return FoundImage(name, reference.name, tuple(images), read, top.digest)
