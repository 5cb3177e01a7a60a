"""Describe the files of an image: members of layers, and the merged tree that a container sees. Pure."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from imagebuild.oci.layout import OPAQUE, WHITEOUT, Compression

FileKind = Literal["file", "folder", "symlink", "hardlink", "device"]


@dataclass(frozen=True, slots=True)
class GpuCode:
    """Describe a part of a fat binary: code for GPUs, or PTX that the driver compiles."""

    kind: Literal["code", "ptx"]
    capability: str
    """Compute capability with its suffix: `90`, `90a`, `100f`."""


@dataclass(frozen=True, slots=True)
class Elf:
    """Hold what the loader reads of an ELF file, and the GPU code in it."""

    machine: int
    """`e_machine` of the header."""
    loadable: bool
    """Whether it is a program or a library, not an object file or a core dump."""
    interpreter: str | None = None
    soname: str | None = None
    needed: tuple[str, ...] = ()
    rpath: tuple[str, ...] = ()
    runpath: tuple[str, ...] = ()
    wants: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Library → versions of symbols that it must define."""
    offers: tuple[str, ...] = ()
    """Versions of symbols that this file defines."""
    gpu: tuple[GpuCode, ...] = ()


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Describe a member of a layer."""

    path: str
    """Path without a slash at either end."""
    kind: FileKind
    mode: int
    target: str = ""
    """Target of a link: of a symlink as written, of a hard link a path like `path`."""
    layer: int = 0
    """Number of its layer, from 0 for the lowest."""
    capabilities: bool = False
    """Whether it has capabilities of the kernel, which work like setuid."""
    elf: Elf | None = None
    broken: str = ""
    """Why a file that begins like an ELF file cannot be read as one."""
    text: bytes | None = None
    """Content of the few files whose text rules need."""
    sha256: str = ""
    """Hash of the content, of files by which an image can be recognised."""
    secrets: tuple[str, ...] = ()
    """Kinds of secrets that it holds."""
    certificates: tuple[str, ...] = ()
    """Digests of the certificates in it."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Hold a layer that was read."""

    entries: tuple[FileEntry, ...]
    stored: int
    """Size in bytes, as stored."""
    compression: Compression


@dataclass(frozen=True, slots=True)
class Finding:
    """Describe something that a rule objects to."""

    subject: str
    """Path, or name of what is wrong: what a waiver names."""
    text: str
    note: bool = False
    """Whether it is worth knowing but no fault."""
    layer: int | None = None
    """Number of the layer that it is about, from 0, where the subject does not say it."""

    def __str__(self) -> str:
        return f"{self.subject}: {self.text}"


class Tree:
    """Merge layers to the files of a container. Paths have no slash at either end; the root is the empty path."""

    def __init__(self, layers: Iterable[Layer] = ()) -> None:
        self._entries: dict[str, FileEntry] = {}
        self._names: dict[str, set[str]] = {"": set()}
        for layer in layers:
            parts = [(entry, *entry.path.rpartition("/")[::2]) for entry in layer.entries]
            # A layer removes only files of layers below it.
            for _, folder, name in parts:
                # What stands behind links in a circle removes nothing.
                if name.startswith(WHITEOUT) and (real := self._follow(folder)) is not None:
                    for child in self.names(real) if name == OPAQUE else [name.removeprefix(WHITEOUT)]:
                        self._remove(f"{real}/{child}".lstrip("/"))
            for entry, folder, name in parts:
                if not name.startswith(WHITEOUT):
                    # The folder may be a symlink of a lower layer, as /lib is; the entry itself is taken as it is.
                    path = f"{self._folder(folder)}/{name}".lstrip("/")
                    self._put(replace(entry, path=path))

    def __iter__(self) -> Iterator[FileEntry]:
        return iter(self._entries.values())

    def get(self, path: str) -> FileEntry | None:
        """Return the entry of a path; links are not followed."""
        return self._entries.get(path)

    def names(self, path: str) -> list[str]:
        """Return the names in a folder, sorted."""
        return sorted(self._names.get(path, ()))

    def resolve(self, path: str) -> str | None:
        """Return the path that symlinks lead to; None if it does not exist or they form a circle."""
        real = self._follow(path)
        return real if real == "" or real in self._entries else None

    def find(self, path: str) -> FileEntry | None:
        """Return the entry that a program gets when it opens the path."""
        real = self._follow(path)
        return None if real is None else self._entries.get(real)

    def glob(self, pattern: str) -> list[str]:
        """Return the existing paths that a shell pattern names; symlinks to folders are followed."""
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
        """Return where a path leads, whether or not anything is there; None if links form a circle."""
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
                if links > 40:  # as many as the kernel follows in one path
                    return None
            elif part not in ("", "."):
                done = here
        return done

    def _folder(self, path: str) -> str:
        """Return the folder that a path leads to; it is added if a layer left it out."""
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
