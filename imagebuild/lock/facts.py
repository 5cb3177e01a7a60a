"""Facts that the lock stores about archives and images: environment variables, versions, licences, libraries."""

from __future__ import annotations

import bz2
import lzma
import os
import posixpath
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from string import Template
from tempfile import TemporaryDirectory
from typing import IO, Any

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile
from zstandard import ZstdError

from imagebuild.core.errors import CommandError, ResultError
from imagebuild.core.patterns import DataFile
from imagebuild.core.run import RunProgram
from imagebuild.oci.tar import CHUNK, Member, TarArchive, TarError, decompressed, member_path
from imagebuild.project.lockfile import ImageFacts, TreeFacts, Unpacked

SCRIPT_TIMEOUT_S = 30
PLUGIN = "libnccl-net.so"
"""The library that NCCL loads as its network plug-in."""
OTHER = "choose another version of the component"
REMEDY = "choose another version, or adapt `unpacked` in component.yaml to this archive"
"""Remedy in messages about an archive that differs from `unpacked`, the description of its content in
component.yaml."""
OPENERS: Mapping[bytes, Callable[[IO[bytes]], IO[bytes]]] = {b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}
"""Maps the first bytes of compressed files to the function that opens them. See also `oci.tar.decompressed`."""
UNREADABLE = (TarError, OSError, EOFError, zlib.error, lzma.LZMAError, ZstdError, RuntimeError)
"""Errors of `open_tar` and of its result, for damaged or hostile archives."""
_DATA = DataFile(__file__)
_RE, _MOST, _SHELL = _DATA.patterns, _DATA["most"], _DATA["shell"]
_BUILT_IN = re.compile(_DATA["built_in"].encode())
_UNREAD = tuple(_DATA["unread"])


@dataclass
class Contents:
    """What was read from an archive. It suffices to make an archive that `lock` treats in the same way."""

    sha256: str = ""
    size: int = 0
    begins: str = ""
    """The first bytes as hexadecimal digits. They show the compression."""
    members: list[Member] = field(default_factory=list)
    """The members of the archive, up to the one that could not be unpacked."""
    libraries: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Maps each ELF file to its machine, and to the libraries and folders in its dynamic section. Paths are relative to
    the archive's top folder."""
    texts: dict[str, str] = field(default_factory=dict)
    """Maps the files that determine facts to their text. Of other texts, only names of build folders are kept."""
    output: str = ""
    """The commands that the init scripts ran, and their output."""
    built_in: set[str] = field(default_factory=set)

    def read(self, top: Path, files: Iterable[Path]) -> None:
        """Read the files of an unpacked archive. Symlinks are not followed."""
        left = _MOST["kept"]
        for path in (path for path in files if not path.is_symlink()):
            name = str(path.relative_to(top))
            with path.open("rb") as file:
                if file.read(4) == b"\x7fELF":
                    self.libraries[name] = _dynamic(file)
                    continue
            if path.stat().st_size <= _MOST["text"] and not path.name.endswith(_UNREAD):
                content = path.read_bytes()
                if b"\0" not in content:
                    found = [match.decode() for match in _BUILT_IN.findall(content) if match]
                    self.built_in.update(found)
                    kept = content.decode(errors="replace") if _RE["kept_text"].fullmatch(name) else "\n".join(found)
                    left -= len(kept)
                    if kept and (left > 0 or path.suffix == ".pc"):
                        self.texts[name] = kept


def open_tar(file: IO[bytes]) -> TarArchive:
    """Return a reader of a tar archive, which may be compressed with gzip, bzip2, xz or zstd."""
    head = file.read(6)
    file.seek(0)
    opened = next((opener(file) for start, opener in OPENERS.items() if head.startswith(start)), None)
    return TarArchive(iter(lambda: opened.read(CHUNK), b"") if opened else decompressed(file))


