"""Build all targets of `open` at once and prove that every compile stage ran once; then bump NCCL and see what runs.

    python tests/open_proof.py [--platform linux/amd64] [--source NAME=FOLDER]...

Long: it compiles UCX, UCC, Open MPI and the benchmarks. The counts come from BuildKit's event stream. Start from an
engine without cache, for example with IMAGEBUILD_STATE set to a new folder, or steps are counted as cached.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
IMAGEBUILD = str(Path(sysconfig.get_path("scripts")) / "imagebuild")
COMPILED = (
    "gdrcopy", "nccl-tests", "nvbandwidth", "openmpi-git", "perftest", "pmix-git", "rdma-core-git", "ucc", "ucx",
)  # fmt: skip
BUMP = "nccl=2.31.2"
USES_NCCL = {"nccl-wheel", "ucc", "nccl-tests", "image"}


def imagebuild(*arguments: str) -> str:
    return subprocess.run([IMAGEBUILD, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout


def run_steps(folder: Path) -> dict[str, set[str]]:
    """Stage → names of the RUN steps that were executed; a step that targets share has one name."""
    found: dict[str, set[str]] = {}
    for file in folder.glob("*/result.json"):
        result: dict[str, Any] = json.loads(file.read_text())
        for step in result["steps"]:
            if "] RUN " in step["name"] and not step["cached"]:
                found.setdefault(step["stage"], set()).add(step["name"])
    return found


def main() -> None:
    options = sys.argv[1:]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan = json.loads(imagebuild("plan", "open", "--json", "-"))
        keys = {stage: {t["stages"][stage] for t in plan["targets"]} for stage in COMPILED}
        began = time.monotonic()
        imagebuild("build", "open", "--folder", str(folder), *options)
        took = time.monotonic() - began
        ran = run_steps(folder)
        sys.stdout.write(f"{len(plan['targets'])} targets of open in {took / 60:.1f} min\n\n")
        sys.stdout.write("| stage | distinct keys | targets | compile steps run |\n|---|---|---|---|\n")
        for stage in COMPILED:
            compiles = [n for n in ran.get(stage, ()) if "apt-get" not in n]
            sys.stdout.write(f"| {stage} | {len(keys[stage])} | {len(plan['targets'])} | {len(compiles)} |\n")
            assert len(compiles) == len(keys[stage]), compiles

        copy = folder / "project"
        shutil.copytree(ROOT / "dockerfiles", copy / "dockerfiles")
        for part in ("matrix.yaml", "imagebuild.lock"):
            shutil.copy(ROOT / part, copy / part)
        bumped = ("open", "--project", str(copy), "--set", BUMP)
        imagebuild("lock", *bumped)
        imagebuild("build", *bumped, "--folder", str(folder), *options)
        again = set(run_steps(folder))
        sys.stdout.write(f"\n--set {BUMP} runs steps of: {', '.join(sorted(again))}\n")
        assert again <= USES_NCCL, again - USES_NCCL


if __name__ == "__main__":
    main()
