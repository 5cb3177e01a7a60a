"""Resolve a job: facts and a request in; its name, environment and pods out. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

from imagebuild.bench.ceilings import NotComparable, class_ceilings, rank_layout
from imagebuild.bench.judge import floor_of
from imagebuild.bench.profiles import Profile
from imagebuild.core.errors import ConfigError, suggestion
from imagebuild.core.fields import YamlFile, matches
from imagebuild.jobs.choose import MOST_NODES, Choices, Offer, choose, container_of, plugin_remedy
from imagebuild.jobs.environment import (
    FactSource,
    Variable,
    fill_placeholders,
    layered_variables,
    lint,
    merge,
    parse_settings,
)
from imagebuild.jobs.facts import Expect, JobFacts, JobRequest, Pod, Scope, SlurmOptions, Stack

Placement = Literal["anywhere", "together", "named", "kueue", "exclusive"]
"""How workers come onto racks: `together` by an affinity for each other, `named` on racks that the user names, `kueue`
by its topology, `exclusive` by JobSet, which gives each of its jobs a rack that no other JobSet uses."""
NAME_LENGTH = {"mpijob": 51, "jobset": 43, "slurm": 200}
"""Longest name of a job. Names of pods have at most 63 characters, of which the MPI operator adds up to 12
(`-worker-9999`) and JobSet up to 20 (`-worker-0-9999-abcde`)."""


@dataclass(frozen=True)
class Least:
    """Hold the bus bandwidth below which a job fails, and why."""

    rate: str
    why: str


@dataclass(frozen=True)
class Job(Choices):
    """Describe a job with nothing left to decide: all that the templates show."""

    name: str
    variables: tuple[Variable, ...]
    expected_lines: tuple[Expect, ...]
    """Lines that the output must contain."""
    pod: Pod
    """What worker pods need: of the fabric, of the cluster, and of the nodes."""
    least: Mapping[str, Least]
    """Collective → the bus bandwidth that its best size must reach."""
    placement: Placement
    """How worker pods come onto racks."""
    messages: tuple[str, ...]
    """Warnings and notes for the user."""

    @property
    def slurm_options(self) -> Mapping[str, str]:
        """Return options of sbatch: of each the first value that `--param`, the GPU's nodes and the cluster have."""
        parameters, nodes, slurm = self.parameters, self.nodes, self.cluster.slurm
        values = {
            name: parameters.get(name) or getattr(nodes, name) or getattr(slurm, name)
            for name in SlurmOptions.model_fields
        }
        return {name: value for name, value in values.items() if value}

    def in_scope(self, scope: Scope) -> list[Variable]:
        """Return the variables of a scope, in their order."""
        return [variable for variable in self.variables if variable.scope == scope]


def resolve_job(request: JobRequest, profile: Profile, facts: JobFacts, offer: Offer) -> Job:
    """Return the job that the request asks for. Raises ConfigError with the reason if it is impossible."""
    parameters, own_variables = parse_settings(request.settings, container_of(request))
    choices = choose(request, profile, facts, offer, parameters)
    placeholders = {
        "interface": parameters.get("interface") or choices.cluster.interface,
        "hca": parameters.get("hca") or choices.cluster.hca,
        "cards": str(profile.network.count if profile.network else 0),
        "gpus": str(profile.node.gpus),
    }
    sources = _fact_sources(choices, facts)
    known = layered_variables(sources, choices.conditions, placeholders)
    variables = merge([*known, *_plugin_variables(choices, facts.stacks), *own_variables], choices.container)

    if "hca" in parameters and all(variable.value != parameters["hca"] for variable in variables):
        raise ConfigError(f"--param hca: a job with --fabric {request.fabric} names no RDMA devices; leave it out")

    features = [name for name, feature in choices.features.items() if feature.in_name]
    parts = [request.test, str(choices.ranks), choices.gpu, choices.fabric.short, *features, f"{choices.scale.nodes}n"]
    name = parameters.get("name") or "-".join(parts)
    longest = NAME_LENGTH[request.scheduler]
    if len(name) > longest:
        raise ConfigError(f"the job's name {name!r} is longer than {longest} characters; set another: --param name=…")

    messages = lint(variables, facts.nccl_variables, choices.nccl)
    image, driver = choices.image, parameters.get("driver") or choices.cluster.driver
    if image.driver and not (request.image or driver):
        advice = "if the nodes have an older one, name it with --param driver=VERSION"
        messages.append(f"note: {image.reference} needs driver {image.driver} or later; {advice}")
    if image.components and "nccl-tests" not in image.components and "programs" not in parameters:
        remedy = "add it to the image, or name the folder of the programs with --param programs=FOLDER"
        raise ConfigError(f"--image {image.reference}: has no nccl-tests, according to the plan; {remedy}")
    if image.is_planned:
        unknown = "is planned; whether it was built and pushed is not known"
        choice = "--catalog chooses among published images, which `imagebuild catalog` lists"
        messages.append(f"note: {image.reference} {unknown}; {choice}")
    if image.nccl is None:
        messages.append(f"note: the version of NCCL is not known, so {choices.nccl} is assumed; name it with --nccl")

    if choices.cluster.kubernetes.kueue_topology and not choices.mnnvl and choices.container == "kubernetes":
        messages.append(f"note: kueue-topology is ignored, as NVLink of {profile.name} ends at the node")

    expected = (line for source in sources for line in source.layer.expect)
    job = Job(
        **vars(choices),
        name=name,
        variables=variables,
        expected_lines=tuple(line for line in expected if matches(line.when, choices.conditions)),
        pod=worker_pod(choices, placeholders),
        placement="anywhere" if request.scheduler == "slurm" else choose_placement(choices),
        least=_least_bandwidths(choices),
        messages=tuple(messages),
    )
    if request.scheduler == "slurm":
        _check_slurm_options(job)
    return job


