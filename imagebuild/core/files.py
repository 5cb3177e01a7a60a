"""Reading of untrusted files, with limits, and writing of files.

A file is first written under a temporary name, so that it is never incomplete."""

import errno
import hashlib
import io
import os
import re
import stat
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import BinaryIO
from uuid import uuid4

import imagebuild
from imagebuild.core.errors import ConfigError
from imagebuild.core.leftovers import owner, remove_leftovers

_DESCRIPTOR = re.compile(r"/(?:dev|proc/self)/fd/(\d+)")
HIDDEN = re.compile("[\r\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""Characters at which YAML ends a line, but editors and reviews of changes do not, and those that reorder text."""
_STREAM = re.compile(r"-|/dev/stdin|/(?:dev|proc/self)/fd/\d+")
"""Matches names of open streams. They are read even if they are FIFOs or devices."""
LARGEST_FILE, LARGEST_STREAM = 64 << 20, 1 << 30
"""Default maximum size in bytes of a file that is read into memory, and of a stream that `open_file` reads."""
_streams: dict[object, bytes] = {}
"""Maps each stream that was read to its content."""
FIFO_S = 5
"""Maximum time in seconds that a command waits for a program that writes to a FIFO."""
LARGEST_PART = 4 << 20
"""Maximum size in bytes of a template, of a file that templates insert, and of a script."""


def write_text(path: Path, text: str, *, named: bool = False) -> None:
    """Write a text to a file as `write_bytes` does, in UTF-8."""
    write_bytes(path, text.encode(), named=named)


def check_writable(path: Path, *, folder: bool = False) -> None:
    """Raise ConfigError if a file, or files in a `folder`, cannot be written, as `write_bytes` would.
    Work that takes long begins after this."""
    try:
        with suppress(FileNotFoundError):
            path.stat()  # raises OSError for a circular symlink
        if path.is_dir() and not folder:
            raise ConfigError(f"{path}: cannot be written: is a folder; name a file in it")
        if path.exists() and not path.is_file() and not folder:
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        else:
            real = Path(os.path.realpath(path))
            places = [real, *real.parents] if folder else real.parents
            with temporary_file(next(place for place in places if place.exists())) as temporary:
                temporary.write_bytes(b"\n")  # a full disk accepts an empty file
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None


def refuse_links(paths: Iterable[Path]) -> None:
    """Raise ConfigError if one of the paths to write is a link. A project may contain links to files of the user."""
    for path in paths:
        if path.is_symlink():
            raise ConfigError(f"{path}: is a link to {path.readlink()}; remove the link, or choose another folder")


def refuse_foreign(path: Path) -> None:
    """Raise ConfigError if a file that the user did not name belongs to another user, who could have planted it, as in
    /tmp. As in git, files of root, and of the user of sudo, are accepted."""
    owner_ = path.lstat().st_uid
    if str(owner_) not in {str(os.geteuid()), "0", os.environ.get("SUDO_UID")}:
        raise ConfigError(f"{path}: belongs to another user (id {owner_}); copy or delete it, or choose another folder")


def write_bytes(path: Path, content: bytes, *, named: bool = False) -> None:
    """Write a file, and create its folder if it is missing.

    A regular file is replaced atomically and keeps its mode. The content is appended to a device, a FIFO or an open
    file descriptor such as /dev/stdout. Raises ConfigError if the file cannot be written. Links are followed only if
    the user `named` this very file."""
    follows = named or str(path).startswith("/dev/")
    if not follows:
        refuse_links([path])
    try:
        with suppress(FileNotFoundError):
            path.stat()  # raises OSError for a circular symlink
        if path.is_dir():
            raise ConfigError(f"{path}: cannot be written: is a folder; name a file in it")
        target = path
        # A link that is put there only now is replaced.
        while follows and target.is_symlink() and not _DESCRIPTOR.fullmatch(str(target)):
            target = target.parent / target.readlink()
        if descriptor := _DESCRIPTOR.fullmatch(str(target)):
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
    """Open a regular file to read it, or read a FIFO or an open stream, such as `-` (the standard input), into memory.

    A device could never end. Raises ConfigError for a device, for a FIFO to which no program writes, and if a stream is
    larger than `limit` bytes, and OSError if the file cannot be read."""
    if str(path) == "-":
        return io.BytesIO(_stream(sys.stdin, sys.stdin.buffer.read, path, limit))
    found = path.stat()
    if _STREAM.fullmatch(str(path)) or stat.S_ISFIFO(found.st_mode):
        return io.BytesIO(_stream((found.st_dev, found.st_ino), lambda size: _read_stream(path, size), path, limit))
    # With O_NONBLOCK, opening a device does not wait.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    kind = os.fstat(descriptor).st_mode
    if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
        os.close(descriptor)
        raise ConfigError(f"{path}: cannot be read: not a regular file; name a file, or pass it as /dev/stdin")
    return os.fdopen(descriptor, "rb")  # raises OSError for a folder


def _stream(key: object, read: Callable[[int], bytes], path: Path, limit: int) -> bytes:
    """Return the content of a stream. It is kept, because a stream can be read only once, but some files are read
    twice. `read` reads a number of bytes. Raises ConfigError if there are more than `limit` bytes."""
    if key not in _streams:
        _streams[key] = read(limit + 1)
    if len(_streams[key]) > limit:
        raise ConfigError(f"{path}: cannot be read: is larger than {limit} bytes; check the name")
    return _streams[key]


def _read_stream(path: Path, size: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if _STREAM.fullmatch(str(path)) else _opened_fifo(path)
    with os.fdopen(descriptor, "rb") as file:
        return file.read(size)


def _opened_fifo(path: Path) -> int:
    """Open a FIFO when a program opens it to write. Raises ConfigError if no program does so for FIFO_S seconds."""
    opened: list[int] = []
    waiting = Thread(target=lambda: opened.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC)), daemon=True)
    waiting.start()
    waiting.join(FIFO_S)
    if not opened:
        problem = "not a regular file, and no program writes to it; name a file, or pass it as /dev/stdin"
        raise ConfigError(f"{path}: cannot be read: {problem}")
    return opened[0]


