"""Read the results of builds, verifications, scans and benchmarks; find those of an image, and what to attach to it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from imagebuild.bench.models import Results
from imagebuild.core.errors import ConfigError, ResultError
from imagebuild.core.fields import Model, Platform
from imagebuild.oci.attestation import encode_predicate
from imagebuild.project.matrix import Attachment
from imagebuild.project.records import BuildResult, CheckResult, ScanResult, VerifyResult
from imagebuild.publish import sbom
from imagebuild.report.document import Report

T_co = TypeVar("T_co", covariant=True)
REQUIRED_KEYS: Mapping[type[Model], frozenset[str]] = {
    BuildResult: frozenset({"target", "digest", "platforms", "steps"}),
    VerifyResult: frozenset({"image", "digest", "platform", "checks"}),
    ScanResult: frozenset({"digest", "scanner", "findings", "verdict"}),
    Report: frozenset({"about", "runs", "sources"}),
}
"""Type → keys by which a JSON file of this type is recognised."""


@dataclass(frozen=True)
class EvidenceFile(Generic[T_co]):
    """Hold the content of a file, as bytes and parsed."""

    path: Path
    content: bytes
    value: T_co


@dataclass(frozen=True)
class SbomFile:
    """Name the images that an SPDX document describes."""

    digests: frozenset[str]


@dataclass(frozen=True)
class Evidence:
    """Hold every result that was read, and find those of an image by its digest."""

    builds: Sequence[EvidenceFile[BuildResult]] = ()
    verifications: Sequence[EvidenceFile[VerifyResult]] = ()
    scans: Sequence[EvidenceFile[ScanResult]] = ()
    reports: Sequence[EvidenceFile[Report]] = ()
    sboms: Sequence[EvidenceFile[SbomFile]] = ()
    ignored: Sequence[Path] = field(default=())
    """JSON files that hold something else."""
    indexes: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """Entries of `manifests` for indexes that no build pushed."""

    @cached_property
    def manifests(self) -> Mapping[tuple[str, str], str]:
        """Return (digest of an index, platform) → digest of the manifest in it."""
        manifests = dict(self.indexes)
        for build in self.builds:
            if build.value.digest:
                manifests |= {(build.value.digest, p): manifest for p, manifest in build.value.manifests.items()}
        return manifests

    @cached_property
    def _by_subject(self) -> Mapping[tuple[type[object], str], list[EvidenceFile[Any]]]:
        """Return type and manifest → the files of the type that are about the manifest."""
        by_subject: dict[tuple[type[object], str], list[EvidenceFile[Any]]] = defaultdict(list)
        for file in (*self.verifications, *self.scans, *self.reports, *self.sboms):
            for digest in self.subjects_of(file.value):
                by_subject[type(file.value), digest].append(file)
        return by_subject

    def subjects_of(self, result: object) -> Iterable[str]:
        """Return the manifests that a result is about.

        Of a verification of an index, they are those of the platforms that it names. A report counts if all of its
        verifications are about one.
        """
        if isinstance(result, ScanResult):
            return (result.digest,)
        if isinstance(result, SbomFile):
            return result.digests
        if isinstance(result, Report):
            about = {digest for verification in result.verifications for digest in self.subjects_of(verification)}
            return about if len(about) == 1 and all(v.digest for v in result.verifications) else ()
        if not isinstance(result, VerifyResult) or not result.digest:
            return ()
        members = [self.manifests.get((result.digest, p.strip())) for p in result.platform.split(",")]
        return tuple(dict.fromkeys(m for m in members if m)) or (result.digest,)

    def about(self, kind: type[T_co], manifest: str) -> Sequence[EvidenceFile[T_co]]:
        """Return the results of a type that are about the manifest with this digest."""
        return self._by_subject.get((kind, manifest), ())

    def builds_of(self, target: str, platform: Platform) -> list[EvidenceFile[BuildResult]]:
        """Return the builds of a target for a platform, including those that pushed nothing."""
        return [b for b in self.builds if b.value.target == target and platform in b.value.platforms]


def read_evidence(paths: Iterable[Path]) -> Evidence:
    """Read these JSON files, and all JSON files of these folders that are not hidden.

    Raises ConfigError if a path does not exist. Raises ResultError for a file that is not JSON, and for a result of
    imagebuild that is not complete: what it lacks might say that a check failed.
    """
    distinct: dict[Path, Path] = {}
    for path in paths:
        if not path.exists():
            raise ConfigError(f"--results {path}: no such folder; name the folders with results of build and verify")
        for file in sorted(path.rglob("*.json")) if path.is_dir() else [path]:
            hidden = path.is_dir() and any(part.startswith(".") for part in file.relative_to(path).parts)
            if not hidden and file.is_file():
                distinct.setdefault(file.resolve(), file)

    by_type: dict[type[object], list[EvidenceFile[Any]]] = defaultdict(list)
    ignored = []
    for file in distinct.values():
        try:
            content = file.read_bytes()
            document = json.loads(content)
        except OSError as error:
            raise ResultError(f"{file}: cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise ResultError(
                f"{file}: not valid JSON: {error}; if it is cut off, get it again, or remove it"
            ) from None
        value = _parse(file, document)
        if value is None:
            ignored.append(file)
        else:
            by_type[type(value)].append(EvidenceFile(file, content, value))
    return Evidence(
        builds=by_type[BuildResult], verifications=by_type[VerifyResult], scans=by_type[ScanResult],
        reports=by_type[Report], sboms=by_type[SbomFile], ignored=ignored,
    )  # fmt: skip


def _parse(file: Path, document: Any) -> Model | SbomFile | None:
    """Return the result in a document, None if it is something else or an SBOM that names no image."""
    if not isinstance(document, dict):
        return None
    if "spdxVersion" in document:
        try:
            digests = sbom.image_digests(document)
        except (LookupError, TypeError, AttributeError):
            return None
        return SbomFile(digests) if digests else None
    for model, keys in REQUIRED_KEYS.items():
        if keys <= document.keys():
            try:
                return model.model_validate(document)
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(map(str, first["loc"]))
                problem = f"{file}: {where}: {first['msg']}"
                raise ResultError(f"{problem}; was it written by another version of imagebuild?") from None
    return None


# What is attached to an image


PRIVATE_FACTS = frozenset({"host"})
"""Facts about the place of a verification that are not published."""


@dataclass(frozen=True)
class NewAttachment:
    """Hold a predicate to attach to an image in a registry."""

    kind: Attachment
    content: bytes
    created: str = ""


def attachments_of(digest: str, platform: str, evidence: Evidence) -> list[NewAttachment]:
    """Return everything to attach to an image, each file once.

    The same evidence gives the same bytes in the same order.
    """
    attachments = [NewAttachment("sbom", _canonical(file)) for file in evidence.about(SbomFile, digest)]
    attachments += [NewAttachment("scan", _canonical(s), s.value.started) for s in evidence.about(ScanResult, digest)]
    reports = evidence.about(Report, digest)
    for report in reports:
        kept = tuple(without_private_facts(v, digest, platform) for v in report.value.verifications)
        content = _encode(report.value.without_hosts().model_copy(update={"verifications": kept}))
        attachments.append(NewAttachment("benchmark", content, report.value.about.created))
    for verification in evidence.about(VerifyResult, digest):
        result = verification.value
        content = _encode(without_private_facts(result, digest, platform))
        attachments.append(NewAttachment("verification", content, result.started or ""))
        parts = [check.results.without_hosts() for check in result.checks if check.results]
        if parts and not reports:  # a report has these results too, and more
            merged = {name: tuple(x for part in parts for x in getattr(part, name)) for name in Results.model_fields}
            attachments.append(NewAttachment("benchmark", _encode(Results(**merged)), result.started or ""))
    unique = {(attachment.kind, attachment.content): attachment for attachment in attachments}
    return [unique[key] for key in sorted(unique)]


def without_private_facts(result: VerifyResult, digest: str, platform: str) -> VerifyResult:
    """Return a verification of one platform that anybody may read: without host, user, environment and logs."""
    place = result.surroundings
    if place:
        facts = {name: value for name, value in place.facts.items() if name not in PRIVATE_FACTS}
        place = place.model_copy(update={"environment": {}, "reports": {}, "user": "", "facts": facts})
    private: dict[str, object] = {"environment": {}, "command": (), "log": None}
    checks = tuple(
        check.model_copy(update=private | {"results": check.results and check.results.without_hosts()})
        for check in checks_on_platform(result, platform)
    )
    return result.model_copy(update={"digest": digest, "platform": platform, "surroundings": place, "checks": checks})


def checks_on_platform(result: VerifyResult, platform: str) -> Iterator[CheckResult]:
    """Yield the checks of a verification that are about a platform.

    In a verification of several platforms, the name of a check ends with its platform. A check whose name does not is
    left out if it passed, but counts for every platform if it failed.
    """
    several = "," in result.platform
    for check in result.checks:
        name, _, suffix = check.check.partition(" ")
        if (not several and (not suffix or suffix == platform)) or (several and suffix == platform):
            yield check.model_copy(update={"check": name})
        elif several and not suffix and check.outcome == "failed":
            yield check


def _canonical(file: EvidenceFile[Any]) -> bytes:
    return encode_predicate(json.loads(file.content))


def _encode(model: VerifyResult | Results) -> bytes:
    return encode_predicate(model.model_dump(mode="json", exclude_defaults=True))
