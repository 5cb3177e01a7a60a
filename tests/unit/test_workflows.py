"""What the workflows may do, when they start, and that their shell is clean."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from tests.actions.expressions import Scope, Unknown, condition, evaluate, filled
from tests.actions.runner import load
from tests.conftest import ROOT

WORKFLOWS = {path.name: load(path) for path in sorted((ROOT / ".github/workflows").glob("*.yml"))}
ACTION = load(ROOT / ".github/actions/setup/action.yml")
JOBS = [(file, name, job) for file, found in WORKFLOWS.items() for name, job in found["jobs"].items()]
FILES = [*(ROOT / ".github/workflows").glob("*.yml"), ROOT / ".github/actions/setup/action.yml"]


def steps() -> Iterator[tuple[str, dict[str, Any]]]:
    for file, name, job in JOBS:
        yield from ((f"{file}: {name}", step) for step in job.get("steps", []))
    yield from (("setup", step) for step in ACTION["runs"]["steps"])


STEPS = list(steps())
SHELL = [(where, step["run"]) for where, step in STEPS if "run" in step]


def test_actions_are_pinned_by_commit_and_say_their_version() -> None:
    pins: dict[str, set[str]] = {}
    for file in FILES:
        for line in file.read_text().splitlines():
            if (used := re.search(r"uses: (\S+)(.*)", line)) and not used[1].startswith("./"):
                name, _, commit = used[1].partition("@")
                assert re.fullmatch(r"[0-9a-f]{40}", commit), line
                assert re.fullmatch(r" # v\d+\.\d+\.\d+", used[2]), line
                pins.setdefault(name, set()).add(used[1] + used[2])
    assert len(pins) > 4
    assert all(len(found) == 1 for found in pins.values()), pins


@pytest.mark.parametrize("file", WORKFLOWS)
def test_nothing_is_permitted_that_a_job_does_not_ask_for(file: str) -> None:
    found = WORKFLOWS[file]
    assert found["permissions"] == {}
    assert found["concurrency"]
    assert found["defaults"] == {"run": {"shell": "bash"}}
    # These run with the secrets of this repository on what others send.
    assert not {"pull_request_target", "workflow_run", "issue_comment"} & set(found["on"])
    for name, job in found["jobs"].items():
        assert job["permissions"], name
        assert "uses" in job or 0 < job["timeout-minutes"] <= 350, name


def test_a_called_workflow_is_permitted_what_its_jobs_ask_for() -> None:
    # GitHub refuses to start the run otherwise, also where the job would be skipped.
    for _, name, job in JOBS:
        if "uses" in job:
            for inner in WORKFLOWS[Path(job["uses"]).name]["jobs"].values():
                for what, level in inner["permissions"].items():
                    assert job["permissions"].get(what) in (level, "write"), f"{name}: {what}"


def test_a_pull_request_can_write_nothing_and_has_no_secret() -> None:
    event = {"pull_request": {"base": {"sha": "0" * 40}}}
    contexts = {
        "github": {"event_name": "pull_request", "ref": "refs/pull/7/merge", "event": event},
        "vars": {"IMAGEBUILD_GPU_GROUP": "gpus"}, "inputs": {},
        "needs": {
            "plan": {"outputs": {"matrix": '{"include": [{}]}'}, "result": "success"},
            **{name: {"result": "skipped", "outputs": {}} for name in ("build", "gpu", "publish")},
        },
    }  # fmt: skip
    ran = []
    for file, name, job in JOBS:
        if "pull_request" in WORKFLOWS[file]["on"] and condition(job.get("if"), Scope(contexts)):
            ran.append(name)
            assert set(job["permissions"].values()) == {"read"}, f"{file}: {name}"
            assert "environment" not in job
            assert "secrets." not in str(job)
            # Nobody's code runs on machines of our own.
            assert "vars." not in str(job.get("runs-on")) + str(job["steps"][1].get("with", {}).get("builder"))
    assert {"lint", "unit", "browser", "docker", "plan", "check"} == set(ran)


@pytest.mark.parametrize("where", [where for where, step in STEPS if "checkout" in step.get("uses", "")])
def test_no_checkout_leaves_its_token_behind(where: str) -> None:
    found = [step["with"] for at, step in STEPS if at == where and "checkout" in step.get("uses", "")]
    assert [options["persist-credentials"] for options in found] == [False]


@pytest.mark.parametrize(("where", "script"), SHELL)
def test_shell_is_short_and_takes_values_from_its_environment_only(where: str, script: str) -> None:
    assert "${{" not in script
    assert len(script.splitlines()) <= 6


@pytest.mark.programs
def test_shell_is_clean() -> None:
    checker = Path(sys.executable).with_name("shellcheck")
    for script in [*(script for _, script in SHELL), (ROOT / ".github/propose").read_text()]:
        text = script if script.startswith("#!") else f"#!/usr/bin/env bash\nset -eo pipefail\n{script}"
        # Variables come from the step's `env`.
        done = subprocess.run(
            [checker, "--exclude=SC2153,SC2154", "-"], input=text, capture_output=True, text=True, check=False
        )
        assert not done.returncode, f"{script}\n{done.stdout}"


@pytest.mark.programs
def test_zizmor_finds_nothing() -> None:
    program = Path(sys.executable).with_name("zizmor")
    done = subprocess.run(
        [program, "--offline", "--quiet", "--no-progress", ROOT / ".github"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stdout + done.stderr


def starts(paths: list[str], file: str) -> bool:
    """As GitHub matches paths, for the patterns that we use."""
    return any(fnmatchcase(file, pattern.replace("/**", "/*")) for pattern in paths)


def test_images_are_built_when_what_they_are_made_from_changes() -> None:
    found = WORKFLOWS["images.yml"]["on"]
    paths = found["push"]["paths"]
    assert paths == found["pull_request"]["paths"]
    assert all((ROOT / pattern.partition("*")[0]).exists() for pattern in paths), "a path that is not there"
    inputs = [p for p in (ROOT / "dockerfiles").rglob("*") if p.is_file()]
    inputs += [*(ROOT / "imagebuild").rglob("*.py"), *(ROOT / ".github/actions").rglob("*.yml")]
    inputs += [ROOT / name for name in ("matrix.yaml", "imagebuild.lock", "scan-policy.yaml", "pyproject.toml")]
    for path in inputs:
        assert starts(paths, str(path.relative_to(ROOT))), path
    for name in ("README.md", "docs/ci.md", "tests/conftest.py", "profiles/h100.yaml", ".github/workflows/ci.yml"):
        assert not starts(paths, name)


def test_every_action_input_is_declared() -> None:
    for where, step in STEPS:
        if step.get("uses") == "./.github/actions/setup":
            assert set(step.get("with", {})) <= set(ACTION["inputs"]), where


CONTEXTS = {
    "github": {"ref": "refs/heads/main", "event": {}}, "vars": {"A": "a"}, "matrix": {"include": [1]}, "steps": {},
}  # fmt: skip


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("github.ref == 'refs/heads/Main'", True),  # GitHub ignores case
        ("github.ref != 'refs/heads/main'", False),
        ("vars.A || 'b'", "a"),
        ("vars.B || 'b'", "b"),
        ("vars.B && 'b' || 'c'", "c"),
        ("vars.A != '' && !cancelled()", True),
        ("format('ghcr.io/{0}/{1}', vars.A, 'it''s')", "ghcr.io/a/it's"),
        ("fromJSON('{\"include\": [{}]}').include[0] != null", True),
        ("fromJSON('{\"include\": []}').include[0] != null", False),
        ("github.event.pull_request.base.sha", None),
        ("(true && false) || 1 == 1", True),
    ],
)
def test_expressions(expression: str, value: object) -> None:
    assert evaluate(expression, Scope(CONTEXTS)) == value


@pytest.mark.parametrize(
    "expression",
    [
        "gihub.ref",
        "github.reff",
        "steps.plan",
        "hashFiles('x')",
        "vars.A ==",
        "vars.A 'b'",
        "1 < 2",
        "vars.A || needs.x",
    ],
)
def test_what_is_not_known_is_an_error(expression: str) -> None:
    with pytest.raises(Unknown):
        evaluate(expression, Scope(CONTEXTS))


def test_values_with_expressions_in_them() -> None:
    assert filled({"a": ["${{ vars.A }}-${{ vars.B }}"], "b": "${{ matrix.include }}"}, Scope(CONTEXTS)) == {
        "a": ["a-"], "b": [1],
    }  # fmt: skip
    assert not condition("vars.A == 'a'", Scope(CONTEXTS, ok=False))
    assert condition("${{ !cancelled() && vars.A == 'a' }}", Scope(CONTEXTS, ok=False))
