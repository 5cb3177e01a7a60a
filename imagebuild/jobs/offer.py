"""The images that a job can run, read from the JSON of `imagebuild plan` and of `imagebuild catalog`."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeVar

from pydantic import ConfigDict, Field

from imagebuild.core.errors import ConfigError, ResultError
from imagebuild.core.fields import ARCHS, Arch, Digest, ImageName, Model, Platform, Repository, Tag
from imagebuild.core.yaml import read_written


class _Part(Model):
    """A part of a JSON file. Keys of the file for which the class has no field are ignored."""

    model_config = ConfigDict(extra="ignore")


class PlannedTarget(_Part):
    """A target, which is an image to build, in the JSON of `imagebuild plan`."""

    id: str
    image: str
    axes: dict[str, str]
    platforms: tuple[Platform, ...]
    components: dict[str, str]
    """Maps each component to its version."""
    name: ImageName
    aliases: tuple[ImageName, ...] = ()


class PlanFile(_Part):
    """The JSON of `imagebuild plan --json`."""

    option: ClassVar = "--plan"
    problem: ClassVar = "not a plan; write one with `imagebuild plan --json FILE`, or name another file"
    targets: tuple[PlannedTarget, ...]
    provides: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Maps each component to the roles that it fulfils, such as `nccl-wheel` to `nccl`."""
    gpu_architectures: dict[str, str] = Field(default_factory=dict)
    """Maps each compute capability, such as `90`, to the versions of CUDA that can compile for it."""


class VerifiedChecks(_Part):
    """The numbers of checks that passed and failed in one run of `imagebuild verify`."""

    passed: int
    failed: int


class CatalogPlatform(_Part):
    """The published image for one platform."""

    platform: str
    checks: tuple[VerifiedChecks, ...] = ()
    """The results of the runs of `imagebuild verify` on the image, the newest first."""


class CatalogImage(_Part):
    """A published image in `images.json`."""

    target: str
    image: str
    axes: dict[str, str]
    versions: dict[str, str]
    stack: dict[str, str] = Field(default_factory=dict)
    repository: Repository
    digest: Digest
    tags: tuple[Tag, ...]
    aliases: tuple[Tag, ...]
    platforms: tuple[CatalogPlatform, ...]
    verified_by: str | None = None
    """Empty if the signer of the catalogue did not sign the image."""


class CatalogFile(_Part):
    """The file `images.json`, which `imagebuild catalog` writes."""

    option: ClassVar = "--catalog"
    problem: ClassVar = "not a list of images; name the images.json that `imagebuild catalog -o DIR` writes"
    images: tuple[CatalogImage, ...]
    gpu_architectures: dict[str, str] = Field(default_factory=dict)
    """Maps each compute capability, such as `90`, to the versions of CUDA that can compile for it."""


F = TypeVar("F", PlanFile, CatalogFile)


@dataclass(frozen=True)
class OfferedImage:
    """An image that a job can run."""

    id: str
    """Id of the target, or a tag if the target is not known."""
    image: str
    """Name of the image in the matrix."""
    axes: Mapping[str, str]
    arches: tuple[Arch, ...]
    components: Mapping[str, str]
    """Maps each component to its version."""
    nccl: str
    """Version of NCCL. Empty if the version is not known."""
    reference: str
    """Name by which nodes pull the image."""
    aliases: tuple[str, ...] = ()
    """Other names by which `--image` can name the image."""
    unverified: frozenset[Arch] = frozenset()
    """CPU architectures on which the checks of the image are not known to have passed. On these architectures, a job
    uses the image only if --image names the image."""

    @property
    def cuda(self) -> str:
        """Version of CUDA; empty for an image without CUDA."""
        return self.axes.get("cuda", "")


