"""A copy of this project that is adapted to the stand-in for NVIDIA's servers. See tests/upstream/README.md."""

from __future__ import annotations

import json
from pathlib import Path

from tests.docker.conftest import Imagebuild, copy_of_project, edited_matrix, finish
from tests.upstream.standin import Upstream


def project(folder: Path, upstream: Upstream) -> Path:
    """Copy this project for one GPU generation. The lock contains no entry for files of the stand-in yet."""
    copy_of_project(folder)
    with edited_matrix(folder) as matrix:
        # Compiling for one compute capability is faster, and enough to test that GPU code is compiled.
        matrix["gpu-architectures"] = {"90": matrix["gpu-architectures"]["90"]}
        matrix["images"]["slim"]["axes"]["gpu"] = ["90"]
        for name in ("sshd", "pmix"):  # without Ubuntu's archive, the stand-in's Ubuntu has Debian's versions
            by_os = {entry["when"]["os"]: entry["version"] for entry in matrix["versions"][name]}
            own = {"when": {"os": upstream.cuda.os}, "version": by_os[upstream.cuda.os]}
            matrix["versions"][name] = [own, by_os["debian13"]] if upstream.cuda.suite else by_os["debian13"]
        matrix["images"]["hpcx"]["platforms"] = ["linux/amd64"]
    lock = json.loads((folder / "imagebuild.lock").read_text())
    kept = {"wheels": lock["wheels"], "images": {k: v for k, v in lock["images"].items() if "debian" in k}}
    (folder / "imagebuild.lock").write_text(json.dumps(kept))
    # Debian 13 names this library as Ubuntu 24.04 does.
    pmix = folder / "dockerfiles/components/pmix/component.yaml"
    pmix.write_text(pmix.read_text().replace("library: libpmix2}", "library: libpmix2t64}"))
    (folder / "config.yaml").write_text(upstream.configuration)
    return folder


def lock(run: Imagebuild, targets: str) -> None:
    """Pin all sources. The stand-in's Ubuntu has Debian's packages, and Ubuntu's archive, if it answers, lacks them."""
    done = finish(run.start("lock", targets), run.limit)
    assert "sources are pinned" in done.out, done.err
    assert done.status == 0 or "archive.ubuntu.com" in done.err, done.err
