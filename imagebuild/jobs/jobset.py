"""A job as a JobSet of Kubernetes, which brings its own way for mpirun to reach the workers. Pure.

JobSet knows nothing of MPI. The launcher makes a key when it starts and hands its public half to whoever asks on a
port; each worker asks the launcher, by the name that the job's own service gives it, and then starts an ssh server that
knows this key and no other. No key is in the manifest, in a secret or in the image, and none outlives the job.
"""

from __future__ import annotations

from imagebuild.jobs import pods
from imagebuild.jobs.mpijob import launch
from imagebuild.jobs.resolve import Job
from imagebuild.jobs.yamlout import Node, Noted

KEY_PORT = 2221
SSH_PORT = 2222
HOSTFILE = "/tmp/hostfile"  # noqa: S108 - of a container with one user


def documents(job: Job) -> list[dict[str, Node]]:
    """The objects, in the order they are created."""
    labels = {"jobset.sigs.k8s.io/jobset-name": job.name, "jobset.sigs.k8s.io/replicatedjob-name": "worker"}
    ready: Node = {"tcpSocket": {"port": SSH_PORT}, "periodSeconds": 2}
    worker = pods.worker(job, labels, {"command": ["/bin/bash", "-c"], "args": [serve(job)], "readinessProbe": ready})
    metadata: dict[str, Node] = {"name": job.name}
    if job.cluster.labels:
        metadata["labels"] = dict(sorted(job.cluster.labels.items()))
    script = launch(job, HOSTFILE, tuple(reach(job)))
    jobset: dict[str, Node] = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {
                "enableDNSHostnames": True,
                "publishNotReadyAddresses": Noted("workers look for the launcher before anyone is ready", True),
            },
            "successPolicy": Noted(
                "the launcher's end is the job's", {"operator": "All", "targetReplicatedJobs": ["launcher"]}
            ),
            "failurePolicy": {"maxRestarts": Noted("a verdict is final", 0)},
            "replicatedJobs": [
                _job("launcher", 1, _never(pods.launcher(job, script, {}))),
                _job("worker", job.scale.nodes, _never(worker)),
            ],
        },
    }
    return [*([pods.compute_domain(job)] if job.claims else []), jobset]


def reach(job: Job) -> list[str]:
    """The launcher's part: a key, a server for its public half, the list of workers, and patience."""
    give = (
        "use IO::Socket::INET; my $key = shift; "
        f"my $server = IO::Socket::INET->new(LocalPort => {KEY_PORT}, Listen => 128, ReuseAddr => 1) or die $!; "
        "while (my $client = $server->accept) { print $client $key; close $client }"
    )
    return [
        "# A key for this run; workers fetch the public half, which is no secret.",
        "mkdir -p ~/.ssh",
        "ssh-keygen -q -t ed25519 -N '' -f ~/.ssh/id_ed25519",
        f"perl -e '{give}' \"$(cat ~/.ssh/id_ed25519.pub)\" &",
        "keys=$!",
        "trap 'kill \"$keys\"' EXIT",
        f"for ((i = 0; i < {job.scale.nodes}; i++)); do",
        f'  echo "{job.name}-worker-0-$i.{job.name} slots={job.machine.gpus}"',
        f"done > {HOSTFILE}",
        "while read -r host _; do",
        f'  until (exec 3<> "/dev/tcp/$host/{SSH_PORT}") 2> /dev/null; do sleep 1; done',
        f"done < {HOSTFILE}",
    ]


def serve(job: Job) -> str:
    """The worker's script: the launcher's key, then a server that knows no other."""
    lines = [
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
    return "\n".join(lines) + "\n"


def _job(name: str, pods_: int, template: dict[str, Node]) -> dict[str, Node]:
    return {
        "name": name,
        "replicas": 1,
        "template": {
            "spec": {
                "parallelism": pods_,
                "completions": pods_,
                "completionMode": "Indexed",
                "backoffLimit": 0,
                "template": template,
            }
        },
    }


def _never(template: dict[str, Node]) -> dict[str, Node]:
    spec = template["spec"]
    assert isinstance(spec, dict)
    return {**template, "spec": {"restartPolicy": "Never", **spec}}
