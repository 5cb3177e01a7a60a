"""Measure what docs/evidence/benchmarks.md shows. Prints a Markdown table; takes the numbers from this machine.

    python tests/bench.py [--engine] [--publish] [--weights IMAGE]

With `--engine`, targets are built too: warm through imagebuild and through plain docker buildx bake. With `--weights`, only the
compressed size of each layer of an image is shown; the engine's image store must be containerd. With `--publish`, only
publishing of 20 targets is measured, through a registry on this machine.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

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


def many(folder: Path, number: int) -> list[str]:
    """The project with so many targets of `open`: half as many CUDA versions, made from real entries of the lock."""
    versions = [f"13.5.{n}" for n in range(number // 2)]
    matrix = (ROOT / "matrix.yaml").read_text()
    # Only `open` on one release and `slim`, no rule, and nothing about publishing: they would need versions of their own.
    matrix = re.sub(r"  quickstart:\n.*?(?=  open:\n)", "", matrix, flags=re.DOTALL)
    matrix = re.sub(r"  hpcx:\n    description.*?(?=^[a-z])", "", matrix, flags=re.DOTALL | re.MULTILINE)
    matrix = re.sub(r"^(rules|publish):.*?(?=^[a-z]|\Z)", "", matrix, flags=re.DOTALL | re.MULTILINE)
    matrix = re.sub(r"os: \[.*, debian13\]", "os: [debian13]", matrix)
    matrix = re.sub(r'(cuda: )\["12.9".*\]', rf"\1{json.dumps(versions)}", matrix)
    matrix = re.sub(r"  \w+-distro: .*\n", "", matrix)
    lock = json.loads((ROOT / "imagebuild.lock").read_text())
    lock["wheels"] |= dict.fromkeys([f"cuda {version}" for version in versions], lock["wheels"]["cuda 13.5"])
    folder.mkdir(exist_ok=True)
    (folder / "matrix.yaml").write_text(matrix)
    (folder / "imagebuild.lock").write_text(json.dumps(lock))
    shutil.copytree(ROOT / "dockerfiles", folder / "dockerfiles")
    return ["--project", str(folder)]


RECIPE = """
Stage0 += baseimage(image='ubuntu:24.04')
Stage0 += gnu()
Stage0 += mlnx_ofed()
Stage0 += ucx(version='1.18.0')
Stage0 += openmpi(version='5.0.7')
"""
"""Five blocks for HPCCM, which does for a recipe what `imagebuild render` does for a target."""


def processor_seconds(command: list[str], *, repeat: int) -> tuple[float, int]:
    """Median of user and system time of a command and what it waited for, and the most memory it took in KiB."""
    times, memory = [], 0
    # Modules are compiled once, as where people use them.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for _ in range(repeat):
        process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
        times.append(usage.ru_utime + usage.ru_stime)
        memory = max(memory, usage.ru_maxrss)
    return statistics.median(times), memory


def measure_light() -> list[tuple[str, str, str]]:
    """Time of the processor, which other work on the machine changes less than the clock's."""
    python, _ = processor_seconds([sys.executable, "-c", "pass"], repeat=15)
    rows = [("`python -c pass`", f"{python:.3f} s CPU", "")]
    for name, limit in (("--version", "≤ 3×"), ("--help", "≤ 0.25 s")):
        used, _ = processor_seconds([IMAGEBUILD, name], repeat=15)
        rows.append((f"`imagebuild {name}`", f"{used:.3f} s CPU, {used / python:.1f}× `python -c pass`", limit))
    used, _ = processor_seconds([IMAGEBUILD, "render", TARGET], repeat=15)
    rows.append((f"`imagebuild render {TARGET}`", f"{used:.3f} s CPU", "≤ 0.25 s"))
    with tempfile.TemporaryDirectory() as name:
        recipe = Path(name) / "recipe.py"
        recipe.write_text(RECIPE)
        hpccm, _ = processor_seconds([str(Path(IMAGEBUILD).with_name("hpccm")), "--recipe", str(recipe)], repeat=15)
        rows.append(("`hpccm --recipe` of five blocks", f"{hpccm:.3f} s CPU; render is {used / hpccm:.1f}×", "≤ 3×"))
        options = many(Path(name) / "project", 1000)
        # `plan --json` renders every target, for the keys of its stages.
        plan = [IMAGEBUILD, "plan", "--json", str(Path(name) / "plan.json"), *options]
        used, memory = processor_seconds(plan, repeat=3)
        number = len(json.loads((Path(name) / "plan.json").read_text())["targets"])
    rows.append((f"`plan --json` of {number:,} targets", f"{used:.1f} s CPU", "≤ 2 s"))
    rows.append(("the same, memory", f"{memory / 1024:.0f} MiB", "≤ 200 MB"))
    return rows


