"""The types of the facts of `jobs/`: names in conditions, and the schemas."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

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
)
from imagebuild.jobs.image import conditions_of_image
from imagebuild.jobs.size import conditions_of_size
from tests.unit.jobs.job_fakes import facts, job


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
