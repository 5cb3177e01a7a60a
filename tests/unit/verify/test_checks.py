from collections.abc import Mapping
from pathlib import Path

import pytest

from imagebuild.core import ConfigError
from imagebuild.project import Check, Facilities, Project
from imagebuild.verify import (
    UNCOMPARED,
    Command,
    Execution,
    HostFacts,
    Session,
    axes_of,
    command_of,
    components_of,
    judge_check,
    planned_checks,
    run_check,
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
    host = HostFacts()

    def __init__(self, answers: Mapping[str, tuple[int, str]]) -> None:
        self.answers = answers
        self.commands: list[Command] = []

    def obstacle(self, command: Command) -> str:
        return "" if command.user == "root" else f"the image has no user {command.user}"

    def run(self, command: Command) -> Execution:
        assert command.log
        self.commands.append(command)
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
    results = [
        run_check(p, session, folder / f"{p.check.name}.log")
        for p in planned_checks(project, {"library": version}, axes, have)
    ]
    return {r.check: (r.outcome, r.reason) for r in results}


def test_a_check_that_cannot_run_is_skipped_with_its_reason(project: Project, tmp_path: Path) -> None:
    answers = {"version": (0, "library 1.2\n"), "long": (3, "")}
    assert outcomes(project, tmp_path, answers) == {
        "version": ("passed", ""),
        "devices": ("skipped", "no gpu here; no rdma here"),
        "many": ("skipped", "no gpu here; needs 2 nodes, 1 here"),
        "compiles": ("skipped", "only for variant devel"),
        "long": ("failed", "exit status 3"),
        "other": ("skipped", "the image has no user somebody"),
    }


def test_needs_that_are_there_are_no_reason_to_skip(project: Project, tmp_path: Path) -> None:
    answers = dict.fromkeys(("version", "devices", "many", "long"), (0, "library 1.2\n"))
    found = outcomes(project, tmp_path, answers, have=Facilities(gpus=2, rdma=True, nodes=2))
    assert found["many"] == found["devices"] == ("passed", "")
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


def test_what_is_expected_may_stand_before_the_end_that_is_in_memory(project: Project, tmp_path: Path) -> None:
    answers = {"version": (0, "library 1.2\n" + "noise\n" * 1000), "long": (0, "")}
    assert outcomes(project, tmp_path, answers)["version"] == ("passed", "")


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


def test_a_check_says_what_it_starts(project: Project, tiny: Files) -> None:
    tiny.component(
        "library",
        LIBRARY + "checks:\n  - {name: a, description: d, run: x, needs: [slurm, nodes>=3], ranks: 6, user: me, "
        "timeout-s: 9, environment: {SIZE: 1G}}\n",
    )
    (planned,) = [p for p in planned_checks(tiny.load(), {"library": "1"}, {}, Facilities()) if p.check.name == "a"]
    assert command_of(planned) == Command("x", "me", 9, {"SIZE": "1G"}, nodes=3, ranks=6)


class Hangs(Answers):
    """A session whose commands hang some times before they answer."""

    def __init__(self, answers: Mapping[str, tuple[int, str]], times: int) -> None:
        super().__init__(answers)
        self.times = times

    def run(self, command: Command) -> Execution:
        self.times -= 1
        return execution(None, "half") if self.times >= 0 else super().run(command)


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
    tiny.component("library", LIBRARY + "checks:\n  - {name: a, description: d, run: x, attempts: 3}\n")
    (planned,) = [p for p in planned_checks(tiny.load(), {"library": "1"}, {}, NOTHING) if p.check.name == "a"]
    result = run_check(planned, Hangs({"a": answer}, times), tmp_path / "a.log")
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
    tiny.component("library", f"{LIBRARY}checks:\n  - {{name: a, description: d, run: x, {text}}}\n")
    with pytest.raises(ConfigError) as error:
        tiny.load()
    assert mistake in str(error.value)


def test_labels_name_components_and_axes() -> None:
    labels = {"imagebuild.component.nccl": "2", "imagebuild.axis.cuda": "13.0", "other": "x"}
    assert components_of(labels) == {"nccl": "2"}
    assert axes_of(labels) == {"cuda": "13.0"}


def test_an_unknown_component_and_a_missing_script_are_errors(project: Project, tiny: Files) -> None:
    with pytest.raises(ConfigError, match="no such component is known"):
        planned_checks(project, {"gone": "1"}, {}, Facilities())
    (tiny.root / "dockerfiles/components/library/checks/long.sh").unlink()
    with pytest.raises(ConfigError, match=r"checks.long: .*long\.sh"):
        planned_checks(project, {"library": "1.2"}, {}, Facilities())


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
