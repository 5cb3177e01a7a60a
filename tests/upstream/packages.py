"""The apt repositories: what was compiled, under the addresses of the vendor, signed."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.upstream.keys import Keys

EVIDENCE = Path(__file__).parent / "evidence" / "repositories.yaml"
NVIDIA, MELLANOX = "developer.download.nvidia.com", "linux.mellanox.com"


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
    """Fill `folder` with `<host>/<path>` of every repository and of the keys."""
    for repository in REPOSITORIES:
        of = f"{repository.of}-arm64" if "arm64" in repository.path else repository.of
        source, target = built / of, folder / repository.path
        shutil.copytree(source, target, copy_function=_link)
        for name, content in keys.sign((source / "Release").read_bytes(), repository.key).items():
            (target / name).write_bytes(content)
        for name, key in repository.files.items():
            shutil.copy(keys.public / key, target / name)


def _link(source: str, target: str) -> None:
    """The packages of all systems are the same ones."""
    os.link(source, target)
