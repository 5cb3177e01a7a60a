"""Choose what a request leaves open: the number of nodes, the image, the plug-in. Refuse what does not fit. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar, get_args

from packaging.version import InvalidVersion, Version

from imagebuild.bench.profiles import Profile
from imagebuild.core.errors import ConfigError, nearest, plural, suggestion
from imagebuild.core.fields import (
    ARCHS,
    CPUS,
    DIGEST,
    Arch,
    Model,
    Platform,
    YamlFile,
    full_reference,
    major,
    matches,
    satisfies,
)
from imagebuild.jobs.facts import (
    COLLECTIVES,
    Cluster,
    ClusterFabric,
    Container,
    Fabric,
    Feature,
    JobFacts,
    JobRequest,
    JobTest,
    Nodes,
    Stack,
    gpu_name,
)
from imagebuild.project.matrix import GpuArchitecture, Target
from imagebuild.project.records import Catalog

DEFAULT_NODES = 8
"""Nodes of a job without --nodes on hardware whose NVLink ends at the node."""
MOST_NODES = 9999
"""Names of pods have room for four digits."""
REFERENCE = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._:/-]*(@{DIGEST})?")
IMPORT_MINUTES = 15
"""Time for pyxis to import an image that no job had before, beside the time of the measurements."""
DRIVERS = {"12": "525", "13": "580"}
"""Major version of CUDA → the oldest driver that runs it, by NVIDIA's rule of minor version compatibility."""

M = TypeVar("M", bound=Model)


@dataclass(frozen=True)
class Scale:
    """Hold the size of a job."""

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
    planned: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Of a catalogue: image and release of a distribution → its place in the plan."""
    is_published: bool = False
    """The images are those of a catalogue, and not only planned."""
    unnamed: bool = False
    """The names of the images have no registry, so that nobody can pull them."""
    unverified: frozenset[tuple[str, Platform]] = frozenset()
    """Images, each with a platform on which its checks are not known to have passed; they run only if named."""


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
class Choices:
    """Hold everything that is decided before the environment is computed."""

    request: JobRequest
    profile: Profile
    gpu: str
    """Short name of the GPU, such as `h100`."""
    fabric: Fabric
    cluster: Cluster
    site: ClusterFabric
    """Additions of the cluster to the fabric."""
    test: JobTest
    nodes: Nodes
    """The nodes of the cluster that the job may use."""
    scale: Scale
    rounds: int
    """Number of measurements, one after the other, that share the time limit; 1 if the limit is for all of them."""
    features: Mapping[str, Feature]
    container: Container
    plugin: str
    image: JobImage
    stack: Stack
    nccl: str
    """The image's version of NCCL; if it is not known, the newest of the images on offer, and if those do not
    tell either, of the table of NCCL's variables."""
    conditions: Mapping[str, str]
    """Name → value of everything that a condition (`when`) of the facts can use."""
    parameters: Mapping[str, str]
    """Parameters of `--param`."""

    @property
    def mnnvl(self) -> bool:
        """Return whether NVLink connects several nodes."""
        return self.profile.hosts_per_domain > 1

    @property
    def ranks(self) -> int:
        """Return the number of ranks: one for each GPU."""
        return self.scale.nodes * self.profile.node.gpus

    @property
    def run_nodes(self) -> int:
        """Return the number of nodes that take part in one measurement."""
        return 2 if self.test.pairs else self.scale.nodes

    @property
    def run_ranks(self) -> int:
        """Return the number of ranks of one measurement."""
        return self.run_nodes * self.profile.node.gpus

    @property
    def claims(self) -> bool:
        """Return whether a ComputeDomain gives pods their channel of the rack-wide NVLink."""
        return any(feature.claims for feature in self.features.values())

    @property
    def comparable(self) -> bool:
        """Return whether the profile's limits and references are valid for this job."""
        same_network = self.conditions["network"] in self.fabric.measures
        return same_network and all(feature.comparable for feature in self.features.values())


