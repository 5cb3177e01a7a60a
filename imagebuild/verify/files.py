"""The files of an image: the members of each layer, and the merged tree that a container sees. Does no I/O.

Layers are unpacked and merged as containerd does with its usual snapshotter, which uses overlayfs."""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from posixpath import normpath
from typing import Literal

from imagebuild.core.errors import ResultError
from imagebuild.oci.layout import OPAQUE, WHITEOUT, Compression
from imagebuild.oci.tar import MemberKind

MOST_LINKS, MOST_LINKS_OF_KERNEL = 255, 40
"""Maximum number of symlinks in a path that containerd and the Linux kernel follow."""
HIDES = "c 0 0"
"""Numbers of the device that hides a file of lower layers in overlayfs. Engines make such a device for a whiteout."""
EMPTY_SHA256 = hashlib.sha256().hexdigest()
"""Hash of an empty file."""


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
    defines: tuple[str, ...] = ()
    """The symbols in this file that match `symbols` in patterns.yaml."""
    uses: tuple[str, ...] = ()
    """Symbols of this kind that other files must define."""
    texts: tuple[str, ...] = ()
    """Texts in the file that match `texts` in patterns.yaml, such as the names under which it opens other files."""
    executable_stack: bool = False
    """Whether the file needs an executable stack."""
    gpu: tuple[GpuCode, ...] = ()


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A member of a layer's archive."""

    path: str
    """Path without a leading or trailing slash."""
    kind: MemberKind
    mode: int
    uid: int = 0
    gid: int = 0
    target: str = ""
    """Target of a link: as written for a symlink, in the form of `path` for a hard link. For a device: its type and
    numbers, such as `c 1 3`."""
    layer: int = 0
    """Number of the layer that contains the entry; 0 is the lowest layer."""
    capabilities: bool = False
    """Whether the file has Linux capabilities, which give a program privileges as setuid does."""
    elf: Elf | None = None
    broken: str = ""
    """Why a file with the magic number of ELF cannot be read as an ELF file; empty for all other files."""
    text: bytes | None = None
    """Content of the file, for the few files whose text the rules need."""
    script: str = ""
    """First line of a script, with `#!` and without the line feed."""
    sha256: str = ""
    """Hash of the content of a file; empty for an empty file."""
    md5: str = ""
    """Hash of a program with privileges. The package database has no better hash."""
    secrets: tuple[str, ...] = ()
    """Kinds of secrets that the file contains."""
    certificates: tuple[str, ...] = ()
    """Digests of the certificates in the file."""

    @property
    def content_sha256(self) -> str:
        """Hash of the content of a file, also of an empty one."""
        return self.sha256 or EMPTY_SHA256


def lines_of(entry: FileEntry | None) -> list[str]:
    """Return the lines of a file as programs read them, which end a line only at a line feed; empty without a text."""
    return entry.text.decode("utf-8", "replace").split("\n") if entry and entry.text else []


@dataclass(frozen=True, slots=True)
class Layer:
    """The content of a layer."""

    entries: tuple[FileEntry, ...]
    stored: int
    """Size in bytes as stored, usually compressed."""
    compression: Compression

    def numbered(self, number: int) -> Layer:
        """Return the layer with its number in an image in each entry."""
        return replace(self, entries=tuple(replace(entry, layer=number) for entry in self.entries)) if number else self


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


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


class _Members:
    """Files by their paths, and the names in each folder."""

    def __init__(self) -> None:
        self.entries: dict[str, FileEntry] = {}
        self._names: dict[str, set[str]] = {}

    def _put(self, path: str, entry: FileEntry) -> None:
        self.entries[path] = entry
        folder, _, name = path.rpartition("/")
        self._names.setdefault(folder, set()).add(name)

    def _remove(self, path: str) -> list[str]:
        """Remove a path and all paths below it, and return them."""
        folder, _, name = path.rpartition("/")
        self._names[folder].discard(name)
        gone = [path]
        for here in gone:
            self.entries.pop(here, None)
            gone += [_join(here, name) for name in self._names.pop(here, ())]
        return gone


