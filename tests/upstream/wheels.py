"""The CUDA toolkit and NCCL's header, from the wheels that the project's lock pins."""

from __future__ import annotations

import json
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

from imagebuild.core import run_program
from imagebuild.render import pip_platforms

LOCK = Path(__file__).parents[2] / "imagebuild.lock"


def pins(component: str, version: str) -> list[dict[str, Any]]:
    """What the lock says about a component; `KeyError` if it knows no such version."""
    found: list[dict[str, Any]] = json.loads(LOCK.read_text())["wheels"][f"{component} {version}"]
    return found


def unpack(wheels: list[dict[str, Any]], folder: Path) -> None:
    """Download the wheels for amd64, verify them and unpack them. Raises CommandError if pip fails."""
    lines = [f"{w['name']}=={w['version']} --hash=sha256:{w['sha256']['amd64']}\n" for w in wheels]
    wanted = folder / "requirements.txt"
    wanted.write_text("".join(lines))
    run_program(
        sys.executable, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--no-compile", "--no-deps",
        "--require-hashes", *pip_platforms("amd64"), "--target", str(folder / "tree"),
        "--requirement", str(wanted),
    )  # fmt: skip


def toolkit(version: str, folder: Path) -> None:
    """Fill `folder` with the tree of the CUDA toolkit `version` (`13.0`): bin, include, lib, nvvm."""
    unpack(pins("cuda", version), folder)
    (folder / "tree" / "nvidia" / f"cu{version.partition('.')[0]}").replace(folder / "cuda")
    shutil.rmtree(folder / "tree")


def nccl_header(folder: Path) -> None:
    """Fill `folder` with nccl.h alone: the library is large, and its place is taken by a stand-in."""
    unpack(pins("nccl-wheel", "2.32.3"), folder)
    (folder / "tree" / "nvidia" / "nccl" / "include" / "nccl.h").replace(folder / "nccl.h")
    shutil.rmtree(folder / "tree")


def make_wheel(folder: Path, name: str, version: str, tag: str) -> Path:
    """Write a wheel without content to a folder; return it."""
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    path = folder / f"{stem}-py3-none-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-{tag}\n")
        archive.writestr(f"{info}/RECORD", "")
    return path
