"""Read ELF files and the GPU code in them, and find the libraries that glibc's loader would load. Does no I/O."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import IO, Any, cast

from elftools.common.exceptions import ELFError
from elftools.elf.constants import P_FLAGS
from elftools.elf.dynamic import DynamicSegment
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerDefSection, GNUVerNeedSection
from elftools.elf.sections import SymbolTableSection
from elftools.elf.segments import InterpSegment

from imagebuild.core.fields import CPUS
from imagebuild.core.patterns import data_of
from imagebuild.verify.files import Elf, GpuCode, Tree

PATTERNS = data_of(__file__, "patterns")
"""What the rules search for: regular expressions for paths, kinds of paths, secrets, and parts of ELF files."""
SECTIONS = (".nv_fatbin", "__nv_relfatbin")
"""Names of the ELF sections with fat binaries, which contain GPU code: first of linked code, then of relocatable
code."""
FATBIN_MAGIC = 0xBA55ED50
HEADER = struct.Struct("<IHHQ")
"""Header of a fat binary: magic number, version, size of the header, number of bytes after the header."""
PART = struct.Struct("<HHIQ12xI8xQ")
"""Start of the header of a part of a fat binary: kind, version, size of the header, number of bytes after the header,
compute capability, flags."""
PTX, CODE = 1, 2
SUFFIXES = ((1 << 20, "a"), (1 << 21, "f"))
"""Pairs of a flag in a part's header and a suffix of the capability: `a` for code that runs only on this capability,
`f` for code that also runs on later capabilities of the same family."""
ALIGNMENT = 8


def gpu_code(file: IO[bytes], offset: int, size: int) -> frozenset[GpuCode]:
    """Return the parts of all fat binaries in a section. Raises ValueError if the sizes in the headers are wrong."""
    parts: set[GpuCode] = set()
    end = offset + size
    while offset + HEADER.size <= end:
        file.seek(offset)
        magic, _, header, length = HEADER.unpack(file.read(HEADER.size))
        if magic != FATBIN_MAGIC:
            if magic:
                raise ValueError(f"no fat binary at {offset:#x}: the magic number is {magic:#010x}")
            offset += ALIGNMENT  # padding
            continue
        offset += header
        end_of_parts = offset + length
        if not header or end_of_parts > end:
            raise ValueError(f"the fat binary at {offset:#x} is longer than its section")
        while offset + PART.size <= end_of_parts:
            file.seek(offset)
            kind, _, header, length, capability, flags = PART.unpack(file.read(PART.size))
            if header < PART.size or offset + header + length > end_of_parts:
                raise ValueError(f"the part at {offset:#x} is longer than its fat binary")
            if kind in (PTX, CODE):
                suffix = "".join(letter for flag, letter in SUFFIXES if flags & flag)
                parts.add(GpuCode("ptx" if kind == PTX else "code", f"{capability}{suffix}"))
            offset += header + length
        offset = -(-end_of_parts // ALIGNMENT) * ALIGNMENT
    return frozenset(parts)


SYMBOL = struct.Struct("<IBBHQQ")
"""An entry of a symbol table: offset of the name, kind, visibility, section, address, size."""
WEAK = 2
LONGEST_SYMBOL = 128
"""Maximum length of the name of a symbol, in bytes. The rest of a longer name is left out."""
SYMBOLS = re.compile(PATTERNS["symbols"].encode())
TEXTS = [
    (re.compile(soname), re.compile(rf"(?<=\0)({text})(?=[\0\n])".encode()))
    for soname, text in PATTERNS["texts"].items()
]
"""Pairs: pattern of a library's SONAME, and pattern of the texts that are kept."""


