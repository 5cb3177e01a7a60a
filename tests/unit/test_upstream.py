"""The stand-in's server keeps to its folder, its facts say where they were seen, and its archives are those of others."""

from __future__ import annotations

import http.client
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT
from tests.upstream import bases, hpcx, packages
from tests.upstream.server import Server

PATH = "/example.org/folder/file"
EVIDENCE = sorted(hpcx.EVIDENCE.glob("*.yaml"))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    file = tmp_path / "root" / PATH.lstrip("/")
    file.parent.mkdir(parents=True)
    file.write_bytes(b"0123456789")
    (tmp_path / "secret").write_text("not served")
    with Server(tmp_path / "root").running() as running:
        yield running


def get(server: Server, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize("path", ["/../secret", "/example.org/%2e%2e/%2e%2e/secret"])
def test_serves_nothing_outside(server: Server, path: str) -> None:
    assert (get(server, PATH), get(server, path)) == (200, 404)


def places(data: Any) -> Iterator[str]:
    if isinstance(data, dict):
        if "seen" in data:
            yield data["seen"]
        for value in data.values():
            yield from places(value)
    elif isinstance(data, list):
        for value in data:
            yield from places(value)


@pytest.mark.parametrize("file", EVIDENCE, ids=lambda file: file.stem)
def test_each_fact_names_where_it_was_seen(file: Path) -> None:
    data = yaml.safe_load(file.read_text())
    where = data.pop("where")
    assert set(places(data)) == set(where)
    assert all(
        "https://" in text or "public code search" in text or ".yaml" in text or "issue" in text
        for text in where.values()
    )
    untold = [
        name for name, value in data.items() if not list(places(value)) and name not in ("version", "like", "images")
    ]
    assert not untold, "facts without a place"


def lines_of(path: Path) -> list[str]:
    """Lines that say something, without what differs between files of the same content."""
    lines = (re.sub(r"[\s\"',\[\]{}]|/opt/hpcx/", "", line) for line in path.read_text().splitlines())
    return [line for line in lines if len(line) > 3 and not line.startswith("#")]


def test_no_table_is_ours() -> None:
    """Five lines that follow each other in what we declare follow each other in no part of the stand-in."""
    ours = [*ROOT.glob("dockerfiles/**/*.yaml"), *ROOT.glob("dockerfiles/**/*.j2"), ROOT / "imagebuild.lock"]
    runs = {tuple(lines[i : i + 5]) for lines in map(lines_of, ours) for i in range(len(lines) - 4)}
    folder = ROOT / "tests" / "upstream"
    for file in [*EVIDENCE, *folder.glob("recipes/*.Dockerfile"), *folder.glob("recipes/*/*.sh")]:
        lines = lines_of(file)
        copied = [run for i in range(len(lines) - 4) if (run := tuple(lines[i : i + 5])) in runs]
        assert not copied, file


WHICH = hpcx.Distribution("ubuntu24.04", 13)


@pytest.mark.parametrize("version", hpcx.VERSIONS)
def test_archives(version: str, tmp_path: Path) -> None:
    """One top folder, foreign owners, the vendor's place of building in text files, the same bytes each time."""
    which = hpcx.Distribution("ubuntu24.04", 13, version=version)
    known = hpcx.release(version)
    for name in ("a", "b"):
        hpcx.pack(hpcx.files(known, which), which, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    with tarfile.open(tmp_path / "a") as opened:
        entries = opened.getmembers()
        assert {entry.name.split("/")[0] for entry in entries} == {which.name}
        assert {(entry.uid, entry.gid) for entry in entries} == {(hpcx.OWNER, hpcx.OWNER)}
        library = opened.extractfile(f"{which.name}/ucx/lib/libucs.la")
        assert library
        assert f"libdir='/build-result/{which.name}/ucx/lib'\n" in library.read().decode()
    hpcx.cut_short(tmp_path / "a", tmp_path / "short")
    with pytest.raises((EOFError, tarfile.ReadError)), tarfile.open(tmp_path / "short") as opened:
        opened.getmembers()


def test_compiled_parts_take_the_place_of_shells(tmp_path: Path) -> None:
    made = {
        "all/ucx/lib/pkgconfig/ucx.pc": b"prefix=@PREFIX@/ucx\n",
        "stubs/ucc/lib/libucc.so.1.0.0": b"\x7fELF of stubs",
        "stubs/nccl_other_plugin/lib/libnccl-net.so": b"\x7fELF of another release",
        "stubs-cuda12/hcoll/lib/libhcoll.so.1": b"\x7fELF twelve",
        "stubs-cuda13/hcoll/lib/libhcoll.so.1": b"\x7fELF thirteen",
    }
    for name, data in made.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    known = hpcx.release(hpcx.NEWEST)
    plain = hpcx.files(known, WHICH)
    tree = hpcx.content(plain, tmp_path, None, WHICH, known)
    assert set(tree) - set(plain) == set()
    assert tree["hcoll/lib/libhcoll.so.1"].content == b"\x7fELF thirteen"
    assert tree["ucx/lib/pkgconfig/ucx.pc"].content == f"prefix=/build-result/{WHICH.name}/ucx\n".encode()
    arm = hpcx.Distribution("ubuntu24.04", 13, "aarch64")
    assert hpcx.content(hpcx.files(known, arm), tmp_path, None, arm, known) == hpcx.files(known, arm)


def test_images_and_repositories_have_what_others_saw() -> None:
    wanted = bases.images(["12.9.1-ubuntu22.04", "13.2.1-ubuntu24.04"])
    assert len(wanted) == 7  # two Ubuntus, two of each CUDA, and the oldest to compile on
    cuda = wanted["nvidia/cuda:13.2.1-devel-ubuntu24.04"][2]
    assert cuda
    assert cuda.environment("devel")["NV_LIBNCCL_PACKAGE"] == f"libnccl2={cuda.nccl}"
    assert "LIBRARY_PATH" not in cuda.environment("runtime")
    assert cuda.held("devel") == ["libcublas-13-2", "libnccl2", "libcublas-dev-13-2", "libnccl-dev"]
    signed = {repository.path: repository.key for repository in packages.REPOSITORIES}
    assert len(set(signed.values())) == 3
