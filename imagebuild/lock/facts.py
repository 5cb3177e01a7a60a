"""Read what archives and images say about themselves: the facts of the lock."""

from __future__ import annotations

import lzma
import os
import re
import tarfile
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from shlex import quote
from string import Template
from typing import IO, Any

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile

from imagebuild.core.errors import CommandError, ResultError
from imagebuild.core.run import RunProgram
from imagebuild.project.lockfile import ImageFacts, TreeFacts, Unpacked

SCRIPT_TIMEOUT_S = 30
LIMITS = "ulimit -c 0 -f 1024 -t 20 -v 4194304"
"""For a downloaded script: no core dumps, files of 1 MiB, seconds of CPU, 4 GiB of memory."""
PRINT = 'while read -r name; do printf \'%s=%s\\0\' "$name" "${!name}"; done < <(compgen -e)'
"""Prints all exported variables with bash alone: by now PATH may lead to programs for another CPU."""
SHELL_OWN = ("_", "HOME", "OLDPWD", "PWD", "SHLVL")
PATH = "/usr/bin:/bin"
PLUGIN = "libnccl-net.so"
VERSION_LINE = re.compile(r"^([A-Za-z][\w.+-]*?)(?:-[0-9a-f]{7,40})?\s+v?(\d[\w.]*)(?:\s|$)", re.MULTILINE)
PC_VERSION = re.compile(r"^Version:\s*(\S+)", re.MULTILINE)
LICENSE = re.compile("licen[sc]e|copying|eula", re.IGNORECASE)
BUILT_IN = re.compile(rb"\w+://\S*|(/[\w./+-]*/hpcx-(?:v\d|gcc)[\w.+-]*)")
"""Folders of the building machine; URLs are matched without a group, because their paths look alike."""
MEND = "take another version, or say in component.yaml under `unpacked` what this one has"
LARGEST_TEXT = 1 << 20
UNREAD = (".a", ".gz", ".bz2", ".xz", ".tgz", ".tbz")
"""Suffixes of files that are not read."""


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack a tar archive for reading, and return its top folder. Raises ResultError if it is not one.

    Static libraries and packed sources are left empty; members that lie or lead outside the folder are left out.
    """
    root = folder.resolve()
    try:
        folder.mkdir(exist_ok=True)
        with tarfile.open(archive) as packed:
            # We filter below: Python 3.11.2 of Debian 12 has no filters, and those of later versions would interfere.
            packed.extraction_filter = lambda member, _: member
            for member in packed:
                place = root / member.name
                link = root / member.linkname if member.islnk() else place.parent / member.linkname
                is_inside = all(path.resolve().is_relative_to(root) for path in (place, link))
                if is_inside and (member.isreg() or member.isdir() or member.issym() or member.islnk()):
                    if member.isreg() and member.name.endswith(UNREAD):
                        member.size = 0
                    member.mode, member.uid, member.gid = 0o755, os.getuid(), os.getgid()
                    member.uname = member.gname = ""
                    packed.extract(member, root)
    except (tarfile.TarError, OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise ResultError(f"expected a tar archive, but it cannot be unpacked: {error}; {MEND}") from None
    tops = sorted(folder.iterdir())
    if len(tops) != 1 or not tops[0].is_dir():
        names = ", ".join(path.name for path in tops[:5]) or "nothing"
        raise ResultError(f"expected one folder in the archive, found {names}; {MEND}")
    return tops[0]


def tree_facts(run: RunProgram, top: Path, wanted: Unpacked) -> TreeFacts:
    """Return what an unpacked archive says about itself.

    Its script runs with an empty environment and a deadline, without a network where this machine allows that. Raises
    CommandError if the script fails, ResultError if it sets no environment or the archive lacks what the image needs.
    """
    folders = tuple(sorted(path.name for path in top.iterdir() if path.is_dir()))
    if missing := [pattern for pattern in wanted.needs if not any(top.glob(pattern))]:
        raise ResultError(
            f"expected {', '.join(missing)} in the archive, which the image needs, found {', '.join(folders)}; {MEND}"
        )
    environment = script_environment(run, top, wanted)

    def inside(value: str) -> list[str]:
        """Return which paths of a list are below the prefix, without it."""
        return [p.removeprefix(f"{wanted.prefix}/") for p in value.split(":") if p.startswith(f"{wanted.prefix}/")]

    named = sorted({path for value in environment.values() for path in inside(value)})
    loader = dict.fromkeys(inside(environment.get("LD_LIBRARY_PATH", "")))
    files = sorted(path for path in top.rglob("*") if not path.is_dir())
    needed: set[str] = set()
    provided = {path.name for path in files}
    built_in: set[bytes] = set()
    listing = top / "VERSION"
    versions = dict(VERSION_LINE.findall(listing.read_text(errors="replace"))) if listing.is_file() else {}
    for path in (path for path in files if not path.is_symlink()):
        with path.open("rb") as file:
            if file.read(4) == b"\x7fELF":
                names, soname = _dynamic(file)
                needed.update(names)
                provided.add(soname)
                continue
        if path.stat().st_size <= LARGEST_TEXT and not path.name.endswith(UNREAD):
            content = path.read_bytes()
            if b"\0" not in content:
                built_in.update(BUILT_IN.findall(content))
                if path.suffix == ".pc" and (match := PC_VERSION.search(content.decode(errors="replace"))):
                    versions.setdefault(path.stem, match[1])
    return TreeFacts(
        environment=environment,
        absent=tuple(name for name in named if not (top / name).exists()),
        folders=folders,
        versions=dict(sorted(versions.items())),
        sources=tuple(sorted(path.name for path in files if path.is_relative_to(top / "sources"))),
        licenses=tuple(sorted(str(path.relative_to(top)) for path in files if LICENSE.search(path.name))),
        plugins=tuple((folder, _plugin_name(top / folder)) for folder in loader if (top / folder / PLUGIN).exists()),
        unprovided=tuple(sorted(needed - provided)),
        built_in=tuple(sorted(match.decode() for match in built_in if match)),
    )


def script_environment(run: RunProgram, top: Path, wanted: Unpacked) -> dict[str, str]:
    """Return the variables that the archive's script sets, for a tree that lies where images have it."""
    place = top.resolve()
    command = f"{LIMITS}; cd {quote(str(place))} && {{ {wanted.script}; }} > /dev/null && {PRINT}"
    try:
        printed = run(*isolation(run, place), "env", "-i", f"PATH={PATH}", "HOME=/nonexistent", "bash", "--noprofile",
                      "--norc", "-c", command, timeout=SCRIPT_TIMEOUT_S)  # fmt: skip
    except CommandError as error:
        reason, _, message = str(error).rpartition("` ")[2].partition(": ")
        lines = [line for line in message.splitlines() if line.strip()]
        why = ": ".join(dict.fromkeys([reason, *lines[:1], *lines[-1:]]))
        raise CommandError(
            f"expected a script that sets its environment (`{wanted.script}`), but it {why}; {MEND}"
        ) from None
    pairs = (text.split("=", 1) for text in printed.split("\0") if "=" in text)
    environment = {
        name: ":".join(p for p in value.replace(str(place), wanted.prefix).split(":") if p and p not in PATH.split(":"))
        for name, value in pairs
        if name not in SHELL_OWN
    }
    if not environment.get("PATH") and not environment.get("LD_LIBRARY_PATH"):
        raise ResultError(f"expected PATH and LD_LIBRARY_PATH from `{wanted.script}`, but it sets neither; {MEND}")
    return dict(sorted(environment.items()))


