"""Worlds that differ from what was published: what is adapted, what is noted, and what stops, with which sentence.

Each row changes the stand-in of tests/upstream, which was made from others' evidence. The sentences are in the table of
docs/hpcx.md, which `--update-golden` writes.
"""

from __future__ import annotations

import gzip
import hashlib
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from imagebuild.core import Arch, ImagebuildError, Mirrors, Patience, run_program
from imagebuild.lock import Upstream, facts_changes, image_facts, lock_from_table, resolve_sources, tree_facts, unpack
from imagebuild.project import (
    UNRESOLVED,
    LockedArchive,
    LockedRepository,
    PackageSource,
    Project,
    Table,
    TreeFacts,
    Unpacked,
    is_unresolved,
    key_of,
)
from tests.conftest import ROOT, ran
from tests.unit.image_files import elf
from tests.unit.lock.test_lock_upstream import package_with
from tests.upstream import bases, hpcx, packages
from tests.upstream.hpcx import File, Release, Tree
from tests.upstream.keys import Keys
from tests.upstream.server import Server

pytestmark = pytest.mark.programs
Known = Callable[[Release], Release]
Files = Callable[[Tree], Tree]
HPCX = "/opt/hpcx"
PAGE = ROOT / "docs" / "hpcx.md"
ENDS = "<!-- worlds:begin -->\n", "<!-- worlds:end -->\n"
Row = Callable[[str, str, str], None]
KEY = ("archives", "https://content.example/hpcx.tbz")
A = "a" * 64
REMEDY = re.compile(
    "[;,] (so )?(ask again|ask without|build|give|if its owner|pin|take)|if its owner announced|pin other versions, or"
)
"""What to do, with which every stop ends."""


def rows() -> dict[str, str]:
    """What differs → what becomes of it, as the docs say."""
    lines = PAGE.read_text().partition(ENDS[0])[2].partition(ENDS[1])[0].splitlines()[2:]
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines}


@pytest.fixture
def row(request: pytest.FixtureRequest) -> Row:
    def compare(says: str, verdict: str, sentence: str) -> None:
        line, known = f"| {says} | {verdict} | {sentence} |", rows()
        if request.config.getoption("--update-golden"):
            head, begin, rest = PAGE.read_text().partition(ENDS[0])
            table = ["| what differs | what becomes of it | in these words |", "|---|---|---|"]
            table += {**known, says: line}.values()
            PAGE.write_text("\n".join([head + begin + table[0], *table[1:], ENDS[1] + rest.partition(ENDS[1])[2]]))
        assert line == known.get(says) or request.config.getoption("--update-golden"), "`make golden` writes it anew"

    return compare


def test_the_docs_have_no_world_that_is_none() -> None:
    assert list(rows()) == [world.says for world in (*WORLDS, *SERVED)]


def same(thing: Any) -> Any:
    return thing


def lists(change: Callable[[str, tuple[str, ...]], tuple[str, ...]]) -> Known:
    return lambda known: replace(known, lists={name: change(name, parts) for name, parts in known.lists.items()})


def variables(**values: str | None) -> Known:
    """Other variables; None takes one away."""
    return lambda known: replace(
        known, variables={name: value for name, value in {**known.variables, **values}.items() if value is not None}
    )


def without(*tops: str) -> Files:
    return lambda tree: {path: file for path, file in tree.items() if not path.startswith(tops)}


def texts(old: str, new: str, paths: str = "") -> Files:
    """Other words in text files whose paths match."""

    def change(path: str, file: File) -> File:
        changed = not file.link and file.content[:4] != b"\x7fELF" and re.match(paths, path)
        return replace(file, content=file.content.replace(old.encode(), new.encode())) if changed else file

    return lambda tree: {path: change(path, file) for path, file in tree.items()}


def added(**files: File) -> Files:
    return lambda tree: {**tree, **{name.replace("__", "/"): file for name, file in files.items()}}


