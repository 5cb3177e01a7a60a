"""Advice in messages: a user who follows it in a folder without a project reaches the goal.

Each row of tests/data/proposals.yaml is a command. The test runs it, runs each command that its message proposes, adds
each proposed option, and repeats this until the command works or ends with the message of the row."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from imagebuild.cli.app import load_command
from imagebuild.jobs.facts import DATA
from tests.conftest import ROOT, data
from tests.faulty import answering
from tests.unit.conftest import Call
from tests.upstream.wheels import make_wheel

CASES = data("cases/proposals")

TARGET = "quickstart-cuda13.5-debian13-runtime"
MATRIX: str = CASES["matrix"]
ROUNDS = 5
NOT_HERE = ("engine up", "build", "publish", "attest")
"""Beginnings of proposed commands that tests do not run, because they need an engine or a registry."""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder without a project, on a machine that reaches a package index of its own, but no engine."""
    for name in ("nvidia-nccl-cu13", "nvidia-cuda-runtime"):
        (tmp_path / "index/simple" / name).mkdir(parents=True)
    for version in ("2.31.2", "2.32.3"):
        for cpu in ("x86_64", "aarch64"):
            make_wheel(tmp_path / "index/simple/nvidia-nccl-cu13", "nvidia-nccl-cu13", version, f"manylinux2014_{cpu}")
    (tmp_path / "work/own").mkdir(parents=True)
    (tmp_path / "work/own/matrix.yaml").write_text(MATRIX)
    (tmp_path / "config/imagebuild").mkdir(parents=True)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    # The archive of a distribution is known only on that distribution, so it is not asked here.
    monkeypatch.setattr("platform.freedesktop_os_release", dict)
    monkeypatch.chdir(tmp_path / "work")
    handler = partial(Quiet, directory=tmp_path / "index")
    with answering(ThreadingHTTPServer(("127.0.0.1", 0), handler)) as address:
        settings = f"mirrors: {{python-index: 'http://{address}/simple/'}}\n"
        (tmp_path / "config/imagebuild/config.yaml").write_text(settings)
        yield tmp_path / "work"


def followed(words: list[str], message: str) -> list[str]:
    """Return the words of a command line, changed as a message proposes."""
    if near := re.search(r"(\S+?)(?:: (?:unknown|no selected|\w+ does)[^;]*|; \S+)?; did you mean '([^']+)'", message):
        words = [near[2] if word == near[1] else word for word in words]
    for clause in re.findall(r"(?:; add|replace it:) ((?:--with(?:out)? [\w-]+ ?)+)", message):
        words = [*words, *clause.split()]
    return words


FOREIGN = yaml.safe_load((ROOT / "imagebuild/cli/foreign.yaml").read_text())
ROWS = [
    *data("proposals"),
    *({"run": word, "status": 2, "ends": remedy} for word, remedy in FOREIGN["commands"].items()),
    *({"run": f"build {option}", "status": 2, "ends": remedy} for option, remedy in FOREIGN["options"].items()),
    *(
        {"run": f"{command} {option} x", "status": 2, "ends": remedy}
        for command in ("job slurm", "plan", "publish", "render", "ci-matrix")
        for option, remedy in FOREIGN[command.partition(" ")[0]].items()
    ),
    *(
        {"run": f"job slurm --profile h100 --param {name}=1", "status": 2, "ends": use}
        for name, use in DATA["other_parameters"].items()
    ),
    *({"run": f"plan --set *.{key}=x", "status": 2, "ends": "; use "} for key in FOREIGN["settings"]),
]


@pytest.mark.programs
@pytest.mark.parametrize("row", [pytest.param(row, id=row["run"]) for row in ROWS])
def test_advice_works_as_printed(empty: Path, command: Call, row: dict[str, Any]) -> None:
    words, done = shlex.split(row["run"].replace(" Q", f" {TARGET}")), set[str]()
    for _ in range(ROUNDS):
        status, printed, shown = command(*words)
        message = " ".join((printed + shown).split())
        texts = [text.replace("TARGET", TARGET) for text in re.findall(r"`imagebuild ([^`]+)`", message)]
        proposed = [text for text in texts if text not in done and not text.startswith(NOT_HERE)]
        for text in proposed:
            assert command(*shlex.split(text))[0] == 0, text
        again = followed(words, message)
        if again == words and not proposed:
            break
        done |= {*proposed}
        words = again
    options = {
        name for command in ("build", "plan", "job") for each in load_command(command).params for name in each.opts
    }
    options |= {"--version", "--show-completion"}
    assert {*re.findall(r"use (--[\w-]+)", message)} <= options
    ends = row.get("ends", "").replace("TARGET", TARGET)
    assert (ends in message.replace("TARGET", TARGET), status) == (True, row.get("status", 0)), message[-2000:]