def _check_slurm_options(job: Job) -> None:
    """Raise ConfigError where sbatch would give the job other GPUs or other nodes than it is for."""
    options, profile = job.slurm_options, job.profile
    if gres := options.get("gres"):
        gpus = sum(
            int(count or 1) for count in re.findall(r"\bgpu(?::[0-9]*[A-Za-z_][^:,]*)?(?::([0-9]+))?(?=,|$)", gres)
        )
        if gpus != profile.node.gpus:
            raise ConfigError(f"gres {gres}: asks for {gpus} GPUs of a node; {profile.name} has {profile.node.gpus}")
    if "nodelist" not in options:
        return
    hosts, nodes = _expand_hosts(options["nodelist"]), job.scale.nodes
    if len(hosts) != nodes:
        why = "sbatch would add others" if len(hosts) < nodes else "sbatch would start the job on all of them"
        names = "more than 9999" if len(hosts) > MOST_NODES else str(len(hosts))
        raise ConfigError(f"nodelist {options['nodelist']}: names {names} nodes, and the job has {nodes}; {why}")
    if both := sorted(hosts & _expand_hosts(options.get("exclude", ""))):
        raise ConfigError(f"exclude {options['exclude']}: the nodelist has {both[0]}; leave it out of one of them")


def _expand_hosts(text: str) -> set[str]:
    """Return the nodes that a text such as `n[01-04],n9` names; of very many, a few more than a job can have."""
    hosts: set[str] = set()
    for expression in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        names = [""]
        for plain, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", expression):
            parts = [plain] if plain else []
            for numbers_or_range in ranges.split(",") if ranges else ():
                first, _, last = numbers_or_range.partition("-")
                numbers = range(int(first), min(int(last or first), int(first) + MOST_NODES) + 1)
                parts += [f"{number:0{len(first)}}" for number in numbers]
            names = [name + part for name in names for part in parts][: MOST_NODES + 1]
        hosts.update(names)
    return hosts


def _fact_sources(choices: Choices, facts: JobFacts) -> list[FactSource]:
    """Return the layers of facts, lowest first: stack < fabric < node < cluster < feature < scheduler."""
    request, cluster = choices.request, facts.clusters[choices.request.cluster]
    files: list[tuple[str, YamlFile[Any]]] = [
        (f"stack {choices.image.stack}", facts.stacks[choices.image.stack]),
        (f"fabric {request.fabric}", facts.fabrics[request.fabric]),
        ("node", facts.node),
        (f"cluster {request.cluster}", cluster),
        *((f"feature {name}", facts.features[name]) for name in choices.features),
        (f"scheduler {request.scheduler}", facts.schedulers[request.scheduler]),
    ]
    sources = [FactSource(name, file, file.model) for name, file in files]
    site = f"fabric {request.fabric} of cluster {request.cluster}"
    sources.insert(2, FactSource(site, cluster, choices.site, ("fabrics", request.fabric)))
    return sources


