"""Choose what a request leaves open: the number of nodes, the image, the plug-in. Refuse what does not fit. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeVar, get_args

from packaging.version import InvalidVersion, Version

from imagebuild.core.errors import ConfigError, suggestion
from imagebuild.core.fields import Arch, Model, Platform, major, matches, satisfies
from imagebuild.core.yaml import YamlFile
from imagebuild.jobs.environment import JobSettings, Variable
from imagebuild.jobs.facts import (
    COLLECTIVES,
    Cluster,
    Container,
    Expect,
    Fabric,
    Feature,
    JobFacts,
    JobHardware,
    JobRequest,
    JobTest,
    Nodes,
    Pod,
    Site,
    Stack,
)
from imagebuild.project.component import Support
from imagebuild.project.matrix import GpuArchitecture, Target
from imagebuild.project.records import Catalog

DEFAULT_NODES = 8
"""Nodes of a job without --nodes on hardware whose NVLink ends at the node."""
REFERENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]*(@sha256:[0-9a-f]{64})?")
DRIVERS = {"12": "525", "13": "580"}
"""Major version of CUDA → the oldest driver that runs it, by NVIDIA's rule of minor version compatibility."""
ARCH_NAMES: Mapping[Arch, tuple[str, ...]] = {"amd64": ("amd64", "x86_64"), "arm64": ("arm64", "aarch64")}

M = TypeVar("M", bound=Model)


@dataclass(frozen=True)
class Scale:
    """Tell the size of a job."""

    nodes: int
    racks: int
    nodes_per_rack: int
    """All nodes, where NVLink ends at the node."""


@dataclass(frozen=True)
class Offer:
    """List the images that a job can run: those of the plan, or of a catalogue. Of equal ones, the first is chosen."""

    targets: tuple[Target, ...] = ()
    provides: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Component → other components that it stands for."""
    architectures: Mapping[str, GpuArchitecture] = field(default_factory=dict)
    """Compute capability without the dot → the versions of CUDA that have programs for it."""
    noun: str = "image of the plan"
    """An image of the offer, in messages."""


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


@dataclass(frozen=True)
class Choices:
    """Hold everything that is decided before the environment is computed."""

    request: JobRequest
    hardware: JobHardware
    fabric: Fabric
    cluster: Cluster
    site: Site
    """Additions of the cluster to the fabric."""
    test: JobTest
    nodes: Nodes
    scale: Scale
    features: Mapping[str, Feature]
    container: Container
    plugin: str
    image: JobImage
    stack: Stack
    nccl: str
    """The image's version of NCCL; if it is not known, the newest in the table of NCCL's variables."""
    conditions: Mapping[str, str]
    """Name → value of everything that a condition (`when`) of the facts can use."""

    @property
    def comparable(self) -> bool:
        """Return whether the profile's limits and references are valid for this job."""
        same_network = (self.hardware.network or "none") in self.fabric.measures
        return same_network and all(feature.comparable for feature in self.features.values())


@dataclass(frozen=True)
class Job:
    """Describe a job with nothing left to decide."""

    choices: Choices
    name: str
    variables: tuple[Variable, ...]
    expected_lines: tuple[Expect, ...]
    pod: Pod
    parameters: Mapping[str, str]
    """Parameters of `--set`."""
    messages: tuple[str, ...]
    """Warnings and notes for the user."""

    @property
    def request(self) -> JobRequest:
        """Return the request that the job was made from."""
        return self.choices.request

    @property
    def hardware(self) -> JobHardware:
        """Return the hardware that the job runs on."""
        return self.choices.hardware

    @property
    def scale(self) -> Scale:
        """Return the size of the job."""
        return self.choices.scale

    @property
    def fabric(self) -> Fabric:
        """Return the network between nodes."""
        return self.choices.fabric

    @property
    def cluster(self) -> Cluster:
        """Return the constants of the site."""
        return self.choices.cluster

    @property
    def test(self) -> JobTest:
        """Return the measurement."""
        return self.choices.test

    @property
    def image(self) -> JobImage:
        """Return the image that runs."""
        return self.choices.image

    @property
    def nodes(self) -> Nodes:
        """Return the nodes of the cluster that the job may use."""
        return self.choices.nodes

    @property
    def ranks(self) -> int:
        """Return the number of ranks: one for each GPU."""
        return self.scale.nodes * self.hardware.gpus

    @property
    def claims(self) -> bool:
        """Return whether a ComputeDomain gives pods their channel of the rack-wide NVLink."""
        return any(feature.claims for feature in self.choices.features.values())


