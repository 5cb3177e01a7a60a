"""What the request leaves open is decided, and what the facts have against it is said. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from imagebuild.component import Support
from imagebuild.config import Document, suggestion
from imagebuild.errors import ConfigError
from imagebuild.jobs import image as images
from imagebuild.jobs import settings
from imagebuild.jobs.inputs import Facts, Image, Machine, Request
from imagebuild.jobs.lint import nearest
from imagebuild.jobs.models import COLLECTIVES, Cluster, Container, Fabric, Feature, JobTest, Nodes, Site, Stack
from imagebuild.jobs.scale import Scale, scale
from imagebuild.versions import matches


@dataclass(frozen=True)
class Choices:
    """Everything that conditions of facts can ask about."""

    request: Request
    machine: Machine
    fabric: Fabric
    cluster: Cluster
    site: Site
    test: JobTest
    nodes: Nodes
    scale: Scale
    features: Mapping[str, Feature]
    container: Container
    plugin: str
    image: Image
    stack: Stack
    nccl: str
    """The image's, or where that is not known the newest that the table has."""

    @property
    def comparable(self) -> bool:
        """Whether the profile's numbers are about this job."""
        own = (self.machine.network or "none") in self.fabric.measures
        return own and all(feature.comparable for feature in self.features.values())

    def facts(self, all_features: Mapping[str, object]) -> dict[str, str]:
        """What conditions see."""
        beyond = self.machine.mnnvl and self.scale.nodes > 1 and "nics" not in self.features
        return {
            **{name: _said(name in self.features) for name in all_features},
            **{name: _said(name in self.test.collectives) for name in COLLECTIVES},
            "scheduler": self.request.scheduler,
            "container": self.container,
            "profile": self.machine.profile,
            "gpu": self.machine.gpu,
            "arch": self.machine.arch,
            "capability": self.machine.capability or "",
            "network": self.machine.network or "none",
            "mnnvl": _said(self.machine.mnnvl),
            "rack-nvlink": _said(beyond),
            "nvls": _said(self.machine.nvls),
            "fabric": self.request.fabric,
            "cluster": self.request.cluster,
            "test": self.request.test,
            "nodes": str(self.scale.nodes),
            "racks": str(self.scale.racks),
            "stack": self.image.stack,
            "plugin": self.plugin,
            "nccl": self.nccl,
        }


def choose(request: Request, machine: Machine, facts: Facts, offer: images.Offer, given: settings.Settings) -> Choices:
    """Raises ConfigError for names that are not there and for what cannot be, with the reason."""
    fabric = find(facts.fabrics, request.fabric, "--fabric").model
    cluster = find(facts.clusters, request.cluster, "--cluster").model
    test = find(facts.tests, request.test, "--test").model
    for name in request.features:
        find(facts.features, name, "--with")
    if machine.capability is None:
        raise ConfigError(f"--profile {machine.profile}: nccl-tests runs on NVIDIA GPUs only")
    site = cluster.fabrics.get(request.fabric, Site())
    nodes = _nodes(machine, cluster, site, given)
    size = scale(machine, min(nodes.rack_nodes or machine.rack_nodes, machine.rack_nodes), request.nodes, request.racks)
    names = sorted({*request.features, *(["multirack"] if size.racks > 1 else [])})
    features = {name: facts.features[name].model for name in names}
    container: Container = "kubernetes"
    if request.scheduler == "slurm":
        container = "none" if request.container == "none" else "pyxis"
    plugin = given.get("plugin") or site.plugin or fabric.plugin
    for name, feature in features.items():
        if feature.plugin and given.get("plugin") not in (None, feature.plugin):
            raise ConfigError(f"--set plugin={plugin}: --with {name} needs {feature.plugin}")
        plugin = feature.plugin or plugin
    unknown = Image("", "other", request.nccl, None)
    base = Choices(
        request,
        machine,
        fabric,
        cluster,
        site,
        test,
        nodes,
        size,
        features,
        container,
        plugin,
        unknown,
        Stack(title=""),
        "",
    )
    _check(base, facts, blind=frozenset({"nccl", "stack"}))
    image = _image(request, facts, offer, machine, Wanted(container, plugin, given.get("driver") or cluster.driver))
    stack = facts.stacks[image.stack].model
    stack = stack.model_copy(update={k: given.values[k] for k in ("programs", "suffix") if k in given.values})
    nccl = image.nccl or nearest(facts.parameters, None)
    choices = replace(base, image=image, stack=stack, nccl=nccl)
    _check(choices, facts)
    return choices


def find(documents: Mapping[str, Document[Any]], name: str, option: str) -> Document[Any]:
    """The facts of that name. Raises ConfigError with the nearest name."""
    if name not in documents:
        raise ConfigError(f"{option} {name}: there is none{suggestion(name, dict(documents))}")
    return documents[name]


@dataclass(frozen=True)
class Wanted:
    """What an image must fit, beside the machine."""

    container: Container
    plugin: str
    driver: str | None


def _said(value: bool) -> str:
    return "yes" if value else "no"


def _nodes(machine: Machine, cluster: Cluster, site: Site, given: settings.Settings) -> Nodes:
    nodes = site.nodes.get(machine.gpu) or cluster.nodes.get(machine.gpu) or Nodes()
    said: dict[str, Any] = {k: v for k, v in given.values.items() if k in {"cpu", "memory", "partition", "constraint"}}
    if "rack-nodes" in given.values:
        said["rack_nodes"] = max(1, int(given.values["rack-nodes"]))
    return nodes.model_copy(update=said)


def _image(request: Request, facts: Facts, offer: images.Offer, machine: Machine, wanted: Wanted) -> Image:
    if wanted.container == "none":
        if request.image:
            raise ConfigError("--image: with --container none the programs of the nodes run, and no image")
        return Image("", "other", request.nccl, None)
    if request.image:
        image = images.named(request.image, offer, facts.stacks, request.nccl)
    else:
        plugin = "none" if wanted.plugin == "host" else wanted.plugin
        image = images.choose(offer, facts.stacks, machine, plugin, wanted.driver)
        image = replace(image, nccl=request.nccl or image.nccl)
    images.check_arch(image, machine)
    return image


def _check(choices: Choices, facts: Facts, blind: frozenset[str] = frozenset()) -> None:
    """Raises ConfigError with the reason that the facts give against the combination; `blind` to some of them."""
    known = choices.facts(facts.features)
    asked: list[tuple[str, Fabric | Feature]] = [(f"--fabric {choices.request.fabric}", choices.fabric)]
    asked += [(f"--with {name}", feature) for name, feature in choices.features.items()]
    for option, model in asked:
        against: list[Support] = [s for s in model.supports if not matches(s.when, known)]
        against += [e for e in model.excludes if matches(e.when, known)]
        against = [s for s in against if not blind & set(s.when)]
        if against:
            raise ConfigError(f"{option}: {against[0].reason}")
