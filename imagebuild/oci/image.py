"""Find an image in a layout, an archive, an engine or a registry. Layers are fetched when they are asked for."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from docker import DockerClient

from imagebuild.core.errors import CommandError, ConfigError, ResultError
from imagebuild.oci import engine, layout
from imagebuild.oci.layout import (
    GZIP,
    KEPT_SIZE,
    KINDS,
    OPAQUE,
    WHITEOUT,
    ZSTD,
    Blob,
    Descriptor,
    Manifest,
    blobs_of,
    layer_members,
    manifests_of,
)
from imagebuild.oci.reference import ImageReference
from imagebuild.oci.registry import Registry


@dataclass(frozen=True)
class LayerPart:
    """What a layer says about the files that are looked for."""

    files: Mapping[str, bytes]
    hides: frozenset[str]
    """Paths of which lower layers do not count."""


@dataclass(frozen=True)
class WantedFiles:
    """Files to look for: exact paths, and folders whose files count; neither through symlinks."""

    paths: tuple[str, ...]
    folders: tuple[str, ...] = ()

    def part(self, blob: Blob) -> LayerPart:
        """Read a layer, all of it. Raises ResultError if it cannot be read, or is not what its digest says."""
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
"""What is installed; images without dpkg itself have a file for each package."""
DISTRIBUTION = WantedFiles((*DPKG.paths, "usr/lib/os-release", "etc/os-release"), DPKG.folders)


def files_in_layers(wanted: WantedFiles, layers: Iterable[Callable[[], LayerPart]]) -> dict[str, bytes]:
    """The files as a container sees them; `layers` begin with the topmost, and are asked for only where needed."""
    found: dict[str, bytes] = {}
    hidden: set[str] = set()
    for part in layers:
        said = part()
        found |= {path: text for path, text in said.files.items() if path not in found and not _below(path, hidden)}
        hidden |= said.hides
        if all(path in found or _below(path, hidden) for path in wanted.paths):
            # Where there is a list of all packages, nobody adds files for single ones.
            break
    return found


def dpkg_status(found: Mapping[str, bytes]) -> str | None:
    """The list of packages, in the form of dpkg's; None if there is none."""
    if (whole := found.get(DPKG.paths[0])) is not None:
        return whole.decode("utf-8", "replace")
    parts = [
        found[path].decode("utf-8", "replace").strip()
        for path in sorted(found)
        if path.startswith(f"{DPKG.folders[0]}/") and not path.endswith(".md5sums")
    ]
    return "\n\n".join(parts) + "\n" if parts else None


def _below(path: str, hidden: set[str]) -> bool:
    """Whether the path, or a folder that it lies in, is hidden."""
    parts = path.split("/")
    return "" in hidden or any("/".join(parts[:n]) in hidden for n in range(1, len(parts) + 1))


@dataclass(frozen=True)
class ImageLayer:
    """A layer, which may still be elsewhere."""

    digest: str | None
    size: int
    """Bytes, as stored."""
    fetch: Callable[[], Blob]
    """Puts it on this machine, if it is not there."""


@dataclass(frozen=True)
class PlatformImage:
    """An image for one platform."""

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
    """Manifest, configuration and layers, on this machine."""
    attached: Callable[[str], tuple[bytes, ...]] = lambda _: ()
    """Kind of attachment → files that refer to the manifest."""
    compressed: bool = True
    """Whether layers are compressed, as registries keep them."""
    remote: bool = False
    """Whether layers have to be fetched."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """What containers of it start with: Env, User, Labels, …"""
        return self.config.get("config") or {}

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.settings.get("Labels") or {})

    @property
    def architecture(self) -> str:
        return self.platform.split("/")[1]

    def files(self, wanted: WantedFiles, known: dict[str, LayerPart] | None = None) -> dict[str, bytes]:
        """A few files of it. `known` keeps what was read of layers, for images that share some.

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
        """An OCI layout with this image alone. Raises ConfigError for an image without a manifest."""
        blobs = self.stored()
        if not blobs:
            raise ConfigError(
                f"{self.name}: an archive of an engine before 25, which has no manifest; "
                "save it again, or copy it with skopeo to oci-archive:"
            )
        layout.start_layout(folder)
        for blob in blobs:
            _place(blob, layout.blob_path(folder, blob.digest or ""))
        manifest = json.loads(blobs[0].read())
        about = layout.Descriptor(
            manifest.get("mediaType", layout.MANIFEST), blobs[0].digest or "", blobs[0].size, self.platform
        )
        (folder / "index.json").write_text(json.dumps(layout.index_json([about])))
        return folder


