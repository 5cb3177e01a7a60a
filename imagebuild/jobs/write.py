"""A job as the text of a file. Pure."""

from __future__ import annotations

from imagebuild.jobs import header, jobset, mpijob, slurm
from imagebuild.jobs.resolve import Job
from imagebuild.jobs.yamlout import dump


def text(job: Job) -> str:
    """A batch script, or the objects of Kubernetes as YAML. Equal jobs give equal text."""
    if job.request.scheduler == "slurm":
        return slurm.text(job)
    documents = (mpijob if job.request.scheduler == "mpijob" else jobset).documents(job)
    head = "".join(f"# {line}\n" for line in header.lines(job))
    return head + "---\n".join(dump(document) for document in documents)
