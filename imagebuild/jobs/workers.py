"""Last of the four steps that decide a job: its name, its options of sbatch, and the needs of its worker pods. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from imagebuild.bench.profiles import Profile
from imagebuild.core.errors import ConfigError, plural
from imagebuild.jobs.facts import GANGS_OF_PODS, Pod, SlurmOptions, fill_placeholders
from imagebuild.jobs.request import JobRequest
from imagebuild.jobs.size import Size

Placement = Literal["anywhere", "together", "named", "kueue", "exclusive"]
"""How workers are placed on racks.

`anywhere`: without a rule. `together`: on one rack, by pod affinity. `named`: on the racks that `--param racks` names.
`kueue`: where Kueue places them by its Topology. `exclusive`: JobSet places the workers of each rack on a rack that no
other JobSet uses."""


@dataclass(frozen=True)
class Workers:
    """The name of a job, its options of sbatch, and the needs of its worker pods."""

    name: str
    slurm_options: Mapping[str, str]
    """Options of sbatch."""
    placement: Placement
    pod: Pod
    """Resources, volumes, sidecars and annotations of a worker pod, from the fabric, the cluster and the nodes."""


def resolve_workers(request: JobRequest, profile: Profile, size: Size, placeholders: Mapping[str, str]) -> Workers:
    """Return the job's name, its options of sbatch, and the needs of its worker pods.
    Raises ConfigError if the name is too long, or if the workers cannot be placed on racks."""
    name = _name(request, size)
    rack_names = _rack_names(profile, size)
    return Workers(
        name=name,
        slurm_options=_slurm_options(size),
        placement=_placement(request, size, rack_names),
        pod=_pod(request, size, rack_names, placeholders),
    )


def _name(request: JobRequest, size: Size) -> str:
    features = "".join(f"{name}-" for name, feature in size.features.items() if feature.in_name)
    usual = f"{request.test}-{size.ranks}-{size.gpu}-{size.fabric.short}-{features}{size.nodes}n"
    name, longest = size.parameters.get("name") or usual, size.scheduler.longest_name
    if len(name) > longest:
        raise ConfigError(f"--param name: {name!r} is longer than {longest} characters; set a shorter one")
    return name


def _slurm_options(size: Size) -> Mapping[str, str]:
    """Return the options of sbatch. `--param` has precedence over the settings of the nodes, then of the cluster."""
    given, slurm = size.parameters, size.cluster.slurm
    values = {n: given.get(n) or getattr(size.node, n) or getattr(slurm, n) for n in SlurmOptions.model_fields}
    return {name: value for name, value in values.items() if value}


def _rack_names(profile: Profile, size: Size) -> tuple[str, ...]:
    """Return the racks that `--param racks` names, which are values of the node label `rack_key`. Default: none."""
    names = tuple(filter(None, size.parameters.get("racks", "").split(",")))
    if names and not size.mnnvl:
        problem = f"NVLink of {profile.name} connects only the GPUs of one node"
        raise ConfigError(f"--param racks: {problem}; leave out --param racks")
    if names and len(set(names)) != size.racks:
        needed = plural(size.racks, "rack")
        raise ConfigError(f"--param racks={','.join(names)}: the job runs on {needed}; name {needed}, each once")
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
    problem = "an MPIJob has only one template for the workers of all racks; use jobset instead of mpijob, or"
    if of_scheduler.exclusive_racks:
        problem = "JobSet creates most pods of a rack only after the rack's first pod is placed"
        problem += f", but {kube.gang} places no pod before all pods exist;"
    several = f"--racks {racks}" if request.racks else f"--nodes {size.nodes} on {racks} racks"
    ways = "name the racks with --param racks=NAME,NAME or let Kueue choose the racks (kubernetes.kueue-topology)"
    raise ConfigError(f"{several}: {problem} {ways}")


def _pod(request: JobRequest, size: Size, rack_names: tuple[str, ...], placeholders: Mapping[str, str]) -> Pod:
    fabric, site, kube = size.fabric.pod, size.site.pod, size.cluster.kubernetes
    if any(feature.without_fabric for feature in size.features.values()):
        fabric, site = Pod(), Pod(select=site.select)
    amounts = {**fabric.resources, **site.resources}
    if resource := size.parameters.get("resource"):
        name, _, count = resource.rpartition(":")
        amounts = {key: amount for key, amount in amounts.items() if "/" not in key} | {name: count}
    own = {name: getattr(size.node, name) or amounts.get(name) for name in ("cpu", "memory")}
    own["nvidia.com/gpu"] = str(size.gpus)
    sidecars = (*fabric.sidecars, *site.sidecars)
    containers: dict[str, Mapping[str, str | None]] = {f"nodes.{size.gpu} in the cluster's file": own}
    containers |= {f"`resources` of the sidecar {sidecar.name}": sidecar.resources for sidecar in sidecars}
    for place, has in containers.items():
        if kube.quota and not (has.get("cpu") and has.get("memory")):
            problem = "the namespace has a quota, so all containers must request cpu and memory"
            raise ConfigError(f"--cluster {request.cluster}: {problem}; add cpu and memory to {place}")
    select = {**size.node.select, **fabric.select, **site.select}
    if rack_names:
        select[size.cluster.rack_key] = rack_names
    others = sorted(amounts.keys() - own.keys())
    annotations = {**kube.pod_annotations, **fabric.annotations, **site.annotations}
    annotations |= _network_annotations(fabric, site, int(placeholders["cards"]))
    # The pod is not validated again: the cpu of a node may be 500m, which is not valid in the facts of a fabric.
    return Pod.model_construct(
        resources={name: amount for name, amount in own.items() if amount}
        | {name: fill_placeholders(amounts[name], placeholders, name) for name in others},
        annotations=dict(sorted(annotations.items())),
        select=dict(sorted(select.items())),
        volumes=(*fabric.volumes, *kube.volumes, *site.volumes),
        sidecars=sidecars,
    )


def _network_annotations(fabric: Pod, site: Pod, nics: int) -> Mapping[str, str]:
    """Return the annotations that attach a pod to its networks: to Multus networks, or to the networks of GKE."""
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
