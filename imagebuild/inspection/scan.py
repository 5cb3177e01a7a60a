"""Read a layer once, from its beginning to its end, and keep what rules need. Layers are read in parallel."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from io import BufferedReader
from typing import IO, Any, cast

import zstandard

from imagebuild.errors import ResultError
from imagebuild.inspection import elf
from imagebuild.inspection.facts import Entry, Kind, Layer
from imagebuild.inspection.layout import Blob
from imagebuild.inspection.secrets import Scanner
from imagebuild.inspection.streams import CHUNK, Joined, Region, decompressed

KEPT = re.compile(r"^(var/lib/dpkg/status(\.d/[^/]+)?|etc/(ld\.so\.cache|passwd|shadow))$")
"""Files whose text rules read."""
KEPT_SIZE = 32 << 20
SETTINGS = re.compile(r"^(etc|root|home)/|(^|/)(pip\.conf|\.netrc|\.npmrc|\.git/config)$")
IN_MEMORY = 32 << 20
"""Bytes of an ELF file; larger ones go to a temporary file, as they are read here and there."""
WORTH_A_PROCESS = 16 << 20
"""Bytes of layers below which starting processes takes longer than reading."""


def scan(blob: Blob, number: int) -> Layer:
    """All entries of a layer. Raises ResultError if it cannot be read, or is not what its digest says."""
    with reading(blob) as members:
        entries = tuple(_entry(archive, member, path, number) for archive, member, path in members)
        return Layer(entries, blob.size, members.compressed)


class Members:
    """The members of a layer, in its order: the archive that has its content, the member, its path below the root."""

    def __init__(self, reader: IO[bytes], *, compressed: bool) -> None:
        self.compressed = compressed
        self._reader = reader

    def __iter__(self) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo, str]]:
        with tarfile.open(fileobj=self._reader, mode="r|", bufsize=CHUNK) as archive:
            for member in archive:
                if (path := _normal(member.name)) is not None:
                    yield archive, member, path
                    archive.members = []  # type: ignore[attr-defined]  # or it keeps every one
        while self._reader.read(CHUNK):
            pass  # what follows the last entry belongs to the digest


@contextmanager
def reading(blob: Blob) -> Iterator[Members]:
    """The members of a layer, to be read once and all of them.

    Raises ResultError if it cannot be read, or is not what its digest says.
    """
    try:
        with blob.file.open("rb") as file:
            region = Region(file, blob.offset, blob.size)
            compressed, chunks = decompressed(region.chunks())
            yield Members(cast(IO[bytes], BufferedReader(Joined(chunks), CHUNK)), compressed=compressed)
    except (tarfile.TarError, EOFError, OSError, ValueError, zlib.error, zstandard.ZstdError) as error:
        raise ResultError(f"{blob.file}: layer {blob.name or blob.digest}: cannot be read: {error}") from None
    if blob.digest and blob.digest.startswith("sha256:") and region.digest != blob.digest:
        raise ResultError(f"{blob.file}: layer {blob.digest}: is damaged: its digest is {region.digest}")


def scan_all(blobs: Sequence[Blob], workers: int | None = None) -> tuple[Layer, ...]:
    """All layers, the largest first, in as many processes as there are CPUs. Raises ResultError as `scan`."""
    workers = min(workers or len(os.sched_getaffinity(0)), len(blobs))
    if workers < 2 or sum(blob.size for blob in blobs) < WORTH_A_PROCESS:
        return tuple(scan(blob, number) for number, blob in enumerate(blobs))
    numbers = sorted(range(len(blobs)), key=lambda number: -blobs[number].size)
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_end_at_once)
    try:
        running = {number: pool.submit(scan, blobs[number], number) for number in numbers}
        return tuple(running[number].result() for number in range(len(blobs)))
    except BrokenProcessPool:
        raise ResultError(
            f"{blobs[0].file}: a process that read a layer was killed; is there too little memory?"
        ) from None
    except BaseException:
        # Nobody waits for the rest of a large layer.
        for child in set(multiprocessing.active_children()) - others:
            child.terminate()
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _end_at_once() -> None:
    """Ctrl-C reaches all processes; there is nothing to tidy up in those that read."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def _normal(name: str) -> str | None:
    """The path below the root; None for the root itself."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise tarfile.TarError(f"{name!r} leads out of the image")
    return "/".join(parts) or None


def _entry(archive: tarfile.TarFile, member: tarfile.TarInfo, path: str, number: int) -> Entry:
    kinds: list[tuple[bool, Kind]] = [
        (member.isreg(), "file"), (member.isdir(), "folder"), (member.issym(), "symlink"), (member.islnk(), "hardlink"),
    ]  # fmt: skip
    kind: Kind = next((kind for true, kind in kinds if true), "device")
    values: dict[str, Any] = {}
    if kind == "hardlink":
        values["target"] = _normal(member.linkname) or ""
    elif kind == "symlink":
        values["target"] = member.linkname
    elif kind == "file" and member.size and (content := archive.extractfile(member)):
        values = _content(content, path, member.size)
    return Entry(
        path, kind, member.mode, member.size, layer=number,
        capabilities="SCHILY.xattr.security.capability" in member.pax_headers, **values,
    )  # fmt: skip


def _content(content: IO[bytes], path: str, size: int) -> dict[str, Any]:
    scanner = Scanner(settings=bool(SETTINGS.search(path)))
    values: dict[str, Any] = {}
    pieces = _pieces(content)
    first = next(pieces, b"")
    if first.startswith(elf.MAGIC):
        with tempfile.SpooledTemporaryFile(IN_MEMORY) as copy:
            # Nobody compiles a secret in, but crypto libraries test themselves with keys.
            for piece in _again(first, pieces):
                copy.write(piece)
            try:
                values["elf"] = elf.read(cast(IO[bytes], copy))
            except elf.NotElf as error:
                values["broken"] = str(error)
    else:
        kept = bytearray() if KEPT.search(path) and size <= KEPT_SIZE else None
        for piece in _again(first, pieces):
            scanner.feed(piece)
            if kept is not None:
                kept += piece
        if kept is not None:
            values["text"] = bytes(kept)
    return {**values, "secrets": tuple(sorted(scanner.secrets)), "certificates": tuple(sorted(scanner.certificates))}


def _pieces(content: IO[bytes]) -> Iterator[bytes]:
    while piece := content.read(CHUNK):
        yield piece


def _again(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from rest
