"""Tables of files in layers that say something else than the archive."""

from __future__ import annotations

import copy
import gzip
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from imagebuild.core.errors import ResultError
from imagebuild.oci.layout import Blob
from imagebuild.verify.tables import DIGEST, TABLE, check_tables
from tests.unit import image_files
from tests.unit.image_files import Node, folder, hardlink, layer, symlink

CHUNK = 4 << 20
BIG = b"x" * (CHUNK + 5)
CAPABLE = {"SCHILY.xattr.security.capability": "x"}
FILES: image_files.Files = {
    "a/": folder(), "a/tool": Node(b"good", 0o755), "empty": b"", "big": BIG, "link": symlink("../a"),
    "hard": hardlink("big"), "ping": Node(b"ping", pax=CAPABLE),
}  # fmt: skip


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def regular(name: str, data: bytes, mode: int = 0o644, **more: Any) -> dict[str, Any]:
    sums = {"digest": digest(data), "chunkDigest": digest(data[:CHUNK])}
    return {"name": name, "type": "reg", "mode": mode, "size": len(data), "offset": 9, **sums, **more}


ROWS: list[dict[str, Any]] = [
    {"name": "a/", "type": "dir", "mode": 0o755, "modtime": "2025-08-09T00:00:00Z"},
    regular("a/tool", b"good", 0o755),
    {"name": "empty", "type": "reg", "mode": 0o644, "digest": digest(b"")},
    regular("big", BIG, chunkSize=CHUNK),
    {"name": "big", "type": "chunk", "offset": 99, "chunkOffset": CHUNK, "chunkDigest": digest(BIG[CHUNK:])},
    {"name": "link", "type": "symlink", "mode": 0o777, "linkName": "../a"},
    {"name": "hard", "type": "hardlink", "mode": 0o644, "linkName": "big"},
    regular("ping", b"ping", xattrs={"security.capability": "eA=="}),
]
"""The table as stargz-snapshotter's library writes it."""
LIES: dict[str, Callable[[list[dict[str, Any]]], object]] = {
    "content": lambda rows: rows[1].update(chunkDigest=digest(b"evil")),
    "mode": lambda rows: rows[1].update(mode=0o4755),
    "key that Go reads as mode": lambda rows: rows[1].update(Mode=0o4755),
    "owner": lambda rows: rows[1].update(uid=1),
    "order of chunks": lambda rows: rows[4].update(chunkOffset=0),
    "target": lambda rows: rows[5].update(linkName="/evil"),
    "capabilities": lambda rows: rows[1].update(xattrs={"security.capability": "eA=="}),
    "attribute": lambda rows: rows[7]["xattrs"].update({"trusted.overlay.opaque": "eQ=="}),
    "more": lambda rows: rows.append(regular("etc/ld.so.preload", b"evil")),
    "twice": lambda rows: rows.append(rows[1]),
    "less": lambda rows: rows.pop(),
    "path": lambda rows: rows[1].update(name="../evil"),
    "no row": lambda rows: rows.append([]),  # type: ignore[arg-type]
}


def check(folder: Path, rows: object, **annotations: str) -> None:
    """Check a layer that has its table behind the end of the archive, as BuildKit writes it."""
    table, stored = json.dumps({"version": 1, "entries": rows}).encode(), gzip.compress(layer(FILES))
    footer = bytes.fromhex("1f8b08040000000000ff1a0053471600") + b"%016xSTARGZ" % len(stored) + b"\1\0\0\xff\xff"
    data = stored + gzip.compress(layer({TABLE: table})) + footer + bytes(8)
    (folder / "layer").write_bytes(data)
    blob = Blob(folder / "layer", len(data), digest(data), annotations={DIGEST: digest(table), **annotations})
    image: Any = SimpleNamespace(name="image", layers=(Blob(Path("/none"), 1), blob), fetch=lambda layer: layer)
    check_tables(image)


def test_a_table_that_is_right(tmp_path: Path) -> None:
    check(tmp_path, ROWS)


@pytest.mark.parametrize("lie", LIES)
def test_a_table_that_lies(tmp_path: Path, lie: str) -> None:
    LIES[lie](rows := copy.deepcopy(ROWS))
    with pytest.raises(ResultError, match="its table of files (differs|cannot be read)"):
        check(tmp_path, rows)


def test_tables_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match="it does not contain the table sha256:0"):
        check(tmp_path, ROWS, **{DIGEST: "sha256:0"})
    with pytest.raises(ResultError, match="zstd-chunked"):
        check(tmp_path, ROWS, **{"io.github.containers.zstd-chunked.manifest-checksum": "x"})
