"""The shell of a job: what a rank does, and what is done with all ranks' output. Pure.

The environment of ranks is exported inside the rank, in the container: no launcher, ssh server or image stands between
that could drop or replace it. Each export has the `why` of its fact above it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from imagebuild.jobs.merge import Placed, of
from imagebuild.jobs.resolve import Job

BEGIN = "=== imagebuild: json of"
END = "=== imagebuild: end of json"
WITHOUT_ENVIRONMENT = r"""s/"env":\[("([^"\\]|\\.)*",?)*\]/"env":[]/"""
"""nccl-tests writes the rank's whole environment into its JSON, passwords included; a log may not have it."""


def exports(placed: Iterable[Placed]) -> list[str]:
    """`export` lines with comments, for variables that have a value."""
    lines = []
    for one in placed:
        name = one.entry.name
        if one.value is None:
            continue
        value = shlex.quote(one.value)
        if one.entry.prepend:
            value = f"{value}${{{name}:+:${name}}}"
        lines += [f"# {one.entry.why}", f"export {name}={value}"]
    return lines


def forwarded(placed: Iterable[Placed]) -> list[Placed]:
    """Variables of which ranks need what the launcher has, as it is or to put something before it."""
    return [one for one in placed if one.value is None or one.entry.prepend]


def benchmark(job: Job) -> str:
    """The arguments of a program of nccl-tests, but for the file of its JSON."""
    test = job.test
    words = ["-b", test.min_bytes, "-e", test.max_bytes, "-f", test.factor, "-g", "1"]
    words += ["-n", test.iterations] if test.iterations else []
    words += ["-w", test.warmup] if test.warmup else []
    words += ["-c", "1" if test.check else "0"]
    return shlex.join(words)


def rank(job: Job) -> str:
    """What every rank runs; `$1` is the collective."""
    program = f'"{job.stack.programs}/$1_perf{job.stack.suffix}" {benchmark(job)}'
    lines = []
    if job.fabric.setup:
        lines += ["# what the owner of the node wants of NCCL", job.fabric.setup]
    lines += exports(of(job.env, "rank"))
    if job.options.get("json") == "no":
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


def heredoc(name: str, text: str) -> list[str]:
    """Lines that put a text into a variable of the shell, as it is."""
    mark = name.upper()
    return [f"read -r -d '' {name} <<'{mark}' || true", *text.split("\n"), mark]


def runs(job: Job, start: str) -> list[str]:
    """Each collective, one after the other: `start` starts the ranks."""
    return [
        "failed=0",
        f"collectives=({' '.join(job.test.collectives)})",
        'for collective in "${collectives[@]}"; do',
        f'  {start} /bin/bash -c "$rank" rank "$collective" 2>&1 | tee -a "$log" || failed=1',
        "done",
    ]


def checks(job: Job) -> list[str]:
    """What the output must show, beside the programs' own status."""
    lines = []
    if job.expects:
        lines += [
            "must_show() {",
            '  if grep -Eq -e "$1" "$log"; then return; fi',
            "  echo \"imagebuild: no line with '$1': $2\" >&2",
            "  failed=1",
            "}",
        ]
        lines += [f"must_show {shlex.quote(e.line)} {shlex.quote(e.why)}" for e in job.expects]
    return lines


def verdict() -> list[str]:
    """The last line that people look for, and the status."""
    return [
        'if [ "$failed" = 0 ]; then echo "imagebuild: passed"; else echo "imagebuild: FAILED" >&2; fi',
        'exit "$failed"',
    ]
