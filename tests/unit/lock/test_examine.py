"""What the servers of a target say before anything is built: `imagebuild doctor --upstream`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from imagebuild.core import Absent, Mirrors, Patience
from imagebuild.lock import LockFile, PackageIndex, examine_upstream
from imagebuild.project import (
    Archive,
    BaseImage,
    Entry,
    LockedArchive,
    LockedImage,
    LockedRepository,
    PackageSource,
    Source,
    key_of,
)
from tests.unit.lock.lock_fakes import KEY, OTHER, A, B, Fake
from tests.upstream.server import Server

URL = "https://content.example/x.tbz"
ARCHIVE = Archive("hpcx", URL)
PACKAGES = PackageSource("https://packages.example/", "/", "https://packages.example/key", ("a", "b=2"))
IMAGE = BaseImage("nvidia/cuda:1")
NOW = LockedImage(digest=f"sha256:{A}", platforms={"linux/amd64": f"sha256:{B}"})
LOCKED: dict[Any, Entry] = {
    ARCHIVE: LockedArchive(sha256=A, size=10), IMAGE: NOW,
    PACKAGES: LockedRepository(fingerprint=KEY, packages={"a": "1", "b=2": "2"}),
}  # fmt: skip
INDEX = PackageIndex((KEY,), {"a": ["1", "3"], "b": ["2"]})
MOVED = NOW.model_copy(update={"digest": f"sha256:{B}"})
STATES: dict[str, list[tuple[Source, dict[str, Any], str]]] = {
    "as locked": [
        (ARCHIVE, {}, "0.0 MB"),
        (PACKAGES, {}, f"signed by {KEY}; a 1, b 2"),
        (IMAGE, {}, f"sha256:{A[:12]}"),
        (IMAGE, {"now": MOVED, "digests": {NOW.digest}}, "the pinned sha256:aaaaaaaaaaaa is still there"),
    ],
    "not locked": [
        (ARCHIVE, {"locked": None}, "0.0 MB"),
        (PACKAGES, {"locked": "unresolved"}, f"signed by {KEY}; a 3, b 2"),
        (IMAGE, {"locked": "unresolved"}, f"sha256:{A[:12]}"),
    ],
    "changed": [
        (ARCHIVE, {"size": 12}, "has 12 bytes, but the lock says 10"),
        (PACKAGES, {"index": PackageIndex((OTHER,), INDEX.versions)}, f"signed by the key {OTHER}, but imagebuild.lock trusts {KEY}"),
        (PACKAGES, {"index": PackageIndex((KEY,), {"b": ["1"]})}, "has no package a; has no b in version 2; the newest: 1"),
        (IMAGE, {"platforms": ("linux/amd64", "linux/arm64")}, "is for linux/amd64, not for linux/arm64"),
        (IMAGE, {"locked": None, "platforms": ("linux/amd64", "linux/arm64")}, "is for linux/amd64, not for linux/arm64"),
    ],
    "gone": [
        (ARCHIVE, {"status": 404}, "the server does not have it (404)"),
        (ARCHIVE, {"status": 404, "locked": None}, "the lock has no pin of it either"),
        (IMAGE, {"now": Absent("x: the registry does not have it")}, "the tag is gone, and the pinned"),
    ],
    "no answer": [
        (ARCHIVE, {"status": 503}, "503"),
        (ARCHIVE, {"offline": True}, "Connection refused"),
        (PACKAGES, {"index": None}, "down"),
        (IMAGE, {"now": None}, "down"),
    ],
}  # fmt: skip
ROWS = [(state, *row) for state, rows in STATES.items() for row in rows]


@pytest.mark.parametrize(("state", "source", "world", "found"), ROWS, ids=[f"{r[0]}-{i}" for i, r in enumerate(ROWS)])
def test_a_source(state: str, source: Source, world: dict[str, Any], found: str, tmp_path: Path) -> None:
    (tmp_path / "x.tbz").write_bytes(b"x" * world.get("size", 10))
    entry = world.get("locked", LOCKED[source])
    now = world.get("now", LOCKED[source])
    with Server(tmp_path).running() as server:
        if status := world.get("status"):
            server.fail("/", status, times=9999)
        port = 1 if world.get("offline") else server.port
        upstream = Fake(
            Mirrors(downloads={"https://content.example/": f"http://127.0.0.1:{port}/"}), patience=Patience(0.1, 0.001),
            answers={key_of(source): now} if now is not None else {},
            indexes={PACKAGES.url: index} if (index := world.get("index", INDEX)) else {},
            digests=frozenset(world.get("digests", ())),
        )  # fmt: skip
        targets = (SimpleNamespace(id="hpcx-a", platforms=world.get("platforms", ("linux/amd64",))),)
        entries = {key_of(source): entry} if entry is not None else {}
        lock = SimpleNamespace(entries=entries, sources=(source,), targets=targets, platforms=())
        report = examine_upstream(cast(LockFile, lock), upstream, "1")
        assert {request.method for request in server.requests} <= {"HEAD"}
    (answer,) = report.sources
    assert answer.state == state
    assert found in answer.found
    assert bool(answer.locked) == (entry is not None)
    assert bool(answer.consequence) == (state != "as locked")
    assert state != "changed" or f"`imagebuild lock --update {key_of(source)[1]}`" in answer.consequence
    assert report.exit_status == {"as locked": 0, "no answer": 4}.get(state, 1)
