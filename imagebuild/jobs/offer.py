"""The images that a job can run, read from the JSON of `imagebuild plan` and of `imagebuild catalog`."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from pydantic import ConfigDict, Field

from imagebuild.core.errors import ConfigError, ResultError
from imagebuild.core.fields import ARCHS, Arch, Model, Platform
from imagebuild.core.yaml import read_written


class _Part(Model):
    """A part of a JSON file. Other keys in the file are ignored."""

    model_config = ConfigDict(extra="ignore")


class PlannedTarget(_Part):
    """A target of a plan."""

    id: str
    image: str
    axes: dict[str, str]
    platforms: tuple[Platform, ...]
    components: dict[str, str]
    """Maps each component to its version."""
    name: str
    aliases: tuple[str, ...] = ()


class PlanFile(_Part):
    """The JSON of `imagebuild plan --json`."""

    targets: tuple[PlannedTarget, ...]
    provides: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Maps each component to the roles that it fulfils, such as `nccl-wheel` to `nccl`."""
    gpu_architectures: dict[str, str] = Field(default_factory=dict)
    """Maps each compute capability, such as `90`, to the versions of CUDA that can compile for it."""


class VerifiedChecks(_Part):
    """The numbers of checks in one verification."""

    passed: int
    failed: int


class CatalogPlatform(_Part):
    """The published image for one platform."""

    platform: str
    checks: tuple[VerifiedChecks, ...] = ()
    """The verifications, the newest first."""


class CatalogImage(_Part):
    """A published image."""

    target: str
    image: str
    axes: dict[str, str]
    versions: dict[str, str]
    stack: dict[str, str] = Field(default_factory=dict)
    repository: str
    digest: str
    tags: tuple[str, ...]
    aliases: tuple[str, ...]
    platforms: tuple[CatalogPlatform, ...]


class CatalogFile(_Part):
    """The JSON of `imagebuild catalog`, `images.json`."""

    images: tuple[CatalogImage, ...]
    gpu_architectures: dict[str, str] = Field(default_factory=dict)
    """Maps each compute capability, such as `90`, to the versions of CUDA that can compile for it."""


@dataclass(frozen=True)
class OfferedImage:
    """An image that a job can run."""

    id: str
    """Id of the target, or a tag if the target is not known."""
    image: str
    """Name of the image in the matrix."""
    axes: Mapping[str, str]
    arches: tuple[Arch, ...]
    components: tuple[str, ...]
    nccl: str
    """Version of NCCL. Empty if it is not known."""
    reference: str
    """Name by which nodes pull it."""
    aliases: tuple[str, ...] = ()
    """Other names that users may give for it."""
    unverified: frozenset[Arch] = frozenset()
    """CPU architectures on which the checks of the image are not known to have passed. There, a job uses the image only
    if the user names it."""


@dataclass(frozen=True)
class Offer:
    """The images among which a job can choose. If several fit equally well, the first one is chosen."""

    images: tuple[OfferedImage, ...] = ()
    places: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Maps each pair of an image and a distribution release to its place in the plan. The last release is preferred."""
    is_published: bool = False
    """The images come from a catalogue, so they are known to exist."""
    gpu_architectures: Mapping[str, str] = field(default_factory=dict)
    """Maps each compute capability, such as `90`, to the versions of CUDA that can compile for it. A compute capability
    that is absent does not restrict the version of CUDA."""


def planned_offer(plan: PlanFile, registry: str | None = None) -> Offer:
    """Return the images of a plan. `registry`, if not None, replaces the registry and folder in their names."""
    images = []
    for target in plan.targets:
        planned = target.name.partition(f"/{target.image}:")[0]
        names = (target.name, *target.aliases)
        if registry is not None:
            names = tuple(
                f"{registry}/{name.removeprefix(f'{planned}/')}" if name.startswith(f"{planned}/") else name
                for name in names
            )
        fulfilling = (
            version for name, version in target.components.items() if "nccl" in (name, *plan.provides.get(name, ()))
        )
        images.append(
            OfferedImage(
                id=target.id,
                image=target.image,
                axes=target.axes,
                arches=_arches(target.platforms),
                components=tuple(target.components),
                nccl=next(fulfilling, ""),
                reference=names[0],
                aliases=names[1:],
            )
        )
    places = {(image.image, image.axes.get("os", "")): place for place, image in enumerate(images)}
    return Offer(tuple(images), places, gpu_architectures=plan.gpu_architectures)


def published_offer(catalog: CatalogFile, planned: Offer) -> Offer:
    """Return the images of a catalogue by digest, the newest first. `planned` gives the order of the releases."""
    images = []
    for image in catalog.images:
        if "cuda" not in image.axes:
            continue
        passed = {p.platform for p in image.platforms if p.checks and not p.checks[0].failed and p.checks[0].passed}
        tags = (*image.tags, *image.aliases)
        images.append(
            OfferedImage(
                id=image.target or next(iter(tags), image.digest),
                image=image.image,
                axes=image.axes,
                arches=_arches([platform.platform for platform in image.platforms]),
                components=tuple(image.versions),
                nccl=image.stack.get("nccl", ""),
                reference=f"{image.repository}@{image.digest}",
                aliases=tuple(f"{image.repository}:{tag}" for tag in tags),
                unverified=frozenset(ARCHS).difference(_arches(passed)),
            )
        )
    architectures = catalog.gpu_architectures or planned.gpu_architectures
    return replace(planned, images=tuple(images), is_published=True, gpu_architectures=architectures)


def _arches(platforms: Collection[str]) -> tuple[Arch, ...]:
    return tuple(arch for arch in ARCHS if f"linux/{arch}" in platforms)


def read_plan(text: str, name: str) -> PlanFile:
    """Return a plan from its JSON. Raises ConfigError, with the file's name, if the text is something else."""
    try:
        return read_written(PlanFile, text, name)
    except ResultError:
        problem = "not a plan; write one with `imagebuild plan --json FILE`, or name another file"
        raise ConfigError(f"--plan {name}: {problem}") from None


def read_catalog(text: str, name: str) -> CatalogFile:
    """Return a catalogue from its JSON. Raises ConfigError, with the file's name, if the text is something else."""
    try:
        return read_written(CatalogFile, text, name)
    except ResultError:
        problem = "not a list of images; write one with `imagebuild catalog`, or name another file"
        raise ConfigError(f"--catalog {name}: {problem}") from None


def enroot_reference(reference: str) -> str:
    """Return the address of an image for enroot: `#` follows the registry, and a digest replaces the tag.

    enroot 3 and 4.0 do not support `@`, but they request the text after the colon from the registry, be it a tag or a
    digest.
    """
    name, at, digest = reference.partition("@")
    if at:
        reference = f"{re.sub(r':[^:/]*$', '', name)}:{digest}"
    first, slash, rest = reference.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        return f"docker://{first}#{rest}"
    return f"docker://{reference}"
