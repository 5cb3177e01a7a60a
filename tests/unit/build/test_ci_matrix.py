"""The job matrix of `imagebuild ci-matrix`: which targets changed, and how builds become jobs."""

from __future__ import annotations

import json
from typing import get_args

import pytest

from imagebuild.build.ci_matrix import job_matrix
from imagebuild.core.errors import ConfigError
from imagebuild.core.fields import Platform
from tests.conftest import Files, data
from tests.unit.conftest import Call

CASES = data("cases/build/ci_matrix")

ALL = [f"tiny-cuda{end}" for end in ("12.9-debian13-runtime", "13.0-debian13-runtime", "13.0-debian13-devel")]


def jobs(call: Call, *arguments: str, since: str = "before") -> tuple[list[str], str]:
    """Run `imagebuild ci-matrix`; return `targets` of each job, and the messages on standard error."""
    status, out, complaint = call("ci-matrix", "--changed-since", since, *arguments)
    assert (status, len(out.splitlines())) == (0, 1), complaint  # a line, as GitHub's outputs are
    return [entry["targets"] for entry in json.loads(out)["include"]], complaint


@pytest.mark.parametrize(("file", "old", "new", "found"), CASES["what-differs"])
def test_what_differs(call: Call, tiny: Files, file: str, old: str, new: str, found: list[str]) -> None:
    tiny.replace(file, old, new)
    targets, complaint = jobs(call)
    assert targets == found
    assert complaint.startswith(f"{len(found)} of ")


def test_a_platform_more_makes_a_target_differ_on_all(call: Call, tiny: Files) -> None:
    tiny.replace("matrix.yaml", "platforms: [linux/amd64]", "platforms: [linux/amd64, linux/arm64]")
    found, complaint = jobs(call)
    # Publishing makes an index of all platforms, so all are built.
    assert found == [*ALL, *ALL]
    assert complaint.startswith("3 of 3 targets differ")
    assert jobs(call, "--platform", "linux/amd64")[0] == []


def test_a_state_that_this_version_cannot_read_counts_as_nothing(call: Call, tiny: Files) -> None:
    tiny.replace("before/matrix.yaml", "repository:", "repositry:")
    assert jobs(call, "cuda=13.0", since="nothing") == (ALL[1:], "2 of 2 targets differ from nothing\n")
    found, complaint = jobs(call)
    assert found == ALL
    assert "everything counts as changed" in complaint
    assert "repositry: unknown key" in complaint


def test_a_job_states_what_it_builds_and_leaves_the_runner_to_the_workflow() -> None:
    assert job_matrix([("a", "linux/arm64")], 1)["include"] == [
        {"name": "a arm64", "id": "a-arm64", "targets": "a", "platform": "linux/arm64"}
    ]


@pytest.mark.parametrize("most", [2, 7, 256, 999, 1000])
def test_jobs_hold_every_build_once(most: int) -> None:
    builds = [(f"t{i:03}", platform) for i in range(500) for platform in get_args(Platform)]
    jobs = job_matrix(builds, most)["include"]
    assert len(jobs) <= most
    assert sorted((target, job["platform"]) for job in jobs for target in job["targets"].split()) == builds
    assert len({job["id"] for job in jobs}) == len(jobs)
    with pytest.raises(ConfigError, match="use at least 2"):
        job_matrix(builds, 1)