@dataclass(frozen=True)
class World:
    """A change of a release, and what becomes of it. Of variables None means that the image has none."""

    says: str
    version: str = hpcx.NEWEST
    known: Known = same
    files: Files = same
    arm: tuple[Known, Files] | None = None
    """The archive for the other architecture, if the image is for both."""
    env: Mapping[str, str | None] = field(default_factory=dict)
    begins: Mapping[str, str] = field(default_factory=dict)
    """Lists and the folders, below HPC-X's, with which they begin."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    stops: bool = False


NEVER = {
    "PMIX_INSTALL_PREFIX": None,
    "MANPATH": None,
    "OLD_PATH": None,
    "HPCX_OSU_DIR": None,
    "OPAL_PREFIX": f"{HPCX}/ompi",
}
SCRIPT = r"hpcx-init\.sh$"
WORLDS = (
    World(
        "2.51 as shown", env={**NEVER, "SHMEM_HOME": f"{HPCX}/ompi", "HPCX_NCCLNET_PLUGIN_DIR": f"{HPCX}/nccl_spectrum-x_plugin"},
        begins={"LIBRARY_PATH": "nccl_spectrum-x_plugin/lib nccl_rdma_sharp_plugin/lib sharp/lib ucc/lib ucx/lib hcoll/lib ompi/lib"},
        facts={"plugins": ["spcx", "ibext"], "unprovided": "libxpmem.so.0", "versions": {"ucx": "1.22.0"}},
    ),
    World(
        "2.25.1 as shown", "2.25.1", env={**NEVER, "HPCX_HOME": HPCX},
        begins={"PATH": "ompi/bin clusterkit/bin sharp/bin", "LD_LIBRARY_PATH": "nccl_rdma_sharp_plugin/lib nccl_spectrum-x_plugin/lib ucx/lib sharp/lib"},
    ),
    World(
        "2.24.1 as shown", "2.24.1", env={**NEVER, "HPCX_NCCLNET_PLUGIN_DIR": f"{HPCX}/ncclnet_plugin"},
        facts={"unprovided": "libfuse3.so.3", "versions": {"ucc": "1.5.0", "ucx": "1.20.0"}},
    ),
    World(
        "lists in another order", known=lists(lambda _, parts: tuple(reversed(parts))),
        begins={"CPATH": "hcoll/include sharp/include ucx/include", "LD_LIBRARY_PATH": "nccl_rdma_sharp_plugin/lib hcoll/lib sharp/lib nccl_spectrum-x_plugin/lib"},
    ),
    World("Open MPI where UCX should be", known=lists(lambda _, parts: tuple({"ucx/lib": "{mpi}/lib", "{mpi}/lib": "ucx/lib"}.get(p, p) for p in parts)), begins={"LD_LIBRARY_PATH": "nccl_spectrum-x_plugin/lib nccl_rdma_sharp_plugin/lib ucc/lib/ucc ucc/lib ucx/lib/ucx ucx/lib sharp/lib hcoll/lib ompi/lib"}),
    World("libraries that are found by themselves", known=lists(lambda name, parts: tuple(p for p in parts if name != "LD_LIBRARY_PATH" or "plugin" in p)), begins={"LD_LIBRARY_PATH": "nccl_spectrum-x_plugin/lib nccl_rdma_sharp_plugin/lib ucx/lib ompi/lib"}),
    World("no folders of libraries", known=lambda known: replace(known, lists={n: p for n, p in known.lists.items() if n != "LD_LIBRARY_PATH"}), env={"LD_LIBRARY_PATH": f"{HPCX}/ucx/lib:{HPCX}/ompi/lib"}, facts={"plugins": []}),
    World(
        "the order of 2.51 for another distribution",
        known=lists(lambda name, parts: ("{plugin}/lib", "nccl_rdma_sharp_plugin/lib", "sharp/lib", "hcoll/lib", "ucc/lib", "ucx/lib", "{mpi}/lib") if name == "LIBRARY_PATH" else parts),
        begins={"LIBRARY_PATH": "nccl_spectrum-x_plugin/lib nccl_rdma_sharp_plugin/lib sharp/lib hcoll/lib ucc/lib"},
    ),
    World("lists with colons too many", files=texts("export CPATH=", "export CPATH=::", SCRIPT), begins={"CPATH": "ompi/include ucc/include"}),
    World("a folder twice", known=lists(lambda _, parts: (*parts, parts[0])), begins={"CPATH": "ompi/include ucc/include ucx/include sharp/include hcoll/include"}),
    World("a list that is gone", known=lambda known: replace(known, lists={n: p for n, p in known.lists.items() if n != "CPATH"}), env={"CPATH": None}),
    World("another name of the plug-in's variable", known=variables(HPCX_NCCLNET_PLUGIN_DIR=None, HPCX_NET_DIR="{plugin}"), env={"HPCX_NET_DIR": f"{HPCX}/nccl_spectrum-x_plugin", "HPCX_NCCLNET_PLUGIN_DIR": None}),
    World("a variable that nobody knows", known=variables(HPCX_NEW_DIR="sharp"), env={"HPCX_NEW_DIR": f"{HPCX}/sharp"}),
    World("a value that is no folder", files=texts("export HPCX_IPM_DIR=", "export HPCX_IPM_DIR= HPCX_FLAVOUR=release", SCRIPT), env={"HPCX_FLAVOUR": "release", "HPCX_IPM_DIR": None}),
    World("no home of OpenSHMEM", known=variables(SHMEM_HOME=None), env={"SHMEM_HOME": None, **NEVER}),
    World("PMIx by another variable", known=variables(PMIX_PREFIX="{mpi}"), env={"PMIX_PREFIX": None}),
    World("the plug-in for MRC", known=lambda known: replace(known, plugin={"default": "nccl_mrc_plugin"}), env={"HPCX_NCCLNET_PLUGIN_DIR": f"{HPCX}/nccl_mrc_plugin"}, facts={"plugins": ["ibext"]}),
    World("no second plug-in", files=without("nccl_spectrum-x_plugin/"), env={"HPCX_NCCLNET_PLUGIN_DIR": None}, facts={"plugins": ["ibext"]}),
    World("no ClusterKit", files=without("clusterkit/"), env={"HPCX_CLUSTERKIT_DIR": None}, begins={"PATH": "sharp/bin hcoll/bin"}),
    World("no ClusterKit for aarch64", arm=(same, without("clusterkit/")), env={"HPCX_CLUSTERKIT_DIR": None}, begins={"PATH": "sharp/bin hcoll/bin"}),
    World("another value for aarch64", arm=(variables(HPCX_UCC_DIR="ucx"), same), stops=True),
    World("no HCOLL", files=without("hcoll/"), env={"HPCX_HCOLL_DIR": None}, begins={"PATH": "sharp/bin clusterkit/bin ucc/bin"}),
    World("Open MPI 4 by default", known=lambda known: replace(known, mpi={"default": "ompi4"}), env=NEVER),
    World("an Open MPI that nobody knows", known=lambda known: replace(known, mpi={"default": "ompi6"}), env=NEVER, begins={"PATH": "sharp/bin clusterkit/bin hcoll/bin ucc/bin ucx/bin ompi/bin"}, files=lambda tree: {**tree, "ompi6/bin/mpirun": File(b"x", 0o755), "ompi6/lib/libmpi.so.60": File(b"x")}),
    World("one plug-in, and folders with versions, as in 2.15", known=lambda known: replace(lists(lambda _, parts: tuple(p for p in parts if p != "{plugin}/lib"))(variables(HPCX_NCCLNET_PLUGIN_DIR=None, HPCX_IPM_LIB="{mpi}/tests/ipm-2.0.6/lib/libipm.so", HPCX_OSU_DIR="{mpi}/tests/osu-micro-benchmarks-5.8")(known)), mpi={"default": "ompi"}, links={}), files=without("nccl_spectrum-x_plugin/", "nccl_mrc_plugin/"), env={**NEVER, "HPCX_IPM_LIB": None}, begins={"LD_LIBRARY_PATH": "nccl_rdma_sharp_plugin/lib ucc/lib/ucc"}, facts={"plugins": ["nccl_rdma_sharp_plugin"]}),
    World("Open MPI 5 alone", files=without("ompi4/", "sources/openmpi4"), env=NEVER, facts={"sources": ["openmpi5-gitclone.tar.gz", "ucx-1.22.0.tar.gz"]}),
    World("built in another folder", known=lambda known: replace(known, built_in="/build-result/src/{archive}"), facts={"built_in": ["/build-result/src/hpcx-v2.51-gcc-doca_ofed-ubuntu24.04-cuda13-x86_64"]}),
    World("built in no folder", known=lambda known: replace(known, built_in="/usr"), facts={"built_in": []}),
    World("addresses that look like the folder", files=added(README=File(b"https://content.mellanox.com/hpc/hpcx-v2.51-gcc.tbz\n")), facts={"built_in": ["/build-result/hpcx-v2.51-gcc-doca_ofed-ubuntu24.04-cuda13-x86_64"]}),
    World("no file VERSION", files=without("VERSION"), facts={"versions": {"ucx": "1"}}),
    World("a VERSION that is not UTF-8", files=added(VERSION=File(b"HPC-X v2.51\n\xff\xfe\nucx-abcdef1  1.23.0 (x)\n")), facts={"versions": {"ucx": "1.23.0"}}),
    World("licences elsewhere", files=lambda tree: without("LICENSE")({**tree, "docs/EULA.pdf": File(b"x")}), facts={"licenses": ["docs/EULA.pdf"]}),
    World("a library that nobody has", files=added(ucx__lib__ucx__libuct_new=File(elf(needed=["libnew.so.7"]))), facts={"unprovided": "libnew.so.7"}),
    World("a damaged library", files=added(ucx__lib__libdamaged=File(b"\x7fELF\x02\x01\x01" + bytes(20))), env=NEVER),
    World("a link out of the archive", files=added(ucx__etc=File(link="/etc/ucx")), env=NEVER),
    World("odd names", files=added(**{"a file\nwith \xe9": File(b"\xff/build-result/hpcx-v0")}), env=NEVER),
    World("a script that talks", files=texts("hpcx_load() {", "hpcx_load() {\n  echo Loading HPC-X; echo warning >&2", SCRIPT), env=NEVER),
    World("a script that reads what is unset", files=texts("#!/bin/bash", "set -u", SCRIPT), stops=True),
    World("a script that fails", files=texts("hpcx_load() {", "hpcx_load() {\n  exit 3", SCRIPT), stops=True),
    World("a script with another function", files=texts("hpcx_load()", "hpcx_init()", SCRIPT), stops=True),
    World("no script", files=without("hpcx-init.sh"), stops=True),
    World("a script that sets nothing", files=texts("export", "true", SCRIPT), stops=True),
    World("no UCX", files=without("ucx/"), stops=True),
    World("no UCC", files=without("ucc/"), stops=True),
    World("no SHARP", files=without("sharp/"), stops=True),
    World("no sources", files=without("sources/"), stops=True),
)  # fmt: skip


def read(world: World, unpacked: Unpacked, folder: Path) -> tuple[dict[str, str], tuple[str, ...], TreeFacts]:
    """What an image takes of the environment, what is said about that, and the facts of the archive for amd64."""
    found: dict[Arch, TreeFacts] = {}
    sides: dict[Arch, Any] = {"amd64": ("x86_64", (world.known, world.files)), "arm64": ("aarch64", world.arm)}
    for arch, (cpu, change) in sides.items():
        if change:
            which = hpcx.Distribution("ubuntu24.04", 13, cpu, world.version)
            tree = change[1](hpcx.files(change[0](hpcx.release(world.version)), which))
            found[arch] = tree_facts(run_program, hpcx.unpack(tree, folder / which.name), unpacked)
    return *unpacked.environment(found), found["amd64"]


@pytest.fixture(scope="module")
def shown(project: Project, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """What `read` returns for a release as it was published."""
    unpacked = project.components["hpcx"].model.unpacked
    return cache(lambda version: read(World("", version), cast(Unpacked, unpacked), tmp_path_factory.mktemp("shown")))


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.says)
def test_archives(world: World, project: Project, row: Row, shown: Callable[[str], Any], tmp_path: Path) -> None:
    unpacked = project.components["hpcx"].model.unpacked
    assert unpacked
    if world.stops:
        with pytest.raises(ImagebuildError) as stopped:
            read(world, unpacked, tmp_path)
        assert REMEDY.search(str(stopped.value))
        row(world.says, "stops", str(stopped.value))
        return
    env, notes, tree = read(world, unpacked, tmp_path)
    before = ((), None) if world.says.endswith("as shown") else shown(world.version)[1:]
    old: Table = {KEY: LockedArchive(sha256=A, facts=before[1])}
    changed = [
        line.split(":")[0].strip() for line in facts_changes(old, {KEY: LockedArchive(sha256=A, facts=tree)})[1:]
    ]
    if new := [note for note in notes if note not in before[0]]:
        row(world.says, "adapted", "<br>".join(new))
    else:
        row(world.says, "noted" if changed else "taken as it is", ", ".join(changed))
    facts = tree.model_dump()
    assert {name: env.get(name) for name in world.env} == world.env
    for name, folders in world.begins.items():
        assert env[name].split(":")[: len(folders.split())] == [f"{HPCX}/{folder}" for folder in folders.split()]
    assert not {
        part for part in chain.from_iterable(v.split(":") for n, v in env.items() if n.endswith("PATH")) if not part
    }
    for name, wanted in world.facts.items():
        held: Any = [plugin for _, plugin in facts[name]] if name == "plugins" else facts[name]
        match wanted:
            case str():
                assert wanted in held
            case dict():
                assert {part: held.get(part) for part in wanted} == wanted
            case _:
                assert list(held) == wanted


def test_archives_that_are_none(tmp_path: Path) -> None:
    which = hpcx.Distribution("ubuntu24.04", 13)
    whole, short = tmp_path / "whole", tmp_path / "short"
    hpcx.pack(hpcx.files(hpcx.release(hpcx.NEWEST), which), which, whole)
    hpcx.cut_short(whole, short)
    assert unpack(whole, tmp_path / "a").name == which.name
    with pytest.raises(ImagebuildError, match="expected a tar archive, but it cannot be unpacked"):
        unpack(short, tmp_path / "b")
    (tmp_path / "page").write_text("<html>")
    with pytest.raises(ImagebuildError, match="expected a tar archive"):
        unpack(tmp_path / "page", tmp_path / "c")


INDEX = "".join(
    f"Package: {name}\nVersion: {version}\nFilename: {name}.deb\n\n"
    for name, version in (
        ("libnccl2", "2.30.7-1+cuda13.3"), ("libnccl2", "2.32.3-1+cuda12.9"), ("libnccl2", "2.32.3-1+cuda13.4"), ("libxpmem0", "1"),
    )
)  # fmt: skip
WANTED = ("libnccl2=2.32.3-1+cuda13.4", "libxpmem0")
KEYRING = yaml.safe_load(packages.EVIDENCE.read_text())["keyring"]
NEXT = f"Package: {KEYRING['package']}\n"


@dataclass(frozen=True)
class Served:
    """A change of a repository that people have shown, and what becomes of the two packages that are asked for."""

    says: str
    of: str = "ubuntu2404"
    """Part of its path."""
    by: str = ""
    """The key that signs it, if it is another one than was seen."""
    keyring: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {"usr/share/keyrings/cuda-archive-keyring.gpg": tuple(KEYRING["keys"])}
    )
    """Files of the package with the repository's keys, and which these are."""
    index: Callable[[str], str] = same
    release: Callable[[str], str] = same
    gone: tuple[str, ...] = ()
    """Files that are not there; `*` stands for more letters."""
    content: Mapping[str, bytes] = field(default_factory=dict)
    known: str = ""
    """The key that the lock trusts."""
    key: str = ""
    """The key that the lock has afterwards, if it is another one than was seen."""
    lacks: str = ""
    """What is what of packages that it lacks; the others are pinned."""
    stops: str = ""


