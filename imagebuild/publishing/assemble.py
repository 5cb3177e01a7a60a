"""The index of an image for several platforms: the same images give the same bytes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from imagebuild.registry import documents
from imagebuild.registry.base import Descriptor, Manifest

STABLE = ("org.opencontainers.image.", "imagebuild.")
"""Beginnings of labels that the index repeats: they say what is in the image, and come with its digest."""


def index(images: Mapping[str, Descriptor], labels: Iterable[Mapping[str, str]]) -> Manifest:
    """The index of one image for each platform; `labels` are those of the images.

    What all images say of themselves is also said of the index. Nothing in it depends on when or where it is made.
    """
    manifests = [
        documents.descriptor_json(Descriptor(image.media_type, image.digest, image.size, platform))
        for platform, image in sorted(images.items())
    ]
    document = {"schemaVersion": 2, "mediaType": documents.INDEX, "manifests": manifests}
    content = documents.encode({**document, "annotations": _shared(labels)})
    return Manifest(content, documents.INDEX, documents.digest_of(content))


def _shared(labels: Iterable[Mapping[str, str]]) -> dict[str, str]:
    first, *others = [dict(found) for found in labels]
    return {
        name: value
        for name, value in sorted(first.items())
        if name.startswith(STABLE) and all(other.get(name) == value for other in others)
    }
