"""Git repositories of tiny projects. Dates, authors and contents are fixed, so all machines have the same commits."""

from __future__ import annotations

import shutil
from pathlib import Path

from imagebuild.core.run import run_program

PROJECTS = Path(__file__).parent / "recipes" / "git"
WHEN = "2025-08-09T00:00:00+00:00"
IDENTITY = {
    f"GIT_{role}_{what}": value
    for role in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "imagebuild stand-in"), ("EMAIL", "nobody@localhost"), ("DATE", WHEN))
} | {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1"}


COMMITS = {
    "NVIDIA/nccl-tests": "v2.19.6",
    "NVIDIA/gdrcopy": "v2.6",
    "NVIDIA/nvbandwidth": "v0.8",
    "NVIDIA/nccl": "v2.32.3-1",
    "linux-rdma/perftest": "26.04.17",
    "Mellanox/nccl-rdma-sharp-plugins": "",
}
"""Maps the path of each project on github.com, without `.git`, to the tag of its only commit."""


def make(folder: Path) -> None:
    """Create all repositories as `folder/<owner>/<name>.git`."""
    for path, tag in COMMITS.items():
        bare = folder / f"{path}.git"
        work = bare.with_suffix(".work")
        shutil.copytree(PROJECTS / path, work)
        here = ("-C", str(work))
        _git("init", "--quiet", "--initial-branch=main", str(work))
        # File modes come from the project, and do not depend on the file system.
        _git(*here, "-c", "core.autocrlf=false", "add", "--all")
        _git(*here, "commit", "--quiet", "--message", f"STAND-IN for {path}, made for tests")
        if tag:
            _git(*here, "tag", tag)
        _git("clone", "--quiet", "--bare", str(work), str(bare))
        # As on GitHub, clients may fetch any commit.
        _git("--git-dir", str(bare), "config", "uploadpack.allowAnySHA1InWant", "true")
        shutil.rmtree(work)


def _git(*words: str) -> str:
    return run_program("git", *words, env=IDENTITY)
