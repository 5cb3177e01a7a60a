"""The settings of `--param`. Refusals are in tests/data/refused/jobs.yaml."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from imagebuild.core.errors import ConfigError
from imagebuild.jobs.facts import load_facts
from imagebuild.jobs.size import refuse_unknown_gpus
from tests.conftest import ROOT, data
from tests.unit.jobs.job_fakes import job, profiles, text

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


@pytest.mark.parametrize(("name", "short"), data("cases/jobs/size")["names-of-gpus"].items())
def test_a_cluster_names_any_gpu(tmp_path: Path, name: str, short: str) -> None:
    """The words of a cluster's file and of a profile agree about the name of a GPU."""
    clusters = tmp_path / "clusters"
    clusters.mkdir()
    (clusters / "ours.yaml").write_text(f"title: Ours\nnodes: {{{short}: {{constraint: ours}}}}\n")
    cluster = load_facts(ROOT / "jobs", tmp_path).clusters["ours"]
    h100 = profiles()["h100"]
    refuse_unknown_gpus(cluster, [h100.model_copy(update={"gpu": h100.gpu.model_copy(update={"names": (name,)})})])
    with pytest.raises(ConfigError, match="no profile describes this GPU"):
        refuse_unknown_gpus(cluster, [profiles()["a40"]])
