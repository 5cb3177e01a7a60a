"""Describe the files of an image: members of layers, and the merged tree that a container sees. Pure."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from imagebuild.oci.layout import OPAQUE, WHITEOUT

Kind = Literal["file", "folder", "symlink", "hardlink", "device"]


@dataclass(frozen=True, slots=True)
class GpuCode:
    """One part of a fat binary."""

    kind: Literal["code", "ptx"]
    capability: str
    """Compute capability, with its suffix: `90`, `90a`, `100f`."""


@dataclass(frozen=True, slots=True)
class Elf:
    """What the loader reads of an ELF file, and the GPU code in it."""

    machine: int
    """`e_machine` of the header."""
    bits: int
    little: bool
    type: int
    """`e_type`: 1 object, 2 program, 3 library or position-independent program."""
    interpreter: str | None = None
    soname: str | None = None
    needed: tuple[str, ...] = ()
    rpath: tuple[str, ...] = ()
    runpath: tuple[str, ...] = ()
    wants: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Library → versions of symbols that must be there."""
    offers: tuple[str, ...] = ()
    """Versions of symbols that it defines."""
    undefined: bytes = b""
    """Names of symbols that others must define, separated by zeros: text in one piece is small."""
    defined: bytes = b""
    gpu: tuple[GpuCode, ...] = ()


@dataclass(frozen=True, slots=True)
class Entry:
    """A member of a layer."""

    path: str
    """Without a slash at either end."""
    kind: Kind
    mode: int
    size: int = 0
    target: str = ""
    """Of a link: of a symlink as it is, of a hard link a path like `path`."""
    layer: int = 0
    capabilities: bool = False
    """It has capabilities of the kernel, which work like setuid."""
    elf: Elf | None = None
    broken: str = ""
    """Why a file that begins like an ELF file is none."""
    text: bytes | None = None
    """Content of the few files that rules read."""
    secrets: tuple[str, ...] = ()
    """What kinds of secrets it holds."""
    certificates: tuple[str, ...] = ()
    """Digests of the certificates in it."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer that was read."""

    entries: tuple[Entry, ...]
    stored: int
    """Bytes as stored."""
    compressed: bool


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule objects to."""

    subject: str
    """A path, or the name of what is wrong: what a waiver names."""
    text: str
    note: bool = False
    """Worth knowing and no fault."""

    def __str__(self) -> str:
        return f"{self.subject}: {self.text}"


MOST_LINKS = 40
"""Symlinks that the kernel follows in one path."""


class Tree:
    """A merged root file system. Paths have no slash at either end; the root is the empty path."""

    def __init__(self, layers: Iterable[Layer] = ()) -> None:
        self._entries: dict[str, Entry] = {}
        self._names: dict[str, set[str]] = {"": set()}
        for layer in layers:
            self._add(layer)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, path: str) -> Entry | None:
        """The entry of a path as it is, links not followed."""
        return self._entries.get(path)

    def names(self, path: str) -> list[str]:
        """Names in a folder, sorted."""
        return sorted(self._names.get(path, ()))

    def resolve(self, path: str) -> str | None:
        """The path that is reached when all symlinks are followed; None if it does not exist, or goes in a circle."""
        found = self._follow(path)
        return found if found is not None and (found == "" or found in self._entries) else None

    def find(self, path: str) -> Entry | None:
        """What a program that opens the path gets."""
        found = self.resolve(path)
        return self._entries.get(found) if found else None

    def is_folder(self, path: str) -> bool:
        found = self.resolve(path)
        return found is not None and (found == "" or self._entries[found].kind == "folder")

    def glob(self, pattern: str) -> list[str]:
        """Existing paths that a shell pattern names; symlinks to folders are followed."""
        found = [""]
        for part in pattern.strip("/").split("/"):
            found = [
                path
                for folder in found
                for name in self._matching(folder, part)
                if self.resolve(path := f"{folder}/{name}".lstrip("/")) is not None
            ]
        return sorted(found)

    def _matching(self, folder: str, part: str) -> list[str]:
        if not any(mark in part for mark in "*?["):
            return [part]
        return fnmatch.filter(self.names(self.resolve(folder) or ""), part)

    def _follow(self, path: str) -> str | None:
        rest, done, links = path.split("/")[::-1], "", 0
        while rest:
            part = rest.pop()
            if part in ("", "."):
                continue
            if part == "..":
                done = done.rpartition("/")[0]
                continue
            here = f"{done}/{part}" if done else part
            entry = self._entries.get(here)
            if entry is None or entry.kind != "symlink":
                done = here
                continue
            links += 1
            if links > MOST_LINKS:
                return None
            if entry.target.startswith("/"):
                done = ""
            rest += entry.target.split("/")[::-1]
        return done

    def _add(self, layer: Layer) -> None:
        # A layer removes only what lies below it.
        for entry in layer.entries:
            folder, _, name = entry.path.rpartition("/")
            if name == OPAQUE:
                for child in self.names(self._follow(folder) or ""):
                    self._remove(f"{self._follow(folder)}/{child}".lstrip("/"))
            elif name.startswith(WHITEOUT):
                self._remove(f"{self._follow(folder)}/{name.removeprefix(WHITEOUT)}".lstrip("/"))
        for entry in layer.entries:
            folder, _, name = entry.path.rpartition("/")
            if name.startswith(WHITEOUT):
                continue
            # The folder may be a symlink of a lower layer, as /lib is; the entry itself is put in place as it is.
            where = self._folder(folder)
            path = f"{where}/{name}".lstrip("/")
            self._put(replace(entry, path=path) if path != entry.path else entry)

    def _folder(self, path: str) -> str:
        """The folder that a path leads to; it is made if a layer left it out."""
        found = self._follow(path)
        if found is None:
            return path
        if found and found not in self._entries:
            self._folder(found.rpartition("/")[0])
            self._put(Entry(found, "folder", 0o755))
        return found

    def _put(self, entry: Entry) -> None:
        old = self._entries.get(entry.path)
        if old and not (old.kind == "folder" and entry.kind == "folder"):
            self._remove(entry.path)
        if entry.kind == "hardlink":
            same = self._entries.get(self._follow(entry.target) or "")
            entry = replace(same, path=entry.path) if same else entry
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