def choose(request: JobRequest, hardware: JobHardware, facts: JobFacts, offer: Offer, settings: JobSettings) -> Choices:
    """Decide everything that the request leaves open.

    Raises ConfigError for unknown names, and with the reason for combinations that are impossible.
    """
    fabric = find_facts(facts.fabrics, request.fabric, "--fabric", "fabric")
    cluster = find_facts(facts.clusters, request.cluster, "--cluster", "cluster")
    test = find_facts(facts.tests, request.test, "--test", "test")
    for name in request.features:
        find_facts(facts.features, name, "--with", "feature")
    if hardware.capability is None:
        raise ConfigError(f"--profile {hardware.profile}: nccl-tests runs on NVIDIA GPUs only")

    site = cluster.fabrics.get(request.fabric, Site())
    nodes = site.nodes.get(hardware.gpu) or cluster.nodes.get(hardware.gpu) or Nodes()
    own_nodes: dict[str, Any] = {
        name: value
        for name, value in settings.parameters.items()
        if name in {"cpu", "memory", "partition", "constraint"}
    }
    if "rack-nodes" in settings.parameters:
        own_nodes["rack_nodes"] = max(1, int(settings.parameters["rack-nodes"]))
    nodes = nodes.model_copy(update=own_nodes)
    rack_nodes = min(nodes.rack_nodes or hardware.rack_nodes, hardware.rack_nodes)
    scale = choose_scale(hardware, rack_nodes, request.nodes, request.racks)

    names = sorted({*request.features, *(["multirack"] if scale.racks > 1 else [])})
    features = {name: facts.features[name].model for name in names}
    plugin = settings.parameters.get("plugin") or site.plugin or fabric.plugin
    for name, feature in features.items():
        if feature.plugin and settings.parameters.get("plugin") not in (None, feature.plugin):
            raise ConfigError(f"--set plugin={plugin}: --with {name} needs the plug-in {feature.plugin}")
        plugin = feature.plugin or plugin
    container: Container = "kubernetes"
    if request.scheduler == "slurm":
        container = "none" if request.container == "none" else "pyxis"

    conditions = {
        **{name: _yes_or_no(name in features) for name in facts.features},
        **{name: _yes_or_no(name in test.collectives) for name in COLLECTIVES},
        "scheduler": request.scheduler,
        "container": container,
        "profile": hardware.profile,
        "gpu": hardware.gpu,
        "arch": hardware.arch,
        "capability": hardware.capability,
        "network": hardware.network or "none",
        "mnnvl": _yes_or_no(hardware.mnnvl),
        "rack-nvlink": _yes_or_no(hardware.mnnvl and scale.nodes > 1 and "nics" not in features),
        "nvls": _yes_or_no(hardware.nvls),
        "fabric": request.fabric,
        "cluster": request.cluster,
        "test": request.test,
        "nodes": str(scale.nodes),
        "racks": str(scale.racks),
        "plugin": plugin,
    }
    combined: dict[str, Fabric | Feature] = {f"--fabric {request.fabric}": fabric}
    combined |= {f"--with {name}": feature for name, feature in features.items()}
    # Before an image is chosen, so that a bad combination is reported rather than that no image fits it.
    _refuse_bad_combinations(combined, conditions, unknown={"nccl", "stack"})

    if container == "none":
        if request.image:
            raise ConfigError("--image: with --container none the programs of the nodes run, and no image")
        image = JobImage("", "other", None, None)
    elif request.image:
        image = named_image(request.image, offer, facts.stacks)
    else:
        driver = settings.parameters.get("driver") or cluster.driver
        image = newest_image(offer, facts.stacks, hardware, "none" if plugin == "host" else plugin, driver)
    if image.arches is not None and hardware.arch not in image.arches:
        arches = f"is for {', '.join(image.arches)}, but {hardware.profile} is {hardware.arch}"
        raise ConfigError(f"--image {image.reference}: {arches}; use another image")
    image = replace(image, nccl=request.nccl or image.nccl)
    nccl = image.nccl or facts.nccl_variables.releases[-1]
    conditions |= {"stack": image.stack, "nccl": nccl}
    _refuse_bad_combinations(combined, conditions)

    own_stack = {name: settings.parameters[name] for name in ("programs", "suffix") if name in settings.parameters}
    return Choices(
        request=request,
        hardware=hardware,
        fabric=fabric,
        cluster=cluster,
        site=site,
        test=test,
        nodes=nodes,
        scale=scale,
        features=features,
        container=container,
        plugin=plugin,
        image=image,
        stack=facts.stacks[image.stack].model.model_copy(update=own_stack),
        nccl=nccl,
        conditions=conditions,
    )


