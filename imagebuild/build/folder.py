"""The folders to which a build writes: one build at a time uses them, no link leads out of them, and a log is kept."""

from __future__ import annotations

import fcntl
import os
import socket
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from imagebuild import __version__
from imagebuild.core.console import BLANK, own_command, redacted_text, visible
from imagebuild.core.errors import CommandError, ConfigError, ImagebuildError, ResultError
from imagebuild.core.files import refuse_links
from imagebuild.core.run import os_errors_as_command_errors

LOCK = ".lock"
"""Name of the file that is locked. It contains a description of the process that holds the lock."""
PARTS = frozenset({"blobs", "index.json", "ingest", "oci-layout"})
"""Names in the folder of an OCI layout."""
LARGEST_LOG, LONGEST_LINE, KEPT_LINES = 64 << 20, 4000, 20_000
"""Limits of a log: its size in bytes, the length of a line in characters, and the number of last lines that are kept
even if the log would be larger."""
LONGEST_KEY = 100
"""Maximum number of lines of a private key in a log."""


@contextmanager
def held_folders(folders: Iterable[Path], note: Callable[[str], None]) -> Iterator[None]:
    """Lock folders until the end of the context. If another build holds a lock, wait, and describe that build.
    Raises ConfigError if a folder cannot be locked."""
    with ExitStack() as stack:
        for folder in sorted(set(folders)):  # in the same order everywhere, so that no two builds wait for each other
            stack.callback(os.close, _locked(folder, note))
        yield


def _locked(folder: Path, note: Callable[[str], None]) -> int:
    """Return an open file that holds the lock of a folder. The lock ends when the file is closed."""
    path = folder / LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(descriptor, 1000, 0).decode(errors="replace").strip()
                note(f"{folder}: waiting until another build has ended: {holder or 'a process that has just started'}")
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                break
            os.close(descriptor)  # the other build, or somebody else, has removed the folder
            folder.mkdir(parents=True, exist_ok=True)
        holder = (
            f"process {os.getpid()} on {socket.gethostname()}, since {datetime.now(UTC):%F %T} UTC: {own_command()}"
        )
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, holder.encode()[:1000], 0)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be locked: {error.strerror}; choose another folder") from None
    return descriptor


class BuildLog:
    """The log of a build: a file with the output of all steps, without secrets. It ends with the error, if any.

    If the log gets too large, lines in the middle are left out. Raises CommandError if the file cannot be written."""

    def __init__(self, path: Path) -> None:
        refuse_links([path.parent, path])
        self.path, self._began, self._left, self._dropped = path, time.monotonic(), LARGEST_LOG, 0
        self._last: deque[str] = deque(maxlen=KEPT_LINES)
        self._hidden: dict[str, int] = {}
        """Maps each source that prints a private key to the number of lines that the key may still have."""

    def __enter__(self) -> Self:
        with os_errors_as_command_errors():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("w", encoding="utf-8", errors="replace")
        self.write(f"imagebuild {__version__}, {datetime.now(UTC):%F %T} UTC: {own_command()}")
        return self

    def write(self, text: str, source: str = "imagebuild") -> None:
        """Add lines that a source, such as a stage, has printed."""
        for line in visible(text).split("\n"):
            if "PRIVATE KEY-----" in line:
                self._hidden[source] = 1 if "-----END" in line else LONGEST_KEY
            hidden = self._hidden[source] = max(0, self._hidden.get(source, 0) - 1)
            shown = BLANK if hidden or "PRIVATE KEY-----" in line else redacted_text(line)[:LONGEST_LINE]
            self._add(f"{time.monotonic() - self._began:8.1f}  {source} | {shown}\n")

    def _add(self, line: str) -> None:
        self._left -= len(line)
        if self._left < 0:
            self._dropped += len(self._last) == KEPT_LINES
            self._last.append(line)
            return
        with os_errors_as_command_errors():
            self._file.write(line)
            self._file.flush()

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if error:
            text = str(error) if isinstance(error, ImagebuildError) else "".join(traceback.format_exception(error))
            self.write(text, "error")
        with os_errors_as_command_errors(), self._file:
            self._file.writelines([f"… {self._dropped} lines left out …\n"] * bool(self._dropped) + list(self._last))
        if isinstance(error, CommandError | ResultError):
            error.args = (f"{error}\nthe whole log: {self.path}",)


def check_layout(layout: Path) -> None:
    """Raise ConfigError if the folder of an OCI layout contains other files.
    A layout is also accepted if it is incomplete, because an earlier build was killed."""
    if os.path.lexists(layout) and not (layout.is_dir() and all(path.name in PARTS for path in layout.iterdir())):
        raise ConfigError(f"{layout}: exists, but is not an OCI layout; remove it, or choose another folder")
