"""The apt repositories: what was compiled, under the addresses of the vendor, signed."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.upstream.keys import Keys

EVIDENCE = Path(__file__).parent / "evidence" / "repositories.yaml"


@dataclass(frozen=True)
class Repository:
    """A flat repository: which packages it has, the key that signs it, and keys that lie beside its index."""

    of: str
    path: str
    """Of its address, with the host."""
    key: str
    files: dict[str, str]
    seen: str


REPOSITORIES = tuple(Repository(**row) for row in yaml.safe_load(EVIDENCE.read_text())["repositories"])
NVIDIA_UBUNTU = next(r.path for r in REPOSITORIES if "2404" in r.path)
DOCA_FOLDERS = tuple(r.path for r in REPOSITORIES if r.of == "doca")


def publish(built: Path, folder: Path, keys: Keys) -> None:
    """Fill `folder` with `<host>/<path>` of every repository and of the keys; the packages of all are the same ones."""
    for repository in REPOSITORIES:
        source, target = built / repository.of, folder / repository.path
        shutil.copytree(source, target, copy_function=os.link)
        for name, content in keys.sign((source / "Release").read_bytes(), repository.key).items():
            (target / name).write_bytes(content)
        for name, key in repository.files.items():
            shutil.copy(keys.public / key, target / name)


def package_with(files: dict[str, bytes]) -> bytes:
    """A Debian package with these files."""

    def packed(entries: dict[str, bytes]) -> bytes:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:xz") as archive:
            for name, data in entries.items():
                entry = tarfile.TarInfo(f"./{name}")
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
        return buffer.getvalue()

    members = {"debian-binary": b"2.0\n", "control.tar.xz": packed({"control": b""}), "data.tar.xz": packed(files)}
    result = b"!<arch>\n"
    for name, data in members.items():
        head = f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(data):<10}`\n"
        result += head.encode() + data + b"\n" * (len(data) % 2)
    return result
