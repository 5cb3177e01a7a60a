"""Measure what docs/benchmarks.md shows. Prints a Markdown table; takes the numbers from this machine.

    python tests/bench.py [--engine]

With `--engine`, the quickstart target is built too: warm through imagebuild and through plain docker buildx bake.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
IMAGEBUILD = str(Path(sysconfig.get_path("scripts")) / "imagebuild")
TARGET = "quickstart-cuda13.5-debian13-runtime"


def seconds(command: list[str], *, repeat: int, environ: dict[str, str] | None = None) -> float:
    """Median wall time of a command."""
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        subprocess.run(command, cwd=ROOT, env={**os.environ, **(environ or {})}, capture_output=True, check=True)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def thousand(folder: Path) -> list[str]:
    """The project with 500 CUDA versions, made from real entries of the lock: 1,000 targets of `open`."""
    versions = [f"13.5.{n}" for n in range(500)]
    matrix = (ROOT / "matrix.yaml").read_text()
    # Only `open`, and no rule: both would need versions of their own.
    matrix = re.sub(r"  quickstart:\n.*?(?=  open:\n)", "", matrix, flags=re.DOTALL)
    matrix = re.sub(r"^rules:.*", "", matrix, flags=re.DOTALL | re.MULTILINE)
    matrix = re.sub(r'(cuda: )\["12.9".*\]', rf"\1{json.dumps(versions)}", matrix)
    matrix = re.sub(r"  \w+-distro: .*\n", "", matrix)
    lock = json.loads((ROOT / "imagebuild.lock").read_text())
    lock["wheels"]["cuda"] |= dict.fromkeys(versions, lock["wheels"]["cuda"]["13.5"])
    (folder / "matrix.yaml").write_text(matrix)
    (folder / "imagebuild.lock").write_text(json.dumps(lock))
    shutil.copytree(ROOT / "dockerfiles", folder / "dockerfiles")
    return ["--matrix", str(folder / "matrix.yaml"), "--dockerfiles", str(folder / "dockerfiles")]


def measure_light() -> list[tuple[str, str, str]]:
    python = seconds([sys.executable, "-c", "pass"], repeat=15)
    version = seconds([IMAGEBUILD, "--version"], repeat=15)
    rows = [("`imagebuild --version` / `python -c pass`", f"{version / python:.1f}×", "≤ 3×")]
    with tempfile.TemporaryDirectory() as folder:
        options = thousand(Path(folder))
        # `plan --json` renders every target, for the keys of its stages.
        took = seconds([IMAGEBUILD, "plan", "--json", *options], repeat=3)
        out = subprocess.run([IMAGEBUILD, "plan", "--json", *options], capture_output=True, text=True, check=True)
        number = len(json.loads(out.stdout)["targets"])
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    rows.append((f"plan and render of {number:,} targets", f"{took:.1f} s", "≤ 3 s"))
    rows.append(("the same, memory", f"{memory:.0f} MiB", "≤ 200 MB"))
    return rows


def measure_engine() -> list[tuple[str, str, str]]:
    from imagebuild import engine  # noqa: PLC0415 - only where there is one

    host = {"DOCKER_HOST": engine.find(os.environ).host}
    build = [IMAGEBUILD, "build", TARGET, "--platform", "local"]
    seconds(build, repeat=1)
    ours = seconds(build, repeat=7)
    plain = seconds(["docker", "buildx", "bake", "--file", "build/bake.json"], repeat=7, environ=host)
    return [
        ("`imagebuild build`, nothing changed", f"{ours:.2f} s", "≤ 20 s"),
        ("`docker buildx bake` of the same files", f"{plain:.2f} s", ""),
        ("ratio", f"{ours / plain:.2f}", "≤ 1.2"),
    ]


def main() -> None:
    rows = measure_light() + (measure_engine() if "--engine" in sys.argv else [])
    sys.stdout.write("| what | measured | aim |\n|---|---|---|\n")
    sys.stdout.writelines(f"| {what} | {measured} | {aim} |\n" for what, measured, aim in rows)


if __name__ == "__main__":
    main()
