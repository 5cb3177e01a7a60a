"""Tables of files in layers that say something else than the archive."""

from __future__ import annotations

import copy
import gzip
import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from imagebuild.core.errors import ResultError
from imagebuild.oci.layout import Blob
from imagebuild.verify.tables import DIGEST, TABLE, check_tables
from tests.conftest import data
from tests.unit import image_files
from tests.unit.image_files import Node, folder, hardlink, layer, symlink

TABLES = data("tables")
FILES: image_files.Files = {
    "a/": folder(), "a/tool": Node(b"good", 0o755), "empty": b"", "big": b"x" * ((4 << 20) + 5), "link": symlink("../a"),
    "hard": hardlink("big"), "ping": Node(b"ping", pax={"SCHILY.xattr.security.capability": "x"}),
}  # fmt: skip


def digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def check(place: Path, rows: object, **annotations: str) -> None:
    """Check a layer that has its table behind the end of the archive, as BuildKit writes it."""
    table, stored = json.dumps({"version": 1, "entries": rows}).encode(), gzip.compress(layer(FILES))
    footer = bytes.fromhex("1f8b08040000000000ff1a0053471600") + b"%016xSTARGZ" % len(stored) + b"\1\0\0\xff\xff"
    content = stored + gzip.compress(layer({TABLE: table})) + footer + bytes(8)
    (place / "layer").write_bytes(content)
    blob = Blob(place / "layer", len(content), digest(content), annotations={DIGEST: digest(table), **annotations})
    image: Any = SimpleNamespace(name="image", layers=(Blob(Path("/none"), 1), blob), fetch=lambda blob: blob)
    check_tables(image)


def test_a_table_that_is_right(tmp_path: Path) -> None:
    check(tmp_path, TABLES["rows"])


@pytest.mark.parametrize("lie", TABLES["lies"])
def test_a_table_that_lies(tmp_path: Path, lie: str) -> None:
    number, changes = TABLES["lies"][lie]
    rows = [*copy.deepcopy(TABLES["rows"]), {}]
    rows[number] = {**rows[number], **changes} if changes else changes
    with pytest.raises(ResultError, match="its table of files (differs|cannot be read)"):
        check(tmp_path, [row for row in rows if row not in ({}, None)])


def test_tables_that_cannot_be_read(tmp_path: Path) -> None:
    for name, value in ((DIGEST, "sha256:0"), ("io.github.containers.zstd-chunked.manifest-checksum", "x")):
        with pytest.raises(ResultError, match=r"does not contain the table sha256:0|annotation io\.github\.containers"):
            check(tmp_path, TABLES["rows"], **{name: value})
