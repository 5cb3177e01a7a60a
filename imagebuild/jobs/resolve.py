"""What was chosen, and the facts about it, to a job that can be written down. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from imagebuild.config import suggestion
from imagebuild.errors import ConfigError
from imagebuild.jobs import merge, settings
from imagebuild.jobs.choices import Choices, choose
from imagebuild.jobs.image import Offer
from imagebuild.jobs.inputs import Facts, Image, Machine, Request
from imagebuild.jobs.lint import lint
from imagebuild.jobs.merge import Placed, Source
from imagebuild.jobs.models import Cluster, Env, Expect, Fabric, JobTest, Nodes, Pod, Stack
from imagebuild.jobs.scale import Scale

NAME_LENGTH = {"mpijob": 51, "jobset": 43, "slurm": 200}
"""Pods may have 63: the MPI operator puts up to 12 behind the job's name (`-worker-9999`), JobSet up to 20
(`-worker-0-9999-abcde`)."""


@dataclass(frozen=True)
class Job:
    """A job, with nothing left to decide."""

    choices: Choices
    name: str
    env: tuple[Placed, ...]
    expects: tuple[Expect, ...]
    pod: Pod
    options: Mapping[str, str]
    """Parameters of `--set`."""
    messages: tuple[str, ...]
    """Warnings and notes, for people."""

    @property
    def request(self) -> Request:
        return self.choices.request

    @property
    def machine(self) -> Machine:
        return self.choices.machine

    @property
    def scale(self) -> Scale:
        return self.choices.scale

    @property
    def fabric(self) -> Fabric:
        return self.choices.fabric

    @property
    def cluster(self) -> Cluster:
        return self.choices.cluster

    @property
    def test(self) -> JobTest:
        return self.choices.test

    @property
    def image(self) -> Image:
        return self.choices.image

    @property
    def stack(self) -> Stack:
        return self.choices.stack

    @property
    def nodes(self) -> Nodes:
        return self.choices.nodes

    @property
    def ranks(self) -> int:
        return self.scale.nodes * self.machine.gpus

    @property
    def claims(self) -> bool:
        """Whether a ComputeDomain gives pods their channel."""
        return any(feature.claims for feature in self.choices.features.values())


def resolve(request: Request, machine: Machine, facts: Facts, offer: Offer) -> Job:
    """Raises ConfigError for what cannot be, with the reason."""
    given = settings.parse(request.settings)
    choices = choose(request, machine, facts, offer, given)
    known = choices.facts(facts.features)
    parameters = {
        "interface": given.get("interface") or choices.cluster.interface,
        "hca": given.get("hca") or choices.cluster.hca,
        "cards": str(machine.cards),
        "gpus": str(machine.gpus),
    }
    sources = _sources(choices, facts)
    layers = [*merge.entries(sources, known, parameters), *_plugin(choices), *_minimum(given, choices)]
    env = merge.merge((*layers, *given.variables), request.scheduler, choices.container)
    messages = lint(env, facts.parameters, choices.nccl)
    if choices.image.driver and not (request.image or given.get("driver") or choices.cluster.driver):
        advice = "if the nodes' is older, say so with --set driver=…"
        messages.append(f"note: {choices.image.reference} needs driver {choices.image.driver} or later; {advice}")
    if choices.image.nccl is None:
        messages.append(f"note: which NCCL runs is not known, so {choices.nccl} is assumed; say it with --nccl")
    return Job(
        choices=choices,
        name=_name(choices, given.get("name")),
        env=env,
        expects=merge.expects(sources, known),
        pod=_pod(choices, given, parameters),
        options=given.values,
        messages=tuple(messages),
    )


def _sources(choices: Choices, facts: Facts) -> list[Source]:
    """Layers, lowest first: stack < fabric < node < feature < scheduler."""
    request, stack = choices.request, choices.image.stack
    cluster = facts.clusters[request.cluster]
    fabric = facts.fabrics[request.fabric]
    scheduler = facts.schedulers[request.scheduler]
    features = [facts.features[name] for name in choices.features]
    of_site = f"fabric {request.fabric} of cluster {request.cluster}"
    return [
        Source(f"stack {stack}", facts.stacks[stack].model, facts.stacks[stack].at),
        Source(f"fabric {request.fabric}", fabric.model, fabric.at),
        Source(of_site, choices.site, cluster.at, ("fabrics", request.fabric)),
        Source("node", facts.node.model, facts.node.at),
        Source(f"cluster {request.cluster}", cluster.model, cluster.at),
        *(Source(f"feature {d.path.stem}", d.model, d.at) for d in features),
        Source(f"scheduler {request.scheduler}", scheduler.model, scheduler.at),
    ]


def _plugin(choices: Choices) -> list[Placed]:
    """Name and folder of the network plug-in go together; `host` leaves both to what the node has installed."""
    name, stack = choices.plugin, choices.stack
    if name == "host":
        return []
    if stack.plugins is not None and name not in stack.plugins:
        raise ConfigError(f"{choices.image.reference}: no plug-in {name!r} in it{suggestion(name, stack.plugins)}")
    why = "what NCCL has built in, whatever else is installed" if name == "none" else "this plug-in and no other"
    found = [_own("NCCL_NET_PLUGIN", name, why)]
    if folder := (stack.plugins or {}).get(name):
        found.append(_own("LD_LIBRARY_PATH", folder, "where the plug-in is; it must be found first", prepend=True))
    return found


def _own(name: str, value: str, why: str, *, prepend: bool = False) -> Placed:
    return Placed(Env(name=name, value=value, why=why, prepend=prepend), value, "plug-in", "plug-in")


def _minimum(given: settings.Settings, choices: Choices) -> list[Placed]:
    """What nccl-tests itself asks of the average, so that speed counts where nothing else judges it."""
    value, where = given.get("min-bw"), "--set min-bw"
    test, machine, nodes = choices.test, choices.machine, choices.scale.nodes
    if value and len(test.collectives) > 1:
        raise ConfigError("--set min-bw: the collectives of the test reach different rates; take a test of one")
    if value is None and choices.comparable and test.large:
        threshold = machine.thresholds.get((test.collectives[0], nodes * machine.gpus, nodes))
        value, where = (f"{threshold:.1f}", f"profile {machine.profile}") if threshold else (None, where)
    if value is None:
        return []
    why = "GB/s that the profile asks of the best size; nccl-tests fails where the average is below 90 % of it"
    return [Placed(Env(name="NCCL_TESTS_MIN_BW", value=value, why=why), value, where, where)]


def _pod(choices: Choices, given: settings.Settings, parameters: Mapping[str, str]) -> Pod:
    """The fabric's and the cluster's demands on worker pods together."""
    fabric, site = choices.fabric.pod, choices.site.pod
    if any(feature.without_fabric for feature in choices.features.values()):
        return Pod(select=site.select)
    resources = {**fabric.resources, **site.resources}
    if resource := given.get("resource"):
        name, _, count = resource.rpartition(":")
        resources = {name: count}
    return Pod(
        resources={k: merge.fill(v, parameters, k) or "" for k, v in sorted(resources.items())},
        annotations={**fabric.annotations, **site.annotations},
        networks=site.networks or fabric.networks,
        select={**fabric.select, **site.select},
        volumes=(*fabric.volumes, *site.volumes),
        sidecars=(*fabric.sidecars, *site.sidecars),
    )


def _name(choices: Choices, given: str | None) -> str:
    shown = [name for name, feature in choices.features.items() if feature.in_name]
    ranks, nodes = choices.scale.nodes * choices.machine.gpus, choices.scale.nodes
    name = given or "-".join(
        [choices.request.test, str(ranks), choices.machine.gpu, choices.fabric.short, *shown, f"{nodes}n"]
    )
    longest = NAME_LENGTH[choices.request.scheduler]
    if len(name) > longest:
        raise ConfigError(f"the job's name {name!r} is longer than {longest}; give another with --set name=…")
    return name
