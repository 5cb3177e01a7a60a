"""One type for images in layouts, archives, engines and registries. Layers are fetched only when they are needed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imagebuild.core.console import doing
from imagebuild.core.errors import CommandError, ConfigError, ResultError
from imagebuild.core.fields import DIGEST
from imagebuild.oci import engine
from imagebuild.oci.layout import (
    INDEX_FILE,
    INDEX_TYPES,
    NO_IMAGE,
    PLAIN_LAYER,
    Blob,
    Descriptor,
    Layout,
    Manifest,
    annotations_of,
    manifests_of,
    parse_document,
    platform_of,
    unpack,
)
from imagebuild.oci.reference import ImageReference

if TYPE_CHECKING:
    from docker import DockerClient

    from imagebuild.oci.registry import Registry, Repository

LAYER_TYPES = re.compile(
    r"application/vnd\.(oci\.image\.layer(\.nondistributable)?\.v1\.tar(\+gzip|\+zstd)?"
    r"|docker\.image\.rootfs(\.foreign)?\.diff\.tar(\.gzip|\.zstd)?)"
)
"""Media types of the layers that engines unpack."""
ANY = ""
"""Stands for any key in `IN_CONFIG`."""


IN_CONFIG = {
    "author": str, "comment": str, "created": str,
    "history": [{"author": str, "comment": str, "created": str, "created_by": str, "empty_layer": bool}],
    "config": {
        "Cmd": [str], "Entrypoint": [str], "Env": [str], "Healthcheck": {"Test": [str]}, "Labels": {ANY: str},
        "OnBuild": [str], "Shell": [str], "StopSignal": str, "User": str, "Volumes": {ANY: {}}, "WorkingDir": str,
    },
}  # fmt: skip
"""The types of the values in the configuration of an image. Engines refuse other types."""


def _check_types(value: Any, wanted: Any, place: str) -> None:
    """Raise ValueError if engines refuse the type of a value in the configuration of an image."""
    if not isinstance(value, wanted if isinstance(wanted, type) else type(wanted)):
        raise ValueError(f"engines refuse its {place}: {str(value)[:40]!r}")
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        inner = wanted[0] if isinstance(wanted, list) else wanted.get(key, wanted.get(ANY))
        if inner is not None and (item is not None or key not in wanted):
            _check_types(item, inner, f"{place}.{key}")


@dataclass(frozen=True)
class PlatformImage:
    """An image for one platform, in any location."""

    platform: str
    manifest: Manifest
    config: Mapping[str, Any]
    layers: tuple[Blob, ...]
    """The layers. For an image in a registry, their files do not exist until they are fetched."""
    place: Repository | Layout
    """The repository in a registry, or the layout, that contains the layers and attestations."""
    name: str = ""
    compressed: bool = True
    """Whether all layers are compressed, as usual in registries."""

    @property
    def digest(self) -> str:
        return self.manifest.digest

    @property
    def repository(self) -> Repository | None:
        return None if isinstance(self.place, Layout) else self.place

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings for containers: Env, User, Labels, …"""
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
        """The architecture: `amd64` for `linux/amd64`."""
        return self.platform.split("/")[1]

    def fetch(self, layer: Blob) -> Blob:
        """Fetch a layer to its file, if the file does not exist.
        Raises CommandError if the registry fails, and ResultError if the file cannot be written."""
        self.place.fetch(Descriptor("", layer.digest or "", layer.size), layer.file)
        return layer

    def as_layout(self, folder: Path) -> Layout:
        """Write an OCI layout that contains only this image."""
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
    """An image for one or several platforms, in any location."""

    name: str
    origin: str
    platforms: tuple[str, ...]
    read: Callable[[str], PlatformImage]
    """A function that returns the image for one of `platforms`."""
    digest: str | None = None
    """Digest of the index or manifest. None if the digest is not known."""

    @classmethod
    def of(cls, name: str, origin: str, images: Iterable[PlatformImage], digest: str | None = None) -> FoundImage:
        """Combine the images for single platforms into one image."""
        named = {image.platform: replace(image, name=name) for image in images}
        return cls(name, origin, tuple(named), named.__getitem__, digest)

    def image(self, platform: str | None) -> PlatformImage:
        """Return the image for a platform.

        Default: the only platform. Raises ConfigError if there is no image for the platform, or if there are several
        images and no platform is chosen."""
        has = ", ".join(self.platforms)
        if platform is None and len(self.platforms) > 1:
            raise ConfigError(f"{self.name}: is for {has}; choose one platform with --platform")
        chosen = platform or self.platforms[0]
        if chosen not in self.platforms:
            raise ConfigError(f"{self.name}: is not for {chosen}, but for {has}")
        return self.read(chosen)


