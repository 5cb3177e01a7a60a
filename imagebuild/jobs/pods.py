"""Pods of launcher and workers, for MPIJob and JobSet alike. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from imagebuild.jobs.merge import Placed, of
from imagebuild.jobs.models import Sidecar, Volume
from imagebuild.jobs.resolve import Job
from imagebuild.jobs.yamlout import Node, Noted

CLAIM = "nvlink-channel"
SHM = "dshm"


def environment(placed: Iterable[Placed]) -> list[Node]:
    """`env` of a container, each with its reason."""
    return [Noted(one.entry.why, {"name": one.entry.name, "value": one.value or ""}) for one in placed]


def resources(values: Mapping[str, str], claim: bool = False) -> dict[str, Node]:
    """Requests and limits, which are the same."""
    both: dict[str, Node] = dict(values)
    found: dict[str, Node] = {"requests": both, "limits": both}
    if claim:
        found["claims"] = [{"name": CLAIM}]
    return found


def worker(job: Job, labels: Mapping[str, str], container: Mapping[str, Node]) -> dict[str, Node]:
    """The pod template of workers; `container` adds to the benchmark's, `labels` tell the job's workers apart."""
    spec: dict[str, Node] = {}
    if job.scale.racks > 1:
        spec["topologySpreadConstraints"] = [
            Noted(
                f"{job.scale.each} nodes of each of {job.scale.racks} racks, of this job's only",
                {
                    "maxSkew": 1,
                    "minDomains": job.scale.racks,
                    "topologyKey": job.cluster.rack_key,
                    "whenUnsatisfiable": "DoNotSchedule",
                    "labelSelector": {"matchLabels": dict(labels)},
                },
            )
        ]
    if affinity := _affinity(job, labels):
        spec["affinity"] = affinity
    if job.cluster.tolerations:
        spec["tolerations"] = [t.model_dump(exclude_none=True) for t in job.cluster.tolerations]
    spec["containers"] = [_benchmark(job, container), *(_sidecar(s) for s in job.pod.sidecars)]
    if job.claims:
        spec["resourceClaims"] = [{"name": CLAIM, "resourceClaimTemplateName": claim_template(job)}]
    volumes = [*job.pod.volumes, *(v for s in job.pod.sidecars for v in s.volumes)]
    shm: Node = Noted("ranks of a node share memory here", {"name": SHM, "emptyDir": {"medium": "Memory"}})
    spec["volumes"] = [shm, *(_volume(v) for v in volumes)]
    annotations = dict(job.pod.annotations)
    if job.pod.networks:
        annotations["k8s.v1.cni.cncf.io/networks"] = networks(job.pod.networks)
    template: dict[str, Node] = {}
    if annotations:
        template["metadata"] = {"annotations": dict(sorted(annotations.items()))}
    template["spec"] = spec
    return template


def launcher(job: Job, script: str, extra: Mapping[str, Node]) -> dict[str, Node]:
    """The pod template of the launcher."""
    select = dict(job.cluster.launcher_select)
    if job.image.arches is None or len(job.image.arches) == 1:
        select["kubernetes.io/arch"] = job.machine.arch
    spec: dict[str, Node] = {}
    if select:
        spec["nodeSelector"] = Noted("the image may be for this architecture only", dict(sorted(select.items())))
    if job.cluster.tolerations:
        spec["tolerations"] = [t.model_dump(exclude_none=True) for t in job.cluster.tolerations]
    spec["containers"] = [
        {
            "name": "nccl-tests",
            "image": job.image.reference,
            "env": environment(of(job.env, "launcher")),
            "command": ["/bin/bash", "-c"],
            "args": [script],
            "resources": resources({"cpu": "2", "memory": "2Gi"}),
            **extra,
        }
    ]
    return {"spec": spec}


def compute_domain(job: Job) -> dict[str, Node]:
    """What gives the pods of the job a channel of the rack-wide NVLink of their own."""
    return {
        "apiVersion": "resource.nvidia.com/v1beta1",
        "kind": "ComputeDomain",
        "metadata": {"name": job.name},
        "spec": {
            "numNodes": Noted("however many come: drivers from 25.8 on take it, later ones ignore the field", 0),
            "channel": {"resourceClaimTemplate": {"name": claim_template(job)}},
        },
    }


def claim_template(job: Job) -> str:
    return f"{job.name}-channel"


def networks(names: Iterable[str]) -> str:
    """The annotation of Multus."""
    pairs = [dict(zip(("namespace", "name"), name.split("/", 1), strict=True)) for name in names]
    return "[\n" + ",\n".join(f"  {json.dumps(pair)}" for pair in pairs) + "\n]\n"


def _affinity(job: Job, labels: Mapping[str, str]) -> dict[str, Node]:
    found: dict[str, Node] = {}
    select = {**job.nodes.select, **job.pod.select}
    terms: list[Node] = [{"key": k, "operator": "In", "values": list(v)} for k, v in sorted(select.items())]
    terms.append({"key": "kubernetes.io/arch", "operator": "In", "values": [job.machine.arch]})
    found["nodeAffinity"] = {
        "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": terms}]}
    }
    if job.machine.mnnvl and job.scale.racks == 1:
        found["podAffinity"] = Noted(
            "all of this job's workers, and of no other's, on one rack",
            {
                "requiredDuringSchedulingIgnoredDuringExecution": [
                    {"labelSelector": {"matchLabels": dict(labels)}, "topologyKey": job.cluster.rack_key}
                ]
            },
        )
    return found


def _benchmark(job: Job, container: Mapping[str, Node]) -> dict[str, Node]:
    demands = {"cpu": job.nodes.cpu, "memory": job.nodes.memory, "nvidia.com/gpu": str(job.machine.gpus)}
    demands |= job.pod.resources
    found: dict[str, Node] = {"name": "nccl-tests", "image": job.image.reference}
    if env := of(job.env, "container"):
        found["env"] = environment(env)
    if job.cluster.ipc_lock:
        found["securityContext"] = {"capabilities": {"add": [Noted("cards read and write pinned memory", "IPC_LOCK")]}}
    found |= container
    found["resources"] = resources({k: v for k, v in demands.items() if v}, claim=job.claims)
    mounts: list[Node] = [{"name": SHM, "mountPath": "/dev/shm"}]  # noqa: S108 - a mount point
    for volume in job.pod.volumes:
        mount: dict[str, Node] = {"name": volume.name, "mountPath": volume.mount}
        mounts.append({**mount, "readOnly": True} if volume.read_only else mount)
    found["volumeMounts"] = mounts
    return found


def _sidecar(sidecar: Sidecar) -> dict[str, Node]:
    found: dict[str, Node] = {
        "name": sidecar.name,
        "image": sidecar.image,
        "command": list(sidecar.command),
        "env": [{"name": name, "value": value} for name, value in sidecar.env.items()],
    }
    if sidecar.capabilities:
        found["securityContext"] = {"capabilities": {"add": list(sidecar.capabilities)}}
    own = {v.name: v.mount for v in sidecar.volumes}
    found["volumeMounts"] = [{"name": n, "mountPath": m} for n, m in {**sidecar.mounts, **own}.items()]
    return found


def _volume(volume: Volume) -> dict[str, Node]:
    path: dict[str, Node] = {"path": volume.host}
    return {"name": volume.name, "hostPath": {**path, "type": volume.type} if volume.type else path}
