"""The command `imagebuild job`: what is written. What is refused is in tests/data/refused/jobs.yaml."""

from __future__ import annotations

from pathlib import Path

import pytest

from imagebuild.cli import ProjectFiles, offer_of_plan
from tests.conftest import ROOT
from tests.unit.conftest import Call


def test_the_command_writes_what_it_would_print(tmp_path: Path, command: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    line = "job slurm --profile h100 --param NCCL_FOO=1 --feature debug --registry ghcr.io/acme --param minutes=45"
    words = line.split(" ")
    status, printed, warnings = command(*words)
    assert (status, "does not read NCCL_FOO" in warnings) == (0, True)
    assert printed.startswith(f"#!/bin/bash\n# imagebuild {line}\n")
    assert "#SBATCH --time=45\n" in printed
    assert command(*words, "-o", tmp_path / "job.sh") == (0, "", warnings)
    assert (tmp_path / "job.sh").read_text() == printed.replace(f"{line}\n", f"{line} -o {tmp_path}/job.sh\n", 1)


def test_without_a_project_the_images_that_come_with_imagebuild_are_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered = offer_of_plan(ProjectFiles(root=ROOT))
    monkeypatch.chdir(tmp_path)
    assert offer_of_plan(ProjectFiles()) == offered
