"""Read and write files that users name. A file appears whole under its name, or not at all."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import imagebuild
from imagebuild.core.errors import ConfigError

_DESCRIPTOR = re.compile(r"/(?:dev|proc/self)/fd/(\d+)")


def write_text(path: Path, text: str) -> None:
    """Write a text to a file as `write_bytes` does."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file, and make its folder if there is none.

    A regular file is replaced atomically and keeps its mode; of a symlink, the file that it leads to. Into a device,
    a FIFO or an open descriptor such as /dev/stdout the content is written directly, after what is there already.
    Raises ConfigError if it cannot be written.
    """
    try:
        with suppress(FileNotFoundError):
            path.stat()  # fails for links that lead in a circle
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
    """Yield a temporary path in a folder, to write and then rename; create the folder, delete what is left over."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".partial-{uuid4().hex}"
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def read_text(path: Path) -> str:
    """Return the text of a file. Raises ConfigError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; is the name right?") from None
    except UnicodeDecodeError as error:
        line = path.read_bytes().count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: cannot be read: not UTF-8 text; write it as UTF-8") from None


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def shipped_folder() -> Path:
    """Return the folder of the project that comes along: inside a wheel's package; in a clone, the repository."""
    package = Path(imagebuild.__file__).parent
    installed = package / "data"
    return installed if installed.is_dir() else package.parent


def cache_folder(name: str = "base") -> Path:
    """Return the folder of a kind of cached files. Raises ConfigError for a user without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "imagebuild" / name
    except RuntimeError:
        raise ConfigError("HOME: not set; set it, or XDG_CACHE_HOME, to a folder that can be written to") from None
