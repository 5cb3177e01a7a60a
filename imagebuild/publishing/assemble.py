"""The index of an image for several platforms: the same images give the same bytes. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from imagebuild.errors import ResultError
from imagebuild.publishing.decide import Image
from imagebuild.registry import documents
from imagebuild.registry.base import Descriptor, Manifest

STABLE = ("org.opencontainers.image.", "imagebuild.")
"""Beginnings of labels that the index repeats: they say what is in the image, and come with its digest."""


COMMON = "/v8"
"""What some images say behind arm64, which is always that."""


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


def image(manifest: Manifest, config: bytes) -> Image:
    """What a registry has under a digest, with what its configuration says. Raises ResultError if it is no image."""
    try:
        document = json.loads(config)
        parts = [document[key] for key in ("os", "architecture", "variant") if document.get(key)]
        labels = (document.get("config") or {}).get("Labels") or {}
    except (ValueError, LookupError, TypeError) as error:
        raise ResultError(f"{manifest.digest}: its configuration cannot be read: {error}") from None
    named = Descriptor(manifest.media_type, manifest.digest, len(manifest.content))
    return Image(named, "/".join(parts).removesuffix(COMMON), labels)
