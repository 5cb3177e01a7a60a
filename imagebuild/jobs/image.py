"""Which image a job runs, and what is in it. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from packaging.version import InvalidVersion, Version

from imagebuild.config import Document
from imagebuild.errors import ConfigError
from imagebuild.fields import Arch
from imagebuild.jobs.inputs import Image, Machine
from imagebuild.jobs.models import Stack
from imagebuild.models import Gpu, Target
from imagebuild.versions import major, satisfies

REFERENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]*(@sha256:[0-9a-f]{64})?")
DRIVERS = {"12": "525", "13": "580"}
"""Major of CUDA → the oldest driver for it, by NVIDIA's promise for minor versions."""
NAMES: Mapping[Arch, tuple[str, ...]] = {"amd64": ("amd64", "x86_64"), "arm64": ("arm64", "aarch64")}


@dataclass(frozen=True)
class Offer:
    """What the plan has to offer."""

    targets: tuple[Target, ...] = ()
    provides: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Component → other names it is known by."""
    architectures: Mapping[str, Gpu] = field(default_factory=dict)
    """Compute capability without the dot → what it needs."""


def choose(
    offer: Offer, stacks: Mapping[str, Document[Stack]], machine: Machine, plugin: str, driver: str | None
) -> Image:
    """The newest image of the plan that fits. Raises ConfigError with what stands against all others."""
    left = [(t, s) for t in offer.targets if (s := _stack_of(t, stacks)) and t.axes.get("variant") != "devel"]
    sieve: tuple[tuple[str, Callable[[Target, str], bool]], ...] = (
        ("has nccl-tests", lambda _t, _s: True),
        (f"runs on {machine.arch}", lambda t, _: f"linux/{machine.arch}" in t.platforms),
        (f"has the plug-in {plugin!r}", lambda _, s: plugin in (stacks[s].model.plugins or {plugin: ""})),
        (f"has programs for compute capability {machine.capability}", lambda t, _: _compiled(t, offer, machine)),
        (f"runs on driver {driver}", lambda t, _: _driver(t, driver)),
    )
    for what, fits in sieve:
        left = [(t, s) for t, s in left if fits(t, s)]
        if not left:
            raise ConfigError(f"no image of the plan that fits so far {what}; give one with --image")
    target, stack = max(left, key=lambda pair: (stacks[pair[1]].model.prefer, _order(pair[0])))
    return _image(target, stack, offer)


def named(reference: str, offer: Offer, stacks: Mapping[str, Document[Stack]], nccl: str | None) -> Image:
    """What is known of an image: all where the plan has it, by id or tag, else what its name tells."""
    if not REFERENCE.fullmatch(reference):
        raise ConfigError(f"--image {reference!r}: not the name of an image")
    for target in offer.targets:
        if reference == target.id or reference in (target.name, *target.aliases):
            found = _image(target, _stack_of(target, stacks) or "other", offer)
            name = found.reference if reference == target.id else reference
            return replace(found, reference=name, nccl=nccl or found.nccl)
    stack = next((n for n, d in stacks.items() if any(fnmatchcase(reference, g) for g in d.model.images)), "other")
    tag = reference.rpartition("/")[2]
    version = re.search(r"nccl[-_]?v?(\d+\.\d+\.\d+)", tag)
    arches = tuple(arch for arch, names in NAMES.items() if any(name in tag for name in names))
    return Image(reference, stack, nccl or (version[1] if version else None), arches or None)


def check_arch(image: Image, machine: Machine) -> None:
    """Raises ConfigError for an image of another architecture."""
    if image.arches is not None and machine.arch not in image.arches:
        raise ConfigError(
            f"--image {image.reference}: is for {', '.join(image.arches)}, but {machine.profile} is {machine.arch}"
        )


def _stack_of(target: Target, stacks: Mapping[str, Document[Stack]]) -> str | None:
    fits = [n for n, d in stacks.items() if d.model.components and set(d.model.components) <= set(target.components)]
    return max(fits, key=lambda n: stacks[n].model.prefer, default=None)


def _image(target: Target, stack: str, offer: Offer) -> Image:
    names = ((v, (c, *offer.provides.get(c, ()))) for c, v in target.components.items())
    nccl = next((v for v, known in names if "nccl" in known), None)
    arches: Iterable[Arch] = ("amd64", "arm64")
    plain = re.match(r"\d+(\.\d+)+", nccl or "")
    present = tuple(a for a in arches if f"linux/{a}" in target.platforms)
    return Image(target.name, stack, plain[0] if plain else None, present, DRIVERS.get(major(target.axes["cuda"])))


def _compiled(target: Target, offer: Offer, machine: Machine) -> bool:
    """Whether the toolkit of the image's programs knows the GPU."""
    known = offer.architectures.get((machine.capability or "").replace(".", ""))
    return known is None or satisfies(target.axes["cuda"], known.cuda)


def _driver(target: Target, driver: str | None) -> bool:
    return driver is None or int(major(driver)) >= int(DRIVERS.get(major(target.axes["cuda"]), "0"))


def _order(target: Target) -> tuple[Version, str]:
    try:
        return Version(target.axes["cuda"]), target.axes.get("os", "")
    except InvalidVersion:
        return Version("0"), ""
