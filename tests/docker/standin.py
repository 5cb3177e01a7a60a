"""This project as somebody has it who reaches the stand-in for the vendor's servers only. See tests/upstream/README.md."""

from __future__ import annotations

import json
from pathlib import Path

from tests.docker.conftest import copy_of_project, edited_matrix

TARGETS = "hpcx-cuda13.2.1-ubuntu24.04"
"""Beginning of the ids of those that the stand-in has all of."""


def project(folder: Path, configuration: str) -> Path:
    """A copy of this project for one GPU, whose lock has nothing yet of what the stand-in serves."""
    copy_of_project(folder)
    with edited_matrix(folder) as matrix:
        # One capability is enough to see that code is made.
        matrix["gpu-architectures"] = {"90": matrix["gpu-architectures"]["90"]}
        matrix["images"]["slim"]["axes"]["gpu"] = ["90"]
        for name in ("sshd", "pmix"):  # what the real Ubuntu has in other versions is Debian's here
            by_os = {entry["when"]["os"]: entry["version"] for entry in matrix["versions"][name]}
            matrix["versions"][name] = by_os["debian13"]
        matrix["images"]["hpcx"]["platforms"] = ["linux/amd64"]
    lock = json.loads((folder / "imagebuild.lock").read_text())
    kept = {"wheels": lock["wheels"], "images": {k: v for k, v in lock["images"].items() if "debian" in k}}
    (folder / "imagebuild.lock").write_text(json.dumps(kept))
    # Debian 13 has the library of Ubuntu 22.04 under the name of 24.04.
    pmix = folder / "dockerfiles/components/pmix/component.yaml"
    pmix.write_text(pmix.read_text().replace("library: libpmix2}", "library: libpmix2t64}"))
    (folder / "config.yaml").write_text(configuration)
    return folder
