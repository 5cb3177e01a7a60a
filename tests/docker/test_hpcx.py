"""The image hpcx, built from a stand-in for NVIDIA's and Ubuntu's servers: every line of its Dockerfiles runs.

What passes here says that the Dockerfiles, the lock and the checks work together. It says nothing about the real
archives and packages: see tests/upstream/README.md for what is real in the stand-in.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from docker import DockerClient

from tests.docker.conftest import REPOSITORY, Imagebuild, watched
from tests.docker.standin import COMBINATIONS

pytestmark = pytest.mark.docker


USUAL = "13.2.1-ubuntu24.04"
"""The others take as long again, most of it to compile Open MPI; `make hpcx-proof` builds all."""


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_every_line_runs_and_every_check_passes(
    locked: Path, client: DockerClient, host: str, combination: str, request: pytest.FixtureRequest
) -> None:
    if combination != USUAL and not request.config.getoption("--every-hpcx"):
        pytest.skip("only with --every-hpcx")
    with watched(client, host) as environ:
        run = Imagebuild(locked, {**environ, "IMAGEBUILD_CONFIG": str(locked / "config.yaml")}, limit=2400)
        series = f"openmpi-series={COMBINATIONS[combination]}"
        run("build", f"hpcx-cuda{combination}-*", "--set", series)
        for variant in ("devel", "runtime"):
            file = locked / f"{combination}-{variant}.json"
            done = run("verify", f"{REPOSITORY}/hpcx:cuda{combination}-{variant}", "--json", file, expect=0)
            checks = json.loads(file.read_text())["checks"]
            assert {c["outcome"] for c in checks} == {"passed", "skipped"}, done.out
            reasons = [c["reason"] for c in checks if c["outcome"] == "skipped"]
            assert all(re.match("no (gpu|rdma|slurm) here|only for", reason) for reason in reasons)
