"""What a change makes BuildKit execute (`plan --from`), CI build (`plan --github`), and what caches have."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from typing import Any, get_args

import pytest

from imagebuild.build import (
    Build,
    CacheEntry,
    Cost,
    ProjectState,
    cache_entries,
    compare_states,
    group_builds,
    job_matrix,
    read_state,
)
from imagebuild.core import ConfigError, Platform
from imagebuild.project import Plan, Project, parse_changes, select_targets
from imagebuild.render import Renderer
from tests import reference_cost
from tests.conftest import ROOT, Files, git
from tests.reference_cost import CHANGES, COLD, Change
from tests.unit.conftest import Call

COMMIT = "c" * 40
OPENMPI = ("openmpi-git", "nccl-tests", "image")
"""Open MPI's stage, and those that are executed with it."""


def stages(cost: Cost) -> set[str]:
    return {stage.stage for stage in cost.stages}


@pytest.mark.parametrize(
    ("setting", "executed"),
    [
        ("nccl=9", {"nccl-wheel", "ucc", *OPENMPI}),
        (f"ucc=9@{COMMIT}", {"ucc-source", "ucc", *OPENMPI}),
        (f"openmpi=9@{COMMIT}", {"openmpi-git-source", *OPENMPI}),
        (f"perftest=9@{COMMIT}", {"perftest-source", "perftest", "image"}),
        (f"gdrcopy=9@{COMMIT}", {"gdrcopy-source", "gdrcopy", "ucx", "ucc", *OPENMPI}),
        (f"pmix-git=9@{COMMIT}", {"pmix-git-source", "pmix-git", *OPENMPI}),
        (
            f"rdma-core-git=9@{COMMIT}",
            {"rdma-core-git-source", "rdma-core-git", "verbs-git", "perftest", "ucx", "ucc", *OPENMPI},
        ),
        ("sshd=9", {"image"}),
        ("cuda=13.5", set()),
    ],
)
def test_a_bump_of_open_executes_what_uses_it(setting: str, executed: set[str]) -> None:
    before, after = (read_state(ROOT, parse_changes(settings), ["open"]) for settings in ((), (setting,)))
    cost = compare_states(before, after, ("before", "after"))
    assert stages(cost) == executed
    assert all(set(stage.targets) == {target.id for target in after.targets} for stage in cost.stages)
    assert cost.run <= cost.run_of == compare_states(None, after, ("nothing", "after")).run