def measure_github() -> list[tuple[str, str, str]]:
    """Jobs for 500 targets on two platforms, after a change of one component that all of them have."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = many(folder / "after", 500)
        shutil.copytree(folder / "after", folder / "before")
        with (folder / "after/dockerfiles/components/perftest/build.j2").open("a") as file:
            file.write("RUN true\n")
        command = [IMAGEBUILD, "plan", "--github", *options]
        since = [*command, "--changed-since", str(folder / "before")]
        took, compared = seconds(command, repeat=3), seconds(since, repeat=3)
        printed = subprocess.run(since, capture_output=True, text=True, check=True).stdout
    jobs = json.loads(printed)["include"]
    builds = sum(len(job["targets"].split()) for job in jobs)
    what = f"`plan --github`: {builds:,} builds in {len(jobs)} jobs"
    return [
        (what, f"{took:.1f} s", ""),
        ("the same with `--changed-since`, everything changed", f"{compared:.1f} s", ""),
        ("its output", f"{len(printed) / 1000:.0f} kB", "≤ 1 MB (GitHub)"),
    ]


def measure_engine() -> list[tuple[str, str, str]]:
    from imagebuild.oci import find_engine  # noqa: PLC0415 - only where there is one

    host = dict(find_engine(os.environ).environment)
    rows = []
    for what, selected in (("one target", [TARGET]), ("all of quickstart", ["quickstart"])):
        build = [IMAGEBUILD, "build", *selected, "--platform", "local"]
        seconds(build, repeat=1)
        ours = seconds(build, repeat=7)
        plain = seconds(["docker", "buildx", "bake", "--file", "build/bake.json"], repeat=7, environ=host)
        rows += [
            (f"`imagebuild build` of {what}, nothing changed", f"{ours:.2f} s", "≤ 20 s"),
            (f"`docker buildx bake` of the same files, {what}", f"{plain:.2f} s", ""),
            (f"ratio, {what}", f"{ours / plain:.2f}", "≤ 1.2"),
        ]
    return rows


def weights(image: str) -> list[tuple[str, str, str]]:
    """Layers of an image with their compressed size."""
    sizes: dict[str, int] = {}
    documents: dict[str, Any] = {}
    with (
        subprocess.Popen(["docker", "save", image], stdout=subprocess.PIPE) as process,
        tarfile.open(fileobj=process.stdout, mode="r|") as tar,
    ):
        for member in tar:
            if member.name.startswith("blobs/") and member.isfile():
                digest = member.name.rpartition("/")[2]
                sizes[digest] = member.size
                content = tar.extractfile(member)
                if content and member.size < 1_000_000:
                    with suppress(ValueError):
                        documents[digest] = json.loads(content.read())
    manifest = next(d for d in documents.values() if "layers" in d)
    history = documents[manifest["config"]["digest"].partition(":")[2]]["history"]
    made_by = [h["created_by"] for h in history if not h.get("empty_layer")]
    rows = [
        (" ".join(made.split())[:80], f"{layer['size'] / 1e6:.1f} MB", "")
        for made, layer in zip(made_by, manifest["layers"], strict=True)
    ]
    return [*rows, ("all", f"{sum(layer['size'] for layer in manifest['layers']) / 1e6:.1f} MB", "")]


JOBS = """
from tests.unit.jobs.job_fakes import REFERENCE, text
for line in (list(REFERENCE.values()) * 32)[:1000]:
    text(line)
"""


def measure_jobs() -> list[tuple[str, str, str]]:
    took = seconds([sys.executable, "-c", JOBS], repeat=3, environ={"PYTHONPATH": str(ROOT)})
    return [("1,000 jobs (`imagebuild job`), Python's start and reading the facts included", f"{took:.2f} s", "≤ 2 s")]


def main() -> None:
    if "--weights" in sys.argv:
        show(weights(sys.argv[sys.argv.index("--weights") + 1]))
        return
    if "--publish" in sys.argv:
        sys.path[0] = str(ROOT)  # this file's own folder has a `docker` too
        from tests.bench_publish import measure_publish  # noqa: PLC0415 - needs a registry

        show(measure_publish())
        return
    rows = measure_light() + measure_github() + measure_jobs() + (measure_engine() if "--engine" in sys.argv else [])
    show(rows)


def show(rows: list[tuple[str, str, str]]) -> None:
    sys.stdout.write("| what | measured | aim |\n|---|---|---|\n")
    sys.stdout.writelines(f"| {what} | {measured} | {aim} |\n" for what, measured, aim in rows)


if __name__ == "__main__":
    main()