@dataclass(frozen=True)
class FoundImage:
    """An image that may be for several platforms."""

    name: str
    origin: str
    platforms: tuple[str, ...]
    choose: Callable[[str], PlatformImage]
    digest: str | None = None
    """What the name stands for: of an index or a manifest, where it is known."""

    def image(self, platform: str | None) -> PlatformImage:
        """The one for a platform; without one it must be the only one. Raises ConfigError."""
        has = ", ".join(self.platforms)
        if platform is None and len(self.platforms) > 1:
            raise ConfigError(f"{self.name}: is for {has}; choose with --platform")
        chosen = platform or self.platforms[0]
        if chosen not in self.platforms:
            raise ConfigError(f"{self.name}: is not for {chosen}, but for {has}")
        return self.choose(chosen)


def _place(blob: Blob, path: Path) -> None:
    if path.exists() or path.is_symlink():
        return
    try:
        if blob.offset == 0 and blob.size == blob.file.stat().st_size:
            path.symlink_to(blob.file.resolve())
            return
        with blob.file.open("rb") as source, path.open("wb") as target:
            source.seek(blob.offset)
            rest = blob.size
            while rest and (data := source.read(min(rest, 1 << 20))):
                target.write(data)
                rest -= len(data)
    except OSError as error:
        raise ResultError(f"{path}: cannot be written: {error.strerror}; TMPDIR may name another folder") from None


def check_room(folder: Path, size: int, what: str) -> None:
    """Raise ResultError unless the folder's disk has room for so many bytes."""
    if shutil.disk_usage(folder).free < size:
        raise ResultError(f"{what}: {size / 1e9:.1f} GB do not fit in {folder}; TMPDIR may name another folder")


def image_in_files(name: str, path: Path, folder: Path) -> FoundImage:
    """What a layout or an archive holds. `folder` is for what has to be unpacked.

    Raises ConfigError if it is no image, ResultError if it cannot be read.
    """
    return _found(name, str(path), layout.images_in(path, folder))


def engine_with_image(image: str) -> DockerClient | None:
    """A client of the engine, if there is an engine and it has the image."""
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
    """An image of the engine's store. Raises CommandError if the engine fails, ResultError as `in_files`."""
    try:
        found = _found(name, "the engine's store", layout.images_in(engine.save_image(client, image), folder))
        return replace(found, digest=engine.inspect_image(client, image).digest)
    finally:
        client.close()


def _found(name: str, origin: str, images: tuple[layout.LayoutImage, ...]) -> FoundImage:
    by_platform = {image.platform: image for image in images}

    def choose(platform: str) -> PlatformImage:
        image = by_platform[platform]
        layers = tuple(
            ImageLayer(blob.digest, blob.size, lambda blob=blob: blob)  # type: ignore[misc]
            for blob in image.layers
        )
        return PlatformImage(
            name, origin, platform, image.digest, image.config, layers, lambda: image.stored,
            compressed=all(_compressed(blob) for blob in image.layers),
        )  # fmt: skip

    return FoundImage(name, origin, tuple(by_platform), choose)


def _compressed(blob: Blob) -> bool:
    with blob.file.open("rb") as file:
        file.seek(blob.offset)
        return file.read(4).startswith((GZIP, ZSTD))


