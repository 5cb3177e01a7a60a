"""The types of the facts of `jobs/`: names in conditions, and the schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from imagebuild.core.errors import ConfigError
from imagebuild.core.fields import Model
from imagebuild.jobs.facts import (
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
from imagebuild.jobs.image import conditions_of_image
from imagebuild.jobs.size import conditions_of_size
from tests.conftest import ROOT
from tests.unit.jobs.job_fakes import copy_of_facts, facts, job


def test_conditions_can_use_exactly_what_jobs_know() -> None:
    made = job("slurm --profile h100 --fabric ib")
    before = conditions_of_size(made.request, made.profile, facts(), made.size)
    assert set(conditions_of_image(before, made.image, facts())) == {
        *CONDITIONS,
        *COLLECTIVES,
        *facts().features,
    }


@pytest.mark.parametrize("model", [Stack, Fabric, Feature, Cluster, JobTest, NodeFacts, SchedulerFacts])
def test_schemas(model: type[Model], golden: Callable[[str, str], None]) -> None:
    name = model.__name__.removesuffix("Facts").removeprefix("Job").lower()
    golden(f"schemas/job-{name}.json", json.dumps(model.model_json_schema(by_alias=True), indent=1) + "\n")


def test_values_of_clusters_are_refused_with_line_and_reason(tmp_path: Path) -> None:
    """Values that Kubernetes, sbatch or a job could not use, each in a cluster of its own; all are reported at once."""
    folder = copy_of_facts(tmp_path)
    contents = (ROOT / "tests/data/refused-clusters.txt").read_text().splitlines()
    for number, content in enumerate(contents):
        (folder / f"clusters/c{number}.yaml").write_text(f"title: Mine\n\n{content}\n")
    found = errors(folder).splitlines()
    for number, content in enumerate(contents):
        key = content.partition(":")[0]
        lines = [line for line in found if f"/clusters/c{number}.yaml:" in line]
        assert lines, content
        assert all(re.match(rf".*/c{number}\.yaml:(3|1): {key}[.:]", line) for line in lines), lines
    assert not re.search(r"pattern|instance of|a (dict|str|tuple)", "".join(found))


def errors(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_facts(folder)
    return str(caught.value)


def test_a_folder_without_facts(tmp_path: Path) -> None:
    assert f"{tmp_path}/stacks: this folder contains no *.yaml file; name a complete copy" in errors(tmp_path)