OLD, NEW = packages.REPOSITORIES[0].key, "cuda-new"
SERVED = (
    Served("24.04 as shown"),
    Served("26.04 as shown: signed by the newer of two keys", "ubuntu2604", key=NEW),
    Served("DOCA as shown", "doca/3.5.0/ubuntu24.04"),
    Served("the key has another name", gone=("3bf863cc.pub",)),
    Served("no key beside the index", gone=("*.pub", "*.gpg"), content={"Release.gpg": b""}),
    Served("signed by the next key, which the keyring has", by=NEW, key=NEW),
    Served("signed by the next key, and the lock trusts the one before", by=NEW, known=OLD, stops="is signed by the key {by}, but imagebuild.lock trusts {known}; if its owner announced the change, `imagebuild lock --update"),
    Served("signed by a key that is in no keyring", by="stranger", stops="signed by .*: the key is not in the file; the file of the key holds {known}"),
    Served("signed by a key that has expired", by="expired", keyring={"usr/share/keyrings/x.gpg": ("expired",)}, stops="the key has expired"),
    Served("the keyring has another name", keyring={"usr/share/keyrings/nvidia.asc": (OLD,)}),
    Served("the keyring is in another folder", keyring={"etc/apt/trusted.gpg.d/cuda.gpg": (OLD,)}, stops="expected a keyring in /usr/share/keyrings of the package cuda-keyring, found none"),
    Served("the package of the keyring is called otherwise", index=lambda text: text.replace(NEXT, "Package: nvidia-keyring\n"), stops="expected the package cuda-keyring, which holds the repository's key, but it has none of that name; give the component's"),
    Served("the package of the keyring is another one", content={"keyring.deb": b"!<arch>\n"}, stops="keyring.deb has another sha256 than the index of packages says"),
    Served("DOCA's keyring has another name", "doca/3.5.0/ubuntu24.04", gone=("doca_keyring.gpg",), stops="doca_keyring.gpg.*: the server does not have it .404."),
    Served("no InRelease", gone=("InRelease",)),
    Served("nothing that is signed", gone=("InRelease", "Release", "Release.gpg"), stops="Release.*: the server does not have it .404."),
    Served("a release without its signature", gone=("InRelease", "Release.gpg"), stops="Release.gpg.*: the server does not have it .404."),
    Served("a web page instead", content={"InRelease": b"<html>log in first</html>"}, stops="expected a signed InRelease, found no signature"),
    Served("another suite", gone=("*",), content={"dists/stable/InRelease": b"x"}, stops="Release.*: the server does not have it .404."),
    Served("an old copy", release=lambda text: f"Valid-Until: Wed, 01 Jan 2020 00:00:00 UTC\n{text}", stops="the release was valid until Wed, 01 Jan 2020 00:00:00 UTC, so this is an old copy"),
    Served("hashes of yesterday only", release=lambda text: text.replace("SHA256:", "SHA1:"), stops="expected in the signed release an index"),
    Served("one form of the index", gone=("Packages",)),
    Served("another form of the index", gone=("Packages.gz",)),
    Served("no index", gone=("Packages*",), stops="expected in the signed release an index with a SHA256 that the server has, found none"),
    Served("an index of another name", release=lambda text: text.replace("Packages", "Index"), stops="expected in the signed release an index"),
    Served("an index that was changed afterwards", content={"Packages": b"x", "Packages.gz": b"x"}, stops="Packages.* has the SHA256 .*, but the signed release says"),
    Served("a package is absent", index=lambda text: text.replace("Package: libxpmem0", "Package: libxpmem1"), lacks="has no package libxpmem0"),
    Served("all packages have other names", index=lambda text: re.sub("Package: lib", "Package: cu", text), lacks="has no package libnccl2; has no package libxpmem0"),
    Served("another build only", index=lambda text: text.replace("2.32.3-1+cuda13.4", "2.32.3-1+cuda13.5"), lacks="has no libnccl2 in version 2.32.3-1+cuda13.4; the newest: 2.32.3-1+cuda13.5, 2.32.3-1+cuda12.9, 2.30.7-1+cuda13.3"),
    Served("sections without a version", index=lambda text: f"Package: libnccl2\n\n{text}"),
    Served("sections without a name", index=lambda text: f"Version: 7\nFilename: x.deb\n\n{text}"),
    Served("an index with carriage returns", index=lambda text: text.replace("\n", "\r\n")),
)  # fmt: skip