def index_explained(index: str | None, images: Mapping[Any, str]) -> str:
    """Return a sentence about the digest of an index, from the digest of the image of each platform.
    Return an empty text if the digest is that of an image."""
    listed = ", ".join(f"the image of {platform} is {digest}" for platform, digest in images.items())
    return f"{index[:19]} is the digest of the index; {listed}" if index and index not in images.values() else ""


def is_image(item: Descriptor) -> bool:
    """Return whether an entry of an index is an image. Engines decide by the platform, and ignore annotations."""
    return not (item.platform or "").startswith("unknown")


def images_of(items: Iterable[Descriptor]) -> list[Descriptor]:
    """Return the images in an index, in the order in which engines choose: the first one for a platform.
    Engines choose an entry without platform only if no other entry is for their platform."""
    return sorted(filter(is_image, items), key=lambda item: item.platform is None)


def image_of(
    place: Repository | Layout, manifest: Manifest, name: str = "", folder: Path = Path(), platform: str | None = None
) -> PlatformImage:
    """Return the image that a manifest describes.

    Its layers will be fetched to `folder`. `platform` is the platform under which an index lists the manifest. Raises
    ResultError if the manifest does not describe an image, or if an engine would refuse the image."""
    with _explained(name or f"{place}@{manifest.digest}"):
        document = manifest.document
        annotations_of(document)
        config = parse_document(place.blob(document["config"]["digest"]))
        _check_types(config, IN_CONFIG, "configuration")
        layers = [Descriptor.from_json(layer) for layer in document["layers"] or ()]
        diff_ids = (config.get("rootfs") or {}).get("diff_ids") or ()
        if wrong := [diff_id for diff_id in diff_ids if not re.fullmatch(DIGEST, diff_id)]:
            raise ValueError(f"the diff id {wrong[0]!r} is not a digest")
        if len(diff_ids) != len(layers):
            raise ValueError(f"the configuration names {len(diff_ids)} layers, but the manifest {len(layers)}")
        if unknown := [layer.media_type for layer in layers if not LAYER_TYPES.fullmatch(layer.media_type)]:
            raise ValueError(f"engines do not unpack layers of the type {unknown[0]}")
        own = platform_of(config)
        if platform and platform.split("/")[:2] != own.split("/")[:2]:
            raise ValueError(f"the index lists it for {platform}, but its configuration is for {own}")
        files = place if isinstance(place, Layout) else Layout(folder)
        blobs = tuple(
            Blob(files.path(of.digest), of.size, of.digest, diff_id, of.media_type != PLAIN_LAYER, of.annotations)
            for of, diff_id in zip(layers, diff_ids, strict=True)
        )
        compressed = all(layer.media_type.endswith(("gzip", "zstd")) for layer in layers)
        return PlatformImage(platform or own, manifest, config, blobs, place, name, compressed)


@contextmanager
def _explained(name: str) -> Iterator[None]:
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ResultError(f"{name}: cannot be read as an image: {type(error).__name__}: {error}") from None


