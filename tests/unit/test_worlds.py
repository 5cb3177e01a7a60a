"""Worlds that differ from what was published: what is adapted, what is noted, and what stops, with which sentence.

Each row changes the stand-in of tests/upstream, which was made from others' evidence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from imagebuild.core import ImagebuildError, run_program
from imagebuild.lock import image_facts, tree_facts, unpack
from imagebuild.project import Project
from tests.unit.image_files import elf
from tests.upstream import bases, hpcx
from tests.upstream.hpcx import File, Release, Tree

pytestmark = pytest.mark.programs
Known = Callable[[Release], Release]
Files = Callable[[Tree], Tree]
HPCX = "/opt/hpcx"


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
    notes: str = ""
    stops: str = ""


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
        begins={"PATH": "ompi/bin clusterkit/bin sharp/bin", "LD_LIBRARY_PATH": "nccl_rdma_sharp_plugin/lib nccl_spectrum-x_plugin/lib ompi/lib"},
        notes="PATH: /opt/hpcx/ompi/tests/imb is not in the image",
    ),
    World(
        "2.24.1 as shown", "2.24.1", env={**NEVER, "HPCX_NCCLNET_PLUGIN_DIR": f"{HPCX}/ncclnet_plugin"},
        facts={"unprovided": "libfuse3.so.3", "versions": {"ucc": "1.5.0", "ucx": "1.20.0"}},
    ),
    World(
        "lists in another order", known=lists(lambda _, parts: tuple(reversed(parts))),
        begins={"CPATH": "hcoll/include sharp/include ucx/include", "PKG_CONFIG_PATH": "ompi/lib/pkgconfig ucx/lib/pkgconfig"},
    ),
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
    World("PMIx by another variable", known=variables(PMIX_PREFIX="{mpi}"), env={"PMIX_PREFIX": None}, notes="PMIX_PREFIX: no image has it"),
    World("the plug-in for MRC", known=lambda known: replace(known, plugin={"default": "nccl_mrc_plugin"}), env={"HPCX_NCCLNET_PLUGIN_DIR": f"{HPCX}/nccl_mrc_plugin"}, facts={"plugins": ["ibext"]}),
    World("no second plug-in", files=without("nccl_spectrum-x_plugin/"), env={"HPCX_NCCLNET_PLUGIN_DIR": None}, facts={"plugins": ["ibext"]}, notes="nccl_spectrum-x_plugin is not in the image"),
    World("no ClusterKit", files=without("clusterkit/"), env={"HPCX_CLUSTERKIT_DIR": None}, begins={"PATH": "sharp/bin hcoll/bin"}, notes="PATH: /opt/hpcx/clusterkit/bin is not in the image"),
    World("no ClusterKit for aarch64", arm=(same, without("clusterkit/")), env={"HPCX_CLUSTERKIT_DIR": None}, begins={"PATH": "sharp/bin hcoll/bin"}, notes="HPCX_CLUSTERKIT_DIR: only the archive for amd64 has it"),
    World("another value for aarch64", arm=(variables(HPCX_UCC_DIR="ucx"), same), stops="HPCX_UCC_DIR: expected one value for all architectures"),
    World("no HCOLL", files=without("hcoll/"), env={"HPCX_HCOLL_DIR": None}, begins={"PATH": "sharp/bin clusterkit/bin ucc/bin"}, notes="hcoll/lib is not in the image"),
    World("Open MPI 4 by default", known=lambda known: replace(known, mpi={"default": "ompi4"}), env=NEVER),
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
    World("a script that reads what is unset", files=texts("#!/bin/bash", "set -u", SCRIPT), stops="expected a script that sets its environment .*unbound variable"),
    World("a script that fails", files=texts("hpcx_load() {", "hpcx_load() {\n  exit 3", SCRIPT), stops="expected a script that sets its environment"),
    World("a script with another function", files=texts("hpcx_load()", "hpcx_init()", SCRIPT), stops="hpcx_load: command not found"),
    World("no script", files=without("hpcx-init.sh"), stops="hpcx-init.sh: No such file"),
    World("a script that sets nothing", files=texts("export", "true", SCRIPT), stops="expected PATH and LD_LIBRARY_PATH"),
    World("no UCX", files=without("ucx/"), stops="expected ucx/lib/libucp.* in the archive, which the image needs, found .*ucc"),
    World("no UCC", files=without("ucc/"), stops="expected ucc/lib/libucc"),
    World("no SHARP", files=without("sharp/"), stops="expected sharp/lib"),
    World("no sources", files=without("sources/"), stops="expected sources/openmpi"),
)  # fmt: skip


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.says)
def test_archives(world: World, project: Project, tmp_path: Path) -> None:
    unpacked = project.components["hpcx"].model.unpacked
    assert unpacked

    def read() -> tuple[dict[str, str], tuple[str, ...], dict[str, Any]]:
        found = {}
        sides = {"amd64": ("x86_64", (world.known, world.files)), "arm64": ("aarch64", world.arm)}
        for arch, (cpu, change) in sides.items():
            if change:
                which = hpcx.Distribution("ubuntu24.04", 13, cpu, world.version)
                tree = change[1](hpcx.files(change[0](hpcx.release(world.version)), which))
                found[arch] = tree_facts(run_program, hpcx.unpack(tree, tmp_path / which.name), unpacked)
        env, notes = unpacked.environment(found)  # type: ignore[arg-type]
        return env, notes, found["amd64"].model_dump()

    if world.stops:
        with pytest.raises(ImagebuildError, match=world.stops) as stopped:
            read()
        assert "\n" not in str(stopped.value)
        return
    env, notes, facts = read()
    assert {name: env.get(name) for name in world.env} == world.env
    for name, folders in world.begins.items():
        assert env[name].split(":")[: len(folders.split())] == [f"{HPCX}/{folder}" for folder in folders.split()]
    assert not {
        part for part in chain.from_iterable(v.split(":") for n, v in env.items() if n.endswith("PATH")) if not part
    }
    assert any(world.notes in note for note in notes), notes
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
