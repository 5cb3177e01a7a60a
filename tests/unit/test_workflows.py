"""The workflows: permissions, triggers, pinned versions, and correct shell code."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import ROOT, ran
from tests.unit.conftest import Call


def load(path: Path) -> dict[str, Any]:
    """Read a workflow or an action. PyYAML reads the key `on` as true, so it is renamed."""
    found = yaml.safe_load(path.read_text())
    return {("on" if key is True else key): value for key, value in found.items()}


WORKFLOWS = {path.name: load(path) for path in sorted((ROOT / ".github/workflows").glob("*.yml"))}
ACTION = load(ROOT / ".github/actions/setup/action.yml")
JOBS = [(file, name, job) for file, found in WORKFLOWS.items() for name, job in found["jobs"].items()]


STEPS = [step for found in [*(job for *_, job in JOBS), ACTION["runs"]] for step in found.get("steps", [])]
SHELL = [step["run"] for step in STEPS if "run" in step]


def test_actions_are_pinned_by_commit_and_say_their_version() -> None:
    pins: dict[str, set[str]] = {}
    for file in (ROOT / ".github").rglob("*.yml"):
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
    # These triggers run contributions of others with the secrets of this repository.
    assert not {"pull_request_target", "workflow_run", "issue_comment"} & set(found["on"])
    for name, job in found["jobs"].items():
        assert job["permissions"], name
        assert "uses" in job or 0 < job["timeout-minutes"] <= 350, name


def needs(job: dict[str, Any]) -> list[str]:
    found = job.get("needs", [])
    return [found] if isinstance(found, str) else found


def for_main_only(jobs: dict[str, Any], name: str) -> bool:
    """Return whether the job, or a job that it needs, runs only on the main branch."""
    condition = jobs[name].get("if", "")
    return "github.ref == 'refs/heads/main'" in condition or any(
        for_main_only(jobs, needed) and f"needs.{needed}.result != 'skipped'" in condition
        for needed in needs(jobs[name])
    )


def test_a_pull_request_can_write_nothing_and_has_no_secret() -> None:
    ran = set()
    for file, name, job in JOBS:
        if "pull_request" in WORKFLOWS[file]["on"] and not for_main_only(WORKFLOWS[file]["jobs"], name):
            ran.add(name)
            assert set(job["permissions"].values()) == {"read"}, f"{file}: {name}"
            assert "environment" not in job
            assert "secrets." not in str(job)
            assert "uses" not in job
            # Code of pull requests runs only on GitHub's machines.
            builders = [step.get("with", {}).get("builder") for step in job["steps"]]
            assert "vars." not in f"{job.get('runs-on')} {builders}"
    assert ran == {"lint", "unit", "browser", "docker", "plan", "check"}


@pytest.mark.programs
def test_shell_is_clean() -> None:
    checker = Path(sys.executable).with_name("shellcheck")
    files = [ROOT / ".github" / name for name in ("plan", "propose", "scan")]
    for pattern in ("bundle/*", "slurm/enter", "standins/*", "workflows/*"):
        files += ROOT.glob(f"tests/data/{pattern}")
    programs = [path.read_text() for path in files]
    assert not [script for script in SHELL if "${{" in script], "values come from the step's `env`"
    for script in [*SHELL, *programs]:
        text = script if script.startswith("#!") else f"#!/usr/bin/env bash\nset -eo pipefail\n{script}"
        done = ran(checker, "--exclude=SC2153,SC2154", "-", input=text)
        assert not done.returncode, f"{script}\n{done.stdout}"


@pytest.mark.programs
def test_zizmor_finds_nothing() -> None:
    program = Path(sys.executable).with_name("zizmor")
    done = ran(program, "--offline", "--quiet", "--no-progress", ROOT / ".github")
    assert not done.returncode, done.stdout + done.stderr


def starts(paths: list[str], file: str) -> bool:
    """Return whether a changed file matches one of GitHub's path patterns. Supports only the patterns that we use."""
    return any(fnmatchcase(file, pattern.replace("/**", "/*")) for pattern in paths)


