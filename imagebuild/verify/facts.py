"""The cache of facts about layers: what was found in a layer is kept, so that no command reads the layer again.

Facts are stored under the diff id of a layer (the digest of its decompressed bytes) and the hash of the code that reads
layers. They depend on nothing else, so all images with the layer share its facts."""

from __future__ import annotations

import hashlib
import os
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import elftools
import zstandard
from pydantic import ConfigDict, TypeAdapter

from imagebuild.core.console import err
from imagebuild.core.errors import ConfigError
from imagebuild.core.fields import Model
from imagebuild.core.files import cache_folder, write_bytes
from imagebuild.oci.layout import Blob, Compression
from imagebuild.verify.files import FileEntry, Layer

KEEP_DAYS, MOST_BYTES = 30, 1 << 30
"""Age in days since the last use, and total size in bytes, beyond which files of the cache are deleted."""
READERS = (
    "oci/layout.py", "oci/tar.py", "verify/elf.py", "verify/files.py", "verify/layers.py", "verify/patterns.yaml",
)  # fmt: skip
"""Files whose content decides which facts are found in a layer."""
ENTRIES = TypeAdapter(
    tuple[FileEntry, ...],
    config=ConfigDict(ser_json_bytes="base64", val_json_bytes="base64", defer_build=True),
)


@cache
def hash_of_readers() -> str:
    """Return the hash of the code and patterns that find the facts in layers."""
    package = Path(__file__).parents[1]
    content = b"".join((package / name).read_bytes() for name in READERS)
    return hashlib.sha256(content + elftools.__version__.encode()).hexdigest()


class StoredLayer(Model):
    """What is known about the stored bytes of a layer, which are usually compressed."""

    diff_id: str
    compression: Compression
    checked: tuple[int, ...] = ()
    """Identity, size and times of the file whose digest was checked last. They differ if the file has changed."""


@dataclass(frozen=True)
class FactCache:
    """The facts that were found in layers earlier."""

    folder: Path | None
    """Folder with two files for a layer: a StoredLayer under the digest of the stored bytes, and the facts under the
    diff id. None: nothing is kept."""

    @classmethod
    def open(cls) -> FactCache:
        """Return the user's cache. It is used only if nobody else can write to its folder."""
        try:
            folder = cache_folder("layers")
            folder.mkdir(0o700, parents=True, exist_ok=True)
            state = folder.lstat()
        except (ConfigError, OSError):
            return cls(None)
        if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid() or state.st_mode & 0o077:
            err.print(f"{folder}: is not used, because other users can change or read it; remove this folder")
            return cls(None)
        return cls(folder)

    def find(self, blob: Blob, *, is_local: bool) -> Layer | None:
        """Return the facts about a layer; None if they are unknown, or if its stored bytes were never read.

        `is_local`: the layer's file must exist. Its digest is checked, unless this file was checked before. Raises
        ResultError if the file has another digest."""
        if not blob.diff_id or (is_local and not (blob.file.is_file() and blob.file.stat().st_size == blob.size)):
            return None
        stored = self._stored(blob.digest)
        if stored is None and blob.digest in (None, blob.diff_id):
            stored = StoredLayer(diff_id=blob.diff_id, compression="")
        entries = self._facts(blob.diff_id) if stored and stored.diff_id == blob.diff_id else None
        if stored is None or entries is None:
            return None
        if is_local and _identity(blob) != stored.checked:
            with blob.open():  # checks the digest
                self._write("stored", blob.digest, _as_json(blob, stored.compression))
        return Layer(entries, blob.size, stored.compression)

    def keep(self, blob: Blob, layer: Layer) -> None:
        """Store the facts about a layer that was read completely."""
        # JSON cannot contain names that are not UTF-8. Layers with such names are read each time.
        with suppress(ValueError):
            content = ENTRIES.dump_json(layer.entries, exclude_defaults=True)
            self._write("facts", blob.diff_id, zstandard.ZstdCompressor(write_checksum=True).compress(content))
            self._write("stored", blob.digest, _as_json(blob, layer.compression))

    def clean(self) -> None:
        """Delete files that were not used for KEEP_DAYS, and the least recently used files beyond MOST_BYTES."""
        kept = 0
        with suppress(OSError):
            files = [(path.stat(), path) for path in self.folder.iterdir()] if self.folder else []
            for state, path in sorted(files, key=lambda file: file[0].st_mtime, reverse=True):
                kept += state.st_size
                if kept > MOST_BYTES or state.st_mtime < time.time() - KEEP_DAYS * 86400:
                    path.unlink(missing_ok=True)

    def _facts(self, diff_id: str) -> tuple[FileEntry, ...] | None:
        with suppress(ValueError, zstandard.ZstdError):
            return ENTRIES.validate_json(zstandard.decompress(self._read("facts", diff_id)))
        return None

    def _stored(self, digest: str | None) -> StoredLayer | None:
        with suppress(ValueError):
            return StoredLayer.model_validate_json(self._read("stored", digest))
        return None

    def _path(self, kind: str, digest: str | None) -> Path | None:
        name = (digest or "").removeprefix("sha256:")
        return self.folder / f"{kind}-{hash_of_readers()[:16]}-{name}" if self.folder and name.isalnum() else None

    def _read(self, kind: str, digest: str | None) -> bytes:
        """Return the content of a file that belongs to the user; empty if there is none."""
        with suppress(OSError):
            if path := self._path(kind, digest):
                with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb") as file:
                    state = os.fstat(file.fileno())
                    if stat.S_ISREG(state.st_mode) and state.st_uid == os.geteuid():
                        os.utime(file.fileno())
                        return file.read()
        return b""

    def _write(self, kind: str, digest: str | None, content: bytes) -> None:
        # A full disk only costs the time for reading the layer again.
        with suppress(ConfigError):
            if path := self._path(kind, digest):
                write_bytes(path, content)


def _as_json(blob: Blob, compression: Compression) -> bytes:
    """Return the description of a layer whose file was read completely, or whose digest was checked."""
    stored = StoredLayer(diff_id=blob.diff_id or "", compression=compression, checked=_identity(blob))
    return stored.model_dump_json().encode()


def _identity(blob: Blob) -> tuple[int, ...]:
    state = blob.file.stat()
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns
