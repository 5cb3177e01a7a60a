"""What is kept of the files of an image: enough for every rule, and small whatever the image's size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
