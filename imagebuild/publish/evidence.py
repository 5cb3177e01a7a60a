"""Read results of builds, verifications, scans and benchmarks, from files or attachments; say whose each is."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from pydantic import BaseModel

from imagebuild.bench.verification import VerifyResult
from imagebuild.core import files
from imagebuild.core.debian import Package
from imagebuild.core.errors import ConfigError, ResultError
from imagebuild.core.fields import Model
from imagebuild.core.yaml import read_written
from imagebuild.oci.attestation import Attestation, encode_predicate, read_attestations
from imagebuild.oci.registry import Repository
from imagebuild.project.records import BuildResult, ScanResult
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
"""Kind of attachment → what it says."""
FILES: Mapping[type[BaseModel], frozenset[str]] = {
    BuildResult: frozenset({"target", "digest", "platforms", "steps"}),
    SpdxDocument: frozenset({"spdxVersion"}),
    VerifyResult: frozenset({"image", "digest", "platform", "checks"}),
    Report: frozenset({"about", "runs", "sources"}),
    ScanResult: frozenset({"digest", "scanner", "findings", "verdict"}),
}
"""What a JSON file may be → keys by which it is recognised. Provenance is made from the result of the build."""


def read_attached(
    place: Repository, digest: str, kind: str | None = None
) -> Iterator[tuple[Attestation, BaseModel | None, str]]:
    """Yield what is attached to an image, the newest first, as a type of `PREDICATES`, None for other kinds.

    With each comes what is wrong with it: it is damaged, about another image, or something else than its kind says.
    Who signed it is not checked; anybody who may push can have written it. Raises CommandError if the registry fails.
    """
    for item in read_attestations(place, digest, kind):
        name, model, value, problem = f"the {item.kind} {item.digest}", PREDICATES.get(item.kind), None, item.problem
        try:
            value = read_written(model, item.content, name) if model and not problem else None
        except ResultError as error:
            problem = str(error).removeprefix(f"{name}: ")
        yield item, value, problem


def attached_packages(place: Repository, digest: str) -> tuple[Package, ...]:
    """Return the distribution's packages by the newest SBOM of an image that can be read and lists any; else none."""
    for _, document, _ in read_attached(place, digest, "sbom"):
        if isinstance(document, SpdxDocument) and document.debian_packages:
            return document.debian_packages
    return ()


# Whose result it is


UNNAMED = "an image without a digest"


def mismatch(value: BaseModel, digest: str, platform: str, indexes: Collection[str]) -> str:
    """Return what a result is about instead of the image of a platform; empty if it is about that image.

    Of a result that names no digest, or an index which lists the image, the platform decides.
    """
    digests, platforms = about(value)
    if others := digests - {digest, *(indexes if platforms else ())}:
        return f"is about another image: {', '.join(sorted(others))}"
    if len(platforms) > 1 or (platforms - {platform} and digest not in digests):
        return f"is about {', '.join(sorted(platforms))}"
    return ""


def about(value: BaseModel) -> tuple[frozenset[str], frozenset[str]]:
    """Return the digests and the platforms that a result names; provenance and some reports name no digest."""
    match value:
        case ScanResult():
            return frozenset({value.digest}), frozenset({value.platform})
        case SpdxDocument():
            return value.digests or frozenset({UNNAMED}), frozenset()
        case Provenance():
            return frozenset(), frozenset({value.platform} if value.platform else ())
        case VerifyResult() | Report():
            results = [value] if isinstance(value, VerifyResult) else value.verifications
            platforms = {platform.strip() for result in results for platform in result.platform.split(",")}
            return frozenset(result.digest or UNNAMED for result in results), frozenset(platforms)
    return frozenset(), frozenset()


@dataclass(frozen=True)
class EvidenceFile(Generic[T_co]):
    """Hold the content of a file: the JSON as it is, and the result that it stands for."""

    path: Path
    document: Mapping[str, Any]
    value: T_co


