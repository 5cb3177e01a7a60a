"""The files of Python wheels: whether a file is the one that its wheel brought, and whether two wheels claim it."""

from __future__ import annotations

import csv
import re
from base64 import urlsafe_b64decode
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from posixpath import normpath

from imagebuild.oci.layout import KEPT_SIZE
from imagebuild.verify.files import EMPTY_SHA256, FileEntry, Finding, lines_of
from imagebuild.verify.inspection import Inspection

RECORD = re.compile(
    r"^(?P<site>.+)/(?P<name>[a-z0-9][\w.-]*?)-(?P<version>[\w.+!]+)\.dist-info/RECORD$", re.ASCII | re.IGNORECASE
)
"""Matches the list of a wheel's files. Any image may contain one, and messages propose a command with the name."""
csv.field_size_limit(KEPT_SIZE)  # without it, a long line is an error
NCCL = re.compile(r"NCCL version (?P<version>[\d.]+)(\+cuda(?P<cuda>\d+))?")


@dataclass(frozen=True)
class InstalledWheel:
    """A wheel that pip or a similar program has installed."""

    name: str
    version: str
    files: dict[str, str]
    """Maps the path of each file below the folder of packages to the SHA-256 of its content."""

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def installed_wheels(inspection: Inspection) -> list[InstalledWheel]:
    """Return the wheels whose RECORD is in the image.

    Those that conda made are left out, as it changes their files, and those inside another wheel, which may do so."""
    wheels: dict[str, InstalledWheel] = {}
    for entry in inspection.tree:
        if (match := RECORD.match(entry.path)) and entry.text:
            installer = inspection.tree.find(entry.path.replace("/RECORD", "/INSTALLER"))
            if installer and (installer.text or b"").strip() == b"conda":
                continue
            rows = csv.reader(lines_of(entry))
            files = {}
            for path, code, *_ in (row for row in rows if len(row) > 1):
                real = normpath(f"{match['site']}/{path}")
                # pip writes scripts, which are in other folders, and compiles modules.
                if code.startswith("sha256=") and real.startswith(f"{match['site']}/") and not path.endswith(".pyc"):
                    files[real] = record_hash(code)
            wheels[entry.path] = InstalledWheel(match["name"].replace("_", "-"), match["version"], files)
    inner = {path for wheel in wheels.values() for path in wheel.files}
    return [wheel for path, wheel in wheels.items() if path not in inner]


def is_public_test(entry: FileEntry, installed: Iterable[InstalledWheel]) -> bool:
    """Return whether a file is a part of the tests that a wheel brought."""
    return "/test" in f"/{entry.path}" and any(
        wheel.files.get(entry.path) == entry.content_sha256 for wheel in installed
    )


def record_hash(code: str) -> str:
    """Return the digits of a hash such as `sha256=4YXo…`; empty if it cannot be read."""
    text = code.removeprefix("sha256=")
    try:
        return urlsafe_b64decode(text + "=" * (-len(text) % 4)).hex()
    except ValueError:
        return ""


def wheels(inspection: Inspection) -> Iterator[Finding]:
    """The files of Python wheels are those that the wheels brought, and no two wheels claim a file.

    A missing file is not reported, because images may leave out tests and similar files."""
    installed = installed_wheels(inspection)
    owners: dict[str, list[InstalledWheel]] = {}
    for wheel in installed:
        for path in wheel.files:
            owners.setdefault(path, []).append(wheel)
    clashes: dict[tuple[str, ...], list[str]] = {}
    for path, several in owners.items():
        hashes = {wheel.files[path] for wheel in several}
        # A package that several wheels extend has an empty __init__.py in some of them.
        if len(hashes) > 1 and not (path.endswith("/__init__.py") and EMPTY_SHA256 in hashes):
            clashes.setdefault(tuple(map(str, several)), []).append(path)
    for names, paths in clashes.items():
        # Libraries matter most.
        path = min(paths, key=lambda path: ((e := inspection.tree.find(path)) is None or e.elf is None, path))
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        text = f"{' and '.join(names)} both bring this file{more}{_identity(inspection.tree.find(path))}"
        yield Finding(f"/{path}", f"{text}; the one installed last has replaced it: uninstall both, then install one")
    for wheel in installed:
        for path, code in wheel.files.items():
            entry = inspection.tree.find(path)
            if entry and entry.kind == "file" and len(owners[path]) == 1:
                if code and entry.content_sha256 != code:
                    text = f"is not the file that the wheel {wheel} brought, as its hash differs from RECORD"
                    remedy = f"run pip install --force-reinstall --no-deps {wheel.name}=={wheel.version}"
                    yield Finding(f"/{path}", f"{text}{_identity(entry)}; {remedy}")
                elif text := _other_version(wheel, entry):
                    yield Finding(f"/{path}", f"{text}; install the wheel that its name and version promise")


def _version(entry: FileEntry | None) -> re.Match[str] | None:
    """Return the version that a library of NCCL says of itself."""
    texts = entry.elf.texts if entry and entry.elf else ()
    return next(filter(None, map(NCCL.match, texts)), None)


def _identity(entry: FileEntry | None) -> str:
    return f"; it is {found[0].replace(' version', '')}" if (found := _version(entry)) else ""


def _other_version(wheel: InstalledWheel, entry: FileEntry) -> str:
    """Return how the library in a wheel of NCCL differs from the wheel's name and version; empty if it does not."""
    suffix = re.fullmatch(r"nvidia-nccl-cu(\d+)", wheel.name)
    if not suffix or not (found := _version(entry)):
        return ""
    differs = not f"{wheel.version}.".startswith(f"{found['version']}.") or found["cuda"] not in (None, suffix[1])
    return f"says that it is {found[0].replace(' version', '')}, but belongs to the wheel {wheel}" if differs else ""
