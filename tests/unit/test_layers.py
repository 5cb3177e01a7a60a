"""Layers are read one by one, so that nothing hides below another."""

from __future__ import annotations

import gzip
import io
import tarfile

import pytest

from imagebuild import layers
from imagebuild.errors import ResultError


def tar(**content: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in content.items():
            info = tarfile.TarInfo(name.replace("__", "/"))
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def chunks(data: bytes, size: int = 777) -> list[bytes]:
    return [data[i : i + size] for i in range(0, len(data), size)]


def test_a_key_that_a_later_layer_removes_is_found() -> None:
    lower = tar(etc__ssh__ssh_host_rsa_key=b"secret" * 1000, etc__hosts=b"")
    upper = tar(**{"etc__ssh__.wh.ssh_host_rsa_key": b""})
    saved = tar(blobs__sha256__a=gzip.compress(lower), blobs__sha256__b=upper, manifest=b'{"layers": []}' * 50)
    found = list(layers.files(chunks(saved)))
    assert ("blobs/sha256/a", "etc/hosts") in found
    assert layers.private_keys(found) == ["etc/ssh/ssh_host_rsa_key in blobs/sha256/a"]


@pytest.mark.parametrize(
    ("path", "private"),
    [("etc/ssh/ssh_host_ed25519_key", True), ("etc/ssh/ssh_host_ed25519_key.pub", False), ("root/.ssh/id_rsa", True),
     ("root/.ssh/authorized_keys", False), ("usr/share/doc/id_rsa", False)],
)  # fmt: skip
def test_which_names_are_private(path: str, private: bool) -> None:
    assert bool(layers.private_keys([("layer", path)])) == private


def test_what_cannot_be_read_is_an_error_and_no_pass() -> None:
    with pytest.raises(ResultError, match="zstd"):
        list(layers.files(chunks(tar(blobs__a=b"\x28\xb5\x2f\xfd" + bytes(600)))))
    whole = tar(blobs__a=gzip.compress(tar(file=b"x" * 100_000)))
    with pytest.raises(ResultError, match="cannot be read"):
        list(layers.files(chunks(whole[: len(whole) // 20])))
