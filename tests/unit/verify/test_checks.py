"""The choice of checks, their runs, and the judgement of their output: needs, versions, benchmarks and speed."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from imagebuild.bench.models import Launch, Results, Run
from imagebuild.bench.read import read_files
from imagebuild.bench.verification import CheckResult, Surroundings
from imagebuild.core.errors import ConfigError, NothingSelected
from imagebuild.oci.layout import Blob
from imagebuild.project.component import Check
from imagebuild.project.project import Project
from imagebuild.verify.checks import (
    FAILED_LINE,
    UNCOMPARED,
    ImageCheck,
    compare_files,
    correctness_problem,
    judge_check,
    judged_speed,
    run_check,
    select_checks,
)
from imagebuild.verify.files import Tree
from imagebuild.verify.layers import scan
from imagebuild.verify.runner import Command, ExecSession, Execution, Session
from tests.conftest import LIBRARY, ROOT, TOOL, Files, data
from tests.unit.bench import speed_fakes
from tests.unit.bench.speed_fakes import shipped
from tests.unit.image_files import layer, symlink

CASES = data("cases/verify/checks")

CHECKS = (ROOT / "tests/data/checks.yaml").read_text()
RUNTIME = {"variant": "runtime"}
STANDINS = ROOT / "tests/data/standins"
COLLECTIVE = ROOT / "dockerfiles/components/nccl-tests/checks/collective.sh"


@pytest.fixture
def project(tiny: Files) -> Project:
    tiny.component("library", LIBRARY + CHECKS)
    tiny.write("dockerfiles/components/library/checks/long.sh", "echo long\n")
    tiny.component("tool", TOOL + "checks: [{name: runs, description: d, run: x}]\n", build="FROM {{ base }} AS tool\n")
    return tiny.load()


# What is chosen


def test_names_and_globs(project: Project) -> None:
    def choose(*patterns: str) -> list[str]:
        found = select_checks(project, {"no-keys": "No layer holds a private key"}, {"library": "1"}, patterns)
        return [str(entry) for entry in found]

    assert choose("library/version") == choose("library/v*", "tool/*") == ["library/version"]
    assert choose("*/m*", "image") == ["image/no-keys", "library/many"]
    assert len(choose()) == len(choose("library")) + 1 == 7
    for pattern, near in {"library/verison": "library/version", "libary/*": "library"}.items():
        with pytest.raises(ConfigError, match=f"did you mean '{near}'"):
            choose(pattern)
    with pytest.raises(NothingSelected):
        choose("tool/*")  # a check of other images


# What is run


def execution(status: int | None, output: str, problem: str = "") -> Execution:
    return Execution(("bash",), status, output, 1.5, problem=problem)


class Answers(Session):
    """A session whose commands return prepared results."""

    def __init__(self, answers: Mapping[str, tuple[int, str]], hangs: int = 0, **have: object) -> None:
        place = Surroundings.model_validate({"runner": "x", "user": "root", **have})
        super().__init__({"tool": ["bash", "timeout"], "uid": ["0"]}, place)
        self.answers, self.hangs = answers, hangs
        self.commands: list[Command] = []

    def run(self, command: Command) -> Execution:
        assert command.log
        self.commands.append(command)
        if len(self.commands) <= self.hangs:
            return execution(None, "half")
        status, output = self.answers[command.log.stem]
        command.log.write_text(output)
        return execution(status, output[-20:])


def outcomes(
    project: Project, folder: Path, answers: Mapping[str, tuple[int, str]], version: str | None = "1.2",
    axes: dict[str, str] = RUNTIME, **have: object,
) -> dict[str, tuple[str, str]]:  # fmt: skip
    session = Answers(answers, 0, **have)
    planned = select_checks(project, {}, {"library": version}, axes=axes)
    results = [run_check(p, session, folder / f"{p.name}.log") for p in planned]
    return {r.check: (r.outcome, r.reason) for r in results}


def test_a_check_that_cannot_run_is_skipped_with_its_reason(project: Project, tmp_path: Path) -> None:
    answers = {"version": (0, "library 1.2\n"), "long": (3, "")}
    assert outcomes(project, tmp_path, answers) == {
        "version": ("passed", ""),
        "devices": ("skipped", "no gpu here; no rdma here"),
        "many": ("skipped", "no gpu here; needs 2 nodes, 1 here"),
        "compiles": ("skipped", "only for variant devel"),
        "long": ("failed", "exit status 3"),
        "other": ("skipped", "the image has no setpriv"),
    }
    found = outcomes(project, tmp_path, {"version": (77, "looked\nno such module\n"), "long": (77, "")})
    assert found["version"] == ("skipped", "no such module")
    assert found["long"] == ("failed", "exit status 77")


def test_needs_that_are_there_are_no_reason_to_skip(project: Project, tmp_path: Path) -> None:
    # The version is only in the log: the output in memory lacks its beginning.
    answers = dict.fromkeys(("version", "devices", "many", "long"), (0, "library 1.2\n" + "noise\n" * 1000))
    found = outcomes(project, tmp_path, answers, gpus=2, rdma=True, nodes=2)
    assert found["many"] == found["devices"] == found["version"] == ("passed", "")
    found = outcomes(project, tmp_path, answers, gpus=1, rdma=True, nodes=2, why={"gpu": "a reason"})
    assert found["many"] == ("skipped", "needs 2 GPUs, 1 here: a reason")


def test_without_a_version_any_is_accepted_and_that_is_said(project: Project, tmp_path: Path) -> None:
    answers = {"version": (0, "library 7.1-x\n"), "long": (0, ""), "compiles": (0, "")}
    found = outcomes(project, tmp_path, answers, version=None, axes={})
    assert found["version"] == ("passed", UNCOMPARED)
    assert found["compiles"] == found["long"] == ("passed", "")
    answers["version"] = (0, "library of no version\n")
    assert outcomes(project, tmp_path, answers, version=None, axes={})["version"][0] == "failed"


@pytest.mark.parametrize(("status", "output", "problem", "reason"), CASES["judged"])
def test_judge(status: int | None, output: str, problem: str, reason: str) -> None:
    check = Check(name="version", description="d", run="x", expect="^library {version}$")
    found = judge_check(check, "1.2", execution(status, output, problem))
    assert (found.startswith(reason), bool(found)) == (True, bool(reason))


def one_check(tiny: Files, text: str) -> ImageCheck:
    """The only check of a component with version 1."""
    tiny.component("library", f"{LIBRARY}checks:\n  - {{name: a, description: d, run: x, {text}}}\n")
    (planned,) = select_checks(tiny.load(), {}, {"library": "1"})
    return planned


def test_a_check_says_what_it_starts(tiny: Files, tmp_path: Path) -> None:
    text = "needs: [slurm, nodes>=3], ranks: 6, user: root, timeout-s: 9, environment: {SIZE: 1G}"
    session = Answers({"a": (0, "")}, nodes=3, slurm=True)
    log = tmp_path / "a.log"
    run_check(one_check(tiny, text), session, log, {"SIZE": "2G", "MORE": "1"})
    assert session.commands == [
        Command(f"{FAILED_LINE}\nx", "root", 9, {"SIZE": "1G", "MORE": "1"}, nodes=3, ranks=6, log=log)
    ]


@pytest.mark.parametrize(("hangs", "answer", "expected"), CASES["a-check-that-hangs-may-be-started-again"])
def test_a_check_that_hangs_may_be_started_again(
    tiny: Files, tmp_path: Path, hangs: int, answer: tuple[int, str], expected: list[Any]
) -> None:
    result = run_check(one_check(tiny, "attempts: 3"), Answers({"a": answer}, hangs), tmp_path / "a.log")
    assert [result.outcome, result.reason, result.timeout] == expected


@pytest.mark.programs
@pytest.mark.parametrize("hang", [0, 60])
def test_the_log_has_the_messages_of_all_ranks_once(hang: int, tmp_path: Path) -> None:
    """Also if a rank is killed, if mpirun is killed, and if the time limit ends the check."""
    programs = {"nvidia-smi": "printf '81000\\n%.0s' 1 2 3 4", "all_reduce_perf": ""}
    programs["mpirun"] = 'while [ "$1" != bash ]; do shift; done\n'
    programs["mpirun"] += 'for r in 0 1 2 3; do OMPI_COMM_WORLD_RANK=$r "$@" & done; wait; exit 3'
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}" if text else (STANDINS / "chatty_rank").read_text())
        (tmp_path / name).chmod(0o755)
    environment = {"OPERATION": "all_reduce", "SPREAD": "ranks", "HANG": str(hang)}
    check = Check(name="r", description="d", script="collective", environment=environment, timeout_s=4)
    planned = ImageCheck("nccl-tests", "r", "d", check, COLLECTIVE.read_text())
    log = tmp_path / "log"
    done = run_check(planned, ExecSession(["env", f"PATH={tmp_path}:/usr/bin:/bin"]), log)
    assert (done.outcome, done.timeout) == ("failed", bool(hang))
    lines = log.read_text().splitlines()
    assert sum(line.endswith((" INFO Using network IB", " INFO cut")) for line in lines) == 2
    assert [line.partition(" n1:")[0] for line in lines if "WARN" in line] == ["(ranks 2-3)"]
    (path,) = (each.carried for each in read_files([str(log)]).sources)
    assert path
    assert (path.carriers, path.version, path.ranks) == ({"P2P/CUMEM": 20}, "2.30.7", 4)


def test_a_missing_script_is_an_error(project: Project, tiny: Files, tmp_path: Path) -> None:
    (tiny.root / "dockerfiles/components/library/checks/long.sh").unlink()
    with pytest.raises(ConfigError, match="checks/long.sh: cannot be read"):
        outcomes(project, tmp_path, {})


# Benchmarks


CHECK = Check(name="all-reduce", description="d", run="x", results="nccl-tests")


def run(busbw: float = 300.0, **changes: object) -> Run:
    return speed_fakes.run((1 << 33, busbw, busbw), **{"devices": ("NVIDIA H100 80GB HBM3",), **changes})


def result(*runs: Run, outcome: str = "passed") -> CheckResult:
    return CheckResult.model_validate(
        {"component": "nccl-tests", "check": "all-reduce", "outcome": outcome, "results": Results(runs=runs)}
    )


@pytest.mark.parametrize("row", CASES["bad-results"], ids=str)
def test_what_makes_results_bad(row: dict[str, Any]) -> None:
    runs = tuple(run(**changes) for changes in row.get("runs", ()))
    results = Results.model_validate({key: row[key] for key in ("tests", "diagnostics", "tables") if key in row})
    problem = correctness_problem(results.model_copy(update={"runs": runs}), row["tool"])
    assert row["says"] in problem
    assert bool(problem) is bool(row["says"])


TABLE: str = CASES["table"]


@pytest.mark.parametrize(("status", "printed", "reason"), CASES["a-benchmark-s-results-must-be-good"])
def test_a_benchmark_s_results_must_be_good(
    tiny: Files, tmp_path: Path, status: int, printed: str, reason: str
) -> None:
    done = run_check(one_check(tiny, "results: nccl-tests"), Answers({"a": (status, printed)}), tmp_path / "a.log")
    assert (done.outcome, done.reason) == ("failed" if reason else "passed", reason)
    assert done.results
    assert [run.source for run in done.results.runs] == ([] if reason else ["library/a"])


@pytest.mark.parametrize("row", CASES["speed-is-a-result-of-its-own"], ids=lambda row: row["says"])
def test_speed_is_a_result_of_its_own(row: dict[str, Any]) -> None:
    launch = Launch.model_validate(row["launch"]) if "launch" in row else None
    measured = run(row.get("busbw", 300.0), **{"launch": launch, **row.get("run", {})})
    checked = result(measured, outcome=row.get("check", "passed"))
    check = CHECK.model_copy(update={"needs": row.get("needs", ())})
    speed = judged_speed(checked, check, shipped("h100"))
    assert speed
    assert (speed.check, speed.outcome, row["says"] in speed.reason) == ("all-reduce-speed", row["outcome"], True)
    assert judged_speed(result(run(), outcome="skipped"), check, shipped("h100")) is None


IN_IMAGE = {"bin/a": b"1", "bin/b": b"2", "bin/empty": b"", "opt/tool/lib/x": b"3", "usr/share/x": b"4"}


@pytest.mark.programs
@pytest.mark.parametrize(("script", "found"), CASES["the-place-of-a-prefix-is-the-image"])
def test_the_place_of_a_prefix_is_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, found: str | None
) -> None:
    """The root of the image is a folder here, as no other root can be entered without rights."""
    here = str(tmp_path / "root").strip("/")
    nodes = {f"{here}/{path}": content for path, content in IN_IMAGE.items()} | {f"{here}/bin/link": symlink("a")}
    for path, content in IN_IMAGE.items():
        (tmp_path / "root" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / path).write_bytes(content)
    (tmp_path / "root/bin/link").symlink_to("a")
    subprocess.run(["bash", "-c", script], cwd=tmp_path / "root", check=True)
    monkeypatch.setenv("PATH", f"{tmp_path}/root:{os.environ['PATH']}")
    (tmp_path / "layer").write_bytes(layer(nodes))
    tree = Tree([scan(Blob(tmp_path / "layer", (tmp_path / "layer").stat().st_size))])
    folders, trees = (f"{here}/bin",), (f"{here}/opt/tool",)
    result = compare_files(ExecSession(["env"]), tree, folders, trees, "x@sha256:1", log=tmp_path / "log")
    assert (result.outcome, found or "") == (
        "failed" if found else "passed",
        found if found and found in result.reason else "",
    )
