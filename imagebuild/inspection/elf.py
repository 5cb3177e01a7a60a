"""ELF files: what the loader would read. Only the tables that rules need are touched."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import IO, Any

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerDefSection, GNUVerNeedSection
from elftools.elf.segments import InterpSegment

from imagebuild.inspection import fatbin
from imagebuild.inspection.facts import Elf, GpuCode

MAGIC = b"\x7fELF"
TYPES = {"ET_NONE": 0, "ET_REL": 1, "ET_EXEC": 2, "ET_DYN": 3, "ET_CORE": 4}
WEAK, LOCAL, UNDEFINED, VERSION_IS_WEAK = 2, 0, 0, 2
"""Bindings and section of a symbol; flag of a version that may be absent."""
LISTS = {"DT_NEEDED": "needed", "DT_RPATH": "rpath", "DT_RUNPATH": "runpath"}


class NotElf(Exception):
    """The file begins like an ELF file, but its tables cannot be read."""


def read(file: IO[bytes]) -> Elf:
    """What the loader would read of a file. Raises NotElf."""
    try:
        return _read(file)
    except (ELFError, struct.error, ValueError, KeyError, IndexError, TypeError, AttributeError,
            AssertionError, OverflowError, UnicodeDecodeError, OSError, MemoryError) as error:  # fmt: skip
        raise NotElf(f"{type(error).__name__}: {error}") from None


def _read(file: IO[bytes]) -> Elf:
    elf = ELFFile(file)
    header = elf.header
    (machine,) = struct.unpack("<H" if elf.little_endian else ">H", _at(file, 18, 2))
    values: dict[str, Any] = {"type": TYPES.get(header["e_type"], -1)}
    for segment in elf.iter_segments():
        if isinstance(segment, InterpSegment):
            values["interpreter"] = segment.get_interp_name()
        elif segment["p_type"] == "PT_DYNAMIC":
            values |= _dynamic(segment)
    if values["type"] in (2, 3):
        values |= _sections(elf, file)
    return Elf(machine=machine, bits=elf.elfclass, little=elf.little_endian, **values)


def _dynamic(segment: Any) -> dict[str, Any]:
    lists: dict[str, list[str]] = {name: [] for name in LISTS.values()}
    result: dict[str, Any] = {}
    for tag in segment.iter_tags():
        if tag.entry.d_tag == "DT_NEEDED":
            lists["needed"].append(tag.needed)
        elif tag.entry.d_tag in LISTS:
            name = LISTS[tag.entry.d_tag]
            lists[name] += getattr(tag, name).split(":")
        elif tag.entry.d_tag == "DT_SONAME":
            result["soname"] = tag.soname
    return result | {name: tuple(value) for name, value in lists.items()}


def _sections(elf: ELFFile, file: IO[bytes]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    gpu: set[GpuCode] = set()
    for section in elf.iter_sections():
        if isinstance(section, GNUVerNeedSection):
            result["wants"] = tuple(_wants(section))
        elif isinstance(section, GNUVerDefSection):
            # The first names the file itself.
            result["offers"] = tuple(next(iter(names)).name for _, names in section.iter_versions())
        elif section["sh_type"] == "SHT_DYNSYM":
            strings = elf.get_section(section["sh_link"])
            names = _at(file, strings["sh_offset"], strings["sh_size"])
            table = _at(file, section["sh_offset"], section["sh_size"])
            result["undefined"], result["defined"] = _symbols(table, names, elf.elfclass, elf.little_endian)
        elif section.name in fatbin.SECTIONS and section["sh_type"] != "SHT_NOBITS":
            gpu |= fatbin.gpu_code(file, section["sh_offset"], section["sh_size"])
    return result | {"gpu": tuple(sorted(gpu, key=lambda part: (part.kind, part.capability)))}


def _wants(section: GNUVerNeedSection) -> Iterator[tuple[str, tuple[str, ...]]]:
    for library, versions in section.iter_versions():
        names = (version.name for version in versions if not version.entry.vna_flags & VERSION_IS_WEAK)
        yield str(library.name), tuple(names)


def _symbols(table: bytes, names: bytes, bits: int, little: bool) -> tuple[bytes, bytes]:
    """Names of the symbols that it needs and that it defines. A whole library's are thousands, so no objects."""
    order = "<" if little else ">"
    entry = struct.Struct(order + ("IBBHQQ" if bits == 64 else "IIIBBH"))
    needs, has = [], []
    for fields in entry.iter_unpack(table[: len(table) // entry.size * entry.size]):
        name, info, section = (fields[0], fields[1], fields[3]) if bits == 64 else (fields[0], fields[3], fields[5])
        binding = info >> 4
        if not name or binding == LOCAL:
            continue
        text = names[name : names.index(b"\0", name)]
        if section != UNDEFINED:
            has.append(text)
        elif binding != WEAK:
            needs.append(text)
    return b"\0".join(dict.fromkeys(needs)), b"\0".join(dict.fromkeys(has))


def _at(file: IO[bytes], offset: int, size: int) -> bytes:
    file.seek(offset)
    data = file.read(size)
    if len(data) != size:
        raise ValueError(f"the file ends before {offset + size:#x}")
    return data
