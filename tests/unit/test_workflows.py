"""The workflows: permissions, triggers, pinned versions, and correct shell code."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import ROOT, data, ran
from tests.unit.conftest import Call

CASES = data("cases/workflows")


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
            assert not re.search(r"vars\.|fromJSON|matrix\.runner", f"{job.get('runs-on')} {builders}")
    assert ran == {"lint", "unit", "browser", "docker", "plan", "check"}


@pytest.mark.programs
def test_shell_is_clean() -> None:
    checker = Path(sys.executable).with_name("shellcheck")
    files = [ROOT / ".github" / name for name in ("plan", "propose", "scan")]
    for pattern in ("bundle/*", "hostile/standin", "slurm/enter", "standins/*", "workflows/*"):
        files += ROOT.glob(f"tests/data/{pattern}")
    programs = [path.read_text() for path in files]
    assert not [script for script in SHELL if "${{" in script], "values come from the step's `env`"
    for script in dict.fromkeys([*SHELL, *programs]):
        text = script if script.startswith("#!") else f"#!/usr/bin/env bash\nset -eo pipefail\n{script}"
        done = ran(checker, "--exclude=SC2153,SC2154", "-", input=text)
        assert not done.returncode, f"{script}\n{done.stdout}"


@pytest.mark.programs
def test_zizmor_finds_nothing() -> None:
    program = Path(sys.executable).with_name("zizmor")
    strict = (
        "--strict-collection",
        "--persona",
        "auditor",
    )  # without the first, it leaves out files that it cannot read
    done = ran(program, "--offline", "--quiet", "--no-progress", *strict, ROOT / ".github")
    assert not done.returncode, done.stdout + done.stderr


def starts(paths: list[str], file: str) -> bool:
    """Return whether a changed file matches one of GitHub's path patterns. Supports only the patterns that we use."""
    return any(fnmatchcase(file, pattern.replace("/**", "/*")) for pattern in paths)


def test_images_are_built_when_what_they_are_made_from_changes() -> None:
    found = WORKFLOWS["images.yml"]["on"]
    paths = found["push"]["paths"]
    assert paths == found["pull_request"]["paths"]
    assert all((ROOT / pattern.partition("*")[0]).exists() for pattern in paths), "a path that is not there"
    needed = ("requirements.txt", "plan", "results", "scan", "workflows/build.yml")
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
        assert set(re.findall(r"matrix\.(?!yaml)(\w+)", text)) <= {*entry, "row"}, f"{file}: {name}"
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


REQUIREMENTS = {"requirements.txt": ("report", "sbom"), "requirements-dev.txt": ("dev", "docs", "report", "sbom")}


@pytest.mark.parametrize("file", REQUIREMENTS)
def test_every_dependency_is_pinned_by_hash(file: str) -> None:
    """Each dependency is pinned to a version that pyproject.toml permits. The file names no package index."""
    text = (ROOT / ".github" / file).read_text()
    assert "://" not in text
    assert "--index" not in text
    pinned = {}
    for entry in text.replace("\\\n", " ").splitlines():
        line, *hashes = re.split(r"\s+(?=--)", entry.strip())
        requirement = Requirement(line)
        ((operator, version),) = ((spec.operator, spec.version) for spec in requirement.specifier)
        assert (operator, bool(hashes)) == ("==", True), line
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", item) for item in hashes), line
        pinned[canonicalize_name(requirement.name)] = version
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = document["project"]["optional-dependencies"]
    own = [text for extra in REQUIREMENTS[file] for text in extras[extra] if not text.startswith("imagebuild[")]
    for text in (*document["project"]["dependencies"], *own, "hatchling"):
        wanted = Requirement(text)
        assert wanted.specifier.contains(pinned[canonicalize_name(wanted.name)]), text
    installs = [line for line in (ROOT / "Makefile").read_text().splitlines() if "/bin/pip install" in line]
    assert any(file in line and "--require-hashes" in line for line in installs)


# Who may do what

SIGNERS = {(file, name): job for file, name, job in JOBS if "id-token" in job["permissions"] and "steps" in job}


