"""Write a job as an MPIJob or a JobSet of Kubernetes. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from imagebuild.jobs import script
from imagebuild.jobs.choose import Job
from imagebuild.jobs.environment import Variable, in_scope
from imagebuild.jobs.facts import Volume


@dataclass(frozen=True)
class Commented:
    """Put lines of comment above a value."""

    comment: str
    value: Node


Node: TypeAlias = "str | int | bool | Commented | Mapping[str, Node] | Sequence[Node]"
"""A part of a YAML document."""

CLAIM = "nvlink-channel"
SHARED_MEMORY = "dshm"
KEY_PORT = 2221
"""Port on which the launcher of a JobSet gives workers its public key."""
SSH_PORT = 2222
HOSTFILE = "/tmp/hostfile"  # noqa: S108 - of a container with one user


def mpijob(job: Job) -> str:
    """Return the YAML of an MPIJob."""
    labels = {"training.kubeflow.org/job-name": job.name, "training.kubeflow.org/job-role": "worker"}
    ready: Node = {"tcpSocket": {"port": 22}, "periodSeconds": 2}
    document: Node = {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": _metadata(job),
        "spec": {
            "slotsPerWorker": job.hardware.gpus,
            "launcherCreationPolicy": Commented("mpirun starts when all workers answer", "WaitForWorkersReady"),
            "runPolicy": {
                "cleanPodPolicy": "Running",
                "backoffLimit": Commented("a verdict is final", 0),
            },
            "mpiReplicaSpecs": {
                "Launcher": {
                    "replicas": 1,
                    "restartPolicy": "Never",
                    "template": _launcher_pod(job, _launcher_script(job, "/etc/mpi/hostfile")),
                },
                "Worker": {
                    "replicas": job.scale.nodes,
                    "restartPolicy": "Never",
                    "template": _worker_pod(
                        job, labels, {"readinessProbe": Commented("ready is who answers ssh", ready)}
                    ),
                },
            },
        },
    }
    return _manifest(job, document)


def jobset(job: Job) -> str:
    """Return the YAML of a JobSet. Workers fetch the launcher's key, then start sshd, which accepts no other key."""
    labels = {"jobset.sigs.k8s.io/jobset-name": job.name, "jobset.sigs.k8s.io/replicatedjob-name": "worker"}
    ready: Node = {"tcpSocket": {"port": SSH_PORT}, "periodSeconds": 2}
    worker_script = [
        "set -uo pipefail",
        f"launcher={job.name}-launcher-0-0.{job.name}",
        'key=""',
        'until [ -n "$key" ]; do',
        f'  key=$( (exec 3<> "/dev/tcp/$launcher/{KEY_PORT}" && cat <&3) 2> /dev/null) || sleep 1',
        "done",
        "umask 077",
        "mkdir -p ~/.ssh",
        'echo "$key" > ~/.ssh/authorized_keys',
        f"exec /usr/sbin/sshd -D -e -p {SSH_PORT}",
    ]
    server: dict[str, Node] = {
        "command": ["/bin/bash", "-c"],
        "args": ["\n".join(worker_script) + "\n"],
        "readinessProbe": ready,
    }
    launcher = _launcher_pod(job, _launcher_script(job, HOSTFILE, before=_key_server_lines(job)))
    document: Node = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(job),
        "spec": {
            "network": {
                "enableDNSHostnames": True,
                "publishNotReadyAddresses": Commented("workers look for the launcher before anyone is ready", True),
            },
            "successPolicy": Commented(
                "the launcher's end is the job's", {"operator": "All", "targetReplicatedJobs": ["launcher"]}
            ),
            "failurePolicy": {"maxRestarts": Commented("a verdict is final", 0)},
            "replicatedJobs": [
                _replicated_job("launcher", 1, launcher),
                _replicated_job("worker", job.scale.nodes, _worker_pod(job, labels, server)),
            ],
        },
    }
    return _manifest(job, document)