@dataclass(frozen=True)
class Offer:
    """The images among which a job can choose. If several images fit equally well, the first is chosen."""

    images: tuple[OfferedImage, ...] = ()
    places: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Maps each pair of image name and distribution release to its position in the plan. The last one is preferred."""
    is_published: bool = False
    """True if the images come from a catalogue, so the images exist in a registry."""
    gpu_architectures: Mapping[str, str] = field(default_factory=dict)
    """Maps each compute capability, such as `90`, to the versions of CUDA that can compile for it. A compute capability
    that is absent does not restrict the version of CUDA."""

    @property
    def noun(self) -> str:
        """Words for one of the images in messages."""
        return "published image" if self.is_published else "image of the plan"


def planned_offer(plan: PlanFile, registry: str | None = None) -> Offer:
    """Return the images of a plan. If not None, `registry` replaces the registry and folder in the images' names."""
    images = []
    for target in plan.targets:
        planned = f"{target.name.partition(f'/{target.image}:')[0]}/"
        names = [target.name, *target.aliases]
        if registry is not None:
            names = [f"{registry}/{n.removeprefix(planned)}" if n.startswith(planned) else n for n in names]
        roles = {name: (name, *plan.provides.get(name, ())) for name in target.components}
        nccl = next((version for name, version in target.components.items() if "nccl" in roles[name]), "")
        about = target.id, target.image, target.axes, _arches(target.platforms), target.components, nccl
        images.append(OfferedImage(*about, reference=names[0], aliases=tuple(names[1:])))
    places = {(image.image, image.axes.get("os", "")): place for place, image in enumerate(images)}
    return Offer(tuple(images), places, gpu_architectures=plan.gpu_architectures)


def published_offer(catalog: CatalogFile, planned: Offer) -> Offer:
    """Return the images of a catalogue, the newest first. The order of distribution releases comes from `planned`."""
    images = []
    for image in catalog.images:
        if "cuda" not in image.axes:
            continue
        # Without the signature, anybody can have put a verified image behind another one.
        counted = image.platforms if image.verified_by != "" else ()
        # As in `attest verify`, a later run with fewer checks does not hide a failure.
        runs = {p.platform: (sum(c.passed for c in p.checks), sum(c.failed for c in p.checks)) for p in counted}
        passed = {platform for platform, (good, bad) in runs.items() if good and not bad}
        tags = (*image.tags, *image.aliases)
        arches = _arches([platform.platform for platform in image.platforms])
        id_, nccl = image.target or next(iter(tags), image.digest), image.stack.get("nccl", "")
        about = id_, image.image, image.axes, arches, image.versions, nccl, f"{image.repository}@{image.digest}"
        aliases, unverified = (f"{image.repository}:{tag}" for tag in tags), set(ARCHS).difference(_arches(passed))
        images.append(OfferedImage(*about, aliases=tuple(aliases), unverified=frozenset(unverified)))
    architectures = catalog.gpu_architectures or planned.gpu_architectures
    return replace(planned, images=tuple(images), is_published=True, gpu_architectures=architectures)


def _arches(platforms: Collection[str]) -> tuple[Arch, ...]:
    return tuple(arch for arch in ARCHS if f"linux/{arch}" in platforms)


def read_images(model: type[F], text: str, name: str) -> F:
    """Return the plan or the catalogue in a JSON text. Raises ConfigError, with the file's name, if it is neither."""
    try:
        return read_written(model, text, name)
    except ResultError:
        raise ConfigError(f"{model.option} {name}: {model.problem}") from None


def enroot_reference(reference: str) -> str:
    """Return the address of an image for enroot: `#` follows the registry, and a digest replaces the tag.

    enroot 3 and 4.0 do not support `@`, but they request the text after the colon from the registry, be it a tag or a
    digest."""
    name, at, digest = reference.partition("@")
    if at:
        reference = f"{re.sub(r':[^:/]*$', '', name)}:{digest}"
    first, slash, rest = reference.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        return f"docker://{first}#{rest}"
    return f"docker://{reference}"