def find_facts(files: Mapping[str, YamlFile[M]], name: str, option: str, noun: str) -> M:
    """Return the facts of a name. Raises ConfigError with the most similar name if there are none."""
    if name not in files:
        raise ConfigError(f"{option} {name}: unknown {noun}{suggestion(name, files)}")
    return files[name].model


def _yes_or_no(value: bool) -> Literal["yes", "no"]:
    return "yes" if value else "no"


def _refuse_bad_combinations(
    combined: Mapping[str, Fabric | Feature], conditions: Mapping[str, str], unknown: Iterable[str] = ()
) -> None:
    """Raise ConfigError with the reason why an option does not fit; ignore rules about names that are `unknown` yet."""
    for option, facts in combined.items():
        against: list[Support] = [rule for rule in facts.supports if not matches(rule.when, conditions)]
        against += [rule for rule in facts.excludes if matches(rule.when, conditions)]
        for rule in against:
            if not set(unknown) & set(rule.when):
                raise ConfigError(f"{option}: {rule.reason}")


# The number of nodes


def choose_scale(hardware: JobHardware, rack_nodes: int, nodes: int | None, racks: int | None) -> Scale:
    """Return the size of a job from `--nodes` or `--racks`; `rack_nodes` nodes of a rack can be used.

    Raises ConfigError if the nodes cannot be divided evenly among racks.
    """
    if nodes is not None and racks is not None:
        raise ConfigError("--nodes and --racks exclude each other; use one of them")
    for option, number in (("--nodes", nodes), ("--racks", racks)):
        if number is not None and number < 1:
            raise ConfigError(f"{option} {number}: must be at least 1")
    if not hardware.mnnvl:
        if racks is not None:
            raise ConfigError(f"--racks {racks}: NVLink of {hardware.profile} ends at the node; use --nodes")
        return Scale(nodes or DEFAULT_NODES, 1, nodes or DEFAULT_NODES)
    if nodes is None:
        return Scale(rack_nodes * (racks or 1), racks or 1, rack_nodes)
    needed = -(-nodes // rack_nodes)
    if nodes % needed:
        near = sorted({nodes - nodes % needed, nodes + needed - nodes % needed})
        offers = " or ".join(f"{n} ({-(-n // rack_nodes)} * {n // -(-n // rack_nodes)})" for n in near if n > 0)
        problem = f"cannot be divided evenly among {needed} racks of up to {rack_nodes} nodes"
        raise ConfigError(f"--nodes {nodes}: {problem}; use {offers}")
    return Scale(nodes, needed, nodes // needed)


# The image


def published_offer(offer: Offer, catalog: Catalog) -> Offer:
    """Return the same offer with the images of a catalogue, each by its digest, the newest first."""
    targets = []
    for image in catalog.images:
        if "cuda" not in image.axes:
            continue
        present = {platform.platform for platform in image.platforms}
        platforms: tuple[Platform, ...] = get_args(Platform)
        tags = tuple(f"{image.repository}:{tag}" for tag in image.tags)
        aliases = tuple(f"{image.repository}:{alias}" for alias in image.aliases)
        targets.append(
            Target(
                id=image.target or image.tag,
                image=image.image,
                axes=image.axes,
                platforms=tuple(platform for platform in platforms if platform in present),
                components=image.versions,
                name=image.reference,
                tags=tags,
                aliases=(*tags, *aliases),
            )
        )
    return replace(offer, targets=tuple(targets), noun="published image")


def named_image(reference: str, offer: Offer, stacks: Mapping[str, YamlFile[Stack]]) -> JobImage:
    """Return what is known of an image: everything if the offer has it, by id or tag; else what its name tells."""
    if not REFERENCE.fullmatch(reference):
        raise ConfigError(f"--image {reference!r}: not the name of an image; write REPOSITORY:TAG or REPOSITORY@DIGEST")
    for target in offer.targets:
        if reference in (target.id, target.name, *target.aliases):
            image = _image_of_target(target, _stack_of_target(target, stacks) or "other", offer)
            return image if reference == target.id else replace(image, reference=reference)
    stack = next(
        (n for n, file in stacks.items() if any(fnmatchcase(reference, g) for g in file.model.images)), "other"
    )
    tag = reference.rpartition("/")[2]
    version = re.search(r"nccl[-_]?v?(\d+\.\d+\.\d+)", tag)
    arches = tuple(arch for arch, names in ARCH_NAMES.items() if any(name in tag for name in names))
    return JobImage(reference, stack, version[1] if version else None, arches or None)


def newest_image(
    offer: Offer, stacks: Mapping[str, YamlFile[Stack]], hardware: JobHardware, plugin: str, driver: str | None
) -> JobImage:
    """Return the newest image that fits. Raises ConfigError with the first requirement that no image meets."""
    gpu = offer.architectures.get((hardware.capability or "").replace(".", ""))
    requirements: dict[str, Callable[[Target, str], bool]] = {
        "has nccl-tests": lambda _target, _stack: True,  # as every image that has a stack
        f"runs on {hardware.arch}": lambda target, _stack: f"linux/{hardware.arch}" in target.platforms,
        f"has the plug-in {plugin!r}": lambda _target, stack: plugin in (stacks[stack].model.plugins or {plugin: ""}),
        f"has programs for compute capability {hardware.capability}": lambda target, _stack: (
            gpu is None or satisfies(target.axes["cuda"], gpu.cuda)
        ),
        f"runs on driver {driver}": lambda target, _stack: (
            driver is None or int(major(driver)) >= int(DRIVERS.get(major(target.axes["cuda"]), "0"))
        ),
    }
    candidates = [
        (target, stack)
        for target in offer.targets
        if (stack := _stack_of_target(target, stacks)) and target.axes.get("variant") != "devel"
    ]
    met: list[str] = []
    for requirement, fits in requirements.items():
        candidates = [(target, stack) for target, stack in candidates if fits(target, stack)]
        if not candidates:
            problem = f"that {' and '.join(met)} also {requirement}" if met else requirement
            raise ConfigError(f"no {offer.noun} {problem}; name an image with --image")
        met.append(requirement)
    target, stack = max(candidates, key=lambda pair: (stacks[pair[1]].model.prefer, _age_order(pair[0])))
    return _image_of_target(target, stack, offer)


def _age_order(target: Target) -> tuple[Version, str]:
    try:
        return Version(target.axes["cuda"]), target.axes.get("os", "")
    except InvalidVersion:
        return Version("0"), ""


def _stack_of_target(target: Target, stacks: Mapping[str, YamlFile[Stack]]) -> str | None:
    fits = [
        name
        for name, file in stacks.items()
        if file.model.components and set(file.model.components) <= set(target.components)
    ]
    return max(fits, key=lambda name: stacks[name].model.prefer, default=None)


def _image_of_target(target: Target, stack: str, offer: Offer) -> JobImage:
    nccl = next(
        (
            version
            for component, version in target.components.items()
            if "nccl" in (component, *offer.provides.get(component, ()))
        ),
        "",
    )
    plain = re.match(r"\d+(\.\d+)+", nccl)
    arches = tuple(arch for arch in ARCH_NAMES if f"linux/{arch}" in target.platforms)
    return JobImage(target.name, stack, plain[0] if plain else None, arches, DRIVERS.get(major(target.axes["cuda"])))
