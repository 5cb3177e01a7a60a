"""The image hpcx, built from a stand-in for NVIDIA's and Ubuntu's servers. Every line of its Dockerfiles runs.

These tests show that the Dockerfiles, the lock and the checks work together. They do not test the real archives and
packages. tests/upstream/README.md lists the differences.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from docker import DockerClient

from imagebuild.core.run import run_program
from tests.docker.conftest import REPOSITORY, Imagebuild, edited_matrix, watched
from tests.upstream import hpcx
from tests.upstream.standin import Upstream

pytestmark = pytest.mark.docker


COMPILED_LONG = ("openmpi-hpcx", "nccl-tests")
"""Components that `make docker` leaves out, because Open MPI takes long to compile, and nccl-tests needs Open MPI.
`make hpcx-proof` builds all components."""

EXPECTED = ("no gpu", "no rdma", "no slurm", "only for", "no size-limit-mb")
"""Permitted reasons for skipped checks."""


def test_every_line_runs_and_every_check_passes(
    locked: Path, upstream: Upstream, client: DockerClient, host: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder, targets = tmp_path / "project", upstream.cuda.targets
    shutil.copytree(locked, folder)
    whole = request.config.getoption("--whole-hpcx")
    if not whole:
        with edited_matrix(folder) as matrix:
            components = matrix["images"]["hpcx"]["components"]
            components[:] = [name for name in components if name not in COMPILED_LONG]
    with watched(client, host) as environ:
        limit = 7200 if whole else 2400  # Open MPI takes half an hour on two idle cores, and longer on busy ones
        run = Imagebuild(folder, {**environ, "IMAGEBUILD_CONFIG": str(folder / "config.yaml")}, limit=limit)
        run("build", f"{targets}-*")
        for variant in ("devel", "runtime"):
            file = folder / f"{variant}.json"
            image = f"{REPOSITORY}/{targets.replace('-', ':', 1)}-{variant}"
            run("verify", image, "--json", file)
            checks = json.loads(file.read_text())["checks"]
            assert {c["outcome"] for c in checks} == {"passed", "skipped"}
            reasons = [c["reason"] for c in checks if c["outcome"] == "skipped"]
            assert all(any(part in reason for part in EXPECTED) for reason in reasons), reasons


def test_the_stage_hpcx_for_arm64(locked: Path, upstream: Upstream, environ: dict[str, str], tmp_path: Path) -> None:
    """The stage unpacks HPC-X and removes what names other folders. Packages for arm64 are not in the stand-in."""
    folder, target = tmp_path / "project", f"{upstream.cuda.targets}-devel"
    shutil.copytree(locked, folder)
    with edited_matrix(folder) as matrix:
        matrix["images"]["hpcx"]["platforms"] = ["linux/amd64", "linux/arm64"]
    run = Imagebuild(folder, {**environ, "IMAGEBUILD_CONFIG": str(folder / "config.yaml")})
    archive = upstream.root / hpcx.HOST / upstream.archive("aarch64").path
    complaint = run("lock", target, "--platform", "linux/arm64", expect=4).err
    assert "arm64-sbsa" in complaint
    assert f"{archive.name} →" in complaint, "this archive is pinned"
    whole = run("render", target, "--unresolved").out
    (folder / "Dockerfile").write_text(f"{whole}\nFROM scratch AS only\nCOPY --from=hpcx /out /\n")
    base = re.search(r"BUILDPLATFORM (\S+) AS unpack", whole)
    assert base
    (sources := tmp_path / "sources").mkdir()
    shutil.copy(archive, sources)
    images = f"docker-image://127.0.0.1:{upstream.ports['registry']}/library"
    run_program(
        "docker", "buildx", "build", "--platform", "linux/arm64", "--target", "only", "--file", str(folder / "Dockerfile"),
        "--build-context", f"{base[1]}={images}/{base[1]}", "--build-context", f"hpcx-source-arm64={sources}",
        "--output", f"type=local,dest={tmp_path}/made", str(sources),
    )  # fmt: skip
    for variant in ("devel", "runtime"):
        top = tmp_path / "made" / variant / "opt/hpcx"
        assert (top / "ucx/lib/libucp.so.0").read_bytes()[18] == hpcx.MACHINES["aarch64"]
        texts = [path.read_bytes() for path in top.rglob("*") if path.is_file()]
        assert not [text for text in texts if b"ompi5" in text or archive.stem.encode() in text]
