"""The shell steps of the workflows, run on a small project with an engine and a registry.

The tests do GitHub's part: they set variables, choose the order of jobs, and replace actions and programs.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import yaml

from imagebuild.oci.attestation import read_attestations
from imagebuild.oci.layout import manifests_of
from imagebuild.oci.registry import connect_registry
from tests.conftest import LOCK, ROOT, git, ran
from tests.docker.conftest import COMPONENT, REPOSITORY, STAGE, Tiny
from tests.upstream.keys import CUDA, Keys
from tests.upstream.server import Server

pytestmark = pytest.mark.docker

RUNTIME, DEVEL = (f"tiny-cuda13.0-debian13-{variant}" for variant in ("runtime", "devel"))
PROGRAMS = ROOT / "tests/data/workflows"
"""The folder with stand-ins for programs of GitHub's machines."""


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


@dataclass
class Machine:
    """A stand-in for GitHub's machines. Each job runs in a new clone of the project; jobs share artifacts."""

    origin: Tiny
    folder: Path
    registry: str
    outputs: dict[str, str] = field(default_factory=dict)
    """The step outputs of the last job."""
    handed: dict[str, dict[str, str]] = field(default_factory=dict)
    """Maps each job that handed results over to its output."""
    rendered: str = ""
    """The last output `rendered`."""

    def __post_init__(self) -> None:
        self.folder.mkdir()
        self.environ = {
            **self.origin.environ,
            "PATH": f"{PROGRAMS}:{self.origin.environ['PATH']}",
            "REAL_DOCKER": shutil.which("docker") or "",
            "STANDIN_LOG": str(self.folder / "calls"),
            "STANDIN_PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
            "DOCKER_CONFIG": str(self.folder / "docker"),
            "RUNNER_TEMP": str(self.folder),
            "STANDIN_FOUND": "/dev/null",
            "GITHUB_SERVER_URL": "https://github.test",
            "GITHUB_REPOSITORY": "acme/images",
            "GITHUB_WORKFLOW_REF": "acme/images/.github/workflows/images.yml@refs/heads/main",
        }

    @property
    def calls(self) -> str:
        """Return the recorded command lines of all stand-ins, from all jobs."""
        return (self.folder / "calls").read_text()

    def job(self, file: str, name: str, *, fails: str = "", **values: str) -> Path:
        """Run the shell steps of a job with these values of variables; return its folder.

        `fails` is the name of the step that must fail. Empty: all steps must pass.
        """
        workflow = load(ROOT / ".github/workflows" / file)
        job = workflow["jobs"][name]
        values = {"WHERE": f"{self.registry}/{REPOSITORY}", "LOGIN": "somebody", "PASSWORD": "x", "GH_TOKEN": "x",
                  "OPTIONS": "--driver docker-container", "BASES": "bootstrap", **values}  # fmt: skip
        values = {"ROW": "0", "ARTIFACT": "1", "HANDED": json.dumps(self.handed), "RENDERED": self.rendered,
                  "OWN": "acme/images", **values}  # fmt: skip
        work = self.folder / f"{name}-{len(list(self.folder.iterdir()))}"
        git(self.folder, "clone", "--quiet", f"file://{self.origin.root}", str(work))
        environ, failed = dict(self.environ), ""
        self.outputs = {}
        steps: list[dict[str, Any]] = []
        for step in job["steps"]:
            own = step.get("uses") == "./.github/actions/setup"
            steps += load(ROOT / ".github/actions/setup/action.yml")["runs"]["steps"] if own else [step]
        for step in steps:
            condition = step.get("if", "")
            asked = re.match(r"steps\.\w+\.outputs\.(\w+) == '(\w+)'", condition)
            if (asked and self.outputs.get(asked[1]) != asked[2]) or (failed and "cancelled()" not in condition):
                continue
            if "run" not in step:
                self._action(step["uses"], step.get("with", {}), work)
                continue
            files = {variable: work / f".{variable}" for variable in ("GITHUB_ENV", "GITHUB_PATH", "GITHUB_OUTPUT")}
            for path in files.values():
                path.write_text("")
            wanted = {**workflow.get("env", {}), **job.get("env", {}), **step.get("env", {})}
            given = {"ACTION": str(work / ".github/actions/setup"), **{v: values[v] for v in wanted if v != "ACTION"}}
            given |= {variable: str(path) for variable, path in files.items()}
            shell, title = ("bash", "-eo", "pipefail", "-c", step["run"]), step.get("name", step["run"])
            done = ran(*shell, cwd=work, env={**environ, **given}, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT)
            sys.stdout.write(f"## {name}: {title}: {done.returncode}\n{done.stdout}")
            failed = failed or (title if done.returncode else "")
            lines = {variable: path.read_text().splitlines() for variable, path in files.items()}
            environ |= dict(line.split("=", 1) for line in lines["GITHUB_ENV"])
            environ["PATH"] = os.pathsep.join([*lines["GITHUB_PATH"], environ["PATH"]])
            self.outputs |= dict(line.split("=", 1) for line in lines["GITHUB_OUTPUT"])
        assert failed == fails
        self.rendered = self.outputs.get("rendered", self.rendered)
        if "r0" in self.outputs:
            self.handed = {name: {"r0": self.outputs["r0"]}}
        return work

    def _action(self, action: str, options: dict[str, str], work: Path) -> None:
        artifacts = self.folder / "artifacts"
        if "/upload-artifact@" in action:
            shutil.rmtree(artifacts, ignore_errors=True)  # one artifact at a time, so no test needs ids
            for pattern in options["path"].split():
                for found in (file for place in work.glob(pattern) for file in (place, *place.rglob("*"))):
                    if found.is_file():  # without the first folder, as upload-artifact does
                        name, path = re.sub(r"\W+", "-", options["name"]), Path(*found.relative_to(work).parts[1:])
                        (artifacts / name / path).parent.mkdir(parents=True, exist_ok=True)
                        shutil.copyfile(found, artifacts / name / path)
        elif "/download-artifact@" in action:
            (artifact,) = artifacts.iterdir()
            place = work / options["path"].replace("${{ runner.temp }}", str(self.folder))
            shutil.copytree(artifact, place, dirs_exist_ok=True)