def symbols(table: bytes, names: bytes) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the symbols that a file defines and those that it uses, if they match SYMBOLS."""
    found: tuple[set[str], set[str]] = set(), set()
    for start, kind, _, section, _, _ in SYMBOL.iter_unpack(table) if SYMBOLS.search(names) else ():
        if SYMBOLS.match(names, start) and (section or kind >> 4 != WEAK):
            name = names[start : start + LONGEST_SYMBOL].partition(b"\0")[0]
            found[section == 0].add(name.decode("ascii", "replace"))
    return tuple(sorted(found[0])), tuple(sorted(found[1]))


MAGIC = b"\x7fELF"
LEAST_READS, MOST_READS, MOST_BYTES = 20_000, 2_000_000, 1 << 20
"""Limits of the work for one file: the number of reads for the smallest and the largest file, and the number of bytes
that may be read in addition to eight times the size of the file."""
VERSION_IS_WEAK = 2
"""Flag of a needed symbol version that the library may lack."""
TAGS = {"DT_SONAME": "soname", "DT_NEEDED": "needed", "DT_RPATH": "rpath", "DT_RUNPATH": "runpath"}
"""Maps each tag of the dynamic segment to the name of its value."""


class NotElf(Exception):
    """The error for a file that begins like an ELF file, but whose tables cannot be read."""


class _Limited:
    """A file that can be read only a limited number of times. Tables of a hostile file are endless or overlap."""

    def __init__(self, file: IO[bytes]) -> None:
        self.seek, self.tell, self._read = file.seek, file.tell, file.read
        size = file.seek(0, os.SEEK_END)
        self._reads, self._bytes = min(LEAST_READS + size // 32, MOST_READS), MOST_BYTES + 8 * size

    def read(self, size: int = -1) -> bytes:
        data = self._read(size)
        self._reads, self._bytes = self._reads - 1, self._bytes - len(data)
        if self._reads < 0 or self._bytes < 0:
            raise NotElf("its tables are endless, or much larger than the file")
        return data


def _data(section: Any) -> bytes:
    if section.compressed:  # only debuggers read compressed sections
        raise NotElf(f"the section {section.name} is compressed")
    return cast(bytes, section.data())


def read(file: IO[bytes]) -> Elf:
    """Read an ELF file. Raises NotElf if its tables cannot be read."""
    try:
        return _read(cast(IO[bytes], _Limited(file)))
    except (ELFError, struct.error, ValueError, KeyError, IndexError, TypeError, AttributeError,
            AssertionError, OverflowError, UnicodeDecodeError, OSError, MemoryError) as error:  # fmt: skip
        raise NotElf(f"{type(error).__name__}: {error}") from None


def _read(file: IO[bytes]) -> Elf:
    elf = ELFFile(file)
    loadable = elf["e_type"] in ("ET_EXEC", "ET_DYN")
    file.seek(18)
    (machine,) = struct.unpack("<H" if elf.little_endian else ">H", file.read(2))
    lists: dict[str, list[str]] = {name: [] for name in TAGS.values()}
    values: dict[str, Any] = {"executable_stack": True}  # the default of glibc for files without PT_GNU_STACK
    for segment in elf.iter_segments():
        if isinstance(segment, InterpSegment):
            values["interpreter"] = segment.get_interp_name()
        elif segment["p_type"] == "PT_GNU_STACK":
            values["executable_stack"] = bool(segment["p_flags"] & P_FLAGS.PF_X)
        for tag in segment.iter_tags() if isinstance(segment, DynamicSegment) else ():
            if name := TAGS.get(tag.entry.d_tag):
                text = getattr(tag, name)
                lists[name] += text.split(":") if name.endswith("path") else [text]
    soname = next(iter(lists.pop("soname")), None)
    wanted = next((pattern for name, pattern in TEXTS if soname and name.match(soname)), None)
    gpu: set[GpuCode] = set()
    # Images are for 64-bit little-endian machines. Nothing more is needed about files for other machines.
    for section in elf.iter_sections() if loadable and elf.elfclass == 64 and elf.little_endian else ():
        if isinstance(section, GNUVerNeedSection):
            values["wants"] = tuple(
                (str(library.name), tuple(v.name for v in versions if not v.entry.vna_flags & VERSION_IS_WEAK))
                for library, versions in section.iter_versions()
            )
        elif isinstance(section, GNUVerDefSection):
            # The first version in this section is the name of the file itself.
            values["offers"] = tuple(next(iter(names)).name for _, names in section.iter_versions())
        elif isinstance(section, SymbolTableSection) and section["sh_type"] == "SHT_DYNSYM":
            values["defines"], values["uses"] = symbols(_data(section), _data(section.stringtable))
        elif section.name == ".rodata" and wanted:
            values["texts"] = tuple(sorted({text.decode() for text in wanted.findall(b"\0" + _data(section))}))
        elif section.name in SECTIONS and section["sh_type"] != "SHT_NOBITS":
            gpu |= gpu_code(file, section["sh_offset"], section["sh_size"])
    values |= {"soname": soname} | {name: tuple(texts) for name, texts in lists.items()}
    return Elf(machine, loadable, **values, gpu=tuple(sorted(gpu, key=lambda part: (part.kind, part.capability))))


DRIVER = re.compile(r"^lib(cuda|cudadebugger|nvcuvid|nvoptix|nvidia-[\w-]+)\.so(\.|$)")
"""Names of the NVIDIA driver's libraries, which the container runtime mounts."""
MACHINES: Mapping[str, int] = {"amd64": 62, "arm64": 183}
"""Maps each architecture to `e_machine`, the number of the machine in an ELF header."""
TRIPLETS = {MACHINES[arch]: f"{cpu}-linux-gnu" for arch, cpu in CPUS.items()}
"""Maps each `e_machine` to Debian's multiarch name, the folder in /lib and /usr/lib that the loader searches first."""
CACHE = b"glibc-ld.so.cache1.1"
CACHE_HEADER, CACHE_ENTRY = struct.Struct("<I24x"), struct.Struct("<iIIIQ")


