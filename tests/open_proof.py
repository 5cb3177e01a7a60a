"""Build all targets of `open` at once and prove that every compile stage ran once; then bump NCCL and see what runs.

    python tests/open_proof.py [--platform linux/amd64] [--source NAME=FOLDER]...

Long: it compiles UCX, UCC, Open MPI and the benchmarks. Start from an engine without cache, for example with
IMAGEBUILD_STATE set to a new folder, or steps are counted as cached.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
IMAGEBUILD = str(Path(sysconfig.get_path("scripts")) / "imagebuild")
COMPILED = (
    "gdrcopy", "nccl-tests", "nvbandwidth", "openmpi-git", "perftest", "pmix-git", "rdma-core-git", "ucc", "ucx",
)  # fmt: skip
BUMP = ("--set", "nccl=2.31.2")
USES_NCCL = {"nccl-wheel", "ucc", "nccl-tests", "image"}


def imagebuild(*arguments: str) -> str:
    return subprocess.run([IMAGEBUILD, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout


def run_steps(folder: Path) -> dict[str, set[str]]:
    """Stage → names of the RUN steps that were executed; a step that targets share has one name."""
    steps = [step for file in folder.glob("*/result.json") for step in json.loads(file.read_text())["steps"]]
    ran = [step for step in steps if "] RUN " in step["name"] and not step["cached"]]
    return {step["stage"]: {other["name"] for other in ran if other["stage"] == step["stage"]} for step in ran}


def main() -> None:
    options = sys.argv[1:]
    with tempfile.TemporaryDirectory() as name:
        targets = json.loads(imagebuild("plan", "open", "--json", "-"))["targets"]
        imagebuild("build", "open", "--folder", name, *options)
        ran = run_steps(Path(name))
        sys.stdout.write(f"| stage | distinct keys | compile steps run, for {len(targets)} targets |\n|---|---|---|\n")
        for stage in COMPILED:
            keys = {target["stages"][stage] for target in targets}
            compiles = [step for step in ran.get(stage, ()) if "apt-get" not in step]
            sys.stdout.write(f"| {stage} | {len(keys)} | {len(compiles)} |\n")
            assert len(compiles) == len(keys), compiles
        copy = Path(name) / "project"
        shutil.copytree(ROOT / "dockerfiles", copy / "dockerfiles")
        for part in ("matrix.yaml", "imagebuild.lock"):
            shutil.copy(ROOT / part, copy / part)
        bumped = ("open", "--project", str(copy), *BUMP)
        imagebuild("lock", *bumped)
        imagebuild("build", *bumped, "--folder", name, *options)
        again = set(run_steps(Path(name)))
        sys.stdout.write(f"\n{' '.join(BUMP)} runs steps of: {', '.join(sorted(again))}\n")
        assert again <= USES_NCCL, again - USES_NCCL


if __name__ == "__main__":
    main()
