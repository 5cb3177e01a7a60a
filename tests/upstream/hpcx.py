"""HPC-X archives: one tree, packed under the name of every distribution and CUDA major, and variants with faults."""

from __future__ import annotations

import bz2
import io
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.upstream.workshop import RECIPES

TEXTS = RECIPES / "hpcx" / "tree"
VERSION = "2.51"
EPOCH = 1754697600
OWNER = 12345
"""User and group of all files, as archives come from a machine with other users."""
PLACEHOLDER = b"@PREFIX@"
CHANGE = Callable[[str, bytes], "bytes | None"]
"""Path in the tree and content to the content to pack, or to None to leave the file out."""


@dataclass(frozen=True)
class Distribution:
    """What the name of an archive says."""

    os: str
    cuda: int
    cpu: str = "x86_64"

    @property
    def name(self) -> str:
        return f"hpcx-v{VERSION}-gcc-doca_ofed-{self.os}-cuda{self.cuda}-{self.cpu}"

    @property
    def path(self) -> str:
        """Of the address, behind the host."""
        return f"hpc/hpc-x/v{VERSION}_cuda{self.cuda}/{self.name}.tbz"


DISTRIBUTIONS = tuple(
    Distribution(os, cuda, cpu)
    for os, cudas in (("ubuntu22.04", (12, 13)), ("ubuntu24.04", (12, 13)), ("ubuntu26.04", (13,)))
    for cuda in cudas
    for cpu in ("x86_64", "aarch64")
)


def unchanged(_path: str, content: bytes) -> bytes:
    return content


def without(folder: str) -> CHANGE:
    """The archive without a folder: `clusterkit`, which some releases lack on aarch64."""
    return lambda path, content: None if path.split("/")[0] == folder else content


def misspelt(path: str, content: bytes) -> bytes:
    """Text files with the place of another build, which replacing the archive's own place misses."""
    return content.replace(PLACEHOLDER, b"/build-result/hpcx-v0.0-gcc-other") if path.endswith("libucs.la") else content


def pack(
    content: Path, distribution: Distribution, target: Path, *, change: CHANGE = unchanged, cuda: int | None = None
) -> None:
    """Write an archive. `cuda` takes the libraries of another major than the name says; those of aarch64, and its
    sources, are empty files."""
    top = distribution.name
    prefix = f"/build-result/{top}".encode()
    target.parent.mkdir(parents=True, exist_ok=True)
    with bz2.open(target, "wb", compresslevel=1) as packed, tarfile.open(fileobj=packed, mode="w|") as archive:
        roots = (content / "all", content / f"cuda{cuda or distribution.cuda}", TEXTS)
        for path, source in sorted(_files(roots).items()):
            entry = tarfile.TarInfo(f"{top}/{path}")
            entry.mtime, entry.uid, entry.gid = EPOCH, OWNER, OWNER
            if source.is_symlink():
                if change(path, b"") is not None:
                    entry.type, entry.linkname = tarfile.SYMTYPE, str(source.readlink())
                    archive.addfile(entry)
                continue
            data = source.read_bytes()
            if distribution.cpu != "x86_64" and (data[:4] == b"\x7fELF" or path.startswith("sources/")):
                data = b""
            changed = change(path, data)
            if changed is not None:
                changed = changed if data[:4] == b"\x7fELF" else changed.replace(PLACEHOLDER, prefix)
                entry.mode = 0o755 if source.stat().st_mode & 0o100 else 0o644
                entry.size = len(changed)
                archive.addfile(entry, io.BytesIO(changed))


def cut_short(archive: Path, target: Path) -> None:
    """An archive whose download was interrupted, kept as if it were whole."""
    data = archive.read_bytes()
    target.write_bytes(data[: len(data) // 2])


def make(content: Path, folder: Path) -> None:
    """Fill `folder` with all archives under their paths."""
    for distribution in DISTRIBUTIONS:
        pack(content, distribution, folder / distribution.path)


def _files(roots: tuple[Path, ...]) -> dict[str, Path]:
    return {str(path.relative_to(root)): path for root in roots for path in _walk(root)}


def _walk(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            yield from _walk(path)
        else:
            yield path