class UnpackedLayer(_Members):
    """The files of a layer as containerd unpacks them: each layer alone, into an empty folder.

    Links lead only to files of the same layer. A missing folder gets the attributes of the same folder in the layers
    below. A device with the numbers HIDES hides a file of lower layers. In `entries`, folders precede their content."""

    def __init__(self, layer: Layer, lower: Sequence[UnpackedLayer] = ()) -> None:
        """Unpack a layer. `lower` are the layers below, the next one first.
        Raises ResultError if containerd would refuse the layer."""
        super().__init__()
        self.opaque: set[str] = set()
        """Folders that hide the content of the same folder in lower layers."""
        self.implied: set[str] = set()
        """Folders for which the layer has no member."""
        self._lower = lower
        self._inodes: dict[str, int] = {}
        """Maps the paths of a file with hard links to a number of the file. Its owner and mode are those of the last
        link."""
        for entry in layer.entries:
            self._add(entry)
        for entry in layer.entries:
            # containerd sets the times of folders at the end.
            if entry.kind != "folder" or entry.path.rpartition("/")[2].startswith(WHITEOUT):
                continue
            if (real := self.resolve(entry.path)) and real not in self.entries:
                raise _refused(entry, "the same layer removes this folder")
        last = {number: self.entries[path] for path, number in self._inodes.items()}
        for path, number in self._inodes.items():
            self.entries[path] = replace(last[number], path=path)

    def resolve(self, path: str) -> str:
        """Return the path after following symlinks in this layer. As in Go, `..` after a symlink removes the symlink.
        Raises ResultError if the path contains too many links."""
        if (entry := self.entries.get(path)) and entry.kind == "folder":
            return path
        links, done, rest = 0, "", path.split("/")[::-1]
        while rest:
            here = _join(done, rest.pop())
            entry = self.entries.get(here)
            if entry and entry.kind == "symlink":
                if (links := links + 1) > MOST_LINKS:
                    raise ResultError(f"/{path}: contains too many symlinks")
                start = "" if entry.target.startswith("/") else done
                done, rest = "", normpath("/".join(["/", start, entry.target, *rest[::-1]])).strip("/").split("/")[::-1]
            else:
                done = here
        return done

    def _add(self, entry: FileEntry) -> None:
        folder, _, name = entry.path.rpartition("/")
        folder = self.resolve(folder)
        self._make(folder, entry)
        if name == OPAQUE:
            self.opaque.add(folder)
            return
        hidden = name.removeprefix(WHITEOUT)
        path = _join(folder, hidden)
        if hidden != name:
            if hidden in ("", ".", "..") or path in self.entries:
                raise _refused(entry, "this whiteout names no file, or a file that its own layer added before")
            entry = replace(entry, kind="device", target=HIDES)
        old = self.entries.get(path)
        if old and not (old.kind == "folder" and entry.kind == "folder"):
            self._remove(path)
        if entry.kind == "hardlink":
            entry = self._linked(entry, path)
        elif entry.kind == "symlink" and not entry.target:
            raise _refused(entry, "this symlink has no target")
        if entry.kind != "global":
            self.implied.discard(path)
            self._put(path, entry if entry.path == path else replace(entry, path=path))

    def _linked(self, entry: FileEntry, path: str) -> FileEntry:
        """Return the file to which a hard link leads, with the attributes of the link."""
        folder, _, name = entry.target.rpartition("/")
        target = _join(self.resolve(folder), name)
        found = self.entries.get(target)
        if found is None or found.kind == "folder":
            raise _refused(entry, f"this is a hard link to /{entry.target}, which is not a file of the same layer")
        number = self._inodes.setdefault(target, len(self._inodes))
        self._inodes[path] = number
        # The last path of a file has its current attributes.
        self._inodes[path] = self._inodes.pop(path)
        mode = found.mode if found.kind == "symlink" else entry.mode
        return replace(found, mode=mode, uid=entry.uid, gid=entry.gid, capabilities=entry.capabilities)

    def _make(self, folder: str, entry: FileEntry) -> None:
        """Add a folder and its parents, if they are missing. `entry` is the member that needs the folder."""
        missing = []
        while folder and (found := self.entries.get(folder)) is None:
            missing.append(folder)
            folder = folder.rpartition("/")[0]
        if folder and found and found.kind != "folder":
            raise _refused(entry, f"/{folder} is not a folder in the same layer")
        for path in reversed(missing):
            self.implied.add(path)
            lower = self._folder_below(path, entry)
            self._put(path, FileEntry(path, "folder", lower.mode, lower.uid, lower.gid, layer=entry.layer))

    def _folder_below(self, path: str, entry: FileEntry) -> FileEntry:
        """Return the folder whose attributes a missing folder gets."""
        for layer in self._lower:
            real = layer.resolve(path)
            if found := layer.entries.get(real):
                if found.kind == "folder":
                    return found
                break
            while real := real.rpartition("/")[0]:
                if (found := layer.entries.get(real)) and found.kind != "folder":
                    raise _refused(entry, f"/{real} is not a folder in layer {found.layer + 1}")
        parent = self.entries.get(path.rpartition("/")[0])
        # Linux gives a new folder the group of its parent if the parent is setgid.
        return FileEntry(path, "folder", 0o755, gid=parent.gid if parent and parent.mode & 0o2000 else 0)

    def _remove(self, path: str) -> list[str]:
        gone = super()._remove(path)
        for each in gone:
            self._inodes.pop(each, None)
            self.opaque.discard(each)
        return gone


