"""Find an image in a layout, an archive, an engine or a registry. Layers are fetched when they are asked for."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imagebuild.core.errors import CommandError, ConfigError, ResultError
from imagebuild.oci import engine
from imagebuild.oci.attestation import read_attestations
from imagebuild.oci.layout import (
    CHUNK,
    GZIP,
    KEPT_SIZE,
    OPAQUE,
    WHITEOUT,
    ZSTD,
    Blob,
    Descriptor,
    LayoutImage,
    Manifest,
    blob_path,
    images_in,
    index_json,
    layer_members,
    manifests_of,
    media_type_of,
    platform_of,
    start_layout,
)
from imagebuild.oci.reference import ImageReference

if TYPE_CHECKING:
    from docker import DockerClient

    from imagebuild.oci.registry import Registry


# Files in layers


@dataclass(frozen=True)
class LayerPart:
    """Hold what a layer has of the files that are looked for."""

    files: Mapping[str, bytes]
    hides: frozenset[str]
    """Paths of which lower layers do not count."""


@dataclass(frozen=True)
class WantedFiles:
    """Name files to look for: exact paths, and folders whose files count; neither through symlinks."""

    paths: tuple[str, ...]
    folders: tuple[str, ...] = ()

    def part(self, blob: Blob) -> LayerPart:
        """Read all of a layer. Raises ResultError if it cannot be read, or is not what its digest says."""
        files: dict[str, bytes] = {}
        hides: set[str] = set()
        with layer_members(blob) as members:
            for archive, member, path in members:
                folder, _, name = path.rpartition("/")
                if name == OPAQUE:
                    hides.add(folder)
                elif name.startswith(WHITEOUT):
                    hides.add(f"{folder}/{name.removeprefix(WHITEOUT)}".lstrip("/"))
                elif path in self.paths or folder in self.folders:
                    content = archive.extractfile(member) if member.isreg() and member.size <= KEPT_SIZE else None
                    if content:
                        files[path] = content.read()
                    else:
                        hides.add(path)
        return LayerPart(files, frozenset(hides))


DPKG = WantedFiles(("var/lib/dpkg/status",), ("var/lib/dpkg/status.d",))
"""The list of installed packages; images without dpkg itself have a file for each package."""
DISTRIBUTION = WantedFiles((*DPKG.paths, "usr/lib/os-release", "etc/os-release"), DPKG.folders)


def files_in_layers(wanted: WantedFiles, layers: Iterable[Callable[[], LayerPart]]) -> dict[str, bytes]:
    """Return the files as a container sees them. `layers` begin with the topmost, and are read only where needed."""
    files: dict[str, bytes] = {}
    hidden: set[str] = set()

    def is_hidden(path: str) -> bool:
        parts = path.split("/")
        return "" in hidden or any("/".join(parts[:n]) in hidden for n in range(1, len(parts) + 1))

    for read_part in layers:
        part = read_part()
        files |= {path: text for path, text in part.files.items() if path not in files and not is_hidden(path)}
        hidden |= part.hides
        if all(path in files or is_hidden(path) for path in wanted.paths):
            # Where there is a list of all packages, nobody adds files for single ones.
            break
    return files


def dpkg_status(files: Mapping[str, bytes]) -> str | None:
    """Return the list of packages in dpkg's form, from the files of `DPKG`; None if there is none."""
    if (status := files.get(DPKG.paths[0])) is not None:
        return status.decode("utf-8", "replace")
    parts = [
        files[path].decode("utf-8", "replace").strip()
        for path in sorted(files)
        if path.startswith(f"{DPKG.folders[0]}/") and not path.endswith(".md5sums")
    ]
    return "\n\n".join(parts) + "\n" if parts else None


# Images


@dataclass(frozen=True)
class ImageLayer:
    """Describe a layer, which may still be elsewhere."""

    digest: str | None
    size: int
    """Bytes, as stored."""
    fetch: Callable[[], Blob]
    """Puts the layer on this machine, if it is not there."""


