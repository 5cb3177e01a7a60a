"""Programs: their output, their end, and their child processes."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from traceback import walk_stack
from types import FrameType

import pytest

from imagebuild.core.errors import CommandError
from imagebuild.core.run import Finished, execute, run_program, which
from tests.unit.conftest import gone

pytestmark = pytest.mark.programs


def bash(text: str) -> tuple[str, ...]:
    return ("bash", "-c", text)


@pytest.mark.parametrize("in_memory", [True, False])
def test_what_a_program_prints_and_why_it_failed(in_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not in_memory:  # some builds of Python cannot
        monkeypatch.delattr(os, "memfd_create")
    assert run_program(*bash("echo out; echo err >&2; echo $LC_ALL $X"), env={"X": "1"}) == "out\nC.UTF-8 1\n"
    with pytest.raises(CommandError, match=r"failed \(3\): reason$"):
        run_program(*bash("echo out; echo reason >&2; exit 3"))
    with pytest.raises(CommandError, match="`/no/such` cannot be run: No such file"):
        run_program("/no/such", "program")


@pytest.mark.parametrize("path", ["", None])
def test_without_path_no_program_of_the_current_folder_runs(
    tmp_path: Path, path: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("true", "planted"):
        (tmp_path / name).write_text("#!/bin/sh\necho planted\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", path) if path is not None else monkeypatch.delenv("PATH")
    assert run_program("true") == ""
    assert which("planted") is None
    monkeypatch.delenv("HOME")
    assert run_program(*bash("echo $HOME")).startswith("/")


def test_a_program_ends_with_its_children(forever: str) -> None:
    assert run_program(*bash(f"sleep {forever} & echo x")) == "x\n"
    assert gone(forever)
    with pytest.raises(CommandError, match="did not answer within 0 s"):
        run_program(*bash(f"sleep {forever} & sleep {forever}"), timeout=0.2)
    assert gone(forever)


def test_pauses_of_a_program_are_reported_and_can_end_it(forever: str) -> None:
    pauses: list[None] = []

    def stop() -> None:
        pauses.append(None)
        if len(pauses) > 1:
            raise CommandError("the node hangs")

    with pytest.raises(CommandError, match="the node hangs"):
        execute(bash(f"sleep {forever}"), each_pause=stop, pause_s=0.1)
    assert gone(forever)
    assert execute(bash("echo x"), each_pause=stop, pause_s=60).status == 0
    assert execute(bash(f"sleep {forever}"), each_pause=pauses.clear, pause_s=0.1, timeout_s=0.5).status is None
    assert not pauses, "pauses do not hide the time limit"


def test_lines_are_handed_on_and_errors_of_who_takes_them_end_the_program(forever: str) -> None:
    lines: list[str] = []
    done = execute(bash("echo one; echo $X >&2; echo -n end; exit 3"), each_line=lines.append, env={"X": "two"})
    assert (done, lines) == (Finished(3, "one\ntwo\nend"), ["one", "two", "end"])
    with pytest.raises(ValueError, match="one"):
        execute(bash(f"echo one; sleep {forever}"), each_line=int)
    assert gone(forever)


@pytest.mark.parametrize(("run", "name"), [(run_program, "INT"), (lambda *argv: execute(argv), "TERM")])
def test_ctrl_c_waits_for_the_program(tmp_path: Path, run: Callable[..., object], name: str) -> None:
    """A program gets one signal and may clean up: apt finishes a package, mmdebstrap removes its files."""
    ready, interrupted = tmp_path / "ready", list[bool]()

    def interrupt(_: int, frame: FrameType | None) -> None:
        # Not before we wait for what was started: on a busy machine, the program may be further than its starter.
        waits = any(at.f_code.co_qualname in ("Popen.wait", "Thread.join") for at, _ in walk_stack(frame))
        if ready.exists() and waits and not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt

    trap = f"trap 'sleep 0.2; touch {tmp_path}/done; exit' {name}"
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
        with pytest.raises(KeyboardInterrupt):
            run(*bash(f"{trap}; sleep 60 & : > {ready}; wait"))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert (tmp_path / "done").exists()


@pytest.mark.parametrize(("text", "deadline_s", "status"), [("echo x; exit 3", 60, 3), ("echo x; sleep 60", 5, None)])
def test_a_deadline_and_a_log(tmp_path: Path, text: str, deadline_s: float, status: int | None) -> None:
    done = execute(bash(text), timeout_s=deadline_s, log=tmp_path / "new" / "log")
    assert (done.status, done.output) == (status, "x\n")
    assert (tmp_path / "new" / "log").read_text() == "x\n"


def test_output_without_end_fills_neither_the_memory_nor_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("imagebuild.core.run.MOST_LOG", 10)
    monkeypatch.setattr("imagebuild.core.run.LONGEST_LINE", 4)
    pieces: list[str] = []
    execute(bash("printf 0123456789abcdefgh"), log=tmp_path / "log", each_line=pieces.append)
    assert pieces == ["0123", "4567", "89ab", "cdef", "gh"]
    assert (tmp_path / "log").read_text() == "01234567\n(the rest is left out, as the log is too large)\n"


def test_a_log_that_cannot_be_written_is_no_result() -> None:
    with pytest.raises(CommandError, match="No space left on device"):
        execute(bash("echo x"), log=Path("/dev/full"))
    with pytest.raises(CommandError, match="/proc/no"):
        execute(bash("echo x"), log=Path("/proc/no/log"))


def test_a_program_that_hangs_or_prints_without_end_is_announced_and_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], forever: str
) -> None:
    monkeypatch.setattr("imagebuild.core.run.QUIET_S", 0.3)
    monkeypatch.setattr("imagebuild.core.run.TIMEOUTS_S", {"bash": 4.0})
    monkeypatch.setattr("imagebuild.core.run.MOST_OUTPUT", 1 << 20)
    monkeypatch.setattr("imagebuild.core.console.FIRST_S", 0.3)
    with pytest.raises(CommandError, match="`bash -c sleep .*did not answer within 4 s"):
        run_program(*bash(f"sleep {forever}"))
    assert "still waiting for bash for" in capsys.readouterr().err
    with pytest.raises(CommandError, match="printed more than 1 MiB"):
        run_program(*bash("yes"), timeout=60)
    with pytest.raises(CommandError, match=r"`false --token \(redacted\) https://\(redacted\)@host/` failed"):
        run_program("false", "--token", "abc", "https://me:secret@host/")