def test_a_job_that_signs_takes_digests_from_outputs_and_renders_nothing() -> None:
    assert {(file, name) for file, name in SIGNERS if "packages" in SIGNERS[file, name]["permissions"]} == {
        ("build.yml", "attach"), ("build.yml", "publish"), ("project.yml", "publish"),
    }  # fmt: skip
    for (file, _), job in SIGNERS.items():
        if "packages" not in job["permissions"]:
            continue
        script = "\n".join(step["run"] for step in job["steps"] if "run" in step)
        assert not re.search(r"imagebuild (build|verify|render|ci-matrix|plan|sbom|scan|lock)\b", script), file
        assert "imagebuild publish" not in script or "--rendered=" in script
        assert ".github/results receive arrived" in script
        for step in job["steps"]:
            assert not {"name", "pattern"} & set(step.get("with", {})) or "download" not in step["uses"], "by id"
            if "checkout" in step.get("uses", "") and file == "project.yml":
                # The caller's files lie in a folder from which nothing runs.
                assert step["with"]["path"] == ("imagebuild" if "ref" in step["with"] else "project")
        assert all(
            "./imagebuild/" in step["uses"]
            for step in job["steps"]
            if file == "project.yml" and step.get("uses", "")[0:1] == "."
        )


def test_every_job_of_a_matrix_has_its_own_output_and_no_choice_of_machines() -> None:
    for file, name, job in JOBS:
        # Files and outputs of jobs choose no machine, because a pull request changes them.
        assert not re.search(r"matrix\.(?!platform)|(needs|inputs|steps|github)\.", str(job.get("runs-on"))), name
        if any("hand-over" in step.get("run", "") for step in job.get("steps", [])) and "strategy" in job:
            wanted = {f"r{row}": f"${{{{ steps.results.outputs.r{row} }}}}" for row in range(32)}
            assert job["outputs"] == wanted, f"{file}: {name}"


# Results on their way to the job that signs


def results(folder: Path, *arguments: object, **environ: str) -> tuple[int, str, str]:
    """Run .github/results in a folder; return its exit status, its messages and the outputs of the step."""
    outputs = folder / "outputs"
    outputs.write_text("")
    own = {**os.environ, "GITHUB_OUTPUT": str(outputs), **environ}
    done = ran(sys.executable, ROOT / ".github/results", *arguments, cwd=folder, env=own)
    return done.returncode, done.stdout + done.stderr, outputs.read_text()


@pytest.fixture
def handed(tmp_path: Path) -> tuple[Path, dict[str, dict[str, str]]]:
    """Return the folder of a job that downloaded the artifacts of two jobs, and the outputs of the jobs."""
    outputs: dict[str, str] = {}
    for row, target in enumerate(("open-cuda13.5", "slim+x")):
        folder = tmp_path / f"builder{row}"
        (folder / "build" / target).mkdir(parents=True)
        for name in ("result.json", "verify.json", "other.json"):
            (folder / "build" / target / name).write_text(f'{{"{name}": {row}}}')
        assert results(folder, "pack", "build")[0] == 0
        status, said, output = results(folder, "hand-over", row, 70 + row)
        assert status == 0, said
        outputs |= dict(line.split("=", 1) for line in output.splitlines())
        shutil.copytree(folder / "results", tmp_path / f"signer/arrived/results-{row}")
    return tmp_path / "signer", {"build": {**outputs, "r2": ""}, "gpu": {}}


@pytest.mark.programs
def test_results_reach_the_signer_by_the_outputs_of_jobs(handed: tuple[Path, dict[str, dict[str, str]]]) -> None:
    signer, outputs = handed
    sibling = signer / "arrived/results-9"  # another job of the run uploaded it
    shutil.copytree(signer / "arrived/results-0", sibling)
    (sibling / "open-cuda13.5/verify.json").write_text("{}")
    (sibling / "SHA256SUMS").write_text(f"{hashlib.sha256(b'{}').hexdigest()}  open-cuda13.5/verify.json\n")
    (signer / "arrived/results-1/slim+x/extra.json").write_text("{}")
    environ = {"HANDED": json.dumps(outputs)}
    assert results(signer, "ids", **environ) == (0, "", "ids=70,71\n")
    assert results(signer, "ids", **environ, ROW="1") == (0, "", "ids=71\n")
    assert results(signer, "receive", "arrived", **environ) == (0, "", "")
    assert sorted(str(path.relative_to(signer / "results")) for path in signer.rglob("results/**/*.json")) == [
        "build-r0/open-cuda13.5/result.json", "build-r0/open-cuda13.5/verify.json",
        "build-r1/slim+x/result.json", "build-r1/slim+x/verify.json",
    ]  # fmt: skip
    # A single artifact is unpacked into the folder itself.
    shutil.rmtree(signer / "results")
    assert results(signer, "receive", "arrived/results-1", **environ, ROW="1") == (0, "", "")
    assert (signer / "results/build-r1/slim+x/verify.json").exists()


