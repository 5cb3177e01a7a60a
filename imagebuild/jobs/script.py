"""Write what manifests and batch scripts have in common: the header, and the shell that runs and checks. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from imagebuild.jobs.choose import Job
from imagebuild.jobs.environment import Variable, in_scope
from imagebuild.jobs.facts import JobRequest

BEGIN = "=== imagebuild: json of"
END = "=== imagebuild: end of json"
WITHOUT_ENVIRONMENT = r"""s/"env":\[("([^"\\]|\\.)*",?)*\]/"env":[]/"""
"""Command for sed. nccl-tests writes the rank's environment into its JSON; a log must not contain its passwords."""


# The header


def header_lines(job: Job) -> list[str]:
    """Return the lines of the header, without comment signs."""
    scale = job.scale
    size = f"{job.ranks} ranks on {scale.nodes} nodes of {job.hardware.profile}"
    if scale.racks > 1:
        size += f", {scale.nodes_per_rack} in each of {scale.racks} racks"
    lines = [
        command(job.request),
        f"{job.test.title}: {size}; {job.fabric.title}; NCCL {job.image.nccl or 'as installed'}",
    ]
    if job.hardware.mnnvl and scale.racks == 1 and "nics" not in job.choices.features:
        lines.append("One rack: NVLink carries everything, and no network card is used; --with nics measures those.")
    if not job.choices.comparable:
        lines.append(
            f"The numbers of {job.hardware.profile} are about another network, so speed is not judged by them."
        )
    if job.request.collect:
        lines += collect_lines(job)
    return lines


def command(request: JobRequest) -> str:
    """Return the command that makes the job again, with its options in a fixed order."""
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


def collect_lines(job: Job) -> list[str]:
    """Return the commands that run the job and bring its result back."""
    name, options = job.name, report_options(job)
    if job.request.scheduler == "slurm":
        return [
            "To run it and see the result (this file is JOB.sh):",
            "  sbatch --wait JOB.sh   # its status is the job's; the log is beside it",
            f"  imagebuild report {name}-<job id>.log {options}",
        ]
    if job.request.scheduler == "mpijob":
        label = f"training.kubeflow.org/job-name={name},training.kubeflow.org/job-role=launcher"
        kind, condition = f"mpijob/{name}", "Succeeded"
    else:
        label = f"jobset.sigs.k8s.io/jobset-name={name},jobset.sigs.k8s.io/replicatedjob-name=launcher"
        kind, condition = f"jobset/{name}", "Completed"
    return [
        "To run it and see the result (this file is JOB.yaml):",
        "  kubectl create -f JOB.yaml",
        f"  kubectl wait --for=condition={condition} --timeout={job.test.minutes + 10}m {kind}",
        f"  kubectl logs --tail=-1 -l {label} > {name}.log",
        f"  imagebuild report {name}.log {options}",
        "  kubectl delete -f JOB.yaml",
    ]


def report_options(job: Job) -> str:
    """Return the options with which `imagebuild report` judges the job's log."""
    profile = [f"--profile {job.hardware.profile}"] if job.choices.comparable else []
    return " ".join([*profile, f"--nodes {job.scale.nodes}"])


# The shell


def rank_script(job: Job) -> str:
    """Return the script that every rank runs; its argument `$1` is the collective."""
    test = job.test
    arguments = ["-b", test.min_bytes, "-e", test.max_bytes, "-f", test.factor, "-g", "1"]
    arguments += ["-n", test.iterations] if test.iterations else []
    arguments += ["-w", test.warmup] if test.warmup else []
    arguments += ["-c", "1" if test.check else "0"]
    stack = job.choices.stack
    program = f'"{stack.programs}/$1_perf{stack.suffix}" {shlex.join(arguments)}'

    lines = []
    if job.fabric.setup:
        lines += ["# what the owner of the node wants of NCCL", job.fabric.setup]
    lines += export_lines(in_scope(job.variables, "rank"))
    if job.parameters.get("json") == "no":
        return "\n".join([*lines, f"exec {program}"])
    lines += [
        "rank=${OMPI_COMM_WORLD_RANK:-${SLURM_PROCID:-0}}",
        "json=/tmp/imagebuild-$1-${SLURM_JOB_ID:-0}.json",
        "umask 077",
        'if [ "$rank" = 0 ]; then rm -f "$json"; fi',
        f'{program} -J "$json"',
        "status=$?",
        'if [ "$rank" = 0 ] && [ -s "$json" ]; then',
        f'  echo "{BEGIN} $1"',
        "  # without the environment, which may hold passwords",
        f"  sed -E '{WITHOUT_ENVIRONMENT}' \"$json\"",
        "  echo",
        f'  echo "{END}"',
        '  rm -f "$json"',
        "fi",
        'exit "$status"',
    ]
    return "\n".join(lines)


def export_lines(variables: Iterable[Variable]) -> list[str]:
    """Return `export` lines with comments for the variables that have a value."""
    lines = []
    for variable in variables:
        if variable.value is not None:
            value = shlex.quote(variable.value)
            if variable.prepend:
                value = f"{value}${{{variable.name}:+:${variable.name}}}"
            lines += [f"# {variable.why}", f"export {variable.name}={value}"]
    return lines


def heredoc_lines(name: str, text: str) -> list[str]:
    """Return the lines that put a text into a variable of the shell, unchanged."""
    mark = name.upper()
    return [f"read -r -d '' {name} <<'{mark}' || true", *text.split("\n"), mark]


def run_lines(job: Job, start: str) -> list[str]:
    """Return the lines that run each collective in turn; the command `start` starts the ranks."""
    return [
        "failed=0",
        f"collectives=({' '.join(job.test.collectives)})",
        'for collective in "${collectives[@]}"; do',
        f'  {start} /bin/bash -c "$rank" rank "$collective" 2>&1 | tee -a "$log" || failed=1',
        "done",
    ]


def check_lines(job: Job) -> list[str]:
    """Return the lines that look for what the output must contain, besides the programs' own exit status."""
    if not job.expected_lines:
        return []
    return [
        "must_show() {",
        '  if grep -Eq -e "$1" "$log"; then return; fi',
        "  echo \"imagebuild: no line with '$1': $2\" >&2",
        "  failed=1",
        "}",
        *(f"must_show {shlex.quote(expect.line)} {shlex.quote(expect.why)}" for expect in job.expected_lines),
    ]


def verdict_lines() -> list[str]:
    """Return the lines that print whether the job passed, and end with that status."""
    return [
        'if [ "$failed" = 0 ]; then echo "imagebuild: passed"; else echo "imagebuild: FAILED" >&2; fi',
        'exit "$failed"',
    ]
