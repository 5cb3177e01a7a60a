"""Layers are read completely or with an error, by one process or several."""

from __future__ import annotations

import gzip
import hashlib
import random
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import zstandard

from imagebuild.core.errors import ResultError
from imagebuild.oci.image import images_in
from imagebuild.oci.layout import Blob
from imagebuild.verify import layers
from imagebuild.verify.layers import scan, scan_all
from tests.handmade import CASES, layers_of, tree_of
from tests.unit import image_files
from tests.unit.image_files import Layout, layer


@pytest.mark.parametrize("size", [0, 5, 100, 10_000])
def test_a_layer_that_is_cut_is_an_error(tmp_path: Path, size: int) -> None:
    whole = layer({"file": random.Random(1).randbytes(100_000)})
    for data in (whole, gzip.compress(whole, 0), zstandard.compress(whole, 1)):
        (tmp_path / "layer").write_bytes(data[:size])
        blob = Blob(tmp_path / "layer", size, f"sha256:{hashlib.sha256(data).hexdigest()}")
        with pytest.raises(ResultError, match=r"cannot be read|is damaged"):
            scan(blob)


def test_a_layer_that_makes_no_sense_is_an_error_and_no_crash(tmp_path: Path) -> None:
    files: image_files.Files = {
        "a": b"x" * 2000,
        "b" * 200: image_files.Node(b"y", pax={"SCHILY.xattr.security.capability": "x"}),
    }
    whole = layer({**files, "c": image_files.symlink("d" * 150), "e": image_files.folder()})
    chance = random.Random(1)
    refused = 0
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(chance.randrange(1, 20)):
            data[chance.randrange(6000)] = chance.randrange(256)
        (tmp_path / "layer").write_bytes(data)
        try:
            scan(Blob(tmp_path / "layer", len(data)))
        except ResultError:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_handmade_layers(tmp_path: Path, case: Mapping[str, Any]) -> None:
    """The table contains what containerd unpacks. The docker suite proves it."""
    if "tree" in case:
        assert tree_of(layers_of(case), tmp_path) == case["tree"]
    else:
        with pytest.raises(ResultError, match=re.escape(case["refused"])):
            tree_of(layers_of(case), tmp_path)


@pytest.mark.parametrize("start", [b"CERTIFICATE-----", b"PRIVATE " + b"KEY-----"])
def test_a_long_hostile_file_is_soon_searched(start: bytes) -> None:
    began = time.process_time()
    assert layers.search([b"-----BEGIN " + start + b"\n" * 50_000], settings=True) == (set(), set())
    assert time.process_time() - began < 5


def test_processes_read_what_one_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "WORTH_A_PROCESS", 0)
    made = Layout(tmp_path / "x")
    made.image([layer({f"file{i}": bytes(i)}) for i in range(5)])
    (image,) = images_in(made.root, tmp_path)
    assert [entry.path for found in scan_all(image.layers, 2) for entry in found.entries] == [
        f"file{i}" for i in range(5)
    ]
    digest = image.layers[3].digest
    assert digest
    (made.root / "blobs/sha256" / digest.removeprefix("sha256:")).write_bytes(layer({"other": b""}))
    with pytest.raises(ResultError, match="is damaged"):
        scan_all(image.layers, 2)
