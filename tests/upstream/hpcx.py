"""Stand-ins for HPC-X's archives, built from published listings. `evidence/hpcx-*.yaml` has each fact and its source.

`release` reads the facts, `files` generates the tree of files, which a test may change, and `pack` writes the archive.
Libraries are ELF files with the known SONAMEs and dependencies; `content` replaces them by compiled libraries.
"""

from __future__ import annotations

import bz2
import io
import re
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from tests.unit.image_files import elf

EVIDENCE = Path(__file__).parent / "evidence"
VERSIONS = ("2.24.1", "2.25.1", "2.51")
NEWEST = VERSIONS[-1]
HOST = "content.mellanox.com"
EPOCH = 1754697600
OWNER = 12345
"""User and group of all files: archives come from machines with other users."""
PREFIX = b"@PREFIX@"
"""A placeholder in compiled content for the vendor's build folder."""
MACHINES = {"x86_64": 62, "aarch64": 183}
STANDIN = "STAND-IN made for the tests of imagebuild; nothing in it is the vendor's.\n"
VARIANTS = ("debug", "mt", "prof")
"""Variants of UCX. Each has init scripts and modulefiles in 2.50."""
Tree = dict[str, "File"]
"""Maps each path below the archive's folder to its file."""
Release = dict[str, Any]
"""The facts about a release, as in `evidence/hpcx-2.51.yaml`, without their sources."""


@dataclass(frozen=True)
class File:
    """A file or a symbolic link in an archive."""

    content: bytes = b""
    mode: int = 0o644
    link: str = ""


@dataclass(frozen=True)
class Distribution:
    """The parts of an archive's name."""

    os: str
    cuda: int
    cpu: str = "x86_64"
    version: str = NEWEST

    @property
    def name(self) -> str:
        return f"hpcx-v{self.version}-gcc-doca_ofed-{self.os}-cuda{self.cuda}-{self.cpu}"

    @property
    def path(self) -> str:
        """The path in the archive's URL."""
        return f"hpc/hpc-x/v{self.version}_cuda{self.cuda}/{self.name}.tbz"


@cache
def release(version: str) -> Release:
    """Read the published facts about a release."""
    data = yaml.safe_load((EVIDENCE / f"hpcx-{version}.yaml").read_text())
    if like := data.get("like"):
        data = {**yaml.safe_load((EVIDENCE / f"hpcx-{like}.yaml").read_text()), **data}
    known = {name: _without_places(value) for name, value in data.items()}
    plugin = known["plugin"]["default"]
    libraries = [*known["libraries"], *known.get("more-libraries", ())]
    return known | {"libraries": [{**file, "path": file["path"].replace("{plugin}", plugin)} for file in libraries]}


def _without_places(value: Any) -> Any:
    match value:
        case {"names": names}:
            return names
        case [{"values": _}, *_]:
            return {name: entry for group in value for name, entry in group["values"].items()}
        case [{"paths": _}, *_]:
            return [path for group in value for path in group["paths"]]
        case _:
            return value


def init_script(known: Release) -> str:
    """Return the script that sets the environment. Like the vendor's script, it sets search paths only in `hpcx_load`.

    Like the vendor's script, it reads variables that may be unset, which is an error in a shell with `set -u`.
    """
    lines = ["#!/bin/bash", f"# {STANDIN.strip()}", 'here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"',
             "export HPCX_DIR=$here"]  # fmt: skip
    for name, choice in (("mpi", known["mpi"]), ("plugin", known["plugin"])):
        lines.append(f"hpcx_{name}=${{HPCX_DIR}}/{choice['default']}")
        if switch := choice.get("switch"):
            lines.append(f'if [ "${switch}" = 1 ]; then hpcx_{name}=${{HPCX_DIR}}/{choice["other"]}; fi')
    lines += [f"export {name}={_shell(value)}" for name, value in known["variables"].items()]
    lines += [f"export {name}=" for name in known.get("empty", ())]
    lines += ["hpcx_load() {", *(f"  export OLD_{name}=${name}" for name in known["keeps"])]
    for name, folders in known["lists"].items():
        lines.append(f"  export {name}={':'.join(map(_shell, folders))}${{{name}:+:${name}}}")
    lines += ["}", "hpcx_unload() {", *(f"  export {name}=$OLD_{name}" for name in known["keeps"])]
    names = " ".join([*known["variables"], *known.get("empty", ())])
    return "\n".join([*lines, f"  unset HPCX_DIR {names}", "}", ""])


