"""The comment that a job begins with: the command, what is measured, and how the result comes back. Pure."""

from __future__ import annotations

import shlex

from imagebuild.jobs.inputs import Request
from imagebuild.jobs.resolve import Job


def command(request: Request) -> str:
    """The command that makes the job again, options in one order."""
    words = ["imagebuild", "job", request.scheduler, "--profile", request.profile, "--fabric", request.fabric]
    words += ["--cluster", request.cluster] if request.cluster != "generic" else []
    words += ["--nodes", str(request.nodes)] if request.nodes is not None else []
    words += ["--racks", str(request.racks)] if request.racks is not None else []
    words += ["--with", ",".join(request.features)] if request.features else []
    words += ["--container", request.container] if request.scheduler == "slurm" and request.container != "pyxis" else []
    words += ["--image", request.image] if request.image else []
    words += ["--nccl", request.nccl] if request.nccl else []
    words += ["--test", request.test] if request.test != "all-reduce" else []
    for setting in request.settings:
        words += ["--set", setting]
    words += ["--collect"] if request.collect else []
    return shlex.join(words)


def lines(job: Job) -> list[str]:
    """Lines of the header, without comment signs."""
    scale = job.scale
    where = f"{job.ranks} ranks on {scale.nodes} nodes of {job.machine.profile}"
    if scale.racks > 1:
        where += f", {scale.each} in each of {scale.racks} racks"
    said = [
        command(job.request),
        f"{job.test.title}: {where}; {job.fabric.title}; NCCL {job.image.nccl or 'as installed'}",
    ]
    if job.machine.mnnvl and scale.racks == 1 and "nics" not in job.choices.features:
        said.append("One rack: NVLink carries everything, and no network card is used; --with nics measures those.")
    if not job.choices.comparable:
        said.append(f"The numbers of {job.machine.profile} are about another network, so speed is not judged by them.")
    if job.request.collect:
        said += collect(job)
    return said


def judging(job: Job) -> str:
    """Options of `imagebuild report`."""
    profile = [f"--profile {job.machine.profile}"] if job.choices.comparable else []
    return " ".join([*profile, f"--nodes {job.scale.nodes}"])


def collect(job: Job) -> list[str]:
    """How the result comes back."""
    name, options = job.name, judging(job)
    judge = f"imagebuild report {name}.log {options}"
    if job.request.scheduler == "slurm":
        return [
            "To run it and see the result (this file is JOB.sh):",
            "  sbatch --wait JOB.sh   # its status is the job's; the log is beside it",
            f"  imagebuild report {name}-<job id>.log {options}",
        ]
    if job.request.scheduler == "mpijob":
        label = f"training.kubeflow.org/job-name={name},training.kubeflow.org/job-role=launcher"
        kind, done = f"mpijob/{name}", "Succeeded"
    else:
        label = f"jobset.sigs.k8s.io/jobset-name={name},jobset.sigs.k8s.io/replicatedjob-name=launcher"
        kind, done = f"jobset/{name}", "Completed"
    return [
        "To run it and see the result (this file is JOB.yaml):",
        "  kubectl create -f JOB.yaml",
        f"  kubectl wait --for=condition={done} --timeout={job.test.minutes + 10}m {kind}",
        f"  kubectl logs --tail=-1 -l {label} > {name}.log",
        f"  {judge}",
        "  kubectl delete -f JOB.yaml",
    ]
