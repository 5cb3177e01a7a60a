"""What an earlier catalogue has read already. Digests name the same for ever, so it need not be read again. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from imagebuild.catalog import evidence
from imagebuild.catalog.evidence import Said
from imagebuild.catalog.models import Catalog, Evidence, PublishedPlatform


@dataclass(frozen=True)
class Known:
    """What need not be read."""

    platforms: Mapping[str, PublishedPlatform] = field(default_factory=dict)
    """Digest of a manifest → what it is. What refers to it may have changed."""
    evidence: Mapping[str, tuple[Evidence, Said]] = field(default_factory=dict)
    """Digest of what refers to a manifest → what it says."""
    copies: Mapping[str, str] = field(default_factory=dict)


def known(catalog: Catalog, copies: Mapping[str, str], copied_bytes: int) -> Known:
    """All that an earlier catalogue tells whole; files up to `copied_bytes` must be among the copies."""
    platforms = [platform for image in catalog.images for platform in image.platforms]
    found = {}
    for platform in platforms:
        for entry in platform.evidence:
            said = _said(platform, entry.digest)
            lost = entry.file not in copies if entry.file else entry.size_bytes <= copied_bytes
            # A file may have been outdone by another one; then only the file itself tells what it says.
            if entry.kind not in evidence.READ or (said != Said() and not lost):
                found[entry.digest] = (entry, said)
    return Known({platform.digest: platform for platform in platforms}, found, copies)


def _said(platform: PublishedPlatform, digest: str) -> Said:
    sbom, scan = platform.sbom, platform.scan
    return Said(
        sbom=sbom if sbom and sbom.evidence == digest else None,
        scan=scan if scan and scan.evidence == digest else None,
        checks=next((checks for checks in platform.checks if checks.evidence == digest), None),
        curves=tuple(curve for curve in platform.curves if curve.evidence == digest),
    )
