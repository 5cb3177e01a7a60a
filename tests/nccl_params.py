"""Write `jobs/nccl-params.json`: the variables that each release of NCCL reads, from a clone of its repository.

    python -m tests.nccl_params CLONE > jobs/nccl-params.json

Only names are written. Run it by hand when NCCL has a new release.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable

RELEASES = (
    "2.21.5", "2.22.3", "2.23.4", "2.24.3", "2.25.1", "2.26.2", "2.27.7", "2.28.3", "2.28.9", "2.29.2", "2.29.7",
    "2.30.3", "2.30.4", "2.30.7",
)  # fmt: skip
PARAMETER = re.compile(r'NCCL_PARAM\(\s*\w+\s*,\s*"(\w+)"\s*,')
DEFINED = re.compile(r"DEFINE_NCCL_PARAM\(\s*\w+\s*,[^,]*,\s*(NCCL_[A-Z0-9_]+)")
READ = re.compile(r'(?:getenv|ncclGetEnv|ncclOsGetEnv|std::getenv)\(\s*"(NCCL_\w+)"')
TYPED = re.compile(r'"(NCCL_[A-Z0-9_]+)"')


def git(clone: str, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", clone, *arguments], capture_output=True, check=True)
    return done.stdout.decode(errors="replace")


def variables(text: str) -> set[str]:
    """Return the variables that a source reads."""
    parameters = (f"NCCL_{name}" for name in PARAMETER.findall(text))
    return {*READ.findall(text), *TYPED.findall(text), *DEFINED.findall(text), *parameters}


def variables_of_release(clone: str, version: str) -> set[str]:
    tag = f"v{version}-1"
    sources = (".cc", ".cpp", ".h", ".hpp", ".cu", ".cuh")
    files = [f for f in git(clone, "ls-tree", "-r", "--name-only", tag, "src").split() if f.endswith(sources)]
    batch = subprocess.run(
        ["git", "-C", clone, "cat-file", "--batch"], input="\n".join(f"{tag}:{f}" for f in files).encode(),
        capture_output=True, check=True,
    )  # fmt: skip
    return variables(batch.stdout.decode(errors="replace"))


def table(clone: str, releases: Iterable[str]) -> str:
    """Return the file: for each variable, since and until when it is read."""
    read = {version: variables_of_release(clone, version) for version in releases}
    rows: dict[str, object] = {}
    for name in sorted({name for variables in read.values() for name in variables}):
        present = [v for v in read if name in read[v]]
        row: dict[str, object] = {"since": present[0], "until": present[-1]}
        if len(present) != list(read).index(present[-1]) - list(read).index(present[0]) + 1:
            row["absent"] = [v for v in read if present[0] < v < present[-1] and v not in present]
        rows[name] = row
    body = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    return f'{{\n "releases": {json.dumps(list(read))},\n "names": {{\n{body}\n }}\n}}\n'


if __name__ == "__main__":
    sys.stdout.write(table(sys.argv[1], RELEASES))
