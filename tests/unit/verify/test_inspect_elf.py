"""What the loader and the GPU's driver would read of a file, and what the loader would find."""

from __future__ import annotations

import io
import random
import tempfile
from pathlib import Path

import pytest

from imagebuild.oci import Blob
from imagebuild.verify import Elf, GpuCode, Layer, Loader, NotElf, Tree, describe_code, elf, gpu_code, runs, scan
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


def gpu(data: bytes) -> set[str]:
    found = gpu_code(io.BytesIO(data), 0, len(data))
    return {f"{part.kind} {part.capability}" for part in found}


def test_parts_of_fat_binaries() -> None:
    first = image_files.fatbin(("code", 90, SUFFIX_A), ("code", 100, SUFFIX_F | 1 << 24), ("ptx", 120, 0))
    second = image_files.fatbin(("code", 75, 0))
    assert gpu(first + bytes(24) + second + bytes(8)) == {"code 90a", "code 100f", "ptx 120", "code 75"}
    assert gpu(b"") == gpu(bytes(64)) == set()


@pytest.mark.parametrize("cut", [20, 40, 90])
def test_fat_binaries_that_contradict_themselves(cut: int) -> None:
    with pytest.raises(ValueError, match="longer than"):
        gpu(image_files.fatbin(("code", 90, 0), ("ptx", 90, 0))[:cut])
    with pytest.raises(ValueError, match="no fat binary"):
        gpu(b"something else, of some length")


@pytest.mark.parametrize(
    ("has", "capability", "right"),
    [
        ("code 80", "80", True), ("code 80", "89", True), ("code 89", "80", False), ("code 90", "100", False),
        ("ptx 80", "120", True), ("ptx 90", "80", False), ("code 90a", "90", True), ("code 100a", "103", False),
        ("code 100f", "103", True), ("ptx 100f", "120", False), ("ptx 90a", "100", False), ("code 100", "103", True),
    ],
)  # fmt: skip
def test_which_code_runs_where(has: str, capability: str, right: bool) -> None:
    kind, number = has.split()
    suffix = {"a": SUFFIX_A, "f": SUFFIX_F}.get(number[-1], 0)
    made = read(image_files.elf(fatbin=image_files.fatbin((kind, int(number.rstrip("af")), suffix))))
    assert describe_code(made) == f"{kind.replace('ptx', 'PTX')} for {number}"
    assert runs(made, capability) == right


def read_layer(files: Files) -> Layer:
    data = image_files.layer(files)
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        return scan(Blob(Path(file.name), 0, len(data)), 0)


def found_by(files: Files, env: dict[str, str] | None = None, path: str = "app/program") -> dict[str, str | None]:
    return Loader(Tree([read_layer(files)]), env or {}).closure(path).libraries


LIBRARY = image_files.elf(soname="libx.so.1")


def program(**options: str) -> bytes:
    return image_files.elf(needed=["libx.so.1"], **options)  # type: ignore[arg-type]


PLACES: Files = {f"{place}/libx.so.1": LIBRARY for place in ("app", "opt/r", "opt/l", "opt/c", MULTIARCH)}


@pytest.mark.parametrize(
    ("options", "env", "place"),
    [
        ({"rpath": "$ORIGIN", "interpreter": "x"}, "/opt/l", "app"),
        ({"rpath": "/opt/r", "runpath": "/absent"}, "/opt/l", "opt/l"),
        ({"runpath": "${ORIGIN}/../opt/r"}, "/opt/l", "opt/l"),
        ({"runpath": "${ORIGIN}/../opt/r"}, "", "app/../opt/r"),
        ({}, "/absent:/opt/l", "opt/l"),
        ({}, "", "opt/c"),
    ],
)
def test_where_the_loader_looks_first(options: dict[str, str], env: str, place: str) -> None:
    files = {**PLACES, "app/program": program(**options), "etc/ld.so.cache": cache(["/opt/c/libx.so.1"])}
    assert found_by(files, {"LD_LIBRARY_PATH": env}) == {"libx.so.1": f"{place}/libx.so.1"}


def test_without_a_cache_only_default_folders_count() -> None:
    assert found_by({**PLACES, "app/program": program()}) == {"libx.so.1": f"{MULTIARCH}/libx.so.1"}
    assert found_by({"opt/c/libx.so.1": LIBRARY, "app/program": program()}) == {"libx.so.1": None}


def test_a_library_of_another_machine_is_passed_over() -> None:
    files = {
        "opt/l/libx.so.1": image_files.elf(machine=183), "opt/c/libx.so.1": LIBRARY, "app/program": program(),
        "etc/ld.so.cache": cache(["/opt/c/libx.so.1"]),
    }  # fmt: skip
    assert found_by(files, {"LD_LIBRARY_PATH": "/opt/l"}) == {"libx.so.1": "opt/c/libx.so.1"}


def test_rpath_of_the_program_serves_its_libraries_but_runpath_does_not() -> None:
    middle = image_files.elf(soname="libm.so", needed=["libx.so.1"])
    for option, found in (("rpath", "opt/r/libx.so.1"), ("runpath", None)):
        main = image_files.elf(needed=["libm.so"], **{option: "/opt/r"})  # type: ignore[arg-type]
        files = {"app/program": main, "opt/r/libm.so": middle, "opt/r/libx.so.1": LIBRARY}
        assert found_by(files) == {"libm.so": "opt/r/libm.so", "libx.so.1": found}


def test_what_is_loaded_already_is_not_looked_for_again() -> None:
    first = image_files.elf(soname="libx.so.1")
    second = image_files.elf(soname="liby.so", needed=["libx.so.1"])
    main = image_files.elf(needed=["/opt/r/first.so", "liby.so"], runpath="/opt/r")
    files = {"app/program": main, "opt/r/first.so": first, "opt/r/liby.so": second}
    assert found_by(files) == {"/opt/r/first.so": "opt/r/first.so", "liby.so": "opt/r/liby.so"}


def test_links_to_libraries_are_followed() -> None:
    files: Files = {
        "app/program": program(),
        "usr/lib/libx.so.1": symlink("libx.so.1.2"),
        "usr/lib/libx.so.1.2": LIBRARY,
    }
    assert found_by({**files, "lib": symlink("usr/lib")}) == {"libx.so.1": "lib/libx.so.1"}
