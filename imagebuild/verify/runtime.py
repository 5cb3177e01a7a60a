"""The libraries in a process, and the files that they open by name: plug-ins, providers and modules.

Nothing is linked to the opened files. If one is missing or does not fit, most libraries say nothing and use TCP."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from imagebuild.verify.elf import PATTERNS, Closure
from imagebuild.verify.files import Elf, Finding, lines_of
from imagebuild.verify.inspection import Inspection

STRICT_GLIBC = 41
"""The first minor version of glibc 2 in which `dlopen` refuses libraries that need an executable stack."""
SHOWN = 3
"""Maximum number of names in a finding."""
SUFFIX = re.compile(r"lib%s(-rdmav\d+\.so)$")
MODULES = [(re.compile(row["path"]), re.compile(row["openers"]), row["loss"]) for row in PATTERNS["modules"]]
SINGLE = {name: re.compile(rf"{stem}(?:-[0-9a-f]{{8}})?\.so(?:\.|$)") for name, stem in PATTERNS["single"].items()}
SITE = re.compile(r"^(.*/(?:site|dist)-packages)/")


class Opened(NamedTuple):
    """A file that a library opens by its name."""

    path: str
    by: str | None
    """The library that opens the file; None if the image lacks it."""
    loss: str
    """What happens if the file cannot be loaded."""


def opened_files(inspection: Inspection) -> list[Opened]:
    """Return the plug-ins, providers and modules in the image."""
    found = [
        Opened(path, by, row["loss"]) for row in PATTERNS["nccl"] for path, by in _plugins(inspection, row).items()
    ]
    libibverbs, providers = _providers(inspection)
    found += [Opened(provider.path, libibverbs, NO_PROVIDER) for provider in providers if provider.path]
    for path in inspection.objects:
        for pattern, openers, loss in MODULES:
            if pattern.search(f"/{path}") and inspection.objects[path].machine == inspection.machine:
                folder = path.rpartition("/")[0].rpartition("/")[0]
                names = (f"{folder}/{name}" for name in inspection.tree.names(folder) if openers.match(name))
                by = next((name for name in names if inspection.tree.find(name)), None)
                found.append(Opened(path, by, loss))
    return found


def loaded_with(inspection: Inspection, opened: Opened) -> Closure:
    """Return the libraries in a process after a library has opened a file."""
    if opened.by:
        return inspection.loader.closure(opened.by, opened.path)
    return inspection.loader.closure(opened.path)


def plugins(inspection: Inspection) -> Iterator[Finding]:
    """Plug-ins, providers and modules that libraries open by name are found, and fit the library that opens them."""
    for row in PATTERNS["nccl"]:
        yield from _misnamed(inspection, row)
        yield from _unread(inspection, row)
    yield from _misplaced_providers(inspection)
    yield from _missing_modules(inspection)
    # Files that one library opens share a scope and are bound late: Open MPI's module ucx uses symbols of a library
    # that only the module smcuda needs.
    defined: dict[str, set[str]] = defaultdict(set)
    fitting = [(opened, opened.by) for opened in opened_files(inspection) if opened.by]
    for opened, by in fitting:
        files = (inspection.objects.get(path) for path in loaded_with(inspection, opened).files)
        defined[by].update(name for elf in files if elf for name in elf.defines)
    for opened, by in fitting:
        if lacking := sorted({*_elf(inspection, opened.path).uses} - defined[by]):
            text = f"needs {_some(lacking)}, which /{by} and its libraries lack, so they are of different"
            yield Finding(f"/{opened.path}", f"{text} versions; install both from one build; {opened.loss}")


def _elf(inspection: Inspection, path: str) -> Elf:
    entry = inspection.tree.find(path)
    assert entry and entry.elf, "a file that the loader can load"  # noqa: PT018
    return entry.elf


def _some(names: Iterable[str]) -> str:
    """Return the first names of a list."""
    listed = [*names]
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return f"{', '.join(listed[:SHOWN])}{more}"


# NCCL


def _libraries_of_nccl(inspection: Inspection) -> list[str]:
    return [
        path
        for path, elf in inspection.objects.items()
        if elf.machine == inspection.machine and SINGLE["NCCL"].match(elf.soname or "")
    ]


def _settings_of_nccl(inspection: Inspection) -> Mapping[str, str]:
    """Return the environment variables, and those in /etc/nccl.conf."""
    lines = lines_of(inspection.tree.find("etc/nccl.conf"))
    pairs = (line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    return {name.strip(): value.strip() for name, value in pairs} | dict(inspection.image.env)


def _wanted(inspection: Inspection, row: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    """Return the plug-ins that the variable names, each with the file names that NCCL tries."""
    value = _settings_of_nccl(inspection).get(row["variable"], "")
    names = value.split(",") if row.get("many") else [value]
    return [
        (name, [name, f"{row['file']}-{name}.so"] if not re.search("/|^lib.*[.]so$", name) else [name])
        for name in names
        if name and value.lower() != "none" and not "static_plugin".startswith(name.lower())
    ]


def _found(inspection: Inspection, names: Iterable[str]) -> tuple[str, str | None] | None:
    """Return the file that NCCL opens under one of the names, and NCCL's library; None if there is no such file."""
    for by in (*_libraries_of_nccl(inspection), None):
        for name in names:
            if path := inspection.loader.find(name, inspection.machine, by):
                return inspection.tree.resolve(path) or path, by
    return None


