"""Runs workflows: jobs in their order, matrices, steps of shell. Actions are stand-ins that the world gives."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import yaml

from tests.actions.expressions import Scope, Unknown, condition, filled, text

Result = Literal["success", "failure", "skipped"]


class ActionFailed(Exception):
    """An action says that it failed."""


class Actions(Protocol):
    """What stands in for actions, and where things are."""

    root: Path
    """Below it every job has a folder."""
    environ: Mapping[str, str]
    """Of all steps."""

    def call(self, name: str, options: Mapping[str, Any], workspace: Path) -> dict[str, str]:
        """Do what an action does with its `with`, and return its outputs. Raises ActionFailed."""


@dataclass(frozen=True)
class Event:
    """What starts a workflow."""

    name: str
    ref: str = "refs/heads/main"
    payload: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Job:
    """What became of a job, or of one entry of its matrix."""

    name: str
    result: Result
    outputs: dict[str, str] = field(default_factory=dict)
    log: str = ""


def load(path: Path) -> dict[str, Any]:
    """A workflow or an action. YAML 1.1 takes `on` for a truth value, GitHub does not."""
    found = yaml.safe_load(path.read_text())
    return {("on" if key is True else key): value for key, value in found.items()}


class Run:
    """One run of a workflow of a project."""

    def __init__(self, project: Path, actions: Actions, event: Event) -> None:
        self.project, self.actions, self.event = project, actions, event
        self.jobs: dict[str, list[Job]] = {}
        """Job → its entries; one without a matrix has one. Jobs of a called workflow are `caller/job`."""

    def workflow(self, name: str, prefix: str = "") -> None:
        """Run all jobs of `.github/workflows/<name>`."""
        found = load(self.project / ".github/workflows" / name)
        if prefix:
            assert "workflow_call" in found["on"]
        else:
            assert self.event.name in found["on"], f"{name} does not start on {self.event.name}"
        known = {"name", "on", "permissions", "concurrency", "defaults", "env", "jobs"}
        _only(found, known, name)
        contexts = self._contexts()
        env = {key: text(value) for key, value in filled(found.get("env", {}), Scope(contexts)).items()}
        shell = found["defaults"]["run"]["shell"]
        for job in _ordered(found["jobs"]):
            self.jobs[prefix + job] = self._job(prefix, job, found["jobs"][job], {**contexts, "env": env}, shell)

    def result(self, job: str) -> Result:
        """Of all entries together."""
        results = {entry.result for entry in self.jobs[job]}
        return "failure" if "failure" in results else "success" if "success" in results else "skipped"

    def _contexts(self) -> dict[str, Any]:
        event = self.event
        github = {
            "event_name": event.name, "ref": event.ref, "event": event.payload, "actor": "somebody", "token": "TOKEN",
            "repository": "Acme/images", "repository_owner": "Acme", "workspace": "",
        }  # fmt: skip
        return {
            "github": github, "vars": event.variables, "secrets": event.secrets, "inputs": event.inputs, "needs": {},
        }  # fmt: skip

    def _job(self, prefix: str, name: str, job: dict[str, Any], contexts: dict[str, Any], shell: str) -> list[Job]:
        _only(job, JOB_KEYS, name)
        needs = [job["needs"]] if isinstance(job.get("needs"), str) else job.get("needs", [])
        contexts = {**contexts, "needs": {n: self._outcome(prefix + n) for n in needs}}
        # `env` is not there yet where GitHub decides about jobs.
        early = {key: value for key, value in contexts.items() if key not in ("env", "secrets")}
        scope = Scope(early, ok=all(self.result(prefix + n) == "success" for n in needs))
        if not condition(job.get("if"), scope):
            return [Job(name, "skipped")]
        if "uses" in job:
            self.workflow(Path(job["uses"]).name, prefix=f"{name}/")
            inner = [self.result(key) for key in self.jobs if key.startswith(f"{name}/")]
            return [Job(name, "failure" if "failure" in inner else "success")]
        entries = filled(job.get("strategy", {}).get("matrix", {"include": [{}]}), scope)["include"]
        return [self._entry(name, job, i, {**contexts, "matrix": entry}, shell) for i, entry in enumerate(entries)]

    def _outcome(self, job: str) -> dict[str, Any]:
        outputs = {key: value for entry in self.jobs[job] for key, value in entry.outputs.items()}
        return {"result": self.result(job), "outputs": outputs}

    def _entry(self, name: str, job: dict[str, Any], number: int, contexts: dict[str, Any], shell: str) -> Job:
        folder = self.actions.root / f"{name}-{number}"
        for part in ("work", "temp"):
            (folder / part).mkdir(parents=True)
        early = Scope({key: value for key, value in contexts.items() if key != "env"})
        for key in ("name", "runs-on", "environment"):
            filled(job.get(key) if key != "environment" else None, early)
        own = {key: text(value) for key, value in filled(job.get("env", {}), early).items()}
        contexts = {
            **contexts,
            "env": {**contexts["env"], **own},
            "steps": {},
            "runner": {"temp": str(folder / "temp")},
        }
        run = _Steps(self, folder, contexts, shell)
        run.steps(job["steps"])
        outputs = filled(job.get("outputs", {}), Scope(run.contexts)) if run.ok else {}
        filled((job.get("environment") or "") if run.ok else "", Scope(run.contexts))
        title = text(filled(job.get("name", name), early))
        return Job(title, "success" if run.ok else "failure", outputs, run.log)


JOB_KEYS = {
    "concurrency", "env", "environment", "if", "name", "needs", "outputs", "permissions", "runs-on", "steps", "strategy",
    "timeout-minutes", "uses",
}  # fmt: skip
STEP_KEYS = {"env", "id", "if", "name", "run", "shell", "uses", "with"}


def _only(found: Mapping[str, Any], known: set[str], where: str) -> None:
    if unknown := set(found) - known:
        raise Unknown(f"{where}: {', '.join(sorted(unknown))}")


def _ordered(jobs: Mapping[str, Any]) -> list[str]:
    done: list[str] = []
    while len(done) < len(jobs):
        ready = [
            name
            for name, job in jobs.items()
            if name not in done
            and all(n in done for n in ([job["needs"]] if isinstance(job.get("needs"), str) else job.get("needs", [])))
        ]
        done += ready
        assert ready, "jobs need each other"
    return done


class _Steps:
    """The steps of a job, or of a composite action in it."""

    def __init__(self, run: Run, folder: Path, contexts: dict[str, Any], shell: str | None) -> None:
        self.run, self.folder, self.contexts, self.shell = run, folder, contexts, shell
        self.ok = True
        self.log = ""

    def steps(self, steps: list[dict[str, Any]]) -> None:
        for number, step in enumerate(steps):
            _only(step, STEP_KEYS, str(step))
            scope = Scope(self.contexts, ok=self.ok)
            if not condition(step.get("if"), scope):
                self._remember(step, {}, "skipped")
                continue
            self.log += f"== {step.get('name') or step.get('uses') or step['run']}\n"
            before, self.ok = self.ok, True
            outputs = self._uses(step, scope) if "uses" in step else self._shell(step, scope, number)
            self._remember(step, outputs, "success" if self.ok else "failure")
            self.ok = self.ok and before

    def _remember(self, step: dict[str, Any], outputs: dict[str, str], outcome: Result) -> None:
        if "id" in step:
            known = {"outputs": _Outputs(outputs), "outcome": outcome}
            self.contexts["steps"] = {**self.contexts["steps"], step["id"]: known}

    def _uses(self, step: dict[str, Any], scope: Scope) -> dict[str, str]:
        options = {key: text(value) for key, value in filled(step.get("with", {}), scope).items()}
        work = self.folder / "work"
        if not step["uses"].startswith("./"):
            try:
                return self.run.actions.call(step["uses"].partition("@")[0], options, work)
            except ActionFailed as error:
                self.ok, self.log = False, f"{self.log}{error}\n"
                return {}
        action = load(work / step["uses"] / "action.yml")
        assert action["runs"]["using"] == "composite"
        _only(options, set(action["inputs"]), step["uses"])
        given = {key: options.get(key, value.get("default", "")) for key, value in action["inputs"].items()}
        inner = _Steps(self.run, self.folder, {**self.contexts, "inputs": given, "steps": {}}, None)
        inner.steps(action["runs"]["steps"])
        self.contexts["env"] = inner.contexts["env"]
        self.contexts["path"] = inner.contexts.get("path", [])
        self.ok, self.log = self.ok and inner.ok, self.log + inner.log
        return {}

    def _shell(self, step: dict[str, Any], scope: Scope, number: int) -> dict[str, str]:
        assert (step.get("shell") or self.shell) == "bash"
        own = {key: text(value) for key, value in filled(step.get("env", {}), scope).items()}
        temp = self.folder / "temp"
        files = {name: temp / name for name in ("GITHUB_ENV", "GITHUB_OUTPUT", "GITHUB_PATH")}
        for file in files.values():
            file.write_text("")
        script = temp / f"step{number}.sh"
        script.write_text(filled(step["run"], scope))
        base = self.run.actions.environ
        path = os.pathsep.join([*self.contexts.get("path", []), base["PATH"]])
        environ = {
            **base, "PATH": path, **self.contexts["env"], **own, **{name: str(file) for name, file in files.items()},
            "RUNNER_TEMP": str(temp), "GITHUB_ACTIONS": "true", "CI": "true",
        }  # fmt: skip
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", script], cwd=self.folder / "work", env=environ,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, check=False,
        )  # fmt: skip
        self.log += done.stdout
        self.ok = self.ok and done.returncode == 0
        self.contexts["env"] = {**self.contexts["env"], **_pairs(files["GITHUB_ENV"])}
        self.contexts["path"] = [*files["GITHUB_PATH"].read_text().splitlines(), *self.contexts.get("path", [])]
        return _pairs(files["GITHUB_OUTPUT"])


class _Outputs(dict[str, str]):
    """Outputs of a step: one that it did not set is empty, as on GitHub."""

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: str) -> str:
        return ""


def _pairs(file: Path) -> dict[str, str]:
    lines = file.read_text().splitlines()
    assert all("=" in line for line in lines), f"{file.name}: {lines}: values of several lines are not known here"
    return {key: value for key, _, value in (line.partition("=") for line in lines)}
