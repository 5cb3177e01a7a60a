"""Rules about the paths on which users rely: those of the base image, of PATH, of the loader and of variables."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from imagebuild.core.fields import SYSTEM_PATH
from imagebuild.verify.elf import MACHINES, PATTERNS
from imagebuild.verify.files import FileEntry, Finding, Tree
from imagebuild.verify.inspection import Inspection
from imagebuild.verify.layers import is_a

USUAL = SYSTEM_PATH.split(":")
"""Folders of the default PATH, which need not exist."""
FOR_ALL, ENTER = 0o005, 0o001
"""Bits of a mode: all users can read and enter a folder, or read and start a file; all users can enter or start it."""
EXPECTED: Mapping[str, int] = {path: int(str(mode), 8) for path, mode in PATTERNS["expected-folders"].items()}
"""Maps folders that every distribution has to the bits of their mode that programs rely on."""
VARIABLES: Mapping[str, re.Pattern[str]] = {kind: re.compile(text) for kind, text in PATTERNS["variables"].items()}
"""Kinds of environment variables, by their names."""
PREFIXES = [(re.compile(names), files) for names, files in PATTERNS["prefixes"].items()]
"""Names of variables that are the prefix of a program, and patterns of files that show that the program is there."""


def base_kept(inspection: Inspection) -> Iterator[Finding]:
    """The layers above the base image keep the kind, mode and owner of its paths.

    If the base image is not known, it is the first layer, and a folder may get another owner or more rights, except
    folders that all distributions have."""
    known = inspection.base[0]
    number, tree, found = known or 1, inspection.tree, set[str]()
    base = "the base image" if known else "layer 1"
    lower = Tree(inspection.layers[:number])
    for old in lower:
        new = tree.get(old.path)
        if new is None and old.path in EXPECTED:
            yield Finding(f"/{old.path}", f"is missing, but {base} contains it; do not remove it")
        elif new and new.layer >= number and _differs(lower, old, new, strict=bool(known) or old.path in EXPECTED):
            found.add(old.path)
            text = f"is {_described(new)}, but {_described(old)} in {base}"
            yield Finding(f"/{old.path}", f"{text}; leave it out of layer {new.layer + 1}, or keep its attributes")
    for path, mode in EXPECTED.items():
        entry = tree.find(path)
        if path in found or entry is None or (tree.resolve(path) or path) in found:
            continue
        writable = 0 if mode & 0o1000 else 0o022
        if entry.kind != "folder" or entry.mode & mode != mode or entry.mode & writable or entry.uid:
            right = f"{mode:o}, owner 0:0" + ("" if mode & 0o1000 else ", and only root may change it")
            yield Finding(f"/{entry.path}", f"is {_described(entry)}, not of mode {right}; use chmod and chown")


def _differs(lower: Tree, old: FileEntry, new: FileEntry, *, strict: bool) -> bool:
    """Return whether a path of the base became another kind of path or lost rights.
    `strict`: also return True if a folder has other attributes, or a file has another owner."""
    target = lower.find(old.path)
    if old.kind == "symlink" and target and target.kind == "folder":
        return new.kind != "symlink" or new.target.strip("/") != old.target.strip("/")
    if (old.kind == "folder") != (new.kind == "folder"):
        return True
    if "symlink" in (old.kind, new.kind):
        return False
    owners_differ = (old.uid, old.gid) != (new.uid, new.gid)
    if old.kind == "folder" and strict:
        return owners_differ or old.mode != new.mode
    return bool(old.mode & ~new.mode & (FOR_ALL | 0o1000)) or (strict and owners_differ)


def _described(entry: FileEntry) -> str:
    if entry.kind == "symlink":
        return f"a link to {entry.target}"
    return f"a {entry.kind} of mode {entry.mode:o}, owner {entry.uid}:{entry.gid}"


def for_every_user(inspection: Inspection) -> Iterator[Finding]:
    """Every user can read all that is on PATH, in the loader's folders or in variables, and none of it is in /root."""
    tree, seen = inspection.tree, set[str]()
    machine = MACHINES.get(inspection.image.architecture, 0)
    for folder, why, is_used in [
        *((path, f"{name} names /{path}", None) for name, path in named_paths(inspection.image.env)),
        *((path, "it is on PATH", _is_started) for path in _folders_of_path(inspection)),
        *((path, "the loader searches it", _is_library) for path in inspection.loader.folders(machine)),
    ]:
        found = [_private(tree, folder)]
        if not found[0] and is_used:
            names = (f"{folder}/{name}" for name in tree.names(tree.resolve(folder) or ""))
            found = [_private(tree, path) for path in names if is_used(tree, path)]
        for path, text, remedy in filter(None, found):
            if path not in seen:
                yield Finding(f"/{path}", f"{text}, but {why}; {remedy}")
            seen.add(path)


