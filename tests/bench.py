"""Measure the figures of docs/evidence.md, and print them as a Markdown table. With the name of a commit as argument,
measure only `make image` with nothing changed: with the code of that commit and with this code, in turn, on an engine."""

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
from collections.abc import Sequence
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent
IMAGEBUILD = str(Path(sysconfig.get_path("scripts")) / "imagebuild")
TARGET = "quickstart-cuda13.5-debian13-runtime"
RECIPE = """
Stage0 += baseimage(image='ubuntu:24.04')
Stage0 += gnu()
Stage0 += mlnx_ofed()
Stage0 += ucx(version='1.18.0')
Stage0 += openmpi(version='5.0.7')
"""
"""Recipe with five building blocks for HPCCM, a generator of Dockerfiles."""
JOBS = """
from tests.unit.jobs.job_fakes import REFERENCE, text
for line in (list(REFERENCE.values()) * 32)[:1000]:
    text(line)
"""


def many(folder: Path, number: int) -> list[str]:
    """Write this project with `number` targets of `open` to a folder; return the command-line options that select it.

    The CUDA versions are invented: two targets each, locked with the wheels of CUDA 13.5.
    """
    versions = [f"13.5.{n}" for n in range(number // 2)]
    matrix = yaml.safe_load((ROOT / "matrix.yaml").read_text())
    # Other images, rules and the key `publish` are left out, because they would need more versions.
    matrix = {key: value for key, value in matrix.items() if key not in ("rules", "publish")}
    matrix["images"] = {name: matrix["images"][name] for name in ("open", "slim")}
    matrix["images"]["open"]["axes"] |= {"cuda": versions, "os": ["debian13"]}
    others = re.compile(".*-distro|hpcx")  # pins for releases and versions of CUDA that only other images have
    matrix["versions"] = {name: value for name, value in matrix["versions"].items() if not others.fullmatch(name)}
    lock = json.loads((ROOT / "imagebuild.lock").read_text())
    lock["wheels"] |= dict.fromkeys([f"cuda {version}" for version in versions], lock["wheels"]["cuda 13.5"])
    folder.mkdir(exist_ok=True)
    (folder / "matrix.yaml").write_text(yaml.safe_dump(matrix, sort_keys=False))
    (folder / "imagebuild.lock").write_text(json.dumps(lock))
    shutil.copytree(ROOT / "dockerfiles", folder / "dockerfiles")
    return ["--project", str(folder)]


def processor_seconds(*command: str, repeat: int = 15) -> tuple[float, int]:
    """Return a command's median CPU time in seconds, and its maximum resident memory in KiB.

    The CPU time is user plus system time of the command and its child processes. Other load on the machine changes it
    less than the elapsed time.
    """
    times, memory = [], 0
    # Let Python cache compiled modules, as in normal use.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for _ in range(repeat):
        process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
        times.append(usage.ru_utime + usage.ru_stime)
        memory = max(memory, usage.ru_maxrss)
    return statistics.median(times), memory


def everyday_loop(before: str, pairs: int = 3) -> tuple[str, str, str]:
    """Return the row for `make image` with nothing changed: the median durations and CPU times with the code of the
    commit `before` and with this code, and their ratios. The runs take turns, so that other load changes both. The CPU
    times are those of the commands, without the engine and its containers."""

    def loop(root: Path) -> tuple[float, float]:
        began, used = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        for arguments in (["engine", "up"], ["build", TARGET, "--platform", "local"], ["verify", TARGET]):
            command = [sys.executable, "-m", "imagebuild", *arguments]  # the package in the current folder
            subprocess.run(command, cwd=root, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        now = resource.getrusage(resource.RUSAGE_CHILDREN)
        return time.monotonic() - began, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime

    with tempfile.TemporaryDirectory() as name:
        old = Path(name, "before")
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", old, before], cwd=ROOT, check=True)
        try:
            runs = [(loop(old), loop(ROOT)) for _ in range(pairs + 1)][1:]  # the first ones fill the caches
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", old], cwd=ROOT, check=True)
    figures = []
    for number, unit in enumerate(("s", "s of CPU")):
        first, second = (statistics.median(run[side][number] for run in runs) for side in (0, 1))
        figures.append(f"{second:.1f} {unit}, at {before} {first:.1f}: {second / first:.2f}×")
    return "`make image`, nothing changed, all checks repeated", f"{'; '.join(figures)}; {pairs} pairs", "≤ 12 s"


def main() -> None:
    rows = []
    if sys.argv[1:]:
        return show([everyday_loop(sys.argv[1])])
    for arguments in (["--help"], ["render", TARGET]):
        used, _ = processor_seconds(IMAGEBUILD, *arguments)
        rows.append((f"`imagebuild {' '.join(arguments)}`", f"{used:.3f} s CPU", "≤ 0.25 s"))
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "recipe.py").write_text(RECIPE)
        hpccm, _ = processor_seconds(str(Path(IMAGEBUILD).with_name("hpccm")), "--recipe", f"{name}/recipe.py")
        rows.append(("`hpccm --recipe` of five blocks", f"{hpccm:.3f} s CPU; render is {used / hpccm:.1f}×", "≤ 3×"))
        options = many(Path(name) / "project", 1000)
        used, memory = processor_seconds(IMAGEBUILD, "plan", "--json", f"{name}/plan.json", *options, repeat=3)
        rows.append(("`plan --json` of 1,000 targets", f"{used:.1f} s CPU, {memory / 1024:.0f} MiB", "≤ 2 s, ≤ 200 MB"))
    used, _ = processor_seconds(sys.executable, "-c", f"import sys; sys.path.insert(0, '.')\n{JOBS}", repeat=3)
    rows.append(("1,000 jobs (`imagebuild job`), Python's start and facts included", f"{used:.2f} s CPU", "≤ 2 s"))
    return show(rows)


def show(rows: Sequence[tuple[str, str, str]]) -> None:
    """Print the rows as a Markdown table."""
    sys.stdout.write("| what | measured | aim |\n|---|---|---|\n")
    sys.stdout.writelines(f"| {what} | {measured} | {aim} |\n" for what, measured, aim in rows)


if __name__ == "__main__":
    main()
