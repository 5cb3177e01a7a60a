"""What glibc's loader would find for a program or library, inside the image. Pure."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from imagebuild.inspection.facts import Elf
from imagebuild.inspection.tree import Tree

DRIVER = re.compile(r"^lib(cuda|cudadebugger|nvcuvid|nvoptix|nvidia-[\w-]+)\.so(\.|$)")
"""Libraries that come with the driver, which the container runtime mounts."""
DRIVER_SYMBOL = re.compile(r"^(cu|nvml|nvcuvid|nvEnc)[A-Z]")
TRIPLETS = {(62, 64): "x86_64-linux-gnu", (183, 64): "aarch64-linux-gnu", (3, 32): "i386-linux-gnu"}
"""Machine and bits → where Debian's loader looks first."""
VIRTUAL = re.compile(r"^(linux-(vdso|gate)\.so|ld-linux)")
CACHE = b"glibc-ld.so.cache1.1"
CACHE_HEADER, CACHE_ENTRY = struct.Struct("<20sII20x"), struct.Struct("<iIIIQ")


@dataclass
class Closure:
    """What a program or library loads, and what is wrong with it."""

    libraries: dict[str, str | None] = field(default_factory=dict)
    """Name as needed → path, or None where there is none."""
    missing: list[tuple[str, str]] = field(default_factory=list)
    """Path of what needs it, and the name that was not found."""
    versions: list[tuple[str, str, str]] = field(default_factory=list)
    """Path of what needs it, path of the library, and the version of symbols that the library lacks."""
    paths: tuple[str, ...] = ()
    """Of everything that is loaded, itself first."""


@dataclass(frozen=True)
class _Loaded:
    path: str
    elf: Elf
    by: _Loaded | None


