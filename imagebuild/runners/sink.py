"""Where the output of a command goes: its end into memory, all of it into a file, and never more than a limit."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from imagebuild.errors import ConfigError

KEPT = 64 * 1024
"""Bytes of the end that are kept in memory."""
LIMIT = 1 << 30
"""Bytes after which a command is ended: it would fill the disk."""


class Sink:
    """Takes output in chunks, from one thread; `full` says that the command must be ended."""

    def __init__(self, log: Path | None) -> None:
        self.log = log
        self.total = 0
        self.full = threading.Event()
        self._chunks: deque[bytes] = deque()
        self._kept = 0
        self._file: BinaryIO | None = None

    def __enter__(self) -> Sink:
        if self.log:
            try:
                self.log.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.log.open("wb")
            except OSError as error:
                raise ConfigError(f"{self.log}: cannot be written: {error.strerror}") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file:
            self._file.close()

    def write(self, chunk: bytes) -> None:
        """Keep a chunk; what comes after the limit is dropped."""
        if self.full.is_set() or not chunk:
            return
        chunk = chunk[: LIMIT - self.total]
        self.total += len(chunk)
        if self._file and not self._file.closed:
            self._file.write(chunk)
            self._file.flush()
        self._chunks.append(chunk)
        self._kept += len(chunk)
        while self._kept - len(self._chunks[0]) >= KEPT:
            self._kept -= len(self._chunks.popleft())
        if self.total >= LIMIT:
            self.full.set()

    def drain(self, chunks: Iterable[bytes]) -> None:
        """Take everything."""
        for chunk in chunks:
            self.write(chunk)

    @property
    def text(self) -> str:
        """The end of the output."""
        return b"".join(self._chunks)[-KEPT:].decode("utf-8", "replace")

    @property
    def reason(self) -> str:
        """Why the command was ended; empty if it was not for its output."""
        return f"printed more than {LIMIT >> 20} MiB" if self.full.is_set() else ""
