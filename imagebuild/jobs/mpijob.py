"""A job as an MPIJob of Kubeflow's MPI operator. Pure."""

from __future__ import annotations

from imagebuild.jobs import pods, script
from imagebuild.jobs.merge import of
from imagebuild.jobs.resolve import Job
from imagebuild.jobs.yamlout import Node, Noted


def documents(job: Job) -> list[dict[str, Node]]:
    """The objects, in the order they are created."""
    labels = {"training.kubeflow.org/job-name": job.name, "training.kubeflow.org/job-role": "worker"}
    ready: Node = {"tcpSocket": {"port": 22}, "periodSeconds": 2}
    container: dict[str, Node] = {"readinessProbe": Noted("ready is who answers ssh", ready)}
    metadata: dict[str, Node] = {"name": job.name}
    if job.cluster.labels:
        metadata["labels"] = dict(sorted(job.cluster.labels.items()))
    mpijob: dict[str, Node] = {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": metadata,
        "spec": {
            "slotsPerWorker": job.machine.gpus,
            "launcherCreationPolicy": Noted("mpirun starts when all workers answer", "WaitForWorkersReady"),
            "runPolicy": {
                "cleanPodPolicy": "Running",
                "backoffLimit": Noted("a verdict is final", 0),
            },
            "mpiReplicaSpecs": {
                "Launcher": {
                    "replicas": 1,
                    "restartPolicy": "Never",
                    "template": pods.launcher(job, launch(job, "/etc/mpi/hostfile"), {}),
                },
                "Worker": {
                    "replicas": job.scale.nodes,
                    "restartPolicy": "Never",
                    "template": pods.worker(job, labels, container),
                },
            },
        },
    }
    return [*([pods.compute_domain(job)] if job.claims else []), mpijob]


def launch(job: Job, hostfile: str, before: tuple[str, ...] = ()) -> str:
    """The launcher's script: start the ranks, look at what they say, and end with the verdict."""
    start = f'timeout --kill-after=30 {job.test.minutes * 60} mpirun "${{mpi[@]}}"'
    lines = ["set -uo pipefail", *before, *script.heredoc("rank", script.rank(job))]
    lines += ["mpi=(", f"  -np {job.ranks} --hostfile {hostfile} --bind-to none"]
    for one in script.forwarded(of(job.env, "rank")):
        lines += ["  # sshd starts ranks without the environment of the image", f"  -x {one.entry.name}"]
    lines += [")", "log=$(mktemp)", *script.runs(job, start), *script.checks(job), *script.verdict()]
    return "\n".join(lines) + "\n"