@pytest.fixture
def call(tiny: Files, command: Call, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Commands on a project that was built as it is in the folder `before`, and is changed then."""
    monkeypatch.chdir(tiny.root)
    Files(tiny.root / "before")
    return command


def predicted(call: Call, *arguments: str, before: str = "before") -> Cost:
    status, out, error = call("plan", "--from", before, "--json", "-", *arguments)
    assert status == 0, error
    return Cost.model_validate_json(out)


def test_from_nothing_and_from_itself(call: Call) -> None:
    everything = predicted(call, before="nothing")
    assert (everything.run, everything.run_of) == (3, 3)
    assert [stage.stage for stage in everything.stages] == ["library", "tool", "image"]
    itself = predicted(call)
    assert (itself.run, itself.run_of, itself.stages) == (0, 3, ())


def test_a_cuda_that_is_added_costs_its_own_steps_only(call: Call, tiny: Files) -> None:
    tiny.replace("matrix.yaml", '"13.0"]', '"13.0", "13.1"]')
    # Nothing here depends on it, and labels are no steps.
    assert predicted(call).stages == ()
    tiny.component("library", (tiny.root / "dockerfiles/components/library/component.yaml").read_text() + "key: [cuda]\n",
                   build="FROM {{ base }} AS library\nRUN echo {{ version }} {{ key.cuda }} > /out\n")  # fmt: skip
    shutil.copytree(tiny.root, tiny.root / "before", dirs_exist_ok=True, ignore=shutil.ignore_patterns("before"))
    tiny.replace("matrix.yaml", '"13.1"]', '"13.1", "13.2"]')
    targets = tuple(f"tiny-cuda13.2-debian13-{variant}" for variant in ("runtime", "devel"))
    assert [(s.stage, s.targets) for s in predicted(call).stages] == [("library", targets), ("image", targets)]


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("dockerfiles/components/library/build.j2", "FROM", "# why\nFROM"),
        ("dockerfiles/components/library/build.j2", "RUN", "# and how\nRUN"),
        ("dockerfiles/components/tool/component.yaml", "uses the library", "used the library"),
        ("imagebuild.lock", "a" * 64, "d" * 64),  # the image that a bootstrapped base replaces
    ],
)
def test_what_costs_nothing(call: Call, tiny: Files, file: str, old: str, new: str) -> None:
    tiny.replace(file, old, new)
    assert predicted(call).stages == ()


def test_a_base_that_changes_executes_all_that_starts_from_it(call: Call, tiny: Files) -> None:
    tiny.replace("imagebuild.lock", "a" * 64, "d" * 64)
    assert stages(predicted(call, "--base", "registry")) == {"library", "tool", "image"}  # the source is on scratch
    tiny.replace("matrix.yaml", "release: trixie", "release: forky")
    assert stages(predicted(call)) == {"library", "tool", "image"}


def test_a_folder_with_a_copy(call: Call, tiny: Files) -> None:
    tiny.replace("matrix.yaml", 'library: "1.2"', 'library: "1.3"')
    arguments = ("plan", "tiny-cuda13.0*runtime", "--from", "before", "--platform", "linux/amd64")
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
        "from before to the working tree: 1 of 3 RUN steps are executed; one that targets or platforms share counts once",
    ]
    markdown = call(*arguments, "--markdown")[1].splitlines()
    assert markdown[0].startswith("**from before to the working tree**: 1 of 3")
    assert "| library | library | 1 | 1 |" in markdown
    assert "| tiny-cuda13.0-debian13-runtime | library, image |" in markdown
    assert "from . to the working tree --set library=2: 1 of 3" in call("plan", "--from", ".", "--set", "library=2")[1]
    assert "to the working tree --without tool: 0 of" in call("plan", "--from", ".", "--without", "tool")[1]


@pytest.fixture
def repository(tiny: Files) -> Files:
    git(tiny.root, "init", "--quiet")
    git(tiny.root, "add", ".")
    git(tiny.root, "commit", "--quiet", "--message", "first")
    git(tiny.root, "tag", "v1")
    return tiny


@pytest.mark.programs
def test_revisions(repository: Files, call: Call) -> None:
    assert predicted(call, before="v1").stages == ()
    repository.replace("matrix.yaml", 'library: "1.2"', 'library: "1.3"')
    cost = predicted(call, before="v1")
    assert (cost.before, cost.after, stages(cost)) == ("v1", "the working tree", {"library", "image"})
    # Between two revisions the working tree does not count.
    assert predicted(call, "--to", "HEAD", before="v1").stages == ()
    git(repository.root, "commit", "--quiet", "--all", "--message", "second")
    assert predicted(call, "--to", "HEAD", before="HEAD~1").stages == cost.stages


@pytest.mark.programs
def test_revisions_that_there_are_not_or_that_are_wrong(repository: Files, call: Call) -> None:
    for name in ("v2", "--all", "v1:matrix.yaml"):
        status, _, error = call("plan", f"--from={name}")
        assert (status, error.count("\n")) == (2, 1)
        assert f"{name}: neither a folder with matrix.yaml nor a revision of {repository.root}" in error
    repository.write("matrix.yaml", "repositry: x\n")
    git(repository.root, "commit", "--quiet", "--all", "--message", "wrong")
    repository.write("matrix.yaml", git(repository.root, "show", "v1:matrix.yaml"))
    status, _, error = call("plan", "--from", "HEAD")
    assert (status, "HEAD:matrix.yaml:1: repositry: unknown key" in error) == (2, True), error
    other = repository.root / "other"
    other.mkdir()
    (other / "matrix.yaml").write_text((repository.root / "matrix.yaml").read_text())
    assert "v1: has no other/matrix.yaml" in call("plan", "--project", "other", "--from", "v1")[2]
    (repository.root / ".git").rename(repository.root / "gone")
    assert "is in no git repository; name a folder instead" in call("plan", "--from", "v1")[2]


ALL = [f"tiny-cuda{end}" for end in ("12.9-debian13-runtime", "13.0-debian13-runtime", "13.0-debian13-devel")]


Jobs = Callable[..., tuple[list[str], str]]


@pytest.fixture
def jobs(tiny: Files, command: Call, monkeypatch: pytest.MonkeyPatch) -> Jobs:
    """`targets` of the jobs, and what is printed beside them. The state before is a copy of the project."""
    monkeypatch.chdir(tiny.root)
    tiny.write("dockerfiles/components/library/checks/loads.sh", "true\n")
    tiny.replace("dockerfiles/components/library/component.yaml", "license: MIT", "license: MIT\nchecks: "
                 "[{name: loads, description: it loads}]")  # fmt: skip
    shutil.copytree(tiny.root, tiny.root.parent / f"{tiny.root.name}-before")

    def run(*arguments: str, since: str | None = f"../{tiny.root.name}-before") -> tuple[list[str], str]:
        more = ("--changed-since", since) if since else ()
        status, out, complaint = command("plan", "--github", *more, *arguments)
        assert (status, len(out.splitlines())) == (0, 1), complaint  # a line, as GitHub's outputs are
        return [entry["targets"] for entry in json.loads(out)["include"]], complaint

    return run


def test_from_itself_and_from_nothing(jobs: Jobs) -> None:
    found, complaint = jobs()
    assert (found, complaint.startswith("0 of 3 targets differ from")) == ([], True)
    assert jobs(since="nothing") == (ALL, "3 of 3 targets differ from nothing\n")
    assert jobs(since=None) == (ALL, "")
    assert jobs("cuda=13.0", since="nothing")[0] == ALL[1:]


@pytest.mark.parametrize(
    ("file", "old", "new", "found"),
    [
        ("matrix.yaml", 'cuda: ["12.9", "13.0"]', 'cuda: ["12.9", "13.0", "13.1"]',
         ["tiny-cuda13.1-debian13-runtime", "tiny-cuda13.1-debian13-devel"]),
        ("matrix.yaml", 'library: "1.2"', 'library: [{when: {cuda: "13.0"}, version: "1.3"}, "1.2"]', ALL[1:]),
        ("imagebuild.lock", "b" * 40, "c" * 40, ALL),
        ("imagebuild.lock", '{"git"', '{"date": "2026-01-02", "git"', ALL),
        ("dockerfiles/components/library/checks/loads.sh", "true", "false || true", ALL),
        ("matrix.yaml", "    tags:", "    size-limit-mb: {runtime: 3}\n    tags:", ALL),
        ("matrix.yaml", 'variant}"]', 'variant}"]\n    aliases: [{tag: "{repository}/{image}:latest", when: {variant: devel}}]',
         ALL[2:]),
        # What is written about a component or a check is no part of an image.
        ("dockerfiles/components/tool/component.yaml", "title: Tool", "title: A tool", []),
        ("dockerfiles/components/library/component.yaml", "it loads", "it is loaded", []),
        ("dockerfiles/components/tool/build.j2", "FROM {{ base }}", "# Now a tool.\nFROM {{ base }}", []),
    ],
)  # fmt: skip
def test_what_differs(jobs: Jobs, tiny: Files, file: str, old: str, new: str, found: list[str]) -> None:
    tiny.replace(file, old, new)
    targets, complaint = jobs()
    assert targets == found
    assert complaint.startswith(f"{len(found)} of ")


def test_a_platform_more_makes_a_target_differ_on_all(jobs: Jobs, tiny: Files) -> None:
    tiny.replace("matrix.yaml", "platforms: [linux/amd64]", "platforms: [linux/amd64, linux/arm64]")
    tiny.replace("matrix.yaml", "linux/amd64: here", "linux/amd64: here, linux/arm64: [self-hosted, arm]")
    found, complaint = jobs()
    # Publishing makes an index of all platforms, so all are built.
    assert found == [target for target in ALL for _ in range(2)]
    assert complaint.startswith("3 of 3 targets differ")
    assert jobs("--platform", "linux/amd64")[0] == []


def test_a_state_that_this_version_cannot_read_counts_as_nothing(jobs: Jobs, tiny: Files) -> None:
    before = Files(tiny.root.parent / "old")
    before.replace("matrix.yaml", "repository:", "repositry:")
    found, complaint = jobs(since="../old")
    assert found == ALL
    assert "everything counts as changed" in complaint
    assert "repositry: unknown key" in complaint


def test_jobs_have_a_runner_that_the_matrix_names() -> None:
    (entry,) = job_matrix([[("a", "linux/arm64")]], {"linux/arm64": ("self-hosted", "arm")})["include"]
    assert entry == {
        "name": "a arm64", "id": "a-arm64", "targets": "a", "platform": "linux/arm64", "runner": ["self-hosted", "arm"],
    }  # fmt: skip
    with pytest.raises(ConfigError, match="no runner for linux/arm64; add its label"):
        job_matrix([[("a", "linux/arm64")]], {"linux/amd64": ("here",)})


BUILDS: list[Build] = [(f"t{i:03}", platform) for i in range(500) for platform in get_args(Platform)]


@pytest.mark.parametrize("most", [2, 7, 256, 999, 1000])
def test_groups_hold_every_build_once_and_neighbours_of_one_platform_each(most: int) -> None:
    groups = group_builds(BUILDS, most)
    assert len(groups) <= most
    assert sorted(build for group in groups for build in group) == sorted(BUILDS)
    assert all(len({platform for _, platform in group}) == 1 for group in groups)
    with pytest.raises(ConfigError, match="there are 2"):
        group_builds(BUILDS, 1)


def test_the_matrix_of_the_project(full_plan: Plan, project: Project) -> None:
    runners = project.matrix.model.github_runners
    builds = [(t.id, p) for t in full_plan.targets for p in t.platforms]
    entries: list[dict[str, Any]] = job_matrix([[b] for b in builds], runners)["include"]
    assert len({entry["id"] for entry in entries}) == len(builds)
    assert {(e["platform"], e["runner"]) for e in entries} == {
        ("linux/amd64", "ubuntu-24.04"), ("linux/arm64", "ubuntu-24.04-arm"),
    }  # fmt: skip


RUNTIME = "open-cuda13.5-debian13-runtime"


def entries(renderer: Renderer, full_plan: Plan, select: str, base: str = "bootstrap") -> dict[str, list[CacheEntry]]:
    return cache_entries(ProjectState(renderer, select_targets(full_plan, [select]), base=base))


def tags(found: dict[str, list[CacheEntry]]) -> set[str]:
    return {entry.tag for of_target in found.values() for entry in of_target}


def test_what_is_compiled_has_a_tag_for_each_platform(renderer: Renderer, full_plan: Plan) -> None:
    found = entries(renderer, full_plan, RUNTIME)
    places = {tag.rpartition("-")[0] for tag in tags(found)}
    compiled = {
        "gdrcopy", "perftest", "nvbandwidth", "ucx", "ucc", "openmpi-git", "nccl-tests", "pmix-git", "rdma-core-git",
    }  # fmt: skip
    assert places == {f"{stage}-{arch}" for stage in compiled for arch in ("amd64", "arm64")}
    assert len(tags(found)) == len(found[RUNTIME]) == len(places)
    assert tags(found) == tags(entries(renderer, full_plan, "open-cuda13.5-*"))
    assert not tags(found) & tags(entries(renderer, full_plan, RUNTIME, base="registry"))
    assert not tags(entries(renderer, full_plan, "quickstart"))  # of packages


def test_the_reference_s_matrix() -> None:
    targets = reference_cost.state().targets
    assert (len(targets), {len(t.platforms) for t in targets}) == (10, {2})


@pytest.mark.parametrize("change", [COLD, *CHANGES], ids=lambda c: c.what)
def test_a_change_of_the_reference_s_matrix_stays_within_its_budget(change: Change) -> None:
    assert 0 < reference_cost.executed(change) <= change.limit
