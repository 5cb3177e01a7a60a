"""Attach predicates to images of tests, and what is none."""

from __future__ import annotations

from typing import Any

from imagebuild.oci import KINDS, STATEMENT_MEDIA, Attachment, Descriptor, Registry, encode_predicate
from imagebuild.publish import attach as attach_predicate


def attach(registry: Registry, repository: str, subject: Descriptor, kind: str, content: object) -> str:
    """Attach a document, nobody's signature on it; bytes are attached in place of a statement."""
    if not isinstance(content, bytes):
        return attach_predicate(registry.at(repository), subject, kind, encode_predicate(content))
    notes = {"in-toto.io/predicate-type": KINDS[kind]}
    return registry.at(repository).attach(subject, Attachment(f"{kind}.intoto.json", STATEMENT_MEDIA, content, notes))


def spdx(digest: str = f"sha256:{'d' * 64}", **versions: str) -> dict[str, Any]:
    """An SBOM in SPDX of an image with these packages of Debian; versions are as in package URLs."""

    def package(name: str, url: str, **more: Any) -> dict[str, Any]:
        purl = {"referenceType": "purl", "referenceLocator": url}
        return {"SPDXID": f"SPDXRef-{name}", "name": name, "externalRefs": [purl], **more}

    checksum = {"algorithm": "SHA256", "checksumValue": digest.removeprefix("sha256:")}
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
        "relationships": [
            {
                "spdxElementId": "SPDXRef-DOCUMENT",
                "relationshipType": "DESCRIBES",
                "relatedSpdxElement": "SPDXRef-Image",
            }
        ],
    }