def _manifest(job: Job, document: Node) -> str:
    """Return the objects as YAML, in the order in which they are created, below a header."""
    documents = [_compute_domain(job), document] if job.claims else [document]
    header = "".join(f"# {line}\n" for line in script.header_lines(job))
    return header + "---\n".join("\n".join(_yaml_lines(document, 0)) + "\n" for document in documents)


def _metadata(job: Job) -> dict[str, Node]:
    labels: dict[str, Node] = {"labels": dict(sorted(job.cluster.labels.items()))} if job.cluster.labels else {}
    return {"name": job.name, **labels}


def _replicated_job(name: str, pods: int, pod: dict[str, Node]) -> dict[str, Node]:
    """Return a Job of a JobSet, whose pods are not started again."""
    spec = pod["spec"]
    assert isinstance(spec, dict)
    return {
        "name": name,
        "replicas": 1,
        "template": {
            "spec": {
                "parallelism": pods,
                "completions": pods,
                "completionMode": "Indexed",
                "backoffLimit": 0,
                "template": {**pod, "spec": {"restartPolicy": "Never", **spec}},
            }
        },
    }


def _compute_domain(job: Job) -> dict[str, Node]:
    """Return the object that gives the pods of the job a channel of the rack-wide NVLink."""
    return {
        "apiVersion": "resource.nvidia.com/v1beta1",
        "kind": "ComputeDomain",
        "metadata": {"name": job.name},
        "spec": {
            "numNodes": Commented("however many come: drivers from 25.8 on take it, later ones ignore the field", 0),
            "channel": {"resourceClaimTemplate": {"name": _claim_template(job)}},
        },
    }


def _claim_template(job: Job) -> str:
    return f"{job.name}-channel"


# Pods


def _worker_pod(job: Job, labels: Mapping[str, str], container: Mapping[str, Node]) -> dict[str, Node]:
    """Return the pod template of workers. `labels` select the job's workers; `container` is added to the benchmark's
    container.
    """
    workers: Node = {"matchLabels": dict(labels)}
    spec: dict[str, Node] = {}
    if job.scale.racks > 1:
        spec["topologySpreadConstraints"] = [
            Commented(
                f"{job.scale.nodes_per_rack} nodes of each of {job.scale.racks} racks, of this job's only",
                {
                    "maxSkew": 1,
                    "minDomains": job.scale.racks,
                    "topologyKey": job.cluster.rack_key,
                    "whenUnsatisfiable": "DoNotSchedule",
                    "labelSelector": workers,
                },
            )
        ]
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    select = {**job.nodes.select, **job.pod.select}
    terms: list[Node] = [{"key": k, "operator": "In", "values": list(v)} for k, v in sorted(select.items())]
    terms.append({"key": "kubernetes.io/arch", "operator": "In", "values": [job.hardware.arch]})
    affinity: dict[str, Node] = {"nodeAffinity": {required: {"nodeSelectorTerms": [{"matchExpressions": terms}]}}}
    if job.hardware.mnnvl and job.scale.racks == 1:
        affinity["podAffinity"] = Commented(
            "all of this job's workers, and of no other's, on one rack",
            {required: [{"labelSelector": workers, "topologyKey": job.cluster.rack_key}]},
        )
    spec["affinity"] = affinity
    spec |= _tolerations(job)
    containers = [_benchmark_container(job, container)]
    for sidecar in job.pod.sidecars:
        beside: dict[str, Node] = {
            "name": sidecar.name,
            "image": sidecar.image,
            "command": list(sidecar.command),
            "env": [{"name": name, "value": value} for name, value in sidecar.env.items()],
        }
        if sidecar.capabilities:
            beside["securityContext"] = {"capabilities": {"add": list(sidecar.capabilities)}}
        mounts = {**sidecar.mounts, **{volume.name: volume.mount for volume in sidecar.volumes}}
        beside["volumeMounts"] = [{"name": name, "mountPath": path} for name, path in mounts.items()]
        containers.append(beside)
    spec["containers"] = containers
    if job.claims:
        spec["resourceClaims"] = [{"name": CLAIM, "resourceClaimTemplateName": _claim_template(job)}]
    spec["volumes"] = [
        Commented("ranks of a node share memory here", {"name": SHARED_MEMORY, "emptyDir": {"medium": "Memory"}}),
        *map(_volume, job.pod.volumes),
        *(_volume(volume) for sidecar in job.pod.sidecars for volume in sidecar.volumes),
    ]
    annotations = dict(job.pod.annotations)
    if job.pod.networks:
        pairs = [dict(zip(("namespace", "name"), name.split("/", 1), strict=True)) for name in job.pod.networks]
        lines = ",\n".join(f"  {json.dumps(pair)}" for pair in pairs)
        annotations["k8s.v1.cni.cncf.io/networks"] = f"[\n{lines}\n]\n"
    if annotations:
        return {"metadata": {"annotations": dict(sorted(annotations.items()))}, "spec": spec}
    return {"spec": spec}