def choose(
    request: JobRequest, profile: Profile, facts: JobFacts, offer: Offer, parameters: Mapping[str, str]
) -> Choices:
    """Decide everything that the request and its `--param` options leave open.

    Raises ConfigError for unknown names, and with the reason for combinations that are impossible.
    """
    _refuse_what_would_be_ignored(request)
    fabric = find_facts(facts.fabrics, request.fabric, "--fabric", "fabric")
    cluster = find_facts(facts.clusters, request.cluster, "--cluster", "cluster")
    test = find_facts(facts.tests, request.test, "--test", "test")
    for name in request.features:
        find_facts(facts.features, name, "--feature", "feature")
    if profile.gpu.compute_capability is None:
        raise ConfigError(f"--profile {profile.name}: nccl-tests runs on NVIDIA GPUs only")

    gpu, container = gpu_name(profile), container_of(request)
    site = cluster.fabrics.get(request.fabric, ClusterFabric())
    nodes = site.nodes.get(gpu) or cluster.nodes.get(gpu) or Nodes()
    own_nodes: dict[str, Any] = {name: parameters[name] for name in ("cpu", "memory") if name in parameters}
    if "rack-nodes" in parameters:
        own_nodes["rack_nodes"] = int(parameters["rack-nodes"])
        if own_nodes["rack_nodes"] > profile.hosts_per_domain:
            number = plural(profile.hosts_per_domain, "node")
            raise ConfigError(f"--param rack-nodes={parameters['rack-nodes']}: NVLink of {profile.name} joins {number}")
    nodes = nodes.model_copy(update=own_nodes)
    scale = choose_scale(profile, nodes.rack_nodes or profile.hosts_per_domain, request.nodes, request.racks)
    rounds = len(test.collectives) * (scale.nodes - 1 + scale.nodes % 2) if test.pairs else 1
    if test.pairs and scale.nodes == 1:
        raise ConfigError(f"--test {request.test}: one node has no pairs; take more --nodes")
    minutes = test.minutes * rounds + (IMPORT_MINUTES if container == "pyxis" else 0)
    test = test.model_copy(update={"minutes": int(parameters.get("minutes") or minutes)})
    if test.minutes * 2 < rounds:
        raise ConfigError(
            f"--param minutes={test.minutes}: too few for {rounds} rounds; take {-(-rounds // 2)} or more"
        )

    implied = ["multirack"] if scale.racks > 1 and "multirack" in facts.features else []
    names = sorted({*request.features, *implied})
    features = {name: facts.features[name].model for name in names}
    plugin = parameters.get("plugin") or site.plugin or fabric.plugin
    for name, feature in features.items():
        if feature.plugin and parameters.get("plugin") not in (None, feature.plugin):
            raise ConfigError(f"--param plugin={plugin}: --feature {name} needs the plug-in {feature.plugin}")
        plugin = feature.plugin or plugin

    mnnvl = profile.hosts_per_domain > 1
    yes_or_no = {
        **{name: name in features for name in facts.features},
        **{name: name in test.collectives for name in COLLECTIVES},
        "mnnvl": mnnvl,
        # of pairs, those with nodes of two racks do not have it
        "rack-nvlink": mnnvl and scale.nodes > 1 and "nics" not in features and not (test.pairs and scale.racks > 1),
        "nvls": profile.links[-1].nvls,
    }
    conditions = {
        **{name: "yes" if value else "no" for name, value in yes_or_no.items()},
        "scheduler": request.scheduler,
        "container": container,
        "profile": profile.name,
        "gpu": gpu,
        "arch": profile.node.cpu,
        "capability": profile.gpu.compute_capability,
        "network": profile.network.kind if profile.network else "none",
        "fabric": request.fabric,
        "cluster": request.cluster,
        "test": request.test,
        "nodes": str(scale.nodes),
        "racks": str(scale.racks),
        "plugin": plugin,
    }
    combined: dict[str, Fabric | Feature] = {f"--fabric {request.fabric}": fabric}
    combined |= {f"--feature {name}": feature for name, feature in features.items()}
    # Before an image is chosen: a bad combination is a better reason than that no image fits it.
    _refuse_bad_combinations(combined, conditions)

    driver = parameters.get("driver") or cluster.driver
    image = _choose_image(request, profile, facts, offer, plugin="none" if plugin == "host" else plugin, driver=driver)
    offered = [
        _image_of_target(target, "other", offer).nccl
        for target in offer.targets
        if _stack_of_target(target, facts.stacks)
    ]
    versions = [version for version in offered if version] or list(facts.nccl_variables.releases)
    nccl = image.nccl or max(versions, key=Version)
    conditions |= {"stack": image.stack, "nccl": nccl}
    _refuse_bad_combinations(combined, conditions)

    own_stack = {name: parameters[name] for name in ("programs", "suffix") if name in parameters}
    return Choices(
        request=request,
        profile=profile,
        gpu=gpu,
        fabric=fabric,
        cluster=cluster,
        site=site,
        test=test,
        nodes=nodes,
        scale=scale,
        rounds=rounds,
        features=features,
        container=container,
        plugin=plugin,
        image=image,
        stack=facts.stacks[image.stack].model.model_copy(update=own_stack),
        nccl=nccl,
        conditions=conditions,
        parameters=parameters,
    )


