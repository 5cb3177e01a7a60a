"""Reading of untrusted files, with limits, and writing of files.

A file is first written under a temporary name, so that it is never incomplete."""

import hashlib
import io
import os
import re
import stat
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

import imagebuild
from imagebuild.core.errors import ConfigError
from imagebuild.core.leftovers import owner, remove_leftovers

_DESCRIPTOR = re.compile(r"/(?:dev|proc/self)/fd/(\d+)")
_STREAM = re.compile(r"-|/dev/stdin|/(?:dev|proc/self)/fd/\d+")
"""Matches names of open streams. They are read even if they are FIFOs or devices."""
LARGEST_FILE, LARGEST_STREAM = 64 << 20, 1 << 30
"""Default maximum size in bytes of a file that is read into memory, and of a stream that `open_file` reads."""

LARGEST_PART = 4 << 20
"""Maximum size in bytes of a template, of a file that templates insert, and of a script."""


def write_text(path: Path, text: str) -> None:
    """Write a text to a file as `write_bytes` does, in UTF-8."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file, and create its folder if it is missing.

    A regular file, or the target of a symlink, is replaced atomically and keeps its mode. The content is appended to a
    device, a FIFO or an open file descriptor such as /dev/stdout. Raises ConfigError if the file cannot be written."""
    try:
        with suppress(FileNotFoundError):
            path.stat()  # raises OSError for a circular symlink
        if path.is_dir():
            raise ConfigError(f"{path}: cannot be written: is a folder; name a file in it")
        target = path
        while not (descriptor := _DESCRIPTOR.fullmatch(str(target))) and target.is_symlink():
            target = target.parent / target.readlink()
        if descriptor:
            # Opening the name would truncate the file behind the descriptor.
            sys.stdout.flush()
            with os.fdopen(os.dup(int(descriptor[1])), "wb") as file:
                file.write(content)
        elif target.exists() and not target.is_file() and not target.is_dir():
            with target.open("wb") as file:
                file.write(content)
        else:
            with temporary_file(target.parent) as temporary:
                temporary.write_bytes(content)
                if target.exists():
                    temporary.chmod(target.stat().st_mode & 0o7777)
                temporary.replace(target)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None


@contextmanager
def temporary_file(folder: Path) -> Iterator[Path]:
    """Yield a path for a temporary file in a folder. Create the folder, and delete the file unless it was renamed."""
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    path = folder / f".partial-{owner()}-{uuid4().hex}"
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def open_file(path: Path, limit: int = LARGEST_STREAM) -> BinaryIO:
    """Open a regular file to read it, or read an open stream, such as `-` (the standard input), into memory.

    Another FIFO or a device could block or never end. Raises ConfigError for them and if a stream is larger than
    `limit` bytes, and OSError if the file cannot be read."""
    is_stream = _STREAM.fullmatch(str(path))
    if str(path) == "-":
        file: BinaryIO = sys.stdin.buffer
    else:
        # With O_NONBLOCK, opening a FIFO does not wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (0 if is_stream else os.O_NONBLOCK))
        kind = os.fstat(descriptor).st_mode
        if not (is_stream or stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
            os.close(descriptor)
            raise ConfigError(f"{path}: cannot be read: not a regular file; name a file, or pass it as /dev/stdin")
        file = os.fdopen(descriptor, "rb")  # raises OSError for a folder
    return io.BytesIO(_read(file, path, limit)) if is_stream else file


def _read(file: BinaryIO, path: Path, limit: int) -> bytes:
    content = file.read(limit + 1)
    if len(content) > limit:
        raise ConfigError(f"{path}: cannot be read: is larger than {limit} bytes; check the name")
    return content


def read_bytes(path: Path, limit: int = LARGEST_FILE) -> bytes:
    """Return the content of a file that `open_file` opens.
    Raises ConfigError if it cannot be read or is larger than `limit` bytes."""
    try:
        with open_file(path, limit) as file:
            return _read(file, path, limit)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; check the name") from None


def read_text(path: Path, limit: int = LARGEST_FILE) -> str:
    """Return the text of a file, with Unix line ends. Raises ConfigError as `read_bytes` does."""
    content = read_bytes(path, limit)
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: cannot be read: the text is not UTF-8; save the file as UTF-8") from None


def read_inside(folders: Collection[Path], path: Path) -> str:
    """Return the text of a regular file of at most LARGEST_PART bytes in one of the folders.
    Raises ConfigError for another file, also if links lead to the file, and if it cannot be read."""
    real = Path(os.path.realpath(path))
    if not any(real.is_relative_to(os.path.realpath(folder)) for folder in folders):
        raise ConfigError(f"{path}: leads to {real}, which is outside the project; replace the link by a copy")
    if real.exists() and not real.is_file():
        raise ConfigError(f"{path}: cannot be read: not a regular file; replace it by a file")
    return read_text(path, LARGEST_PART)


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def shipped_folder() -> Path:
    """Return the folder with the files that imagebuild ships: inside the installed package, or the repository."""
    package = Path(imagebuild.__file__).parent
    installed = package / "data"
    return installed if installed.is_dir() else package.parent


def cache_folder(name: str = "base") -> Path:
    """Return a folder of the cache. Raises ConfigError if the user has no home folder."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "imagebuild" / name
    except RuntimeError:
        raise ConfigError("HOME: is not set; set HOME or XDG_CACHE_HOME to a writable folder") from None