@pytest.mark.parametrize("world", SERVED, ids=lambda world: world.says)
def test_repositories(world: Served, keys: Keys, row: Row, tmp_path: Path) -> None:
    shown = next(row for row in packages.REPOSITORIES if world.of in row.path)
    folder = tmp_path / shown.path
    folder.mkdir(parents=True)
    held = {name: b"".join((keys.public / f"{k}.gpg").read_bytes() for k in of) for name, of in world.keyring.items()}
    deb = package_with(held)
    (folder / "keyring.deb").write_bytes(deb)
    own = f"{NEXT}Version: {KEYRING['version']}\nFilename: ./keyring.deb\nSHA256: {hashlib.sha256(deb).hexdigest()}\n\n"
    index = world.index(INDEX + own).encode()
    indexes = {"Packages": index, "Packages.gz": gzip.compress(index)}
    lines = [f" {hashlib.sha256(data).hexdigest()} {len(data)} {name}" for name, data in indexes.items()]
    release = world.release("\n".join(["Origin: shown", "SHA256:", *lines, ""])).encode()
    signed = {"Release": release, **keys.sign(release, world.by or shown.key)}
    published = {name: (keys.public / key).read_bytes() for name, key in shown.files.items()}
    content = {name: data for name, data in {**indexes, **signed, **published}.items()
               if not any(fnmatchcase(name, pattern) for pattern in world.gone)}  # fmt: skip
    for name, data in {**content, **world.content}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    url = f"https://{shown.path}/"
    key = f"package:{KEYRING['package']}" if shown.of == "cuda" else f"{url}doca_keyring.gpg"
    source = PackageSource(url, "/", key, WANTED)
    known = LockedRepository(fingerprint=keys.fingerprint(world.known)) if world.known else None
    entries: Table = {key_of(source): known} if known else {}
    before = dict(entries)
    with Server(tmp_path).running() as server:
        mirrors = Mirrors(downloads={url: f"http://127.0.0.1:{server.port}/{shown.path}/"})
        outcome = resolve_sources(
            entries, [source], Upstream(mirrors, patience=Patience(0.1, 0.001)), keep=lambda: None, mark=False
        )
    what = " ".join([*outcome.wrong.values(), *outcome.absent.values(), *outcome.unresolved.values()])
    assert not what or REMEDY.search(outcome.complaint())
    message = re.sub(
        r"\b([0-9A-F]{16}|[0-9A-F]{40}|[0-9a-f]{64})\b| \(as http://[^)]*\)", lambda m: "…" if m[1] else "", what
    )
    message = message.removeprefix(f"{url}: ").replace(url, "ADDRESS/")
    row(world.says, "stops" if world.stops else "stops what needs it" if what else "taken as it is", message)
    if world.stops:
        by, trusted = (keys.fingerprint(key) for key in (world.by or shown.key, world.known or shown.key))
        assert re.search(world.stops.format(by=by, known=trusted), what), what
        assert entries == before
        return
    entry = entries[key_of(source)]
    assert isinstance(entry, LockedRepository), what
    assert entry.fingerprint == keys.fingerprint(world.key or shown.key)
    assert is_unresolved(lock_from_table(entries), source) == bool(world.lacks)
    absent = {package for package in WANTED if f"{package.partition('=')[0]}" in world.lacks}
    assert {package for package, version in entry.packages.items() if version == UNRESOLVED} == absent
    assert what == (f"{world.lacks}; all else of it is pinned, so pin other versions of these" if world.lacks else "")