def image_in_registry(name: str, reference: ImageReference, registry: Registry, folder: Path) -> FoundImage:
    """An image in a registry. Layers that are asked for are put into `folder`.

    Raises ConfigError if it is not there, CommandError if the registry refuses, ResultError for what is no image.
    """
    held = _Held(name, reference.repository, registry, folder)
    top = registry.manifest(reference.repository, reference.wanted)
    if top is None:
        raise ConfigError(f"{name}: {reference.host} has no such image")
    try:
        if children := manifests_of(top.document):
            runnable = {item.platform: item.digest for item in children if _runs(item) and item.platform}
            if not runnable:
                raise ConfigError(f"{name}: an index without images")
            return FoundImage(
                name, reference.name, tuple(runnable), lambda platform: held.image(held.manifest(runnable[platform])),
                top.digest,
            )  # fmt: skip
        image = held.image(top)
    except (LookupError, TypeError, ValueError) as error:
        raise ResultError(f"{name}: what the registry has is no image: {type(error).__name__}: {error}") from None
    return FoundImage(name, reference.name, (image.platform,), lambda _: image, top.digest)


def _runs(item: Descriptor) -> bool:
    """Whether an entry of an index is an image, and no attestation of one."""
    is_reference = "vnd.docker.reference.type" in item.annotations
    return not is_reference and not (item.platform or "unknown").startswith("unknown")


class _Held:
    """One repository, and what was fetched of it."""

    def __init__(self, name: str, repository: str, registry: Registry, folder: Path) -> None:
        self.name, self.repository, self.registry, self.folder = name, repository, registry, folder

    def manifest(self, digest: str) -> Manifest:
        found = self.registry.manifest(self.repository, digest)
        if found is None:
            raise ResultError(f"{self.name}: the registry has no manifest {digest}, which its index names")
        return found

    def image(self, manifest: Manifest) -> PlatformImage:
        document = manifest.document
        settings, layers = document["config"], document["layers"]
        content = self.registry.blob(self.repository, settings["digest"])
        config: Mapping[str, Any] = json.loads(content)

        def stored() -> Sequence[Blob]:
            about = self._written(manifest.content, manifest.digest), self._written(content, settings["digest"])
            return (*about, *(self._layer(layer["digest"], layer["size"]) for layer in layers))

        return PlatformImage(
            name=self.name,
            origin=f"{self.registry.host}/{self.repository}",
            platform=_platform(config),
            digest=manifest.digest,
            config=config,
            layers=tuple(
                ImageLayer(
                    layer["digest"],
                    layer["size"],
                    lambda layer=layer: self._layer(layer["digest"], layer["size"]),  # type: ignore[misc]
                )
                for layer in layers
            ),
            stored=stored,
            attached=lambda kind: self._attached(manifest.digest, kind),
            compressed=all(str(layer["mediaType"]).endswith(("gzip", "zstd")) for layer in layers),
            remote=True,
        )

    def _attached(self, digest: str, kind: str) -> tuple[bytes, ...]:
        found = self.registry.referrers(self.repository, digest, KINDS[kind].artifact_type)
        return tuple(
            self.registry.blob(self.repository, layer.digest)
            for item in found
            for layer in blobs_of(self.manifest(item.digest).document)
            if layer.media_type == KINDS[kind].media_type
        )

    def _layer(self, digest: str, size: int) -> Blob:
        path = self.folder / digest.replace(":", "-")
        if not path.exists():
            check_room(self.folder, size, self.name)
            found, temporary = hashlib.sha256(), path.with_suffix(".part")
            with temporary.open("wb") as file:
                for chunk in self.registry.open_blob(self.repository, digest):
                    found.update(chunk)
                    file.write(chunk)
            if f"sha256:{found.hexdigest()}" != digest:
                raise ResultError(f"{self.name}: layer {digest} was damaged on its way")
            temporary.rename(path)
        return Blob(path, 0, size, digest, digest)

    def _written(self, content: bytes, digest: str) -> Blob:
        path = self.folder / digest.replace(":", "-")
        path.write_bytes(content)
        return Blob(path, 0, len(content), digest, digest)


def _platform(config: Mapping[str, Any]) -> str:
    """As `inspection.layout` names platforms."""
    variant = config.get("variant")
    plain = f"{config.get('os', 'unknown')}/{config.get('architecture', 'unknown')}"
    return f"{plain}/{variant}" if variant and config.get("architecture") == "arm" else plain
