"""syft, which finds packages in images. Starts programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from imagebuild import programs
from imagebuild.errors import CommandError, ResultError

INSTALL = "install it with `pip install 'imagebuild[sbom]'`"
FORMAT = "spdx-json@2.3"
SETTINGS = {
    "SYFT_CHECK_FOR_APP_UPDATE": "false",
    # Files are left out of our documents, so their digests need not be computed.
    "SYFT_FILE_METADATA_SELECTION": "none",
}

Read = Callable[..., bytes]


def program() -> str | None:
    """Path of syft: beside the Python that runs this, as pip installs it, or on the path."""
    beside = Path(sys.executable).parent / "syft"
    return str(beside) if beside.is_file() else programs.which("syft")


def scan(layout: Path, folder: Path, read: Read = programs.read, found: str | None = None) -> dict[str, Any]:
    """The SPDX document that syft writes about the only image of an OCI layout; no network is used.

    `folder` is for files that syft needs. Raises CommandError if it is missing or fails, ResultError if what it writes
    is no document.
    """
    syft = found or program()
    if not syft:
        raise CommandError(f"`syft` is missing, which finds the packages in an image; {INSTALL}")
    # Settings that someone has in a home directory would change what is found.
    settings = folder / "syft.yaml"
    settings.touch()
    arguments = ("scan", "--quiet", "--config", str(settings), f"oci-dir:{layout}", "--output", FORMAT)
    output = read(syft, *arguments, env={**SETTINGS, "SYFT_CACHE_DIR": str(folder / "cache")})
    return _document(output)


def _document(output: bytes) -> dict[str, Any]:
    try:
        document = json.loads(output)
    except ValueError as error:
        raise ResultError(f"syft wrote what is not JSON: {error}") from None
    if not isinstance(document, Mapping) or document.get("spdxVersion") != "SPDX-2.3":
        raise ResultError("syft wrote what is no SPDX 2.3; another version of it is needed")
    return dict(document)