@dataclass(frozen=True)
class Evidence:
    """Hold every result that was read."""

    files: Sequence[EvidenceFile[BaseModel]] = ()
    unused: Sequence[str] = ()
    """Files of results that are of no image in particular, and why."""

    def of_image(self, digest: str, platform: str, indexes: Collection[str]) -> Evidence:
        """Return the results about the image of a platform, which these indexes list."""
        files = [file for file in self.files if about(file.value)[0] & {digest, *indexes}]
        return Evidence([file for file in files if not mismatch(file.value, digest, platform, indexes)])

    def of_type(self, kind: type[T_co]) -> Sequence[EvidenceFile[T_co]]:
        return [cast(EvidenceFile[T_co], file) for file in self.files if isinstance(file.value, kind)]


def read_evidence(paths: Iterable[Path]) -> Evidence:
    """Read these JSON files, and all JSON files of these folders that are not hidden.

    Raises ConfigError if a path does not exist or cannot be read. Raises ResultError for a file that is not JSON, and
    for a result of imagebuild that is not complete: what it lacks might say that a check failed.
    """
    distinct: dict[Path, Path] = {}
    for path in paths:
        if not path.exists():
            raise ConfigError(f"{path}: no such folder; name folders with results of build, verify or scan")
        for file in sorted(path.rglob("*.json")) if path.is_dir() else [path]:
            if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts):
                distinct.setdefault(file.resolve(), file)

    read, unused = [], []
    for file in distinct.values():
        try:
            document = json.loads(files.read_text(file))
        except (ValueError, RecursionError) as error:
            why = f"not valid JSON: {error}; if it is cut off, get it again, or remove it"
            raise ResultError(f"{file}: {why}") from None
        keys = document.keys() if isinstance(document, dict) else set()
        model = next((model for model, wanted in FILES.items() if wanted <= keys), None)
        if model is None:
            continue
        value = read_written(model, document, str(file))
        read.append(EvidenceFile(file, document, value))
        digests, platforms = about(value)
        if len(platforms) > 1:
            unused.append(f"{file}: is about {', '.join(sorted(platforms))}; verify each platform alone")
        elif UNNAMED in digests or not (digests or model is BuildResult):
            unused.append(f"{file}: names no digest; verify the image as NAME@DIGEST")
    return Evidence(read, unused)


# What is attached to an image


@dataclass(frozen=True, order=True)
class NewAttachment:
    """Hold a predicate to attach to an image in a registry."""

    kind: str
    content: bytes
    created: str = ""


def attachment_of(value: BaseModel, document: object, digest: str, platform: str) -> NewAttachment:
    """Return what to attach of a file that was read: without private facts, and with its time."""
    created = ""
    match value:
        case VerifyResult():
            document, created = _plain(without_private_facts(value, digest, platform)), value.started
        case Report():
            kept = tuple(without_private_facts(v, digest, platform) for v in value.verifications)
            public = value.without_hosts().model_copy(update={"verifications": kept})
            document, created = _plain(public), value.about.created
        case ScanResult():
            created = value.started
    kind = next(kind for kind, model in PREDICATES.items() if isinstance(value, model))
    return NewAttachment(kind, encode_predicate(document), created)


def _plain(model: Model) -> dict[str, Any]:
    return model.model_dump(mode="json", exclude_defaults=True)


def without_private_facts(result: VerifyResult, digest: str, platform: str) -> VerifyResult:
    """Return a verification of a platform's image that anybody may read: without host, user, environment and logs."""
    if place := result.surroundings:
        facts = {name: value for name, value in place.facts.items() if name != "host"}
        place = place.model_copy(update={"environment": {}, "reports": {}, "user": "", "facts": facts})
    private: dict[str, object] = {"environment": {}, "command": (), "log": None}
    checks = tuple(
        check.model_copy(update=private | {"results": check.results and check.results.without_hosts()})
        for check in result.checks
    )
    return result.model_copy(update={"digest": digest, "platform": platform, "surroundings": place, "checks": checks})