@pytest.fixture
def origin(tmp_path: Path, environ: dict[str, str]) -> Tiny:
    """Return a small project in Git with our workflows."""
    project = Tiny(tmp_path / "origin", environ)
    project.replace("matrix.yaml", 'cuda: ["12.9", "13.0"]', 'cuda: ["13.0"]')
    project.replace("matrix.yaml", "platforms: [linux/amd64, linux/arm64]", "platforms: [linux/amd64]")
    project.replace(
        "matrix.yaml", '{variant}"]', '{variant}-{revision}"]\n    aliases: ["{repository}/{image}:{variant}"]'
    )
    project.write(".gitignore", "build/\n.venv/\nsite/\nresults/\n.GITHUB_*\n")
    shutil.copytree(ROOT / ".github", project.root / ".github")
    git(project.root, "init", "--quiet", "--initial-branch", "main")
    commit(project, "first")
    return project


def commit(project: Tiny, message: str) -> str:
    git(project.root, "add", ".")
    git(project.root, "commit", "--quiet", "--message", message)
    return git(project.root, "rev-parse", "HEAD")


@pytest.fixture
def machine(origin: Tiny, registry: str, tmp_path: Path) -> Machine:
    return Machine(origin, tmp_path / "machine", registry)


def planned(machine: Machine, **values: str) -> list[dict[str, str]]:
    """Run the job `plan` of a pull request or of main; return its matrix."""
    usual = {"BASE": "", "GIVEN": "", "TARGETS": "tiny", "JOBS": "256", "GPU": "linux/arm64"}
    machine.job("images.yml" if "BASE" in values else "build.yml", "plan", **usual | values)
    entries: list[dict[str, str]] = json.loads(machine.outputs["matrix"])["include"]
    return entries


def tags(registry: str) -> dict[str, str]:
    """Map tags to digests, including the tags of attestations in this registry."""
    place = connect_registry(registry).at(f"{REPOSITORY}/tiny")
    return {tag: str(place.digest(tag)) for tag in place.tags()}