@dataclass(frozen=True)
class PlatformImage:
    """Describe an image for one platform, wherever it is."""

    name: str
    """As it was asked for."""
    origin: str
    """Where it was found."""
    platform: str
    digest: str | None
    """Of the manifest; None for an archive that has none."""
    config: Mapping[str, Any]
    layers: tuple[ImageLayer, ...]
    stored: Callable[[], Sequence[Blob]]
    """Puts manifest, configuration and layers on this machine; returns nothing for an archive without a manifest."""
    attached: Callable[[str], tuple[bytes, ...]] = lambda _: ()
    """Kind of attachment → files that refer to the manifest."""
    compressed: bool = True
    """Whether layers are compressed, as registries keep them."""
    remote: bool = False
    """Whether layers have to be fetched."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """Return what its containers start with: Env, User, Labels, …"""
        return self.config.get("config") or {}

    @property
    def labels(self) -> dict[str, str]:
        """Return the labels."""
        return dict(self.settings.get("Labels") or {})

    @property
    def architecture(self) -> str:
        """Return the architecture: `amd64` of `linux/amd64`."""
        return self.platform.split("/")[1]

    def files(self, wanted: WantedFiles, known: dict[str, LayerPart] | None = None) -> dict[str, bytes]:
        """Return a few files of it. `known` keeps what was read of layers, for images that share some.

        Raises ResultError if a layer cannot be read, CommandError if it cannot be had.
        """
        parts = {} if known is None else known

        def read(layer: ImageLayer) -> LayerPart:
            if layer.digest is None:
                return wanted.part(layer.fetch())
            if layer.digest not in parts:
                parts[layer.digest] = wanted.part(layer.fetch())
            return parts[layer.digest]

        return files_in_layers(wanted, [lambda layer=layer: read(layer) for layer in reversed(self.layers)])  # type: ignore[misc]

    def as_layout(self, folder: Path) -> Path:
        """Make an OCI layout with this image alone. Raises ConfigError for an image without a manifest."""
        blobs = self.stored()
        if not blobs:
            raise ConfigError(
                f"{self.name}: an archive of an engine before 25, which has no manifest; "
                "save it again, or copy it with skopeo to oci-archive:"
            )
        start_layout(folder)
        for blob in blobs:
            _link_or_copy(blob, blob_path(folder, blob.digest or ""))
        media_type = media_type_of(json.loads(blobs[0].read()))
        manifest = Descriptor(media_type, blobs[0].digest or "", blobs[0].size, self.platform)
        (folder / "index.json").write_text(json.dumps(index_json([manifest])))
        return folder


@dataclass(frozen=True)
class FoundImage:
    """Describe an image that may be for several platforms, wherever it is."""

    name: str
    origin: str
    platforms: tuple[str, ...]
    choose: Callable[[str], PlatformImage]
    digest: str | None = None
    """What the name stands for: of an index or a manifest, where it is known."""

    def image(self, platform: str | None) -> PlatformImage:
        """Return the image for a platform, by default the only one. Raises ConfigError if there is none."""
        has = ", ".join(self.platforms)
        if platform is None and len(self.platforms) > 1:
            raise ConfigError(f"{self.name}: is for {has}; choose with --platform")
        chosen = platform or self.platforms[0]
        if chosen not in self.platforms:
            raise ConfigError(f"{self.name}: is not for {chosen}, but for {has}")
        return self.choose(chosen)


def _link_or_copy(blob: Blob, path: Path) -> None:
    if path.exists() or path.is_symlink():
        return
    try:
        if blob.offset == 0 and blob.size == blob.file.stat().st_size:
            path.symlink_to(blob.file.resolve())
            return
        with blob.file.open("rb") as source, path.open("wb") as target:
            source.seek(blob.offset)
            rest = blob.size
            while rest and (data := source.read(min(rest, CHUNK))):
                target.write(data)
                rest -= len(data)
    except OSError as error:
        raise ResultError(f"{path}: cannot be written: {error.strerror}; TMPDIR may name another folder") from None


# On this machine


def image_in_files(name: str, path: Path, folder: Path) -> FoundImage:
    """Return the image of a layout or an archive. `folder` is for what has to be unpacked.

    Raises ConfigError if it is no image, ResultError if it cannot be read.
    """
    return _image_of_platforms(name, str(path), images_in(path, folder))


def engine_with_image(image: str) -> DockerClient | None:
    """Return a client of the engine, if there is an engine and it has the image."""
    try:
        client = engine.connect_engine(engine.find_engine(os.environ))
    except CommandError:
        return None
    try:
        engine.inspect_image(client, image)
    except (ConfigError, CommandError):
        client.close()
        return None
    return client


def image_in_engine(name: str, client: DockerClient, image: str, folder: Path) -> FoundImage:
    """Return an image of the engine's store, and close the client.

    Raises CommandError if the engine fails, ResultError if the image cannot be read.
    """
    try:
        images = images_in(engine.save_image(client, image), folder)
        result = _image_of_platforms(name, "the engine's store", images)
        return replace(result, digest=engine.inspect_image(client, image).digest)
    finally:
        client.close()


def _image_of_platforms(name: str, origin: str, images: tuple[LayoutImage, ...]) -> FoundImage:
    by_platform = {image.platform: image for image in images}

    def choose(platform: str) -> PlatformImage:
        image = by_platform[platform]
        heads = []
        for blob in image.layers:
            with blob.file.open("rb") as file:
                file.seek(blob.offset)
                heads.append(file.read(4))
        return PlatformImage(
            name=name,
            origin=origin,
            platform=platform,
            digest=image.digest,
            config=image.config,
            layers=tuple(
                ImageLayer(blob.digest, blob.size, lambda blob=blob: blob)  # type: ignore[misc]
                for blob in image.layers
            ),
            stored=lambda: image.stored,
            compressed=all(head.startswith((GZIP, ZSTD)) for head in heads),
        )

    return FoundImage(name, origin, tuple(by_platform), choose)


# In a registry


def image_in_registry(name: str, reference: ImageReference, registry: Registry, folder: Path) -> FoundImage:
    """Return an image in a registry. Layers that are asked for are put into `folder`.

    Raises ConfigError if it is not there, CommandError if the registry refuses, ResultError for what is no image.
    """
    repository = _FetchedRepository(name, reference.repository, registry, folder)
    top = registry.manifest(reference.repository, reference.wanted)
    if top is None:
        raise ConfigError(f"{name}: {reference.host} has no such image")
    try:
        if children := manifests_of(top.document):
            digests = {
                item.platform: item.digest
                for item in children
                # Attestations are entries of an index too.
                if item.platform
                and not item.platform.startswith("unknown")
                and "vnd.docker.reference.type" not in item.annotations
            }
            if not digests:
                raise ConfigError(f"{name}: an index without images")

            def choose(platform: str) -> PlatformImage:
                return repository.image(repository.manifest(digests[platform]))

            return FoundImage(name, reference.name, tuple(digests), choose, top.digest)
        image = repository.image(top)
    except (LookupError, TypeError, ValueError) as error:
        raise ResultError(f"{name}: what the registry has is no image: {type(error).__name__}: {error}") from None
    return FoundImage(name, reference.name, (image.platform,), lambda _: image, top.digest)


@dataclass(frozen=True)
class _FetchedRepository:
    """Read images of one repository, and keep their blobs in a folder."""

    name: str
    """Of the image, as it was asked for."""
    repository: str
    registry: Registry
    folder: Path

    def manifest(self, digest: str) -> Manifest:
        """Return a manifest. Raises ResultError if it is missing."""
        manifest = self.registry.manifest(self.repository, digest)
        if manifest is None:
            raise ResultError(f"{self.name}: the registry has no manifest {digest}, which its index names")
        return manifest

    def image(self, manifest: Manifest) -> PlatformImage:
        """Return the image of a manifest."""
        document = manifest.document
        settings, layers = document["config"], document["layers"]
        content = self.registry.blob(self.repository, settings["digest"])
        config: Mapping[str, Any] = json.loads(content)

        def stored() -> Sequence[Blob]:
            blobs = []
            for data, digest in ((manifest.content, manifest.digest), (content, settings["digest"])):
                path = self._path(digest)
                path.write_bytes(data)
                blobs.append(Blob(path, 0, len(data), digest, digest))
            return (*blobs, *(self.layer(layer["digest"], layer["size"]) for layer in layers))

        return PlatformImage(
            name=self.name,
            origin=f"{self.registry.host}/{self.repository}",
            platform=platform_of(config),
            digest=manifest.digest,
            config=config,
            layers=tuple(
                ImageLayer(
                    layer["digest"],
                    layer["size"],
                    lambda layer=layer: self.layer(layer["digest"], layer["size"]),  # type: ignore[misc]
                )
                for layer in layers
            ),
            stored=stored,
            attached=lambda kind: self.attached(manifest.digest, kind),
            compressed=all(str(layer["mediaType"]).endswith(("gzip", "zstd")) for layer in layers),
            remote=True,
        )

    def attached(self, digest: str, kind: str) -> tuple[bytes, ...]:
        """Return the undamaged predicates of a kind that refer to a manifest; who signed them is not checked."""
        read = read_attestations(self.registry, self.repository, digest, kind)
        return tuple(item.content for item in read if not item.problem)

    def layer(self, digest: str, size: int) -> Blob:
        """Fetch a layer, if it is not there. Raises ResultError if it is damaged, or the disk is too small."""
        path = self._path(digest)
        if not path.exists():
            if shutil.disk_usage(self.folder).free < size:
                needed = f"{size / 1e9:.1f} GB do not fit in {self.folder}"
                raise ResultError(f"{self.name}: {needed}; TMPDIR may name another folder")
            content, temporary = hashlib.sha256(), path.with_suffix(".part")
            try:
                with temporary.open("wb") as file:
                    for chunk in self.registry.open_blob(self.repository, digest):
                        content.update(chunk)
                        file.write(chunk)
            except CommandError as error:
                raise CommandError(f"{self.name}: layer {digest} broke off on its way: {error}") from None
            if f"sha256:{content.hexdigest()}" != digest:
                raise ResultError(f"{self.name}: layer {digest} was damaged on its way; try again")
            temporary.rename(path)
        return Blob(path, 0, size, digest, digest)

    def _path(self, digest: str) -> Path:
        return self.folder / digest.replace(":", "-")