def _files_of_plugins(inspection: Inspection, row: Mapping[str, str]) -> list[str]:
    """Return the files with names of plug-ins, whether the loader finds them or not."""
    is_plugin = re.compile(rf"(^|/){row['file']}(-[^/]*)?\.so(\.\d+)*$").search
    return [path for path, elf in inspection.objects.items() if is_plugin(path) and elf.machine == inspection.machine]


def _plugins(inspection: Inspection, row: Mapping[str, str]) -> dict[str, str | None]:
    """Map each plug-in that NCCL can open to NCCL's library."""
    wanted = [names for _, names in _wanted(inspection, row)]
    named = [[path.rpartition("/")[2]] for path in _files_of_plugins(inspection, row)]
    return dict(filter(None, (_found(inspection, names) for names in wanted + named)))


def _misnamed(inspection: Inspection, row: Mapping[str, str]) -> Iterator[Finding]:
    """Yield plug-ins that a variable names, or that the image contains, but that NCCL does not find."""
    files, reported = _files_of_plugins(inspection, row), set[str]()
    for name, names in _wanted(inspection, row):
        if not _found(inspection, names):
            elsewhere = [path for path in files if path.rpartition("/")[2] in names]
            reported |= {*elsewhere}
            remedy = f"install the plug-in, or set {row['variable']} to one that the image has"
            if elsewhere:
                remedy = f"add the folder of /{elsewhere[0]} to the folders of the loader"
            text = f"names {name}, but the loader finds no file {' or '.join(names)}; {remedy}; {row['loss']}"
            yield Finding(row["variable"], text)
    known = _plugins(inspection, row)
    for path in files:
        if path not in known and path not in reported and not _found(inspection, [path.rpartition("/")[2]]):
            text = f"is not in a folder of the loader, so NCCL does not find it; add /{path.rpartition('/')[0]} to"
            text += f" `libraries` of the component, or run ldconfig after it; {row['loss']}"
            # Of several plug-ins, such as those of HPC-X, users choose one.
            yield Finding(f"/{path}", text, note=bool(known))


def _unread(inspection: Inspection, row: Mapping[str, str]) -> Iterator[Finding]:
    """Yield plug-ins without any interface that NCCL reads."""
    for by in _libraries_of_nccl(inspection):
        read = _interfaces(_elf(inspection, by).texts, row)
        for path in _plugins(inspection, row) if read else ():
            files = loaded_with(inspection, Opened(path, by, "")).files
            offered = _interfaces((name for file in files for name in _elf(inspection, file).defines), row)
            if not read & offered:
                has = f"only has {row['symbol']}_v{_some(map(str, sorted(offered)))}" if offered else "has no interface"
                text = f"{has}, but /{by} reads {row['symbol']}_v{min(read)} to _v{max(read)}"
                yield Finding(f"/{path}", f"{text}; install a plug-in for this version of NCCL; {row['loss']}")


