"""Say what the worker pods of a job need, and how they come onto racks. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Literal

from imagebuild.core.errors import ConfigError
from imagebuild.jobs.choose import Choices
from imagebuild.jobs.environment import fill_placeholders
from imagebuild.jobs.facts import Pod

Placement = Literal["anywhere", "together", "named", "kueue", "exclusive"]
"""How workers come onto racks: `together` by an affinity for each other, `named` on racks that the user names, `kueue`
by its topology, `exclusive` by JobSet, which gives each of its jobs a rack that no other JobSet uses."""


def choose_placement(choices: Choices) -> Placement:
    """Return how workers come onto racks. Raises ConfigError where nothing would put as many nodes of each rack."""
    kube, racks, named = choices.cluster.kubernetes, choices.scale.racks, rack_names(choices)
    if not choices.mnnvl:
        if named:
            raise ConfigError(f"--set racks: NVLink of {choices.profile.name} ends at the node; leave it out")
        return "anywhere"
    if named:
        if len(set(named)) != racks:
            raise ConfigError(f"--set racks={','.join(named)}: the job is for another number of racks, {racks}")
        return "named"
    if kube.kueue_topology:
        return "kueue"
    if racks == 1:
        return "together" if choices.scale.nodes > 1 else "anywhere"
    ways = "name the racks with --set racks=NAME,NAME or have Kueue place them (kubernetes.kueue-topology)"
    if choices.request.scheduler == "mpijob":
        problem = "all workers of an MPIJob have one template, which cannot say how many nodes each rack gives"
        raise ConfigError(f"--with multirack: {problem}; use jobset, {ways}")
    if kube.gang in ("volcano", "coscheduling"):
        problem = f"JobSet creates workers when the first one of their rack has its place, for which {kube.gang} waits"
        raise ConfigError(f"--with multirack: {problem}; {ways}")
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
            raise ConfigError(f"--set resource: jobs with --with {option} get no network cards; leave one of them out")
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
            where = f"cluster {choices.request.cluster} has a quota, and nobody says {' and '.join(lacking)}{container}"
            raise ConfigError(f"{where}; add it to nodes.{choices.gpu} in the cluster's file")
    networks = site.networks or fabric.networks
    annotations = {**kube.pod_annotations, **fabric.annotations, **site.annotations}
    if networks:
        split = (network.rpartition("/") for network in networks)
        pairs = [{"namespace": space, "name": name} if space else {"name": name} for space, _, name in split]
        lines = ",\n".join(f"  {json.dumps(pair)}" for pair in pairs)
        annotations["k8s.v1.cni.cncf.io/networks"] = f"[\n{lines}\n]\n"
    if cards := site.card_networks or fabric.card_networks:
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
