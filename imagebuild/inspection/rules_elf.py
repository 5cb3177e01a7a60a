"""Rules about programs and libraries."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from imagebuild.inspection.closure import DRIVER, DRIVER_SYMBOL, Closure
from imagebuild.inspection.context import Inspection
from imagebuild.inspection.facts import Elf, Finding

DEVICES = {190: "CUDA", 224: "AMD GPU", 247: "BPF"}
"""Machines that are not the CPU: their code is data of programs."""
HIDING = re.compile(r"^lib(cuda|cudadebugger|nvcuvid|nvidia-ml|nvidia-ptxjitcompiler)\.so(\.|$)")
"""Libraries that are right only in the driver's own version."""
STUBS = re.compile(r"(^|/)stubs(/|$)")


def architecture(about: Inspection) -> Iterator[Finding]:
    for entry in about.tree:
        if entry.broken:
            yield Finding(f"/{entry.path}", f"begins like an ELF file and is none: {entry.broken}")
        elif entry.elf and entry.elf.machine not in (about.machine, *DEVICES):
            yield Finding(f"/{entry.path}", f"is for ELF machine {entry.elf.machine}, not for {about.arch}")


def closures(about: Inspection) -> Iterator[tuple[str, Elf, Closure]]:
    """Path, content and closure of all programs and libraries for the image's machine."""
    for path, elf in about.objects.items():
        if elf.machine == about.machine and elf.type in (2, 3):
            yield path, elf, about.closure(path)


def closure(about: Inspection) -> Iterator[Finding]:
    """A library that no loader path names may rely on what its program has loaded; a program may not."""
    for_program: set[tuple[str, str]] = set()
    alone: dict[tuple[str, str], None] = {}
    used: set[str] = set()
    for _, elf, found in closures(about):
        missing = [(who, name) for who, name in found.missing if not DRIVER.search(name)]
        if elf.interpreter:
            for_program.update(missing)
            used.update(path for path in found.libraries.values() if path)
        alone.update(dict.fromkeys(missing))
    folders = set(about.loader.folders(about.machine))
    provided = {elf.soname or path.rpartition("/")[2]: path for path, elf in about.objects.items()}
    for who, name in alone:
        elsewhere = provided.get(name)
        if (who, name) in for_program or not elsewhere:
            where = f"which the loader does not find in /{elsewhere}" if elsewhere else "which is nowhere in the image"
            yield Finding(f"/{who}", f"needs {name}, {where}")
            continue
        text = f"needs {name}, which the loader does not find in /{elsewhere}"
        if about.tree.resolve(who.rpartition("/")[0]) in folders and who not in used:
            yield Finding(f"/{who}", text)
        else:
            yield Finding(f"/{who}", f"{text}; whatever loads it must have loaded that before", note=True)


def symbol_versions(about: Inspection) -> Iterator[Finding]:
    for who, library, version in dict.fromkeys(row for _, _, found in closures(about) for row in found.versions):
        yield Finding(f"/{who}", f"needs {version}, which /{library} does not define")


def symbols(about: Inspection) -> Iterator[Finding]:
    """Of programs only: a plug-in's symbols may come from whatever opens it."""
    for path, elf, found in closures(about):
        if not elf.interpreter or any(not DRIVER.search(name) for _, name in found.missing):
            continue  # what is missing is said by another rule
        for who, name in about.loader.undefined(found):
            if not (found.missing and DRIVER_SYMBOL.search(name)):
                yield Finding(f"/{who}", f"needs the symbol {name}, which nothing defines that /{path} loads")


def one_provider(about: Inspection) -> Iterator[Finding]:
    found: dict[str, set[str]] = defaultdict(set)
    for folder, name in _on_path(about):
        real = about.tree.resolve(f"{folder}/{name}")
        elf = about.objects.get(real or "")
        if real and elf and elf.soname and elf.machine == about.machine:
            found[elf.soname].add(real)
    for soname, paths in sorted(found.items()):
        if len(paths) > 1:
            files = ", ".join(f"/{path}" for path in sorted(paths))
            yield Finding(soname, f"is in several files where the loader looks: {files}")


def no_stubs(about: Inspection) -> Iterator[Finding]:
    for folder in about.loader.folders(about.machine):
        if STUBS.search(folder):
            yield Finding(f"/{folder}", "the loader looks in a folder of stubs")
    for folder, name in _on_path(about):
        real = about.tree.resolve(f"{folder}/{name}")
        if HIDING.search(name) and real and not STUBS.search(folder):
            what = "a stub" if STUBS.search(real) else "a copy"
            yield Finding(f"/{folder}/{name}", f"is {what} that the loader finds; the driver brings the library itself")
    for path, elf in about.objects.items():
        if any(STUBS.search(part) for part in (*elf.rpath, *elf.runpath)):
            yield Finding(f"/{path}", "its run path names a folder of stubs")


def _on_path(about: Inspection) -> Iterator[tuple[str, str]]:
    for folder in about.loader.folders(about.machine):
        yield from ((folder, name) for name in about.tree.names(folder))