def build(machine: Machine, row: dict[str, str], day: str = "", fails: tuple[str, str] = ("", "")) -> None:
    """Build, verify and publish one row of the matrix. `fails` are the steps that must fail in the two jobs."""
    targets = {name.upper(): row[name] for name in ("targets", "platform")}
    machine.job("build.yml", "build", fails=fails[0], DAY=day, **targets)
    machine.job("build.yml", "publish", fails=fails[1])


def test_images_from_a_push_to_a_security_update(machine: Machine, origin: Tiny, registry: str, tmp_path: Path) -> None:
    first = git(origin.root, "rev-parse", "HEAD")
    (entry,) = planned(machine, JOBS="1")
    assert entry["name"] == f"{RUNTIME} and 1 more amd64"
    build(machine, entry)
    machine.job("images.yml", "catalog", GH_REPO="x/y")
    published = tags(registry)
    assert {"runtime", "devel", f"13.0-runtime-{first[:7]}", f"13.0-devel-{first[:7]}"} <= set(published)
    assert len(set(published.values())) == 2 + sum(tag.startswith("sha256-") for tag in published)
    docs = machine.folder / "artifacts/docs/index.html"  # stands for the output of `make docs`, which `make lint` tests
    shutil.rmtree(docs.parents[1])
    docs.parent.mkdir(parents=True)
    docs.touch()
    site = machine.job("catalog.yml", "make", ARCHIVE="", SUITE="", KEYRING="") / "site"
    assert (site / "index.html").exists()
    assert (site / "docs/index.html").exists()
    images = json.loads((site / "images.json").read_text())["images"]
    assert {tag for image in images for tag in image["tags"]}
    # The stand-in for cosign accepts its own signatures.
    assert {image["verified_by"] for image in images} == {
        "https://github.test/acme/images/.github/workflows/build.yml@refs/heads/main for acme/images"
    }
    assert "buildx create --name=imagebuild --bootstrap --driver docker-container" in machine.calls
    assert f"login --username=somebody --password-stdin -- {registry}" in machine.calls
    assert "cosign sign --yes" in machine.calls

    # All images are published, so a push builds nothing. Targets that are named by hand are built.
    assert planned(machine) == []
    assert len(planned(machine, GIVEN="tiny")) == 2
    assert json.loads(machine.outputs["gpu"]) == {"include": []}

    # An image whose check fails gets no tag. Existing tags stay.
    check = "checks: [{name: no, description: x, run: exit 1}]\n"
    origin.append("dockerfiles/components/plugin/component.yaml", check)
    commit(origin, "a check that fails")
    (entry,) = planned(machine)
    assert entry["name"] == f"{DEVEL} amd64"
    publishing = "Publish the images that passed, without rendering anything"
    build(machine, entry, fails=("Verify the pushed digests", publishing))
    assert tags(registry) == published
    assert [entry["name"] for entry in planned(machine)] == [f"{DEVEL} amd64"], "what failed is built again, alone"

    # The weekly job: one target is left, and its image needs a rebuild.
    origin.replace("matrix.yaml", "variant: [runtime, devel]", "variant: [runtime]")
    commit(origin, "runtime alone")
    asked = look_for_updates(machine, tmp_path)
    machine.job("build.yml", "attach")
    (entry,) = planned(machine, GIVEN=asked["stale"], TARGETS=asked["stale"])
    build(machine, entry, asked["day"])
    revision, day = git(origin.root, "rev-parse", "HEAD")[:7], f"{datetime.now(UTC):%Y%m%d}"
    before, published = published, tags(registry)
    assert published["runtime"] == published[f"13.0-runtime-{revision}-{day}"] != before["runtime"]
    assert published[f"13.0-runtime-{first[:7]}"] == before["runtime"], "the old tag stays"
    assert planned(machine) == [], "a rebuild is as its commit is"
    place = connect_registry(registry).at(f"{REPOSITORY}/tiny")
    (image,) = manifests_of(place.manifest(before["runtime"]).document)
    assert len([*read_attestations(place, image.digest, "scan")]) == 2, "that of the build, and this week's"


