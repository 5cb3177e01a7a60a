"""Find what builds, verifications, scans and benchmarks left in folders, and which digests it is about."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from imagebuild.core.errors import ConfigError, ResultError
from imagebuild.core.fields import Model, Platform
from imagebuild.project.records import BuildResult, ScanResult, VerifyResult
from imagebuild.publish import sbom
from imagebuild.report.document import Report

T_co = TypeVar("T_co", covariant=True)
SHAPES: Mapping[type[Model], frozenset[str]] = {
    BuildResult: frozenset({"target", "digest", "platforms", "steps"}),
    VerifyResult: frozenset({"image", "digest", "platform", "checks"}),
    ScanResult: frozenset({"digest", "scanner", "findings", "verdict"}),
    Report: frozenset({"about", "runs", "sources"}),
}
"""Type → keys by which a file of it is recognised."""


@dataclass(frozen=True)
class EvidenceFile(Generic[T_co]):
    """Something that was read, and where."""

    path: Path
    content: bytes
    value: T_co


@dataclass(frozen=True)
class SbomFile:
    """An SPDX document."""

    digests: frozenset[str]
    """Of the images that it is about."""


@dataclass(frozen=True)
class Evidence:
    """Everything that was found."""

    builds: Sequence[EvidenceFile[BuildResult]] = ()
    verifications: Sequence[EvidenceFile[VerifyResult]] = ()
    scans: Sequence[EvidenceFile[ScanResult]] = ()
    reports: Sequence[EvidenceFile[Report]] = ()
    sboms: Sequence[EvidenceFile[SbomFile]] = ()
    ignored: Sequence[Path] = field(default=())
    """JSON files that are something else."""
    indexes: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """What `manifests` has, of indexes that no build made."""

    @cached_property
    def manifests(self) -> Mapping[tuple[str, str], str]:
        """Digest of an index, platform → digest of the manifest in it, as the builds say."""
        found = dict(self.indexes)
        for build in self.builds:
            if build.value.digest:
                found |= {(build.value.digest, p): manifest for p, manifest in build.value.manifests.items()}
        return found

    @cached_property
    def _verified(self) -> Mapping[str, list[EvidenceFile[VerifyResult]]]:
        by_digest: dict[str, list[EvidenceFile[VerifyResult]]] = defaultdict(list)
        for found in self.verifications:
            for digest in self.digests_of(found.value):
                by_digest[digest].append(found)
        return by_digest

    def digests_of(self, result: VerifyResult) -> tuple[str, ...]:
        """The manifests that a verification is about: of an index, those of the platforms that it names."""
        if not result.digest:
            return ()
        members = [self.manifests.get((result.digest, p.strip())) for p in result.platform.split(",")]
        return tuple(dict.fromkeys(m for m in members if m)) or (result.digest,)

    def built(self, target: str, platform: Platform) -> list[EvidenceFile[BuildResult]]:
        """The builds of a target that have the platform, also those that pushed nothing."""
        return [b for b in self.builds if b.value.target == target and platform in b.value.platforms]

    def verified(self, manifest: str) -> Sequence[EvidenceFile[VerifyResult]]:
        """The verifications of a manifest."""
        return self._verified.get(manifest, ())

    def scanned(self, manifest: str) -> list[EvidenceFile[ScanResult]]:
        return [s for s in self.scans if s.value.digest == manifest]

    def listed(self, manifest: str) -> list[EvidenceFile[SbomFile]]:
        """The SBOMs of a manifest."""
        return [s for s in self.sboms if manifest in s.value.digests]

    def reported(self, manifest: str) -> list[EvidenceFile[Report]]:
        """Reports about this manifest and nothing else."""
        return [
            report
            for report in self.reports
            if (about := [self.digests_of(v) for v in report.value.verifications])
            and all(digests == (manifest,) for digests in about)
        ]


def gather(folders: Iterable[Path]) -> Evidence:
    """Read all JSON files of folders, or files that are named.

    Raises ConfigError if a place does not exist, ResultError for a file that is no JSON, or ours and not complete:
    what is in it might be that a check failed.
    """
    found: dict[type[object], list[EvidenceFile[Any]]] = defaultdict(list)
    ignored = []
    for path in _files(folders):
        content, document = _read(path)
        value = _recognised(path, document)
        if value is None:
            ignored.append(path)
        else:
            found[type(value)].append(EvidenceFile(path, content, value))
    return Evidence(
        builds=found[BuildResult], verifications=found[VerifyResult], scans=found[ScanResult], reports=found[Report],
        sboms=found[SbomFile], ignored=ignored,
    )  # fmt: skip


def _files(folders: Iterable[Path]) -> list[Path]:
    result: dict[Path, Path] = {}
    for folder in folders:
        if not folder.exists():
            raise ConfigError(
                f"--results {folder}: no such folder; name those where build and verify left their results"
            )
        inside = sorted(folder.rglob("*.json")) if folder.is_dir() else [folder]
        for path in inside:
            hidden = folder.is_dir() and any(part.startswith(".") for part in path.relative_to(folder).parts)
            if not hidden and path.is_file():
                result.setdefault(path.resolve(), path)
    return list(result.values())


def _read(path: Path) -> tuple[bytes, Any]:
    try:
        content = path.read_bytes()
        return content, json.loads(content)
    except OSError as error:
        raise ResultError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ResultError(f"{path}: is no JSON: {error}; is it cut off? Get it again, or remove it") from None


def _recognised(path: Path, document: Any) -> Model | SbomFile | None:
    if not isinstance(document, dict):
        return None
    if "spdxVersion" in document:
        return _sbom(document)
    for model, keys in SHAPES.items():
        if keys <= document.keys():
            try:
                return model.model_validate(document)
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(map(str, first["loc"]))
                what = f"{path}: {where}: {first['msg']}"
                raise ResultError(f"{what}; was it written by another version of imagebuild?") from None
    return None


def _sbom(document: dict[str, Any]) -> SbomFile | None:
    """None for one that names no image, as of packages alone."""
    try:
        digests = sbom.digests(document)
    except (LookupError, TypeError, AttributeError):
        return None
    return SbomFile(digests) if digests else None
