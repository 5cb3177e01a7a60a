"""Small OCI layouts like those that a build writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from imagebuild.oci.layout import Descriptor, Layout
from tests.unit import image_files


@dataclass(frozen=True)
class Made:
    """An image for two platforms that share a layer."""

    layout: Layout
    digest: str
    manifests: tuple[Descriptor, ...]


def make(folder: Path, content: bytes, platforms: tuple[str, ...] = ("linux/amd64", "linux/arm64")) -> Made:
    """Write an image with one layer that contains one file with this content."""
    folder.mkdir(parents=True, exist_ok=True)
    tar = folder / "layer.tar"
    tar.write_bytes(image_files.layer({"file": content}))
    layout = Layout(folder / "layout")
    manifests = tuple(
        layout.add_image(tar, dict(zip(("os", "architecture"), platform.split("/"), strict=True)))
        for platform in platforms
    )
    tar.unlink()
    return Made(layout, layout.write_index(manifests), manifests)
