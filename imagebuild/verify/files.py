"""The files of an image: the members of each layer, and the merged tree that a container sees. Does no I/O."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from imagebuild.oci.layout import OPAQUE, WHITEOUT, Compression

FileKind = Literal["file", "folder", "symlink", "hardlink", "device"]


@dataclass(frozen=True, slots=True)
class GpuCode:
    """One part of a fat binary: machine code for one GPU architecture, or PTX, which the driver compiles."""

    kind: Literal["code", "ptx"]
    capability: str
    """Compute capability with its suffix: `90`, `90a`, `100f`."""


@dataclass(frozen=True, slots=True)
class Elf:
    """The fields of an ELF file that the dynamic loader reads, and the GPU code in the file."""

    machine: int
    """`e_machine` in the ELF header: the number of the CPU architecture."""
    loadable: bool
    """Whether the file is a program or a shared library, and not an object file or a core dump."""
    interpreter: str | None = None
    soname: str | None = None
    needed: tuple[str, ...] = ()
    rpath: tuple[str, ...] = ()
    runpath: tuple[str, ...] = ()
    wants: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Pairs of a library's name and the symbol versions that this file needs from the library."""
    offers: tuple[str, ...] = ()
    """Symbol versions that this file defines."""
    gpu: tuple[GpuCode, ...] = ()


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A member of a layer's archive."""

    path: str
    """Path without a leading or trailing slash."""
    kind: FileKind
    mode: int
    target: str = ""
    """Target of a link: as written for a symlink, in the form of `path` for a hard link."""
    layer: int = 0
    """Number of the layer that contains the entry; 0 is the lowest layer."""
    capabilities: bool = False
    """Whether the file has Linux capabilities, which give a program privileges as setuid does."""
    elf: Elf | None = None
    broken: str = ""
    """Why a file with the magic number of ELF cannot be read as an ELF file; empty for all other files."""
    text: bytes | None = None
    """Content of the file, for the few files whose text the rules need."""
    sha256: str = ""
    """Hash of the content, for files that can identify an image; empty for other files."""
    secrets: tuple[str, ...] = ()
    """Kinds of secrets that the file contains."""
    certificates: tuple[str, ...] = ()
    """Digests of the certificates in the file."""


@dataclass(frozen=True, slots=True)
class Layer:
    """The content of a layer."""

    entries: tuple[FileEntry, ...]
    stored: int
    """Size in bytes as stored, usually compressed."""
    compression: Compression


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault or a note about an image, found by a rule. A note is only for information."""

    subject: str
    """Path, label, environment variable or other name that the finding is about. A waiver, which accepts findings,
    refers to this name."""
    text: str
    note: bool = False
    """Whether the finding is only for information, and not a fault."""
    layer: int | None = None
    """Number of the layer that the finding is about, counted from 0. None: the layer of the file in `subject`."""

    def __str__(self) -> str:
        return f"{self.subject}: {self.text}"


class Tree:
    """The files that a container sees, merged from layers.
    Paths have no leading or trailing slash; the root is the empty path."""

    def __init__(self, layers: Iterable[Layer] = ()) -> None:
        self._entries: dict[str, FileEntry] = {}
        self._names: dict[str, set[str]] = {"": set()}
        for layer in layers:
            parts = [(entry, *entry.path.rpartition("/")[::2]) for entry in layer.entries]
            # A layer removes only files of layers below it.
            for _, folder, name in parts:
                # A whiteout whose folder is behind circular links removes nothing.
                if name.startswith(WHITEOUT) and (real := self._follow(folder)) is not None:
                    for child in self.names(real) if name == OPAQUE else [name.removeprefix(WHITEOUT)]:
                        self._remove(f"{real}/{child}".lstrip("/"))
            for entry, folder, name in parts:
                if not name.startswith(WHITEOUT):
                    # The folder may be a symlink in a lower layer, as /lib is. The entry itself is not followed.
                    path = f"{self._folder(folder)}/{name}".lstrip("/")
                    self._put(replace(entry, path=path))

    def __iter__(self) -> Iterator[FileEntry]:
        return iter(self._entries.values())

    def get(self, path: str) -> FileEntry | None:
        """Return the entry at a path without following links."""
        return self._entries.get(path)

    def names(self, path: str) -> list[str]:
        """Return the names in a folder, sorted."""
        return sorted(self._names.get(path, ()))

    def resolve(self, path: str) -> str | None:
        """Return the path after following all symlinks; None if it does not exist or the links are circular."""
        real = self._follow(path)
        return real if real == "" or real in self._entries else None

    def find(self, path: str) -> FileEntry | None:
        """Return the entry that a program gets when it opens the path, after following all symlinks."""
        real = self._follow(path)
        return None if real is None else self._entries.get(real)

    def glob(self, pattern: str) -> list[str]:
        """Return the existing paths that match a shell pattern; symlinks to folders are followed."""
        paths = [""]
        for part in pattern.strip("/").split("/"):
            is_glob = any(character in part for character in "*?[")
            paths = [
                path
                for folder in paths
                for name in (fnmatch.filter(self.names(self.resolve(folder) or ""), part) if is_glob else [part])
                if self.resolve(path := f"{folder}/{name}".lstrip("/")) is not None
            ]
        return sorted(paths)

    def _follow(self, path: str) -> str | None:
        """Return the path after following symlinks, even if nothing exists there; None if the links are circular."""
        rest, done, links = path.split("/")[::-1], "", 0
        while rest:
            part = rest.pop()
            here = f"{done}/{part}".lstrip("/")
            entry = self._entries.get(here)
            if part == "..":
                done = done.rpartition("/")[0]
            elif entry and entry.kind == "symlink":
                done = "" if entry.target.startswith("/") else done
                rest += entry.target.split("/")[::-1]
                links += 1
                if links > 40:  # the limit of the Linux kernel for one path
                    return None
            elif part not in ("", "."):
                done = here
        return done

    def _folder(self, path: str) -> str:
        """Return a folder's path after following symlinks; add the folder if no layer contains an entry for it."""
        real = self._follow(path)
        if real is None:
            return path
        if real and real not in self._entries:
            self._folder(real.rpartition("/")[0])
            self._put(FileEntry(real, "folder", 0o755))
        return real

    def _put(self, entry: FileEntry) -> None:
        old = self._entries.get(entry.path)
        if old and not (old.kind == "folder" and entry.kind == "folder"):
            self._remove(entry.path)
        if entry.kind == "hardlink":
            target = self._entries.get(self._follow(entry.target) or "")
            entry = replace(target, path=entry.path) if target else entry
        self._entries[entry.path] = entry
        folder, _, name = entry.path.rpartition("/")
        self._names.setdefault(folder, set()).add(name)

    def _remove(self, path: str) -> None:
        for name in self._names.pop(path, set()):
            self._remove(f"{path}/{name}")
        if self._entries.pop(path, None):
            folder, _, name = path.rpartition("/")
            if folder in self._names:
                self._names[folder].discard(name)
