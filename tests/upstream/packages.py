"""The apt repositories: what was compiled, under the addresses of the vendor, signed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests.upstream.keys import CUDA, DOCA, Keys

NVIDIA, MELLANOX = "developer.download.nvidia.com", "linux.mellanox.com"
NVIDIA_FOLDERS = tuple(f"{NVIDIA}/compute/cuda/repos/ubuntu{v}/x86_64" for v in ("2204", "2404", "2604"))
NVIDIA_UBUNTU = NVIDIA_FOLDERS[1]
DOCA_FOLDER = f"{MELLANOX}/public/repo/doca"
DOCA_FOLDERS = tuple(f"{DOCA_FOLDER}/3.5.0/ubuntu{v}/x86_64" for v in ("22.04", "24.04", "26.04"))


def publish(built: Path, folder: Path, keys: Keys) -> None:
    """Fill `folder` with `<host>/<path>` of every repository and of the keys."""
    for source, targets, key in (("cuda", NVIDIA_FOLDERS, CUDA), ("doca", DOCA_FOLDERS, DOCA)):
        signatures = keys.sign((built / source / "Release").read_bytes(), key)
        for target in targets:
            shutil.copytree(built / source, folder / target, copy_function=_link)
            for name, content in signatures.items():
                (folder / target / name).write_bytes(content)
    for target in NVIDIA_FOLDERS:
        shutil.copy(keys.public / f"{CUDA}.asc", folder / target / "3bf863cc.pub")
    shutil.copy(keys.public / f"{DOCA}.asc", folder / DOCA_FOLDER / "GPG-KEY-Mellanox.pub")
    for target in DOCA_FOLDERS:
        shutil.copy(keys.public / f"{DOCA}.gpg", folder / target / "doca_keyring.gpg")
        shutil.copy(keys.public / f"{DOCA}.asc", folder / target / "GPG-KEY-Mellanox.pub")


def _link(source: str, target: str) -> None:
    """The packages of all systems are the same ones."""
    os.link(source, target)