def _benchmark_container(job: Job, more: Mapping[str, Node]) -> dict[str, Node]:
    container: dict[str, Node] = {"name": "nccl-tests", "image": job.image.reference}
    if variables := in_scope(job.variables, "container"):
        container["env"] = _env(variables)
    if job.cluster.ipc_lock:
        container["securityContext"] = {
            "capabilities": {"add": [Commented("cards read and write pinned memory", "IPC_LOCK")]}
        }
    container |= more
    demands = {"cpu": job.nodes.cpu, "memory": job.nodes.memory, "nvidia.com/gpu": str(job.hardware.gpus)}
    demands |= job.pod.resources
    claims: dict[str, Node] = {"claims": [{"name": CLAIM}]} if job.claims else {}
    container["resources"] = _resources({name: count for name, count in demands.items() if count}) | claims
    mounts: list[Node] = [{"name": SHARED_MEMORY, "mountPath": "/dev/shm"}]  # noqa: S108 - a mount point
    for volume in job.pod.volumes:
        mount: dict[str, Node] = {"name": volume.name, "mountPath": volume.mount}
        mounts.append({**mount, "readOnly": True} if volume.read_only else mount)
    container["volumeMounts"] = mounts
    return container


def _launcher_pod(job: Job, launcher_script: str) -> dict[str, Node]:
    spec: dict[str, Node] = {}
    select = dict(job.cluster.launcher_select)
    if job.image.arches is None or len(job.image.arches) == 1:
        select["kubernetes.io/arch"] = job.hardware.arch
    if select:
        spec["nodeSelector"] = Commented("the image may be for this architecture only", dict(sorted(select.items())))
    spec |= _tolerations(job)
    spec["containers"] = [
        {
            "name": "nccl-tests",
            "image": job.image.reference,
            "env": _env(in_scope(job.variables, "launcher")),
            "command": ["/bin/bash", "-c"],
            "args": [launcher_script],
            "resources": _resources({"cpu": "2", "memory": "2Gi"}),
        }
    ]
    return {"spec": spec}


def _tolerations(job: Job) -> dict[str, Node]:
    tolerations: list[Node] = [toleration.model_dump(exclude_none=True) for toleration in job.cluster.tolerations]
    return {"tolerations": tolerations} if tolerations else {}


def _env(variables: Iterable[Variable]) -> list[Node]:
    return [Commented(variable.why, {"name": variable.name, "value": variable.value or ""}) for variable in variables]


def _resources(values: Mapping[str, str]) -> dict[str, Node]:
    """Return requests and limits, which are the same."""
    return {"requests": dict(values), "limits": dict(values)}


def _volume(volume: Volume) -> dict[str, Node]:
    path: dict[str, Node] = {"path": volume.host}
    return {"name": volume.name, "hostPath": {**path, "type": volume.type} if volume.type else path}


# Scripts of containers


