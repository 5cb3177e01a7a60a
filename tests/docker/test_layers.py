"""Layers are read as containerd unpacks them: handmade layers with every feature of tar, and random layers."""

from __future__ import annotations

import ctypes
import os
import random
import stat
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from imagebuild.core.errors import ResultError
from imagebuild.core.run import which
from tests.handmade import CASES, handmade, layers_of, line, random_members, tree_of
from tests.unit.image_files import Layout

pytestmark = pytest.mark.docker
LIBC = ctypes.CDLL(None, use_errno=True)
READ_ONLY, DETACH = 1, 2
KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "symlink", stat.S_IFIFO: "fifo"}
MARK = ".number-"
"""Prefix of the only file in the lowest layer of an image, so that the folders of the image's layers can be found."""


@contextmanager
def mounted(kind: str, folder: Path, options: str = "", flags: int = 0) -> Iterator[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    if LIBC.mount(kind.encode(), bytes(folder), kind.encode(), flags, options.encode()):
        raise OSError(ctypes.get_errno(), f"cannot mount {kind} with {options!r}")
    try:
        yield folder
    finally:
        LIBC.umount2(bytes(folder), DETACH)


@dataclass(frozen=True)
class Containerd:
    """A containerd whose data are below a folder."""

    folder: Path

    def unpack(self, images: Sequence[Sequence[bytes]]) -> tuple[str, list[list[Path]]]:
        """Import images, which unpacks them until one is refused.
        Return the error, empty if there is none, and the folders of the layers of each unpacked image."""
        layout, earlier = Layout(self.folder / f"images-{time.monotonic_ns()}"), set(self._snapshots())
        for number, layers in enumerate(images):
            found = layout.image([handmade([{"n": f"{MARK}{number}", "c": str(layout.root)}]), *layers])
            found["annotations"] = {"io.containerd.image.name": f"imagebuild.test/{layout.root.name}:{number}"}
        layout.write()
        archive = layout.root.with_suffix(".tar")
        subprocess.run(["tar", "-cf", archive, "-C", layout.root, "."], check=True)
        arguments = ("images", "import", "--local", "--snapshotter", "overlayfs", archive)
        done = subprocess.run(
            ["ctr", "--address", self.folder / "socket", *arguments], capture_output=True, text=True, check=False
        )
        groups: list[list[Path]] = []
        for _, path in sorted(item for item in self._snapshots().items() if item[0] not in earlier):
            if any(path.glob(f"{MARK}*")):
                groups.append([])
            if groups:  # containerd may already have removed the lowest layer of a refused image
                groups[-1].append(path)
        whole = [group for group, layers in zip(groups, images, strict=False) if len(group) == 1 + len(layers)]
        return done.stderr if done.returncode else "", whole

    def _snapshots(self) -> dict[int, Path]:
        folder = self.folder / "root/io.containerd.snapshotter.v1.overlayfs/snapshots"
        return {int(path.name): path / "fs" for path in folder.iterdir()} if folder.exists() else {}

    def tree(self, layers: Sequence[Path]) -> list[str]:
        """Return the lines of the tree that a container sees."""
        lower = ":".join(map(str, reversed(layers)))
        with mounted("overlay", self.folder / "merged", f"lowerdir={lower}", READ_ONLY) as root:
            return sorted(shown for path in root.rglob("*") if (shown := describe(path, root)))


def describe(path: Path, root: Path) -> str:
    """Return the line of a file. Empty if the file is not of a tested layer."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return ""  # overlayfs lists whiteouts in a folder that only one layer contains
    if path.name.startswith(MARK):
        return ""
    kind, content = KINDS.get(stat.S_IFMT(status.st_mode), "device"), ""
    if kind == "file" and status.st_size:
        content = sha256(path.read_bytes()).hexdigest()
    elif kind == "symlink":
        content = os.readlink(path)  # noqa: PTH115  # a Path would lack a slash at the end
    elif kind == "device":
        type_ = "c" if stat.S_ISCHR(status.st_mode) else "b"
        content = f"{type_} {os.major(status.st_rdev)} {os.minor(status.st_rdev)}"
    capable = "security.capability" in os.listxattr(path, follow_symlinks=False)
    owner, name = (status.st_uid, status.st_gid), str(path.relative_to(root))
    return line(name, kind, stat.S_IMODE(status.st_mode), owner, content, capable=capable)


@pytest.fixture(scope="module")
def containerd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containerd]:
    if os.geteuid() or not (which("containerd") and which("ctr")):
        pytest.skip("needs root, and the programs containerd and ctr")
    with mounted("tmpfs", tmp_path_factory.mktemp("containerd")) as folder:
        (folder / "config.toml").write_text(
            f'version = 2\nroot = "{folder}/root"\nstate = "{folder}/state"\n'
            f'disabled_plugins = ["io.containerd.grpc.v1.cri"]\n[grpc]\naddress = "{folder}/socket"\n'
        )
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(["containerd", "--config", folder / "config.toml"], stdout=log, stderr=log)
        try:
            for _ in range(300):
                if (folder / "socket").exists():
                    break
                time.sleep(0.1)
            yield Containerd(folder)
        finally:
            process.terminate()
            process.wait(30)


def test_handmade_layers_are_in_the_table_as_containerd_unpacks_them(containerd: Containerd) -> None:
    accepted = [case for case in CASES if "tree" in case]
    assert len(CASES) >= 60
    error, unpacked = containerd.unpack([layers_of(case) for case in accepted])
    assert not error
    for case, layers in zip(accepted, unpacked, strict=True):
        assert containerd.tree(layers) == case["tree"], case["name"]


@pytest.mark.parametrize("case", [case for case in CASES if "refused" in case], ids=lambda case: case["name"])
def test_containerd_refuses_what_imagebuild_refuses(containerd: Containerd, case: Mapping[str, Any]) -> None:
    error, _ = containerd.unpack([layers_of(case)])
    assert bool(error) == (case.get("engine") != "unpacks")


def test_random_layers(containerd: Containerd, tmp_path: Path) -> None:
    chance = random.Random(30)
    images, refused = list[tuple[Any, list[bytes], list[str]]](), []
    while sum(len(layers) for _, layers, _ in images) < 500:
        members = [random_members(chance) for _ in range(chance.randint(1, 3))]
        layers = layers_of({"layers": members})
        try:
            images.append((members, layers, tree_of(layers, tmp_path)))
        except ResultError:
            refused.append(layers)
    error, unpacked = containerd.unpack([layers for _, layers, _ in images])
    assert not error
    for (members, _, tree), folders in zip(images, unpacked, strict=True):
        assert containerd.tree(folders) == tree, members
    assert all(containerd.unpack([layers])[0] for layers in refused[:20])