def _refused(entry: FileEntry, why: str) -> ResultError:
    return ResultError(f"layer {entry.layer + 1}: /{entry.path}: {why}; engines refuse the image, so build it again")


class Tree(_Members):
    """The files that a container sees, merged from layers.
    Paths have no leading or trailing slash; the root is the empty path."""

    def __init__(self, layers: Iterable[Layer] = ()) -> None:
        """Merge the layers. Raises ResultError if containerd would refuse one of them."""
        super().__init__()
        lower: list[UnpackedLayer] = []
        for layer in layers:
            unpacked = UnpackedLayer(layer, lower)
            self._merge(unpacked)
            lower.insert(0, unpacked)

    def _merge(self, layer: UnpackedLayer) -> None:
        for path, entry in layer.entries.items():
            old = self.entries.get(path)
            if old and old.kind == "folder" and entry.kind == "folder":
                if path in layer.opaque:
                    for name in self.names(path):
                        self._remove(_join(path, name))
                if path not in layer.implied or (old.mode, old.uid, old.gid) != (entry.mode, entry.uid, entry.gid):
                    self.entries[path] = entry
                continue
            if old:
                self._remove(path)
            if (entry.kind, entry.target) != ("device", HIDES):
                self._put(path, entry)

    def __iter__(self) -> Iterator[FileEntry]:
        return iter(self.entries.values())

    def get(self, path: str) -> FileEntry | None:
        """Return the entry at a path without following links."""
        return self.entries.get(path)

    def names(self, path: str) -> list[str]:
        """Return the names in a folder, sorted."""
        return sorted(self._names.get(path, ()))

    def resolve(self, path: str) -> str | None:
        """Return the path after following all symlinks; None if it does not exist or the links are circular."""
        real = self._follow(path)
        return real if real == "" or real in self.entries else None

    def find(self, path: str) -> FileEntry | None:
        """Return the entry that a program gets when it opens the path, after following all symlinks."""
        real = self._follow(path)
        return None if real is None else self.entries.get(real)

    def trail(self, path: str) -> list[FileEntry]:
        """Return all folders and links through which a program goes to open a path, and the entry at the path."""
        seen: list[str] = []
        self._follow(path, seen)
        return [entry for entry in map(self.entries.get, dict.fromkeys(seen)) if entry]

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

    def _follow(self, path: str, seen: list[str] | None = None) -> str | None:
        """Return the path after following symlinks, even if nothing exists there; None if the links are circular.
        Append all paths on the way to `seen`."""
        rest, done, links = path.split("/")[::-1], "", 0
        while rest:
            part = rest.pop()
            here = f"{done}/{part}".lstrip("/")
            entry = self.entries.get(here)
            if seen is not None:
                seen.append(here)
            if part == "..":
                done = done.rpartition("/")[0]
            elif entry and entry.kind == "symlink":
                done = "" if entry.target.startswith("/") else done
                rest += entry.target.split("/")[::-1]
                links += 1
                if links > MOST_LINKS_OF_KERNEL:
                    return None
            elif part not in ("", "."):
                done = here
        return done
