"""Choose the image of a job among those on offer. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import get_args

from imagebuild.bench.profiles import Profile
from imagebuild.core.errors import ConfigError, nearest
from imagebuild.core.fields import ARCHS, CPUS, DIGEST, Arch, Platform, YamlFile, full_reference, major, satisfies
from imagebuild.jobs.facts import Stack
from imagebuild.project.matrix import GpuArchitecture
from imagebuild.project.plan import Target
from imagebuild.project.records import Catalog

DRIVERS = {"12": "525", "13": "580"}
"""Major version of CUDA → the oldest driver that runs it, by NVIDIA's rule of minor version compatibility."""


@dataclass(frozen=True)
class JobImage:
    """Describe the image that a job runs, as far as it is known."""

    reference: str
    """Empty for a job without a container."""
    stack: str
    nccl: str | None
    arches: tuple[Arch, ...] | None
    """None if the architectures are not known."""
    driver: str | None = None
    """The oldest driver that the image runs on; None if it is not known."""
    is_planned: bool = False
    """It comes from the plan, so it is not known whether it was ever built."""
    components: tuple[str, ...] = ()
    """Components that it is known to have."""


@dataclass(frozen=True)
class Offer:
    """List the images that a job can run: those of the plan, or of a catalogue. Of equal ones, the first is chosen."""

    targets: tuple[Target, ...] = ()
    provides: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Component → other components that it stands for."""
    architectures: Mapping[str, GpuArchitecture] = field(default_factory=dict)
    """Compute capability without the dot → the versions of CUDA that have programs for it."""
    planned: Mapping[tuple[str, str], int] | None = None
    """Of a catalogue: image and release of a distribution → its place in the plan."""
    unnamed: bool = False
    """The names of the images have no registry, so that nobody can pull them."""
    unverified: frozenset[tuple[str, Platform]] = frozenset()
    """Images, each with a platform on which its checks are not known to have passed; they run only if named."""

    @property
    def places(self) -> Mapping[tuple[str, str], int]:
        """Return image and release of a distribution → place in the plan; the last release is preferred."""
        if self.planned is not None:
            return self.planned
        return {(target.image, target.axes["os"]): place for place, target in enumerate(self.targets)}


def published_offer(offer: Offer, catalog: Catalog) -> Offer:
    """Return the same offer with the images of a catalogue, each by its digest, the newest first."""
    platforms: tuple[Platform, ...] = get_args(Platform)
    targets, unverified = [], set()
    for image in catalog.images:
        if "cuda" not in image.axes:
            continue
        present = {platform.platform for platform in image.platforms}
        passed = {p.platform for p in image.platforms if p.checks and not p.checks[0].failed and p.checks[0].passed}
        unverified |= {(image.reference, platform) for platform in platforms if platform not in passed}
        tags = tuple(f"{image.repository}:{tag}" for tag in image.tags)
        targets.append(
            Target(
                id=image.target or image.tag,
                image=image.image,
                axes=image.axes,
                platforms=tuple(platform for platform in platforms if platform in present),
                components=image.versions,
                name=image.reference,
                tags=tags,
                aliases=(*tags, *(f"{image.repository}:{alias}" for alias in image.aliases)),
            )
        )
    return replace(
        offer, targets=tuple(targets), planned=offer.places, unnamed=False, unverified=frozenset(unverified)
    )  # fmt: skip


def named_image(reference: str, offer: Offer, stacks: Mapping[str, YamlFile[Stack]]) -> JobImage:
    """Return what is known of an image: everything if the offer has it, by id or tag; else what its name shows.

    Raises ConfigError for what is no name of an image, or one that nodes would look for in Docker Hub.
    """
    if not re.fullmatch(rf"[A-Za-z0-9][A-Za-z0-9._:/-]*(@{DIGEST})?", reference):
        raise ConfigError(f"--image {reference!r}: not the name of an image; write REPOSITORY:TAG or REPOSITORY@DIGEST")
    for target in offer.targets:
        if reference in (target.id, target.name, *target.aliases):
            image = _image_of_target(target, _stack_of_target(target, stacks) or "other", offer)
            return image if reference == target.id else replace(image, reference=reference)
    if full_reference(reference) != reference:
        near = nearest(reference, [target.id for target in offer.targets])
        what = f"did you mean {near!r}?" if near else f"write {full_reference(reference)} if you mean that one"
        raise ConfigError(f"--image {reference}: has no registry, so nodes would ask Docker Hub for it; {what}")
    fits = (name for name, file in stacks.items() if any(fnmatchcase(reference, glob) for glob in file.model.images))
    tag = reference.rpartition("/")[2]
    version = re.search(r"nccl[-_]?v?(\d+\.\d+\.\d+)", tag)
    arches = tuple(arch for arch in ARCHS if arch in tag or CPUS[arch] in tag)
    return JobImage(reference, next(fits, "other"), version[1] if version else None, arches or None)


def newest_image(
    offer: Offer, stacks: Mapping[str, YamlFile[Stack]], profile: Profile, plugin: str, driver: str | None
) -> JobImage:
    """Return the newest image that fits. Raises ConfigError with what the images lack if there is none."""
    arch, capability = profile.node.cpu, (profile.gpu.compute_capability or "").replace(".", "")
    gpu = offer.architectures.get(capability)

    def lack(target: Target, stack: str) -> str:
        """Return the first requirement that an image does not meet; empty if it meets all."""
        cuda, compiled_for = target.axes["cuda"], target.axes.get("gpu", capability)
        lacks = {
            arch: f"linux/{arch}" not in target.platforms,
            f"the plug-in {plugin!r}": stacks[stack].model.lacks_plugin(plugin, target.components),
            f"compute capability {profile.gpu.compute_capability}": compiled_for != capability
            or bool(gpu and not satisfies(cuda, gpu.cuda)),
            f"driver {driver}": driver is not None and int(major(driver)) < int(DRIVERS.get(major(cuda), "0")),
            f"that all checks passed on {arch}": (target.name, f"linux/{arch}") in offer.unverified,
        }
        return next((requirement for requirement, is_lacking in lacks.items() if is_lacking), "")

    candidates = [
        (target, stack)
        for target in offer.targets
        if (stack := _stack_of_target(target, stacks)) and target.axes.get("variant") != "devel"
    ]
    fitting = [candidate for candidate in candidates if not lack(*candidate)]
    if not fitting:
        noun = "image of the plan" if offer.planned is None else "published image"
        if not candidates:
            raise ConfigError(f"no {noun} has nccl-tests; add it to the components of one, or name one with --image")
        lacks = Counter(lack(*candidate) for candidate in candidates)
        counted = ", ".join(f"{requirement} rules out {number}" for requirement, number in lacks.items())
        remedy = plugin_remedy(plugin, stacks) if any(repr(plugin) in requirement for requirement in lacks) else ""
        raise ConfigError(f"no {noun} fits: {counted}; {remedy}name an image with --image")

    def order(candidate: tuple[Target, str]) -> tuple[int, list[int], int]:
        target, stack = candidate
        version = [int(number) for number in re.findall(r"\d+", target.axes["cuda"])]
        place = offer.places.get((target.image, target.axes.get("os", "")), -1)
        return stacks[stack].model.prefer, version, place

    target, stack = max(fitting, key=order)
    return _image_of_target(target, stack, offer)


def plugin_remedy(plugin: str, stacks: Mapping[str, YamlFile[Stack]]) -> str:
    """Return the beginning of advice: how to get an image with an optional plug-in; empty for other plug-ins."""
    for name, file in stacks.items():
        if component := file.model.optional_plugins.get(plugin):
            return f"build {name} with --with {component}, give --with {component} here, too, or "
    return ""


def _stack_of_target(target: Target, stacks: Mapping[str, YamlFile[Stack]]) -> str | None:
    known = {name: file.model for name, file in stacks.items() if file.model.components}
    fits = [name for name, stack in known.items() if set(stack.components) <= set(target.components)]
    return max(fits, key=lambda name: known[name].prefer, default=None)


def _image_of_target(target: Target, stack: str, offer: Offer) -> JobImage:
    versions = (v for name, v in target.components.items() if "nccl" in (name, *offer.provides.get(name, ())))
    plain = re.match(r"\d+(\.\d+)+", next(versions, ""))
    return JobImage(
        target.name,
        stack,
        plain[0] if plain else None,
        tuple(arch for arch in ARCHS if f"linux/{arch}" in target.platforms),
        driver=DRIVERS.get(major(target.axes["cuda"])),
        is_planned=offer.planned is None,
        components=tuple(target.components),
    )
