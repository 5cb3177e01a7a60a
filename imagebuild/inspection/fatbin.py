"""GPU code in ELF files: the headers of fat binaries say kind and capability of parts, compressed or not."""

from __future__ import annotations

import struct
from typing import IO

from imagebuild.inspection.facts import GpuCode

SECTIONS = (".nv_fatbin", "__nv_relfatbin")
"""Fat binaries of programs and libraries; of device code that is linked later."""
MAGIC = 0xBA55ED50
HEADER = struct.Struct("<IHHQ")
"""Magic, version, size of this header, bytes that follow it."""
PART = struct.Struct("<HHIQ12xI8xQ")
"""Kind, version, size of this header, bytes that follow it, capability, flags; more follows."""
PTX, CODE = 1, 2
SUFFIXES = ((1 << 20, "a"), (1 << 21, "f"))
"""Flags of code for this chip alone, and for its family."""
ALIGNMENT = 8


def gpu_code(file: IO[bytes], offset: int, size: int) -> frozenset[GpuCode]:
    """The parts of all fat binaries of a section. Raises ValueError where their sizes contradict each other."""
    found: set[GpuCode] = set()
    end = offset + size
    while offset + HEADER.size <= end:
        file.seek(offset)
        magic, _, header, length = HEADER.unpack(file.read(HEADER.size))
        if magic != MAGIC:
            if magic:
                raise ValueError(f"no fat binary at {offset:#x}, but {magic:#010x}")
            offset += ALIGNMENT  # padding
            continue
        offset += header
        if not header or offset + length > end:
            raise ValueError(f"the fat binary at {offset:#x} is longer than its section")
        found |= _parts(file, offset, offset + length)
        offset = -(-(offset + length) // ALIGNMENT) * ALIGNMENT
    return frozenset(found)


def _parts(file: IO[bytes], offset: int, end: int) -> set[GpuCode]:
    found = set()
    while offset + PART.size <= end:
        file.seek(offset)
        kind, _, header, length, capability, flags = PART.unpack(file.read(PART.size))
        if header < PART.size or offset + header + length > end:
            raise ValueError(f"the part at {offset:#x} is longer than its fat binary")
        if kind in (PTX, CODE):
            suffix = "".join(letter for flag, letter in SUFFIXES if flags & flag)
            found.add(GpuCode("ptx" if kind == PTX else "code", f"{capability}{suffix}"))
        offset += header + length
    return found
