"""The last step of a job: its name, and what its worker pods need. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from imagebuild.bench.profiles import Profile
from imagebuild.core.errors import ConfigError
from imagebuild.jobs.facts import GANGS_OF_PODS, Pod, SlurmOptions, fill_placeholders
from imagebuild.jobs.request import JobRequest
from imagebuild.jobs.size import Size

Placement = Literal["anywhere", "together", "named", "kueue", "exclusive"]
"""How workers are placed on racks.

`together`: by an affinity for each other. `named`: on racks that the user names. `kueue`: by the topology of Kueue.
`exclusive`: by JobSet, which gives each of its jobs a rack that no other JobSet uses.
"""


@dataclass(frozen=True)
class Workers:
    """The name of a job, and what its workers need."""

    name: str
    slurm_options: Mapping[str, str]
    """Options of sbatch."""
    placement: Placement
    pod: Pod
    """The needs of the fabric, of the cluster and of the nodes."""


def resolve_workers(request: JobRequest, profile: Profile, size: Size, placeholders: Mapping[str, str]) -> Workers:
    """Return what workers need. Raises ConfigError if the job cannot be named or placed."""
    name = _name(request, size)
    rack_names = _rack_names(profile, size)
    return Workers(
        name=name,
        slurm_options=_slurm_options(size),
        placement=_placement(request, size, rack_names),
        pod=_pod(request, profile, size, rack_names, placeholders),
    )


def _name(request: JobRequest, size: Size) -> str:
    features = "".join(f"{name}-" for name, feature in size.features.items() if feature.in_name)
    usual = f"{request.test}-{size.ranks}-{size.gpu}-{size.fabric.short}-{features}{size.nodes}n"
    name, longest = size.parameters.get("name") or usual, size.scheduler.longest_name
    if len(name) > longest:
        raise ConfigError(f"--param name: {name!r} is longer than {longest} characters; set a shorter one")
    return name


def _slurm_options(size: Size) -> Mapping[str, str]:
    """Return the options of sbatch: for each, the first value among `--param`, the GPU's nodes and the cluster."""
    values = {
        name: size.parameters.get(name) or getattr(size.node, name) or getattr(size.cluster.slurm, name)
        for name in SlurmOptions.model_fields
    }
    return {name: value for name, value in values.items() if value}


def _rack_names(profile: Profile, size: Size) -> tuple[str, ...]:
    """Return the racks that the user names. They are values of the node label `rack_key`."""
    names = tuple(filter(None, size.parameters.get("racks", "").split(",")))
    if names and not size.mnnvl:
        raise ConfigError(f"--param racks: NVLink of {profile.name} ends at the node; remove it")
    if names and len(set(names)) != size.racks:
        raise ConfigError(f"--param racks={','.join(names)}: the job needs {size.racks}; name each rack once")
    return names


def _placement(request: JobRequest, size: Size, rack_names: tuple[str, ...]) -> Placement:
    kube, of_scheduler, racks = size.cluster.kubernetes, size.scheduler.kubernetes, size.racks
    if not of_scheduler or not size.mnnvl:
        return "anywhere"
    if rack_names:
        return "named"
    if kube.kueue_topology:
        return "kueue"
    if racks == 1:
        return "together" if size.nodes > 1 else "anywhere"
    if of_scheduler.exclusive_racks and kube.gang not in GANGS_OF_PODS:
        return "exclusive"
    problem = "all workers of an MPIJob have the same template, on every rack; use jobset, or"
    if of_scheduler.exclusive_racks:
        problem = (
            f"JobSet creates the workers of a rack after its first pod has a place, but {kube.gang} waits for all pods;"
        )
    several = f"--racks {racks}" if request.racks else f"--nodes {size.nodes} on {racks} racks"
    ways = "name the racks with --param racks=NAME,NAME or have Kueue place them (kubernetes.kueue-topology)"
    raise ConfigError(f"{several}: {problem} {ways}")


def _pod(
    request: JobRequest, profile: Profile, size: Size, rack_names: tuple[str, ...], placeholders: Mapping[str, str]
) -> Pod:
    fabric, site, kube = size.fabric.pod, size.site.pod, size.cluster.kubernetes
    if any(feature.without_fabric for feature in size.features.values()):
        fabric, site = Pod(), Pod(select=site.select)
    amounts = {**fabric.resources, **site.resources}
    if resource := size.parameters.get("resource"):
        name, _, count = resource.rpartition(":")
        amounts = {key: amount for key, amount in amounts.items() if "/" not in key} | {name: count}
    own = {name: getattr(size.node, name) or amounts.get(name) for name in ("cpu", "memory")}
    own["nvidia.com/gpu"] = str(profile.node.gpus)
    sidecars = (*fabric.sidecars, *site.sidecars)
    containers: dict[str, Mapping[str, str | None]] = {f"nodes.{size.gpu} in the cluster's file": own}
    containers |= {f"`resources` of the sidecar {sidecar.name}": sidecar.resources for sidecar in sidecars}
    for place, has in containers.items():
        if kube.quota and not (has.get("cpu") and has.get("memory")):
            problem = "has a quota, so all containers must request cpu and memory"
            raise ConfigError(f"--cluster {request.cluster}: {problem}; add them to {place}")
    select = {**size.node.select, **fabric.select, **site.select}
    if rack_names:
        select[size.cluster.rack_key] = rack_names
    others = {
        name: fill_placeholders(amount, placeholders, name)
        for name, amount in sorted(amounts.items())
        if name not in own
    }
    annotations = {**kube.pod_annotations, **fabric.annotations, **site.annotations}
    annotations |= _network_annotations(fabric, site, int(placeholders["cards"]))
    # The pod is not validated again: the cpu of a node may be 500m, which is not valid in the facts of a fabric.
    return Pod.model_construct(
        resources={name: amount for name, amount in own.items() if amount} | others,
        annotations=dict(sorted(annotations.items())),
        select=dict(sorted(select.items())),
        volumes=(*fabric.volumes, *kube.volumes, *site.volumes),
        sidecars=sidecars,
    )


def _network_annotations(fabric: Pod, site: Pod, nics: int) -> Mapping[str, str]:
    """Return the annotations that attach a pod to its networks: those of Multus, and those of Google's clusters."""
    annotations = {}
    if networks := site.networks or fabric.networks:
        split = (network.rpartition("/") for network in networks)
        pairs = [{"namespace": space, "name": name} if space else {"name": name} for space, _, name in split]
        lines = ",\n".join(f"  {json.dumps(pair)}" for pair in pairs)
        annotations["k8s.v1.cni.cncf.io/networks"] = f"[\n{lines}\n]\n"
    if cards := site.card_networks or fabric.card_networks:
        of_card = {f"eth{cards.interface + i}": f"{cards.prefix}{cards.first + i}" for i in range(nics)}
        pairs = [{"interfaceName": i, "network": name} for i, name in {"eth0": "default", **of_card}.items()]
        lines = ",\n ".join(json.dumps(pair, separators=(",", ":")) for pair in pairs)
        annotations["networking.gke.io/interfaces"] = f"[{lines}]\n"
    return annotations
