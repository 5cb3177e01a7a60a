"""Stored bytes to a tar's bytes: digests are computed on the way, compression is undone, nothing is kept."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator
from io import RawIOBase
from typing import IO

import zstandard

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
CHUNK = 1 << 20


class Region:
    """A part of a file, read once in chunks."""

    def __init__(self, file: IO[bytes], offset: int, size: int) -> None:
        self._file = file
        self._rest = size
        self._sum = hashlib.sha256()
        file.seek(offset)

    def chunks(self) -> Iterator[bytes]:
        while self._rest:
            data = self._file.read(min(CHUNK, self._rest))
            if not data:
                raise EOFError("the file ends in it")
            self._rest -= len(data)
            self._sum.update(data)
            yield data

    @property
    def digest(self) -> str:
        """Of what has been read."""
        return f"sha256:{self._sum.hexdigest()}"


def decompressed(chunks: Iterator[bytes]) -> tuple[bool, Iterator[bytes]]:
    """Whether the bytes are compressed, and what is in them. Errors are zlib's and zstandard's."""
    first = next(chunks, b"")

    def every() -> Iterator[bytes]:
        yield first
        yield from chunks

    if first.startswith(GZIP):
        return True, _gunzip(every())
    if first.startswith(ZSTD):
        return True, _unzstd(every())
    return False, every()


def _gunzip(chunks: Iterator[bytes]) -> Iterator[bytes]:
    unpack = zlib.decompressobj(wbits=31)
    for chunk in chunks:
        data = chunk
        while data:
            if unpack.eof:  # members follow each other
                unpack = zlib.decompressobj(wbits=31)
            yield unpack.decompress(data)
            data = unpack.unused_data
            if data and not data.strip(b"\0"):
                break
    if not unpack.eof:
        raise EOFError("the compressed data are cut off")


def _unzstd(chunks: Iterator[bytes]) -> Iterator[bytes]:
    unpack = zstandard.ZstdDecompressor().decompressobj()
    for chunk in chunks:
        data = chunk
        while data:
            if unpack.eof:
                unpack = zstandard.ZstdDecompressor().decompressobj()
            yield unpack.decompress(data)
            data = unpack.unused_data
    if not unpack.eof:
        raise EOFError("the compressed data are cut off")


class Joined(RawIOBase):
    """Chunks as a file that can be read once, from its beginning."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = memoryview(chunk)
        taken = min(len(buffer), len(self._rest))
        buffer[:taken] = self._rest[:taken]
        self._rest = self._rest[taken:]
        return taken
