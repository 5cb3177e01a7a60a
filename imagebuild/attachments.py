"""What publishing attaches to the manifest of a platform: kinds of files, and how registries call them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """A kind of attachment."""

    artifact_type: str
    media_type: str
    file: str
    """Name of the file in the artefact, and where steps of CI leave it: `<file>` or `*.<file>`."""


KINDS = {
    "sbom": Kind("application/spdx+json", "application/spdx+json", "sbom.spdx.json"),
    "provenance": Kind("application/vnd.in-toto+json", "application/vnd.in-toto+json", "provenance.json"),
    "verification": Kind(
        "application/vnd.imagebuild.verification.v1+json",
        "application/vnd.imagebuild.verification.v1+json",
        "verify.json",
    ),
    "benchmark": Kind(
        "application/vnd.imagebuild.benchmark.v1+json",
        "application/vnd.imagebuild.benchmark.v1+json",
        "benchmark.json",
    ),
    "scan": Kind("application/vnd.imagebuild.scan.v1+json", "application/vnd.imagebuild.scan.v1+json", "scan.json"),
}
"""Name → kind."""