def _plugin_variables(choices: Choices, stacks: Mapping[str, YamlFile[Stack]]) -> list[Variable]:
    """Return the variables that name the network plug-in and its folder; `host` leaves both to the node."""
    plugin, plugins = choices.plugin, choices.stack.plugins
    if plugin == "host":
        return []
    if choices.stack.lacks_plugin(plugin, choices.image.components):
        remedy = plugin_remedy(plugin, stacks)
        advice = f"; {remedy}name another one" if remedy else suggestion(plugin, plugins or {})
        raise ConfigError(f"{choices.image.reference}: the image has no plug-in {plugin!r}{advice}")
    why = "what NCCL has built in, whatever else is installed" if plugin == "none" else "this plug-in and no other"
    variables = [Variable("NCCL_NET_PLUGIN", plugin, why, "plug-in", "plug-in")]
    if folder := (plugins or {}).get(plugin):
        why = "where the plug-in is; it must be found first"
        variables.append(Variable("LD_LIBRARY_PATH", folder, why, "plug-in", "plug-in", prepend=True))
    return variables


def _least_bandwidths(choices: Choices) -> dict[str, Least]:
    """Return what the best size of each collective must reach: what is asked for, or what the profile says."""
    value, profile = choices.parameters.get("min-bw"), choices.profile
    if value and len(choices.test.collectives) > 1:
        raise ConfigError("--param min-bw: collectives of the test reach different rates; use a test of one collective")
    least: dict[str, Least] = {}
    if value:
        least[choices.test.collectives[0]] = Least(value, "GB/s, by --param min-bw")
    if not (choices.comparable and choices.test.max_bytes.endswith("G")):  # smaller messages show latency
        return least
    ranks, nodes = choices.run_ranks, choices.run_nodes
    try:
        layout = rank_layout(profile, ranks, nodes)
    except NotComparable:
        return least
    for collective in choices.test.collectives:
        ceilings = class_ceilings(collective, ranks, layout)
        highest = max((ceiling.value for ceiling in ceilings), default=inf)
        known = [r for r in profile.references_at(collective, ranks, nodes) if not r.forced]
        if value and float(value) > highest:
            raise ConfigError(
                f"--param min-bw={value}: {profile.name} reaches at most {highest:.1f} GB/s; ask for less"
            )
        if value:
            continue
        if known:
            rate = known[-1].rate * known[-1].tolerance
            least[collective] = Least(f"{rate:.1f}", f"GB/s that {profile.name} asks of the best size")
        elif floor := floor_of(profile, layout, ceilings):
            least[collective] = Least(f"{floor.value:.1f}", f"GB/s: {floor.what}")
    return least


# What the pods of workers need, and how they come onto racks


def choose_placement(choices: Choices) -> Placement:
    """Return how workers come onto racks. Raises ConfigError if nothing would take equally many nodes of each rack."""
    kube, racks, named = choices.cluster.kubernetes, choices.scale.racks, rack_names(choices)
    if not choices.mnnvl:
        if named:
            raise ConfigError(f"--param racks: NVLink of {choices.profile.name} ends at the node; leave it out")
        return "anywhere"
    if named:
        if twice := next((name for name in named if named.count(name) > 1), None):
            raise ConfigError(f"--param racks={','.join(named)}: {twice} is named twice; name {racks} racks")
        if "NAME" in named:
            raise ConfigError(f"--param racks: for NAME, write a value of the nodes' label {choices.cluster.rack_key}")
        if len(named) != racks:
            raise ConfigError(f"--param racks={','.join(named)}: names {len(named)}, but the job needs {racks}")
        return "named"
    if kube.kueue_topology:
        return "kueue"
    if racks == 1:
        return "together" if choices.scale.nodes > 1 else "anywhere"
    several = f"--racks {racks}" if choices.request.racks else f"--nodes {choices.scale.nodes} on {racks} racks"
    ways = "name the racks with --param racks=NAME,NAME or have Kueue place them (kubernetes.kueue-topology)"
    if choices.request.scheduler == "mpijob":
        problem = "all workers of an MPIJob have one template, which cannot say how many nodes each rack gives"
        raise ConfigError(f"{several}: {problem}; use jobset, {ways}")
    if kube.gang in ("volcano", "coscheduling"):
        problem = f"JobSet creates workers when the first one of their rack has its place, for which {kube.gang} waits"
        raise ConfigError(f"{several}: {problem}; {ways}")
    return "exclusive"


