"""A program of this machine with a deadline: it and what it started in its session end, its output is kept."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import IO

from imagebuild.errors import CommandError
from imagebuild.programs import environment
from imagebuild.runners.sink import Sink

CHUNK = 1 << 16
POLL_S = 0.5
DRAIN_S = 2
"""For output that is still under way when the program has ended; something that it left may keep the pipe open."""
KILL_S = 5


def run(argv: Sequence[str], sink: Sink, timeout_s: float) -> int | None:
    """Run a program: its exit status, or `None` if it was ended for its time or for what it printed.

    Raises CommandError if it cannot be started. Whatever is raised meanwhile, the program has ended.
    """
    process = start(argv)
    assert process.stdout
    reader = threading.Thread(target=sink.drain, args=(_chunks(process.stdout),), daemon=True)
    reader.start()
    deadline = time.monotonic() + timeout_s
    try:
        while process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, min(POLL_S, deadline - time.monotonic())))
            if process.returncode is None and (time.monotonic() >= deadline or sink.full.is_set()):
                return None
        reader.join(DRAIN_S)
        return None if sink.full.is_set() else process.returncode
    finally:
        end(process)
        reader.join(DRAIN_S)


def start(argv: Sequence[str]) -> subprocess.Popen[bytes]:
    """A program in a session of its own, whose errors are in its output."""
    try:
        return subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            # Nobody answers questions: without a terminal ssh would ask through a window.
            env=environment({"SSH_ASKPASS_REQUIRE": "never"}), bufsize=0,
        )  # fmt: skip
    except OSError as error:
        raise CommandError(f"`{argv[0]}` cannot be run: {error.strerror}") from None


def end(process: subprocess.Popen[bytes]) -> None:
    """End a program and its group, also what the group has left behind."""
    with suppress(ProcessLookupError, PermissionError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(KILL_S)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _chunks(stream: IO[bytes]) -> Iterator[bytes]:
    with stream:
        while chunk := stream.read(CHUNK):
            yield chunk