def look_for_updates(machine: Machine, folder: Path) -> dict[str, str]:
    """Run the weekly job with different archives; return the job's outputs that ask for a rebuild."""
    (home := folder / "gnupg").mkdir()
    Keys.make(home)
    keys = Keys(home)
    suite = folder / "server/dists/trixie-security"
    with Server(folder / "server").running() as server:

        def look(version: str, findings: str = "") -> dict[str, str]:
            """Publish this version of libc6 in the archive, and run the weekly job with these scanner findings."""
            index = f"Package: libc6\nVersion: {version}\nArchitecture: amd64\n\n".encode()
            keys.publish(suite, {"main/binary-amd64/Packages.gz": gzip.compress(index)})
            (machine.folder / "found").write_text(findings)
            machine.environ["STANDIN_FOUND"] = str(machine.folder / "found")
            values = {"ARCHIVE": f"http://127.0.0.1:{server.port}", "SUITE": "trixie-security", "TARGETS": "tiny"}
            keyring = str(keys.public / f"{CUDA}.gpg")
            machine.job("build.yml", "look", **values, KEYRING=keyring)
            return machine.outputs

        assert not look("1")["stale"], "nothing is newer"
        assert look("1", FOUND)["stale"], "the scan fails, and the distribution has fixed its finding"
        return look("999")


FOUND = """CVE-2026-0001 (remotely exploitable, high urgency)
  A hole
  installed: libc6 1
             (built from glibc 1)
  fixed in unstable: glibc 2 (source package)
  fix is available for the selected suite
"""


def test_a_pull_request_pushes_nothing(machine: Machine, origin: Tiny, registry: str) -> None:
    base = git(origin.root, "rev-parse", "HEAD")
    origin.replace("matrix.yaml", 'plugin: "3.', 'plugin: "4.')
    commit(origin, "a plugin")
    (entry,) = planned(machine, BASE=base)
    assert entry["name"] == f"{DEVEL} amd64"
    work = machine.job("images.yml", "check", TARGETS=entry["targets"], PLATFORM=entry["platform"])
    with urlopen(f"http://{registry}/v2/_catalog") as answer:
        assert json.load(answer) == {"repositories": []}
    verified = json.loads((work / "build" / DEVEL / "verify.json").read_text())
    assert {check["outcome"] for check in verified["checks"]} == {"passed", "skipped"}


def test_newer_versions_become_one_pull_request(machine: Machine, origin: Tiny, tmp_path: Path) -> None:
    upstream = tmp_path / "tool.git"
    upstream.mkdir()
    git(upstream, "init", "--quiet")
    commits = {}
    for version in ("1.0", "1.1"):
        git(upstream, "commit", "--quiet", "--allow-empty", "--message", version)
        git(upstream, "tag", version)
        commits[version] = git(upstream, "rev-parse", "HEAD")
    address = f"file://{upstream}"
    origin.component("tool", COMPONENT.format(name="tool") + f"git: {address}\n", build=STAGE)
    origin.replace("matrix.yaml", f'tool: "2.{origin.nonce}"', 'tool: "1.0"')
    origin.lock({**LOCK, "git": {f"{address} 1.0": commits["1.0"]}})
    origin.write("docs/images.md", "<!-- images:begin -->\n<!-- images:end -->\n")
    commit(origin, "a tool of git")

    machine.job("update.yml", "bump")
    assert machine.outputs == {"changed": "true"}
    machine.job("update.yml", "propose")
    assert 'tool: "1.1"' in git(origin.root, "show", "update:matrix.yaml")
    assert commits["1.1"] in git(origin.root, "show", "update:imagebuild.lock")
    assert git(origin.root, "rev-list", "--count", "main..update") == "1"
    assert "gh pr create --head=update --base=main --title=Newer\\ versions --body-file=" in machine.calls
    assert "tool" in (machine.folder / "changes/cost.md").read_text()

    # If the pull request is still open a week later, it is updated.
    machine.environ["STANDIN_OPEN"] = "1"
    machine.job("update.yml", "bump")
    machine.job("update.yml", "propose")
    assert "gh pr edit --title=Newer\\ versions" in machine.calls

    # After the merge, nothing is newer, so there is no new pull request.
    git(origin.root, "merge", "--quiet", "update")
    machine.job("update.yml", "bump")
    assert machine.outputs == {}


@pytest.mark.parametrize("delete", ["", "false", "true"])
def test_prune_lists_and_deletes_only_when_told(machine: Machine, delete: str) -> None:
    machine.job("prune.yml", "staging", DELETE=delete)
