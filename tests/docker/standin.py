"""This project as somebody has it who reaches the stand-in for the vendor's servers only. See tests/upstream/README.md."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatchcase
from pathlib import Path

from imagebuild.core import Arch
from tests.docker.conftest import copy_of_project, install
from tests.upstream.__main__ import CACHE
from tests.upstream.standin import Upstream, missing

COMBINATIONS = {
    "12.9.1-ubuntu22.04": "4",
    "13.2.1-ubuntu24.04": "4",
    "13.4.2-ubuntu26.04": "5",
}
"""CUDA and Ubuntu of the base images that the stand-in has → series of Open MPI to test there."""
USUAL = "13.2.1-ubuntu24.04"
"""What `make docker` builds."""
ARM = "arm64"
"""Instead of a pattern: stages of the usual one for this architecture, in emulation."""


def chosen(whole: str) -> list[str]:
    """Those of COMBINATIONS that are built: the usual one, or with Open MPI those that match the pattern `whole`."""
    return [name for name in COMBINATIONS if fnmatchcase(name, whole)] if whole not in ("", ARM) else [USUAL]


def make_upstream(whole: str) -> Upstream:
    """The stand-in, from the cache that all tests share, for what is `chosen`; nothing is served yet."""
    if lacking := missing():
        install(*lacking)
    archs: tuple[Arch, ...] = ("amd64", "arm64") if whole == ARM else ("amd64",)
    return Upstream.make(CACHE, chosen(whole), sources=whole not in ("", ARM), archs=archs)


def project(folder: Path, configuration: str) -> Path:
    """A copy of this project for one GPU, whose lock has nothing yet of what the stand-in serves."""
    copy_of_project(folder)
    matrix = (folder / "matrix.yaml").read_text()
    # One capability is enough to see that code is made; what the real Ubuntu has in other versions is Debian's here.
    matrix = re.sub(r'(?m)^  "(80|89|100|103|107|120)": .*\n', "", matrix)
    matrix = matrix.replace('gpu: ["90", "100"]', 'gpu: ["90"]')
    matrix = re.sub(
        r"(?m)^(  (?:sshd|pmix):)\n(?:    - \{.*\n)+    - \{when: \{os: debian13\}, version: (.*)\}$", r"\1 \2", matrix
    )
    matrix = re.sub(r"cuda: \[12\.6\.3, .*\]", "cuda: [12.9.1, 13.2.1, 13.4.2]", matrix)
    head, _, hpcx = matrix.partition("  hpcx:\n    description")
    hpcx = hpcx.replace("[linux/amd64, linux/arm64]", "[linux/amd64]", 1)
    (folder / "matrix.yaml").write_text(f"{head}  hpcx:\n    description{hpcx}")
    lock = json.loads((folder / "imagebuild.lock").read_text())
    kept = {"wheels": lock["wheels"], "images": {k: v for k, v in lock["images"].items() if "debian" in k}}
    (folder / "imagebuild.lock").write_text(json.dumps(kept))
    # Debian 13 has the library of Ubuntu 22.04 under the name of 24.04.
    pmix = folder / "dockerfiles/components/pmix/component.yaml"
    pmix.write_text(pmix.read_text().replace("library: libpmix2}", "library: libpmix2t64}"))
    (folder / "config.yaml").write_text(configuration)
    return folder
