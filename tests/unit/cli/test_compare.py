"""The command `imagebuild compare`, with a program that prints tables, and the report on its log."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.bench.nccl_tables import Table
from tests.unit.conftest import Call

pytestmark = pytest.mark.programs

PROGRAM = """\
#!/bin/bash
echo "a:1:1 [0] NCCL INFO NCCL_ALGO set by environment to $NCCL_ALGO"
echo "NCCL version 2.30.7+cuda13.0"
cat "{folder}/$NCCL_ALGO$((RANDOM % 3))"
"""


def _constant(rate: float) -> Callable[[int], float]:
    return lambda _: rate


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A program whose algorithm Tree is 3 % slower than Ring. Its speed varies."""
    for name, rate in ("Ring", 350.0), ("Tree", 339.5):
        for number in range(3):
            speed = _constant(rate + number / 10)
            table = Table(sizes=(1 << 30,), ranks=4, seed=number, speed=speed)
            (tmp_path / f"{name}{number}").write_text(table.text())
    path = tmp_path / "all_reduce_perf"
    path.write_text(PROGRAM.replace("{folder}", str(tmp_path)))
    path.chmod(0o755)
    return path


def test_a_slower_side_is_named_and_the_log_can_be_read_again(command: Call, program: Path, tmp_path: Path) -> None:
    log, found, junit = tmp_path / "compare.log", tmp_path / "report.json", tmp_path / "junit.xml"
    status, out, err = command("compare", "env:NCCL_ALGO=Ring,Tree", "-o", log, "--", program)
    assert status == 1, err
    assert "1073741824 bytes: env:NCCL_ALGO=Tree: slower" in out.replace("\n", " ")
    status, _, _ = command("report", log, "--json", found, "--junit", junit, "--allow", "unvalidated")
    assert status == 1
    (difference,) = json.loads(found.read_text())["paired"][0]["differences"]
    assert -3.5 < difference["low"] < difference["high"] < -2.5
    assert "env:NCCL_ALGO=Tree" in junit.read_text()
    assert command("report", log, "--allow-loss", "5", "--allow", "unvalidated")[0] == 0
    assert command("report", found, "--allow-loss", "5", "--allow", "unvalidated")[0] == 0


def test_ssh_gets_the_script_as_one_word(command: Call, program: Path, tmp_path: Path) -> None:
    """ssh joins its arguments with blanks and gives them to a shell, so the script must be quoted."""
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
    ssh.chmod(0o755)
    log = tmp_path / "compare.log"
    status, _, err = command(
        "compare", "env:NCCL_ALGO=Ring,Tree", "--runner", f"exec:{ssh} node", "-o", log, "--", program
    )
    assert status == 1, err
    text = log.read_text()
    assert text.startswith("# imagebuild-compare sides "), "the shell of ssh runs nothing but bash"
    assert text.count("imagebuild-compare end 0") == 26


def test_wrong_options(command: Call, program: Path, tmp_path: Path) -> None:
    for words, says in (
        (("compare", "env:A=1,2", "--", program), "-o: is missing; name the file for the log"),
        (("compare", "env:A=1,2", "-o", tmp_path / "x", "--runner", "docker", "--", program), "must be exec:PREFIX"),
        (("report", tmp_path / "Ring0", "--allow-loss", "2"), "--allow-loss: no file is the log of a comparison"),
    ):
        status, _, err = command(*words)
        assert (status, says in err) == (2, True), err
