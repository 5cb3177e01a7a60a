"""Names that say which process made a temporary file or a container, so that others can remove them after a SIGKILL."""

import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from hashlib import sha256
from pathlib import Path

PROC = Path("/proc")
VARIABLE = "IMAGEBUILD_OWNER"
"""Environment variable of programs, with the owner that started them."""
OWNER = re.compile(r"([0-9a-f]{8})-(\d+)-(\d+)(?![\d])")
"""Matches the machine, the id and the start time of a process in a name."""


@cache
def _machine() -> str:
    """Return an id of this machine since its start, and of the process ids that are known here. Empty if unknown."""
    try:
        boot, ids = (PROC / "sys/kernel/random/boot_id").read_text(), (PROC / "self/ns/pid").readlink()
    except OSError:
        return ""
    return sha256(f"{boot} {ids}".encode()).hexdigest()[:8]


def _start_of(pid: int) -> str:
    """Return the time at which a process started. Empty if there is no such process."""
    try:
        return (PROC / f"{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def owner() -> str:
    """Return a text that stands for this process. A later process with the same id has another text."""
    return f"{_machine() or '0' * 8}-{os.getpid()}-{_start_of(os.getpid()) or 0}"


def is_gone(name: str) -> bool:
    """Return whether a name contains the owner, a process of this machine, and the owner has ended."""
    match = OWNER.search(name)
    return match is not None and match[1] == _machine() and _start_of(int(match[2])) != match[3]


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files and folders whose owner has ended, and kill the programs that the owner started."""
    with suppress(OSError):
        for path in folder.iterdir():
            if path.name.startswith(("imagebuild-", ".partial-")) and is_gone(path.name):
                _kill_programs(path.name)
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)


def _kill_programs(name: str) -> None:
    """Kill all programs that the owner in a name started, also indirectly."""
    match = OWNER.search(name)
    mark = f"{VARIABLE}={match[0] if match else name}".encode()
    for process in PROC.glob("[0-9]*"):
        with suppress(OSError):  # the process has just ended, or belongs to another user
            if mark in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)


@contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """Yield a new folder that is deleted at the end, or by a later process if this process is killed."""
    remove_leftovers(parent)
    with tempfile.TemporaryDirectory(prefix=f"imagebuild-{owner()}-", dir=parent) as name:
        yield Path(name)


@contextmanager
def own_temporary_files() -> Iterator[None]:
    """Put all temporary files of this process into one folder, if there is a writable one."""
    with ExitStack() as stack:
        with suppress(OSError):
            folder = stack.enter_context(temporary_folder(Path(tempfile.gettempdir())))
            folder.chmod(0o711)  # some programs run as another user, and must enter a folder in it
            stack.callback(setattr, tempfile, "tempdir", tempfile.tempdir)
            tempfile.tempdir = str(folder)
        yield
