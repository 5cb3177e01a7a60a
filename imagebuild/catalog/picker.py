"""What people choose by, and which images it leads to. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from imagebuild.catalog import commands, tags
from imagebuild.catalog.models import Catalog, PublishedImage

TITLES = {"image": "Image", "cuda": "CUDA", "os": "OS", "nccl": "NCCL", "mpi": "MPI", "variant": "Variant"}
"""In this order; other axes come after them, the platform last."""
PLATFORM = "platform"
ABSENT = "none"


@dataclass(frozen=True)
class Facet:
    """One thing to choose by."""

    key: str
    title: str
    values: tuple[str, ...]


def facets_of(images: Iterable[PublishedImage]) -> tuple[Facet, ...]:
    """All there is to choose by; the newest versions first. One platform is a choice too: it says what is there."""
    found: dict[str, dict[str, None]] = {key: {} for key in TITLES}
    platforms: dict[str, None] = {}
    for image in images:
        for key, value in choices(image).items():
            found.setdefault(key, {})[value] = None
        platforms |= dict.fromkeys(platform.platform for platform in image.platforms)
    absent: set[str] = set()
    for image in images:
        absent |= found.keys() - choices(image).keys()
    sorted_ = {key: [*_sorted(key, values), *([ABSENT] if key in absent else [])] for key, values in found.items()}
    facets = [Facet(key, TITLES.get(key, key), tuple(values)) for key, values in sorted_.items() if found[key]]
    return (*facets, *([Facet(PLATFORM, "Platform", tuple(sorted(platforms)))] if platforms else []))


def choices(image: PublishedImage) -> dict[str, str]:
    """What this image is, by facet; platforms are several and not among them."""
    return {"image": image.image, **image.axes, **image.stack}


def _sorted(key: str, values: Iterable[str]) -> list[str]:
    # Images stay in the order of the matrix, versions are numbers, and words are words.
    return list(values) if key == "image" else sorted(values, key=tags.natural, reverse=key != "variant")


def rows(images: Sequence[PublishedImage], facets: Sequence[Facet]) -> list[list[int]]:
    """What the page's program searches: number of the image, number of its value in each facet, and of its platforms
    one bit each.

    Of images that are the same in all of that, the first one, which is the newest. The best come first: of what fits,
    the first is offered.
    """
    numbers = [{value: number for number, value in enumerate(facet.values)} for facet in facets]
    seen: dict[tuple[int, ...], int] = {}
    for place, image in enumerate(images):
        own = choices(image)
        row = [known[own.get(f.key, ABSENT)] for f, known in zip(facets[:-1], numbers[:-1], strict=True)]
        seen.setdefault((*row, sum(1 << numbers[-1][p.platform] for p in image.platforms)), place)
    found = [[place, *row] for row, place in seen.items()]
    cuda = next((i for i, facet in enumerate(facets) if facet.key == "cuda"), None)
    # Stable, so the order of the catalogue decides between those of one day and one CUDA.
    found.sort(key=lambda row: row[cuda + 1] if cuda is not None else 0)
    found.sort(key=lambda row: images[row[0]].created[:10], reverse=True)
    return found


def data(catalog: Catalog) -> dict[str, object]:
    """What the page's program reads."""
    facets = facets_of(catalog.images)
    repositories = list(dict.fromkeys(image.repository for image in catalog.images))
    return {
        "facets": [[facet.key, facet.title, list(facet.values)] for facet in facets],
        "rows": rows(catalog.images, facets),
        "tags": [image.tag if image.tags or image.aliases else "" for image in catalog.images],
        "repositories": [repositories.index(image.repository) for image in catalog.images],
        "commands": [[[c.title, c.text] for c in commands.templates(name)] for name in repositories],
    }
