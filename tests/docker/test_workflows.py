"""The workflows, run here: every shell step for real, against the engine and a registry; see `tests.actions.standins`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from tests.actions.runner import Event, Run
from tests.actions.standins import World
from tests.conftest import LOCK, ROOT
from tests.docker.conftest import COMPONENT, REPOSITORY, STAGE, Tiny

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


@dataclass
class Ran:
    """A run of a workflow that has ended."""

    run: Run
    world: World

    @property
    def results(self) -> dict[str, str]:
        return {name: self.run.result(name) for name in self.run.jobs}

    def log(self, job: str) -> str:
        return "".join(entry.log for entry in self.run.jobs[job])


@pytest.fixture
def start(origin: Tiny, registry: str, tmp_path: Path) -> Callable[..., Ran]:
    """Run a workflow as an event would start it; runs share nothing but the repository and the registry."""
    variables = {
        "IMAGEBUILD_REGISTRY": f"{registry}/{REPOSITORY}",
        "IMAGEBUILD_TARGETS": "tiny",
        "IMAGEBUILD_BASES": "bootstrap",
    }
    worlds: list[World] = []

    def run(workflow: str, event: str, last: str = "", environ: Mapping[str, str] | None = None, **more: Any) -> Ran:
        said = {**origin.environ, "STANDIN_LAST": last, **(environ or {})}
        world = World(tmp_path / f"run{len(worlds)}", origin.root, said)
        worlds.append(world)
        made = Run(origin.root, world, Event(event, variables={**variables, **more.pop("variables", {})}, **more))
        made.workflow(workflow)
        for name, jobs in made.jobs.items():
            for job in jobs:
                sys.stdout.write(f"## {name}: {job.result}\n{job.log}")  # shown where a test fails
        return Ran(made, world)

    return run


def tags(registry: str, image: str) -> dict[str, str]:
    """Tag → digest."""
    with urlopen(f"http://{registry}/v2/{REPOSITORY}/{image}/tags/list") as answer:
        names = json.load(answer)["tags"] or []
    found = {}
    for name in names:
        accept = {"Accept": "application/vnd.oci.image.index.v1+json, application/vnd.oci.image.manifest.v1+json"}
        with urlopen(Request(f"http://{registry}/v2/{REPOSITORY}/{image}/manifests/{name}", headers=accept)) as answer:
            found[name] = answer.headers["Docker-Content-Digest"]
    return found


BUILT = {
    "plan": "success", "check": "skipped", "build": "success", "gpu": "skipped", "publish": "success",
    "catalog/make": "success", "catalog/deploy": "success", "catalog": "success",
}  # fmt: skip


def test_images_from_a_push_to_the_catalog(start: Callable[..., Ran], origin: Tiny, registry: str) -> None:
    first = git(origin.root, "rev-parse", "HEAD").strip()
    ran = start("images.yml", "push", variables={"IMAGEBUILD_JOBS": "1"})
    assert ran.results == BUILT
    assert "2 builds in 1 jobs" in ran.log("plan")
    assert [job.name for job in ran.run.jobs["build"]] == [f"{RUNTIME} and 1 more amd64"]
    published = tags(registry, "tiny")
    assert {"runtime", "devel", f"13.0-runtime-{first[:7]}", f"13.0-devel-{first[:7]}"} <= set(published)
    assert len(set(published.values())) == 2 + sum(tag.startswith("sha256-") for tag in published)
    assert (ran.world.pages / "index.html").exists()
    assert {
        tag for image in json.loads((ran.world.pages / "images.json").read_text())["images"] for tag in image["tags"]
    }
    assert "buildx create --name imagebuild --bootstrap --driver docker-container" in ran.world.calls
    assert f"login {registry} --username somebody --password-stdin" in ran.world.calls
    assert "cosign sign --yes" in ran.world.calls

    # Nothing changed since the run that succeeded: nothing is built, and nothing is published.
    again = start("images.yml", "push", last=first)
    assert set(again.results.values()) == {"success", "skipped"}
    assert [name for name, result in again.results.items() if result == "success"] == ["plan"]

    # An image whose check fails keeps its digest, and gets no tag; what is there stays.
    component = "dockerfiles/components/plugin/component.yaml"
    origin.write(
        component, (origin.root / component).read_text() + "checks: [{name: no, description: x, run: exit 1}]\n"
    )
    commit(origin, "a check that fails")
    failed = start("images.yml", "push", last=first)
    assert "1 of 2 targets differ" in failed.log("plan")
    assert [job.name for job in failed.run.jobs["build"]] == [f"{DEVEL} amd64"]
    assert failed.results == {**BUILT, "build": "failure", "publish": "failure"}
    assert tags(registry, "tiny") == published


def test_a_pull_request_pushes_nothing(start: Callable[..., Ran], origin: Tiny, registry: str) -> None:
    base = git(origin.root, "rev-parse", "HEAD").strip()
    origin.replace("matrix.yaml", 'plugin: "3.', 'plugin: "4.')
    commit(origin, "a plugin")
    request = {"pull_request": {"base": {"sha": base}}}
    ran = start("images.yml", "pull_request", ref="refs/pull/7/merge", payload=request)
    assert ran.results == {
        "plan": "success", "check": "success", "build": "skipped", "gpu": "skipped", "publish": "skipped",
        "catalog": "skipped",
    }  # fmt: skip
    assert [job.name for job in ran.run.jobs["check"]] == [f"{DEVEL} amd64"]
    with urlopen(f"http://{registry}/v2/_catalog") as answer:
        assert json.load(answer) == {"repositories": []}
    verified = json.loads((ran.world.artifacts / f"checked-{DEVEL}-amd64" / DEVEL / "verify.json").read_text())
    assert {check["outcome"] for check in verified["checks"]} == {"passed", "skipped"}


def test_newer_versions_become_one_pull_request(start: Callable[..., Ran], origin: Tiny, tmp_path: Path) -> None:
    upstream = tmp_path / "tool.git"
    upstream.mkdir()
    git(upstream, "init", "--quiet")
    commits = {}
    for version in ("1.0", "1.1"):
        git(upstream, "commit", "--quiet", "--allow-empty", "--message", version)
        git(upstream, "tag", version)
        commits[version] = git(upstream, "rev-parse", "HEAD").strip()
    address = f"file://{upstream}"
    origin.component("tool", COMPONENT.format(name="tool") + f"git: {address}\n", build=STAGE)
    origin.replace("matrix.yaml", f'tool: "2.{origin.nonce}"', 'tool: "1.0"')
    origin.lock({**LOCK, "git": {address: {"1.0": commits["1.0"]}}})
    origin.write("README.md", "<!-- images:begin -->\n<!-- images:end -->\n")
    commit(origin, "a tool of git")

    ran = start("update.yml", "schedule", variables={})
    assert ran.results == {"bump": "success"}
    assert 'tool: "1.1"' in git(origin.root, "show", "update:matrix.yaml")
    assert commits["1.1"] in git(origin.root, "show", "update:imagebuild.lock")
    assert git(origin.root, "rev-list", "--count", "main..update").strip() == "1"
    assert "gh pr create --head update --base main --title Newer\\ versions --body-file" in ran.world.calls
    body = next((ran.world.root / "bump-0/temp").glob("cost.md")).read_text()
    assert "| tool | 1 of 1 |" in body

    # A week later it is still open: the same one is written anew.
    later = start("update.yml", "schedule", environ={"STANDIN_OPEN": "1"})
    assert later.results == {"bump": "success"}
    assert "gh pr edit update" in later.world.calls
    assert "gh pr create" not in later.world.calls

    # Merged: there is nothing newer, and nobody is asked anything.
    git(origin.root, "merge", "--quiet", "update")
    merged = start("update.yml", "schedule")
    assert merged.results == {"bump": "success"}
    assert "gh " not in merged.world.calls


def test_prune_lists_and_deletes_only_when_told(start: Callable[..., Ran], origin: Tiny, registry: str) -> None:
    listed = start("prune.yml", "schedule")
    assert listed.results == {"staging": "success"}
    assert start("prune.yml", "workflow_dispatch", inputs={"delete": True}).results == {"staging": "success"}