def rack_names(choices: Choices) -> tuple[str, ...]:
    """Return the racks that the user names, as nodes have them in the label `rack_key`."""
    return tuple(filter(None, choices.parameters.get("racks", "").split(",")))


def worker_pod(choices: Choices, placeholders: Mapping[str, str]) -> Pod:
    """Return what worker pods need: of the fabric, of the cluster, of its additions to the fabric, and of the nodes.

    Raises ConfigError if the cluster has a quota, and a container does not say its cpu and memory.
    """
    fabric, site, nodes, kube = choices.fabric.pod, choices.site.pod, choices.nodes, choices.cluster.kubernetes
    resource = choices.parameters.get("resource")
    for option, feature in choices.features.items():
        if feature.without_fabric and resource:
            raise ConfigError(
                f"--param resource: jobs with --feature {option} get no network cards; leave one of them out"
            )
        if feature.without_fabric:
            fabric, site = Pod(), Pod(select=site.select)
    amounts = {**fabric.resources, **site.resources}
    if resource:
        name, _, count = resource.rpartition(":")
        amounts = {key: amount for key, amount in amounts.items() if "/" not in key} | {name: count}
    least = {name: amounts.pop(name, None) for name in ("cpu", "memory")}
    own = {name: getattr(nodes, name) or amount for name, amount in least.items()}
    own["nvidia.com/gpu"] = str(choices.profile.node.gpus)
    sidecars = (*fabric.sidecars, *site.sidecars)
    containers: dict[str, Mapping[str, str | None]] = {"": own} | {
        f" of sidecar {s.name}": s.resources for s in sidecars
    }
    for container, has in containers.items():
        if kube.quota and (lacking := [name for name in ("cpu", "memory") if not has.get(name)]):
            where = f"cluster {choices.request.cluster} has a quota, which needs {' and '.join(lacking)}{container}"
            place = "`resources` of the sidecar" if container else f"nodes.{choices.gpu} in the cluster's file"
            raise ConfigError(f"{where}; add it to {place}")
    if any(name.startswith("hugepages-") for name in amounts) and not (own["cpu"] or own["memory"]):
        problem = "Kubernetes takes hugepages only beside cpu or memory"
        raise ConfigError(f"{problem}; add one to nodes.{choices.gpu} in the cluster's file, or --param memory=")
    networks = site.networks or fabric.networks
    annotations = {**kube.pod_annotations, **fabric.annotations, **site.annotations}
    if networks:
        split = (network.rpartition("/") for network in networks)
        pairs = [{"namespace": space, "name": name} if space else {"name": name} for space, _, name in split]
        lines = ",\n".join(f"  {json.dumps(pair)}" for pair in pairs)
        annotations["k8s.v1.cni.cncf.io/networks"] = f"[\n{lines}\n]\n"
    cards = site.card_networks or fabric.card_networks
    if kube.host_network and (networks or cards):
        where = f"cluster {choices.request.cluster}, --fabric {choices.request.fabric}"
        raise ConfigError(f"{where}: with host-network pods have the node's network and get no others; leave one out")
    if cards:
        pairs = [{"interfaceName": "eth0", "network": "default"}]
        for i in range(int(placeholders["cards"])):
            pairs.append({"interfaceName": f"eth{cards.interface + i}", "network": f"{cards.prefix}{cards.first + i}"})
        lines = ",\n ".join(json.dumps(pair, separators=(",", ":")) for pair in pairs)
        annotations["networking.gke.io/interfaces"] = f"[{lines}]\n"
    select = {**nodes.select, **fabric.select, **site.select}
    if names := rack_names(choices):
        select[choices.cluster.rack_key] = names
    resources = {name: fill_placeholders(amounts[name], placeholders, name) for name in sorted(amounts)}
    return Pod.model_construct(  # of parts that were checked; nodes' cpu may be 500m, which no count may
        resources={name: amount for name, amount in own.items() if amount} | resources,
        annotations=dict(sorted(annotations.items())),
        select=dict(sorted(select.items())),
        volumes=(*fabric.volumes, *kube.volumes, *site.volumes),
        sidecars=sidecars,
    )
