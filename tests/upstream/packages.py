"""The signed apt repositories of the stand-in, at the paths of the vendor's repositories."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.conftest import ran
from tests.upstream.keys import Keys

EVIDENCE = Path(__file__).parent / "evidence" / "repositories.yaml"


@dataclass(frozen=True)
class Repository:
    """A flat repository: the set of its packages, the key that signs it, and the key files in its folder."""

    of: str
    path: str
    """The URL without the scheme: host and path."""
    key: str
    files: dict[str, str]
    seen: str


REPOSITORIES = tuple(Repository(**row) for row in yaml.safe_load(EVIDENCE.read_text())["repositories"])
NVIDIA_UBUNTU = next(r.path for r in REPOSITORIES if "2404" in r.path)
DOCA_FOLDERS = tuple(r.path for r in REPOSITORIES if r.of == "doca")


def publish(built: Path, folder: Path, keys: Keys) -> None:
    """Write all repositories and key files to `folder/<host>/<path>`. Repositories share hard-linked packages."""
    for repository in REPOSITORIES:
        source, target = built / repository.of, folder / repository.path
        shutil.copytree(source, target, copy_function=os.link)
        for name, content in keys.sign((source / "Release").read_bytes(), repository.key).items():
            (target / name).write_bytes(content)
        for name, key in repository.files.items():
            shutil.copy(keys.public / key, target / name)


def package_with(files: dict[str, bytes], name: str = "test") -> bytes:
    """Build a Debian package with these files; return its content."""
    control = f"Package: {name}\nVersion: 1\nArchitecture: all\nMaintainer: x\nDescription: for a test\n"
    with tempfile.TemporaryDirectory() as folder:
        for path, data in {"DEBIAN/control": control.encode(), **files}.items():
            file = Path(folder, "tree", path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        ran("dpkg-deb", "--root-owner-group", "--build", f"{folder}/tree", f"{folder}/package", check=True)
        return Path(folder, "package").read_bytes()
