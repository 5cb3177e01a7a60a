"""What files that refer to an image say. Pure.

The registry may hold files of other programs and of other versions of imagebuild, so fields are asked for, never
required to be alone. What cannot be read raises ResultError, and is told, never guessed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from imagebuild.attachments import KINDS
from imagebuild.catalog import curves
from imagebuild.catalog.models import Checks, Curve, Sbom, Scan
from imagebuild.errors import ResultError
from imagebuild.judgement import Judgement
from imagebuild.profiles import Profile
from imagebuild.records import ScanResult, VerifyResult
from imagebuild.report.document import Report
from imagebuild.results.models import Results

SIGNATURES = ("application/vnd.dev.cosign.", "application/vnd.dev.sigstore.", "application/vnd.cncf.notary.")
"""Beginnings of the types of signatures."""


@dataclass(frozen=True)
class Said:
    """What one file says."""

    sbom: Sbom | None = None
    scan: Scan | None = None
    checks: Checks | None = None
    curves: tuple[Curve, ...] = ()


def kind_of(artifact_type: str | None) -> str:
    """Name of the kind of an attachment, `signature`, or the type itself."""
    known = {kind.artifact_type: name for name, kind in KINDS.items()}
    if (artifact_type or "").startswith(SIGNATURES):
        return "signature"
    return known.get(artifact_type or "", artifact_type or "unknown")


def read(kind: str, digest: str, content: bytes, profiles: Mapping[str, Profile]) -> Said:
    """What a file of that kind says; nothing for kinds that are only listed. Raises ResultError."""
    reader = _READERS.get(kind)
    if reader is None:
        return Said()
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        raise ResultError(f"the {kind} {digest} is no JSON") from None
    if not isinstance(document, dict):
        raise ResultError(f"the {kind} {digest} is no JSON object")
    try:
        return reader(digest, document, profiles)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ResultError(
            f"the {kind} {digest}: {where}: {first['msg']}; was it written by another version of imagebuild?"
        ) from None


def _sbom(digest: str, document: Mapping[str, Any], _: Mapping[str, Profile]) -> Said:
    packages = document.get("packages")
    if not isinstance(packages, list):
        raise ResultError(f"the sbom {digest} has no list of packages; only SPDX as JSON is read")
    # The image itself is in the list, as what the document describes.
    described = {r.get("relatedSpdxElement") for r in document.get("relationships") or () if _describes(r)}
    described |= set(document.get("documentDescribes") or ())
    return Said(sbom=Sbom(evidence=digest, packages=sum(p.get("SPDXID") not in described for p in packages)))


def _describes(relationship: Mapping[str, Any]) -> bool:
    return relationship.get("relationshipType") == "DESCRIBES"


def _scan(digest: str, document: Mapping[str, Any], _: Mapping[str, Profile]) -> Said:
    scan = ScanResult.model_validate(document)
    return Said(
        scan=Scan(
            evidence=digest,
            verdict=scan.verdict,
            reason=scan.reason,
            counts=dict(Counter(finding.severity for finding in scan.findings)),
            waived=sum(finding.waived is not None for finding in scan.findings),
            scanner=scan.scanner,
            database=scan.database,
            started=scan.started,
        )
    )


def _verification(digest: str, document: Mapping[str, Any], profiles: Mapping[str, Profile]) -> Said:
    result = VerifyResult.model_validate(document)
    counts = Counter(check.outcome for check in result.checks)
    place = result.surroundings
    parts = [check.results for check in result.checks if check.results]
    judged = by_source(one for check in result.checks for one in check.judgements)
    drawn = curves.of_results(digest, parts, judged, profiles)
    return Said(
        checks=Checks(
            evidence=digest,
            passed=counts["passed"],
            failed=counts["failed"],
            skipped=counts["skipped"],
            started=result.started,
            runner=place.runner if place else "",
            gpus=place.gpus if place else 0,
            nodes=place.nodes if place else 1,
            device=next((curve.device for curve in drawn if curve.device), ""),
            failures=tuple(f"{c.component}/{c.check}" for c in result.checks if c.outcome == "failed"),
            version=result.version,
        ),
        curves=drawn,
    )


def _benchmark(digest: str, document: Mapping[str, Any], profiles: Mapping[str, Profile]) -> Said:
    if {"image", "platform", "checks"} <= document.keys():
        return Said(curves=_verification(digest, document, profiles).curves)
    if "about" not in document:
        return Said(curves=curves.of_results(digest, [Results.model_validate(document)], {}, profiles))
    report = Report.model_validate(document)
    judged = by_source(report.judgements)
    return Said(curves=curves.of_results(digest, [report], judged, profiles, report.about.profile))


def by_source(judgements: Iterable[Judgement]) -> Mapping[str, tuple[Judgement, ...]]:
    """Source → what is said about what it printed."""
    found: dict[str, tuple[Judgement, ...]] = {}
    for judgement in judgements:
        found[judgement.source] = (*found.get(judgement.source, ()), judgement)
    return found


_READERS: Mapping[str, Callable[[str, Mapping[str, Any], Mapping[str, Profile]], Said]] = {
    "sbom": _sbom,
    "scan": _scan,
    "verification": _verification,
    "benchmark": _benchmark,
}

READ = frozenset(_READERS)
"""Kinds whose files are read."""


def file_of(kind: str) -> str:
    """Name of the file of a kind."""
    return KINDS[kind].file