def isolation(run: RunProgram, folder: Path) -> tuple[str, ...]:
    """Return the prefix that takes network and privileges from a command that reads the folder, if possible here."""
    root = os.geteuid() == 0
    user = () if root else ("--user", "--map-current-user")
    nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups") if root else ()
    chosen: tuple[str, ...] = ()
    for more in (("unshare", *user, "--net", "--pid", "--fork", "--kill-child"), nobody):
        with suppress(CommandError):
            run(*chosen, *more, "test", "-x", str(folder), timeout=10)
            chosen += more
    return chosen


def image_facts(config: Mapping[str, Any]) -> ImageFacts:
    """Return what an image's configuration says. Raises ResultError if it cannot be read."""
    try:
        environment = dict(entry.split("=", 1) for entry in (config.get("config") or {}).get("Env") or ())
        held: list[str] = []
        for step in config.get("history") or ():
            for words in re.findall(r"apt-mark hold ([^&;|#]+)", str(step.get("created_by", ""))):
                held += Template(words).safe_substitute(environment).split()
    except (AttributeError, TypeError, ValueError) as error:
        raise ResultError(f"the configuration of the image cannot be read: {error!r}; take another tag") from None
    package = environment.get("NV_LIBNCCL_PACKAGE", "").partition("=")[2]
    return ImageFacts(
        environment=environment,
        held=tuple(sorted({name for name in held if not name.startswith(("$", "-"))})),
        nccl=package or environment.get("NCCL_VERSION", ""),
    )


def _plugin_name(folder: Path) -> str:
    """Return what NCCL_NET_PLUGIN calls the plug-in in a folder, or the plug-in's folder if it has no such name."""
    names = sorted(path.stem.removeprefix("libnccl-net-") for path in folder.glob("libnccl-net-*.so"))
    return names[0] if names else folder.parent.name


def _dynamic(file: IO[bytes]) -> tuple[list[str], str]:
    """Return the libraries that an ELF file needs, and its own name; nothing of a file that is damaged."""
    try:
        section: Any = ELFFile(file).get_section_by_name(".dynamic")
        needed = [tag.needed for tag in section.iter_tags("DT_NEEDED")] if section else []
        own = [tag.soname for tag in section.iter_tags("DT_SONAME")] if section else []
    except (ELFError, AssertionError, ValueError, KeyError, TypeError, AttributeError):
        return [], ""
    return needed, own[0] if own else ""
