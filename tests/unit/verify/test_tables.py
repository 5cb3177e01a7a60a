"""Tables of files in layers that say something else than the archive."""

from __future__ import annotations

import copy
import gzip
import hashlib
import json
import tarfile
from collections.abc import Mapping, Sequence
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


TYPES = {"reg": tarfile.REGTYPE, "dir": tarfile.DIRTYPE, "symlink": tarfile.SYMTYPE, "hardlink": tarfile.LNKTYPE}


def check(
    place: Path, rows: object, files: image_files.Files = FILES, more: Mapping[str, object] | None = None,
    of_image: Mapping[str, str] | None = None, of_layer: Mapping[str, str] | None = None,
) -> None:  # fmt: skip
    """Check a layer that has its table behind the end of the archive, as BuildKit writes it."""
    table, stored = json.dumps({"version": 1, "entries": rows, **(more or {})}).encode(), gzip.compress(layer(files))
    footer = bytes.fromhex("1f8b08040000000000ff1a0053471600") + b"%016xSTARGZ" % len(stored) + b"\1\0\0\xff\xff"
    content = stored + gzip.compress(layer({TABLE: table})) + footer + bytes(8)
    (place / "layer").write_bytes(content)
    blob = Blob(place / "layer", len(content), digest(content), annotations={DIGEST: digest(table), **(of_layer or {})})
    image: Any = SimpleNamespace(
        name="image", layers=(Blob(Path("/none"), 1), blob), fetch=lambda blob: blob,
        manifest=SimpleNamespace(document={"annotations": of_image}),
    )  # fmt: skip
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


@pytest.mark.parametrize("meaning", TABLES["meanings"])
def test_an_archive_that_means_other_files_than_the_same_rows(tmp_path: Path, meaning: str) -> None:
    rows: Sequence[Any] = TABLES["meanings"][meaning]
    files = {row["name"]: Node(b"", row["mode"], TYPES[row["type"]], row.get("linkName", "")) for row in rows}
    with pytest.raises(ResultError, match=meaning):
        check(tmp_path, rows, files)


def test_tables_that_cannot_be_read(tmp_path: Path) -> None:
    chunked = [f"io.{maker}.zstd-chunked.manifest-checksum" for maker in ("containers", "github.containers")]
    for name in (DIGEST, *chunked):
        problem = "does not contain the table x" if name == DIGEST else f"annotation {name} is of a table"
        with pytest.raises(ResultError, match=problem):
            check(tmp_path, TABLES["rows"], of_layer={name: "x"})
    with pytest.raises(ResultError, match="it contains 'Entries'"):
        check(tmp_path, TABLES["rows"], more={"Entries": []})
    with pytest.raises(ResultError, match=r"annotation com\.amazon\.soci\.index-digest is of a table"):
        check(tmp_path, TABLES["rows"], of_image={"com.amazon.soci.index-digest": "sha256:0"})
