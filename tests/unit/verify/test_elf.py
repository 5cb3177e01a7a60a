"""The facts that are read from ELF files, and the libraries that the loader finds."""

from __future__ import annotations

import io
import random
import struct
import tempfile
from pathlib import Path
from typing import Any

import pytest
from elftools.elf.elffile import ELFFile

from imagebuild.oci.layout import Blob
from imagebuild.verify import elf
from imagebuild.verify.elf import Loader, NotElf, gpu_code
from imagebuild.verify.files import Elf, GpuCode, Layer, Tree
from imagebuild.verify.layers import scan
from tests.conftest import data
from tests.unit import image_files
from tests.unit.image_files import REAL, Files, cache, symlink

SUFFIX_A, SUFFIX_F = 1 << 20, 1 << 21
MULTIARCH = "usr/lib/x86_64-linux-gnu"


def read(data: bytes) -> Elf:
    return elf.read(io.BytesIO(data))


def test_everything_that_is_read_of_a_file() -> None:
    found = read(REAL["libx.so"])
    assert (found.machine, found.loadable, found.interpreter) == (62, True, "/lib64/ld-linux-x86-64.so.2")
    assert (found.soname, found.needed, found.runpath) == ("libx.so.1", ("libv.so.1",), ("$ORIGIN/..",))
    assert (found.wants, found.offers) == ((("libv.so.1", ("V_2", "V_1")),), ("libx.so.1", "X_1"))
    assert found.gpu == (GpuCode("code", "90"), GpuCode("ptx", "90"))
    assert read(image_files.elf(rpath="/one:/two", needed=["a"])) == Elf(
        62, True, needed=("a",), rpath=("/one", "/two")
    )


def test_a_damaged_file_is_none_and_never_crashes() -> None:
    whole, chance = REAL["libx.so"], random.Random(1)
    refused = 0
    for _ in range(400):
        data = bytearray(whole[: chance.randrange(4, len(whole) + 1)])
        for _ in range(chance.randrange(8)):
            data[chance.randrange(4, len(data)) if len(data) > 4 else 3] = chance.randrange(256)
        try:
            read(bytes(data))
        except NotElf:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize("section", [".gnu.version_r", ".gnu.version_d", ".dynsym"])
def test_tables_without_end_are_not_read(section: str) -> None:
    """Tables that lead back to themselves, and a section that would be much larger after decompression."""
    data = bytearray(REAL["libx.so"])
    whole: Any = ELFFile(io.BytesIO(data))
    found = whole.get_section_by_name(section)
    header, at = whole["e_shoff"] + whole.get_section_index(section) * 64, found["sh_offset"]
    if section == ".dynsym":
        struct.pack_into("<Q", data, header + 8, 0x802)  # SHF_COMPRESSED
        struct.pack_into("<IIQQ", data, at, 1, 0, 1 << 40, 1)
    else:
        struct.pack_into("<I", data, header + 44, 0xFFFFFFFF)
        struct.pack_into("<I", data, at + (12 if section.endswith("r") else 16), 0)
    with pytest.raises(NotElf, match="is compressed" if section == ".dynsym" else "its tables are endless"):
        read(bytes(data))


def test_parts_of_fat_binaries() -> None:
    def gpu(data: bytes) -> set[str]:
        return {f"{part.kind} {part.capability}" for part in gpu_code(io.BytesIO(data), 0, len(data))}

    first = image_files.fatbin(("code", 90, SUFFIX_A), ("code", 100, SUFFIX_F | 1 << 24), ("ptx", 120, 0))
    second = image_files.fatbin(("code", 75, 0))
    assert gpu(first + bytes(24) + second + bytes(8)) == {"code 90a", "code 100f", "ptx 120", "code 75"}
    assert gpu(bytes(64)) == set()
    for cut in (20, 40, 90):
        with pytest.raises(ValueError, match="longer than"):
            gpu(first[:cut])
    with pytest.raises(ValueError, match="no fat binary"):
        gpu(b"something else, of some length")


def read_layer(files: Files) -> Layer:
    data = image_files.layer(files)
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        return scan(Blob(Path(file.name), len(data)))


LIBRARY = image_files.elf(soname="libx.so.1")
SECOND = image_files.elf(soname="liby.so", needed=["libx.so.1"])
PLACES: Files = {f"{place}/libx.so.1": LIBRARY for place in ("app", "opt/r", "opt/l", "opt/c", MULTIARCH)}


def program(*needed: str, **options: str) -> bytes:
    return image_files.elf(needed=needed or ["libx.so.1"], **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("row", data("cases/verify/elf"), ids=str)
def test_where_the_loader_finds_a_library(row: dict[str, Any]) -> None:
    kinds: Files = {"nothing": b"", "library": LIBRARY, "second": SECOND, "foreign": image_files.elf(machine=183)}
    files = {path: kinds[what] if what in kinds else symlink(what) for path, what in row.get("files", {}).items()}
    main = program(*row.get("needs", ()), **row.get("program", {}))
    layers = [{**PLACES, "etc/ld.so.cache": cache(["/opt/c/libx.so.1"]), "app/program": main}, files]
    loader = Loader(Tree(map(read_layer, layers)), {"LD_LIBRARY_PATH": row.get("path", "")})
    assert loader.closure("app/program").libraries["libx.so.1"] == row["found"]


def test_what_is_loaded_already_is_not_looked_for_again() -> None:
    main = program("/opt/r/first.so", "liby.so", runpath="/opt/r")
    layer = read_layer({"app/program": main, "opt/r/first.so": LIBRARY, "opt/r/liby.so": SECOND})
    found = Loader(Tree([layer]), {}).closure("app/program").libraries
    assert found == {"/opt/r/first.so": "opt/r/first.so", "liby.so": "opt/r/liby.so"}
