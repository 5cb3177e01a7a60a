"""The libraries that running processes really use, and the faults among them: doubles, false metadata, stale variables.

The script `loaded.sh` prints facts where the processes run. Everything else is computed from its output."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from posixpath import normpath
from typing import Any, NamedTuple

from pydantic import BaseModel

from imagebuild.core import console
from imagebuild.core.advisory import Place, is_packaged, known_bad
from imagebuild.core.errors import CommandError
from imagebuild.core.patterns import data_of
from imagebuild.core.run import ARCHITECTURES
from imagebuild.jobs.facts import DATA as JOB_FACTS
from imagebuild.verify.elf import PATTERNS
from imagebuild.verify.runner import run_behind, shell_script
from imagebuild.verify.wheels import RECORD, record_hash

DATA = data_of(__file__)
MARK = "imagebuild-loaded:"
ROLES: Mapping[str, Mapping[str, Any]] = {row["name"]: row for row in DATA["roles"]}
FILES = {name: re.compile(rf"({row['file']}){DATA['ending']}$") for name, row in ROLES.items()}
TEXT_OF = {name: re.compile(pattern) for name, pattern in DATA["renamed"].items()}
PLUGINS = {row["file"]: row for row in PATTERNS["nccl"]}
"""Maps the beginning of the name of NCCL's plug-ins to what is known about them."""


class Library(BaseModel):
    """A library that a process has loaded, or that it could have loaded."""

    role: str
    path: str
    """The file, without symlinks in its path."""
    version: str | None = None
    """The version that the file itself states; None if it states none."""
    cuda: str | None = None
    compiler: str | None = None
    build_id: str | None = None
    size: int = 0
    origin: str = ""
    """Package, wheel, component of the image or mount that the file comes from."""
    found: str = ""
    """How the loader found the file: a variable, RUNPATH, the cache, or the path in a call of dlopen."""
    interfaces: tuple[str, ...] = ()
    """Interfaces of NCCL, such as `ncclNetPlugin_v8`, that the file contains."""

    @property
    def content(self) -> tuple[Any, ...]:
        return self.size, self.version, self.cuda, self.build_id

    @property
    def identity(self) -> str:
        """The role with version, CUDA and build id, as far as the file states them."""
        cuda = f"+cuda{self.cuda}" if self.cuda else ""
        named = f"{self.role} {self.version}{cuda}" if self.version else self.role
        return named if self.version or not self.build_id else f"{named}, build {self.build_id[:12]}"

    def differs(self, other: Library) -> bool:
        """Whether this is another file with other content."""
        return self.path != other.path and self.content != other.content


class Fault(BaseModel):
    """A fault in a process."""

    kind: str
    subject: str
    """The library or environment variable."""
    text: str
    note: bool = False
    """Whether this may be intended."""


class Process(BaseModel):
    """Processes of one program that have loaded the same libraries."""

    program: str
    pids: tuple[int, ...]
    host: str = ""
    """Name of the host, if a launcher started ranks on several hosts."""
    libraries: tuple[Library, ...] = ()
    faults: tuple[Fault, ...] = ()


class Loaded(BaseModel):
    """The libraries and faults in the processes of a command, and the exit status of the command."""

    status: int | None = None
    driver: str | None = None
    processes: tuple[Process, ...] = ()


def script_for(mode: str, words: Iterable[str]) -> list[str]:
    """Return the command line that prints the facts. `mode` is `run` for a command, `pid` for process ids."""
    named = (row["variable"] for row in ROLES.values() if "variable" in row)
    variables = {
        "names": f"/({'|'.join(row['file'] for row in ROLES.values())}){DATA['ending']}( |$)",
        "texts": DATA["texts"],
        "renamed": "|".join(DATA["renamed"].values()),
        "known": f"/({DATA['known']})$",
        "named": "|".join(["LD_LIBRARY_PATH|LD_PRELOAD", *named]),
        "folders": " ".join(DATA["folders"]),
    }  # fmt: skip
    lines = [f"{name}='{value}'" for name, value in variables.items()]
    return ["sh", "-c", "\n".join([*lines, shell_script("loaded")]), "loaded", mode, *words]