def _private(tree: Tree, path: str) -> tuple[str, str, str] | None:
    """Return the first folder or file on the way to a path that some users cannot use, with the reason and a remedy."""
    trail = tree.trail(path)
    if any(entry.path.startswith("root/") or entry.path == path == "root" for entry in trail):
        return path, "is in the home of root", "install it in /opt or /usr/local"
    for entry in trail:
        needed = ENTER if entry is not trail[-1] else FOR_ALL if entry.kind == "folder" else FOR_ALL & ~ENTER
        if entry.kind in ("file", "folder") and entry.mode & needed != needed:
            return entry.path, f"not all users can use this {entry.kind} (mode {entry.mode:o})", "use chmod o+rX"
    return None


def _is_started(tree: Tree, path: str) -> bool:
    """Return whether a path is a program that users start. Programs with setuid are for the users that they let in."""
    entry = tree.find(path)
    is_for_root = "sbin" in path.split("/")
    return bool(entry and entry.kind == "file" and entry.mode & 0o111 and not entry.mode & 0o6000 and not is_for_root)


def _is_library(tree: Tree, path: str) -> bool:
    entry = tree.find(path)
    return bool(entry and entry.kind == "file" and re.search(r"\.so(\.|$)", path))


def _folders_of_path(inspection: Inspection) -> list[str]:
    folders = inspection.image.env.get("PATH", SYSTEM_PATH).split(":")
    return list(dict.fromkeys(folder.strip("/") for folder in folders if folder.startswith("/")))


def _which(inspection: Inspection, program: str) -> FileEntry | None:
    """Return the file that is started for a command's first word; None if it is not found."""
    paths = [program] if "/" in program else [f"{folder}/{program}" for folder in _folders_of_path(inspection)]
    files = [entry for entry in map(inspection.tree.find, paths) if entry and entry.kind == "file"]
    return next((entry for entry in files if entry.mode & 0o111), next(iter(files), None))


def commands(inspection: Inspection) -> Iterator[tuple[str, str]]:
    """Yield pairs of a setting, such as `Cmd`, and the program that containers start for it."""
    settings = inspection.image.settings
    words = [*(settings.get("Entrypoint") or ()), *(settings.get("Cmd") or ())]
    kind, *check = (settings.get("Healthcheck") or {}).get("Test") or ["NONE"]
    for setting, line in (("containers start", words), ("the health check starts", check if kind == "CMD" else ())):
        if line:
            yield setting, str(line[0])
            script = str(line[2]) if len(line) > 2 and str(line[1]) == "-c" else ""
            # The first word of a script may also be a command of the shell.
            if match := re.match(r"(?:exec\s+)?(/[\w./+-]+)(\s|$)", script):
                yield setting, match[1]


def command(inspection: Inspection) -> Iterator[Finding]:
    """The programs that containers start exist and are executable, and /bin/sh exists."""
    started = list(commands(inspection))
    if not any(setting == "containers start" for setting, _ in started):
        yield Finding("command", "the image has neither an entrypoint nor a command")
    for setting, program in started:
        file = _which(inspection, program)
        if file is None:
            yield Finding(program, f"{setting} this program, but it does not exist")
        elif not file.mode & 0o111:
            yield Finding(program, f"{setting} this program, but it is not executable")
    if inspection.tree.find("bin/sh") is None:
        yield Finding("/bin/sh", "does not exist, but enroot and Apptainer start containers with it")


def startable(inspection: Inspection) -> Iterator[Finding]:
    """Programs on PATH and in commands have the interpreter or loader that starts them."""
    tree, started = inspection.tree, {program: setting for setting, program in commands(inspection)}
    for program, setting in started.items():
        file = _which(inspection, program)
        if file and file.mode & 0o111 and not (file.elf or file.broken or file.script):
            yield Finding(
                f"/{file.path}",
                f"{setting} it, but it is neither ELF nor begins with `#!`; add the line `#!/bin/sh`",
            )
    files = [_which(inspection, program) for program in started]
    # The first program may start others: `tini -- /opt/start`.
    for words in map(inspection.image.settings.get, ("Entrypoint", "Cmd")):
        files += [tree.find(str(word)) for word in words or () if str(word).startswith("/")]
    needed = {file.path for file in files if file}
    for folder in _folders_of_path(inspection):
        files += [tree.find(f"{folder}/{name}") for name in tree.names(tree.resolve(folder) or "")]
    packaged = {path for path, _ in inspection.packaged}
    for file in {
        entry.path: entry for entry in files if entry and entry.kind == "file" and entry.mode & 0o111
    }.values():
        if why := _obstacle(inspection, file):
            # Packages may contain programs whose interpreter is in a package that they only suggest.
            is_optional = file.path not in needed and file.path.removeprefix("usr/") in packaged
            yield Finding(f"/{file.path}", f"cannot be started: {why}", note=is_optional)


