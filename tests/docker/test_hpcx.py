"""The image hpcx, built from a stand-in for NVIDIA's and Ubuntu's servers. Every line of its Dockerfiles runs.

These tests show that the Dockerfiles, the lock and the checks work together. They do not test the real archives and
packages. tests/upstream/README.md lists the differences.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from docker import DockerClient

from tests.docker.conftest import REPOSITORY, Imagebuild, edited_matrix, watched
from tests.docker.standin import TARGETS

pytestmark = pytest.mark.docker


COMPILED_LONG = ("openmpi-hpcx", "nccl-tests")
"""Components that `make docker` leaves out, because Open MPI takes long to compile, and nccl-tests needs Open MPI.
`make hpcx-proof` builds all components."""

EXPECTED = ("no gpu", "no rdma", "no slurm", "only for", "no size-limit-mb")
"""Permitted reasons for skipped checks."""


def test_every_line_runs_and_every_check_passes(
    locked: Path, client: DockerClient, host: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = tmp_path / "project"
    shutil.copytree(locked, folder)
    whole = request.config.getoption("--whole-hpcx")
    if not whole:
        with edited_matrix(folder) as matrix:
            components = matrix["images"]["hpcx"]["components"]
            components[:] = [name for name in components if name not in COMPILED_LONG]
    with watched(client, host) as environ:
        limit = 7200 if whole else 2400  # Open MPI takes half an hour on two idle cores, and longer on busy ones
        run = Imagebuild(folder, {**environ, "IMAGEBUILD_CONFIG": str(folder / "config.yaml")}, limit=limit)
        run("build", f"{TARGETS}-*")
        for variant in ("devel", "runtime"):
            file = folder / f"{variant}.json"
            image = f"{REPOSITORY}/{TARGETS.replace('-', ':', 1)}-{variant}"
            run("verify", image, "--json", file)
            checks = json.loads(file.read_text())["checks"]
            assert {c["outcome"] for c in checks} == {"passed", "skipped"}
            reasons = [c["reason"] for c in checks if c["outcome"] == "skipped"]
            assert all(any(part in reason for part in EXPECTED) for reason in reasons), reasons
