"""The command `imagebuild job` and its settings. What is refused is in tests/data/refused/jobs.yaml."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from imagebuild.cli.job import project_plan
from imagebuild.cli.options import ProjectFiles
from imagebuild.core.errors import ConfigError
from tests.conftest import ROOT
from tests.unit.conftest import Call
from tests.unit.jobs.job_fakes import job, rank_exports

H100 = "mpijob --profile h100 --fabric ib"


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
    planned = project_plan(ProjectFiles(root=ROOT), ())
    monkeypatch.chdir(tmp_path)
    assert project_plan(ProjectFiles(), ()) == planned


# Settings


def test_some_names_can_be_set_anew() -> None:
    for name in ("NCCL_NET_PLUGIN", "LD_LIBRARY_PATH", "UCX_NET_DEVICES", "NCCL_IB_HCA"):
        assert rank_exports(f"{H100} --param {name}=x")[name].startswith("x")


def test_every_parameter_is_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("imagebuild.core.errors.MANY", 99)
    with pytest.raises(ConfigError) as caught:
        job(f"{H100} --param 0=1")
    known = str(caught.value).partition("known: ")[2].split(", ")
    table = (ROOT / "docs/clusters.md").read_text().partition("### Parameters")[2].partition("\n## ")[0]
    assert set(known) == {
        name for names in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall("`(.+?)`", names)
    }


def test_another_value_stops_and_tells_how_to_replace_it() -> None:
    with pytest.raises(ConfigError, match=r"UCX_TLS has two values: 'tcp' .*'rc'.* write --param UCX_TLS:=rc"):
        job(f"{H100} --param UCX_TLS=rc")
    assert rank_exports(f"{H100} --param UCX_TLS:=rc")["UCX_TLS"] == "rc"


def test_what_nccl_reads() -> None:
    settings = "NCCL_IB_NET_LATENCY=50 NCCL_IB_TIMOUT=22 NCCL_ALGO=ring NCCL_TESTS_SPLIT=AND7 NCCL_OFI_X=1"
    assert list(job(f"{H100} --param {settings.replace(' ', ' --param ')}").messages) == [
        "warning: --param NCCL_IB_NET_LATENCY: NCCL 2.30.7 does not read NCCL_IB_NET_LATENCY",
        "warning: --param NCCL_IB_TIMOUT: NCCL 2.30.7 does not read NCCL_IB_TIMOUT; did you mean 'NCCL_IB_TIMEOUT'?",
    ]
