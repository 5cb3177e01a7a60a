"""debsecan's database on this machine: a file for each release, as the distribution's tracker serves it."""

from __future__ import annotations

import hashlib
import zlib
from datetime import UTC, datetime
from pathlib import Path

from imagebuild.errors import ConfigError, ResultError

FORM = b"VERSION 1\n"


def prepared(given: Path, suite: str, folder: Path) -> tuple[Path, str, datetime]:
    """A folder as debsecan wants it, what is in the database, and of when it is.

    `given` is a file, or a folder with a file for each release. The format holds no date, so the file's is taken.
    Raises ConfigError if there is none for the release, ResultError if it is no database.
    """
    path = given / suite if given.is_dir() else given
    try:
        content, changed = path.read_bytes(), path.stat().st_mtime
    except OSError as error:
        what = f"{path}: cannot be read: {error.strerror}"
        raise ConfigError(f"--database {what}; give the tracker's file for {suite}, or a folder with it") from None
    try:
        text = zlib.decompress(content)
    except zlib.error as error:
        raise ResultError(f"{path}: is no database of debsecan: {error}") from None
    if not text.startswith(FORM):
        raise ResultError(f"{path}: is no database of debsecan, or of another form: {text[:20]!r}")
    target = folder / "database"
    target.mkdir()
    (target / suite).symlink_to(path.resolve())
    digest = hashlib.sha256(content).hexdigest()
    built = datetime.fromtimestamp(changed, UTC).replace(microsecond=0)
    return target, f"{path.name}, sha256:{digest[:12]}", built
