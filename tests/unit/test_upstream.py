"""The stand-in's server keeps to its folder, and its archives have the faults that a test asks for."""

from __future__ import annotations

import http.client
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.upstream import hpcx
from tests.upstream.hpcx import Distribution
from tests.upstream.server import Server

PATH = "/example.org/folder/file"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    file = tmp_path / "root" / PATH.lstrip("/")
    file.parent.mkdir(parents=True)
    file.write_bytes(b"0123456789")
    (tmp_path / "secret").write_text("not served")
    with Server(tmp_path / "root").running() as running:
        yield running


def get(server: Server, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize("path", ["/../secret", "/example.org/%2e%2e/%2e%2e/secret"])
def test_serves_nothing_outside(server: Server, path: str) -> None:
    assert (get(server, PATH), get(server, path)) == (200, 404)


@pytest.fixture
def content(tmp_path: Path) -> Path:
    files = {
        "all/clusterkit/bin/clusterkit": b"#!/bin/sh\n",
        "all/sources/openmpi5-gitclone.tar.gz": b"sources",
        "all/ucx/lib/libucs.la": b"libdir='@PREFIX@/ucx/lib'\n",
        "all/ucx/lib/libucs.so.0": b"\x7fELF @PREFIX@",
        "cuda12/hcoll/lib/libhcoll.so.1": b"\x7fELF twelve",
        "cuda13/hcoll/lib/libhcoll.so.1": b"\x7fELF thirteen",
    }
    for name, data in files.items():
        path = tmp_path / "content" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (tmp_path / "content" / "all" / "ompi").symlink_to("ompi5")
    return tmp_path / "content"


def members(archive: Path) -> dict[str, bytes]:
    """Path behind the top folder → content."""
    with tarfile.open(archive) as opened:
        names = [m for m in opened.getmembers() if m.isfile()]
        return {m.name.partition("/")[2]: opened.extractfile(m).read() for m in names}  # type: ignore[union-attr]


AMD64, ARM64 = Distribution("ubuntu24.04", 13), Distribution("ubuntu24.04", 13, "aarch64")


def test_archives_have_one_top_folder_and_foreign_owners(content: Path, tmp_path: Path) -> None:
    archive = tmp_path / "a.tbz"
    hpcx.pack(content, AMD64, archive)
    with tarfile.open(archive) as opened:
        entries = opened.getmembers()
        assert {entry.name.split("/")[0] for entry in entries} == {AMD64.name}
        assert {(entry.uid, entry.gid) for entry in entries} == {(hpcx.OWNER, hpcx.OWNER)}
        assert opened.getmember(f"{AMD64.name}/ompi").linkname == "ompi5"
    found = members(archive)
    assert found["ucx/lib/libucs.la"].endswith(f"libdir='/build-result/{AMD64.name}/ucx/lib'\n".encode())
    assert found["ucx/lib/libucs.so.0"] == b"\x7fELF @PREFIX@"
    assert found["hcoll/lib/libhcoll.so.1"].endswith(b"thirteen")


def test_archives_are_the_same_each_time(content: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        hpcx.pack(content, AMD64, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_variants(content: Path, tmp_path: Path) -> None:
    hpcx.pack(content, ARM64, tmp_path / "arm", change=hpcx.without("clusterkit"))
    found = members(tmp_path / "arm")
    assert "hpcx-init.sh" in found
    assert not [name for name, data in found.items() if name.startswith("clusterkit/") or data.startswith(b"\x7fELF")]

    hpcx.pack(content, AMD64, tmp_path / "misspelt", change=hpcx.misspelt)
    left = members(tmp_path / "misspelt")["ucx/lib/libucs.la"]
    assert b"/build-result/" in left
    assert AMD64.name.encode() not in left

    hpcx.pack(content, AMD64, tmp_path / "other", cuda=12)
    assert members(tmp_path / "other")["hcoll/lib/libhcoll.so.1"].endswith(b"twelve")

    hpcx.cut_short(tmp_path / "other", tmp_path / "short")
    with pytest.raises((EOFError, tarfile.ReadError)):
        members(tmp_path / "short")