def _shell(value: str) -> str:
    if match := re.match(r"\{(mpi|plugin)\}(.*)", value):
        return f"$hpcx_{match[1]}{match[2]}"
    return f"${{HPCX_DIR}}/{value}" if value else "$HPCX_DIR"


def files(known: Release, which: Distribution) -> Tree:
    """Return the tree of a release. Its ELF files cannot be loaded."""
    prefix = known["built-in"]["folder"].format(archive=which.name)
    texts = {
        "VERSION": "".join([f"HPC-X v{known['version']}\n", *map(_version_line, known["versions"]),
                            f"Linux: {which.os}\nOFED: doca_ofed\nCUDA: V{which.cuda}.0\n", STANDIN]),
        "LICENSE": f"{STANDIN}The vendor's archive has the text of an end user licence agreement here.\n",
        "hpcx-init.sh": init_script(known),
        "hpcx-init-ompi.sh": init_script(known),
        "modulefiles/hpcx-stack": f"#%Module\n# {STANDIN}prepend-path LD_LIBRARY_PATH {prefix}/ucx/lib\n",
        "modulefiles/hpcx": f"#%Module\n# {STANDIN}set hpcx_dir {prefix}\nsetenv HPCX_DIR $hpcx_dir\n",
    }  # fmt: skip
    texts["modulefiles/hpcx-ompi"] = texts["modulefiles/hpcx"]
    mpi = known["mpi"]["default"]
    for variant in VARIANTS:
        # These scripts spell the folder of Open MPI in another way.
        spelled = init_script(known).replace(f"${{HPCX_DIR}}/{mpi}", "${HPCX_DIR}/ompi${mpi_version}")
        spelled = spelled.replace(
            "export HPCX_DIR=$here", f"export HPCX_DIR=$here\nmpi_version={mpi.removeprefix('ompi')}"
        )
        texts[f"hpcx-{variant}-init.sh"] = texts[f"hpcx-{variant}-init-ompi.sh"] = spelled
        texts[f"modulefiles/hpcx-{variant}"] = texts[f"modulefiles/hpcx-{variant}-ompi"] = (
            f"#%Module\n# {STANDIN}set hpcx_dir {prefix}\nsetenv HPCX_MPI_DIR $hpcx_dir/{mpi}\n"
            f"prepend-path LD_LIBRARY_PATH $hpcx_dir/ucx/{variant}/lib\n"
        )
        texts[f"ucx/{variant}/lib/README"] = STANDIN
    tree: Tree = {}
    for library in known["libraries"]:
        path, soname = library["path"], library["soname"]
        needs = [name.format(cuda=which.cuda) for name in library.get("needs", ())]
        tree[path] = File(elf(machine=MACHINES[which.cpu], soname=soname, needed=needs), 0o755)
        folder, _, name = path.rpartition("/")
        stem = name.partition(".so")[0]
        tree |= {f"{folder}/{link}": File(link=name) for link in {soname, f"{stem}.so"} - {name}}
        if folder.count("/") == 1:
            # Open MPI's build links with these files, and accepts only files that libtool has written.
            texts[f"{folder}/{stem}.la"] = (
                f"# {STANDIN}# Generated by libtool\ndlname='{soname}'\nlibrary_names='{name} {soname} {stem}.so'\n"
                f"old_library=''\ndependency_libs=''\ninstalled=yes\nshouldnotlink=no\ndlopen=''\ndlpreopen=''\n"
                f"libdir='{prefix}/{folder}'\n"
            )
    for path in chain.from_iterable(known["lists"].values()):
        folder = path.format(mpi=known["mpi"]["default"], plugin=known["plugin"]["default"])
        if folder.endswith("/pkgconfig"):
            name = folder.partition("/")[0]
            texts[f"{folder}/{name}.pc"] = f"prefix={prefix}/{name}\nName: {name}\nDescription: STAND-IN\nVersion: 1\n"
        elif folder.endswith(("/include", "/share/man")):
            texts[f"{folder}/README"] = STANDIN
    tree |= {path: File(text.encode()) for path, text in texts.items()}
    tree |= {f"sources/{name}": File(STANDIN.encode()) for name in known["sources"]}
    script = b'#!/bin/sh\necho "stand-in for $(basename "$0")" >&2\nexit 1\n'
    tree |= {path: File(script, 0o755) for path in known["programs"]}
    return tree | {path: File(link=target) for path, target in known["links"].items()}


