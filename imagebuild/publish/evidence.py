"""Read results of builds, verifications, scans and benchmarks, from files or attachments; find those of an image."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from pydantic import BaseModel

from imagebuild.core.debian import Package
from imagebuild.core.errors import ConfigError, ResultError
from imagebuild.core.fields import Model
from imagebuild.core.yaml import read_written
from imagebuild.oci.attestation import Attestation, encode_predicate, read_attestations
from imagebuild.oci.registry import Repository
from imagebuild.project.records import BuildResult, CheckResult, ScanResult, VerifyResult
from imagebuild.publish.provenance import Provenance
from imagebuild.publish.sbom import SpdxDocument
from imagebuild.report.document import Report

T_co = TypeVar("T_co", covariant=True)

PREDICATES: Mapping[str, type[BaseModel]] = {
    "sbom": SpdxDocument,
    "provenance": Provenance,
    "verification": VerifyResult,
    "benchmark": Report,
    "scan": ScanResult,
}
"""Kind of attachment → type of its predicate."""
REQUIRED_KEYS: Mapping[type[BaseModel], frozenset[str]] = {
    BuildResult: frozenset({"target", "digest", "platforms", "steps"}),
    VerifyResult: frozenset({"image", "digest", "platform", "checks"}),
    ScanResult: frozenset({"digest", "scanner", "findings", "verdict"}),
    Report: frozenset({"about", "runs", "sources"}),
    SpdxDocument: frozenset({"spdxVersion"}),
}
"""Type → keys by which a JSON file of this type is recognised."""


def read_predicate(attestation: Attestation) -> BaseModel | None:
    """Return what an attachment says, as a type of `PREDICATES`; None for other kinds.

    Raises ResultError for one that is damaged, about another image, or something else than its kind says. Anybody who
    may push can have written it.
    """
    if attestation.problem:
        raise ResultError(f"the {attestation.kind} {attestation.digest} {attestation.problem}")
    if attestation.kind not in PREDICATES:
        return None
    name = f"the {attestation.kind} {attestation.digest}"
    return read_written(PREDICATES[attestation.kind], attestation.content, name)


def attached_packages(place: Repository, digest: str) -> tuple[tuple[Package, ...], str]:
    """Return the distribution's packages by the SBOM that is attached to an image, and why there are none.

    Who signed it is not checked. Raises CommandError if the registry fails.
    """
    problem = "has no SBOM that can be read"
    for item in read_attestations(place, digest, "sbom"):
        try:
            document = read_predicate(item)
        except ResultError as error:  # anybody may have written it
            problem = str(error)
            continue
        if isinstance(document, SpdxDocument) and document.debian_packages:
            return document.debian_packages, ""
        problem = "its SBOM lists no package of the distribution"
    return (), problem


@dataclass(frozen=True)
class EvidenceFile(Generic[T_co]):
    """Hold the content of a file: the JSON as it is, and the result that it stands for."""

    path: Path
    document: Mapping[str, Any]
    value: T_co


@dataclass(frozen=True)
class Evidence:
    """Hold every result that was read, and find those of an image by its digest."""

    files: Sequence[EvidenceFile[BaseModel]] = ()
    ignored: Sequence[Path] = ()
    """JSON files that hold something else."""
    indexes: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """Entries of `manifests` for indexes that no build pushed."""

    @cached_property
    def builds(self) -> Sequence[EvidenceFile[BuildResult]]:
        """Return the results of builds."""
        return self.of_type(BuildResult)

    @cached_property
    def manifests(self) -> Mapping[tuple[str, str], str]:
        """Return (digest of an index, platform) → digest of the manifest in it."""
        manifests = dict(self.indexes)
        for build in self.builds:
            if build.value.digest:
                manifests |= {(build.value.digest, p): manifest for p, manifest in build.value.manifests.items()}
        return manifests

    @cached_property
    def _by_subject(self) -> Mapping[str, list[EvidenceFile[BaseModel]]]:
        by_subject = defaultdict(list)
        for file in self.files:
            for digest in self.subjects_of(file.value):
                by_subject[digest].append(file)
        return by_subject

    def subjects_of(self, result: BaseModel) -> Iterable[str]:
        """Return the manifests that a result is about.

        A verification of an index is about the manifests of the platforms that it names. A report counts if all of
        its verifications are about one manifest.
        """
        match result:
            case ScanResult():
                return (result.digest,)
            case SpdxDocument():
                return result.digests
            case Report():
                subjects = {digest for v in result.verifications for digest in self.subjects_of(v)}
                return subjects if len(subjects) == 1 and all(v.digest for v in result.verifications) else ()
            case VerifyResult(digest=str(digest)):
                members = [self.manifests.get((digest, p.strip())) for p in result.platform.split(",")]
                return tuple(dict.fromkeys(m for m in members if m)) or (digest,)
        return ()

    def about(self, kind: type[T_co], manifest: str) -> Sequence[EvidenceFile[T_co]]:
        """Return the results of a type that are about the manifest with this digest."""
        return replace(self, files=self._by_subject.get(manifest, ())).of_type(kind)

    def of_type(self, kind: type[T_co]) -> Sequence[EvidenceFile[T_co]]:
        """Return the results of a type."""
        return [cast(EvidenceFile[T_co], file) for file in self.files if isinstance(file.value, kind)]


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

    read, ignored = [], []
    for file in distinct.values():
        try:
            document = json.loads(file.read_bytes())
        except OSError as error:
            raise ResultError(f"{file}: cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise ResultError(
                f"{file}: not valid JSON: {error}; if it is cut off, get it again, or remove it"
            ) from None
        keys = document.keys() if isinstance(document, dict) else set()
        model = next((model for model, required in REQUIRED_KEYS.items() if required <= keys), None)
        value = read_written(model, document, str(file)) if model else None
        if value is None or (isinstance(value, SpdxDocument) and not value.digests):
            ignored.append(file)
        else:
            read.append(EvidenceFile(file, document, value))
    return Evidence(read, ignored)


# What is attached to an image


PRIVATE_FACTS = frozenset({"host"})
"""Facts about the place of a verification that are not published."""


@dataclass(frozen=True, order=True)
class NewAttachment:
    """Hold a predicate to attach to an image in a registry."""

    kind: str
    content: bytes
    created: str = ""


def attachments_of(digest: str, platform: str, evidence: Evidence) -> list[NewAttachment]:
    """Return everything to attach to an image, each file once.

    The same evidence gives the same bytes in the same order.
    """
    files = evidence.about(BaseModel, digest)
    return sorted({attachment_of(file.value, file.document, digest, platform) for file in files})


def attachment_of(value: BaseModel, document: object, digest: str, platform: str) -> NewAttachment:
    """Return what to attach of a file that was read: without private facts, and with its time."""
    content, created = encode_predicate(document), ""
    match value:
        case VerifyResult():
            content, created = _encode(without_private_facts(value, digest, platform)), value.started
        case Report():
            kept = tuple(without_private_facts(v, digest, platform) for v in value.verifications)
            public = value.without_hosts().model_copy(update={"verifications": kept})
            content, created = _encode(public), value.about.created
        case ScanResult():
            created = value.started
    kind = next(kind for kind, model in PREDICATES.items() if isinstance(value, model))
    return NewAttachment(kind, content, created)


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


def _encode(model: Model) -> bytes:
    return encode_predicate(model.model_dump(mode="json", exclude_defaults=True))