def unpack(archive: Path, folder: Path, needs: Iterable[str] = (), contents: Contents | None = None) -> Path:
    """Unpack a tar archive, and return its top folder: the only one, or the only one with the files that `needs`
    describes. Raises ResultError if the file is not a tar archive, is too large, or contains paths outside of the
    folder, devices or features that imagebuild does not know. Adds the members of the archive to `contents`.

    Static libraries and compressed files become empty files. Symlinks that lead outside of the folder are left out."""
    root, total, most, contents = folder.resolve(), 0, _MOST["tree"], contents or Contents()
    try:
        folder.mkdir(exist_ok=True)
        with archive.open("rb") as file:
            contents.begins = file.read(6).hex()
            file.seek(0)
            packed = open_tar(file)
            for member in packed:
                total += member.size
                if len(contents.members) < _MOST["members"]:
                    contents.members.append(member)
                if total > most:
                    raise TarError(f"is larger than {most >> 30} GiB after decompression")
                if member.kind != "global" and (path := member_path(member.name)):
                    _unpack_member(packed, member, root, root / path)
        for link in [place for place in root.rglob("*") if place.is_symlink()]:
            if not Path(os.path.realpath(link)).is_relative_to(root):  # through a link that came later
                link.unlink()
    except UNREADABLE as error:
        raise ResultError(f"expected a tar archive, but it cannot be unpacked: {error}; {OTHER}") from None
    folders = sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    tops = [top for top in folders if all(any(top.glob(pattern)) for pattern in needs)] or folders
    if len(tops) != 1:
        names = ", ".join(sorted(path.name for path in folder.iterdir())[:5]) or "nothing"
        raise ResultError(f"expected one top-level folder in the archive, found {names}; {OTHER}")
    return tops[0]


def _unpack_member(packed: TarArchive, member: Member, root: Path, place: Path) -> None:
    folder = place if member.kind == "folder" else place.parent
    # Several symlinks, each of which stays in the folder, can together lead out of it.
    if not folder.resolve().is_relative_to(root):
        raise TarError(f"{member.name!r} leads out of the archive")
    folder.mkdir(parents=True, exist_ok=True)
    if member.kind == "folder":
        return
    place.unlink(missing_ok=True)  # the last of several members with the same name counts
    match member.kind:
        case "file":
            with place.open("wb") as file:
                file.writelines(() if member.name.endswith(_UNREAD) else packed.content())
            place.chmod(0o755)
        case "symlink":
            target = _RE["built_link"].sub(str(root / place.relative_to(root).parts[0]), member.target)
            if (place.parent / target).resolve().is_relative_to(root):
                place.symlink_to(target)
        case "hardlink":
            first = root / (member_path(member.target) or "")  # tar also takes absolute paths as paths in the archive
            if first.is_symlink() or not first.is_file() or not first.resolve().is_relative_to(root):
                raise TarError(f"{member.name!r} is a link to {member.target!r}, which is not an earlier file")
            place.hardlink_to(first)
        case kind:
            raise TarError(f"{member.name!r} is a {kind}")


def tree_facts(
    run: RunProgram, top: Path, wanted: Unpacked, *, isolated: bool = True, contents: Contents | None = None,
) -> TreeFacts:  # fmt: skip
    """Return the facts about an unpacked archive that the lock stores, such as its environment variables and libraries.

    Add what was read to `contents`.

    The script of the archive that sets environment variables runs with an empty environment and a time limit. If
    `isolated`, it has no network and cannot read other files than the archive. Raises CommandError if the script fails
    or cannot be isolated, and ResultError if the script sets no environment or the archive lacks a required file."""
    folders = tuple(sorted(path.name for path in top.iterdir() if path.is_dir()))
    contents = contents or Contents()
    files = sorted(path for path in top.rglob("*") if not path.is_dir())
    contents.read(top, files)
    if missing := [pattern for pattern in wanted.needs if not any(top.glob(pattern))]:
        raise ResultError(
            f"the archive lacks {', '.join(missing)}, which the image needs; "
            f"its folders are {', '.join(folders)}; {REMEDY}"
        )
    environment, script_error = script_environment(run, top, wanted, contents, isolated=isolated)

    def inside(value: str) -> list[str]:
        """Return the paths below the prefix in a list with colons, such as PATH.
        The paths are relative to the prefix."""
        return [p.removeprefix(f"{wanted.prefix}/") for p in value.split(":") if p.startswith(f"{wanted.prefix}/")]

    named = sorted({path for value in environment.values() for path in inside(value)})
    for place in named if wanted.replaced else ():
        if (top / place / "mpirun").exists() and not wanted.replacement(place):
            raise ResultError(
                f"images would find the MPI in {place} instead of the one that another component provides; "
                f"add {place.rpartition('/')[0] or place} to `unpacked.replaced` in component.yaml"
            )
    loader = dict.fromkeys(inside(environment.get("LD_LIBRARY_PATH", "")))
    versions = dict(_RE["version"].findall(contents.texts.get("VERSION", "")))
    for name, text in contents.texts.items():
        if name.endswith(".pc") and (match := _RE["pc_version"].search(text)):
            versions.setdefault(Path(name).stem, match[1])
    needed = {name for library in contents.libraries.values() for name in library["needed"]}
    provided = {path.name for path in files} | {library["soname"] for library in contents.libraries.values()}
    return TreeFacts(
        environment=environment,
        script_error=script_error,
        absent=tuple(name for name in named if not (top / name).exists()),
        folders=folders,
        versions=dict(sorted(versions.items())),
        sources=tuple(sorted(path.name for path in files if path.is_relative_to(top / "sources"))),
        licenses=tuple(sorted(str(path.relative_to(top)) for path in files if _RE["license"].search(path.name))),
        plugins=tuple((folder, _plugin_name(top / folder)) for folder in loader if (top / folder / PLUGIN).exists()),
        unprovided=tuple(sorted(needed - provided)),
        built_in=tuple(sorted(contents.built_in)),
    )


