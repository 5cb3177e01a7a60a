"""Programs and processes of this machine, and what being refused by it looks like to the user."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from imagebuild.apt import Run, numbers
from imagebuild.errors import CommandError, ConfigError

PROC = Path("/proc")


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    # What we read must not be translated, and sbin is not on everyone's path.
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    return {**os.environ, "PATH": path, "LC_ALL": "C.UTF-8", **(extra or {})}


def run(*argv: str, env: Mapping[str, str] | None = None, timeout: float | None = None) -> str:
    """What a program prints, as text. Raises CommandError as `read` does."""
    return _text(read(*argv, env=env, timeout=timeout))


def read(*argv: str, env: Mapping[str, str] | None = None, timeout: float | None = None) -> bytes:
    """What a program prints. Raises CommandError with its last lines if it fails, is missing or is too slow.

    Ctrl-C reaches the program as one SIGINT, and is raised here after the program has ended: apt, for one,
    finishes the package that it is setting up.
    """
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            argv, env=environment(env), stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe,
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise CommandError(f"`{argv[0]}` cannot be run: {error.strerror}") from error
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired as error:
        process.kill()
        process.communicate()
        raise CommandError(f"`{' '.join(argv)}` did not answer within {timeout:.0f} s") from error
    except BaseException:
        process.send_signal(signal.SIGINT)
        process.communicate()
        raise
    if process.returncode:
        lines = "\n".join((_text(err).strip() or _text(out).strip()).splitlines()[-10:])
        raise CommandError(f"`{' '.join(argv)}` failed ({process.returncode}): {lines}")
    return out


def _text(output: bytes) -> str:
    return output.decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")


def end_children() -> None:
    """End every program that this process has started and not yet waited for, with what those have started."""
    for pid, (parent, _) in processes().items():
        if parent == os.getpid():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGTERM)


def which(program: str) -> str | None:
    return shutil.which(program, path=environment()["PATH"])


def version(run: Run, *argv: str) -> tuple[int, ...]:
    """The version that a program reports, () if it cannot be run."""
    with suppress(CommandError):
        return numbers(run(*argv, timeout=10))
    return ()


def argv(pid: int | str) -> list[str]:
    with suppress(OSError):
        return (PROC / str(pid) / "cmdline").read_text(errors="replace").rstrip("\0").split("\0")
    return []


def processes() -> dict[int, tuple[int, list[str]]]:
    table = {}
    for folder in PROC.glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            table[int(folder.name)] = (parent, argv(folder.name))
    return table


@contextmanager
def plain_errors() -> Iterator[None]:
    """A full disk or a read-only folder is the machine's problem, not a bug."""
    try:
        yield
    except OSError as error:
        raise CommandError(f"{error.filename or 'writing'}: {error.strerror}") from error


def require_root(what: str) -> None:
    if os.geteuid():
        raise ConfigError(f"{what} needs root: use sudo, or set DOCKER_HOST to an engine that you may use")