class Loader:
    """glibc's loader in an image."""

    def __init__(self, tree: Tree, env: Mapping[str, str]) -> None:
        self._tree = tree
        self._library_path = [part for part in env.get("LD_LIBRARY_PATH", "").split(":") if part]
        self._found: dict[tuple[str, int, int], str | None] = {}
        self._tables: dict[str, tuple[frozenset[bytes], frozenset[bytes]]] = {}

    def folders(self, machine: int, bits: int = 64) -> list[str]:
        """Where libraries are found by name alone: LD_LIBRARY_PATH, the folders of the cache, the defaults."""
        cached = [path.rpartition("/")[0] for paths in self.cache.values() for path in paths]
        every = [part.strip("/") for part in self._library_path] + cached + self._defaults(machine, bits)
        return list(dict.fromkeys(path for part in every if (path := self._tree.resolve(part)) is not None))

    @cached_property
    def cache(self) -> dict[str, list[str]]:
        """Name → paths, as `/etc/ld.so.cache` says."""
        entry = self._tree.find("etc/ld.so.cache")
        text = (entry.text if entry else None) or b""
        start = text.find(CACHE)
        if start < 0:
            return {}
        found: dict[str, list[str]] = {}
        try:
            _, number, _ = CACHE_HEADER.unpack_from(text, start)
            for i in range(number):
                _, name, path, _, _ = CACHE_ENTRY.unpack_from(text, start + CACHE_HEADER.size + i * CACHE_ENTRY.size)
                found.setdefault(_string(text, start + name), []).append(_string(text, start + path).strip("/"))
        except (struct.error, ValueError):
            return {}
        return found

    def closure(self, path: str, elf: Elf) -> Closure:
        """What is loaded for a program or library."""
        result = Closure()
        root = _Loaded(path, elf, None)
        loaded = {path: root}
        sonames: dict[str, _Loaded] = {elf.soname or path: root}
        queue = [root]
        while queue:
            here = queue.pop(0)
            for name in here.elf.needed:
                if name in result.libraries or name in sonames:
                    continue
                found = self._search(name, here)
                result.libraries[name] = found
                if found is None:
                    result.missing.append((here.path, name))
                    continue
                real = self._tree.resolve(found) or found
                if real not in loaded:
                    entry = self._tree.get(real)
                    assert entry
                    assert entry.elf
                    loaded[real] = _Loaded(found, entry.elf, here)
                    queue.append(loaded[real])
                sonames[name] = loaded[real]
                if soname := loaded[real].elf.soname:
                    sonames.setdefault(soname, loaded[real])
        for one in loaded.values():
            result.versions += _lacking(one, sonames)
        result.paths = tuple(loaded)
        return result

    def undefined(self, closure: Closure) -> Iterator[tuple[str, str]]:
        """Path of what needs it, and name, of every symbol that nothing defines of what is loaded together."""
        for path in closure.paths:
            for name in self._symbols(path)[0]:
                if not any(name in self._symbols(other)[1] for other in closure.paths):
                    yield path, name.decode("utf-8", "replace")

    def _symbols(self, path: str) -> tuple[frozenset[bytes], frozenset[bytes]]:
        """Symbols that a file needs and those that it defines."""
        if path not in self._tables:
            entry = self._tree.find(path)
            elf = entry.elf if entry else None
            texts = (elf.undefined, elf.defined) if elf else (b"", b"")
            needs, has = (frozenset(text.split(b"\0")) - {b""} for text in texts)
            self._tables[path] = (needs, has)
        return self._tables[path]

    def _search(self, name: str, by: _Loaded) -> str | None:
        if "/" in name:
            return self._fits(self._expand(name, by), by.elf)
        own: list[str] = []
        if not by.elf.runpath:
            above: _Loaded | None = by
            while above:
                if not above.elf.runpath:
                    own += [self._expand(part, above) for part in above.elf.rpath]
                above = above.by
        for folder in (*own, *self._library_path, *(self._expand(part, by) for part in by.elf.runpath)):
            if found := self._fits(f"{folder}/{name}", by.elf):
                return found
        key = (name, by.elf.machine, by.elf.bits)
        if key not in self._found:
            default = [f"{folder}/{name}" for folder in self._defaults(by.elf.machine, by.elf.bits)]
            every = (self._fits(path, by.elf) for path in (*self.cache.get(name, ()), *default))
            self._found[key] = next((path for path in every if path), None)
        return self._found[key]

    def _fits(self, path: str, by: Elf) -> str | None:
        """The path, if it is a library that a file of this machine can load."""
        path = path.strip("/")
        entry = self._tree.find(path)
        if entry is None or entry.elf is None:
            return None
        return path if (entry.elf.machine, entry.elf.bits) == (by.machine, by.bits) else None

    def _expand(self, text: str, by: _Loaded) -> str:
        # The folder a program lies in is the one that links lead to; that of a library is the one it was found in.
        path = by.path if by.by else self._tree.resolve(by.path) or by.path
        values = {"ORIGIN": "/" + path.rpartition("/")[0], "LIB": self._lib(by.elf), "PLATFORM": "x86_64"}
        return re.sub(r"\$\{?(ORIGIN|LIB|PLATFORM)\}?", lambda match: values[match[1]], text)

    def _lib(self, elf: Elf) -> str:
        triplet = TRIPLETS.get((elf.machine, elf.bits), "")
        return f"lib/{triplet}" if self._tree.is_folder(f"usr/lib/{triplet}") else "lib64"

    def _defaults(self, machine: int, bits: int) -> list[str]:
        triplet = TRIPLETS.get((machine, bits))
        local = [f"lib/{triplet}", f"usr/lib/{triplet}"] if triplet else []
        wide = ["lib64", "usr/lib64"] if bits == 64 else []
        return [*local, *wide, "lib", "usr/lib"]


def _string(text: bytes, start: int) -> str:
    return text[start : text.index(b"\0", start)].decode("utf-8", "replace")


def _lacking(one: _Loaded, loaded: Mapping[str, _Loaded]) -> Iterator[tuple[str, str, str]]:
    for name, versions in one.elf.wants:
        library = loaded.get(name)
        # A library without any version satisfies all, with a warning.
        if library and library.elf.offers:
            offers = set(library.elf.offers)
            yield from ((one.path, library.path, version) for version in versions if version not in offers)