def container_of(request: JobRequest) -> Container:
    """Return what runs the ranks. Raises ConfigError for a container that the scheduler does not have."""
    if request.scheduler == "slurm":
        if request.container not in (None, "pyxis", "none"):
            raise ConfigError(f"--container {request.container}: use pyxis or none")
        return "none" if request.container == "none" else "pyxis"
    if request.container is not None:
        raise ConfigError(f"--container {request.container}: is for Slurm only; Kubernetes always runs the image")
    return "kubernetes"


def _refuse_what_would_be_ignored(request: JobRequest) -> None:
    """Raise ConfigError for an empty name, and for an option that another one makes pointless."""
    for name in ("image", "nccl", "registry"):
        if getattr(request, name) == "":
            raise ConfigError(f"--{name}: is empty; leave it out or give it a value")
    for option, names in (("--feature", request.features), ("--with", request.components)):
        for name in names:
            if not name:
                raise ConfigError(f"{option}: a name is empty; leave it out")
            if names.count(name) > 1:
                raise ConfigError(f"{option} {name}: given twice; leave one out")
    if request.nccl and not re.fullmatch(r"[0-9]+\.[0-9]+(\.[0-9]+)?", request.nccl):
        raise ConfigError(f"--nccl {request.nccl!r}: not a version of NCCL such as 2.28.3")
    where = {"--image": request.image, "--registry": request.registry, "--catalog": request.catalog}
    given = [option for option, value in where.items() if value]
    if request.container == "none" and given:
        raise ConfigError(f"{given[0]}: with --container none the nodes' own programs run, not an image")
    if request.image and any(setting.startswith("driver=") for setting in request.settings):
        raise ConfigError("--param driver: chooses between images, but --image names the image; leave one of them out")


def find_facts(files: Mapping[str, YamlFile[M]], name: str, option: str, noun: str) -> M:
    """Return the facts of a name. Raises ConfigError with the most similar name if there are none."""
    if name not in files:
        raise ConfigError(f"{option} {name}: unknown {noun}{suggestion(name, files)}")
    return files[name].model


def _refuse_bad_combinations(combined: Mapping[str, Fabric | Feature], conditions: Mapping[str, str]) -> None:
    """Raise ConfigError if an option does not fit; ignore rules whose facts are not decided yet."""
    for option, facts in combined.items():
        against = [rule for rule in facts.supports if not matches(rule.when, conditions)]
        against += [rule for rule in facts.excludes if matches(rule.when, conditions)]
        for rule in against:
            if rule.when.keys() <= conditions.keys():
                raise ConfigError(f"{option}: {rule.reason}")


# The number of nodes


def choose_scale(profile: Profile, rack_nodes: int, nodes: int | None, racks: int | None) -> Scale:
    """Return the size of a job from `--nodes` or `--racks`; of a rack's nodes, `rack_nodes` can be used.

    Raises ConfigError if the nodes cannot be divided evenly among racks.
    """
    if nodes is not None and racks is not None:
        raise ConfigError("--nodes and --racks exclude each other; use one of them")
    for option, number in (("--nodes", nodes), ("--racks", racks)):
        if number is not None and not 1 <= number <= MOST_NODES:
            raise ConfigError(f"{option} {number}: must be from 1 to {MOST_NODES}")
    if profile.hosts_per_domain == 1:
        if racks is not None:
            raise ConfigError(f"--racks {racks}: NVLink of {profile.name} ends at the node; use --nodes")
        return Scale(nodes or DEFAULT_NODES, 1, nodes or DEFAULT_NODES)
    rack_nodes = min(rack_nodes, profile.hosts_per_domain)
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


def _choose_image(
    request: JobRequest, profile: Profile, facts: JobFacts, offer: Offer, *, plugin: str, driver: str | None
) -> JobImage:
    """Return the image that is named, or the newest that fits. Raises ConfigError if it cannot run or be pulled."""
    if request.container == "none":
        return JobImage("", "other", request.nccl, None)
    if request.image:
        image = named_image(request.image, offer, facts.stacks)
    else:
        image = newest_image(offer, facts.stacks, profile, plugin, driver)
    if request.registry and image.reference == request.image:
        raise ConfigError(f"--registry: --image {request.image} names its own registry; leave one of them out")
    if image.arches is not None and profile.node.cpu not in image.arches:
        arches = f"is for {', '.join(image.arches)}, but {profile.name} is {profile.node.cpu}"
        raise ConfigError(f"--image {image.reference}: {arches}; use another image")
    if offer.unnamed and any(image.reference == target.name for target in offer.targets):
        raise ConfigError(
            f"{image.reference}: this name has no registry to pull it from; name yours with --registry, with "
            "`registry` in the cluster's file or with --catalog, or name an image with --image"
        )
    return replace(image, nccl=request.nccl or image.nccl, components=(*image.components, *request.components))


