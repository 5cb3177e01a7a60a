"""Sources that imagebuild fetched itself, as images for BuildKit's named contexts.

BuildKit takes folders as contexts too, but it compares them differently from what ADD makes, and leaves out what a
.dockerignore in them says. An image of one layer is compared like ADD's result: steps that use it stay cached.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from imagebuild import oci, rootfs
from imagebuild.files import write_text

ADDED_FILE = 0o600
"""What BuildKit's ADD gives a file that it downloaded."""


@dataclass(frozen=True)
class Trees:
    """A folder of trees, each under a key that says what it holds."""

    folder: Path

    @property
    def layout(self) -> Path:
        return self.folder / "layout"

    def find(self, key: str) -> str | None:
        """The context of a tree, if it is here."""
        try:
            digest: str = json.loads(self._record(key).read_text())["digest"]
        except (OSError, ValueError, LookupError):
            return None
        return f"oci-layout://{self.layout}@{digest}" if oci.has_image(self.layout, digest) else None

    def add_file(self, key: str, name: str, path: Path) -> str:
        """A tree of one file, as ADD makes it; returns its context."""
        with tempfile.TemporaryDirectory(prefix="imagebuild-", dir=self._made()) as scratch:
            tar = Path(scratch) / "tar"
            with tarfile.open(tar, "w") as archive:
                archive.addfile(_root())
                about = archive.gettarinfo(path, name)
                about.mode = ADDED_FILE
                with path.open("rb") as file:
                    archive.addfile(_plain(about), file)
            return self._add(key, tar)

    def add_folder(self, key: str, folder: Path) -> str:
        """The files of a folder; returns their context."""

        def usual(about: tarfile.TarInfo) -> tarfile.TarInfo:
            # As git checks out with the usual umask, whatever the one here is.
            if not about.issym():
                about.mode = 0o755 if about.isdir() or about.mode & 0o100 else 0o644
            return _plain(about)

        with tempfile.TemporaryDirectory(prefix="imagebuild-", dir=self._made()) as scratch:
            tar = Path(scratch) / "tar"
            with tarfile.open(tar, "w") as archive:
                archive.add(folder, "./", filter=usual)
            return self._add(key, tar)

    def _made(self) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder

    def _add(self, key: str, tar: Path) -> str:
        digest = oci.add_tree(self.layout, tar, tuple(rootfs.ARCHITECTURES), oci.Settings(rootfs.CREATED))
        write_text(self._record(key), json.dumps({"key": key, "digest": digest}))
        return f"oci-layout://{self.layout}@{digest}"

    def _record(self, key: str) -> Path:
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _root() -> tarfile.TarInfo:
    root = tarfile.TarInfo("./")
    root.type, root.mode = tarfile.DIRTYPE, 0o755
    return _plain(root)


def _plain(about: tarfile.TarInfo) -> tarfile.TarInfo:
    about.uid = about.gid = 0
    about.uname = about.gname = ""
    about.mtime = int(rootfs.EPOCH)
    return about
