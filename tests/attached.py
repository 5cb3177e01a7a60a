"""Documents for the images of tests: SBOMs, verifications, scans and provenance."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from imagebuild.oci.attestation import KINDS, STATEMENT_MEDIA, encode_predicate
from imagebuild.oci.layout import Attachment, Descriptor
from imagebuild.oci.registry import Registry
from imagebuild.publish.attest import attach as attach_predicate
from imagebuild.publish.evidence import NewAttachment
from imagebuild.publish.signatures import Signer

RECENT = (datetime.now(UTC) - timedelta(days=1)).isoformat(timespec="seconds")
"""Time of scans. A scan that is too old does not count."""


def attach(
    registry: Registry, repository: str, subject: Descriptor, kind: str, content: object, signer: Signer | None = None
) -> str:
    """Attach a document as an in-toto statement. Bytes are attached unchanged instead."""
    if not isinstance(content, bytes):
        new = NewAttachment(kind, encode_predicate(content))
        return attach_predicate(registry.at(repository), subject, new, signer)
    notes = {"in-toto.io/predicate-type": KINDS[kind]}
    return registry.at(repository).attach(subject, Attachment(f"{kind}.intoto.json", STATEMENT_MEDIA, content, notes))


def spdx(digest: str = f"sha256:{'d' * 64}", **versions: str) -> dict[str, Any]:
    """Return an SPDX SBOM for an image with these Debian packages. Versions are written as in package URLs."""

    def package(name: str, url: str, **more: Any) -> dict[str, Any]:
        purl = {"referenceType": "purl", "referenceLocator": url}
        return {"SPDXID": f"SPDXRef-{name}", "name": name, "externalRefs": [purl], **more}

    checksum = {"algorithm": "SHA256", "checksumValue": digest.removeprefix("sha256:")}
    described = {"spdxElementId": "SPDXRef-DOCUMENT", "relationshipType": "DESCRIBES"}
    described |= {"relatedSpdxElement": "SPDXRef-Image"}
    versions = versions or {"libssl3t64": "3.5.7-1~deb13u3", "libucx0": "1.18.1%2Bds-2"}
    return {
        "spdxVersion": "SPDX-2.3",
        "packages": [
            package("Image", f"pkg:oci/image@{digest}?arch=amd64&tag=1", checksums=[checksum]),
            *(
                package(name, f"pkg:deb/debian/{name}@{version}?arch=amd64&distro=debian-13&upstream=src-{name}%401.0")
                for name, version in versions.items()
            ),
        ],
        "relationships": [described],
    }


def verification(digest: str, platform: str = "linux/amd64", outcome: str = "passed", **more: Any) -> dict[str, Any]:
    """Return a verification result with a check of this outcome and a skipped check."""
    checks = [
        {"component": "ucx", "check": "version", "outcome": outcome},
        {"component": "ucx", "check": "gpu", "outcome": "skipped"},
    ]
    return {"image": "open", "digest": digest, "target": "x", "platform": platform, "checks": checks, **more}


def scan(digest: str, verdict: str = "passed", platform: str = "linux/amd64", **more: Any) -> dict[str, Any]:
    return {
        "image": "open", "digest": digest, "platform": platform, "scanner": "grype 0.1", "database": "of today",
        "started": RECENT, "findings": [], "verdict": verdict, "reason": "CVE-1 is critical", **more,
    }  # fmt: skip


def provenance(platform: str = "linux/amd64", *dependencies: dict[str, Any]) -> dict[str, Any]:
    sources = [{"name": "project", "digest": {"gitCommit": "c" * 40}}, *dependencies]
    build = {"externalParameters": {"platform": platform}, "resolvedDependencies": sources}
    return {"buildDefinition": build, "runDetails": {"builder": {"id": "urn:imagebuild:builder:test"}}}
