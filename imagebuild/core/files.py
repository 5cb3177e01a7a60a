"""Files are written to a temporary name and renamed, so that nobody sees half of one."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from imagebuild.core.errors import ConfigError


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all. Raises ConfigError if the place cannot be written to.

    What is there and is no file, such as /dev/null or a pipe, is written to as it is: root would replace it.
    """
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            path.write_text(text, encoding="utf-8")
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        Path(temporary).replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
    finally:
        Path(temporary).unlink(missing_ok=True)


def read_text(path: Path) -> str:
    """The text of a file the user named. Raises ConfigError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def cache_folder(name: str = "base") -> Path:
    """Where bootstrapped bases, or `sources`, are kept, by the XDG base directory specification."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "imagebuild" / name
