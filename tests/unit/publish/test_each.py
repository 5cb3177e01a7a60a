"""`imagebuild each`: a command for every pushed image."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from imagebuild.cli import pushed_images, run_for_each
from tests.unit.conftest import Call


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
    assert run_for_each(list(pushed_images(folder)), command, called) == 0
    assert [list(call) for call in calls] == [
        ["x", f"r.example/x-staging@{digest(d)}", f"{t}/{arch}", f"{folder}/results-{n}/{t}/o.json", "{other}"]
        for d, t, arch, n in (("a", "a", "amd64", 0), ("b", "b", "amd64", 1), ("c", "b", "arm64", 1))
    ]


@pytest.mark.programs
def test_programs_are_started_for_a_platform(folder: Path, command: Call) -> None:
    script = "raise SystemExit({'linux/amd64': 1, 'linux/arm64': 4}['{platform}'] * ('{target}' == 'b'))"
    status, _, err = command("each", folder, "--", sys.executable, "-c", script)
    assert (status, "b linux/arm64: exit status 4\n1 of 3 succeeded" in err) == (4, True)
    kill = "import os; os.kill(os.getpid(), 15)"
    assert command("each", folder, "--platform", "linux/arm64", "--", sys.executable, "-c", kill)[0] == 143
    status, _, err = command("each", folder, "--", "/gone")
    assert (status, "cannot be run" in err) == (4, True)
    status, _, err = command("each", folder / "gone", "--platform", "linux/arm64", "--", "x")
    assert (status, "`build --push` leaves a result.json" in err) == (3, True)
    (folder / "results-0/a/result.json").write_text("{}")
    status, _, err = command("each", folder, "--", "x")
    assert (status, "was it written by another version" in err) == (5, True)
