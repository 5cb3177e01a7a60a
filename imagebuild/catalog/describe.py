"""What is known of an image: from its configuration, its labels, its tags and the matrix. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from imagebuild.catalog import curves, tags
from imagebuild.catalog.evidence import Said
from imagebuild.catalog.models import Evidence, PublishedImage, PublishedPlatform
from imagebuild.models import Matrix, Plan
from imagebuild.registry.base import Descriptor

AXIS, COMPONENT = "imagebuild.axis.", "imagebuild.component."
CREATED, REVISION = "org.opencontainers.image.created", "org.opencontainers.image.revision"


@dataclass(frozen=True)
class Ours:
    """What the project says, whatever the registry has."""

    matrix: Matrix
    plan: Plan
    provides: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Component → other names it is known by."""


@dataclass(frozen=True)
class Described:
    """Fields of `PublishedImage` that labels and the matrix tell."""

    target: str
    image: str
    description: str
    axes: dict[str, str]
    versions: dict[str, str]
    stack: dict[str, str]
    tags: tuple[str, ...]
    aliases: tuple[str, ...]
    revision: str
    created: str
    restricted: dict[str, str]


def _times(about: Mapping[str, Any]) -> list[str]:
    """When an image and its steps were made. BuildKit may leave the base's time in `created`."""
    return [str(entry.get("created") or "") for entry in (about, *(about.get("history") or ()))]


def platform_of(child: Descriptor, manifest: dict[str, Any], config: bytes) -> PublishedPlatform:
    """What one platform is. Raises LookupError, TypeError or ValueError for what is no image."""
    about = json.loads(config)
    layers = manifest["layers"]
    labels = {str(k): str(v) for k, v in ((about.get("config") or {}).get("Labels") or {}).items()}
    parts = (about["os"], about["architecture"], about.get("variant"))
    return PublishedPlatform(
        platform=child.platform or "/".join(filter(None, parts)),
        digest=child.digest,
        size_bytes=sum(layer["size"] for layer in layers),
        layers=len(layers),
        created=labels.get(CREATED) or max(_times(about)),
        labels=labels,
    )


def with_evidence(
    platform: PublishedPlatform, said: Sequence[tuple[Evidence, Said]], *, signed: bool
) -> PublishedPlatform:
    """The platform with what refers to it now."""
    found = [one for _, one in said]
    return platform.model_copy(
        update={
            "sbom": next((one.sbom for one in found if one.sbom), None),
            "scan": max((one.scan for one in found if one.scan), key=lambda scan: scan.started, default=None),
            "checks": tuple(sorted((o.checks for o in found if o.checks), key=lambda c: c.started, reverse=True)),
            "curves": curves.distinct(curve for one in found for curve in one.curves),
            "evidence": tuple(entry for entry, _ in said),
            "signed": signed or any(entry.kind == "signature" for entry, _ in said),
        }
    )


def described(image: str, platforms: Sequence[PublishedPlatform], names: Iterable[str], ours: Ours) -> Described:
    """What labels, tags and the matrix tell; the platforms of an index are of one target."""
    labels = platforms[0].labels
    entry = ours.matrix.images[image]
    axes = {label.removeprefix(AXIS): value for label, value in labels.items() if label.startswith(AXIS)}
    versions = {label.removeprefix(COMPONENT): v for label, v in labels.items() if label.startswith(COMPONENT)}
    fixed, moving, revision = tags.split(tuple(names), entry.tags, axes)
    order = {axis: number for number, axis in enumerate(entry.axes)}
    return Described(
        target=labels.get("imagebuild.target", ""),
        image=image,
        description=labels.get("org.opencontainers.image.description", entry.description),
        axes=dict(sorted(axes.items(), key=lambda item: (order.get(item[0], len(order)), item[0]))),
        versions=versions,
        stack=stack_of(versions, ours.provides),
        tags=fixed,
        aliases=moving,
        revision=labels.get(REVISION) or revision,
        created=max(platform.created for platform in platforms),
        restricted={name: text for name, text in ours.plan.restricted.items() if name in versions},
    )


def stack_of(versions: Mapping[str, str], provides: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """What people choose by besides axes."""
    known = {name: version for c, version in versions.items() for name in (c, *provides.get(c, ()))}
    # HPC-X says by itself which Open MPI is in it; its number of Open MPI is only the series.
    mpi = f"HPC-X {known['hpcx']}" if "hpcx" in known else f"Open MPI {known['mpi']}" if "mpi" in known else ""
    return {name: text for name, text in (("nccl", known.get("nccl", "")), ("mpi", mpi)) if text}


def newest_first(images: Iterable[PublishedImage]) -> list[PublishedImage]:
    """The order of the catalogue within one image; of those built at the same time, that of their versions."""
    return sorted(images, key=lambda one: (*_age(one), tags.natural(one.tag), one.digest), reverse=True)


def _age(image: PublishedImage) -> tuple[str, str]:
    """Reproducible images are all of the time of their commit; the checks ran later."""
    return image.created, max((c.started for p in image.platforms for c in p.checks), default="")
