"""The end of each file that was read, to be kept beside what was read from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

KEPT_BYTES = 128 * 1024
"""Of each file. The end says how a benchmark ended; whole logs with debug output can have 100 MB."""


@dataclass(frozen=True)
class Raw:
    """The text of a file, or its end."""

    source: str
    text: str
    total_bytes: int
    dropped_bytes: int = 0
    """How much before `text` was left out."""


def read(paths: Iterable[Path], kept: int = KEPT_BYTES) -> tuple[Raw, ...]:
    """The ends of files; those that are gone or cannot be read are left out."""
    return tuple(raw for path in paths if (raw := _tail(path, kept)) is not None)


def _tail(path: Path, kept: int) -> Raw | None:
    try:
        with path.open("rb") as file:
            total = file.seek(0, 2)
            file.seek(max(0, total - kept))
            data = file.read(kept)
    except OSError:
        return None
    if total > kept:
        # A line that was cut in two says something else.
        data = data[data.find(b"\n", 0, 4096) + 1 :]
    return Raw(str(path), data.decode("utf-8", "replace"), total, total - len(data))
