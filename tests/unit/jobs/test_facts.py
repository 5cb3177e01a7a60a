"""The facts of `jobs/`: mistakes in them, and their schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from imagebuild.core import ConfigError, Model
from imagebuild.jobs import (
    COLLECTIVES,
    CONDITIONS,
    Cluster,
    Fabric,
    Feature,
    JobTest,
    NodeFacts,
    SchedulerFacts,
    Stack,
    load_facts,
)
from tests.conftest import ROOT
from tests.unit.jobs.job_fakes import copy_of_facts, facts, job


def errors(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_facts(folder)
    return str(caught.value)


def test_mistakes_are_reported_with_their_line(tmp_path: Path) -> None:
    folder = copy_of_facts(tmp_path)
    (folder / "clusters/mine.yaml").write_text("title: Mine\nintreface: eth0\nfabrics:\n  ip: {}\n")
    (folder / "features/bad.yaml").write_text('title: Bad\nenv:\n  - {name: A B, value: "it\'s", why: x}\n')
    lines = errors(folder).splitlines()
    assert any(re.search(r"mine\.yaml:2: intreface: unknown key; did you mean 'interface'\?", line) for line in lines)
    assert any(re.search(r"bad\.yaml:3: env\.0\.name", line) for line in lines)
    assert any(re.search(r"bad\.yaml:3: env\.0\.value", line) for line in lines)


def test_conditions_on_unknown_facts_and_invalid_versions(tmp_path: Path) -> None:
    folder = copy_of_facts(tmp_path)
    (folder / "features/bad.yaml").write_text(
        "title: Bad\nenv:\n  - name: X\n    why: x\n    when:\n      fabirc: ib\n      nccl: '>>2'\n"
    )
    found = errors(folder)
    assert "bad.yaml:6: env.0.when.fabirc: unknown fact; did you mean 'fabric'?" in found
    assert "bad.yaml:7: env.0.when.nccl: '>>2' is not a version specifier" in found


def test_unknown_fabrics_and_collectives(tmp_path: Path) -> None:
    folder = copy_of_facts(tmp_path)
    (folder / "clusters/mine.yaml").write_text("title: Mine\nfabrics:\n  ip: {}\n")
    (folder / "tests/all-reduce.yaml").write_text("title: x\ncollectives: [allreduce]\nmin-bytes: 1M\nmax-bytes: 1M\n")
    found = errors(folder)
    assert "collectives: nccl-tests has no 'allreduce'; did you mean 'all_reduce'" in found
    assert "mine.yaml:3: fabrics.ip: unknown fabric; known: efa, ethernet" in found


def test_a_folder_without_facts(tmp_path: Path) -> None:
    assert f"{tmp_path}/stacks: no *.yaml in this folder; name the folder" in errors(tmp_path)


def test_conditions_can_use_exactly_what_jobs_know() -> None:
    choices = job("slurm --profile h100 --fabric ib").choices
    assert set(choices.conditions) == {*CONDITIONS, *COLLECTIVES, *facts().features}


def test_the_table_of_nccl_variables() -> None:
    table = facts().nccl_variables.names
    assert table["NCCL_IB_HCA"].documented
    assert not table["NCCL_GDRCOPY_ENABLE"].documented
    assert len(table) > 250


@pytest.mark.parametrize("model", [Stack, Fabric, Feature, Cluster, JobTest, SchedulerFacts, NodeFacts])
def test_schemas(model: type[Model], golden: Callable[[str, str], None]) -> None:
    name = model.__name__.removesuffix("Facts").removeprefix("Job").lower()
    golden(f"schemas/job-{name}.json", json.dumps(model.model_json_schema(by_alias=True), indent=1) + "\n")


def test_files_of_facts_name_their_schema() -> None:
    for file in (ROOT / "jobs").rglob("*.yaml"):
        line = file.read_text().splitlines()[0]
        schema = re.fullmatch(r"# yaml-language-server: \$schema=(\S+)", line)
        assert schema, file
        assert (file.parent / schema[1]).resolve().is_file(), file