def script_environment(
    run: RunProgram, top: Path, wanted: Unpacked, contents: Contents, *, isolated: bool
) -> tuple[dict[str, str], str]:
    """Return the environment variables that the archive's script sets, with paths as in the image, and its error.

    Write the output of all init scripts to `contents`. Raises CommandError if the script failed before it added the
    folders of all required libraries."""
    place = top.resolve()
    with TemporaryDirectory(prefix="imagebuild-") as root:
        limits, shown, path = _SHELL["limits"], _SHELL["print"], _SHELL["path"]
        prefix = isolation(run, Path(root), place) if isolated else unprivileged(run, place)

        def output(script: str) -> str:
            command = f"{limits}; cd {quote(str(place))} && {script}"
            shell = ("env", "-i", f"PATH={path}", "HOME=/nonexistent", "bash", "--noprofile", "--norc", "-xc", command)
            return run(*prefix, *shell, timeout=SCRIPT_TIMEOUT_S)

        try:
            names = {*_RE["script_name"].findall(wanted.script), *(path.name for path in top.glob("*init*.sh"))}
            scripts = " ".join(map(quote, sorted(names)))
            each = _RE["script_name"].sub('"$script"', wanted.script)
            contents.output = output(_SHELL["scripts"].format(scripts, each))
        except CommandError as error:
            contents.output = str(error)
        problem = ""
        try:
            text = output(f"{{ {wanted.script}; }} > /dev/null && {shown}")
        except CommandError as error:
            # bash prints each command before it runs it, so the last lines are those that failed.
            reason, _, message = str(error).rpartition("` ")[2].partition(": ")
            message = message.replace(str(place), wanted.prefix)
            lines = [line.strip()[: _MOST["line"]] for line in message.splitlines() if line.strip()]
            problem = ": ".join(filter(None, [reason, " | ".join(lines[-_MOST["lines"] :])]))
            stopped = CommandError(f"the script that sets the environment (`{wanted.script}`) {problem}; {REMEDY}")
            if not reason.startswith("failed"):
                raise stopped from None
            try:
                text = output(f"{{ {wanted.script}; }} > /dev/null; {shown}")
            except CommandError:
                raise stopped from None
    pairs = (pair.split("=", 1) for pair in text.split("\0") if "=" in pair)
    environment = {
        name: ":".join(
            posixpath.normpath(p) if p.startswith(wanted.prefix) else p
            for p in value.replace(str(place), wanted.prefix).split(":")
            if p and p not in path.split(":")
        )
        for name, value in pairs
        if name not in _SHELL["own"]
    }
    libraries = {f"{wanted.prefix}/{path.rpartition('/')[0]}" for path in wanted.needs if "/lib/" in path}
    if problem and not (libraries and libraries <= {*environment.get("LD_LIBRARY_PATH", "").split(":")}):
        raise stopped
    if not environment.get("PATH") and not environment.get("LD_LIBRARY_PATH"):
        raise ResultError(f"`{wanted.script}` sets neither PATH nor LD_LIBRARY_PATH; {REMEDY}")
    return dict(sorted(environment.items())), problem


