"""Programs that are started: what they print, how they end, and what is left of them."""

import signal
import time
from pathlib import Path

import pytest

from imagebuild.core import CommandError, OutputSink, run, run_logged, run_program

pytestmark = pytest.mark.programs


def bash(text: str) -> tuple[str, ...]:
    return ("bash", "-c", text)


def test_what_a_program_prints_and_why_it_failed() -> None:
    assert run_program(*bash("echo out; echo err >&2; echo $LC_ALL $X"), env={"X": "1"}) == "out\nC.UTF-8 1\n"
    with pytest.raises(CommandError, match=r"failed \(3\): reason$"):
        run_program(*bash("echo out; echo reason >&2; exit 3"))
    with pytest.raises(CommandError, match="`/no/such` cannot be run: No such file"):
        run_program("/no/such", "program")


def test_a_slow_program_ends_with_its_children(tmp_path: Path) -> None:
    child = tmp_path / "child"
    for seconds in (0.3, 3, 30):  # a busy machine may take long to start both
        with pytest.raises(CommandError, match=f"did not answer within {seconds:.0f} s"):
            run_program(*bash(f"sleep 1000 & echo $! > {child}.new; mv {child}.new {child}; wait"), timeout=seconds)
        if child.exists():
            break
    deadline = time.monotonic() + 60
    while Path("/proc", child.read_text().strip()).exists():
        assert time.monotonic() < deadline, "the child still runs"
        time.sleep(0.02)


def test_lines_are_handed_on_and_the_last_ones_are_shown() -> None:
    lines: list[str] = []
    run_logged(bash("echo one; echo $X >&2"), lines.append, name="x", env={"X": "two"})
    assert lines == ["one", "two"]
    with pytest.raises(CommandError) as error:
        run_logged(bash("seq 100; exit 1"), lines.append, name="mmdebstrap", env={})
    assert str(error.value).split() == ["mmdebstrap", "failed", "(1):", *map(str, range(86, 101))]


def test_an_interrupted_program_may_clean_up(tmp_path: Path) -> None:
    def interrupt(_line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_logged(bash(f"trap 'touch {tmp_path}/clean; exit' TERM; echo; sleep 9 & wait"), interrupt, name="x", env={})
    assert (tmp_path / "clean").exists()


def test_ctrl_c_waits_for_the_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As one SIGINT, after which apt finishes the package that it is setting up."""

    ready = tmp_path / "ready"

    def interrupt(*_: object) -> None:
        if ready.exists():
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    trap = f"trap 'sleep 0.2; touch {tmp_path}/done; kill $!' INT"
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
        with pytest.raises(KeyboardInterrupt):
            run_program(*bash(f"{trap}; sleep 99 & touch {ready}; wait"))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert (tmp_path / "done").exists()


@pytest.mark.parametrize(
    ("text", "deadline_s", "status", "reason"),
    [
        ("echo x; exit 3", 60, 3, ""),
        ("echo x; sleep 99", 2, None, ""),
        ("yes", 60, None, "printed more than 0 MiB"),
    ],
)
def test_a_deadline_and_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, deadline_s: float, status: int | None, reason: str
) -> None:
    monkeypatch.setattr(run, "LIMIT", 1 << 19)
    with OutputSink(tmp_path / "new" / "log") as sink:
        assert run.run_with_deadline(bash(text), sink, deadline_s) == status
    assert sink.reason == reason
    written = (tmp_path / "new" / "log").read_text()
    assert written.endswith(sink.text) if reason else written == sink.text == "x\n"
