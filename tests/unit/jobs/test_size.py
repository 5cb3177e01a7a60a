"""The settings of `--param`. Refusals are in tests/data/refused/jobs.yaml."""

from __future__ import annotations

import re

import pytest

from imagebuild.core.errors import ConfigError
from tests.conftest import ROOT
from tests.unit.jobs.job_fakes import job, text

H100 = "mpijob --profile h100 --fabric ib"


def test_fewer_gpus_of_each_node() -> None:
    for scheduler, parts in {
        "mpijob": ("slotsPerWorker: 4", 'nvidia.com/gpu: "4"', "-np 8 "),
        "slurm": ("--ntasks-per-node=4", "--gpus-per-node=4", "--ranks 8 --nodes 2"),
    }.items():
        made = text(f"{scheduler} --profile h100 --fabric ib --nodes 2 --gpus 4")
        assert [part for part in parts if part not in made] == []


def test_every_parameter_is_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("imagebuild.core.errors.MANY", 99)
    with pytest.raises(ConfigError) as caught:
        job(f"{H100} --param 0=1")
    known = str(caught.value).partition("known: ")[2].split(", ")
    table = (ROOT / "docs/clusters.md").read_text().partition("### Parameters")[2].partition("\n## ")[0]
    assert set(known) == {
        name for names in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall("`(.+?)`", names)
    }
