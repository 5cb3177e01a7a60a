"""`imagebuild each`: a command for every pushed image."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from imagebuild.cli import run_for_each
from imagebuild.core import CommandError, NothingSelected, ResultError


def digest(letter: str) -> str:
    return f"sha256:{letter * 64}"


def result(
    folder: Path, target: str, manifests: dict[str, str], repository: str | None = "r.example/x-staging"
) -> None:
    (folder / target).mkdir(parents=True)
    content = {"target": target, "digest": None, "tags": [], "platforms": [*manifests], "size_bytes": None, "seconds": 1,
               "steps": [], "manifests": manifests, "repository": repository}  # fmt: skip
    (folder / target / "result.json").write_text(json.dumps(content))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    result(tmp_path / "results-1", "b", {"linux/amd64": digest("b"), "linux/arm64": digest("c")})
    result(tmp_path / "results-0", "a", {"linux/amd64": digest("a")})
    result(tmp_path / "results-0", "loaded", {}, repository=None)
    return tmp_path


def test_values_are_filled_in_for_every_platform(folder: Path) -> None:
    calls: list[Sequence[str]] = []

    def called(argv: Sequence[str]) -> int:
        calls.append(argv)
        return 0

    command = ["x", "{image}", "{target}/{arch}", "{folder}/o.json", "{other}"]
    assert run_for_each(folder, (), command, called) == 0
    assert [list(call) for call in calls] == [
        ["x", f"r.example/x-staging@{digest(d)}", f"{t}/{arch}", f"{folder}/results-{n}/{t}/o.json", "{other}"]
        for d, t, arch, n in (("a", "a", "amd64", 0), ("b", "b", "amd64", 1), ("c", "b", "arm64", 1))
    ]
    calls.clear()
    run_for_each(folder, ("linux/arm64",), ["{image}"], called)
    assert [list(call) for call in calls] == [[f"r.example/x-staging@{digest('c')}"]]


def test_a_failure_does_not_stop_the_others_and_the_worst_status_counts(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    statuses = iter((1, 4, 0))
    assert run_for_each(folder, (), ["x"], lambda _: next(statuses)) == 4
    message = capsys.readouterr().err
    assert "a linux/amd64: exit status 1\nb linux/amd64: exit status 4\n1 of 3 succeeded" in message


def test_nothing_pushed_and_what_is_no_result(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(NothingSelected, match="for linux/riscv64"):
        run_for_each(folder, ("linux/riscv64",), ["x"])
    (folder / "results-0/a/result.json").write_text("{}")
    with pytest.raises(ResultError, match="was it written by another version"):
        run_for_each(folder, (), ["x"])


@pytest.mark.programs
def test_programs_are_started(folder: Path) -> None:
    assert run_for_each(folder, ("linux/arm64",), [sys.executable, "-c", "raise SystemExit('{target}' == 'b')"]) == 1
    with pytest.raises(CommandError, match="/gone.*cannot be run"):
        run_for_each(folder, (), ["/gone"])
    killed = [sys.executable, "-c", "import os; os.kill(os.getpid(), 15)"]
    assert run_for_each(folder, ("linux/arm64",), killed) == 143
