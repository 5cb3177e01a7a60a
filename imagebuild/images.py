"""Images of registries, copied into an OCI layout with their digests as they are."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path

from imagebuild import oci, programs
from imagebuild.apt import Run
from imagebuild.errors import CommandError, ResultError
from imagebuild.mirrors import normalized

LOOPBACK = ("localhost", "127.")


def pull(reference: str, layout: Path, run: Run = programs.run) -> str:
    """Copy `image:tag@digest`, all its platforms, from its registry with skopeo; returns the digest.

    Passwords are those of `docker login` and `skopeo login`. Raises CommandError if skopeo is missing or fails.
    """
    if not programs.which("skopeo"):
        raise CommandError("`skopeo` is missing, which copies images of registries; install the package skopeo")
    name, _, digest = normalized(reference).partition("@")
    last = name.rpartition("/")[2]
    name = name.removesuffix(":" + last.partition(":")[2]) if ":" in last else name  # it takes a tag or a digest
    insecure = ["--src-tls-verify=false"] if name.startswith(LOOPBACK) else []
    with tempfile.TemporaryDirectory(prefix="imagebuild-") as folder:
        # A folder keeps every byte; skopeo's own OCI layouts have manifests of OCI's types only.
        options = ("--all", "--preserve-digests", *insecure)
        run("skopeo", "copy", "--quiet", *options, f"docker://{name}@{digest}", f"dir:{folder}")
        adopt(Path(folder), layout)
    if absent := list(oci.missing(layout, digest)):
        raise ResultError(f"{reference}: skopeo did not copy {', '.join(absent)}")
    return digest


def adopt(folder: Path, layout: Path) -> None:
    """Move what skopeo's `dir:` has, manifests and blobs, into a layout."""
    start(layout)
    for path in folder.iterdir():
        if path.name.endswith("manifest.json"):
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
        elif path.name == "version" or "." in path.name or path.name.startswith("signature"):
            continue
        else:
            digest = path.name
        shutil.move(path, oci.blob_path(layout, f"sha256:{digest}"))


def copy(source: Path, digest: str, layout: Path) -> None:
    """Copy an image or an index from one layout to another."""
    start(layout)
    for found, _ in oci.closure(source, digest):
        path = oci.blob_path(layout, found)
        if not path.exists():
            shutil.copyfile(oci.blob_path(source, found), path)


def start(layout: Path) -> None:
    """Make an empty layout, if there is none. Its index stays empty: BuildKit is given digests."""
    (layout / "blobs" / "sha256").mkdir(parents=True, exist_ok=True)
    if not (layout / "oci-layout").exists():
        (layout / "index.json").write_text(json.dumps(oci.index_json([])))
        (layout / "oci-layout").write_text(json.dumps({"imageLayoutVersion": "1.0.0"}))


def check(layout: Path, digest: str) -> None:
    """Raise ResultError if anything that an image names is missing or has changed."""
    for found, size in oci.closure(layout, digest):
        path = oci.blob_path(layout, found)
        if not path.is_file() or size not in (None, path.stat().st_size):
            raise ResultError(f"{path}: is missing or cut off; make the bundle again")
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != path.name:
                raise ResultError(f"{path}: has changed; make the bundle again")
