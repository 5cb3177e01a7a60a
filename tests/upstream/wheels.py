"""The CUDA toolkit and NCCL's header, from wheels that are pinned in the project's lock."""

from __future__ import annotations

import json
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from imagebuild.core.run import run_program
from imagebuild.project.lockfile import pip_platforms

LOCK = Path(__file__).parents[2] / "imagebuild.lock"


def pins(component: str, version: str) -> list[dict[str, Any]]:
    """Return the lock's wheels for a component. Raises KeyError if the version is not in the lock."""
    found: list[dict[str, Any]] = json.loads(LOCK.read_text())["wheels"][f"{component} {version}"]
    return found


def take(component: str, version: str, path: str, target: Path) -> None:
    """Download a component's pinned wheels for amd64, and move the file or folder `path` in them to `target`."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        wanted = Path(folder, "requirements.txt")
        wheels = pins(component, version)
        wanted.write_text(
            "".join(f"{w['name']}=={w['version']} --hash=sha256:{w['sha256']['amd64']}\n" for w in wheels)
        )
        run_program(
            sys.executable, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--no-compile", "--no-deps",
            "--require-hashes", *pip_platforms("amd64"), "--target", f"{folder}/tree", "--requirement", str(wanted),
        )  # fmt: skip
        Path(folder, "tree", path).replace(target)


def make_wheel(folder: Path, name: str, version: str, tag: str, *needs: str) -> Path:
    """Write an empty wheel, which needs other packages, to a folder; return its path."""
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    path = folder / f"{stem}-py3-none-{tag}.whl"
    required = "".join(f"Requires-Dist: {need}\n" for need in needs)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{required}")
        archive.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-{tag}\n")
        archive.writestr(f"{info}/RECORD", "")
    return path
