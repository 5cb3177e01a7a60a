"""What an SBOM in SPDX says it is of. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
DISTRIBUTION = re.compile(r"pkg:deb/(?P<id>[a-z]+)/.*[?&]distro=(?P<distro>[^&#]+)")
RELEASES = {"12": "bookworm", "13": "trixie", "14": "forky"}
"""Release of Debian → its code name, which SBOMs leave out."""


@dataclass(frozen=True)
class About:
    """The image that an SBOM describes."""

    name: str
    digest: str | None
    platform: str | None
    distribution: str | None
    """`debian`, `ubuntu`, …; None if no package of dpkg says it."""
    suite: str | None
    """Code name of a release of Debian."""


def about(document: Mapping[str, Any]) -> About:
    """Read an SPDX document. Raises ValueError if it is none."""
    if "spdxVersion" not in document:
        raise ValueError("is no SPDX document: it has no spdxVersion")
    roots = set(document.get("documentDescribes") or ()) | {
        relation.get("relatedSpdxElement")
        for relation in document.get("relationships") or ()
        if relation.get("relationshipType") == "DESCRIBES"
    }
    packages = document.get("packages") or ()
    root: Mapping[str, Any] = next((package for package in packages if package.get("SPDXID") in roots), {})
    locators = list(_locators(root))
    texts = [root.get("versionInfo", ""), *locators, document.get("name", ""), root.get("name", "")]
    sums = [f"sha256:{s['checksumValue']}" for s in root.get("checksums") or () if s.get("algorithm") == "SHA256"]
    digests = [*sums, *(found[0] for text in texts if (found := DIGEST.search(unquote(str(text)))))]
    arch = next((found[1] for text in locators if (found := re.search(r"[?&]arch=([a-z0-9]+)", text))), None)
    every = (text for package in packages for text in _locators(package))
    system = next((found for text in every if (found := DISTRIBUTION.match(text))), None)
    distro = system["distro"].rpartition("-")[2] if system else ""
    return About(
        name=str(root.get("name") or document.get("name") or ""),
        digest=digests[0] if digests else None,
        platform=f"linux/{arch}" if arch else None,
        distribution=system["id"] if system else None,
        suite=RELEASES.get(distro.partition(".")[0], distro or None),
    )


def _locators(package: Mapping[str, Any]) -> Iterator[str]:
    return (
        str(reference.get("referenceLocator", ""))
        for reference in package.get("externalRefs") or ()
        if reference.get("referenceType") == "purl"
    )