def isolation(run: RunProgram, root: Path, folder: Path) -> tuple[str, ...]:
    """Return a command prefix that removes network access, privileges and all files but programs and `folder`.
    `root` is an empty folder. Raises CommandError if this machine does not allow this."""
    user, names = (_SHELL["nobody"], ()) if os.geteuid() == 0 else ("0", ("--user", "--map-root-user"))
    script = str(Path(__file__).with_name("isolated.sh"))
    prefix = ("unshare", *names, *_SHELL["namespaces"], "bash", script, user, str(root), str(folder))
    try:
        run(*prefix, "test", "-x", str(folder), timeout=10)
    except CommandError as error:
        why = str(error).rpartition(": ")[2].splitlines()[0]
        raise CommandError(
            f"the archive contains a script, and this machine does not allow imagebuild to isolate it ({why}); allow "
            "namespaces (on Ubuntu, `sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0`; in a container, "
            "`--privileged`), or add --no-isolation if you trust the archive with your network and files"
        ) from None
    return prefix


def unprivileged(run: RunProgram, folder: Path) -> tuple[str, ...]:
    """Return a command prefix that removes the privileges of root, if this machine allows this."""
    user = _SHELL["nobody"]
    prefix = ("setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups") if os.geteuid() == 0 else ()
    with suppress(CommandError):
        run(*prefix, "test", "-x", str(folder), timeout=10)
        return prefix
    return ()


def image_facts(config: Mapping[str, Any]) -> ImageFacts:
    """Return the facts that the lock stores about an image, from its configuration.
    Raises ResultError if the configuration cannot be read."""
    try:
        own = config.get("config") or {}
        environment = dict(entry.split("=", 1) for entry in own.get("Env") or ())
        held: list[str] = []
        for step in config.get("history") or ():
            for words in re.findall(r"apt-mark hold ([^&;|#]+)", str(step.get("created_by", ""))):
                held += Template(words).safe_substitute(environment).split()
        package = environment.get("NV_LIBNCCL_PACKAGE", "").partition("=")[2]
        return ImageFacts(
            environment=environment,
            held=tuple(sorted({name for name in held if not name.startswith(("$", "-"))})),
            nccl=package or environment.get("NCCL_VERSION", ""),
            user=str(own.get("User") or ""),
            entrypoint=tuple(map(str, own.get("Entrypoint") or ())),
        )
    except (AttributeError, TypeError, ValueError) as error:
        raise ResultError(f"the configuration of the image cannot be read: {error!r}; choose another tag") from None


def _plugin_name(folder: Path) -> str:
    """Return the value of NCCL_NET_PLUGIN with which NCCL loads the plug-in in a folder.
    If the name of the file does not contain the value, return the name of the parent folder."""
    names = sorted(path.stem.removeprefix("libnccl-net-") for path in folder.glob("libnccl-net-*.so"))
    return names[0] if names else folder.parent.name


def _dynamic(file: IO[bytes]) -> dict[str, Any]:
    """Return the machine, `soname`, `needed`, `rpath` and `runpath` of an ELF file. Empty if the file is damaged."""
    values: dict[str, list[str]] = {name: [] for name in _DATA["dynamic"].values()}
    machine = 0
    try:
        elf = ELFFile(file)
        section: Any = elf.get_section_by_name(".dynamic")
        for tag in section.iter_tags() if section else ():
            if name := _DATA["dynamic"].get(tag.entry.d_tag):
                values[name].append(getattr(tag, name))
        file.seek(18)
        machine = int.from_bytes(file.read(2), "little" if elf.little_endian else "big")
    except (ELFError, AssertionError, ValueError, KeyError, TypeError, AttributeError):
        values = {name: [] for name in _DATA["dynamic"].values()}
    needed = values.pop("needed")
    return {"machine": machine, "needed": needed} | {name: ":".join(found) for name, found in values.items()}
