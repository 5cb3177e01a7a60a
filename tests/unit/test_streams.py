"""Streams and files that are closed, full, missing or of another kind: what the real program does with them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, Files, data
from tests.unit.conftest import Call

pytestmark = pytest.mark.programs
TABLE: dict[str, Any] = data("streams")
LINE = re.compile("error: [^\n]+\n")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = Files(tmp_path_factory.mktemp("streams"))
    shutil.copy(ROOT / "tests/data/nccl-logs/020.txt", files.root / "log.txt")
    files.write("append.txt", "RUN appended\n")
    files.write("catalog.json", '{"images": []}')
    files.write("plan.json", '{"targets": []}')
    files.write("policy.yaml", "fail: {severity: high}\n")
    shell(files.root, "run --json base.json", "report log.txt")
    shutil.copy(ROOT / "tests/data/scan/grype.sarif", files.root / "report.sarif")
    os.mkfifo(files.root / "fifo")
    return files.root


def shell(work: Path, code: str, command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run shell code in which `run` is an imagebuild command."""
    program = shlex.join([sys.executable, "-m", "imagebuild"])
    before, _, after = command.partition(" FILE")
    function = f"run() {{ {program} {before} {chr(34)}$@{chr(34)} {after}; }}"
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {function}; {code}"], cwd=work, capture_output=True, text=True, timeout=120,
        check=False, env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
    )  # fmt: skip


@cache
def usual_end(work: Path, command: str) -> subprocess.CompletedProcess[str]:
    return shell(work, "run", command)


@pytest.mark.parametrize("command", TABLE["commands"])
def test_a_broken_stream_is_one_line_at_most(work: Path, command: str) -> None:
    usual = usual_end(work, command)
    for name, row in TABLE["streams"].items():
        done = shell(work, row["shell"], command)
        assert (done.returncode, done.stdout) == (row.get("status", usual.returncode), ""), name
        assert done.stderr.removeprefix(usual.stderr) == row["says"], name


@pytest.mark.parametrize("variables", TABLE["machines"], ids=str)
def test_a_machine_without_a_place_for_files(work: Path, variables: dict[str, str]) -> None:
    for command in ("plan", "render tiny-cuda13.0-debian13-runtime", "report log.txt"):
        usual, done = usual_end(work, command), shell(work, "run", command, **variables)
        assert (done.returncode, done.stdout, done.stderr) == (usual.returncode, usual.stdout, usual.stderr)


@pytest.mark.parametrize(("command", "file"), TABLE["inputs"].items())
def test_a_stream_is_read_like_a_file(work: Path, command: str, file: str) -> None:
    outputs = set()
    for way in TABLE["ways"]:
        done = shell(work, re.sub(r"\bfile\b", file, way), command)
        outputs.add((done.returncode, (done.stderr + done.stdout).splitlines()[-1]))
    assert len(outputs) == 1, outputs


@pytest.mark.parametrize("path", ["folder", "/dev/null/file", "/proc/file"])
def test_an_output_is_checked_before_the_work(
    work: Path, command: Call, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(work)
    (work / "folder").mkdir(exist_ok=True)
    before = sorted(work.rglob("*"))
    for words in [*TABLE["outputs"], *(TABLE["folders"] if path != "folder" else [])]:
        status, printed, message = command(*words.split(), path)
        assert (status, printed) == (2, ""), words
        assert LINE.fullmatch(message), message
        assert "cannot be written" in message or "is a directory" in message, message
    assert sorted(work.rglob("*")) == before


def test_a_result_is_printed_if_its_file_cannot_be_written(
    work: Path, command: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(work)
    status, printed, message = command("plan", "--json", "/dev/full")
    assert (status, "tiny-cuda13.0-debian13-runtime" in printed) == (2, True)
    assert message == "error: /dev/full: cannot be written: No space left on device\n"


@pytest.mark.parametrize("words", [*TABLE["outputs"], *TABLE["folders"], *TABLE["on-full-disk"]])
def test_a_full_disk_is_noticed_before_the_work(work: Path, words: str) -> None:
    (work / "full").mkdir(exist_ok=True)
    mount = "mount -t tmpfs -o size=16k none full"
    if subprocess.run(["unshare", "-rm", "bash", "-c", mount], cwd=work, capture_output=True, check=False).returncode:
        pytest.skip("this machine allows no mounts in a namespace")
    usual = words in TABLE["on-full-disk"]
    given = words if usual else f"{words} full" if words in TABLE["folders"] else f"{words} full/file"
    command = f"{mount}; cat /dev/zero 2> /dev/null > full/fill; {sys.executable} -m imagebuild {given}"
    variables = {"HOME": "full", "XDG_CACHE_HOME": "full/cache", "TMPDIR": str(work / "full")} if usual else {}
    done = subprocess.run(
        ["unshare", "-rm", "env", *(f"{name}={value}" for name, value in variables.items()), "bash", "-c", command],
        cwd=work, capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    if usual:
        assert (done.returncode, done.stderr) == (shell(work, "run", words).returncode, "")
    else:
        assert (done.returncode, LINE.fullmatch(done.stderr) is not None) == (2, True), done.stderr
        assert "No space left on device" in done.stderr