def published_offer(offer: Offer, catalog: Catalog) -> Offer:
    """Return the same offer with the images of a catalogue, each by its digest, the newest first."""
    targets, unverified = [], set()
    for image in catalog.images:
        if "cuda" not in image.axes:
            continue
        present = {platform.platform for platform in image.platforms}
        platforms: tuple[Platform, ...] = get_args(Platform)
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
        offer,
        targets=tuple(targets),
        planned=_places(offer),
        is_published=True,
        unnamed=False,
        unverified=frozenset(unverified),
    )


def _places(offer: Offer) -> dict[tuple[str, str], int]:
    """Return image and release of a distribution → place; of releases the last one is preferred, as for `latest`."""
    return {(target.image, target.axes["os"]): place for place, target in enumerate(offer.targets)}


def named_image(reference: str, offer: Offer, stacks: Mapping[str, YamlFile[Stack]]) -> JobImage:
    """Return what is known of an image: everything if the offer has it, by id or tag; else what its name shows."""
    if not REFERENCE.fullmatch(reference):
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
    """Return the newest image that fits. Raises ConfigError with the first requirement that no image meets."""
    arch, capability = profile.node.cpu, profile.gpu.compute_capability or ""
    gpu = offer.architectures.get(capability.replace(".", ""))
    requirements: dict[str, Callable[[Target, str], bool]] = {
        "has nccl-tests": lambda _target, _stack: True,  # as every image that has a stack
        f"runs on {arch}": lambda target, _stack: f"linux/{arch}" in target.platforms,
        f"has the plug-in {plugin!r}": lambda target, stack: (
            not stacks[stack].model.lacks_plugin(plugin, target.components)
        ),
        f"has programs for compute capability {capability}": lambda target, _stack: (
            target.axes.get("gpu") in (None, capability.replace(".", ""))
            and (gpu is None or satisfies(target.axes["cuda"], gpu.cuda))
        ),
        f"runs on driver {driver}": lambda target, _stack: (
            driver is None or int(major(driver)) >= int(DRIVERS.get(major(target.axes["cuda"]), "0"))
        ),
    }
    if offer.unverified:
        requirements |= {
            f"has checks on {arch}, all of which passed": lambda target, _: (
                (target.name, f"linux/{arch}") not in offer.unverified
            )
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
            noun = "published image" if offer.is_published else "image of the plan"
            remedy = plugin_remedy(plugin, stacks) if repr(plugin) in requirement else ""
            remedy = remedy if met else "add `nccl-tests` to the components of one, or "
            raise ConfigError(f"no {noun} {problem}; {remedy}name an image with --image")
        met.append(requirement)

    places = offer.planned if offer.is_published else _places(offer)

    def order(candidate: tuple[Target, str]) -> tuple[int, Version, int]:
        target, stack = candidate
        try:
            version = Version(target.axes["cuda"])
        except InvalidVersion:
            version = Version("0")
        return stacks[stack].model.prefer, version, places.get((target.image, target.axes.get("os", "")), -1)

    target, stack = max(candidates, key=order)
    return _image_of_target(target, stack, offer)


def plugin_remedy(plugin: str, stacks: Mapping[str, YamlFile[Stack]]) -> str:
    """Return the beginning of advice: how to get an image with an optional plug-in; empty for other plug-ins."""
    for name, file in stacks.items():
        if component := file.model.optional_plugins.get(plugin):
            return f"build {name} with --with {component}, give --with {component} here, too, or "
    return ""


def _stack_of_target(target: Target, stacks: Mapping[str, YamlFile[Stack]]) -> str | None:
    fits = [
        name
        for name, file in stacks.items()
        if file.model.components and set(file.model.components) <= set(target.components)
    ]
    return max(fits, key=lambda name: stacks[name].model.prefer, default=None)


def _image_of_target(target: Target, stack: str, offer: Offer) -> JobImage:
    versions = (v for name, v in target.components.items() if "nccl" in (name, *offer.provides.get(name, ())))
    plain = re.match(r"\d+(\.\d+)+", next(versions, ""))
    arches = tuple(arch for arch in ARCHS if f"linux/{arch}" in target.platforms)
    return JobImage(
        target.name,
        stack,
        plain[0] if plain else None,
        arches,
        driver=DRIVERS.get(major(target.axes["cuda"])),
        is_planned=not offer.is_published,
        components=tuple(target.components),
    )
