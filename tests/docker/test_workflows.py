"""The workflows, run here: every shell step for real, against the engine and a registry; see `tests.actions.standins`."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from tests.actions.runner import Event, Run
from tests.actions.standins import World
from tests.conftest import ROOT
from tests.docker.conftest import REPOSITORY, Tiny

pytestmark = pytest.mark.docker

RUNTIME, DEVEL = (f"tiny-cuda13.0-debian13-{variant}" for variant in ("runtime", "devel"))


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    return subprocess.run(["git", "-C", folder, *who, *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout


@pytest.fixture
def origin(tmp_path: Path, environ: dict[str, str]) -> Tiny:
    """A small project with our workflows, in git."""
    project = Tiny(tmp_path / "origin", environ)
    project.replace("matrix.yaml", 'cuda: ["12.9", "13.0"]', 'cuda: ["13.0"]')
    project.replace("matrix.yaml", "platforms: [linux/amd64, linux/arm64]", "platforms: [linux/amd64]")
    project.replace(
        "matrix.yaml", '{variant}"]', '{variant}-{revision}"]\n    aliases: ["{repository}/{image}:{variant}"]'
    )
    project.write("matrix.yaml", (project.root / "matrix.yaml").read_text() + "github-runners: {linux/amd64: here}\n")
    project.write(".gitignore", "build/\n.venv/\nsite/\nresults/\n")
    shutil.copytree(ROOT / ".github", project.root / ".github")
    git(project.root, "init", "--quiet", "--initial-branch", "main")
    commit(project, "first")
    return project


def commit(project: Tiny, message: str) -> str:
    git(project.root, "add", ".")
    git(project.root, "commit", "--quiet", "--message", message)
    return git(project.root, "rev-parse", "HEAD").strip()


Start = Callable[..., Run]


@pytest.fixture
def start(origin: Tiny, registry: str, tmp_path: Path) -> Start:
    """Run a workflow as an event would start it, as a runner of its own that has nothing of another."""
    variables = {"IMAGEBUILD_REGISTRY": f"{registry}/{REPOSITORY}", "IMAGEBUILD_TARGETS": "tiny"}
    runs: list[World] = []

    def run(workflow: str, event: str, last: str = "", **more: Any) -> tuple[Run, World]:
        world = World(tmp_path / f"run{len(runs)}", origin.root, {**origin.environ, "STANDIN_LAST": last})
        runs.append(world)
        made = Run(origin.root, world, Event(event, variables={**variables, **more.pop("variables", {})}, **more))
        made.workflow(workflow)
        return made, world

    return run


def log(run: Run) -> str:
    return "\n".join(f"## {name} {job.result}\n{job.log}" for name, jobs in run.jobs.items() for job in jobs)


def tags(registry: str, image: str) -> set[str]:
    with urlopen(f"http://{registry}/v2/{REPOSITORY}/{image}/tags/list") as answer:
        return set(json.load(answer)["tags"])


def test_images_from_a_push_to_the_catalog(start: Start, origin: Tiny, registry: str) -> None:
    run, world = start("images.yml", "push")
    print(log(run))
    print(world.calls)
    results: Mapping[str, str] = {name: run.result(name) for name in run.jobs}
    assert results == {
        "plan": "success", "check": "skipped", "build": "success", "gpu": "skipped", "publish": "success",
        "catalog/make": "success", "catalog/deploy": "success", "catalog": "success",
    }  # fmt: skip