class _Search(NamedTuple):
    """A search of the loader for a name."""

    name: str
    by: str
    tried: tuple[str, ...]
    found: bool


@dataclass
class _Trace:
    """What the loader of one process reported."""

    paths: dict[str, str] = field(default_factory=dict)
    """Maps each loaded path to how it was found."""
    searches: list[_Search] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)
    program: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    deleted: frozenset[str] = frozenset()
    """Loaded paths whose files have been deleted or replaced on disk."""


def read_trace(lines: Sequence[str], env: Mapping[str, str]) -> _Trace:
    """Read the output of `LD_DEBUG=libs,files` for one process. Only its last program counts, if it called exec."""
    starts = [i for i, line in enumerate(lines) if line.startswith("transferring control: ")]
    program = lines[starts[-1]].partition(": ")[2].strip() if starts else ""
    begin = starts[-2] + 1 if len(starts) > 1 else 0
    first = next((i for i in range(begin, len(lines)) if f"needed by {program} [" in lines[i]), begin)
    trace = _Trace(program=program, env=env)
    preload = re.split("[ :]", env.get("LD_PRELOAD", ""))
    name, by, how, called, tried = "", "", "", False, list[str]()

    def close(*, found: bool) -> None:
        if name:
            trace.searches.append(_Search(name, by, tuple(tried), found))

    for line in lines[first:]:
        text = line.strip()
        if match := re.match(r"file=(.+) \[\d+\];  (needed|dynamically loaded) by (.+) \[\d+\]", text):
            close(found=False)
            name, by, called = match[1], match[3], match[2] != "needed"
            how, tried = "", []
        elif match := re.match(r"search path=.*\((.+)\)$", text):
            how = match[1]
        elif text.startswith("search cache="):
            how = "the loader's cache"
        elif text.startswith("trying file="):
            tried.append(text.partition("=")[2])
        elif "generating link map" in text and name:
            path = name if "/" in name else tried[-1] if tried else ""
            how = "LD_PRELOAD" if name in preload or path in preload else "its path" if "/" in name else how
            how = how.replace("system search path", "the default folders")
            if path:
                trace.paths.setdefault(path, f"dlopen, {how}" if called and how != "LD_PRELOAD" else how)
            close(found=True)
            name = ""
        elif match := re.match(r"([^ ]+): error: (.+)", text):
            trace.errors[match[1]] = match[2].removesuffix("(fatal)").strip()
    close(found=False)
    return trace


def role_of(path: str) -> str | None:
    """Return the role of a library by its file name. None if the name has no role."""
    return next((name for name, pattern in FILES.items() if pattern.match(Path(path).name)), None)