@pytest.mark.programs
@pytest.mark.parametrize("fault", CASES["results-that-no-job-handed-over-are-refused"])
def test_results_that_no_job_handed_over_are_refused(
    handed: tuple[Path, dict[str, dict[str, str]]], tmp_path: Path, fault: str
) -> None:
    signer, outputs = handed
    file, sums = signer / "arrived/results-1/slim+x/verify.json", signer / "arrived/results-1/SHA256SUMS"
    (tmp_path / "secret").write_text("x")
    secret = hashlib.sha256(b"x").hexdigest()
    match fault:
        case "edited":
            file.write_text("{}")
        case "removed":
            file.unlink()
        case "a link":
            (tmp_path / "same").write_bytes(file.read_bytes())
            file.unlink()
            file.symlink_to(tmp_path / "same")
        case "already there":
            (signer / "results").mkdir()
        case "another artifact":
            shutil.rmtree(signer / "arrived/results-1")
        case "a path" | "not listed":  # the job that builds was attacked, so its output has the right hash
            name = "../../../secret" if fault == "a path" else "slim+x/secret.json"
            sums.write_text(f"{secret}  {name}\n")
            outputs["build"]["r1"] = f"71 {hashlib.sha256(sums.read_bytes()).hexdigest()}"
        case _:
            sums.write_text(sums.read_text() + f"{secret}  slim+x/scan.json\n")
    status, said, _ = results(signer, "receive", "arrived", HANDED=json.dumps(outputs))
    assert (status, bool(re.search("handed over|regular file|exists already", said))) == (1, True), said
    assert not (signer / "results/build-r1").exists() or fault in ("edited", "removed", "a link")


@pytest.mark.programs
@pytest.mark.parametrize("value", CASES["outputs-that-name-no-artifact-are-refused"])
def test_outputs_that_name_no_artifact_are_refused(tmp_path: Path, value: str) -> None:
    for arguments in (("ids",), ("receive", ".")):
        status, _, outputs = results(tmp_path, *arguments, HANDED=value.replace("%s", "0" * 64))
        assert (status, outputs) == (1, "")


# Hostile values

HOSTILE = data("hostile/steps")
OPTIONS = "Create a builder"
"""The step whose variable contains options: the repository's settings name the options of a builder."""
PROGRAMS = CASES["programs"]
Case = tuple[dict[str, Any], dict[str, Any]]


def cases() -> dict[str, Case]:
    """Map the name of each shell step to the step and to the variables of its job and workflow."""
    found: dict[str, Case] = {}
    seen = set()  # several jobs have the same steps
    for file, job, steps, environ in [
        *(
            (file, name, job.get("steps", []), {**WORKFLOWS[file].get("env", {}), **job.get("env", {})})
            for file, name, job in JOBS
        ),
        ("setup", "", ACTION["runs"]["steps"], {}),
        *(
            ("script", name, [{"run": f'.github/{name} "$A" "$B" "$C"', "env": dict.fromkeys("ABC")}], {})
            for name in ("scan", "propose")
        ),
    ]:
        for number, step in enumerate(steps):
            if "run" in step:
                case = (step["run"], *sorted({**environ, **step.get("env", {})}))
                if case not in seen:
                    found[f"{file} {job} {number} {step.get('name', '')}"] = (step, environ)
                seen.add(case)
    return found