@pytest.mark.parametrize(
    ("folders", "says"),
    [
        ("hpcx/net/lib hpcx/ucx/lib", "tool: {root}/hpcx/ucx/lib/tool"),
        ("mine hpcx/net/lib hpcx/ucx/lib", "expected it in {root}/hpcx"),
        ("hpcx/net/lib", "no folder in LD_LIBRARY_PATH has a libucp.so.0"),
    ],
    ids=["as they are", "another first", "not there"],
)
def test_what_is_found_first(folders: str, says: str, project: Project, tmp_path: Path) -> None:
    """The check of the image, with libraries that are no more than libraries; of the loader's cache nothing is tried."""
    script = (project.folder("hpcx") / "checks" / "first-found.sh").read_text()
    library = next(Path("/lib", platform.machine() + "-linux-gnu").glob("libm.so.*"))
    for name in ("hpcx/net/lib/libnccl-net.so", "hpcx/ucx/lib/libucp.so.0", "mine/libucp.so.0", "hpcx/ucx/lib/tool"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, tmp_path / name)
        (tmp_path / name).chmod(0o755)
    script = script.replace("/opt/hpcx", f"{tmp_path}/hpcx").replace(" -u LD_LIBRARY_PATH", "")
    env = {
        "PATH": f"{tmp_path}/hpcx/ucx/lib:/usr/bin:/bin", "NAMES": "libnccl-net.so libucp.so.0", "PROGRAMS": "tool",
        "LD_LIBRARY_PATH": ":".join(f"{tmp_path}/{folder}" for folder in folders.split()),
    }  # fmt: skip
    done = ran("bash", "-euo", "pipefail", "-c", script, env=env, stderr=subprocess.STDOUT)
    assert says.format(root=tmp_path) in done.stdout
    assert done.returncode == (0 if says.startswith("tool") else 1)