def read_bytes(path: Path, limit: int = LARGEST_FILE) -> bytes:
    """Return the content of a file that `open_file` opens.
    Raises ConfigError if it cannot be read or is larger than `limit` bytes."""
    try:
        with open_file(path, limit) as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; check the name") from None
    if len(content) > limit:
        raise ConfigError(f"{path}: cannot be read: is larger than {limit} bytes; check the name")
    return content


def read_text(path: Path, limit: int = LARGEST_FILE, *, reviewed: bool = False) -> str:
    """Return the text of a file, with Unix line ends. Raises ConfigError as `read_bytes` does.
    `reviewed`: also raise ConfigError for characters that hide from people what the text means."""
    content = read_bytes(path, limit)
    try:
        text = content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: cannot be read: the text is not UTF-8; save the file as UTF-8") from None
    if reviewed and (hidden := HIDDEN.search(text)):
        place = f"{path}:{text.count(chr(10), 0, hidden.start()) + 1}"
        raise ConfigError(f"{place}: contains U+{ord(hidden[0]):04X}, which editors do not show; remove this character")
    return text.replace("\r", "\n")


def refuse_outside(folders: Collection[Path], path: Path, what: str = "the project") -> Path:
    """Return the real path of a file. Raises ConfigError if links lead out of the folders, which others may have made.
    `what` names the folders in the message."""
    real = Path(os.path.realpath(path))
    if not any(real.is_relative_to(os.path.realpath(folder)) for folder in folders):
        raise ConfigError(f"{path}: leads to {real}, which is outside {what}; replace the link by a copy")
    return real


def read_inside(folders: Collection[Path], path: Path) -> str:
    """Return the text of a regular file of at most LARGEST_PART bytes in one of the folders.
    Raises ConfigError for another file, also if links lead to the file, and if it cannot be read."""
    real = refuse_outside(folders, path)
    if real.exists() and not real.is_file():
        raise ConfigError(f"{path}: cannot be read: not a regular file; replace it by a file")
    return read_text(path, LARGEST_PART, reviewed=True)


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def shipped_folder() -> Path:
    """Return the folder with the files that imagebuild ships: inside the installed package, or the repository."""
    package = Path(imagebuild.__file__).parent
    installed = package / "data"
    return installed if installed.is_dir() else package.parent


def xdg_folder(variable: str, environ: Mapping[str, str]) -> Path | None:
    """Return the folder that a variable of the XDG Base Directory Specification names. None without a folder, or with a
    relative one, which by this specification does not count: it could be a folder of a project."""
    named = Path(environ.get(variable, ""))
    return named if named.is_absolute() else None


def cache_folder(name: str = "base") -> Path:
    """Return a folder of the cache. Raises ConfigError if the user has no home folder."""
    try:
        return (xdg_folder("XDG_CACHE_HOME", os.environ) or Path.home() / ".cache") / "imagebuild" / name
    except RuntimeError:
        raise ConfigError("HOME: is not set; set HOME or XDG_CACHE_HOME to a writable folder") from None