class _Facts:
    """The facts that `loaded.sh` printed."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.rows: dict[str, list[list[str]]] = defaultdict(list)
        for line in lines:
            _, kind, *fields = line.partition(MARK)[2].split("\t")
            self.rows[kind].append(fields)
        if not self.rows["end"]:
            raise CommandError(
                "the script in the image printed no complete result; it needs sh, coreutils, grep and sed"
            )
        self.driver = next(("".join(row) for row in self.rows["driver"]), None)
        self.ofed = next(("".join(row).replace("-", ".") for row in self.rows["ofed"]), None)
        self.place = Place(
            archs=tuple(ARCHITECTURES[row[0]] for row in self.rows["machine"] if row[0] in ARCHITECTURES)
        )
        self.root = "".join(self.rows["root"][0])
        self.real = {self.inside(path): self.inside(real) for path, real in self.rows["real"]}
        self.stat = {self.inside(path): (int(size), inode) for path, size, inode in self.rows["stat"]}
        self.texts: dict[str, list[str]] = defaultdict(list)
        for (row,) in self.rows["text"]:
            path, _, text = row.partition(":")
            self.texts[self.inside(path)].append(text)
        # PyTorch's files have no build id, and so no second field: runners remove white space at the end of a line.
        self.build_ids = {self.inside(path): "".join(code) for path, *code in self.rows["build"]}
        self.sums = {self.inside(path): sum_ for row in self.rows["sum"] for sum_, _, path in [row[0].partition("  ")]}
        self.mounts = {point: source for source, point in self.rows["mount"]}
        self.environments = {int(pid): self._environment(int(pid)) for pid, *_ in self.rows["environ"]}
        self.offered = [path for (path,) in self.rows["offered"]]
        self.owners: dict[str, str] = {}
        packages = {row[0]: f"{row[1]} {row[2]}" for row in self.rows["package"] if len(row) > 2}
        for package, path in self.rows["owner"]:
            self.owners[re.sub("^/lib/", "/usr/lib/", path)] = f"package {packages.get(package, package)}"
        for path, name, version in (row for row in self.rows["rpm"] if len(row) > 2):
            self.owners[self.inside(path)] = f"package {name} {version}"
        self.md5 = {f"/{path}": code for row in self.rows["md5"] for code, _, path in [row[0].partition("  ")]}
        self.wheels: dict[str, list[tuple[str, str, int | None]]] = defaultdict(list)
        for (row,) in self.rows["record"]:
            record, _, entry = row.partition(":")
            if match := RECORD.match(self.inside(record)):
                path, code, size = entry.rsplit(",", 2)
                wheel = f"{match['name'].replace('_', '-')} {match['version']}"
                self.wheels[normpath(f"{match['site']}/{path}")].append(
                    (wheel, record_hash(code), int(size or 0) or None)
                )

    def inside(self, path: str) -> str:
        """Return a path as the process sees it."""
        return path[len(self.root) :] if self.root and path.startswith(f"{self.root}/") else path

    def _environment(self, pid: int) -> dict[str, str]:
        pairs = (row[1].partition("=") for row in self.rows["environ"] if int(row[0]) == pid and len(row) > 1)
        return {name: value for name, _, value in pairs if not name.startswith("LD_DEBUG")}

    def library(self, path: str, found: str = "") -> Library | None:
        """Return the library at a path; None if the file has no role."""
        real = self.real.get(path, path)
        texts = self.texts[real]
        role = role_of(path) or role_of(real)
        role = role or next((name for name, text in TEXT_OF.items() if any(map(text.search, texts))), None)
        if role is None or real not in self.stat:
            return None
        version = cuda = None
        if pattern := ROLES[role].get("version"):
            matches = sorted(filter(None, (re.search(pattern, text) for text in texts)), key=lambda m: len(m[0]))
            for match in matches[-1:]:
                groups = [group for group in match.groups() if group and group[:1].isdigit()]
                version, cuda = groups[0], groups[1] if role == "NCCL" and len(groups) > 1 else None
        if version is None and (named := re.search(r"\.so\.(\d+\.\d+\.[\d.]+)$", real)):
            version = named[1]
        wheels = self.wheels.get(real, [])
        if role == "CUDA runtime" and wheels:
            version = wheels[0][0].rpartition(" ")[2]
        compiler = next((text for text in texts if text.startswith(("GCC", "clang"))), None)
        return Library(
            role=role, path=real, version=version, cuda=cuda, compiler=compiler,
            build_id=self.build_ids.get(real) or None, size=self.stat[real][0], origin=self._origin(real), found=found,
            interfaces=tuple(text for text in texts if re.fullmatch(r"nccl\w+_v\d+", text)),
        )  # fmt: skip

    def mount(self, path: str) -> tuple[str, str] | None:
        """Return the place where a file is mounted, and the source on the node; None if the image contains it."""
        for folder in (path, *(map(str, Path(path).parents))):
            if folder in self.mounts and folder != "/":
                return folder, self.mounts[folder]
        return None

    def packaged(self, path: str) -> str:
        """Return the wheel or package that lists a file; empty if there is none."""
        if wheels := self.wheels.get(path):
            return f"wheel {wheels[0][0]}"
        return self.owners.get(re.sub("^/lib/", "/usr/lib/", path), "")

    def _origin(self, path: str) -> str:
        mounted = self.mount(path)
        if mounted and (mounted[0] == path or not self.packaged(path)):
            return f"mounted from {mounted[1]}"
        component = next(
            (row[1] for row in self.rows["component"] if len(row) > 1 and path.startswith(f"{row[0]}/")), ""
        )
        return self.packaged(path) or (f"component {component} of the image" if component else "no package")


def read_loaded(lines: Iterable[str], pids: Sequence[int] = ()) -> Loaded:
    """Return the libraries and faults of the processes from the output of `loaded.sh`.
    If a launcher started the script several times, each with its own name, the results are joined.
    Raises CommandError if the output is incomplete, or if one of the processes `pids` could not be read."""
    scripts: dict[str, list[str]] = {}
    for line in lines:
        scripts.setdefault(line.partition(MARK)[2].partition("\t")[0], []).append(line)
    parts = {name: _read_script(part, pids) for name, part in sorted((scripts or {"": []}).items())}
    processes = [
        process.model_copy(update={"host": name.rpartition(":")[0] if len(parts) > 1 else ""})
        for name, part in sorted(parts.items())  # the order of the output is random
        for process in part.processes
    ]
    status = max((part.status for part in parts.values() if part.status is not None), default=None)
    driver = next((part.driver for part in parts.values()), None)
    return Loaded(status=status, driver=driver, processes=_across(processes))


def _read_script(lines: Sequence[str], pids: Sequence[int]) -> Loaded:
    """Return what one run of `loaded.sh` printed, without faults between processes."""
    try:
        facts = _Facts(lines)
    except (ValueError, LookupError):
        problem = "the facts about the process were cut, or mixed with other output"
        raise CommandError(f"{problem}; try again, with one process or one rank") from None
    if lost := [row[0] for row in facts.rows["unreadable"] if int(row[0]) in pids]:
        remedy = "it has ended, or belongs to another user; correct the number, or run this as that user or root"
        raise CommandError(f"--pid {' --pid '.join(lost)}: cannot be read; {remedy}")
    groups: dict[tuple[Any, ...], Process] = {}
    for pid in facts.environments:
        trace = _trace_of(facts, pid)
        found = dict[str, Library]()
        for path, how in trace.paths.items():
            library = facts.library(path, how)
            if path in trace.deleted and (role := library.role if library else role_of(path)):
                origin = "replaced on disk" if library else "deleted from disk"
                library = Library(role=role, path=path, origin=origin, found=how)
            if library:
                found.setdefault(library.path, library)
        if found:
            libraries = tuple(sorted(found.values(), key=lambda each: [*ROLES].index(each.role)))
            faults = tuple(_faults(facts, trace, libraries))
            known = groups.get(key := (trace.program, tuple(found), str(faults)))
            pids = (*known.pids, pid) if known else (pid,)
            groups[key] = Process(program=trace.program, pids=pids, libraries=libraries, faults=faults)
    status = next((int(row[0]) for row in facts.rows["status"]), None)
    return Loaded(status=status, driver=facts.driver, processes=tuple(groups.values()))


def _trace_of(facts: _Facts, pid: int) -> _Trace:
    """Return what a process has loaded: from the report of its loader, or from its memory map."""

    def rows(kind: str) -> list[str]:
        return ["\t".join(row[1:]) for row in facts.rows[kind] if int(row[0]) == pid]

    trace = read_trace(rows("debug"), facts.environments[pid])
    trace.deleted = frozenset(rows("deleted"))
    for path in rows("map"):
        trace.paths[path] = _likely(path, trace.env, facts)
    trace.program = " ".join(rows("command")).strip() or trace.program
    return trace


def _likely(path: str, env: Mapping[str, str], facts: _Facts) -> str:
    """Return how the loader has probably found a file that a running process uses."""
    name, folder = Path(path).name, str(Path(path).parent)
    if any(facts.real.get(part) == path for part in re.split("[ :]", env.get("LD_PRELOAD", ""))):
        return "LD_PRELOAD"
    if folder in env.get("LD_LIBRARY_PATH", "").split(":"):
        return "LD_LIBRARY_PATH"
    cached = any(Path(offer).parent == Path(path).parent for offer in facts.offered)
    return "the loader's cache" if cached and "-packages/" not in path else f"RUNPATH, or dlopen of {name}"


def _across(processes: Sequence[Process]) -> tuple[Process, ...]:
    """Return the processes, with faults between processes of one program that use different libraries."""
    result = []
    for each in processes:
        faults = list(each.faults)
        program = each.program.split(" ")[0]
        own = {lib.path for lib in each.libraries}
        for library in each.libraries:
            named = [
                f"{lib.path}, {lib.identity}{f' on {other.host}' if other.host != each.host else ''}"
                for other in processes
                for lib in other.libraries
                if other.program == each.program and lib.role == library.role and lib.content != library.content
                if lib.path not in own or (other.host != each.host and lib.path == library.path)
            ]
            if ROLES[library.role].get("single") and named:
                text = " and ".join(dict.fromkeys(named))
                faults.append(_fault("across", library.path, program=program, role=library.role, others=text))
        result.append(each.model_copy(update={"faults": tuple(faults)}))
    return tuple(result)


def _fault(kind: str, subject: str, note: bool = False, **values: Any) -> Fault:
    return Fault(kind=kind, subject=subject, text=DATA["faults"][kind].format(**values), note=note)


def _faults(facts: _Facts, trace: _Trace, libraries: Sequence[Library]) -> Iterator[Fault]:
    yield from _doubles(libraries)
    for library in libraries:
        if library.path in trace.deleted:
            yield _fault("deleted", library.path)
        else:
            yield from _metadata(facts, library)
    yield from _variables(facts, trace.env, libraries)
    yield from _shadowed(facts, libraries)
    yield from _too_new(libraries, facts.driver)
    yield from _plugins(facts, trace, libraries)
    for library in libraries:
        origin, _, packaged = library.origin.rpartition(" ")
        build = "wheel" if origin.startswith("wheel") else "distribution" if is_packaged(packaged) else ""
        gcc = re.search(r"(GCC).*?(\d+(?:\.\d+)+)\s*$|(\w+)", library.compiler or "")
        place = replace(facts.place, gcc=(gcc[2] or gcc[3],) if gcc else (), build=build)
        version = library.version or (packaged if origin.startswith("package") else None)
        for advisory in known_bad({library.role: version}, place):
            yield Fault(kind="advisory", subject=library.path, text=str(advisory), note=True)
    for advisory in known_bad({"driver": facts.driver, "ofed": facts.ofed}, facts.place):
        yield Fault(kind="advisory", subject=f"driver {facts.driver}", text=str(advisory), note=True)


def _doubles(libraries: Sequence[Library]) -> Iterator[Fault]:
    """Yield roles with several libraries of which a process can use only one."""
    for role, row in ROLES.items():
        stems: dict[str, list[Library]] = defaultdict(list)
        for library in libraries:
            if library.role == role and row.get("single"):
                match = FILES[role].match(Path(library.path).name)
                stems[match[1] if match else row["file"]].append(library)
        several = next((each for each in stems.values() if len(each) > 1), None)
        if several:
            others = " and ".join(f"{lib.path} ({lib.identity})" for lib in several[1:])
            yield _fault("two", several[0].path, role=role, others=others)
        elif len(folders := {str(Path(lib.path).parent): lib for each in stems.values() for lib in each}) > 1:
            others = " and ".join(f"{folder} ({lib.origin})" for folder, lib in folders.items())
            yield _fault("family", next(iter(folders.values())).path, role=role, others=others)


def _metadata(facts: _Facts, library: Library) -> Iterator[Fault]:
    """Yield what packages, wheels and file names say wrongly about a library."""
    path, identity = library.path, library.identity
    mounted = facts.mount(path)
    packaged = facts.packaged(path)
    if mounted and mounted[0] == path and packaged and library.role != "CUDA driver":
        yield _fault("mounted", path, source=mounted[1], origin=packaged, identity=identity)
        return
    wheels = facts.wheels.get(path, [])
    digest = facts.sums.get(path, "")
    if len({code for _, code, _ in wheels}) > 1:
        yield _fault("clash", path, wheels=" and ".join(wheel for wheel, *_ in wheels), identity=identity)
        return
    for wheel, code, size in wheels:
        what = f"its size is {library.size}, not {size}" if size and size != library.size else ""
        if code and len(digest) == 64 and digest != code:
            what = what or "its hash differs from RECORD"
        if what:
            yield _fault("size", path, origin=f"wheel {wheel}", what=what, identity=identity)
            return
    expected = facts.md5.get(path) or facts.md5.get(path.removeprefix("/usr"))
    what = "its hash differs from the package database"
    if expected and len(digest) == 32 and digest != expected:
        yield _fault("size", path, origin=packaged, what=what, identity=identity)
        return
    if library.role != "NCCL" or not library.version:
        return
    named = re.search(r"\.so\.(\d+\.\d+\.\d+)$", path)
    stated = re.match(r"(?:wheel nvidia-nccl-cu(\d+)|package libnccl2) (\d+\.\d+\.\d+)", packaged)
    for claim, cuda, what in (
        (named and named[1], None, f"its name says {named and named[1]}"),
        (stated and stated[2], stated and stated[1], f"belongs to the {packaged}"),
    ):
        wrong_cuda = cuda and library.cuda and library.cuda.partition(".")[0] != cuda
        if claim and (not claim.startswith(library.version) or wrong_cuda):
            yield _fault("version", path, identity=identity, what=what)
            return


def _offers(facts: _Facts, test: str) -> Iterator[Library]:
    """Yield the libraries that exist in folders for which the pattern fits."""
    seen = set()
    for path in facts.offered:
        real = facts.real.get(path, path)
        if re.search(test, path) and real not in seen:
            seen.add(real)
            if library := facts.library(path):
                yield library


def _variables(facts: _Facts, env: Mapping[str, str], libraries: Sequence[Library]) -> Iterator[Fault]:
    """Yield variables that name another library than the one that is loaded."""
    for name, value in env.items():
        roles = [role for role, row in ROLES.items() if re.fullmatch(row.get("variable", "-"), name)]
        if name == "LD_LIBRARY_PATH":
            roles = [role for role, row in ROLES.items() if row.get("single") and role != "CUDA driver"]
        elif name == "LD_PRELOAD":
            roles = [*ROLES]
        for place in filter(None, re.split("[ :]", value)) if roles else ():
            folders = "" if name == "LD_LIBRARY_PATH" else "(/lib|/lib64)?"
            is_file = re.escape(place.rstrip("/"))
            for offer in _offers(facts, rf"^{is_file}({folders}/[^/]+)?$"):
                used = [library for library in libraries if library.role == offer.role]
                stem = Path(offer.path).name.partition(".")[0].partition("-")[0]
                peers = [lib for lib in used if Path(lib.path).name.startswith(stem)]
                if offer.role in roles and peers and all(offer.differs(library) for library in peers):
                    named = f"{offer.path} ({offer.identity})"
                    note = offer.role == "CUDA runtime" and not name.startswith("LD_PRELOAD")
                    yield _fault(
                        "variable", name, named=named, path=peers[0].path, identity=peers[0].identity, note=note
                    )
                    break


def _shadowed(facts: _Facts, libraries: Sequence[Library]) -> Iterator[Fault]:
    """Yield libraries that a variable puts in place of those in the wheels of the process."""
    for library in libraries:
        variable = next((name for name in ("LD_PRELOAD", "LD_LIBRARY_PATH") if name in library.found), None)
        if not variable or not ROLES[library.role].get("single"):
            continue
        for offer in _offers(facts, r"-packages/nvidia/[^/]+/lib/[^/]+$" if variable == "LD_LIBRARY_PATH" else "."):
            if offer.role == library.role == "NCCL" and offer.differs(library):
                yield _fault(
                    "shadow",
                    variable,
                    named=offer.path,
                    other=offer.identity,
                    variable=variable,
                    path=library.path,
                    identity=library.identity,
                )
                break


def _too_new(libraries: Sequence[Library], driver: str | None) -> Iterator[Fault]:
    """Yield libraries for a CUDA that the driver does not support."""
    own = next((lib.version for lib in libraries if lib.role == "CUDA driver" and lib.version), None)
    driver = own or driver
    if not driver:
        return
    drivers = {int(cuda): int(least) for cuda, least in (DATA["older-drivers"] | JOB_FACTS["drivers"]).items()}
    most = max((cuda for cuda, least in drivers.items() if least <= int(driver.partition(".")[0])), default=0)
    for library in libraries:
        text = library.cuda or (library.version if library.role == "CUDA runtime" else None)
        if library.role == "CUDA runtime" and (named := re.search(r"\.so\.(\d+)", library.path)):
            text = text or named[1]
        if text and int(text.partition(".")[0]) > most:
            cuda = int(text.partition(".")[0])
            yield _fault(
                "driver", library.path, cuda=text, driver=driver, most=most, least=drivers.get(cuda, "a newer")
            )


# Plug-ins of NCCL


def _plugins(facts: _Facts, trace: _Trace, libraries: Sequence[Library]) -> Iterator[Fault]:
    """Yield plug-ins that NCCL did not load, or cannot read."""
    nccl, env = next((library for library in libraries if library.role == "NCCL"), None), trace.env
    for stem, row in PLUGINS.items():
        role = next((name for name, pattern in FILES.items() if pattern.match(f"{stem}.so")), None)
        if role is None or nccl is None:
            continue
        loaded = {library.path: library for library in libraries if library.role == role}
        offers = [offer for offer in _offers(facts, rf"/{stem}[^/]*$") if offer.role == role]
        searches = [search for search in trace.searches if FILES[role].match(Path(search.name).name)]
        wanted = [name for name in env.get(row["variable"], "").split(",") if name and name.lower() != "none"]
        broken = set()
        for path, offer in {**{each.path: each for each in offers}, **loaded}.items():
            if reason := _broken(trace, path, facts):
                broken.add(path)
                yield _fault("plugin", path, reason=f"{reason}; {row['loss']}")
            elif path in loaded and (fault := _unreadable(nccl, offer, row)):
                broken.add(path)
                yield fault
        working = loaded.keys() - broken
        if working or broken or env.get(row["variable"], "").lower() == "none":
            continue
        for name in wanted:
            if not offers:
                yield _fault("missing", row["variable"], named=name)
        for offer in offers:
            name = Path(offer.path).name
            if searches and not any(search.name == name for search in searches):
                reason = f"NCCL searched for {searches[0].name}; set {row['variable']}={name}; {row['loss']}"
                yield _fault("plugin", offer.path, reason=reason)
            elif searches:
                reason = f"its folder is not in the loader's folders; add {Path(offer.path).parent} to LD_LIBRARY_PATH"
                yield _fault("plugin", offer.path, reason=f"{reason}; {row['loss']}")
            else:
                reason = "NCCL has not searched for it, as it made no communicator yet"
                yield _fault("plugin", offer.path, reason=reason, note=not wanted or bool(trace.searches))


def _broken(trace: _Trace, path: str, facts: _Facts) -> str:
    """Return why the loader refused a file; empty if it did not."""
    paths = [path, *(alias for alias, real in facts.real.items() if real == path)]
    names = {Path(loaded).name for loaded in trace.paths}
    failed = {search.name for search in trace.searches if search.by in paths and search.tried and not search.found}
    if missing := sorted(failed - names):
        remedy = "install it, or add its folder to LD_LIBRARY_PATH"
        return f"it needs {' and '.join(missing)}, which the loader does not find; {remedy}"
    return next((trace.errors[name] for name in paths if name in trace.errors), "")


def _unreadable(nccl: Library, plugin: Library, row: Mapping[str, str]) -> Fault | None:
    """Return the fault of a plug-in without any interface that NCCL reads; None if NCCL can read it."""
    read, offered = (
        {name for name in library.interfaces if name.startswith(f"{row['symbol']}_v")} for library in (nccl, plugin)
    )
    if not read or read & offered:
        return None
    names = sorted(read, key=lambda name: int(name.rpartition("_v")[2]))
    span = f"{names[0]} to {names[-1].rpartition('_')[2]}"
    has = " and ".join(sorted(offered)) or "other interfaces"
    return _fault("abi", plugin.path, offered=has, path=nccl.path, identity=nccl.identity, read=span)


def look(runner: str, words: Sequence[str], pids: Sequence[int]) -> Loaded:
    """Run a command, or look into running processes, and return what they have loaded. Other output is printed.
    Raises ConfigError for a wrong runner, CommandError if the result is incomplete."""
    lines = list[str]()

    def take(line: str) -> None:
        if MARK in line:
            lines.append(line)
        else:
            console.err.print(line)

    run_behind(runner, script_for("run", words) if words else script_for("pid", map(str, pids)), take)
    return read_loaded(lines, pids)
