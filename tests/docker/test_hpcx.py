"""The image hpcx, built from a stand-in for NVIDIA's and Ubuntu's servers: every line of its Dockerfiles runs.

What passes here says that the Dockerfiles, the lock and the checks work together. It says nothing about the real
archives and packages: see tests/upstream/README.md for what is real in the stand-in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from docker import DockerClient

from tests.conftest import ROOT
from tests.docker.conftest import REPOSITORY, Imagebuild, copy_of_project, watched
from tests.upstream.standin import Upstream

pytestmark = pytest.mark.docker

COMBINATIONS = {
    "12.9.2-ubuntu22.04": "5",
    "13.2.1-ubuntu24.04": "5",
    "13.4.2-ubuntu26.04": "5",
}
"""CUDA and Ubuntu → series of Open MPI."""


@pytest.fixture(scope="session")
def upstream(tmp_path_factory: pytest.TempPathFactory, host: str) -> Iterator[Upstream]:
    made = Upstream.make(ROOT / "build" / "upstream")
    with made.serve():
        yield made


@pytest.fixture(scope="session")
def standin(upstream: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This project as somebody has it who reaches the stand-in only, for one GPU, with a lock made from scratch."""
    folder = copy_of_project(tmp_path_factory.mktemp("hpcx"))
    matrix = (folder / "matrix.yaml").read_text()
    # One capability is enough to see that code is made; what the real Ubuntu has in other versions is Debian's here.
    matrix = re.sub(r'(?m)^  "(80|89|100|103|107|120)": .*\n', "", matrix)
    matrix = re.sub(r"(?m)^(  (?:sshd|pmix):)\n(?:    - \{.*\n)+    - (.*)$", r"\1 \2", matrix)
    matrix = re.sub(r"cuda: \[12\.6\.3, .*\]", "cuda: [12.9.2, 13.2.1, 13.4.2]", matrix)
    head, _, hpcx = matrix.partition("  hpcx:\n    description")
    hpcx = hpcx.replace("[linux/amd64, linux/arm64]", "[linux/amd64]", 1)
    (folder / "matrix.yaml").write_text(f"{head}  hpcx:\n    description{hpcx}")
    lock = json.loads((folder / "imagebuild.lock").read_text())
    kept = {"wheels": lock["wheels"], "images": {k: v for k, v in lock["images"].items() if "debian" in k}}
    (folder / "imagebuild.lock").write_text(json.dumps(kept))
    # Debian 13 has the library of Ubuntu 22.04 under the name of 24.04.
    pmix = folder / "dockerfiles/components/pmix/component.yaml"
    pmix.write_text(pmix.read_text().replace("library: libpmix2}", "library: libpmix2t64}"))
    (folder / "config.yaml").write_text(upstream.configuration)
    return folder


@pytest.fixture(scope="session")
def locked(standin: Path, client: DockerClient, host: str) -> Path:
    """The same, with everything that hpcx needs in the lock."""
    with watched(client, host) as environ:
        run = Imagebuild(standin, {**environ, "IMAGEBUILD_CONFIG": str(standin / "config.yaml")})
        run("lock", *[f"hpcx-cuda{c}-*" for c in COMBINATIONS])
    return standin


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_every_line_runs_and_every_check_passes(
    locked: Path, client: DockerClient, host: str, combination: str, request: pytest.FixtureRequest
) -> None:
    with watched(client, host) as environ:
        run = Imagebuild(locked, {**environ, "IMAGEBUILD_CONFIG": str(locked / "config.yaml")})
        series = f"openmpi-series={COMBINATIONS[combination]}"
        run("build", f"hpcx-cuda{combination}-*", "--set", series)
        for variant in ("devel", "runtime"):
            file = locked / f"{combination}-{variant}.json"
            done = run("verify", f"{REPOSITORY}/hpcx:cuda{combination}-{variant}", "--json", file, expect=0)
            checks = json.loads(file.read_text())["checks"]
            assert {c["outcome"] for c in checks} == {"passed", "skipped"}, done.out
            assert all("no gpu" in c["reason"] or "no rdma" in c["reason"] or "only for" in c["reason"]
                       for c in checks if c["outcome"] == "skipped")  # fmt: skip
