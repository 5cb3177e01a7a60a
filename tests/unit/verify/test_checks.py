from collections.abc import Mapping
from pathlib import Path

import pytest

from imagebuild.core import ConfigError
from imagebuild.project import Check, Facilities, Project
from imagebuild.verify import (
    UNCOMPARED,
    Command,
    Execution,
    Host,
    PlannedCheck,
    Session,
    judge_check,
    plan_checks,
    run_check,
    select_checks,
)
from tests.conftest import LIBRARY, Files

CHECKS = """\
checks:
  - {name: version, description: d, run: library --version, expect: "^library {version}$"}
  - {name: devices, description: d, run: list, needs: [gpu, rdma]}
  - {name: many, description: d, run: list, needs: [gpus>=2, nodes>=2]}
  - {name: compiles, description: d, when: {variant: devel}, run: cc}
  - {name: long, description: d}
  - {name: other, description: d, run: "true", user: somebody}
"""
RUNTIME = {"variant": "runtime"}
NOTHING = Facilities()


def execution(status: int | None, output: str, problem: str = "") -> Execution:
    return Execution(("bash",), status, output, 1.5, problem=problem)


class Answers(Session):
    """A session that answers from a table."""

    facilities = Facilities()
    host = Host()

    def __init__(self, answers: Mapping[str, tuple[int, str]], hangs: int = 0) -> None:
        self.answers, self.hangs = answers, hangs
        self.commands: list[Command] = []

    def obstacle(self, command: Command) -> str:
        return "" if command.user == "root" else f"the image has no user {command.user}"

    def run(self, command: Command) -> Execution:
        assert command.log
        self.commands.append(command)
        if len(self.commands) <= self.hangs:
            return execution(None, "half")
        status, output = self.answers[command.log.stem]
        command.log.write_text(output)
        return execution(status, output[-20:])


@pytest.fixture
def project(tiny: Files) -> Project:
    tiny.component("library", LIBRARY + CHECKS)
    tiny.write("dockerfiles/components/library/checks/long.sh", "echo long\n")
    return tiny.load()


def outcomes(
    project: Project, folder: Path, answers: Mapping[str, tuple[int, str]], version: str | None = "1.2",
    have: Facilities = NOTHING, axes: dict[str, str] = RUNTIME,
) -> dict[str, tuple[str, str]]:  # fmt: skip
    session = Answers(answers)
    session.facilities = have
    planned = plan_checks(project, select_checks(project, {}), {"library": version}, axes)
    results = [run_check(p, session, folder / f"{p.check.name}.log") for p in planned]
    return {r.check: (r.outcome, r.reason) for r in results}


def test_a_check_that_cannot_run_is_skipped_with_its_reason(project: Project, tmp_path: Path) -> None:
    answers = {"version": (0, "library 1.2\n"), "long": (3, "")}
    assert outcomes(project, tmp_path, answers) == {
        "version": ("passed", ""),
        "devices": ("skipped", "no gpu here; no rdma here"),
        "many": ("skipped", "no gpu here; needs 2 nodes, 1 here"),
        "compiles": ("skipped", "only for variant devel"),
        "long": ("failed", "exit status 3"),
        "other": ("failed", "the image has no user 'somebody'; known: root"),
    }


def test_needs_that_are_there_are_no_reason_to_skip(project: Project, tmp_path: Path) -> None:
    # The version stands before the end that is in memory.
    answers = dict.fromkeys(("version", "devices", "many", "long"), (0, "library 1.2\n" + "noise\n" * 1000))
    found = outcomes(project, tmp_path, answers, have=Facilities(gpus=2, rdma=True, nodes=2))
    assert found["many"] == found["devices"] == found["version"] == ("passed", "")
    found = outcomes(project, tmp_path, answers, have=Facilities(gpus=1, rdma=True, nodes=2, why={"gpu": "a reason"}))
    assert found["many"] == ("skipped", "needs 2 GPUs, 1 here: a reason")


def test_without_a_version_any_is_accepted_and_that_is_said(project: Project, tmp_path: Path) -> None:
    answers = {
        "version": (0, "library 7.1-x\n"), "long": (0, ""), "compiles": (0, ""),
    }  # fmt: skip
    found = outcomes(project, tmp_path, answers, version=None, axes={})
    assert found["version"] == ("passed", UNCOMPARED)
    assert found["compiles"] == found["long"] == ("passed", "")
    answers["version"] = (0, "library of no version\n")
    assert outcomes(project, tmp_path, answers, version=None, axes={})["version"][0] == "failed"