def faults(step: dict[str, Any], environ: dict[str, Any], value: str, folder: Path) -> tuple[list[str], bool]:
    """Run a shell step with a value for each of its variables. Return what went wrong, and whether the step had an effect."""
    (folder / "recorded").mkdir(parents=True)
    for program in PROGRAMS:
        place = folder / program if "/" in program else folder / "bin" / program
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(ROOT / "tests/data/hostile/standin")
    (folder / "bin/python3").symlink_to(sys.executable)
    (folder / ".github").symlink_to(ROOT / ".github")
    work = folder / "work"
    for name in ("1", "results", "dist", "arrived", "build/x"):
        (work / name).mkdir(parents=True)
    for name in (".github", ".venv"):
        (work / name).symlink_to(folder / name)
    (folder / "imagebuild").symlink_to(folder)
    for name in ("README.md", "results/SHA256SUMS", "dist/x"):
        (work / name).touch()
    files = {name: folder / name for name in ("GITHUB_OUTPUT", "GITHUB_ENV", "GITHUB_PATH")}
    for file in files.values():
        file.touch()
    own = {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "RECORDED": str(folder / "recorded"), "ANSWER": value,
        "RUNNER_TEMP": str(work), "GITHUB_REF": "refs/heads/main", "GITHUB_REF_NAME": value, "GITHUB_REPOSITORY": "acme/x",
        "GITHUB_SERVER_URL": "https://git.test", "REGISTRY": "r.test/acme", "LANG": "C.UTF-8", "TMPDIR": str(folder),
        **dict.fromkeys({**environ, **step.get("env", {})}, value), **{name: str(path) for name, path in files.items()},
    }  # fmt: skip
    done = ran(
        "bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"], cwd=work, env=own, errors="replace"
    )
    calls = [call.read_text().split("\0")[:-1] for call in (folder / "recorded").iterdir()]
    found = [f"ran {path}" for path in folder.rglob("pwned")]
    text = step["run"] + "".join((ROOT / ".github" / name).read_text() for name in ("plan", "propose", "scan"))
    literal = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", text)) | {"-c"}
    for call in calls:
        options = call[: call.index("--")] if "--" in call else call
        found += [
            f"option {word!r} of {call}"
            for word in options[1:]
            if word.startswith("-") and word.partition("=")[0] not in literal
        ]
        # A word that begins with `-` may come from a value only if it is part of `--name=value`.
        found += [
            f"value as option in {call}" for word in options[1:] if word.startswith("-") and word in value.split()
        ]
        found += [
            f"no -- before {word!r} in {call}"
            for word in options[1:]
            if value in word and not word.startswith("-") and "=" not in word
        ]
    for name, file in files.items():
        found += [
            f"{name}: {line}" for line in file.read_text().splitlines() if re.match(r"INJECTED|::|/injected", line)
        ]
    found += [
        f"command {line!r}" for line in re.split("[\r\n]", done.stdout + done.stderr) if re.match(r"::|##\[", line)
    ]
    return found, bool(calls or any(file.read_text() for file in files.values()) or not done.returncode)


@pytest.mark.programs
@pytest.mark.parametrize("name", cases())
def test_a_step_treats_hostile_values_as_data(name: str, tmp_path: Path) -> None:
    step, environ = cases()[name]
    if "$" in step["run"] and not name.endswith(OPTIONS):
        for number, value in enumerate([*HOSTILE["values"], "x" * 100_000]):
            found, _ = faults(step, environ, value, tmp_path / str(number))
            assert not found, f"{value!r}: {found}"
    # With a usual value, the step reaches its commands. Only steps that compare hashes need more than that.
    assert faults(step, environ, "1", tmp_path / "usual")[1] or re.search("results|OWN|SHA256", step["run"])


@pytest.mark.programs
@pytest.mark.parametrize("step", HOSTILE["unsafe"], ids=lambda step: step["run"])
def test_an_unsafe_step_is_found(step: dict[str, Any], tmp_path: Path) -> None:
    found = [
        faults({**step, "env": {"TARGETS": ""}}, {}, value, tmp_path / str(number))[0]
        for number, value in enumerate(HOSTILE["values"])
    ]
    assert any(found)
