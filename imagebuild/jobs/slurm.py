"""Write a job as a batch script of Slurm, with or without a container. Pure."""

from __future__ import annotations

import re
import shlex

from imagebuild.jobs import script
from imagebuild.jobs.choose import Job
from imagebuild.jobs.environment import in_scope


def batch_script(job: Job) -> str:
    """Return the text of the script."""
    lines = ["#!/bin/bash", *(f"# {line}" for line in script.header_lines(job)), *sbatch_lines(job), ""]
    lines.append("set -uo pipefail")
    if job.choices.container == "none" and job.cluster.module:
        lines += [
            "# the site's MPI, CUDA and NCCL",
            "# shellcheck source=/dev/null",
            "command -v module > /dev/null || . /usr/share/modules/init/bash",
            f"module load {shlex.quote(job.cluster.module)}",
        ]
    lines += script.export_lines((*in_scope(job.variables, "batch"), *in_scope(job.variables, "container")))
    lines += script.heredoc_lines("rank", script.rank_script(job))
    lines += [f'log="$SLURM_SUBMIT_DIR/{job.name}-$SLURM_JOB_ID.log"', 'echo "imagebuild: on $SLURM_JOB_NODELIST"']
    if job.choices.container == "pyxis":
        lines += import_image_lines(job)
    lines += step_lines(job)
    lines += [*script.run_lines(job, 'srun "${step[@]}"'), *script.check_lines(job)]
    lines += [*judge_speed_lines(job), *script.verdict_lines()]
    return "\n".join(lines) + "\n"


def sbatch_lines(job: Job) -> list[str]:
    """Return the options of sbatch; the same for every profile."""
    options = {
        "job-name": job.name,
        "nodes": str(job.scale.nodes),
        "ntasks-per-node": str(job.hardware.gpus),
        "gpus-per-node": str(job.hardware.gpus),
        "cpus-per-task": cpus_per_rank(job),
        "mem": "0",
        "exclusive": "",
        "distribution": "block:block",
        "time": str(job.test.minutes),
        "output": "%x-%j.out",
        "account": job.parameters.get("account"),
        "partition": job.nodes.partition,
        "constraint": job.nodes.constraint,
    }
    lines = []
    if job.hardware.mnnvl:
        options["segment"] = str(job.scale.nodes_per_rack)
        lines.append("# Nodes of a segment share a rack. For other numbers, make the job anew: sbatch -N keeps it.")
    lines += [f"#SBATCH --{k}={v}" if v else f"#SBATCH --{k}" for k, v in options.items() if v is not None]
    return lines


def cpus_per_rank(job: Job) -> str:
    """Return the number of CPUs of a rank."""
    return job.parameters.get("cpus-per-task") or str(job.cluster.cpus_per_task)


def import_image_lines(job: Job) -> list[str]:
    """Return the lines that import the image into a folder that all nodes share, once, and never half."""
    folder = job.parameters.get("images") or job.cluster.images
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
        f'  if ! enroot import --output "$partial" {shlex.quote(enroot_reference(job.image.reference))}; then',
        '    rm -f "$partial"',
        '    echo "imagebuild: the image could not be imported" >&2',
        "    exit 1",
        "  fi",
        '  mv "$partial" "$image"',
        "fi",
        "flock -u 9",
    ]


def enroot_reference(reference: str) -> str:
    """Return the address of an image for enroot: `#` follows the registry, and a digest takes the place of the tag.

    enroot 3 and 4.0 do not know `@`, but ask the registry for whatever stands behind the colon; later ones know both.
    """
    name, at, digest = reference.partition("@")
    if at:
        reference = f"{re.sub(r':[^:/]*$', '', name)}:{digest}"
    first, slash, rest = reference.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        return f"docker://{first}#{rest}"
    return f"docker://{reference}"


def step_lines(job: Job) -> list[str]:
    """Return the lines that collect the arguments of srun."""
    lines = [
        "step=(",
        "  --mpi=pmix --kill-on-bad-exit=1",
        # srun 22.05 to 23.02 does not take this number from the batch job.
        f"  --cpus-per-task={cpus_per_rank(job)}",
    ]
    if job.choices.container == "pyxis":
        lines += ['  --container-image="$image" --no-container-mount-home']
        if mounts := (*job.fabric.mounts, *job.choices.site.mounts):
            lines.append(f"  --container-mounts={shlex.quote(','.join(mounts))}")
        if names := [variable.name for variable in in_scope(job.variables, "container")]:
            lines += ["  # before the container starts, and whatever the image says"]
            lines += [f"  --container-env={','.join(names)}"]
    lines.append(")")
    if job.choices.container == "pyxis":
        lines += [
            "# who is root outside must be it inside, for PMIx to let the rank in, and who is not must not",
            'if [ "$(id -u)" = 0 ]; then step+=(--container-remap-root); else step+=(--no-container-remap-root); fi',
        ]
    return lines


def judge_speed_lines(job: Job) -> list[str]:
    """Return the lines that judge the speed on nodes where imagebuild is installed."""
    options = script.report_options(job)
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