def test_images_are_built_when_what_they_are_made_from_changes() -> None:
    found = WORKFLOWS["images.yml"]["on"]
    paths = found["push"]["paths"]
    assert paths == found["pull_request"]["paths"]
    assert all((ROOT / pattern.partition("*")[0]).exists() for pattern in paths), "a path that is not there"
    needed = ("requirements.txt", "plan", "scan", "workflows/build.yml")
    assert {f".github/{name}" for name in needed} <= set(paths)
    inputs = [p for p in (ROOT / "dockerfiles").rglob("*") if p.is_file()]
    inputs += [*(ROOT / "imagebuild").rglob("*.py"), *(ROOT / ".github/actions").rglob("*.yml")]
    inputs += [ROOT / name for name in ("matrix.yaml", "imagebuild.lock", "scan-policy.yaml", "pyproject.toml")]
    for path in inputs:
        assert starts(paths, str(path.relative_to(ROOT))), path
    for name in ("README.md", "docs/ci.md", "tests/conftest.py", "profiles/h100.yaml", ".github/workflows/ci.yml"):
        assert not starts(paths, name)


def test_expressions_name_what_is_there(command: Call) -> None:
    """GitHub replaces unknown names by an empty text."""
    _, printed, _ = command("ci-matrix", "quickstart", "--changed-since", "nothing")
    entry = json.loads(printed)["include"][0]
    for file, name, job in JOBS:
        text, jobs = json.dumps(job), WORKFLOWS[file]["jobs"]
        for needed, output in re.findall(r"needs\.(\w+)\.outputs\.(\w+)", text):
            assert output in jobs[needed]["outputs"], f"{file}: {name}"
        assert set(re.findall(r"needs\.(\w+)", text)) <= set(needs(job)), f"{file}: {name}"
        assert set(re.findall(r"steps\.(\w+)", text)) <= {step.get("id") for step in job.get("steps", [])}, name
        assert set(re.findall(r"matrix\.(\w+)", text)) <= set(entry), f"{file}: {name}"
        given = inputs(WORKFLOWS[file])
        assert set(re.findall(r"inputs\.(\w+)", text)) <= set(given), f"{file}: {name}"
        if "uses" in job:
            assert job["uses"].startswith("./")
            called = WORKFLOWS[Path(job["uses"]).name]
            wanted = {key for key, value in inputs(called).items() if value.get("required")}
            assert wanted <= set(job["with"]) <= set(inputs(called)), f"{file}: {name}"
            # GitHub does not start a workflow if a called job needs more permissions than its caller has.
            for asking in called["jobs"].values():
                assert asking["permissions"].items() <= job["permissions"].items() | {("packages", "read")}, (
                    f"{file}: {name}"
                )


def inputs(workflow: dict[str, Any]) -> dict[str, dict[str, Any]]:
    triggers = workflow["on"]
    given = triggers.get("workflow_dispatch") or triggers.get("workflow_call") or {}
    return dict(given.get("inputs", {}))


def test_what_signs_and_pushes_runs_what_is_pinned_by_hash() -> None:
    """Each dependency is pinned to a version that pyproject.toml permits. The file names no package index."""
    text = (ROOT / ".github/requirements.txt").read_text()
    assert "://" not in text
    assert "--index" not in text
    pinned = {}
    for entry in text.replace("\\\n", " ").splitlines():
        requirement, *hashes = entry.split()
        name, _, version = requirement.partition("==")
        assert version
        assert hashes
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", item) for item in hashes), name
        pinned[canonicalize_name(name)] = version
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = document["project"]["optional-dependencies"]
    for text in (*document["project"]["dependencies"], *extras["report"], *extras["sbom"], "hatchling"):
        wanted = Requirement(text)
        assert wanted.specifier.contains(pinned[canonicalize_name(wanted.name)]), text
    assert "--require-hashes" in (ROOT / "Makefile").read_text()
