"""The folders to which a build writes: one build at a time uses them, and no link leads out of them."""

from __future__ import annotations

import fcntl
import os
import shlex
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path

from imagebuild.core.console import redacted_arguments
from imagebuild.core.errors import ConfigError

LOCK = ".lock"
"""Name of the file that is locked. It contains a description of the process that holds the lock."""
PARTS = frozenset({"blobs", "index.json", "ingest", "oci-layout"})
"""Names in the folder of an OCI layout."""


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
        command = shlex.join(["imagebuild", *redacted_arguments(sys.argv[1:])])
        holder = f"process {os.getpid()} on {socket.gethostname()}, since {datetime.now(UTC):%F %T} UTC: {command}"
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, holder.encode()[:1000], 0)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be locked: {error.strerror}; choose another folder") from None
    return descriptor


def refuse_links(paths: Iterable[Path]) -> None:
    """Raise ConfigError if one of the paths to write is a link. A project may contain links to files of the user."""
    for path in paths:
        if path.is_symlink():
            raise ConfigError(f"{path}: is a link to {path.readlink()}; remove the link, or choose another folder")


def check_layout(layout: Path) -> None:
    """Raise ConfigError if the folder of an OCI layout contains other files.
    A layout is also accepted if it is incomplete, because an earlier build was killed."""
    if os.path.lexists(layout) and not (layout.is_dir() and all(path.name in PARTS for path in layout.iterdir())):
        raise ConfigError(f"{layout}: exists, but is not an OCI layout; remove it, or choose another folder")
