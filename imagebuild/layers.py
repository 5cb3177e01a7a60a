"""What the layers of an image hold, also where a later layer hides it. Pure: reads a stream."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterable, Iterator
from io import BufferedReader, RawIOBase
from typing import IO, cast

from imagebuild.errors import ResultError

PRIVATE = re.compile(r"(^|/)(ssh_host_\w+_key|\.ssh/id_\w+)$")
"""Names of ssh's private keys."""
GZIP, ZSTD, TAR = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"ustar"
TAR_MAGIC_AT = 257
"""Where POSIX ustar headers have their magic, in bytes."""


class Stream(RawIOBase):
    """Chunks as a file that can be read once, from its beginning."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        if not self._rest:
            self._rest = next(self._chunks, b"")
        taken, self._rest = self._rest[: len(buffer)], self._rest[len(buffer) :]
        buffer[: len(taken)] = taken
        return len(taken)


def files(saved: Iterable[bytes]) -> Iterator[tuple[str, str]]:
    """Layer and path of every file in an image as the engine saves it, each layer for itself.

    Raises ResultError for a layer whose compression cannot be read here.
    """
    try:
        with tarfile.open(fileobj=Stream(saved), mode="r|") as image:
            for member in image:
                if content := image.extractfile(member):
                    yield from ((member.name, path) for path in _layer(member.name, content))
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ResultError(f"the image cannot be read as the engine saved it: {error}") from None


def private_keys(found: Iterable[tuple[str, str]]) -> list[str]:
    """Paths of private keys, with their layers."""
    return [f"{path} in {layer}" for layer, path in found if PRIVATE.search(path)]


def _layer(name: str, content: IO[bytes]) -> Iterator[str]:
    reader = BufferedReader(cast(RawIOBase, content))
    head = reader.peek(TAR_MAGIC_AT + len(TAR))
    if head.startswith(ZSTD):
        raise ResultError(f"{name}: is compressed with zstd, which cannot be read here")
    if not head.startswith(GZIP) and not head[TAR_MAGIC_AT:].startswith(TAR):
        return  # a manifest or a configuration
    mode = "r|gz" if head.startswith(GZIP) else "r|"
    with tarfile.open(fileobj=reader, mode=mode) as layer:  # type: ignore[call-overload]
        yield from (entry.name for entry in layer if not entry.isdir())