def _interfaces(names: Iterable[str], row: Mapping[str, str]) -> set[int]:
    """Return the versions of an interface of NCCL in names such as `ncclNetPlugin_v8`."""
    return {int(name.rpartition("_v")[2]) for name in names if name.startswith(f"{row['symbol']}_v")}


# libibverbs

NO_PROVIDER = "without it, libibverbs finds no devices, and jobs silently use TCP"


class Provider(NamedTuple):
    """A provider that libibverbs opens."""

    named_by: str
    """The file or environment variable that names the provider."""
    names: list[str]
    """The file names that libibverbs tries."""
    path: str | None
    """The file that it finds; None if there is none."""


def _providers(inspection: Inspection) -> tuple[str | None, list[Provider]]:
    """Return the library libibverbs that the loader finds, and the providers that it opens."""
    by = inspection.loader.find("libibverbs.so.1", inspection.machine)
    texts = _elf(inspection, by).texts if by else ()
    formats = sorted(text for text in texts if SUFFIX.search(text))  # first in the folder of providers, then by name
    if by is None or not formats:
        return None, []
    variable = next((name for name in ("RDMAV_DRIVERS", "IBV_DRIVERS") if name in inspection.image.env), "")
    named = [(variable, name) for name in re.split("[:;]", inspection.image.env.get(variable, "")) if name]
    for folder in (text for text in texts if text.endswith("/libibverbs.d")):
        for file in inspection.tree.names(inspection.tree.resolve(folder) or "-"):
            words = (line.split() for line in lines_of(inspection.tree.find(f"{folder}/{file}")))
            named += [(f"{folder}/{file}", line[1]) for line in words if line[:1] == ["driver"] and line[1:]]
    found = []
    for named_by, name in named:
        names = [f"{name}{formats[0].rpartition('%s')[2]}"] if name.startswith("/") else [f % name for f in formats]
        paths = (inspection.loader.find(path, inspection.machine, by) for path in names)
        found.append(Provider(named_by, names, next(filter(None, paths), None)))
    return by, found


def _misplaced_providers(inspection: Inspection) -> Iterator[Finding]:
    """Yield providers that libibverbs does not find."""
    by, providers = _providers(inspection)
    for provider in providers:
        if provider.path is None:
            stem = re.escape(provider.names[0].rpartition("/")[2].partition("-rdmav")[0])
            others = [f"/{path}" for path in inspection.objects if re.search(rf"/{stem}-rdmav\d+\.so$", path)]
            but = f"; the image has {_some(others)}, which is of another release" if others else ""
            text = f"names a provider that /{by} opens as {provider.names[0]}, which the image lacks{but}"
            remedy = "install libibverbs and its providers from one release"
            yield Finding(provider.named_by, f"{text}; {remedy}; {NO_PROVIDER}")
    if by and not providers:
        # Many packages need libibverbs although nobody uses RDMA. NCCL uses it if it is there.
        text = f"finds no provider; install the providers of its release (package ibverbs-providers); {NO_PROVIDER}"
        yield Finding(f"/{by}", text, note=not _libraries_of_nccl(inspection))


# UCX


def _missing_modules(inspection: Inspection) -> Iterator[Finding]:
    """Yield libraries of UCX whose modules are missing."""
    searched = {inspection.tree.resolve(folder) for folder in inspection.searched}
    of_ucx = {
        path: re.match(r"lib(uc[mpst](?:_ib)?)\.so", elf.soname or "") for path, elf in inspection.objects.items()
    }
    is_found = any(library and path.rpartition("/")[0] in searched for path, library in of_ucx.items())
    for path, elf in inspection.objects.items():
        if not (library := of_ucx[path]):
            continue
        listed = {name for text in elf.texts for name in text.split(":")} & {*PATTERNS["ucx-modules"]}
        above = path.rpartition("/")[0].removesuffix("/ucx")
        folders = [f"{above}/ucx", inspection.image.env.get("UCX_MODULE_DIR", f"{above}/ucx")]
        for name in sorted(listed):
            file = f"lib{library[1]}_{name}.so.0"
            if not any(inspection.tree.find(f"{folder}/{file}") for folder in folders):
                text = f"opens /{folders[0]}/{file}, which the image lacks; copy the folder with the modules of UCX too"
                # Programs find a second UCX, such as HPC-X's for debugging, only if a user asks for it.
                is_second = is_found and path.rpartition("/")[0] not in searched
                yield Finding(f"/{path}", f"{text}; {MODULES[0][2]}", note=is_second)


