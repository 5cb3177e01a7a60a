"""Images in layouts, in archives and in the engine's store."""

from __future__ import annotations

import os
from pathlib import Path

from docker import DockerClient

from imagebuild import docker, engine
from imagebuild.errors import CommandError, ConfigError
from imagebuild.inspection import layout
from imagebuild.inspection.layout import Blob
from imagebuild.inspection.streams import GZIP, ZSTD
from imagebuild.locating.located import Found, LayerAt, Located


def in_files(name: str, path: Path, folder: Path) -> Found:
    """What a layout or an archive holds. `folder` is for what has to be unpacked.

    Raises ConfigError if it is no image, ResultError if it cannot be read.
    """
    return _found(name, str(path), layout.images(path, folder))


def engine_has(image: str) -> DockerClient | None:
    """A client of the engine, if there is an engine and it has the image."""
    try:
        client = docker.connect(engine.find(os.environ))
    except CommandError:
        return None
    try:
        docker.inspect(client, image)
    except (ConfigError, CommandError):
        client.close()
        return None
    return client


def in_engine(name: str, client: DockerClient, image: str, folder: Path) -> Found:
    """An image of the engine's store. Raises CommandError if the engine fails, ResultError as `in_files`."""
    try:
        return _found(name, "the engine's store", layout.images(docker.saved(client, image), folder))
    finally:
        client.close()


def _found(name: str, origin: str, images: tuple[layout.Image, ...]) -> Found:
    by_platform = {image.platform: image for image in images}

    def choose(platform: str) -> Located:
        image = by_platform[platform]
        layers = tuple(
            LayerAt(blob.digest, blob.size, lambda blob=blob: blob)  # type: ignore[misc]
            for blob in image.layers
        )
        return Located(
            name, origin, platform, image.digest, image.config, layers, lambda: image.stored,
            compressed=all(_compressed(blob) for blob in image.layers),
        )  # fmt: skip

    return Found(name, origin, tuple(by_platform), choose)


def _compressed(blob: Blob) -> bool:
    with blob.file.open("rb") as file:
        file.seek(blob.offset)
        return file.read(4).startswith((GZIP, ZSTD))
