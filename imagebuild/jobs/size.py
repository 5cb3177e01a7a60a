"""First of the four steps that decide a job: nodes, racks and ranks, the facts that the request names, and `--param`.
Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import get_args

from imagebuild.bench.profiles import Profile
from imagebuild.core.errors import ConfigError, suggestion
from imagebuild.core.fields import YamlFile
from imagebuild.jobs.compare import parse_sides
from imagebuild.jobs.facts import (
    COLLECTIVES,
    DATA,
    FORMS,
    Cluster,
    ClusterFabric,
    Container,
    Env,
    Fabric,
    Feature,
    JobFacts,
    JobTest,
    Nodes,
    SchedulerFacts,
    Scope,
    find_facts,
)
from imagebuild.jobs.request import JobRequest


class Variable(Env):
    """An environment variable of a job, and where the variable was set: in a facts file or by `--param`."""

    layer: str
    """Name of the facts that set the variable, for messages: such as `fabric ib`, or `--param`."""
    where: str
    """Place where the variable was set, for messages: file and line, or the option."""
    replaces: bool = False
    """True if `--param NAME:=VALUE` set the variable, so the value replaces the value of any layer."""


VARIABLE = re.compile(r"(?:(?P<scope>[a-z]+):)?(?P<name>[A-Z_][A-Z0-9_a-z]*)(?P<equals>:?=)(?P<value>.*)", re.DOTALL)


def parse_settings(settings: Iterable[str], container: Container) -> tuple[Mapping[str, str], tuple[Variable, ...]]:
    """Return the parameters and variables that `--param` sets.

    Raises ConfigError for a parameter that is unknown, repeated or not supported by this job, and for an invalid value.
    """
    parameters: dict[str, str] = {}
    variables: dict[str, Variable] = {}
    for setting in settings:
        match = VARIABLE.fullmatch(setting)
        name, equals, value = match.group("name", "equals", "value") if match else setting.partition("=")
        if not equals or not name:
            raise ConfigError(f"--param {setting}: write NAME=VALUE, such as minutes=30 or NCCL_IB_TC=41")
        if name in parameters or name in variables:
            raise ConfigError(f"--param {name}: given twice; remove one of the two")
        if match:
            scope = match["scope"] or "rank"
            if scope not in get_args(Scope):
                near = suggestion(scope, list(get_args(Scope)))
                raise ConfigError(f"--param {setting}: unknown scope {scope!r}{near}")
            if "$" in value or not FORMS["value"].fits(value):
                raise ConfigError(f"--param {name}={value!r}: must be {FORMS['value'].words}, and must not contain $")
            own = {"name": name, "value": value, "scope": scope, "replaces": equals == ":="}
            origin = {"layer": "--param", "where": f"--param {name}", "why": "set on the command line"}
            variables[name] = Variable.model_validate({**own, **origin})
            continue
        if name not in DATA["parameters"]:
            other = DATA["other_parameters"].get(name)
            remedy = f"; use {other}" if other else suggestion(name, DATA["parameters"])
            raise ConfigError(f"--param {name}: unknown parameter{remedy}")
        form, containers = FORMS[DATA["parameters"][name]["form"]], DATA["parameters"][name]["containers"]
        if container not in containers:
            where = " and ".join(DATA["places"][one] for one in containers)
            problem = f"works only on {where}, but this job runs on {DATA['places'][container]}"
            raise ConfigError(f"--param {name}: {problem}; leave out --param {name}")
        if not form.fits(value):
            raise ConfigError(f"--param {name}={value!r}: must be {form.words}")
        parameters[name] = value
    return parameters, tuple(variables.values())


@dataclass(frozen=True)
class Size:
    """The number of nodes, racks and ranks of a job, and the facts (files in `jobs/`) that the request names."""

    scheduler: SchedulerFacts
    container: Container
    parameters: Mapping[str, str]
    """Parameters that `--param` sets."""
    variables: tuple[Variable, ...]
    """Variables of the environment that `--param` sets."""
    fabric: Fabric
    cluster: Cluster
    site: ClusterFabric
    """Settings that the cluster adds to the fabric."""
    gpu: str
    """Short name of the GPU, such as `h100`."""
    node: Nodes
    """Settings of the cluster for nodes with the GPU of the job."""
    mnnvl: bool
    """True if NVLink connects several nodes."""
    gpus: int
    """Number of GPUs of each node."""
    nodes: int
    racks: int
    nodes_per_rack: int
    """Number of nodes in each rack. Equal to `nodes` if NVLink connects only the GPUs of one node."""
    test: JobTest
    """The collectives and message sizes to measure. `test.minutes` is the time limit of the whole job."""
    rounds: int
    """Number of sequential measurements that share the time limit."""
    ranks: int
    """Number of ranks: one for each GPU, or one for each node if the test is a command."""
    run_nodes: int
    """Number of nodes that take part in one measurement."""
    run_ranks: int
    features: Mapping[str, Feature]
    plugin: str
    """Network plug-in of NCCL."""


def resolve_size(request: JobRequest, profile: Profile, facts: JobFacts) -> Size:
    """Return the size of the requested job.
    Raises ConfigError for an unknown name, and with the reason if a job of this size is impossible."""
    scheduler = find_facts(facts.schedulers, "scheduler", request.scheduler)
    container = request.container or scheduler.containers[0]
    if container not in scheduler.containers:
        problem = "works only on Slurm, because jobs on Kubernetes always run in a container"
        raise ConfigError(f"--container {container}: {problem}; leave out --container")
    parameters, variables = parse_settings(request.settings, container)
    fabric = find_facts(facts.fabrics, "fabric", request.fabric)
    cluster = find_facts(facts.clusters, "cluster", request.cluster)
    site = cluster.fabrics.get(request.fabric, ClusterFabric())
    gpu = _short_name(profile)
    own = {name: parameters[name] for name in ("cpu", "memory") if name in parameters}
    node = (cluster.nodes.get(gpu) or Nodes()).model_copy(update=own)

    nodes, racks = _nodes_and_racks(request, profile, int(parameters.get("rack-nodes") or node.rack_nodes or 0))
    test = find_facts(facts.tests, "test", request.test)
    rounds = _rounds(request, test, nodes)
    measured = test.minutes + 2 * rounds if request.compare else test.minutes * rounds
    minutes = measured + (DATA["import_minutes"] * len(request.images) if container in DATA["image_files"] else 0)
    minutes = int(parameters.get("minutes") or minutes)
    if minutes * 2 < rounds:
        problem = f"too few for {rounds} rounds of measurements; use {-(-rounds // 2)} or more"
        raise ConfigError(f"--param minutes={minutes}: {problem}")
    run_nodes = 2 if test.pairs else 1 if test.command else nodes
    gpus = request.gpus or profile.node.gpus
    if gpus > profile.node.gpus:
        raise ConfigError(f"--gpus {gpus}: a node of {profile.name} has {profile.node.gpus}; use that number or fewer")

    each = 1 if test.command else gpus
    implied = ["multirack"] if racks > 1 and "multirack" in facts.features else []
    names = sorted({*request.features, *implied})
    features = {name: find_facts(facts.features, "feature", name) for name in names}
    return Size(
        scheduler=scheduler, container=container, parameters=parameters, variables=variables, fabric=fabric,
        cluster=cluster, site=site, gpu=gpu, node=node, mnnvl=profile.hosts_per_domain > 1, gpus=gpus, nodes=nodes,
        racks=racks, nodes_per_rack=nodes // racks, test=test.model_copy(update={"minutes": minutes}), rounds=rounds,
        ranks=nodes * each, run_nodes=run_nodes, run_ranks=run_nodes * each, features=features,
        plugin=_plugin(parameters.get("plugin"), site.plugin or fabric.plugin, features),
    )  # fmt: skip


def conditions_of_size(request: JobRequest, profile: Profile, facts: JobFacts, size: Size) -> Mapping[str, str]:
    """Return the names and values that conditions (`when`) can use before an image is chosen."""
    test, network = size.test, profile.network
    # Some pairs consist of nodes of different racks, which NVLink does not connect.
    rack_nvlink = size.mnnvl and size.nodes > 1 and not (test.pairs and size.racks > 1)
    yes_or_no = {
        **{name: name in size.features for name in facts.features},
        **{name: name in test.collectives for name in COLLECTIVES},
        "mnnvl": size.mnnvl,
        "rack-nvlink": rack_nvlink and "nics" not in size.features,
        "nvls": profile.links[-1].nvls,
    }
    return {
        **{name: "yes" if value else "no" for name, value in yes_or_no.items()},
        "scheduler": request.scheduler,
        "container": size.container,
        "profile": profile.name,
        "gpu": size.gpu,
        "arch": profile.node.cpu,
        "capability": profile.gpu.compute_capability or "",
        "network": network.kind if network else "none",
        "fabric": request.fabric,
        "cluster": request.cluster,
        "test": request.test,
        "nodes": str(size.nodes),
        "racks": str(size.racks),
        "plugin": size.plugin,
    }


def _short_name(profile: Profile) -> str:
    if profile.gpu.compute_capability is None:
        raise ConfigError(f"--profile {profile.name}: nccl-tests runs only on NVIDIA GPUs; choose another profile")
    names = ", ".join(profile.gpu.names)
    # A letter behind the number belongs to the model (L40S, A10G), letters of another word do not (H100SXM).
    if match := re.search(r"(?<![A-Za-z])[A-Z]{1,3} ?[0-9]{1,4}([A-Z](?![A-Za-z0-9]))?", names):
        return match[0].replace(" ", "").lower()
    raise ConfigError(f"profile {profile.name}: gpu.names: {names} contains no model such as H100; add the model")


def refuse_unknown_gpus(cluster: YamlFile[Cluster], profiles: Iterable[Profile]) -> None:
    """Raise ConfigError if the file of a cluster has settings for a GPU that no profile describes."""
    known = {_short_name(profile) for profile in profiles if profile.gpu.compute_capability}
    for gpu in sorted(cluster.model.nodes.keys() - known):
        problem = f"nodes.{gpu}: no profile describes this GPU{suggestion(gpu, known)}"
        raise ConfigError(f"{cluster.at('nodes', gpu)}: {problem}")


def _nodes_and_racks(request: JobRequest, profile: Profile, rack_nodes: int) -> tuple[int, int]:
    """Return the number of nodes and the number of racks. All racks have the same number of nodes.
    `rack_nodes` is the maximum number of nodes that the job uses in a rack. 0 means all nodes of the rack."""
    nodes, racks, domain = request.nodes, request.racks, profile.hosts_per_domain
    if nodes is not None and racks is not None:
        raise ConfigError("--nodes and --racks exclude each other; use only one")
    if domain == 1:
        if racks is not None:
            problem = f"NVLink of {profile.name} connects only the GPUs of one node; use --nodes"
            raise ConfigError(f"--racks {racks}: {problem}")
        return nodes or DATA["default_nodes"], 1
    rack_nodes = min(rack_nodes or domain, domain)
    if nodes is None:
        return rack_nodes * (racks or 1), racks or 1
    needed = -(-nodes // rack_nodes)
    if nodes % needed:
        fewer = next(number for number in range(nodes - 1, 0, -1) if number % -(-number // rack_nodes) == 0)
        problem = f"cannot be divided evenly among {needed} racks of up to {rack_nodes} nodes"
        raise ConfigError(f"--nodes {nodes}: {problem}; use {fewer} or a whole number of --racks")
    return nodes, needed


def _rounds(request: JobRequest, test: JobTest, nodes: int) -> int:
    if request.compare and (test.pairs or test.command):
        raise ConfigError(
            f"--compare: the test {request.test} cannot be repeated in turn; choose another one with --test"
        )
    if request.compare:
        return len(parse_sides(request.compare)) * (request.blocks + 1) * len(test.collectives)
    if not test.pairs:
        return 1
    if nodes == 1:
        problem = "measures pairs of nodes, but this job has one node; set --nodes to 2 or more"
        raise ConfigError(f"--test {request.test}: {problem}")
    return len(test.collectives) * (nodes - 1 + nodes % 2)


def _plugin(asked: str | None, default: str, features: Mapping[str, Feature]) -> str:
    """Return the network plug-in: the one that `--param plugin` asks for or a feature needs, or else `default`.
    Raises ConfigError if `--param plugin` and a feature name different plug-ins."""
    plugin = asked or default
    for name, feature in features.items():
        if feature.plugin and asked not in (None, feature.plugin):
            problem = f"--feature {name} needs the plug-in {feature.plugin}"
            raise ConfigError(f"--param plugin={plugin}: {problem}; leave out one of the two options")
        plugin = feature.plugin or plugin
    return plugin