# Executable stacks


def executable_stack(inspection: Inspection) -> Iterator[Finding]:
    """Libraries need no executable stack if the image's glibc refuses to open such libraries."""
    libc = inspection.loader.find("libc.so.6", inspection.machine)
    versions = [re.search(r"version 2\.(\d+)", text) for text in (_elf(inspection, libc).texts if libc else ())]
    if max((int(match[1]) for match in versions if match), default=0) < STRICT_GLIBC:
        return
    used = {path for elf, loaded in inspection.closures if elf.interpreter for path in loaded.files}
    for elf, loaded in inspection.closures:
        path = loaded.files[0]
        is_library = elf.soname or ".so" in path.rpartition("/")[2]
        # A program may start with such a library: only dlopen refuses it.
        if elf.executable_stack and is_library and not elf.interpreter and path not in used:
            text = f"needs an executable stack, so dlopen of glibc 2.{STRICT_GLIBC} and later refuses this library"
            yield Finding(f"/{path}", f"{text}; link it with -z noexecstack, or run patchelf --clear-execstack on it")


# One of each


def one_of_each(inspection: Inspection) -> Iterator[Finding]:
    """A process contains only one NCCL, CUDA runtime, cuDNN, MPI, PMIx, UCX, libibverbs and libfabric."""
    closures = {loaded.files[0]: loaded for _, loaded in inspection.closures}
    doubles = {path: _doubles(inspection, loaded.files) for path, loaded in closures.items()}
    reported = set[str]()
    for path, loaded in closures.items():
        for name, files in doubles[path].items():
            # Only the file that brings them together is at fault, not the programs that use the file.
            if not any(doubles.get(file, {}).get(name) == files for file in loaded.files[1:]):
                reported |= {*files}
                text = f"loads {' and '.join(f'/{file}' for file in files)} into one process; a process can use only"
                yield Finding(f"/{path}", f"{text} one {name}; link all of its libraries to the same file")
    for site, members in _environments(inspection).items():
        users = {file: path for path in reversed(members) for file in closures[path].files}
        for name, files in _doubles(inspection, sorted(users)).items():
            if not reported.issuperset(files):
                text = " and ".join(f"/{users[file]} loads /{file}" for file in files)
                remedy = "remove one of them, or install packages for the same version"
                yield Finding(f"/{site}", f"a Python process can use only one {name}, but {text}; {remedy}")


def _doubles(inspection: Inspection, files: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the libraries of which a process has several different files."""
    found: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for path in files:
        entry = inspection.tree.get(path)
        names = (path.rpartition("/")[2], (entry and entry.elf and entry.elf.soname) or "")
        for name, pattern in SINGLE.items():
            if match := next(filter(None, map(pattern.match, names)), None):
                found[name, "".join(match.groups())].setdefault(entry.sha256 if entry else "", path)
    return {name: tuple(copies.values()) for (name, _), copies in found.items() if len(copies) > 1}


def _environments(inspection: Inspection) -> dict[str, list[str]]:
    """Map each folder of Python packages to the files with code in it that load libraries outside their own package."""
    environments: dict[str, dict[tuple[str, str], list[str]]] = defaultdict(lambda: defaultdict(list))
    for _, loaded in inspection.closures:
        path = loaded.files[0]
        if match := SITE.match(path):
            folder, _, name = path.rpartition("/")
            if not any(pattern.match(name) for pattern in SINGLE.values()):
                environments[match[1]][folder, name.partition(".")[0]].append(path)
    # Modules that differ only after the first dot are alternatives, such as those of mpi4py for each MPI.
    return {site: [paths[0] for paths in modules.values() if len(paths) == 1] for site, modules in environments.items()}
