"""The steps that `imagebuild impact` predicts for a change, and the job matrix of `imagebuild ci-matrix`: which targets changed,
and how builds become jobs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, get_args

import pytest

from imagebuild.build.division import Build
from imagebuild.build.impact import Impact, compare_states, job_matrix, read_state
from imagebuild.core.errors import ConfigError
from imagebuild.core.fields import Platform
from imagebuild.project.plan import Plan, Target
from imagebuild.project.project import parse_changes
from imagebuild.render.stages import Stage
from tests import reference_cost
from tests.conftest import ROOT, Files, data, git
from tests.reference_cost import CHANGES, COLD, Change
from tests.unit.conftest import Call

CASES = data("cases/build/impact")


def stages(cost: Impact) -> set[str]:
    return {stage.stage for stage in cost.stages}


@pytest.mark.parametrize(("setting", "executed"), CASES["executed"])
def test_a_bump_of_open_executes_what_uses_it(setting: str, executed: list[str]) -> None:
    before, after = (read_state(ROOT, parse_changes(settings), ["open"]) for settings in ((), (setting,)))
    cost = compare_states(before, after, ("before", "after"))
    assert stages(cost) == {*executed}
    assert all(set(stage.targets) == {target.id for target in after.targets} for stage in cost.stages)
    assert cost.run <= cost.run_of == compare_states(None, after, ("nothing", "after")).run


def predicted(call: Call, *arguments: str, before: str = "before") -> Impact:
    status, out, error = call("impact", before, "--json", "-", *arguments)
    assert status == 0, error
    return Impact.model_validate_json(out)


def test_from_nothing_and_from_itself(call: Call) -> None:
    everything = predicted(call, before="nothing")
    assert (everything.run, everything.run_of) == (3, 3)
    assert [stage.stage for stage in everything.stages] == ["library", "tool", "image"]
    itself = predicted(call)
    assert (itself.run, itself.run_of, itself.stages) == (0, 3, ())


def test_a_base_that_changes_executes_all_that_starts_from_it(call: Call, tiny: Files) -> None:
    tiny.replace("imagebuild.lock", "a" * 64, "d" * 64)
    assert stages(predicted(call)) == set()  # a bootstrapped base replaces that image
    assert stages(predicted(call, "--base", "registry")) == {"library", "tool", "image"}  # the source is on scratch
    tiny.replace("matrix.yaml", "release: trixie", "release: forky")
    assert stages(predicted(call)) == {"library", "tool", "image"}


def test_a_folder_with_a_copy(call: Call, tiny: Files) -> None:
    tiny.replace("matrix.yaml", 'library: "1.2"', 'library: "1.3"')
    arguments = ("impact", "before", "tiny-cuda13.0*runtime", "--platform", "linux/amd64")
    status, out, error = call(*arguments)
    assert status == 0, error
    assert out.splitlines() == [
        "stage    component  RUN steps  targets",
        "library  library    1          1",
        "image               0          1",
        "",
        "target                          stages executed",
        "tiny-cuda13.0-debian13-runtime  library, image",
        "",
        "from before to the working tree: 1 of 3 RUN steps are executed; a step that targets or platforms share counts once",
    ]
    markdown = call(*arguments, "--markdown")[1].splitlines()
    assert markdown[-1].startswith("**from before to the working tree**: 1 of 3")
    assert "| library | library | 1 | 1 |" in markdown
    assert "| tiny-cuda13.0-debian13-runtime | library, image |" in markdown
    assert "from . to the working tree --set library=2: 1 of 3" in call("impact", ".", "--set", "library=2")[1]
    assert "to the working tree --without tool: 0 of" in call("impact", ".", "--without", "tool")[1]


@pytest.fixture
def repository(tiny: Files, call: Call) -> Files:
    git(tiny.root, "init", "--quiet")
    git(tiny.root, "add", ".")
    git(tiny.root, "commit", "--quiet", "--message", "first")
    git(tiny.root, "tag", "v1")
    return tiny


@pytest.mark.programs
def test_revisions_and_what_is_none(repository: Files, call: Call) -> None:
    repository.replace("matrix.yaml", 'library: "1.2"', 'library: "1.3"')
    cost = predicted(call, before="v1")
    assert (cost.before, cost.after, stages(cost)) == ("v1", "the working tree", {"library", "image"})
    # Between two revisions the working tree does not count.
    assert predicted(call, "--to", "HEAD", before="v1").stages == ()
    for name in ("v2", "--all", "v1:matrix.yaml"):
        status, _, error = call("impact", "--", name)
        assert (status, error.count("\n")) == (2, 1)
        assert f"{name}: is neither a folder with matrix.yaml nor a revision of {repository.root}" in error
    repository.write("matrix.yaml", "repositry: x\n")
    git(repository.root, "commit", "--quiet", "--all", "--message", "wrong")
    repository.write("matrix.yaml", git(repository.root, "show", "v1:matrix.yaml"))
    status, _, error = call("impact", "HEAD")
    assert (status, "HEAD:matrix.yaml:1: repositry: unknown key" in error) == (2, True), error
    (repository.root / ".git").rename(repository.root / "gone")
    assert "is not in a git repository; name a folder instead" in call("impact", "v1")[2]


@pytest.mark.parametrize("change", [COLD, *CHANGES], ids=lambda c: c.what)
def test_a_change_of_the_reference_s_matrix_stays_within_its_budget(change: Change) -> None:
    targets = reference_cost.state().targets
    assert (len(targets), {len(t.platforms) for t in targets}) == (10, {2})
    assert 0 < reference_cost.executed(change) <= change.limit


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


def builds_of(target: Target, names: Iterable[str], *platforms: Platform, runs: Callable[[str], int]) -> list[Build]:
    """Builds of invented targets, each with one stage of its own number of steps."""
    made: list[Build] = []
    for name in names:
        own = target.model_copy(update={"id": name})
        stage = Stage(name, name, steps=(("RUN", "true"),) * runs(name))
        made += [(own, platform, {"image": stage}) for platform in platforms]
    return made


def matrix_of(builds: list[Build], most: int) -> list[dict[str, Any]]:
    return job_matrix([(target.id, platform) for target, platform, _ in builds], most, lambda: builds)["include"]


def test_a_job_states_what_it_builds_and_leaves_the_runner_to_the_workflow(full_plan: Plan) -> None:
    builds = builds_of(full_plan.targets[0], "a", "linux/arm64", runs=lambda _: 1)
    assert matrix_of(builds, 1) == [{"name": "a arm64", "id": "a-arm64", "targets": "a", "platform": "linux/arm64"}]


def test_jobs_have_about_the_same_work(full_plan: Plan) -> None:
    builds = builds_of(full_plan.targets[0], "abcdefgh", "linux/amd64", runs=lambda name: 6 if name == "a" else 1)
    assert [job["targets"] for job in matrix_of(builds, 2)] == ["a", "b c d e f g h"]


@pytest.mark.parametrize("most", [2, 7, 256, 999, 1000])
def test_jobs_hold_every_build_once(most: int, full_plan: Plan) -> None:
    names = [f"t{i:03}" for i in range(500)]
    builds = builds_of(full_plan.targets[0], names, *get_args(Platform), runs=lambda name: int(name[1:]) % 17)
    jobs = matrix_of(builds, most)
    assert len(jobs) <= most
    expected = [(target.id, platform) for target, platform, _ in builds]
    assert sorted((target, job["platform"]) for job in jobs for target in job["targets"].split()) == expected
    assert len({job["id"] for job in jobs}) == len(jobs)
    with pytest.raises(ConfigError, match="use at least 2"):
        matrix_of(builds, 1)