CUDA = bases.Cuda("13.2.1", "ubuntu24.04", "13.0", "2.28.9-1+cuda13.0")
HOLD = "RUN /bin/sh -c apt-mark hold ${NV_LIBCUBLAS_PACKAGE_NAME} ${NV_LIBNCCL_PACKAGE_NAME} # buildkit"


@pytest.mark.parametrize(
    ("change", "nccl", "held"),
    [
        ({}, "2.28.9-1+cuda13.0", ("libcublas-13-2", "libnccl2")),
        ({"NV_LIBNCCL_PACKAGE": None}, "2.28.9-1", ("libcublas-13-2", "libnccl2")),
        ({"NV_LIBNCCL_PACKAGE": None, "NCCL_VERSION": None, "NV_LIBNCCL_PACKAGE_NAME": None}, "", ("libcublas-13-2",)),
        ({"NV_LIBCUBLAS_PACKAGE_NAME": None}, "2.28.9-1+cuda13.0", ("libnccl2",)),
    ],
    ids=["as shown", "no package of NCCL", "no NCCL", "no cuBLAS"],
)
def test_images(change: dict[str, str | None], nccl: str, held: tuple[str, ...]) -> None:
    env = {name: value for name, value in {**CUDA.environment("runtime"), **change}.items() if value is not None}
    config = {"config": {"Env": [f"{n}={v}" for n, v in env.items()]}, "history": [{"created_by": HOLD}, {}]}
    facts = image_facts(config)
    assert (facts.nccl, facts.held, facts.environment) == (nccl, held, env)
    assert image_facts({"config": None}).held == ()
    with pytest.raises(ImagebuildError, match="cannot be read"):
        image_facts({"config": {"Env": [1]}})