@dataclass
class Closure:
    """The libraries that a program or library loads, directly and indirectly, and the libraries that were not found."""

    libraries: dict[str, str | None] = field(default_factory=dict)
    """Maps each needed name to the library's path, or to None if the library is not found."""
    files: list[str] = field(default_factory=list)
    """All loaded files, without symlinks in their paths."""
    missing: list[tuple[str, str]] = field(default_factory=list)
    """Pairs: path of a file that needs a library, and the library's name, which was not found."""
    versions: list[tuple[str, str, str]] = field(default_factory=list)
    """Triples: path of a file that needs a symbol version of a library, path of the library, and the version that the
    library lacks."""


@dataclass(frozen=True)
class _LoadedFile:
    path: str
    elf: Elf
    origin: str
    """Value of `$ORIGIN` for this file."""
    loader_rpath: tuple[str, ...] = ()
    """Folders in the RPATH of the files that load this one, directly or indirectly."""

    @property
    def rpath(self) -> tuple[str, ...]:
        own = () if self.elf.runpath else tuple(map(self.expand, self.elf.rpath))
        return (*own, *self.loader_rpath)

    def expand(self, text: str) -> str:
        return re.sub(r"\$\{?ORIGIN\}?", lambda _: self.origin, text)


class Loader:
    """Search for libraries in an image as glibc's loader does, with the image's environment variables."""

    def __init__(self, tree: Tree, env: Mapping[str, str]) -> None:
        self._tree = tree
        self._library_path = [part for part in env.get("LD_LIBRARY_PATH", "").split(":") if part]
        self._preload = env.get("LD_PRELOAD", "")
        self._found: dict[tuple[str, int], str | None] = {}

    def folders(self, machine: int) -> list[str]:
        """Return the folders in which the loader finds any library by its name.
        These are the folders in LD_LIBRARY_PATH, those in `/etc/ld.so.cache`, and the default folders."""
        cached = [path.rpartition("/")[0] for paths in self.cache.values() for path in paths]
        every = [part.strip("/") for part in self._library_path] + cached + self._defaults(machine)
        return list(dict.fromkeys(path for part in every if (path := self._tree.resolve(part)) is not None))

    @cached_property
    def cache(self) -> dict[str, list[str]]:
        """Maps each library's name to its paths in `/etc/ld.so.cache`; empty if that file is missing or unreadable."""
        entry = self._tree.find("etc/ld.so.cache")
        text = ((entry and entry.text) or b"").partition(CACHE)[2]
        paths: dict[str, list[str]] = {}
        try:
            number, size = CACHE_HEADER.unpack_from(text)[0], CACHE_ENTRY.size
            for _, name, path, _, _ in CACHE_ENTRY.iter_unpack(text[CACHE_HEADER.size :][: number * size]):
                paths.setdefault(_string(text, name), []).append(_string(text, path).strip("/"))
        except (struct.error, ValueError):
            return {}
        return paths

    def closure(self, path: str, *opened: str) -> Closure:
        """Return the libraries that are loaded for a program or library, and then for the files that it opens."""
        result = Closure()
        # For a program, symlinks are followed before `$ORIGIN` is set; for a library, they are not.
        first = [self._loaded(path, self._tree.resolve(path) or path)]
        preloads = self.preloads if first[0].elf.interpreter else ()
        preloaded = [self.find(name, first[0].elf.machine) for name in preloads]
        first += [self._loaded(name, name) for name in preloaded if name]
        loaded: dict[str, _LoadedFile] = {}
        sonames: dict[str, _LoadedFile] = {}
        queue: list[_LoadedFile] = []
        for roots in (first, *([self._loaded(name, name)] for name in opened)):
            began = len(queue)
            for root in roots:
                real = self._tree.resolve(root.path) or root.path
                if real not in loaded:
                    queue.append(loaded.setdefault(real, root))
                    sonames.setdefault(root.elf.soname or root.path, root)
            for current in islice(queue, began, None):
                for name in current.elf.needed:
                    if name in result.libraries or name in sonames:
                        continue
                    library = self._search(name, current)
                    result.libraries[name] = library
                    if library is None:
                        result.missing.append((current.path, name))
                        continue
                    real = self._tree.resolve(library) or library
                    if real not in loaded:
                        loaded[real] = self._loaded(library, library, current.rpath)
                        queue.append(loaded[real])
                    sonames[name] = loaded[real]
                    if soname := loaded[real].elf.soname:
                        sonames.setdefault(soname, loaded[real])
        result.files += loaded
        for file in queue:
            for name, versions in file.elf.wants:
                # glibc only warns if a library defines no symbol versions at all.
                if (definer := sonames.get(name)) and definer.elf.offers:
                    lacking = (version for version in versions if version not in definer.elf.offers)
                    result.versions += [(file.path, definer.path, version) for version in lacking]
        return result

    @cached_property
    def preloads(self) -> list[str]:
        """The names in LD_PRELOAD and /etc/ld.so.preload. The loader loads these libraries into every program."""
        entry = self._tree.find("etc/ld.so.preload")
        text = re.sub(rb"#.*", b"", (entry and entry.text) or b"").decode("utf-8", "replace")
        return re.split(r"[\s:]+", f"{self._preload} {text}".strip()) if self._preload or text else []

    def find(self, name: str, machine: int, by: str | None = None) -> str | None:
        """Return the path of the library that `dlopen(name)` opens in the file `by`; None if there is none."""
        opener = self._loaded(by, by) if by else _LoadedFile("", Elf(machine, loadable=True), "/")
        return self._search(name, opener)

    def _loaded(self, path: str, place: str, loader_rpath: tuple[str, ...] = ()) -> _LoadedFile:
        entry = self._tree.find(path)
        assert entry and entry.elf, "a program or library that exists"  # noqa: PT018
        return _LoadedFile(path, entry.elf, f"/{place.rpartition('/')[0]}", loader_rpath)

    def _search(self, name: str, by: _LoadedFile) -> str | None:
        """Return the path of a library that `by` needs, searched in glibc's order; None if it is not found."""
        if "/" in name:
            return self._fits(by.expand(name), by.elf)
        own = () if by.elf.runpath else by.rpath
        for folder in (*own, *self._library_path, *map(by.expand, by.elf.runpath)):
            if path := self._fits(f"{folder}/{name}", by.elf):
                return path
        key = (name, by.elf.machine)
        if key not in self._found:
            default = [f"{folder}/{name}" for folder in self._defaults(by.elf.machine)]
            every = (self._fits(path, by.elf) for path in (*self.cache.get(name, ()), *default))
            self._found[key] = next((path for path in every if path), None)
        return self._found[key]

    def _fits(self, path: str, by: Elf) -> str | None:
        """Return the path if a library for the same machine as `by` exists at this path; otherwise None."""
        path = path.strip("/")
        entry = self._tree.find(path)
        return path if entry and entry.elf and entry.elf.machine == by.machine else None

    def _defaults(self, machine: int) -> list[str]:
        triplet = TRIPLETS.get(machine)
        return [*([f"lib/{triplet}", f"usr/lib/{triplet}"] if triplet else []), "lib64", "usr/lib64", "lib", "usr/lib"]


def _string(text: bytes, start: int) -> str:
    """Return the null-terminated string at an offset of the cache, which counts from the magic number."""
    start -= len(CACHE)
    return text[start : text.index(b"\0", start)].decode("utf-8", "replace")
