"""Published images as what a job may run. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from imagebuild.catalog.models import Catalog, PublishedImage
from imagebuild.fields import Platform
from imagebuild.jobs.image import Offer
from imagebuild.models import Target

PLATFORMS: tuple[Platform, ...] = get_args(Platform)


def published(offer: Offer, catalog: Catalog) -> Offer:
    """The same offer with the catalogue's images instead of the plan's, each by its digest, the newest first."""
    targets = tuple(_target(image) for image in catalog.images if "cuda" in image.axes)
    return replace(offer, targets=targets, what="published image")


def _target(image: PublishedImage) -> Target:
    there = {platform.platform for platform in image.platforms}
    tags = tuple(f"{image.repository}:{tag}" for tag in image.tags)
    return Target(
        id=image.target or image.tag,
        image=image.image,
        axes=image.axes,
        platforms=tuple(platform for platform in PLATFORMS if platform in there),
        components=image.versions,
        name=image.reference,
        tags=tags,
        aliases=(*tags, *(f"{image.repository}:{alias}" for alias in image.aliases)),
    )