def images_in(source: Path | Iterable[bytes], folder: Path) -> tuple[PlatformImage, ...]:
    """Return the images in a folder, an archive or the output of `docker save`: one image for each platform.

    An archive is unpacked in `folder`. Raises ConfigError if the source is not an image, and ResultError if the image
    cannot be read."""
    path = source if isinstance(source, Path) else folder
    if not path.exists():
        raise ConfigError(f"{path}: does not exist")
    layout = Layout(source) if isinstance(source, Path) and source.is_dir() else unpack(source, folder / "unpacked")
    listing = layout.folder / INDEX_FILE
    if not listing.is_file():
        raise ConfigError(f"{path}: {NO_IMAGE}")
    with _explained(str(path)):
        images: dict[str, PlatformImage] = {}
        for image in _images(layout, parse_document(Blob(listing, 0).read()), str(path), set()):
            if images.setdefault(image.platform, image) is not image:
                raise ConfigError(f"{path}: contains several images for {image.platform}; save only one image")
    if not images:
        raise ResultError(f"{path}: contains no image")
    return tuple(images.values())


def _images(layout: Layout, index: Mapping[str, Any], name: str, seen: set[str]) -> Iterator[PlatformImage]:
    """Yield the images in an index: from each nested index the images that engines choose. `seen` are the digests of
    all manifests that were read."""
    items = images_of(manifests_of(index))
    for item in items:
        # An engine saves the whole index, but only the manifests of the platforms that it has.
        if item.digest in seen or not (layout.path(item.digest).is_file() or len(items) == 1):
            continue
        seen.add(item.digest)
        manifest = layout.manifest(item.digest)
        if manifest.media_type in INDEX_TYPES:
            nested: dict[str, PlatformImage] = {}
            for image in _images(layout, manifest.document, name, seen):
                nested.setdefault(image.platform, image)
            yield from nested.values()
        else:
            yield image_of(layout, manifest, name, platform=item.platform)


def images_stored(folder: Path, digest: str) -> tuple[PlatformImage, ...]:
    """Return the complete images in the folder of an engine's blobs; no images if this user cannot read them there.
    Reading them in place saves the time for a copy, which `docker save` makes of the whole image."""
    layout = Layout(folder)
    with suppress(OSError, ResultError, ValueError):
        images = list(_images(layout, {"manifests": [layout.manifest(digest).descriptor.to_json()]}, digest, set()))
        return tuple(image for image in images if all(os.access(layer.file, os.R_OK) for layer in image.layers))
    return ()


def image_in_engine(name: str, image: str, folder: Path) -> FoundImage | None:
    """Return an image in an engine. None if there is no usable engine, or if the engine does not have the image.
    Raises CommandError if the engine fails, and ResultError if the image cannot be read."""
    try:
        client = engine.connect_engine(engine.find_engine(os.environ))
    except CommandError:
        return None
    with closing(client):
        return image_of_client(client, name, image, folder)


def image_of_client(client: DockerClient, name: str, image: str, folder: Path) -> FoundImage | None:
    """Return an image in the engine of an SDK client. None if the engine does not have the image.
    Raises ResultError if the image cannot be read."""
    with doing(f"{name}: reading the image from the engine"):
        try:
            digest = engine.inspect_image(client, image).digest
        except (ConfigError, CommandError):
            return None
        stored = images_stored(engine.blobs_of_engine(client), digest) if digest else ()
        images = stored or images_in(engine.save_image(client, image), folder)
    return FoundImage.of(name, "the engine's store", images, digest)


def image_in_registry(name: str, reference: ImageReference, registry: Registry, folder: Path) -> FoundImage:
    """Return an image in a registry. Its layers will be fetched to `folder`.

    Raises ConfigError if the image does not exist, CommandError if the registry refuses the request, and ResultError if
    the answer is not an image."""
    place = registry.at(reference.repository)
    top = place.find(reference.wanted)
    if top is None:
        raise ConfigError(f"{name}: {reference.host} has no such image")
    with _explained(name):
        children = manifests_of(top.document)
        images: dict[str, str] = {}
        for item in images_of(children):
            # Only the configuration names the platform of an entry without platform.
            platform = item.platform or image_of(place, place.manifest(item.digest), name).platform
            images.setdefault(platform, item.digest)
    if not children:
        return FoundImage.of(name, reference.name, [image_of(place, top, name, folder)], top.digest)
    if not images:
        raise ConfigError(f"{name}: is an index without images")

    def read(platform: str) -> PlatformImage:
        return image_of(place, place.manifest(images[platform]), name, folder, platform)

    return FoundImage(name, reference.name, tuple(images), read, top.digest)
