"""`plan --github`: what changed, and how it is put into jobs."""

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Any, get_args

import pytest

from imagebuild import __main__
from imagebuild.build import Build, group_builds, job_matrix
from imagebuild.core import ConfigError, Platform
from imagebuild.project import Plan, Project
from tests.conftest import Files

Jobs = Callable[..., tuple[list[str], str]]
ALL = [f"tiny-cuda{end}" for end in ("12.9-debian13-runtime", "13.0-debian13-runtime", "13.0-debian13-devel")]


@pytest.fixture
def jobs(tiny: Files, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Jobs:
    """`targets` of the jobs, and what is printed beside them. The state before is a copy of the project."""
    monkeypatch.chdir(tiny.root)
    tiny.write("dockerfiles/components/library/checks/loads.sh", "true\n")
    tiny.replace("dockerfiles/components/library/component.yaml", "license: MIT", "license: MIT\nchecks: "
                 "[{name: loads, description: it loads}]")  # fmt: skip
    shutil.copytree(tiny.root, tiny.root.parent / f"{tiny.root.name}-before")

    def run(*arguments: str, since: str | None = f"../{tiny.root.name}-before") -> tuple[list[str], str]:
        more = ("--changed-since", since) if since else ()
        monkeypatch.setattr(sys, "argv", ["imagebuild", "plan", "--github", *more, *arguments])
        _main()
        printed = capsys.readouterr()
        return [entry["targets"] for entry in json.loads(printed.out)["include"]], printed.err

    return run


def _main() -> None:
    try:
        __main__.main()
    except SystemExit as end:
        assert not end.code  # noqa: PT017 - the status


def test_nothing_changed(jobs: Jobs) -> None:
    found, said = jobs()
    assert found == []
    assert said.startswith("0 of 3 targets differ from")


def test_from_nothing_everything_changed(jobs: Jobs) -> None:
    found, said = jobs(since="nothing")
    assert (found, said) == (ALL, "3 of 3 targets differ from nothing: 3 new\n")
    assert jobs(since=None) == (ALL, "")
    assert jobs("cuda=13.0", since="nothing")[0] == ALL[1:]


@pytest.mark.parametrize(
    ("file", "old", "new", "found", "why"),
    [
        ("matrix.yaml", 'cuda: ["12.9", "13.0"]', 'cuda: ["12.9", "13.0", "13.1"]',
         ["tiny-cuda13.1-debian13-runtime", "tiny-cuda13.1-debian13-devel"], "2 new"),
        ("matrix.yaml", 'library: "1.2"', 'library: [{when: {cuda: "13.0"}, version: "1.3"}, "1.2"]',
         ALL[1:], "2 image"),
        ("imagebuild.lock", "b" * 40, "c" * 40, ALL, "3 image"),
        ("dockerfiles/components/library/checks/loads.sh", "true", "false || true", ALL, "3 checks"),
        ("dockerfiles/components/library/component.yaml", "it loads", "it is loaded", ALL, "3 checks"),
        ("matrix.yaml", "    tags:", "    size-limit-mb: {runtime: 3}\n    tags:", ALL, "3 checks"),
        ("matrix.yaml", 'variant}"]', 'variant}"]\n    aliases: [{tag: "{repository}/{image}:latest", when: {variant: devel}}]',
         ALL[2:], "1 tags"),
        # What is written about a component is no part of an image.
        ("dockerfiles/components/tool/component.yaml", "title: Tool", "title: A tool", [], ""),
        ("dockerfiles/components/tool/build.j2", "FROM {{ base }}", "# Now a tool.\nFROM {{ base }}", [], ""),
    ],
)  # fmt: skip
def test_what_differs(jobs: Jobs, tiny: Files, file: str, old: str, new: str, found: list[str], why: str) -> None:
    tiny.replace(file, old, new)
    targets, said = jobs()
    assert targets == found
    assert said.strip().rpartition("-before")[2] == (f": {why}" if why else ""), said


def test_a_platform_more_makes_a_target_differ_on_all(jobs: Jobs, tiny: Files) -> None:
    tiny.replace("matrix.yaml", "platforms: [linux/amd64]", "platforms: [linux/amd64, linux/arm64]")
    tiny.replace("matrix.yaml", "linux/amd64: here", "linux/amd64: here, linux/arm64: [self-hosted, arm]")
    found, said = jobs()
    # Publishing makes an index of all platforms, so all are built.
    assert found == [target for target in ALL for _ in range(2)]
    assert said.startswith("3 of 3 targets differ")
    assert said.strip().endswith(": 3 new")
    assert jobs("--platform", "linux/amd64")[0] == []


def test_a_state_that_this_version_cannot_read_counts_as_nothing(jobs: Jobs, tiny: Files) -> None:
    before = Files(tiny.root.parent / "old")
    before.replace("matrix.yaml", "repository:", "repositry:")
    found, said = jobs(since="../old")
    assert found == ALL
    assert "everything counts as changed" in said
    assert "repositry: unknown key" in said


def test_jobs_have_a_runner_that_the_matrix_names() -> None:
    (entry,) = job_matrix([[("a", "linux/arm64")]], {"linux/arm64": ("self-hosted", "arm")})["include"]
    assert entry == {
        "name": "a arm64", "id": "a-arm64", "targets": "a", "platform": "linux/arm64", "runner": ["self-hosted", "arm"],
    }  # fmt: skip
    with pytest.raises(ConfigError, match="no runner for linux/arm64; add its label"):
        job_matrix([[("a", "linux/arm64")]], {"linux/amd64": ("here",)})


BUILDS: list[Build] = [(f"t{i:03}", platform) for i in range(500) for platform in get_args(Platform)]


def family(build: Build) -> frozenset[str]:
    """Seven targets share a compiler's output, all of a platform another."""
    target, platform = build
    return frozenset({platform, f"{platform} {int(target[1:]) % 70}"})


def compiled_in(groups: Sequence[Sequence[Build]]) -> int:
    """How often runners compile: each once what any of its builds needs."""
    return sum(len(frozenset().union(*map(family, group))) for group in groups)


@pytest.mark.parametrize("most", [2, 7, 256, 999, 1000])
def test_groups_hold_every_build_once_and_one_platform_each(most: int) -> None:
    groups = group_builds(BUILDS, most, family)
    assert len(groups) <= most
    assert sorted(build for group in groups for build in group) == sorted(BUILDS)
    assert all(len({platform for _, platform in group}) == 1 for group in groups)


def test_builds_that_compile_the_same_are_neighbours() -> None:
    groups = group_builds(BUILDS, 256, family)
    assert groups == group_builds(BUILDS, 256, family)
    # 140 families: each is compiled on one runner, or on two where it is cut; and what all share by each runner.
    assert compiled_in(groups) <= 140 + 2 * len(groups)
    assert compiled_in(groups) < compiled_in([BUILDS[i : i + 4] for i in range(0, 1000, 4)]) * 0.6


def test_fewer_jobs_than_platforms_are_a_mistake() -> None:
    with pytest.raises(ConfigError, match="there are 2"):
        group_builds(BUILDS, 1, family)


def test_few_builds_are_not_asked_what_they_compile() -> None:
    assert group_builds(BUILDS[:2], 2, lambda _: pytest.fail("asked")) == [[BUILDS[0]], [BUILDS[1]]]


def test_the_matrix_of_the_project(full_plan: Plan, project: Project) -> None:
    runners = project.matrix.model.github_runners
    builds = [(t.id, p) for t in full_plan.targets for p in t.platforms]
    entries: list[dict[str, Any]] = job_matrix([[b] for b in builds], runners)["include"]
    assert len({entry["id"] for entry in entries}) == len(builds)
    assert {(e["platform"], e["runner"]) for e in entries} == {
        ("linux/amd64", "ubuntu-24.04"), ("linux/arm64", "ubuntu-24.04-arm"),
    }  # fmt: skip