def _launcher_script(job: Job, hostfile: str, before: Iterable[str] = ()) -> str:
    """Return the script that starts the ranks, checks their output, and ends with the verdict as its status."""
    start = f'timeout --kill-after=30 {job.test.minutes * 60} mpirun "${{mpi[@]}}"'
    lines = ["set -uo pipefail", *before, *script.heredoc_lines("rank", script.rank_script(job))]
    lines += ["mpi=(", f"  -np {job.ranks} --hostfile {hostfile} --bind-to none"]
    for variable in in_scope(job.variables, "rank"):
        if variable.value is None or variable.prepend:
            lines += ["  # sshd starts ranks without the environment of the image", f"  -x {variable.name}"]
    lines += [")", "log=$(mktemp)"]
    lines += [*script.run_lines(job, start), *script.check_lines(job), *script.verdict_lines()]
    return "\n".join(lines) + "\n"


def _key_server_lines(job: Job) -> list[str]:
    """Return what the launcher of a JobSet does before it starts ranks: make a key, give workers its public half, list
    the workers, and wait until all answer.
    """
    server = (
        "use IO::Socket::INET; my $key = shift; "
        f"my $server = IO::Socket::INET->new(LocalPort => {KEY_PORT}, Listen => 128, ReuseAddr => 1) or die $!; "
        "while (my $client = $server->accept) { print $client $key; close $client }"
    )
    return [
        "# A key for this run; workers fetch the public half, which is no secret.",
        "mkdir -p ~/.ssh",
        "ssh-keygen -q -t ed25519 -N '' -f ~/.ssh/id_ed25519",
        f"perl -e '{server}' \"$(cat ~/.ssh/id_ed25519.pub)\" &",
        "keys=$!",
        "trap 'kill \"$keys\"' EXIT",
        f"for ((i = 0; i < {job.scale.nodes}; i++)); do",
        f'  echo "{job.name}-worker-0-$i.{job.name} slots={job.hardware.gpus}"',
        f"done > {HOSTFILE}",
        "while read -r host _; do",
        f'  until (exec 3<> "/dev/tcp/$host/{SSH_PORT}") 2> /dev/null; do sleep 1; done',
        f"done < {HOSTFILE}",
    ]


# YAML with comments

PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./@+-]*(?::[A-Za-z0-9_./@+-]+)*|[0-9]+(?:Ki|Mi|Gi|Ti)")
"""Texts that need no quotes, except `NOT_TEXT`."""
NOT_TEXT = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}
"""Words that some readers of YAML take for a boolean or for nothing."""


def _yaml_lines(node: Node, depth: int) -> Iterator[str]:
    indent = "  " * depth
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from _entry_lines(f"{indent}{_scalar(key)}:", value, depth)
        return
    if not isinstance(node, Sequence) or isinstance(node, str):
        raise TypeError(f"a document is a mapping or a list, not {node!r}")
    for item in node:
        value = item.value if isinstance(item, Commented) else item
        if not isinstance(value, Mapping) or not value:
            yield from _entry_lines(f"{indent}-", item, depth)
            continue
        if isinstance(item, Commented):
            yield from (f"{indent}# {line}" for line in item.comment.splitlines())
        # The first key stands behind the dash, and comments above it.
        lines = list(_yaml_lines(value, depth + 1))
        first = next(i for i, line in enumerate(lines) if not line.lstrip().startswith("#"))
        yield from (line[2:] for line in lines[:first])
        yield f"{indent}- {lines[first].lstrip()}"
        yield from lines[first + 1 :]


def _entry_lines(head: str, value: Node, depth: int) -> Iterator[str]:
    """Yield the lines of a value that stands behind its key or a dash."""
    indent = "  " * depth
    if isinstance(value, Commented):
        yield from (f"{indent}# {line}" for line in value.comment.splitlines())
        value = value.value
    if isinstance(value, str) and "\n" in value:
        yield f"{head} |{'' if value.endswith(chr(10)) else '-'}"
        yield from (f"{indent}  {line}" if line else "" for line in value.rstrip("\n").split("\n"))
    elif isinstance(value, str | int):
        yield f"{head} {_scalar(value)}"
    elif not value:
        yield f"{head} {'{}' if isinstance(value, Mapping) else '[]'}"
    else:
        yield head
        yield from _yaml_lines(value, depth + 1)


def _scalar(value: str | int) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if PLAIN.fullmatch(value) and value.lower() not in NOT_TEXT:
        return value
    return json.dumps(value, ensure_ascii=False)
