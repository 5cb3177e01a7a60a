"""An image that was found: what it says of itself at once, its layers when they are asked for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imagebuild import images, oci
from imagebuild.errors import ConfigError, ResultError
from imagebuild.inspection import lookup
from imagebuild.inspection.layout import Blob
from imagebuild.inspection.lookup import Part, Wanted


@dataclass(frozen=True)
class LayerAt:
    """A layer, which may still be elsewhere."""

    digest: str | None
    size: int
    """Bytes, as stored."""
    fetch: Callable[[], Blob]
    """Puts it on this machine, if it is not there."""


@dataclass(frozen=True)
class Located:
    """An image for one platform."""

    name: str
    """As it was asked for."""
    origin: str
    """Where it was found."""
    platform: str
    digest: str | None
    """Of the manifest; None for an archive that has none."""
    config: Mapping[str, Any]
    layers: tuple[LayerAt, ...]
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

    def files(self, wanted: Wanted, known: dict[str, Part] | None = None) -> dict[str, bytes]:
        """A few files of it. `known` keeps what was read of layers, for images that share some.

        Raises ResultError if a layer cannot be read, CommandError if it cannot be had.
        """
        parts = {} if known is None else known

        def read(layer: LayerAt) -> Part:
            if layer.digest is None:
                return wanted.part(layer.fetch())
            if layer.digest not in parts:
                parts[layer.digest] = wanted.part(layer.fetch())
            return parts[layer.digest]

        return lookup.files(wanted, [lambda layer=layer: read(layer) for layer in reversed(self.layers)])  # type: ignore[misc]

    def as_layout(self, folder: Path) -> Path:
        """An OCI layout with this image alone. Raises ConfigError for an image without a manifest."""
        blobs = self.stored()
        if not blobs:
            raise ConfigError(
                f"{self.name}: an archive of an engine before 25, which has no manifest; "
                "save it again, or copy it with skopeo to oci-archive:"
            )
        images.start(folder)
        for blob in blobs:
            _place(blob, oci.blob_path(folder, blob.digest or ""))
        manifest = json.loads(blobs[0].read())
        about = oci.Descriptor(
            manifest.get("mediaType", oci.MANIFEST), blobs[0].digest or "", blobs[0].size, self.platform
        )
        (folder / "index.json").write_text(json.dumps(oci.index_json([about])))
        return folder


@dataclass(frozen=True)
class Found:
    """An image that may be for several platforms."""

    name: str
    origin: str
    platforms: tuple[str, ...]
    choose: Callable[[str], Located]
    digest: str | None = None
    """Of the index, where there is one."""

    def image(self, platform: str | None) -> Located:
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


def room(folder: Path, size: int, what: str) -> None:
    """Raise ResultError unless the folder's disk has room for so many bytes."""
    if shutil.disk_usage(folder).free < size:
        raise ResultError(f"{what}: {size / 1e9:.1f} GB do not fit in {folder}; TMPDIR may name another folder")
