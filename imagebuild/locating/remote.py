"""Images in registries: manifests and configurations at once, layers and attachments when they are asked for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from imagebuild.attachments import KINDS
from imagebuild.errors import ConfigError, ResultError
from imagebuild.inspection.layout import Blob
from imagebuild.locating.located import Found, LayerAt, Located, room
from imagebuild.registry import documents
from imagebuild.registry.base import Descriptor, Manifest, Registry
from imagebuild.registry.reference import Reference


def find(name: str, reference: Reference, registry: Registry, folder: Path) -> Found:
    """An image in a registry. Layers that are asked for are put into `folder`.

    Raises ConfigError if it is not there, CommandError if the registry refuses, ResultError for what is no image.
    """
    held = _Held(name, reference.repository, registry, folder)
    top = registry.manifest(reference.repository, reference.wanted)
    if top is None:
        raise ConfigError(f"{name}: {reference.host} has no such image")
    try:
        if children := documents.children(top.document):
            runnable = {item.platform: item.digest for item in children if _runs(item) and item.platform}
            if not runnable:
                raise ConfigError(f"{name}: an index without images")
            return Found(
                name, reference.name, tuple(runnable), lambda platform: held.image(held.manifest(runnable[platform])),
                top.digest,
            )  # fmt: skip
        image = held.image(top)
    except (LookupError, TypeError, ValueError) as error:
        raise ResultError(f"{name}: what the registry has is no image: {type(error).__name__}: {error}") from None
    return Found(name, reference.name, (image.platform,), lambda _: image)


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

    def image(self, manifest: Manifest) -> Located:
        document = manifest.document
        settings, layers = document["config"], document["layers"]
        content = self.registry.blob(self.repository, settings["digest"])
        config: Mapping[str, Any] = json.loads(content)

        def stored() -> Sequence[Blob]:
            about = self._written(manifest.content, manifest.digest), self._written(content, settings["digest"])
            return (*about, *(self._layer(layer["digest"], layer["size"]) for layer in layers))

        return Located(
            name=self.name,
            origin=f"{self.registry.host}/{self.repository}",
            platform=_platform(config),
            digest=manifest.digest,
            config=config,
            layers=tuple(
                LayerAt(
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
            for layer in documents.blobs(self.manifest(item.digest).document)
            if layer.media_type == KINDS[kind].media_type
        )

    def _layer(self, digest: str, size: int) -> Blob:
        path = self.folder / digest.replace(":", "-")
        if not path.exists():
            room(self.folder, size, self.name)
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
