"""A job as a batch script of Slurm, with or without a container. Pure."""

from __future__ import annotations

import re
import shlex

from imagebuild.jobs import header, script
from imagebuild.jobs.merge import of
from imagebuild.jobs.resolve import Job


def text(job: Job) -> str:
    """The script."""
    lines = ["#!/bin/bash", *(f"# {line}" for line in header.lines(job)), *options(job), "", "set -uo pipefail"]
    if job.choices.container == "none" and job.cluster.module:
        lines += [
            "# the site's MPI, CUDA and NCCL",
            "# shellcheck source=/dev/null",
            "command -v module > /dev/null || . /usr/share/modules/init/bash",
            f"module load {shlex.quote(job.cluster.module)}",
        ]
    lines += script.exports((*of(job.env, "batch"), *of(job.env, "container")))
    lines += script.heredoc("rank", script.rank(job))
    lines += [f'log="$SLURM_SUBMIT_DIR/{job.name}-$SLURM_JOB_ID.log"', 'echo "imagebuild: on $SLURM_JOB_NODELIST"']
    if job.choices.container == "pyxis":
        lines += fetch(job)
    lines += step(job)
    lines += [*script.runs(job, 'srun "${step[@]}"'), *script.checks(job), *report(job), *script.verdict()]
    return "\n".join(lines) + "\n"


def options(job: Job) -> list[str]:
    """What is asked of Slurm; the same for every profile."""
    found = {
        "job-name": job.name,
        "nodes": str(job.scale.nodes),
        "ntasks-per-node": str(job.machine.gpus),
        "gpus-per-node": str(job.machine.gpus),
        "cpus-per-task": cpus(job),
        "mem": "0",
        "exclusive": "",
        "distribution": "block:block",
        "time": str(job.test.minutes),
        "output": "%x-%j.out",
        "account": job.options.get("account"),
        "partition": job.nodes.partition,
        "constraint": job.nodes.constraint,
    }
    lines = []
    if job.machine.mnnvl:
        found["segment"] = str(job.scale.each)
        lines.append("# Nodes of a segment share a rack. For other numbers, make the job anew: sbatch -N keeps it.")
    lines += [f"#SBATCH --{k}={v}" if v else f"#SBATCH --{k}" for k, v in found.items() if v is not None]
    return lines


def cpus(job: Job) -> str:
    """CPUs of a rank."""
    return job.options.get("cpus-per-task") or str(job.cluster.cpus_per_task)


def fetch(job: Job) -> list[str]:
    """The image as a file that all nodes see, made once, and never seen half."""
    folder = job.options.get("images") or job.cluster.images
    name = re.sub(r"[^A-Za-z0-9_.-]+", "+", job.image.reference)
    return [
        f'images="{folder}"',
        'mkdir -p "$images" || exit 1',
        "# Do all nodes see the folder? Its kind of file system does not tell; a file in it does.",
        'seen=$(mktemp "$images/.seen.XXXXXX") || exit 1',
        'srun --mpi=none --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 test -e "$seen"',
        "shared=$?",
        'rm -f "$seen"',
        'if [ "$shared" != 0 ]; then',
        '  echo "imagebuild: not all nodes see $images; name a folder that they share with --set images=" >&2',
        "  exit 1",
        "fi",
        f'image="$images/{name}.sqsh"',
        "# One job imports, others wait; an import that breaks off leaves no image.",
        'exec 9> "$image.lock"',
        "flock 9",
        'if [ ! -e "$image" ]; then',
        '  partial="$image.$SLURM_JOB_ID"',
        f'  if ! enroot import --output "$partial" {shlex.quote(enroot(job.image.reference))}; then',
        '    rm -f "$partial"',
        '    echo "imagebuild: the image could not be imported" >&2',
        "    exit 1",
        "  fi",
        '  mv "$partial" "$image"',
        "fi",
        "flock -u 9",
    ]


def step(job: Job) -> list[str]:
    """Arguments of srun, which from 22.05 to 23.02 takes no CPUs over from the batch."""
    lines = [
        "step=(",
        "  --mpi=pmix --kill-on-bad-exit=1",
        f"  --cpus-per-task={cpus(job)}",
    ]
    if job.choices.container == "pyxis":
        lines += ['  --container-image="$image" --no-container-mount-home']
        if mounts := (*job.fabric.mounts, *job.choices.site.mounts):
            lines.append(f"  --container-mounts={shlex.quote(','.join(mounts))}")
        if names := [one.entry.name for one in of(job.env, "container")]:
            lines += ["  # before the container starts, and whatever the image says"]
            lines += [f"  --container-env={','.join(names)}"]
    lines.append(")")
    if job.choices.container == "pyxis":
        lines += [
            "# who is root outside must be it inside, for PMIx to let the rank in, and who is not must not",
            'if [ "$(id -u)" = 0 ]; then step+=(--container-remap-root); else step+=(--no-container-remap-root); fi',
        ]
    return lines


def report(job: Job) -> list[str]:
    """The verdict on speed, where imagebuild is installed."""
    options = header.judging(job)
    return [
        "# 1: wrong, slow or unbelievably fast; 5: no result in the log; others: not judged, which fails nothing",
        "judged=127",
        "if command -v imagebuild > /dev/null; then",
        f'  imagebuild report "$log" {options} --profiles "${{IMAGEBUILD_PROFILES:-profiles}}"',
        "  judged=$?",
        "fi",
        'case "$judged" in',
        "  0) ;;",
        "  1 | 5) failed=1 ;;",
        f'  *) echo "imagebuild: speed was not judged; elsewhere: imagebuild report $log {options}" ;;',
        "esac",
    ]


def enroot(reference: str) -> str:
    """An image as enroot names it: the registry is set off by `#`, and a digest stands where a tag does.

    enroot 3 and 4.0 know no `@`, but ask the registry for whatever stands behind the colon; later ones know both.
    """
    name, at, digest = reference.partition("@")
    if at:
        reference = f"{re.sub(r':[^:/]*$', '', name)}:{digest}"
    first, slash, rest = reference.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        return f"docker://{first}#{rest}"
    return f"docker://{reference}"