def _obstacle(inspection: Inspection, file: FileEntry) -> str:
    """Return why Linux cannot start a program; empty if it can."""
    tree, line = inspection.tree, file.script.removeprefix("#!")
    if file.elf:
        loader, is_own = file.elf.interpreter, file.elf.machine == MACHINES.get(inspection.image.architecture)
        missing = loader if loader and is_own and not tree.find(loader) else ""
        return (
            missing and f"the image has no loader {missing}; install its C library, or build the program for this one"
        )
    if line.endswith("\r"):
        return "its first line ends with a carriage return, as on Windows; remove it with sed -i 's/\\r$//'"
    interpreter, *words = line.split() or [""]
    named = [interpreter]
    if interpreter.endswith("/env"):
        named += [word for word in words if "=" not in word and not word.startswith("-")][:1]
    for program in named if file.script else ():
        found = _which(inspection, program) if "/" not in program or program.startswith("/") else None
        if found is None or not found.mode & 0o111:
            lack = "is not executable" if found else "does not exist" if "/" in program else "is not on PATH"
            return f"its interpreter {program or '(none)'} {lack}; install it, or change the first line"
    return ""


def named_paths(env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield pairs of a variable and an absolute path in its value, without paths that programs create at run time."""
    for name, value in env.items():
        if VARIABLES["of-run-time"].search(name):
            continue
        is_list = VARIABLES["lists"].search(name) is not None
        parts = re.split(r"[:\s]+" if name == "LD_PRELOAD" else ":", value)
        if is_list or all(re.fullmatch(r"(/[^\s/$*%,;=?<>{}\"'`]+)+/?|/", part) for part in parts):
            for part in dict.fromkeys(parts):
                if part.startswith("/") and part not in USUAL and not is_a("mounted", part):
                    yield name, part.strip("/")


def environment(inspection: Inspection) -> Iterator[Finding]:
    """Paths in environment variables exist, prefixes contain their program, and no variable is set twice."""
    tree, env = inspection.tree, inspection.image.env
    set_ = Counter(str(item).partition("=")[0] for item in inspection.image.settings.get("Env") or ())
    for name in (name for name, times in set_.items() if times > 1):
        # The other rules see only the last value.
        yield Finding(name, "is set twice, and programs do not agree which value counts; keep one")
    for name, value in env.items():
        for folder in dict.fromkeys(value.split(":")) if VARIABLES["folders"].search(name) else ():
            if not folder:
                yield Finding(name, "has an empty entry, which means the current folder; remove it")
            elif not folder.startswith("/"):
                yield Finding(name, f"{folder!r} is relative to the current folder; write an absolute path")
    volumes = tuple(f"{volume.strip('/')}/" for volume in inspection.image.settings.get("Volumes") or ())
    for name, path in named_paths(env):
        entry = tree.find(path)
        if path and entry is None and not f"{path}/".startswith(volumes or ("\n",)):
            # A whole tree that is absent is probably mounted when the container starts.
            mounted = tree.find(path.partition("/")[0]) is None and not VARIABLES["of-libraries"].search(name)
            yield Finding(name, f"/{path} does not exist; remove the variable, or add what it names", note=mounted)
        elif entry and entry.kind != "folder" and VARIABLES["folders"].search(name):
            yield Finding(name, f"/{path} is a {entry.kind}, not a folder; name its folder")
        elif entry and entry.kind == "folder" and VARIABLES["files"].search(name):
            yield Finding(name, f"/{path} is a folder, not a file; name the file in it")
        elif entry and entry.kind == "folder":
            for names, files in PREFIXES:
                if names.fullmatch(name) and not any(tree.glob(f"{path}/{file}") for file in files):
                    text = f"/{path} contains none of {', '.join(files)}; name the folder of the installed program"
                    yield Finding(name, text)
    yield from _preloaded(inspection)


def _preloaded(inspection: Inspection) -> Iterator[Finding]:
    """Yield a finding for each library in LD_PRELOAD that the loader cannot load into the image's programs."""
    machine = MACHINES.get(inspection.image.architecture, 0)
    for name in re.split(r"[:\s]+", inspection.image.env.get("LD_PRELOAD", "")):
        folders = [""] if "/" in name else inspection.loader.folders(machine)
        found = next(filter(None, (inspection.tree.find(f"{folder}/{name}") for folder in folders)), None)
        if name and "/" not in name and found is None:
            yield Finding("LD_PRELOAD", f"the loader finds no {name}; remove the variable, or install the library")
        elif name and found and (found.elf is None or found.elf.machine != machine):
            yield Finding("LD_PRELOAD", f"{name} is not a library for {inspection.image.architecture}; remove it")