@pytest.mark.parametrize(
    ("done", "reason"),
    [
        (execution(0, "warning\nlibrary 1.2\n"), ""),
        (execution(0, "library 1x2\n"), "the output has no"),
        (execution(0, "library 1.20\n"), "the output has no"),
        (execution(1, "library 1.2\n"), "exit status 1"),
        (execution(124, "library 1.2\n"), "exit status 124"),
        (execution(None, ""), "did not end within 60 s"),
        (execution(None, "", problem="printed more than 9 MiB"), "printed more than 9 MiB"),
    ],
)
def test_judge(done: Execution, reason: str) -> None:
    check = Check(name="version", description="d", run="x", expect="^library {version}$")
    assert reason in judge_check(check, "1.2", done)
    assert bool(judge_check(check, "1.2", done)) is bool(reason)


def one_check(tiny: Files, text: str) -> PlannedCheck:
    """The only check of a component of version 1."""
    tiny.component("library", f"{LIBRARY}checks:\n  - {{name: a, description: d, run: x, {text}}}\n")
    project = tiny.load()
    (planned,) = plan_checks(project, select_checks(project, {}), {"library": "1"}, {})
    return planned


def test_a_check_says_what_it_starts(tiny: Files, tmp_path: Path) -> None:
    text = "needs: [slurm, nodes>=3], ranks: 6, user: root, timeout-s: 9, environment: {SIZE: 1G}"
    session = Answers({"a": (0, "")})
    session.facilities = Facilities(nodes=3, slurm=True)
    log = tmp_path / "a.log"
    run_check(one_check(tiny, text), session, log, {"SIZE": "2G", "MORE": "1"})
    variables = {"SIZE": "1G", "MORE": "1"}
    assert session.commands == [Command("x", "root", 9, variables, nodes=3, ranks=6, log=log)]


@pytest.mark.parametrize(
    ("times", "answer", "expected"),
    [
        (0, (0, ""), ("passed", "", False)),
        (1, (0, ""), ("passed", "1 of 2 attempts did not end within 60 s", False)),
        (2, (0, ""), ("passed", "2 of 3 attempts did not end within 60 s", False)),
        (3, (0, ""), ("failed", "3 of 3 attempts did not end within 60 s", True)),
        (1, (9, ""), ("failed", "exit status 9; 1 of 2 attempts did not end within 60 s", False)),
    ],
)
def test_a_check_that_hangs_may_be_started_again(
    tiny: Files, tmp_path: Path, times: int, answer: tuple[int, str], expected: tuple[str, str, bool]
) -> None:
    session = Answers({"a": answer}, hangs=times)
    result = run_check(one_check(tiny, "attempts: 3"), session, tmp_path / "a.log")
    assert (result.outcome, result.reason, result.timeout) == expected


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("attempts: 0", "checks.0.attempts"),
        ("needs: [gpu, gppu]", "component.yaml:6: checks.0.needs.1: 'gppu' is not a need; use gpu, rdma"),
        ("needs: [gpus>=0]", "'gpus>=0' is not a need"),
        ("needs: [rdma>=2]", "'rdma>=2' is not a need"),
        ("ranks: 2", "ranks: srun starts them, so it needs [slurm]"),
    ],
)
def test_mistakes_in_needs_are_found_when_they_are_read(tiny: Files, text: str, mistake: str) -> None:
    with pytest.raises(ConfigError) as error:
        one_check(tiny, text)
    assert mistake in str(error.value)


def test_a_missing_script_is_an_error(project: Project, tiny: Files, tmp_path: Path) -> None:
    (tiny.root / "dockerfiles/components/library/checks/long.sh").unlink()
    with pytest.raises(ConfigError, match=r"checks.long: .*long\.sh"):
        outcomes(project, tmp_path, {})


def test_a_benchmark_s_results_must_be_good(tiny: Files, tmp_path: Path) -> None:
    tiny.component("library", LIBRARY + "checks:\n  - {name: fast, description: d, run: x, results: nccl-tests}\n")
    answers = {"fast": (0, "all is well\n")}
    reason = "no result of nccl-tests in the output"
    assert outcomes(tiny.load(), tmp_path, answers)["fast"] == ("failed", reason)
    answers = {"fast": (3, "all is well\n")}
    assert outcomes(tiny.load(), tmp_path, answers)["fast"] == ("failed", f"exit status 3; {reason}")


def test_a_check_may_say_that_it_cannot_run(project: Project, tmp_path: Path) -> None:
    answers = {"version": (77, "looked\nno such module\n"), "long": (77, "")}
    found = outcomes(project, tmp_path, answers)
    assert found["version"] == ("skipped", "no such module")
    assert found["long"] == ("failed", "exit status 77")