def _version_line(part: Mapping[str, str]) -> str:
    commit = part.get("commit", "0" * 40)
    return f"{part['name']}-{commit}  {part['version']} ({commit[:7]})\n"


def content(tree: Tree, made: Path, sources: Path | None, which: Distribution, known: Release) -> Tree:
    """Return the tree with compiled files: all files of UCX and UCC, and stand-ins for other libraries and programs.

    For aarch64, nothing is replaced. Without `sources`, Open MPI's source archives are text files.
    """
    if which.cpu != "x86_64":
        return tree
    prefix = known["built-in"]["folder"].format(archive=which.name).encode()
    for root in (made / "stubs", made / f"stubs-cuda{which.cuda}", made / "all"):
        for path in (found for found in root.rglob("*") if found.is_symlink() or found.is_file()):
            name = str(path.relative_to(root))
            if root.name == "all" or name in tree:
                data = b"" if path.is_symlink() else path.read_bytes()
                data = data if data[:4] == b"\x7fELF" else data.replace(PREFIX, prefix)
                link = str(path.readlink()) if path.is_symlink() else ""
                tree = {**tree, name: File(data, path.lstat().st_mode & 0o777, link)}
    if sources:
        packed = {
            name: name.replace("openmpi-", "openmpi4-") for name in known["sources"] if name.startswith("openmpi")
        }
        tree = {**tree, **{f"sources/{name}": File((sources / file).read_bytes()) for name, file in packed.items()}}
    return tree


def pack(tree: Tree, which: Distribution, target: Path) -> None:
    """Write an archive with this tree."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with bz2.open(target, "wb", compresslevel=1) as packed, tarfile.open(fileobj=packed, mode="w|") as archive:
        for path, file in sorted(tree.items()):
            entry = tarfile.TarInfo(f"{which.name}/{path}")
            entry.mtime, entry.uid, entry.gid, entry.mode = EPOCH, OWNER, OWNER, file.mode
            entry.size = len(file.content)
            if file.link:
                entry.type, entry.linkname = tarfile.SYMTYPE, file.link
            archive.addfile(entry, io.BytesIO(file.content))


def unpack(tree: Tree, folder: Path) -> Path:
    """Write the tree to a folder, as if the archive was unpacked; return the folder."""
    for path, file in tree.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        if file.link:
            place.symlink_to(file.link)
        else:
            place.write_bytes(file.content)
            place.chmod(file.mode)
    return folder


def table() -> str:
    """Return the stand-ins to compile, as lines `PATH SONAME LIBRARY…` for libraries and `PATH` for programs."""
    lines = []
    for known in map(release, VERSIONS):
        lines += [" ".join([item["path"], item["soname"], *item.get("needs", ())]) for item in known["libraries"]]
        lines += known["programs"]
    return "".join(f"{line}\n" for line in dict.fromkeys(lines))
