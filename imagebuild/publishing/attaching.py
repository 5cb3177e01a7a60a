"""What is attached to the image of a platform, made of the evidence that names it. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from imagebuild.attachments import KINDS
from imagebuild.publishing import decide
from imagebuild.publishing.evidence import Evidence
from imagebuild.publishing.models import Attachment
from imagebuild.records import VerifyResult
from imagebuild.registry.base import File
from imagebuild.results.models import Results

CREATED = "org.opencontainers.image.created"
PRIVATE_FACTS = frozenset({"host"})
"""What a published verification does not tell about the place where it ran."""


@dataclass(frozen=True)
class Artefact:
    """Something that refers to an image."""

    kind: Attachment
    content: bytes
    annotations: Mapping[str, str] = field(default_factory=dict)

    @property
    def artifact_type(self) -> str:
        return KINDS[self.kind].artifact_type

    @property
    def files(self) -> tuple[File, ...]:
        return (File(KINDS[self.kind].file, KINDS[self.kind].media_type, self.content),)


def artefacts(digest: str, platform: str, evidence: Evidence) -> list[Artefact]:
    """What the evidence has about an image, each once. The same evidence gives the same bytes, in the same order."""
    found = [*_files(digest, evidence)]
    reports = evidence.reported(digest)
    for report in reports:
        kept = tuple(published(verification, digest, platform) for verification in report.value.verifications)
        content = _json(report.value.model_copy(update={"verifications": kept}))
        found.append(Artefact("benchmark", content, {CREATED: report.value.about.created}))
    for verification in evidence.verified(digest):
        result = verification.value
        when = {CREATED: result.started} if result.started else {}
        found.append(Artefact("verification", _json(published(result, digest, platform)), when))
        # A report has them too, and says more about them.
        if not reports and (benchmark := _benchmark(result)):
            found.append(Artefact("benchmark", _json(benchmark), when))
    unique = {(artefact.kind, artefact.content): artefact for artefact in found}
    return [unique[key] for key in sorted(unique)]


def published(result: VerifyResult, digest: str, platform: str) -> VerifyResult:
    """A verification as everybody may read it: what was found, without what it says about the machine's environment."""
    place = result.surroundings
    if place:
        facts = {name: value for name, value in place.facts.items() if name not in PRIVATE_FACTS}
        place = place.model_copy(update={"environment": {}, "reports": {}, "user": "", "facts": facts})
    own = decide.of_platform(result, platform)
    checks = tuple(check.model_copy(update={"environment": {}, "command": (), "log": None}) for check in own)
    told = {"digest": digest, "platform": platform, "surroundings": place, "checks": checks}
    return result.model_copy(update=told)


def _files(digest: str, evidence: Evidence) -> Iterator[Artefact]:
    for sbom in evidence.listed(digest):
        yield Artefact("sbom", sbom.content)
    for scan in evidence.scanned(digest):
        yield Artefact("scan", scan.content, {CREATED: scan.value.started} if scan.value.started else {})


def _benchmark(result: VerifyResult) -> Results | None:
    parts = [check.results for check in result.checks if check.results]
    if not parts:
        return None
    return Results(**{name: tuple(x for part in parts for x in getattr(part, name)) for name in Results.model_fields})


def _json(model: VerifyResult | Results) -> bytes:
    document = model.model_dump(mode="json", exclude_defaults=True)
    return (json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()
